"""CPU of slime's rollout manager by part, in seconds per million response tokens.

    python scripts/fetch_vocabularies.py
    PYTHONPATH=. python scripts/benchmarks/manager_cost.py [--tokens 8192] [--repeats 3] [--held 64] [--no-freeze] [--quick]

Student Qwen, teacher Llama 3 (real vocabularies, English text); lists of K = 8 that share 80 %. The code under measurement is
the package's own: writer, client, panel and rows. In place of the network stands a session that answers as SGLang does; what
making its answers costs is not counted. Processor time of this thread, the minimum over the repetitions. `--held` answers with
lists are kept meanwhile, as a rollout keeps its finished samples, so that the cyclic collector has something to search; before
the first one the process does what the hooks do when they connect (`--no-freeze`: what a process does by itself).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks.alignment import aligner_for, english, ids_of
from vocabularies import load

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.distill import candidates, panel, teacher
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.distill.teacher import Scoring, Teacher
from slime_tandem.engines import handoff_wire
from slime_tandem.engines.client import EngineClient
from slime_tandem.protocol import GenerateRequest
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions
from slime_tandem.slime_hooks import wire
from slime_tandem.training.rows import build_rows
from slime_tandem.types import Message, Prompt, SampleKey, ScoredSample, TandemSample

K, SHARED, PROMPT = 8, 0.8, 128


class Clock:
    """Processor time by part; a part within another is its own, not the outer one's."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = time.thread_time()

    @contextmanager
    def part(self, name: str) -> Any:
        self._settle()
        self._stack.append(name)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def wrap(self, owner: Any, name: str, part: Callable[..., str]) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part(*args)):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)

    def _settle(self) -> None:
        now = time.thread_time()
        if self._stack:
            self.spent[self._stack[-1]] += now - self._since
        self._since = now


CLOCK = Clock()
KIND = ["none"]  # of the request under way


class Session:
    """Stands for aiohttp's: answers /generate as SGLang does, at no cost that is counted."""

    def __init__(self, vocabulary: int, fused: tuple[list[int], list[int]], lists: list[list[int]]) -> None:
        self.vocabulary, self.fused, self.lists = vocabulary, fused, lists
        self.random = np.random.default_rng(0)

    def request(self, method: str, url: str, *, data: bytes, **_: Any) -> Any:
        with CLOCK.part("(answering)"):
            body = json.loads(data)
            KIND[0] = kind_of(body)
            answers = [self._answer(body, i) for i in range(len(body["rid"]))]
            raw = json.dumps(answers, separators=(",", ":")).encode()
        return Answer(raw)

    def _values(self, *shape: int) -> list[Any]:
        return (-self.random.exponential(1.0, shape)).astype(np.float32).astype(float).tolist()  # type: ignore[no-any-return]

    def _answer(self, body: dict[str, Any], i: int) -> dict[str, Any]:
        rid, ids, params = body["rid"][i], body["input_ids"][i], body["sampling_params"][i]
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": {"type": "length", "length": params["max_new_tokens"]}, "prompt_tokens": len(ids),
            "weight_version": "1", "cached_tokens": 0, "completion_tokens": params["max_new_tokens"], "e2e_latency": 1.0,
        }  # fmt: skip
        out: list[int] = []
        if params["max_new_tokens"]:
            out, authors = self.fused
            values = self._values(len(out))
            meta["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, out, strict=True)]
            meta[handoff_wire.REPORT] = [[a, v, v] for a, v in zip(authors, values, strict=True)]
        if (first := body["logprob_start_len"][i]) >= 0:
            read = ids[first:]
            n = len(read)
            meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(self._values(n), read, strict=True)]
            meta["input_token_logprobs"][0][0] = None
            meta["output_token_logprobs"] = []
            if body["top_logprobs_num"][i]:
                # The last positions are the response's; the one before them is there, too.
                near = [None, *self.lists[-(n - 1) :]]
                values = np.sort(np.array(self._values(n, K)))[:, ::-1].tolist()
                meta["input_top_logprobs"] = [
                    None if row is None else [[v, t, None] for v, t in zip(vs, row, strict=True)]
                    for row, vs in zip(near, values, strict=True)
                ]
            if wanted := (body.get("token_ids_logprob") or [()] * len(body["rid"]))[i]:
                values = self._values(n, len(wanted))
                meta["input_token_ids_logprobs"] = [
                    None if j == 0 else [[v, t, None] for v, t in zip(vs, wanted, strict=True)]
                    for j, vs in enumerate(values)
                ]
        return {"text": "", "output_ids": out, "meta_info": meta}


