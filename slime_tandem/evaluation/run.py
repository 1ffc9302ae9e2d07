"""Measures a senior at work: write alone and in turns, judge, let senior and junior score, and put the figures together.

Five sets of requests: solo chains and handoff chains under the evaluation's own sampling, the junior's continuations of halves
of solo chains, solo chains of the senior's full distribution at temperature 1 for the drift (a KL estimate from truncated
samples is biased), and score requests. Solo and handoff chains share their token draws, so that the comparison is paired by
sample as far as the texts agree. It trains nothing, and asks no teacher but where no prompt has a reward: then the KL to the
teachers, of the drift's chains, stands in the place of every accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tandem import __version__
from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.errors import ConfigError, TeacherScoreError, TokenizerMismatchError
from slime_tandem.evaluation.figures import (
    TITLES,
    Figure,
    Part,
    Result,
    drift_figures,
    handoff_figures,
    legibility_figures,
    set_figures,
    solo_figures,
    teacher_figures,
    transfer_figures,
    undefined,
)
from slime_tandem.evaluation.scoring import Reading, foreign_reading, log_probs_of, own_reading
from slime_tandem.evaluation.transfer import finished, first_half
from slime_tandem.models.builtin import resolve_model
from slime_tandem.models.tokenizer import ModelTokenizer, require_same_tokenizer
from slime_tandem.report.statistics import LEVEL, Estimate, bootstrap
from slime_tandem.rollout import rollout_ids
from slime_tandem.rollout.boundaries import boundary_ids, rule_of
from slime_tandem.rollout.handoff import HandoffRule
from slime_tandem.strategies import find_strategy
from slime_tandem.tasks.arguments import Response
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rewarded, successful, with_revival
from slime_tandem.team.roster import Role, Roster
from slime_tandem.team.team import Team
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.training.metrics import teacher_figures as teachers_of
from slime_tandem.types import FloatArray, Prompt, ScoredSample, TandemSample

_WITH_JUNIOR: tuple[Part, ...] = ("handoff", "transfer", "drift", "legibility")
_COMPARED = ("handoff/retention@", "handoff/difference@")
NO_JUNIOR = "tandem.enabled is false, so no junior takes part"
NO_REWARD = "No held-out prompt has a label or another reward: the KL to the teachers is the evaluation."
NO_START = "eval.start does not name the start weights"


@dataclass(frozen=True)
class Evaluation:
    """All results in the order they are shown; `setup` says under what conditions; `notes` what the reader must know."""

    setup: dict[str, Any]
    results: tuple[Result, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON output: `setup`, `notes`, and per name value, low, high, unit, reason (null where there is none)."""
        return {
            "setup": self.setup,
            "notes": list(self.notes),
            "results": {
                r.name: {
                    "value": r.estimate.value,
                    "low": r.estimate.low,
                    "high": r.estimate.high,
                    "unit": r.unit,
                    "reason": r.estimate.reason,
                }
                for r in self.results
            },
        }


def run_evaluation(config: RunConfig, say: Callable[[str], None]) -> Evaluation:
    """Start the senior and the junior, evaluate on the first `eval.prompts` held-out prompts, stop them.

    Prompts without a reward are left out, if some have one; if none has, the teachers are started, too. `say` gets a line for
    each part as it begins. Raises TandemError kinds.
    """
    for i, task in enumerate(config.tasks):
        if task.environment is not None:
            raise ConfigError(
                f"tasks.{i}.environment",
                task.environment,
                "null for `slime-tandem eval`, whose figures are of responses of one turn",
                "leave it out; `train` evaluates with it",
            )
    tasks = TaskSet(config.tasks, config.seed, config.reward, labels=config.needs_labels)
    for note in tasks.notes:
        say(note)
    prompts = _prompts(config, tasks)
    if some := [prompt for prompt in prompts if tasks.is_rewarded(prompt)]:
        if len(some) < len(prompts):
            say(f"left out: {len(prompts) - len(some)} of {len(prompts)} held-out prompts, which have no reward")
        prompts = some
        config = config.model_copy(update={"opd": config.opd.model_copy(update={"enabled": False})})
    roster = Roster(config)
    if "junior" in roster.roles:
        evaluation_rule(config, roster.student.tokens)  # a strategy of the user's own is refused before anything starts
    with Team(roster, config.run_dir / "logs") as team:
        return evaluate_senior(team, tasks, prompts, say)


