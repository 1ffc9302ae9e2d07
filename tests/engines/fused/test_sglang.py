"""Real SGLang with two models inside, token by token against transformers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused.junior import FusedJunior
from slime_tandem.engines.fused.launch import FusedServer, Sglang
from slime_tandem.errors import EngineRejectedError, EngineUnavailableError
from slime_tandem.protocol import GenerateRequest
from slime_tandem.rollout.drive import write_lockstep, write_one
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.rollout.writer import TandemWriter, WriterOptions, handoff_of
from slime_tandem.strategies import STRATEGIES
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import JUNIOR, SENIOR, Message, Prompt, SampleKey, TandemSample

from ...waiting import PATIENCE_S
from .conftest import BOUNDS

PROMPT = Prompt("p", (), None, "t")
only = pytest.mark.parametrize
Prompts = Callable[[int, int, int], list[tuple[int, ...]]]


def make_rule(strategy: str, tables: dict[str, frozenset[int]], prob: float = 0.5) -> HandoffRule:
    return HandoffRule.of(strategy, prob, 6, 3, tables.get(strategy, frozenset()))


def make_writer(
    rule: HandoffRule, tokens: TokenBytes, prompt: Sequence[int], i: int, cap: int = 40, **kwargs: Any
) -> TandemWriter:
    more = {"score_junior": kwargs.get("temperature", 1.0) == 1.0}
    more |= {k: kwargs.pop(k) for k in ("tokens_per_request", "score_junior") if k in kwargs}
    sampling = SamplingConfig(max_new_tokens=cap, **kwargs)
    # No end of turn but the length: the longer the response, the more there is to compare.
    endless = TokenBytes(tokens.table, tokens.special, frozenset())
    options = WriterOptions(rule, sampling, endless, fused=True, **more)
    return TandemWriter(SampleKey(3, 1, i), 0, PROMPT, prompt, options)


def write(client: EngineClient, writers: list[TandemWriter]) -> Any:
    """All at once, each in an HTTP request of its own."""

    async def every() -> list[TandemSample]:
        both = {SENIOR: client, JUNIOR: client}
        return list(await asyncio.gather(*(write_one(w, both, aborted=lambda: True) for w in writers)))

    return every()


def test_every_strategy_and_probability(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """Concurrent requests of all strategies, p = 0, .5, 1, in one batch: the author's log-probs, the rule's authors."""
    rules = [make_rule(s, tables, p) for s in STRATEGIES for p in (0.0, 0.5, 1.0)]
    rules.append(HandoffRule.of("word", 0.5, 6, 3, tables["custom"]))
    writers = [
        make_writer(rule, tokens, prompt, i)
        for i, (rule, prompt) in enumerate(zip(rules, prompts(len(rules), 20, 1), strict=True))
    ]
    samples = engine.run(lambda client: write(client, writers))
    for sample, rule in zip(samples, rules, strict=True):
        engine.reference.check(sample)
        assert len(sample.response_ids) == 40
        assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids)
    # Tokens are drawn without a seed on a CPU, and few long runs may all fall to one author: both wrote in some response.
    mixed = [s for s, rule in zip(samples, rules, strict=True) if rule.prob_senior == 0.5]
    assert any(0 < s.senior_tokens < 40 for s in mixed)


@only(
    "setting", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 5}], ids=str
)
@only("engine", ["qwen3", "qwen3 untied, TP 2", "catch up"], indirect=True)
def test_temperature_truncation_and_greedy(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts, setting: dict[str, Any]
) -> None:
    setting = {**setting, "truncation_replay": "recompute"}  # SGLang does not tell what it kept
    writers = [make_writer(make_rule("word", tables), tokens, p, i, **setting) for i, p in enumerate(prompts(6, 15, 2))]
    for sample in engine.run(lambda client: write(client, writers)):
        engine.reference.check(sample, temperature=setting.get("temperature", 1.0), top_p=setting.get("top_p", 1.0))


@only("engine", ["qwen3", "catch up"], indirect=True)
def test_one_batched_request_for_all(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    writers = [make_writer(make_rule("word", tables), tokens, p, i) for i, p in enumerate(prompts(8, 30, 3))]
    samples = engine.run(lambda c: write_lockstep(writers, {SENIOR: c, JUNIOR: c}))
    for sample in samples:
        assert isinstance(sample, TandemSample)
        engine.reference.check(sample)


@only("engine", ["qwen3", "qwen3 untied, TP 2", "catch up", "FlashInfer, catch up, TP 2"], indirect=True)
def test_tandem_solo_and_scoring_requests_side_by_side(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """A plain request is the senior's, one with p = 0 the junior's; scores are the senior's; `top` is each token's author's."""
    prompt, *more = prompts(9, 40, 4)
    junior = handoff_of(make_rule("word", tables, 0.0), 5)
    turns = handoff_of(make_rule("alternating", tables), 5)
    requests = [
        GenerateRequest("plain", prompt, 20, top_logprobs_num=3),
        GenerateRequest("junior", prompt, 20, handoff=junior, top_logprobs_num=3),
        GenerateRequest("turns", prompt, 20, handoff=turns, top_logprobs_num=3),
        GenerateRequest("score", prompt, 0, logprob_start_len=0),
    ]
    writers = [make_writer(make_rule("sentence", tables), tokens, p, i) for i, p in enumerate(more)]

    async def both(client: EngineClient) -> Any:
        return await asyncio.gather(*(client.generate([r]) for r in requests), write(client, writers))

    [plain], [solo_junior], [mixed], [score], samples = engine.run(both)
    for sample in samples:
        engine.reference.check(sample)
    for result in (plain, solo_junior, mixed):
        ids = prompt + result.output_ids
        rows = {
            author: engine.reference.log_probs(model, ids)[len(prompt) - 1 : -1]
            for author, model in ((SENIOR, engine.reference.senior), (JUNIOR, engine.reference.junior))
        }
        assert len(result.output_ids) == 20 or result.finish_reason == "stop"
        authors = result.authors if result is not plain else [SENIOR] * len(result.output_ids)
        for i, (author, token, log_prob, top) in enumerate(
            zip(authors, result.output_ids, result.output_log_probs, result.output_top_logprobs, strict=True)
        ):
            row = rows[author][i]
            assert abs(float(row[token]) - log_prob) < 1e-4
            assert [v for v, _ in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert set(solo_junior.authors) == {JUNIOR}
    assert mixed.authors == ((SENIOR, JUNIOR) * 10)[: len(mixed.output_ids)]
    rows = engine.reference.log_probs(engine.reference.senior, prompt)
    assert score.input_log_probs[1:] == pytest.approx([float(rows[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-4)


@only(
    "engine",
    [
        "qwen3",
        "qwen2, mixed chunks",
        "qwen3 untied, TP 2",
        "catch up",
        "FlashInfer, mixed chunks",
        "FlashInfer, catch up, TP 2",
    ],
    indirect=True,
)
def test_radix_hits_and_chunked_prefill(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """The same long prompt again, a prompt that ends inside a cached response, a second turn; chunks far below the length."""
    [prompt] = prompts(1, 150, 5)
    rule = make_rule("word", tables)
    first = engine.run(lambda c: write(c, [make_writer(rule, tokens, prompt, i) for i in range(4)]))
    inside = prompt + first[0].response_ids[:17]
    again = [make_writer(rule, tokens, prompt, 9), make_writer(rule, tokens, inside, 10)]
    again += [make_writer(rule, tokens, inside + first[1].response_ids, 11)]
    second = engine.run(lambda c: write(c, again))
    for sample in (*first, *second):
        engine.reference.check(sample)

    async def ask(client: EngineClient) -> Any:
        return await client.generate([GenerateRequest("hit", inside, 1)])

    assert engine.run(ask)[0].cached_tokens >= 150
    assert ("prefill attention of the fused engine: FlashInfer" in engine.log()) == ("FlashInfer" in engine.name)


@only(
    "engine",
    [
        "small pool, overlap",
        "llama, small pool, no overlap",
        "qwen2 tied, TP 2, small pool",
        "catch up, TP 2, small pool",
        "catch up, retracting",
    ],
    indirect=True,
)
def test_forced_retractions_lose_and_change_nothing(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """Ten long responses in a pool for four: each is thrown out and prefilled again, the rule replayed over its own tokens."""
    strategies = tuple(STRATEGIES)
    for attempt in range(3):
        before = retractions(engine.log())
        writers = [
            make_writer(make_rule(strategies[i % 5], tables), tokens, p, 10 * attempt + i, cap=100)
            for i, p in enumerate(prompts(10, 12, 6 + attempt))
        ]
        for sample in engine.run(lambda client, ws=writers: write(client, ws)):
            engine.reference.check(sample)
            assert len(sample.response_ids) == 100
        if retractions(engine.log()) > before:
            return
    # After each retraction SGLang admits less at once (new_token_ratio), and the tests before this one caused some
    # already; what they wrote was checked in the same way.
    assert before > 0


@only("engine", ["catch up, retracting"], indirect=True)
def test_what_ends_right_behind_a_retraction_gives_nothing_back_twice(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """Its tokens, prefilled again, are the cache's since; its last ones, which one model may not have read, are given back.

    SGLang throws out the shortest response, of such the one with the longest prompt: here the one that ends first. What the
    cache then has of it, either model goes on behind as if it had read it itself.
    """
    before = retractions(engine.log())
    rules = [make_rule(strategy, tables) for strategy in STRATEGIES] + [
        make_rule("word", tables, p) for p in (0.0, 1.0)
    ]
    begun: list[TandemSample] = []
    for number, rule in enumerate(rules):
        writers = [
            make_writer(rule, tokens, p, i, cap=20 + 7 * i)
            for i in range(6)
            for p in prompts(1, 60 - 7 * i, 10 * number + i)
        ]
        samples = engine.run(lambda client, ws=writers: write(client, ws))
        for i, sample in enumerate(samples):
            engine.reference.check(sample)
            assert len(sample.response_ids) == 20 + 7 * i
        begun += samples[:2]
    assert retractions(engine.log()) > before
    models = {JUNIOR: engine.reference.junior, SENIOR: engine.reference.senior}
    for i, sample in enumerate(begun):
        longer = sample.prompt_ids + sample.response_ids + (5, 6, 7)
        for author, model in models.items():
            solo = handoff_of(make_rule("word", tables, float(author)), 5)
            request = GenerateRequest(f"next{i}-{author}", longer, 6, handoff=solo)
            [result] = engine.run(lambda client, r=request: client.generate([r]))
            own = engine.reference.behind(model, longer, result.output_ids)
            assert result.output_log_probs == pytest.approx(own, abs=1e-4)
            assert len(sample.prompt_ids) <= result.cached_tokens < len(longer)
    # Locations that are given back twice are found by SGLang when it is idle, and end it.
    assert "leak" not in engine.log()


def retractions(log: str) -> int:
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))


@only("engine", ["qwen3", "small pool, overlap", "qwen2 tied, TP 2, small pool", "catch up"], indirect=True)
def test_aborted_responses_resume_where_they_stopped(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    rule = make_rule("word", tables)

    async def cut(client: EngineClient, after_s: float) -> list[TandemSample]:
        writers = [make_writer(rule, tokens, p, i, cap=300) for i, p in enumerate(prompts(1, 12, 7) * 3)]
        task = asyncio.ensure_future(write(client, writers))
        await asyncio.sleep(after_s)
        for writer in writers:
            await client.abort(f"{writer.key.seed}-{writer.key.rollout_id}-{writer.key.sample_index}-0")
        return list(await task)

    for after_s in (
        0.2,
        0.5,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
        64.0,
    ):  # for a busy machine and a fast one
        cut_off = engine.run(lambda client, after_s=after_s: cut(client, after_s))
        if any(s.finish_reason == "abort" and s.response_ids for s in cut_off):
            break
    else:
        raise AssertionError("no response was cut")
    sampling = SamplingConfig(max_new_tokens=300)
    endless = TokenBytes(tokens.table, tokens.special, frozenset())
    options = WriterOptions(rule, sampling, endless, score_junior=True, fused=True)
    resumed = [TandemWriter.resume(s, options) for s in cut_off if s.finish_reason == "abort"]
    for sample in engine.run(lambda client: write(client, resumed)):
        assert len(sample.response_ids) == 300
        engine.reference.check(sample)
        assert sample.authorship_mask == rule.authorship(sample.key, sample.response_ids)


@only("engine", ["qwen3", "catch up"], indirect=True)
def test_many_short_requests_and_inserted_text_are_one_response(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """The run that is open at the end of an input goes on; a tool's text starts a new one."""
    rule = make_rule("word", tables)
    [prompt] = prompts(1, 10, 8)
    writer = make_writer(rule, tokens, prompt, 0, cap=50, tokens_per_request=7)
    [sample] = engine.run(lambda client: write(client, [writer]))
    assert sample.requests > 7
    engine.reference.check(sample)
    ends = TokenBytes(tokens.table, tokens.special, frozenset(range(100, 130)))
    key = SampleKey(3, 1, 1)
    turn = TandemWriter(
        key, 0, PROMPT, prompt, WriterOptions(rule, SamplingConfig(max_new_tokens=80), ends, fused=True)
    )

    async def tool(_: TandemWriter) -> list[int] | None:
        return [5, 6, 7, 8]

    async def talk(client: EngineClient) -> TandemSample:
        return await write_one(turn, {SENIOR: client, JUNIOR: client}, environment=tool)

    talked = engine.run(talk)
    assert talked.inserted
    assert talked.authorship_mask == rule.authorship(key, talked.response_ids, inserted=talked.inserted)


@only("engine", ["qwen3"], indirect=True)
def test_a_table_that_the_engine_does_not_hold_is_refused(engine: Any, tokens: TokenBytes, prompts: Prompts) -> None:
    [prompt] = prompts(1, 10, 9)
    writer = make_writer(HandoffRule.of("word", 0.5, 6, 3, frozenset({2, 3})), tokens, prompt, 0)
    with pytest.raises(EngineRejectedError, match="does not know"):
        engine.run(lambda client: write(client, [writer]))


@only("engine", ["qwen3", "qwen3 untied, TP 2", "catch up"], indirect=True)
def test_weight_updates_by_name(
    engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]], prompts: Prompts, tmp_path: Path
) -> None:
    """Plain names change the senior only, `tandem_junior.` names the junior only; half-written responses go on after."""
    rule = make_rule("word", tables)
    folder, reference = engine.folder, type(engine.reference)
    junior2 = tmp_path / "junior2"
    junior2.mkdir()
    weights = load_file(folder("junior2") / "model.safetensors")
    save_file({f"tandem_junior.{k}": v for k, v in weights.items()}, junior2 / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (junior2 / name).write_bytes((folder("senior") / name).read_bytes())
    writers = [make_writer(rule, tokens, p, i, cap=60) for i, p in enumerate(prompts(4, 20, 10))]
    again = [make_writer(rule, tokens, w.prompt_ids, w.key.sample_index, cap=60) for w in writers]
    # Without a second request, which could come in between waiting until the server is idle and the update.
    last = [make_writer(rule, tokens, w.prompt_ids, w.key.sample_index, cap=60, score_junior=False) for w in writers]

    async def updates(client: EngineClient) -> Any:
        await client.update_weights_from_disk(str(folder("senior2")), "v2")
        second = await write(client, writers)
        await client.update_weights_from_disk(str(junior2), "v3")
        third = await write(client, again)
        return second, third

    second, third = engine.run(updates)
    for sample in second:
        reference.load(folder("senior2"), folder("junior")).check(sample)
        assert {r.weight_version for r in sample.runs} == {"v2"}
    for sample in third:
        reference.load(folder("senior2"), folder("junior2")).check(sample)

    async def back(client: EngineClient) -> Any:
        """The original weights again, while requests are under way."""
        save_file(
            {f"tandem_junior.{k}": v for k, v in load_file(folder("junior") / "model.safetensors").items()},
            junior2 / "model.safetensors",
            {"format": "pt"},
        )
        running = asyncio.ensure_future(write(client, last))
        await asyncio.sleep(0.05)
        await client.update_weights_from_disk(str(junior2), "v4")
        await client.update_weights_from_disk(str(folder("senior")), "v5")
        await running
        return await write(client, [make_writer(rule, tokens, w.prompt_ids, 50 + i) for i, w in enumerate(writers)])

    for sample in engine.run(back):
        engine.reference.check(sample)
    for writer in last:
        assert writer.done


@pytest.mark.parametrize("role", ["senior", "junior"])
def test_a_model_with_missing_weights_does_not_start(
    role: str,
    sglang_python: str,
    preloaded_python: str,
    folders: dict[str, Path],
    tables: dict[str, frozenset[int]],
    tmp_path: Path,
) -> None:
    """One file without index, so that the weights themselves must tell; SGLang alone would start and write nonsense."""
    python = sglang_python if role == "senior" else preloaded_python  # one start as users make it
    pair = {"senior": folders["qwen3-senior"], "junior": folders["qwen3-junior"]}
    pair[role] = Path(shutil.copytree(pair[role], tmp_path / role))
    weights = load_file(pair[role] / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]  # a third of a parameter of SGLang's
    save_file(weights, pair[role] / "model.safetensors", {"format": "pt"})
    server = FusedServer(
        pair["senior"], pair["junior"], tables=list(tables.values()), log_file=tmp_path / "log",
        sglang=Sglang(python, args=("--mem-fraction-static", "0.3", "--max-total-tokens", "1024")),
    )  # fmt: skip
    with pytest.raises(EngineUnavailableError), server:
        pass
    told = (tmp_path / "log").read_text(errors="replace")
    assert re.search(rf"weights of the {role}='1 missing or NaN: \S*model.layers.1.self_attn.qkv_proj.weight'", told), (
        told
    )


@pytest.fixture(scope="module")
def sender(sglang_python: str) -> Iterator[Callable[..., None]]:
    """`sender(url=, way=, file=, ranks=)`: the process of send_weights.py, which has imported SGLang, sends."""
    script = str(Path(__file__).with_name("send_weights.py"))
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3])
    }  # SGLang's Python need not have the package installed
    process = subprocess.Popen(
        [sglang_python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def send(**order: Any) -> None:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        while (line := process.stdout.readline()) != "sent\n":  # what SGLang prints itself comes before
            assert line, f"send_weights.py ended with {process.wait()}"

    yield send
    process.communicate(timeout=PATIENCE_S)


@only("engine", ["qwen3", "qwen3 untied, TP 2"], indirect=True)
def test_weights_from_a_trainers_memory(
    engine: Any,
    tokens: TokenBytes,
    tables: dict[str, frozenset[int]],
    prompts: Prompts,
    tmp_path: Path,
    sender: Callable[..., None],
) -> None:
    """Each of SGLang's ways without a disk: the senior by plain names, the junior behind its prefix, both in one update."""
    folder, reference = engine.folder, type(engine.reference)

    def send(way: str, *sources: str) -> None:
        sent = {
            ("tandem_junior." if "junior" in source else "") + name: weight
            for source in sources
            for name, weight in load_file(folder(source) / "model.safetensors").items()
        }
        save_file(sent, tmp_path / "sent.safetensors")
        sender(url=engine.server.url, way=way, file=str(tmp_path / "sent.safetensors"), ranks=engine.ranks)

    def check(senior: str, junior: str, version: str) -> None:
        writers = [make_writer(make_rule("word", tables), tokens, p, i) for i, p in enumerate(prompts(3, 15, 12))]
        for sample in engine.run(lambda client: write(client, writers)):
            reference.load(folder(senior), folder(junior)).check(sample)
            assert {r.weight_version for r in sample.runs} == {version}

    send("tensor", "senior2")
    check("senior2", "junior", "tensor")
    send("bucket", "junior2")
    check("senior2", "junior2", "bucket")
    send("distributed", "senior", "junior")
    check("senior", "junior", "distributed")


@only("engine", ["qwen3"], indirect=True)
def test_a_team_writes_through_one_engine(engine: Any, tokens: TokenBytes, tables: dict[str, frozenset[int]]) -> None:
    """`engine.mode=fused` of a run: solo and tandem responses through the same server, the mask of the two-server rule."""
    config = RunConfig.from_mapping(
        {
            "models": {r: str(engine.folders[f"qwen3-{r}"]) for r in ("senior", "junior")},
            "opd": {"enabled": False},
            "sampling": {"max_new_tokens": 24},
            "engine": {"mode": "fused", "senior_url": engine.server.url},
        }
    )
    prompts = [Prompt(f"p{i}", (Message("user", "the cat sat " * i),), None, "t") for i in range(1, 4)]
    with Team(Roster(config), engine.server.log_file.parent / "team") as team:
        assert team.roster.tandem_rule.boundary == tables["word"]
        tandem = team.write(prompts, 0, 2, tandem=True)
        solo = team.write(prompts, 0, 2, tandem=False)
        assert not team.servers.processes
    for sample in (*tandem, *solo):
        assert isinstance(sample, TandemSample)
        engine.reference.check(sample)
    assert all(s.authorship_mask == team.roster.tandem_rule.authorship(s.key, s.response_ids) for s in tandem)
    assert any(s.junior_tokens for s in tandem)
    assert not any(s.junior_tokens for s in solo)


@only("engine", ["catch up"], indirect=True)
def test_the_senior_tells_late_what_it_thinks_of_the_juniors_tokens(
    engine: Any, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """All of it comes with the answer, except of what it had no more reason to read: the end of a junior's last turn."""
    rules = [make_rule(strategy, tables, p) for strategy in STRATEGIES for p in (0.0, 0.3, 0.7, 1.0)]
    requests = [
        GenerateRequest(f"late{i}", prompt, 40, handoff=handoff_of(rule, i))
        for i, (rule, prompt) in enumerate(zip(rules, prompts(len(rules), 12, 13), strict=True))
    ]

    async def ask(client: EngineClient) -> Any:
        return await asyncio.gather(*(client.generate([r]) for r in requests))

    told = 0
    for request, rule, [result] in zip(requests, rules, engine.run(ask), strict=True):
        rows = engine.reference.log_probs(engine.reference.senior, request.input_ids + result.output_ids)
        rows = rows[len(request.input_ids) - 1 :]
        known = [v is not None for v in result.senior_log_probs]
        assert known == sorted(known, reverse=True), "what is not known is the end"
        assert not any(a for a, k in zip(result.authors, known, strict=True) if not k), "and the junior's"
        assert rule.prob_senior == 0.0 or known.count(False) < BOUNDS["longest"]
        for i, (value, token, author) in enumerate(
            zip(result.senior_log_probs, result.output_ids, result.authors, strict=True)
        ):
            if value is not None:
                assert value == pytest.approx(float(rows[i][token]), abs=1e-4)
                told += author == JUNIOR
    assert told > 50


@only("engine", ["catch up"], indirect=True)
def test_nobody_finds_in_the_cache_what_one_model_has_not_read(
    engine: Any, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """The senior goes on behind a response of the junior's, and the other way round: of it, the prompt alone is found again."""
    [prompt] = prompts(1, 70, 14)
    solo = {a: handoff_of(make_rule("word", tables, float(a)), 5) for a in (JUNIOR, SENIOR)}

    async def ask(client: EngineClient, first: int) -> Any:
        [begun] = await client.generate([GenerateRequest(f"first{first}", prompt, 30, handoff=solo[first])])
        longer = prompt + begun.output_ids + (5, 6, 7)
        return longer, *await client.generate(
            [GenerateRequest(f"then{first}", longer, 20, handoff=solo[1 - first], top_logprobs_num=2)]
        )

    for first in (JUNIOR, SENIOR):
        longer, result = engine.run(lambda client, first=first: ask(client, first))
        other = engine.reference.junior if first == SENIOR else engine.reference.senior
        own = engine.reference.behind(other, longer, result.output_ids)
        assert result.output_log_probs == pytest.approx(own, abs=1e-4)
        assert 0 < result.cached_tokens <= len(prompt)


@only("engine", ["catch up", "catch up, TP 2, small pool"], indirect=True)
def test_a_second_turn_finds_all_but_the_end_of_the_first(
    engine: Any, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """Of responses by both; either model goes on behind them as if it had read every token itself."""
    rules = [make_rule(strategy, tables, p) for strategy in STRATEGIES for p in (0.2, 0.5, 0.8)]
    solo = {a: handoff_of(make_rule("word", tables, float(a)), 5) for a in (JUNIOR, SENIOR)}

    async def talk(client: EngineClient, i: int, prompt: tuple[int, ...], rule: HandoffRule) -> Any:
        [begun] = await client.generate([GenerateRequest(f"turn{i}", prompt, 20 + i, handoff=handoff_of(rule, i))])
        longer = prompt + begun.output_ids + (5, 6, 7)
        then = [GenerateRequest(f"next{i}-{a}", longer, 6, handoff=solo[a]) for a in (JUNIOR, SENIOR)]
        return longer, begun, [(await client.generate([r]))[0] for r in then]

    async def all_of_them(client: EngineClient) -> Any:
        every = zip(prompts(len(rules), 20, 15), rules, strict=True)
        return [await talk(client, i, prompt, rule) for i, (prompt, rule) in enumerate(every)]

    for longer, begun, results in engine.run(all_of_them):
        whole = len(longer) - 3 - BOUNDS["longest"]  # of the last token nobody has computed anything
        for result, model in zip(results, (engine.reference.junior, engine.reference.senior), strict=True):
            own = engine.reference.behind(model, longer, result.output_ids)
            assert result.output_log_probs == pytest.approx(own, abs=1e-4)
        assert whole <= results[0].cached_tokens < len(longer) - 3, begun


@only("engine", ["catch up"], indirect=True)
def test_a_prompt_is_found_again_behind_a_response_of_any_length(
    engine: Any, tables: dict[str, frozenset[int]], prompts: Prompts
) -> None:
    """Also of one that ends with its first token, before SGLang keeps the prompt of a response that goes on."""
    cases = [(p, length) for p in (0.0, 0.5, 1.0) for length in (1, 2, 5)]

    async def talk(client: EngineClient, i: int, prompt: tuple[int, ...], prob: float, length: int) -> Any:
        handoff = handoff_of(make_rule("word", tables, prob), i)
        [begun] = await client.generate([GenerateRequest(f"short{i}", prompt, length, handoff=handoff)])
        longer = prompt + begun.output_ids + (5, 6, 7)
        return longer, [
            (a, *await client.generate([GenerateRequest(f"on{i}-{a}", longer, 4, handoff=solo[a])]))
            for a in (JUNIOR, SENIOR)
        ]

    async def all_of_them(client: EngineClient) -> Any:
        every = zip(prompts(len(cases), 30, 18), cases, strict=True)
        return [await talk(client, i, prompt, *case) for i, (prompt, case) in enumerate(every)]

    solo = {a: handoff_of(make_rule("word", tables, float(a)), 5) for a in (JUNIOR, SENIOR)}
    for longer, results in engine.run(all_of_them):
        for author, result in results:
            model = engine.reference.junior if author == JUNIOR else engine.reference.senior
            own = engine.reference.behind(model, longer, result.output_ids)
            assert result.output_log_probs == pytest.approx(own, abs=1e-4)
        assert results[0][1].cached_tokens >= 30


@only("engine", ["qwen3", "catch up"], indirect=True)
def test_the_junior_scores_where_it_is_asked(engine: Any, prompts: Prompts) -> None:
    """Evaluation lets the junior read the senior's chains: its input log-probs, beside requests that want the senior's."""
    texts = prompts(6, 150, 11)

    async def ask(client: EngineClient) -> Any:
        async with FusedJunior(engine.server.url) as junior:
            requests = [
                GenerateRequest(f"s{i}", t, 0, logprob_start_len=i, top_logprobs_num=2) for i, t in enumerate(texts)
            ]
            return await asyncio.gather(
                *((junior if i % 2 else client).generate([r]) for i, r in enumerate(requests)),
                junior.generate([GenerateRequest("w", texts[0], 9, logprob_start_len=0)]),
            )

    *scores, [written] = engine.run(ask)
    for i, ([score], ids) in enumerate(zip(scores, texts, strict=True)):
        model = engine.reference.junior if i % 2 else engine.reference.senior
        rows = engine.reference.log_probs(model, ids)
        own = [float(rows[k - 1, ids[k]]) for k in range(i + 1, len(ids))]
        assert score.input_log_probs[1:] == pytest.approx(own, abs=1e-4)
        for k, top in enumerate(score.input_top_logprobs[1:], start=i):
            assert top is not None
            assert [v for v, _ in top] == pytest.approx(rows[k].topk(2).values.tolist(), abs=1e-4)
    assert set(written.authors) == {JUNIOR}
    rows = engine.reference.log_probs(engine.reference.junior, texts[0])
    own = [float(rows[k - 1, texts[0][k]]) for k in range(1, 150)]
    assert written.input_log_probs[1:] == pytest.approx(own, abs=1e-4)


def test_what_is_touched_inside_sglang_is_still_there(sglang_python: str) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sglang_python, "-m", "slime_tandem.engines.fused.internals"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        cwd=root,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
