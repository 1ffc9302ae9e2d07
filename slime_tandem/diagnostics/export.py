"""Makes a bank of fixed contexts: responses of a student, scored by it and by a teacher, and some positions of them.

Responses are written by the run's senior on held-out prompts, or read from a JSONL file (`team/score_file.py` has its format).
Scores are over the whole set of responses (the batch) before positions are drawn. It trains nothing: what training does there
is measured by `rescore.py` and `gain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slime_tandem import __version__
from slime_tandem.config import RunConfig
from slime_tandem.diagnostics.bank import BANK, QUADRANTS, VERSION, bank_id, vocabulary_of, weights_fingerprint, writing
from slime_tandem.diagnostics.output import Report, Row, plain, write_report
from slime_tandem.distill.alignment import UNALIGNED_REASONS
from slime_tandem.distill.panel import student_candidates
from slime_tandem.distill.selection import TokenKeys
from slime_tandem.distill.teachability import (
    Compatibility,
    MissingMass,
    Normalisation,
    RawScores,
    TokenScores,
    TopLists,
    raw_scores,
    token_scores,
)
from slime_tandem.distill.teacher import Scoring, Teacher
from slime_tandem.errors import ConfigError, DataError, TeacherScoreError
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import successful, with_revival
from slime_tandem.team.roster import Roster
from slime_tandem.team.score_file import read_responses
from slime_tandem.team.team import Team
from slime_tandem.types import AlignedScores, BoolArray, FloatArray, IntArray, TandemSample

Sampling = Literal["quadrant", "uniform"]


@dataclass(frozen=True)
class BankPlan:
    """What goes into a bank.

    `sequences` responses (all lines of `responses` if that is given), about `per_sequence` positions of each, drawn
    `uniform`ly from each response or equally many from each `quadrant`; lists of `top_k`.

    `missing_mass` None: exact with one vocabulary, rest with two (the same byte string is not the same event there).
    """

    sequences: int = 300
    per_sequence: int = 16
    sampling: Sampling = "quadrant"
    top_k: int = 16
    missing_mass: MissingMass | None = None
    compatibility: Compatibility = "mass"
    normalisation: Normalisation = "batch_quantile"
    seed: int = 0
    responses: Path | None = None


@dataclass(frozen=True)
class _Scored:
    """One response with both sides' lists at its aligned positions `at` [n]; arrays over them."""

    sample: TandemSample
    name: str
    teacher_prompt: list[int]
    teacher_ids: tuple[int, ...]
    teacher_index: IntArray
    at: IntArray
    log_prob: FloatArray
    teacher_log_prob: FloatArray
    lists: TopLists


def export_bank(config: RunConfig, plan: BankPlan, output: Path, say: Callable[[str], None]) -> Report:
    """Write the bank to `output`, FILE.parquet, and beside it a report of what is in it. Starts the servers that it needs
    and stops them.

    Raises ConfigError for a plan that cannot be and for another ending of `output` (the report's files are named by it),
    DataError for broken responses, EngineError kinds, and what `Roster` and `Team` raise.
    """
    for field, value in (("--sequences", plan.sequences), ("--positions", plan.per_sequence), ("--top-k", plan.top_k)):
        if value < 1:
            raise ConfigError(field, value, "at least 1", "raise it")
    if output.suffix != ".parquet":
        raise ConfigError("--output", str(output), "a name that ends in .parquet", "rename it")
    if plan.compatibility == "prefix":
        remedy = "choose mass, overlap or bhattacharyya"
        raise ConfigError("--compatibility", "prefix", "one that needs no neighbours: tokens may be masked", remedy)
    if any(spec.scorer is not None for spec in config.opd.teachers):
        expected = "teachers with a model: a bank holds lists of likely tokens"
        raise ConfigError("opd.teachers", [spec.name for spec in config.opd.teachers], expected, "give it one")
    config = _for_bank(config)
    tasks = (
        None
        if plan.responses
        else TaskSet(config.tasks, config.seed, config.reward, labels=config.objective.reward_coef > 0)
    )
    with Team(Roster(config), config.run_dir / "logs") as team:
        [teacher] = team.panel.teachers
        rule = _rule(team, teacher, plan)
        named = _responses(team, tasks, plan, say)
        say(f"scoring {len(named)} responses with student and teacher, lists of {plan.top_k}, missing mass: {rule}")
        student, of_teacher = (_facts(team, role) for role in ("senior", *team.roster.teacher_specs))
        scored, failed = with_revival(
            team, lambda: team.servers.run(_score_all(team, teacher, named, plan.top_k, rule))
        )
    counts = {name: sum(a.unaligned[name] for _, a in scored) for name in UNALIGNED_REASONS}
    counts["no_shared_entry"] = sum(int(a.mask.sum()) - len(s.at) for s, a in scored)
    table, population = _rows([s for s, _ in scored], rule, plan)
    meta: dict[str, Any] = {
        "banks": [bank_id(table)],
        "k": plan.top_k,
        "missing_mass": rule,
        "compatibility": plan.compatibility,
        "normalisation": plan.normalisation,
        "comparison": "tokens" if student["vocabulary"] == of_teacher["vocabulary"] else "next_byte",
        "student": student,
        "teacher": of_teacher,
        "slime_tandem": __version__,
        "sampling": plan.sampling,
        "seed": plan.seed,
        "source": str(plan.responses) if plan.responses else "held-out prompts",
        "responses": len(named),
        "failed_responses": failed,
        "valid_tokens": len(population.valid),
        "masked_tokens": counts,
    }
    report = _describe(table, population, meta, output)
    write_report(report, output.with_suffix(""))
    with writing(output, BANK, meta) as sink:  # last: whoever finds the bank finds all of it
        sink.write(table)
    return report