def _prompts(config: RunConfig, tasks: TaskSet) -> list[Prompt]:
    """The held-out prompts, or the whole files of evaluation sets."""
    if not config.eval.whole_files:
        return tasks.heldout_prompts(config.eval.prompts)
    prompts = list(tasks.listed_prompts)
    if not prompts:
        families = ", ".join(task.family for task in config.tasks)
        raise ConfigError("eval.whole_files", True, f"a task of family jsonl (here: {families})", "set it to false")
    return prompts


@dataclass(frozen=True)
class _Part:
    """What one part of the evaluation measured, what of it could not be, and what the reader must know."""

    figures: Sequence[Figure] = ()
    missing: Sequence[Result] = ()
    notes: Sequence[str] = ()


def evaluate_senior(team: Team, tasks: TaskSet, prompts: Sequence[Prompt], say: Callable[[str], None]) -> Evaluation:
    """The four parts for the senior's current weights; every random number follows from the config's seed."""
    e = team.config.eval
    sampling = _sampling(team.config)
    say(f"solo: {e.chains} chains for each of {len(prompts)} prompts")
    solo = _write(team, prompts, rollout_ids.EVALUATION, e.chains, sampling)
    correct = _judge(tasks, solo, "solo") if tasks.is_rewarded(prompts[0]) else None
    parts = [_Part(solo_figures(solo, correct, e.chains) + _by_set("solo", correct, prompts, e.chains))]
    junior, start = "junior" in team.roster.roles, _start(team)
    drawn: list[TandemSample] = []
    if junior or start is not None or correct is None:
        say(f"drift: {e.drift_samples} solo responses per prompt at temperature 1, scored by others")
        full = sampling.model_copy(update={"temperature": 1.0, "top_p": 1.0, "top_k": -1})
        drawn = _write(team, prompts, rollout_ids.DRIFT, e.drift_samples, full)
    if correct is None:
        say("the teachers score these")
        parts.append(_Part(_of_teachers(team, drawn, len(prompts)), notes=[NO_REWARD]))
    if not junior:
        lost = [part for part in _WITH_JUNIOR if correct is not None or part in ("drift", "legibility")]
        parts.append(_Part(missing=[r for part in lost for r in undefined(part, NO_JUNIOR)]))
    else:
        say(f"handoff: as many chains, strategy {e.handoff_strategy}, authors alternate, senior first")
        parts.append(_handoff(team, tasks, prompts, sampling, correct))
        parts += _read_by_junior(team, tasks if correct is not None else None, sampling, solo, drawn, say)
    parts.append(_Part(missing=undefined("start", NO_START)) if start is None else _from_start(team, start, drawn))

    figures = [f for part in parts for f in part.figures]
    estimates = bootstrap({f.name: f.ratio for f in figures}, resamples=e.resamples, seed=team.config.seed)
    results = [Result(f.name, f.label, f.unit, estimates[f.name]) for f in figures]
    results += [r for part in parts for r in part.missing]
    order = list(TITLES)
    return Evaluation(
        setup={
            "slime_tandem": __version__,
            "models": {role: str(folder) for role, folder in team.roster.folders.items()},
            "prompts": len(prompts),
            "chains": e.chains,
            "sampling": sampling.model_dump(exclude={"on_failed_sample"}),
            "handoff": {"strategy": e.handoff_strategy, "author_schedule": "alternate"},
            "drift_samples": e.drift_samples,
            "seed": team.config.seed,
            "bootstrap": {"unit": "prompt", "resamples": e.resamples, "level": LEVEL, "interval": "percentile"},
        },
        results=tuple(sorted(results, key=lambda r: order.index(r.part))),  # type: ignore[arg-type]
        notes=tuple(note for part in parts for note in part.notes),
    )


def _by_set(part: Part, correct: Sequence[bool] | None, prompts: Sequence[Prompt], chains: int) -> list[Figure]:
    return [] if correct is None else set_figures(part, correct, [prompt.task for prompt in prompts], chains)


