"""`slime-tandem eval` on real servers with tiny models, and what it reads against transformers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from slime_tandem.cli import main
from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.errors import ConfigError, EngineError, TeacherScoreError
from slime_tandem.evaluation import run as module
from slime_tandem.evaluation.run import evaluation_rule
from slime_tandem.evaluation.scoring import Reading, foreign_reading, log_probs_of, own_reading
from slime_tandem.evaluation.transfer import finished, first_half
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import Message, Prompt, SampleKey, TandemSample

from ..in_process import ThreadServer

PARTS = {"solo", "handoff", "transfer", "drift", "start", "legibility"}


def flags(trio, runs: Path, *more: str) -> list[str]:  # type: ignore[no-untyped-def]
    models = [f"models.{role}={getattr(trio, role)}" for role in ("junior", "teacher")]
    sizes = [
        "sampling.max_new_tokens=10",
        "eval.prompts=3",
        "eval.chains=3",
        "eval.drift_samples=2",
        "eval.resamples=200",
        # At the published sampling a random model repeats one special token.
        "eval.temperature=1.5",
        "eval.top_p=1",
        "eval.top_k=-1",
    ]
    return [
        "--model",
        str(trio.senior),
        "--set",
        f"runs_dir={runs}",
        "engine.cache_tokens=4096",
        *models,
        *sizes,
        *more,
    ]


def config(trio, runs: Path, *more: str) -> RunConfig:  # type: ignore[no-untyped-def]
    args = flags(trio, runs, *more)
    return RunConfig.load(None, [f"models.senior={trio.senior}", *args[3:]])


@pytest.fixture(scope="module")
def written(trio, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    """An output folder of one evaluation with handoffs at words (a random model hardly writes blank lines)."""
    root = tmp_path_factory.mktemp("eval")
    out, plot = root / "eval.json", root / "eval.svg"
    words = ["--handoff-strategy", "word", "--output", str(out), "--plot", str(plot)]
    assert main(["eval", *flags(trio, root / "runs", "tandem.max_gap_tokens=3"), *words]) == 0
    return root


def test_the_json_holds_all_four_parts_with_intervals(written: Path) -> None:
    tree = json.loads((written / "eval.json").read_text())
    results = tree["results"]
    assert {name.split("/")[0] for name in results} == PARTS
    names = {
        "solo/pass@1",
        "solo/pass@3",
        "handoff/pass@2",
        "handoff/difference@3",
        "drift/k3",
        "legibility/nats_per_byte",
        "transfer/gain",
    }
    assert names <= set(results)
    for name, r in results.items():
        unknown = name.startswith(("handoff/retention@", "start/"))
        assert (r["value"] is None) == unknown, "a random model is never right"
        assert r["value"] is not None or r["reason"] in ("solo is never right", module.NO_START)
        if r["low"] is not None:
            assert r["low"] <= r["value"] <= r["high"], name
    assert results["handoff/chains_with_handoff"]["value"] > 0.5
    assert 0 < results["handoff/senior_token_fraction"]["value"] < 1
    assert results["drift/k1"]["value"] > 0.1, "two random models differ"
    assert results["drift/k1"]["unit"] == "nats/token"
    assert results["legibility/nats_per_token"]["value"] < 0
    sampling = {"temperature": 1.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "truncation_replay": "recompute"}
    sampling |= {"max_new_tokens": 10, "stop": []}
    assert tree["setup"]["sampling"] == sampling
    assert tree["setup"]["handoff"] == {"strategy": "word", "author_schedule": "alternate"}
    assert tree["notes"] == []


def test_the_plot_is_one_svg_that_needs_nothing_else(written: Path) -> None:
    text = (written / "eval.svg").read_text()
    root = ElementTree.fromstring(text)
    words = " ".join(root.itertext())
    for label in (
        "pass@1, solo",
        "pass@3, handoff",
        "KL(senior || junior), k3",
        "log-likelihood per byte",
        "not defined",
    ):
        assert label in words
    assert "href" not in text
    assert "url(" not in text


@pytest.fixture(scope="module")
def servers(trio, side_url, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:  # type: ignore[no-untyped-def]
    """A senior and a junior at work, for all tests that need no start of their own."""
    root = tmp_path_factory.mktemp("servers")
    with ThreadServer(trio.senior) as senior:
        urls = (f"engine.senior_url={senior.url}", f"engine.junior_url={side_url('junior')}")
        with Team(Roster(config(trio, root, "opd.enabled=false", *urls)), root / "logs") as team:
            yield team


@pytest.fixture
def team(servers: Team, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """The same servers; what a test changes in the team is undone after it."""
    with monkeypatch.context() as patch:
        patch.setattr(servers, "roster", copy(servers.roster))
        for name in ("config", "members", "tokenizers"):
            patch.setattr(servers.roster, name, copy(getattr(servers.roster, name)))
        yield servers


def test_the_same_settings_give_the_same_figures(trio, team: Team, written: Path) -> None:  # type: ignore[no-untyped-def]
    """In other processes, with other prompts computed together before."""
    team.roster.config = config(trio, written, "tandem.max_gap_tokens=3", "eval.handoff_strategy=word")
    tasks = TaskSet(team.config.tasks, 0)
    evaluation = module.evaluate_senior(team, tasks, tasks.heldout_prompts(3), print)
    assert evaluation.to_json()["results"] == json.loads((written / "eval.json").read_text())["results"]


def test_no_handoff_is_said_plainly(
    trio, team: Team, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    def on_these_servers(config: RunConfig, say: Callable[[str], None]) -> module.Evaluation:
        team.roster.config = config
        tasks = TaskSet(config.tasks, config.seed)
        return module.evaluate_senior(team, tasks, tasks.heldout_prompts(config.eval.prompts), say)

    monkeypatch.setattr(module, "run_evaluation", on_these_servers)
    out, plot = tmp_path / "eval.json", tmp_path / "eval.svg"
    assert main(["eval", *flags(trio, tmp_path / "runs"), "--output", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "No handoff happened: the tokenizer has no token that is a boundary of strategy 'sentence'" in shown.out
    assert "--handoff-strategy word" in shown.out
    assert "solo: 3 chains for each of 3 prompts" in shown.err
    for label in ("pass@3", "chains with a handoff", "nats/token", "temperature 1.5"):
        assert label in shown.out
    results = json.loads(out.read_text())["results"]
    assert results["handoff/chains_with_handoff"]["value"] == 0.0
    assert results["handoff/senior_token_fraction"]["value"] == 1.0
    assert results["handoff/response_tokens"] == results["solo/response_tokens"], "the same draws, the same chains"
    for name in ("handoff/retention@1", "handoff/difference@3"):
        assert results[name]["value"] is None
        assert results[name]["reason"] == "no handoff happened"
    assert "No handoff happened" in plot.read_text()


def test_without_a_junior_only_solo_is_measured(team: Team) -> None:
    del team.roster.members["junior"]  # what `tandem.enabled=false` makes of a team
    tasks = TaskSet(team.config.tasks, 0)
    results = module.evaluate_senior(team, tasks, tasks.heldout_prompts(3), print).to_json()["results"]
    assert {name.split("/")[0] for name, r in results.items() if r["value"] is not None} == {"solo"}
    assert {name.split("/")[0] for name in results} == PARTS
    assert {r["reason"] for r in results.values() if r["value"] is None} == {module.NO_JUNIOR, module.NO_START}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "eval.chains=0"], "eval.chains=0"),
        (["--set", "eval.top_k=0"], "eval.top_k=0: expected -1"),
        (["--set", "eval.temperature=0"], "eval.chains=8: expected 1"),
        (["--set", "eval.handoff_stategy=word"], "did you mean `eval.handoff_strategy`?"),
        (
            ["--output", "missing/folder/x.json"],
            "--output='missing/folder/x.json': expected a file in an existing folder",
        ),
        (["--plot", "."], "--plot='.': expected a file"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_input_is_refused_at_once(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--handoff-strategy", "wrod"]) == 2
    assert "eval.handoff_strategy='wrod': expected one of" in (said := capsys.readouterr().err)
    assert "did you mean 'word'?" in said


def test_every_setting_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    text = capsys.readouterr().out
    assert "slime-tandem config --list" in text
    assert main(["config", "--list", "eval"]) == 0
    text += capsys.readouterr().out
    for line in (
        "eval.chains = 8",
        "eval.temperature = 0.7",
        "eval.top_p = 0.8",
        "eval.top_k = 20",
        'eval.handoff_strategy = "sentence"',
        "--plot FILE",
    ):
        assert line in text


def test_log_probs_are_those_of_transformers_whatever_the_sampling(trio, team: Team) -> None:  # type: ignore[no-untyped-def]
    """Both servers score the same ids; the chains were sampled at temperature 0.7 from 20 candidates."""
    from transformers import AutoModelForCausalLM

    sampling = team.config.sampling.model_copy(update={"temperature": 0.7, "top_k": 20, "top_p": 0.8})
    samples = team.write(TaskSet(team.config.tasks, 0).heldout_prompts(3), 1, 2, tandem=False, sampling=sampling)
    readings = [own_reading(s, team.roster.student.tokens) for s in samples]
    got = {role: module._scores(team, role, readings) for role in ("senior", "junior")}
    for role, scores in got.items():
        model = AutoModelForCausalLM.from_pretrained(getattr(trio, role))
        for s, values in zip(samples, scores, strict=True):
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0], dim=-1)
            start = len(s.prompt_ids)
            expected = [float(table[start + i - 1, t]) for i, t in enumerate(s.response_ids)]
            assert values == pytest.approx(expected, abs=1e-4)
    assert not np.allclose(got["senior"][0], samples[0].log_probs, atol=1e-2), "sampled log-probs are another thing"


def test_handoff_chains_alternate_and_start_with_the_senior(trio, team: Team, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    c = config(trio, tmp_path, "eval.handoff_strategy=word", "tandem.max_gap_tokens=2")
    rule = evaluation_rule(c, team.roster.student.tokens)
    samples = team.write(TaskSet(c.tasks, 0).heldout_prompts(3), 1, 3, tandem=True, rule=rule)
    for s in samples:
        assert [r.author for r in s.runs] == [1 - i % 2 for i in range(len(s.runs))]
        assert rule.authorship(s.key, s.response_ids) == s.authorship_mask
    assert any(len(s.runs) > 2 for s in samples)


def test_the_rule_of_an_evaluation_is_its_own(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokens = ModelTokenizer.load(trio.senior).tokens
    rule = evaluation_rule(config(trio, tmp_path), tokens)
    assert (rule.strategy, rule.alternates) == ("sentence", True)
    ids = ["tandem.boundary_token_ids=[5, 6]"]
    assert evaluation_rule(config(trio, tmp_path, *ids), tokens).boundary == frozenset(), "these are ids of word"
    assert evaluation_rule(config(trio, tmp_path, *ids, "eval.handoff_strategy=word"), tokens).boundary == {5, 6}
    off = config(trio, tmp_path, "tandem.enabled=false", "tandem.prob_senior=1", "eval.handoff_strategy=word")
    assert evaluation_rule(off, tokens).author(0, 1) == 0, "the run's own tandem settings have no say"


def response(ids: tuple[int, ...]) -> TandemSample:
    prompt = Prompt("p", (Message("user", "1 + 2 ="),), "3", "t")
    return TandemSample(SampleKey(0, 0, 0), 0, prompt, (9,), ids, (1,) * len(ids), (-1.0,) * len(ids), "stop", "", ())


def test_another_tokenizer_reads_the_text_in_its_own_ids(trio) -> None:  # type: ignore[no-untyped-def]
    senior, reader = ModelTokenizer.load(trio.senior), ModelTokenizer.load(trio.teacher)
    ids = (*senior.encode("the answer is 46"), *senior.tokens.eos_ids)
    own = own_reading(response(ids), senior.tokens)
    foreign = foreign_reading(response(ids), senior.tokens, reader.render, reader.encode)
    assert own.response_ids == ids
    assert own.is_text.tolist() == [True] * (len(ids) - 1) + [False]
    assert reader.tokens.join(foreign.response_ids) == b"the answer is 46"
    assert foreign.is_text.all()
    assert own.text_bytes == foreign.text_bytes == 16, "nats per byte of both compare"
    assert list(foreign.prompt_ids) == reader.render(response(ids).prompt.messages)
    broken = next(i for i, b in enumerate(senior.tokens.table) if b == b"\xe4")
    assert foreign_reading(response((broken,)), senior.tokens, reader.render, reader.encode).text_bytes == 3


def test_a_junior_with_another_tokenizer_has_no_drift_but_legibility(team: Team) -> None:
    # The server of the junior stays: what is tried is which ids are read, and what is said.
    student = team.roster.student
    team.roster.tokenizers["junior"] = replace(student, tokens=replace(student.tokens, special=frozenset({0})))
    tasks = TaskSet(team.config.tasks, 0)
    evaluation = module.evaluate_senior(team, tasks, tasks.heldout_prompts(3), print)
    results = {r.name: r.estimate for r in evaluation.results}
    for name in ("drift/k1", "drift/k3", "transfer/half", "transfer/gain"):
        assert results[name].value is None
        assert "different tokenizers" in str(results[name].reason)
        assert "special ids differ" in str(results[name].reason)
    assert results["legibility/nats_per_byte"].value is not None


def test_drift_from_the_start_is_measured_in_the_seniors_own_server(trio, team: Team) -> None:  # type: ignore[no-untyped-def]
    """The junior's weights as the start: both drifts are then the same, and the senior is back after it."""
    with_start = team.config.eval.model_copy(update={"start": str(trio.junior)})
    team.roster.config = team.config.model_copy(update={"eval": with_start})
    tasks = TaskSet(team.config.tasks, 0)
    for _ in range(2):
        results = module.evaluate_senior(team, tasks, tasks.heldout_prompts(3), print).to_json()["results"]
        for kind in ("k1", "k3"):
            for what in ("value", "low", "high"):
                assert results[f"start/{kind}"][what] == pytest.approx(results[f"drift/{kind}"][what], abs=1e-6)
        assert results["drift/k1"]["value"] > 0.1