def _facts(team: Team, role: str) -> dict[str, str | None]:
    """What the bank says of a model; the weights of a server that is not ours are unknown."""
    folder = team.roster.folders[role]
    weights = weights_fingerprint(folder) if role in team.servers.processes else None
    return {"model": str(folder), "vocabulary": vocabulary_of(team.roster.tokenizers[role].tokens), "weights": weights}


def _for_bank(config: RunConfig) -> RunConfig:
    """The student alone and one teacher."""
    if len(config.opd.teachers) > 1:
        names = [t.name for t in config.opd.teachers]
        raise ConfigError("opd.teachers", names, "one teacher for a bank", "make a bank for each of them")
    return RunConfig.from_mapping(
        {
            **config.model_dump(),
            "tandem": config.tandem.model_dump() | {"enabled": False},
            "opd": config.opd.model_dump() | {"enabled": True, "alignment": "strict", "overlap": None},
        }
    )


def _rule(team: Team, teacher: Teacher, plan: BankPlan) -> MissingMass:
    """The rule for what lists do not hold; refuses a K that no server can answer."""
    for role in team.roster.roles:
        size = len(team.roster.tokenizers[role].tokens.table)
        reported = team.servers.run(team.servers.clients[role].model_info()).get("vocab_size")
        limit = reported if isinstance(reported, int) else size
        if plan.top_k > limit:
            raise ConfigError("--top-k", plan.top_k, f"at most {limit}, what the {role}'s server can list", "lower it")
    same = vocabulary_of(teacher.aligner.student) == vocabulary_of(teacher.aligner.teacher)
    if plan.missing_mass == "exact" and not same:
        raise ConfigError(
            "--missing-mass",
            "exact",
            "rest or fill with a teacher of another vocabulary, where the same bytes are not the same event",
            "choose rest",
        )
    return plan.missing_mass or ("exact" if same else "rest")


def _responses(
    team: Team, tasks: TaskSet | None, plan: BankPlan, say: Callable[[str], None]
) -> list[tuple[str, TandemSample]]:
    """(name, sample) of every response with at least one token."""
    if tasks is None:
        assert plan.responses is not None
        found = [
            (str(name), replace(s, prompt_ids=tuple(team.roster.student.render(s.prompt.messages))))
            for name, s in read_responses(plan.responses, team.roster.student)
        ]
    else:
        prompts = tasks.heldout_prompts(plan.sequences)
        say(f"writing {len(prompts)} responses to held-out prompts")
        written = with_revival(team, lambda: team.write(prompts, rollout_ids.BANK, 1, tandem=False))
        samples = successful(written, team.config.sampling.on_failed_sample)
        found = [(s.prompt.prompt_id, s) for s in samples]
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError("id", twice, "a name of its own for every response", "correct the `id`s in the file")
    found = [(name, s) for name, s in found if s.response_ids]
    if not found:
        raise DataError("responses", "no tokens", "at least one response that is not empty", "see the source")
    return found