def _of_teachers(team: Team, drawn: Sequence[TandemSample], prompts: int) -> list[Figure]:
    """Raises TeacherScoreError for a response that a teacher cannot score: figures of some are not figures of the prompts."""
    scores = with_revival(team, lambda: team.score(drawn, plain=True))
    if (failed := next((score for score in scores if isinstance(score, TeacherScoreError)), None)) is not None:
        raise failed
    scored = [ScoredSample(s, None, a, unasked=True) for s, a in zip(drawn, scores, strict=True)]  # type: ignore[arg-type]
    found = teachers_of(scored, prompts, team.config.eval.drift_samples)
    assert found is not None, "pure distillation has a teacher"
    return teacher_figures(found)


def _handoff(
    team: Team, tasks: TaskSet, prompts: Sequence[Prompt], sampling: SamplingConfig, solo_correct: Sequence[bool] | None
) -> _Part:
    """Chains in turns with the junior, with the solo chains' draws."""
    chains, rule = team.config.eval.chains, evaluation_rule(team.config, team.roster.student.tokens)
    written = _write(team, prompts, rollout_ids.EVALUATION, chains, sampling, rule)
    right = None if solo_correct is None else _judge(tasks, written, "handoff")
    figures = handoff_figures(written, right, solo_correct, chains) + _by_set("handoff", right, prompts, chains)
    if any(s.switches for s in written):
        return _Part(figures)
    # They would be a perfect 1 and 0, and mean nothing.
    nothing = Estimate(None, None, None, "no handoff happened")
    missing = [Result(f.name, f.label, f.unit, nothing) for f in figures if f.name.startswith(_COMPARED)]
    return _Part([f for f in figures if not f.name.startswith(_COMPARED)], missing, [_no_handoff(rule)])


def _read_by_junior(
    team: Team,
    tasks: TaskSet | None,
    sampling: SamplingConfig,
    solo: Sequence[TandemSample],
    drawn: Sequence[TandemSample],
    say: Callable[[str], None],
) -> list[_Part]:
    """Drift, transfer and legibility: what the junior thinks of text that the senior writes alone, and makes of half of it.

    `tasks` None: there is no reward, and so no transfer."""
    e, tokens, junior = team.config.eval, team.roster.student.tokens, team.roster.tokenizers["junior"]
    try:
        require_same_tokenizer(team.roster.student, junior)
    except TokenizerMismatchError as error:
        why = f"senior and junior have different tokenizers: {error}"
        lost: tuple[Part, ...] = ("drift", "transfer") if tasks is not None else ("drift",)
        parts = [_Part(missing=[r for part in lost for r in undefined(part, why)])]
        readings = [foreign_reading(s, tokens, junior.render, junior.encode) for s in solo]
    else:
        own = [own_reading(s, tokens) for s in drawn]
        both = _scores(team, "senior", own), _scores(team, "junior", own)
        parts = [_Part(drift_figures(*both, e.drift_samples, part="drift"))]
        readings = [own_reading(s, tokens) for s in solo]
        if tasks is not None:
            say("transfer: the junior goes on from the first half of the solo chains, and from nothing")
            half = _finished_right(team, tasks, sampling, solo, [first_half(s) for s in solo])
            alone = _finished_right(team, tasks, sampling, solo, [() for _ in solo])
            parts.append(_Part(transfer_figures(half, alone, e.chains)))
    say("legibility: the junior reads the solo chains")
    return [*parts, _Part(legibility_figures(readings, _scores(team, "junior", readings), e.chains))]


def _finished_right(
    team: Team,
    tasks: TaskSet,
    sampling: SamplingConfig,
    samples: Sequence[TandemSample],
    prefixes: Sequence[Sequence[int]],
) -> list[bool]:
    """Whether each answer is right that the junior finishes from its prefix."""

    async def finish() -> list[str]:
        client = team.servers.clients["junior"]
        await client.flush_cache()
        most = team.config.engine.max_batch
        return await finished(client, samples, prefixes, team.roster.student.tokens, sampling, most)

    texts = with_revival(team, lambda: team.servers.run(finish()))
    verdicts = tasks.verdicts([(s.prompt, text) for s, text in zip(samples, texts, strict=True)])
    return [v.right for v in rewarded(verdicts, "stop", "evaluation: transfer")]