class Answer:
    def __init__(self, raw: bytes) -> None:
        self.status, self.raw = 200, raw

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> bytes:
        return self.raw


def kind_of(body: dict[str, Any]) -> str:
    if body["sampling_params"][0]["max_new_tokens"]:
        return "fused answer"
    if body["top_logprobs_num"][0]:
        return "top-K lists"
    return "exact values" if body.get("token_ids_logprob") else "plain score"


class Timed:
    """An engine whose request's own handling is a part of its own."""

    def __init__(self, inner: EngineClient) -> None:
        self.inner = inner

    async def generate(self, requests: Sequence[GenerateRequest]) -> Any:
        r = requests[0]
        kind = kind_of(
            {"sampling_params": [{"max_new_tokens": r.max_new_tokens}], "top_logprobs_num": [r.top_logprobs_num]}
            | ({"token_ids_logprob": [r.token_ids_logprob]} if r.token_ids_logprob else {})
        )
        with CLOCK.part(f"{kind}: encode"):
            return await self.inner.generate(requests)


def wrap_parts() -> None:
    CLOCK.wrap(EngineClient, "_parse", lambda *_: f"{KIND[0]}: decode")
    CLOCK.wrap(EngineClient, "_result", lambda *_: f"{KIND[0]}: result")
    for module in (panel, teacher):
        CLOCK.wrap(module, "top_of", lambda *_: "top-K lists: top_of")
    CLOCK.wrap(candidates, "_answers", lambda *_: "exact values: answers")
    CLOCK.wrap(teacher, "missing_on", lambda *_: "missing_on")
    for name in ("gather_lists", "gather_candidates"):
        CLOCK.wrap(teacher, name, lambda *_: "gather")


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class Sample(SimpleNamespace):
    Status = Status


_LOOP = asyncio.new_event_loop()


def run(work: Any) -> Any:
    """The result of a coroutine. `asyncio.run` would, at its end, write its result out as text (Python 3.11: `getsignal`)."""
    return _LOOP.run_until_complete(work)


def written(options: WriterOptions, engine: Timed, prompt: Prompt, index: int) -> TandemSample:
    """A fused response, as `drive` asks for it."""
    with CLOCK.part("writer: rest"):
        writer = TandemWriter(SampleKey(0, 0, index), 0, prompt, list(range(100, 100 + PROMPT)), options)
        while not writer.done:
            _, request = writer.next_request()
            (result,) = run(engine.generate([request]))
            with CLOCK.part("writer: accept"):
                writer.accept(result)
        with CLOCK.part("writer: sample"):
            return writer.sample()