async def _score_all(
    team: Team, teacher: Teacher, named: Sequence[tuple[str, TandemSample]], k: int, rule: MissingMass
) -> tuple[list[tuple[_Scored, AlignedScores]], int]:
    """Both sides' lists of each response, and how many have none because an answer was unusable."""
    senior = team.servers.clients["senior"]
    for client in team.servers.clients.values():
        await client.flush_cache()  # a kept prefix would change the last bits
    samples = [s for _, s in named]
    tops = await student_candidates(senior, samples, k)
    good = [i for i, top in enumerate(tops) if not isinstance(top, TeacherScoreError)]
    lists = {i: top for i, top in enumerate(tops) if not isinstance(top, TeacherScoreError)}
    scoring = Scoring("strict", lists=k, cross=rule == "exact")
    answers = await teacher.score([samples[i] for i in good], scoring, [lists[i] for i in good], senior)
    out: list[tuple[_Scored, AlignedScores]] = []
    for i, answer in zip(good, answers, strict=True):
        if isinstance(answer, AlignedScores):
            out.append((_one(teacher, *named[i], answer), answer))
    if not out:
        first = next(e for e in (*tops, *answers) if isinstance(e, TeacherScoreError))
        raise first.within(f"none of {len(named)} responses could be scored; the first")
    return out, len(named) - len(out)


def _one(teacher: Teacher, name: str, sample: TandemSample, scores: AlignedScores) -> _Scored:
    prompt, text = teacher.conversation(sample)
    assert scores.lists is not None
    at = np.flatnonzero(scores.mask & scores.lists.shared)
    return _Scored(
        sample,
        name,
        list(prompt),
        text.ids,
        teacher.aligner.align(text).teacher_index,
        at,
        np.array(sample.log_probs)[at],
        scores.log_probs[at],
        scores.lists.at(at),
    )


def _rows(scored: Sequence[_Scored], rule: MissingMass, plan: BankPlan) -> tuple[pa.Table, TokenScores]:
    """The bank's rows, in the responses' order, and the scores of the whole batch."""

    lists = TopLists.concatenate([s.lists for s in scored])
    valid: BoolArray = np.ones(len(lists), np.bool_)
    if not len(lists):
        raise DataError("responses", "no aligned token", "at least one that the teacher can score", "align them")
    raw = raw_scores(lists, rule, plan.compatibility)
    scores = token_scores(raw, valid, plan.normalisation)
    sequence = np.repeat(np.arange(len(scored)), [len(s.at) for s in scored])
    keys = TokenKeys(sequence, np.concatenate([s.at for s in scored]))
    quadrant = quadrants(raw)
    chosen, weight = choose_positions(quadrant, keys, plan.sampling, plan.per_sequence, plan.seed)
    first = np.cumsum([0, *(len(s.at) for s in scored)])
    columns: dict[str, list[Any]] = {name: [] for name in BANK.schema.names}
    for i, w in zip(chosen.tolist(), weight.tolist(), strict=True):
        s = scored[int(sequence[i])]
        row = i - int(first[int(sequence[i])])
        position = int(s.at[row])
        s_there, t_there = lists.student_ids[i] >= 0, lists.teacher_ids[i] >= 0
        values: dict[str, Any] = {
            "sample": s.name,
            "position": position,
            "token": s.sample.response_ids[position],
            "prompt_ids": s.sample.prompt_ids,
            "response_ids": s.sample.response_ids,
            "teacher_prompt_ids": s.teacher_prompt,
            "teacher_response_ids": s.teacher_ids,
            "teacher_position": int(s.teacher_index[position]),
            "log_prob": float(s.log_prob[row]),
            "teacher_log_prob": float(s.teacher_log_prob[row]),
            "H": raw.entropy[i],
            "Ht": raw.teacher_entropy[i],
            "D": raw.divergence[i],
            "D_reverse": raw.reverse_divergence[i],
            "C": raw.compatibility[i],
            "H_line": scores.H.unclipped[i],
            "D_line": scores.D.unclipped[i],
            "C_line": scores.C.unclipped[i],
            "quadrant": int(quadrant[i]),
            "weight": w,
            "student_top_ids": lists.student_ids[i][s_there].tolist(),
            "student_top_log_probs": lists.student_log_probs[i][s_there].tolist(),
            "teacher_top_ids": lists.teacher_ids[i][t_there].tolist(),
            "teacher_top_log_probs": lists.teacher_log_probs[i][t_there].tolist(),
            "teacher_on_student": [],
            "student_on_teacher": [],
        }
        if lists.teacher_on_student is not None and lists.student_on_teacher is not None:
            values["teacher_on_student"] = lists.teacher_on_student[i][s_there].tolist()
            values["student_on_teacher"] = lists.student_on_teacher[i][t_there].tolist()
        for name, value in values.items():
            columns[name].append(value)
    return pa.table(columns, schema=BANK.schema), scores