def _start(team: Team) -> Path | None:
    """The folder of `eval.start`, whose tokenizer is the senior's; raises ConfigError for another."""
    named = team.config.eval.start
    if named is None:
        return None
    folder = resolve_model(named, Path(team.config.models.cache_dir))
    try:
        require_same_tokenizer(team.roster.student, ModelTokenizer.load(folder))
    except TokenizerMismatchError as error:
        raise ConfigError("eval.start", named, f"the tokenizer of the senior ({error})", "name its start") from None
    return folder


def _from_start(team: Team, start: Path, drawn: Sequence[TandemSample]) -> _Part:
    """KL of the senior to its start, whose weights the senior's server serves meanwhile."""
    own = [own_reading(s, team.roster.student.tokens) for s in drawn]
    senior, folder = _scores(team, "senior", own), team.roster.folders["senior"]
    team.send_weights(start, "start")
    try:
        before = _scores(team, "senior", own)
    finally:
        team.send_weights(folder, "senior")
    return _Part(drift_figures(senior, before, team.config.eval.drift_samples, part="start"))


def _sampling(config: RunConfig) -> SamplingConfig:
    e = config.eval
    return SamplingConfig(
        temperature=e.temperature,
        top_p=e.top_p,
        top_k=e.top_k,
        truncation_replay="recompute",  # nothing is trained: what was kept is not asked for
        max_new_tokens=config.sampling.max_new_tokens,
        stop=config.sampling.stop,
    )


def _write(
    team: Team,
    prompts: Sequence[Prompt],
    rollout_id: int,
    n: int,
    sampling: SamplingConfig,
    rule: HandoffRule | None = None,
) -> list[TandemSample]:
    """`n` responses per prompt, by the senior alone or in turns by `rule`. Raises EngineError if one could not be written."""
    written = with_revival(
        team, lambda: team.write(prompts, rollout_id, n, tandem=rule is not None, rule=rule, sampling=sampling)
    )
    return successful(written, "stop")


def _judge(tasks: TaskSet, samples: Sequence[TandemSample], part: Part) -> list[bool]:
    """Raises DataError for a response without a reward: figures of some responses are not figures of the prompts."""
    verdicts = tasks.verdicts([Response(s.prompt, s.text, s) for s in samples])
    return [v.right for v in rewarded(verdicts, "stop", f"evaluation: {part}")]


def evaluation_rule(config: RunConfig, tokens: TokenBytes) -> HandoffRule:
    """Authors alternate at the boundaries of `eval.handoff_strategy`, senior first.

    The boundary ids are the strategy's own, or `tandem.boundary_token_ids` where the strategy is also the run's. There may be
    none (a tokenizer without a token that ends in a blank line): then the senior writes all, and the notes say so.
    """
    named = config.eval.handoff_strategy
    own = config.tandem.boundary_token_ids if config.tandem.selection_strategy == named else None
    tandem = config.tandem.model_copy(
        update={
            "enabled": True,
            "selection_strategy": named,
            "author_schedule": "alternate",
            "boundary_token_ids": own,
        }
    )
    classes, field = tandem.boundary_classes, "eval.handoff_strategy"
    ids = boundary_ids(named, tokens.table, tokens.special, classes=classes, field=field) if own is None else own
    return rule_of(tandem, ids, tokens)


def _no_handoff(rule: HandoffRule) -> str:
    why = f"no chain has a boundary of strategy {rule.strategy!r} before its end"
    if find_strategy(rule.strategy).by_text and not rule.boundary:
        why = f"the tokenizer has no token that is a boundary of strategy {rule.strategy!r}"
    return (
        f"No handoff happened: {why}. The senior wrote every chain alone, so this says nothing about handoff robustness. "
        "Choose another place to hand over, e.g. --handoff-strategy word."
    )


def _scores(team: Team, role: Role, readings: Sequence[Reading]) -> list[FloatArray]:
    async def score() -> list[FloatArray]:
        # A kept prefix would change the last bits: the same command must give the same figures.
        await team.servers.clients[role].flush_cache()
        return await log_probs_of(
            team.servers.clients[role], readings, role=role, max_batch=team.config.engine.max_batch
        )

    return with_revival(team, lambda: team.servers.run(score()))