def test_a_start_with_another_tokenizer_is_refused(trio, team: Team) -> None:  # type: ignore[no-untyped-def]
    team.roster.config = team.config.model_copy(
        update={"eval": team.config.eval.model_copy(update={"start": str(trio.teacher)})}
    )
    tasks = TaskSet(team.config.tasks, 0)
    with pytest.raises(ConfigError, match=r"eval\.start=.*the tokenizer of the senior"):
        module.evaluate_senior(team, tasks, tasks.heldout_prompts(1), print)


def test_who_goes_on_from_half_of_its_own_answer_comes_to_that_answer(trio, team: Team) -> None:  # type: ignore[no-untyped-def]
    """The same draws, positions and cap as in the rollout: asked of the senior's server, so that the answer is known."""
    tokens, sampling = team.roster.student.tokens, team.config.sampling
    prompts = TaskSet(team.config.tasks, 0).heldout_prompts(3)
    solo = [s for s in team.write(prompts, 1, 2, tandem=False) if isinstance(s, TandemSample)]
    halves = [first_half(s) for s in solo]
    assert [len(h) for h in halves] == [len(s.response_ids) // 2 for s in solo]
    assert any(halves)
    client = team.servers.clients["senior"]
    for prefixes in (halves, [() for _ in solo]):
        got = team.servers.run(finished(client, solo, prefixes, tokens, sampling, 4))
        assert got == [s.text for s in solo]
    assert len({s.text for s in solo}) > 1


def test_what_the_junior_finishes_is_cut_at_a_stop_string_and_an_abort_is_no_answer() -> None:
    table = TokenBytes((b"a", b"b;", b"c", None), special=frozenset({3}), eos_ids=frozenset({3}))
    sampling = SamplingConfig(max_new_tokens=5, stop=(";",))
    s = response((0, 2))
    asked: list[GenerateRequest] = []

    class Engine:
        reason = "stop"

        async def generate(self, requests: Any) -> list[GenerateResult]:
            asked.extend(requests)
            return [GenerateResult(r.rid, (0, 1, 3), (), self.reason, "v") for r in requests]  # type: ignore[arg-type]

    engine = Engine()
    assert asyncio.run(finished(engine, [s], [(2,)], table, sampling, 8)) == ["cab"]
    (request,) = asked
    assert (request.input_ids, request.max_new_tokens) == ((9, 2), 4)
    assert (request.stop_token_ids, request.stop) == ((3,), (";",))
    engine.reason = "abort"
    with pytest.raises(EngineError, match="an answer of the junior"):
        asyncio.run(finished(engine, [s], [()], table, sampling, 8))


class Scripted:
    """An engine that answers every input id with -(its id), and remembers how it was asked."""

    def __init__(self, value: float | None = None) -> None:
        self.value, self.batches = value, list[list[GenerateRequest]]()

    async def generate(self, requests: Any) -> list[GenerateResult]:
        self.batches.append(list(requests))
        out = []
        for r in requests:
            ids = r.input_ids[r.logprob_start_len :]
            values = (None, *(-float(i) if self.value is None else self.value for i in ids[1:]))
            out.append(GenerateResult(r.rid, (), (), "length", "v", input_log_probs=values, input_ids=ids))
        return out


def reading(*ids: int) -> Reading:
    return Reading((50, 51), ids, np.ones(len(ids), np.bool_), 2 * len(ids))


def test_scores_come_in_order_in_batches_and_skip_empty_responses() -> None:
    engine = Scripted()
    readings = [reading(1, 2), reading(), reading(3), reading(4)]
    got = asyncio.run(log_probs_of(engine, readings, role="junior", max_batch=2))
    assert [v.tolist() for v in got] == [[-1.0, -2.0], [], [-3.0], [-4.0]]
    assert [[r.input_ids for r in batch] for batch in engine.batches] == [[(50, 51, 1, 2), (50, 51, 3)], [(50, 51, 4)]]
    for r in engine.batches[0]:
        assert (r.max_new_tokens, r.logprob_start_len, r.temperature, r.top_p, r.top_k) == (0, 1, 1.0, 1.0, -1)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5])
def test_a_value_that_is_no_log_prob_is_an_error_that_names_the_role(value: float) -> None:
    with pytest.raises(TeacherScoreError, match="junior answer eval-junior-0, response position 0"):
        asyncio.run(log_probs_of(Scripted(value), [reading(1)], role="junior", max_batch=8))