def quadrants(raw: RawScores) -> npt.NDArray[np.int8]:
    """[N]: 1 to 4 (`QUADRANTS`); high is at or above the median.

    >>> zero = np.zeros(4)
    >>> h, d = np.array([1.0, 0.9, 0.1, 0.2]), np.array([3.0, 0.1, 2.0, 0.2])
    >>> quadrants(RawScores(h, zero, d, zero, zero)).tolist()
    [1, 2, 3, 4]
    """
    high_h = raw.entropy >= np.median(raw.entropy)
    high_d = raw.divergence >= np.median(raw.divergence)
    return np.where(high_h, np.where(high_d, 1, 2), np.where(high_d, 3, 4)).astype(np.int8)


def choose_positions(
    quadrant: npt.NDArray[np.int8], keys: TokenKeys, sampling: Sampling, per_sequence: int, seed: int
) -> tuple[IntArray, FloatArray]:
    """(indices in ascending order, weight of each: how many tokens of its stratum it stands for).

    Strata are the responses (`uniform`) or the quadrants, whose budget is `per_sequence` times the number of responses in
    equal parts; what a small stratum cannot give the others do. A token's draw depends on seed and token alone.

    >>> keys = TokenKeys(np.array([0, 0, 0, 1]), np.array([0, 1, 2, 0]))
    >>> chosen, weight = choose_positions(np.ones(4, np.int8), keys, "uniform", 2, seed=0)
    >>> len(chosen), float(weight.sum())
    (3, 4.0)
    """
    stratum = keys.sequence if sampling == "uniform" else quadrant.astype(np.int64)
    names, sizes = np.unique(stratum, return_counts=True)
    if sampling == "uniform":
        budget = np.minimum(sizes, per_sequence)
    else:
        budget = _fair(sizes, per_sequence * len(np.unique(keys.sequence)))
    order = np.lexsort((keys.draws(seed, rollout_ids.BANK), stratum))
    chosen, weight = [], []
    for name, size, n in zip(names, sizes, budget, strict=True):
        chosen.append(order[stratum[order] == name][:n])
        weight.append(np.full(n, size / max(n, 1)))
    picked = np.concatenate(chosen)
    ascending = np.argsort(picked)
    return picked[ascending], np.concatenate(weight)[ascending]


def _fair(sizes: IntArray, total: int) -> IntArray:
    """Split `total` over strata as evenly as their sizes allow."""
    out = np.zeros_like(sizes)
    for rank, i in enumerate(np.argsort(sizes, kind="stable")):
        share = (total - int(out.sum())) // (len(sizes) - rank)
        out[i] = min(int(sizes[i]), share)
    return out


def _describe(table: pa.Table, population: TokenScores, meta: Mapping[str, Any], output: Path) -> Report:
    quadrant, weight = table.column("quadrant").to_numpy(), table.column("weight").to_numpy()
    rows = [
        Row("contexts", "contexts", plain(float(len(table))), "rows"),
        Row(
            "contexts",
            "responses with a context",
            plain(float(len(set(table.column("sample").to_pylist())))),
            "responses",
        ),
        Row("contexts", "valid tokens of the batch", plain(float(len(population.valid))), "tokens"),
        Row("contexts", "tokens without a teacher score", plain(float(sum(meta["masked_tokens"].values()))), "tokens"),
        Row("contexts", "responses without scores", plain(float(meta["failed_responses"])), "responses"),
    ]
    for q in range(1, 5):
        mine = quadrant == q
        share = float(weight[mine].sum() / weight.sum())
        rows.append(Row("share of the batch's tokens", QUADRANTS[q], plain(share), "fraction", int(mine.sum())))
    for name, unit in (("H", "0 to 1"), ("D", "nats"), ("C", "0 to 1")):
        for p in (5, 25, 50, 75, 95):
            value = float(np.quantile(table.column(name).to_numpy(), p / 100))
            rows.append(Row(f"quantiles of {name} over the bank", f"{p}%", plain(value), unit))
    setup = {"bank": output.name, "version": VERSION, **meta}
    return Report(f"Fixed contexts in {output.name}", setup, rows, undrawn=frozenset({"contexts"}))