def record(sample: TandemSample, prompt: Prompt) -> None:
    """A response into slime's sample and, as in a rollout, three times out of it."""
    with CLOCK.part("records: put, three times response_of"):
        into = Sample(
            index=0, group_index=0, prompt=[m.as_dict() for m in prompt.messages], metadata={}, label="7", tokens=[],
            response="", response_length=0, status=None, reward=1.0, weight_versions=[], rollout_log_probs=None, loss_mask=None,
        )  # fmt: skip
        wire.put_response(into, sample, junior_weight=0.0)
        for _ in range(3):
            wire.response_of(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--held", type=int, default=16, help="answers with lists that are kept meanwhile")
    parser.add_argument("--no-freeze", action="store_true", help="the collector as a process has it by itself")
    parser.add_argument("--quick", action="store_true", help="no exact values (the longest part)")
    args = parser.parse_args()
    student, other = load("qwen"), load("llama3")
    text = english() * 2
    ids = ids_of(student, text[: args.tokens * 6])[: args.tokens]
    aligner = aligner_for(student, other)
    same = candidates.SameTokens(aligner)
    prompt = Prompt("p", (Message("user", "why?"),), "7", "t")
    rule = HandoffRule.of("word", 0.5, 32, 16, boundary_ids("word", student.tokens.table, student.tokens.special))
    key = SampleKey(0, 0, 0)
    authors = list(rule.authorship(key, ids))
    options = WriterOptions(rule, SamplingConfig(max_new_tokens=args.tokens), student.tokens, True, fused=True)
    rng = random.Random(0)
    both = np.flatnonzero(same.teacher_of >= 0).tolist()
    s_lists = [rng.sample(both, K) for _ in ids]

    def engine(vocabulary: int, lists: list[list[int]]) -> Timed:
        made = EngineClient("http://engine")
        made._session = Session(vocabulary, (ids, authors), lists)  # type: ignore[assignment]
        return Timed(made)

    senior = engine(len(student.tokens.table), s_lists)
    blank = Teacher(senior, aligner, lambda _: list(range(PROMPT)), other.encode)  # type: ignore[arg-type]
    wrap_parts()
    sample = written(options, senior, prompt, 0)
    told = blank.conversation(sample)[1]
    index = aligner.align(told).teacher_index
    t_lists = [rng.sample(range(100_000), K) for _ in told.ids]
    listed = {t for row in s_lists for t in row}
    own = [i for i in both if i not in listed]
    for i in np.flatnonzero(index >= 0).tolist():
        shared = [int(same.teacher_of[t]) for t in s_lists[i] if rng.random() < SHARED]
        rest = [t for t in (int(same.teacher_of[x]) for x in rng.sample(own, K)) if t not in shared]
        t_lists[int(index[i])] = [*shared, *rest][:K]
    of_teacher = engine(len(other.tokens.table), t_lists)
    scorer = Teacher(of_teacher, aligner, lambda _: list(range(PROMPT)), other.encode, max_batch=128)  # type: ignore[arg-type]
    config = RunConfig.model_validate({"opd": {"enabled": True}})
    best: dict[str, float] = {}
    if not args.no_freeze:
        from slime_tandem.slime_hooks import runtime

        getattr(runtime, "settle_collector", lambda: None)()
    held: list[Any] = []
    for repeat in range(args.repeats + 1):
        CLOCK.spent.clear()
        sample = written(options, senior, prompt, 0)
        record(sample, prompt)
        with CLOCK.part("plain score: plan, align"):
            (plain,) = run(TeacherPanel([scorer]).score([sample]))
        scored = ScoredSample(sample, 1.0, plain)  # type: ignore[arg-type]
        with CLOCK.part("rows"):
            build_rows([scored], config)
        if not args.quick:
            with CLOCK.part("exact values: windows, rest"):
                (full,) = run(TeacherPanel([scorer], Scoring(lists=K)).score([sample], senior))  # type: ignore[arg-type]
            assert full.lists is not None, full  # type: ignore[union-attr]
            held.append(full)
        for name, seconds in CLOCK.spent.items():
            if repeat and not name.startswith("("):
                best[name] = min(best.get(name, 1e9), seconds)
        held += [run(panel.student_candidates(senior, [sample], K)) for _ in range(args.held if not repeat else 0)]
    pauses = [timed_collection() for _ in range(3)]
    print(f"| part | CPU s per million response tokens, {args.tokens} each |\n|---|---|")
    groups: dict[str, float] = defaultdict(float)
    for name in sorted(best):
        per = best[name] / len(ids) * 1e6
        groups[name.split(":")[0]] += per
        print(f"| {name} | {per:.2f} |")
    for name, per in sorted(groups.items()):
        print(f"| **{name}** | {per:.1f} |")
    print(f"| **all** | {sum(groups.values()):.1f} |")
    print(
        f"One full collection with {args.held} answers held: {min(pauses) * 1e3:.0f} ms; python {sys.version.split()[0]}"
    )


def timed_collection() -> float:
    start = time.thread_time()
    gc.collect()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
