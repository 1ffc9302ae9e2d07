"""The one place that knows slime's fields: which of a sample, and which key of a batch, carries what of ours.

slime ships a fixed list of keys from its rollout manager to its trainers and casts loss masks to int on the way. Our
per-token numbers therefore travel as one float tensor [R, C] in `sample.teacher_log_probs`, the one field that is cast to
float32, partitioned over data-parallel ranks and sliced for context parallelism along its first axis. What a response
is beside its tokens (authors, runs, teacher scores) stays in `sample.metadata`, for dumps and for resumed samples.

Checked against THUDM/slime 624b824a (ray/rollout.py, backends/megatron_utils/{actor,data,cp_utils}.py). Samples are slime's
own objects, taken as they come: nothing here imports slime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, Reduction, RunConfig
from slime_tandem.errors import (
    DataError,
    TeacherScoreError,
    UnreadRolesError,
    UnreadTemplateError,
    UnreadToolsError,
)
from slime_tandem.objective.loss import PackedTokens
from slime_tandem.tasks.columns import WHOLE_LABEL
from slime_tandem.tasks.jsonl import parse_messages
from slime_tandem.tasks.judging import Verdict
from slime_tandem.training.rows import TrainRow
from slime_tandem.types import (
    SENIOR,
    AlignedScores,
    AuthorRun,
    Candidates,
    FinishReason,
    FloatArray,
    Message,
    Prompt,
    SampleKey,
    TandemSample,
    TopLists,
)

CARRIER = "teacher_log_probs"
"""The field of a sample and key of a batch that the channels travel in."""
RECORD = "slime_tandem"
"""The key of `sample.metadata` under which a response's record stands."""
SCORES = "slime_tandem_scores"
"""The same for what the teachers said of it."""
PROBLEM = "slime_tandem_reward"
"""The same for the limit that scoring its response went past: `timeout` or `error`."""
UNREWARDED = "slime_tandem_no_reward"
"""The same for whose reward gave none, and why."""
UNASKED = "slime_tandem_reward_unasked"
"""The same for there being none to be found."""
PARTS = "slime_tandem_reward_parts"
"""The same for the named parts of its reward."""
MESSAGES = "messages"
"""The key of `sample.metadata` with the raw chat messages of the prompt."""
COLUMNS = "slime_tandem_columns"
"""The key of `sample.metadata` for columns of a prompt whose names mean something else there."""
OF_PLANS = ("task", "prompt_id")
"""Keys of a row's metadata that a plan writes beside the prompt's own columns."""
OURS = (MESSAGES, RECORD, SCORES, PROBLEM, UNREWARDED, UNASKED, PARTS, COLUMNS)
"""Keys of `sample.metadata` that are no columns of the prompt."""

OLD, WEIGHT, OPD_WEIGHT, OPD_SHARE, TEACHER, SHARE, JUNIOR, JUNIOR_LOG_PROB = range(8)
FIXED = 8
"""Columns before the candidates: ids [K], then the teacher's log-probs of them [K]."""
_LARGEST_ID = 2**24
"""float32 holds every whole number up to here."""


def pack(row: TrainRow, width: int = 0, config: RunConfig | None = None) -> Tensor:
    """The channels [R, 8 + 2 width] of a row, float32: old log-probs, policy-gradient weights, OPD weights, the row's part of
    the OPD denominator (spread over its tokens), teacher log-probs, the row's part of what `objective.reduction` divides by
    (likewise; None: token_mean), what the senior did not write (the weights of `lambda_jun`, where it is on) and the
    junior's log-probs; then `width` candidate ids (-1: none) and their log-probs.

    Raises DataError for a number that float32 or slime's casts would change: not finite, or an id of 2^24 and more.
    """
    R = row.response_length
    channels = np.zeros((R, FIXED + 2 * width), dtype=np.float64)
    columns = (row.old_log_probs, row.weights, row.opd_weights, np.full(R, row.opd_share / max(R, 1)))
    for column, values in enumerate((*columns, row.teacher_log_probs, _shares(row, config))):
        channels[:, column] = values
    if row.replayed is not None:
        channels[:, JUNIOR] = ~row.replayed
    if row.junior_weights is not None:
        assert row.junior_log_probs is not None
        channels[:, JUNIOR] = row.junior_weights
        channels[:, JUNIOR_LOG_PROB] = np.where(row.junior_weights > 0, row.junior_log_probs, 0.0)
    if width:
        channels[:, FIXED : FIXED + width] = -1
    if row.candidates is not None:
        k = row.candidates.ids.shape[1]
        assert k <= width, "the width is that of the widest row"
        if row.candidates.ids.size and int(row.candidates.ids.max()) >= _LARGEST_ID:
            worst = int(row.candidates.ids.max())
            raise DataError("candidate id", worst, f"ids below {_LARGEST_ID}", "set opd.signal=sampled")
        channels[:, FIXED : FIXED + k] = row.candidates.ids
        channels[:, FIXED + width : FIXED + width + k] = row.candidates.teacher_log_probs
    if not np.isfinite(channels).all():
        r, c = np.argwhere(~np.isfinite(channels))[0]
        where = f"channel {c} of response token {r}, group {row.group_id}"
        raise DataError(where, channels[r, c], "a finite number", "see the engine that gave it")
    return torch.from_numpy(channels).float()


def _shares(row: TrainRow, config: RunConfig | None) -> FloatArray:
    """[R]: adds up over a step to what `objective.reduction` divides by, as `Denominators.over` has it."""
    reduction = "token_mean" if config is None else config.objective.reduction
    if reduction == "token_mean":
        return row.weights
    if reduction == "sequence_mean":
        return row.weights / max(float(row.weights.sum()), 1e-8)
    assert config is not None
    length = config.objective.constant_length or config.sampling.max_new_tokens
    return np.full(row.response_length, length / max(row.response_length, 1))


def width_of(rows: Sequence[TrainRow]) -> int:
    """Candidates per position that a rollout's rows need."""
    return max((row.candidates.ids.shape[1] for row in rows if row.candidates is not None), default=0)


def packed_tokens(
    channels: Tensor, advantages: Tensor, ref_log_probs: Tensor | None, objective: ObjectiveConfig | None = None
) -> PackedTokens:
    """What the loss takes, from channels [T, C] that `normalise` made, and the sample advantages [T]."""
    pulls = objective is not None and objective.lambda_jun > 0
    width = (channels.shape[1] - FIXED) // 2
    return PackedTokens(
        old_log_probs=channels[:, OLD],
        advantages=advantages,
        weights=channels[:, WEIGHT],
        opd_weights=channels[:, OPD_WEIGHT],
        teacher_log_probs=channels[:, TEACHER],
        ref_log_probs=ref_log_probs,
        candidate_ids=channels[:, FIXED : FIXED + width].long() if width else None,
        candidate_teacher=channels[:, FIXED + width :] if width else None,
        junior_weights=channels[:, JUNIOR] if pulls else None,
        junior_log_probs=channels[:, JUNIOR_LOG_PROB] if pulls else None,
        reduced=channels[:, SHARE],
    )


def carried(batch: Mapping[str, Any]) -> list[Tensor]:
    """The channels of a batch, one [r, C] per sample (r: the tokens of this context-parallel rank).

    Raises DataError where the key is empty, holds something else, or does not lie token for token on `rollout_log_probs`,
    which slime slices on its own.
    """
    remedy = (
        "name reward_post_process, advantages, data_post_process and before_train_step in slime's flags (docs/slime.md)"
    )
    found = batch.get(CARRIER)
    if found is None:
        raise DataError(f"batch[{CARRIER!r}]", None, "our channels [R, C]", remedy)
    for i, (channels, log_probs) in enumerate(zip(found, batch["rollout_log_probs"], strict=True)):
        if channels.dim() != 2 or channels.shape[1] < FIXED:
            raise DataError(f"batch[{CARRIER!r}][{i}]", tuple(channels.shape), "our channels [R, C]", remedy)
        if not torch.equal(channels[:, OLD], log_probs):
            where = f"old log-probs of sample {i} in batch[{CARRIER!r}]"
            expected = "those of rollout_log_probs, token for token"
            raise DataError(where, channels[:, OLD].tolist()[:8], expected, "report this with slime's version")
    return list(found)


def checksum(channels: Sequence[Tensor], sample_indices: Sequence[int]) -> int:
    """A 64-bit sum over all tokens of a hash of (sample index, the float32 bits of the token's channels).

    It does not depend on the order of samples, nor on how tokens are spread over ranks: the sum of the ranks' check-sums,
    modulo 2^64, is that of the whole rollout.

    >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])
    >>> whole = checksum([a, b], [0, 1])
    >>> whole == (checksum([b, a[:1]], [1, 0]) + checksum([a[1:]], [0])) % 2**64, whole == checksum([a, b], [1, 0])
    (True, False)
    """
    total = 0
    for tensor, index in zip(channels, sample_indices, strict=True):
        bits = tensor.detach().float().cpu().contiguous().numpy().view(np.uint32).astype(np.uint64)
        word = np.full(len(bits), (index * 0x9E3779B97F4A7C15 + 1) % 2**64, dtype=np.uint64)
        for column in bits.T:
            word = (word ^ column) * np.uint64(0xBF58476D1CE4E5B9)
            word ^= word >> np.uint64(29)
        total += int(word.sum(dtype=np.uint64))
    return total % 2**64


@dataclass(frozen=True)
class StepTotals:
    """Sums of the weights of one optimizer step over all ranks, and the rollouts that slime divides its loss by."""

    pg: float
    opd: float
    share: float
    junior: float
    rollouts: int

    COLUMNS: ClassVar = (WEIGHT, OPD_SHARE, SHARE, JUNIOR)
    """What `pg`, `opd`, `share` and `junior` are the sums of."""


def normalise(channels: Tensor, totals: StepTotals, reduction: Reduction = "token_mean") -> Tensor:
    """Channels with weights that make slime's sum over micro-batches, divided by its rollouts, our weighted means.

    Our terms are means over sums of weights, slime's loss is a sum over samples divided by the number of rollouts of the step.
    The column SHARE becomes what each token counts in the policy gradient and the KL.
    """
    out = channels.clone()
    counts = channels[:, SHARE] if reduction == "sequence_mean" else channels[:, WEIGHT]
    out[:, SHARE] = counts * (totals.rollouts / max(totals.share, 1e-8))
    for column, total in ((WEIGHT, totals.pg), (OPD_WEIGHT, totals.opd), (JUNIOR, totals.junior)):
        out[:, column] *= totals.rollouts / max(total, 1e-8)
    return out


# ---- a response in a sample ----


def groups_of(samples: Sequence[Any]) -> list[int]:
    """The group of each sample: slime's `group_index`; where that is None, those of one prompt are one (numbers below 0).

    Raises DataError for a sample with neither: whom it is to be compared with is nobody's to guess.
    """
    prompts: dict[str, int] = {}
    groups = []
    for sample in samples:
        if sample.group_index is not None:
            groups.append(sample.group_index)
            continue
        raw = (sample.metadata or {}).get(MESSAGES) or sample.prompt
        identity = raw or list(sample.tokens[: len(sample.tokens) - sample.response_length])
        if not identity:
            raise DataError(
                f"group_index of sample {sample.index}",
                None,
                "a group, or a prompt by which its group is known",
                "let the data source number the groups",
            )
        groups.append(prompts.setdefault(repr(identity), -1 - len(prompts)))
    return groups


def metadata_of(prompt: Prompt) -> dict[str, Any]:
    """The metadata of a prompt's row as a plan writes it: `prompt_of` makes the same columns of it, whatever their names."""
    names = {name for name in prompt.metadata if name in OURS or name in OF_PLANS}
    columns = {name: value for name, value in prompt.metadata.items() if name not in names}
    apart = {COLUMNS: {name: prompt.metadata[name] for name in names}} if names else {}
    return {**columns, **apart, "task": prompt.task, "prompt_id": prompt.prompt_id}


def prompt_of(sample: Any) -> Prompt:
    """Our view of a slime sample's prompt; no messages where only rendered text is known.

    Raises DataError for messages that are none.
    """
    metadata = sample.metadata or {}
    raw = metadata.get(MESSAGES, sample.prompt if isinstance(sample.prompt, list) else None)
    messages: tuple[Message, ...] = ()
    if raw is not None:
        messages = parse_messages(raw, f"messages of sample {sample.index}", may_be_text=True)
    kept = {name: value for name, value in metadata.items() if name not in OURS} | metadata.get(COLUMNS, {})
    label = sample.label
    if isinstance(label, list | dict | bool):  # no one answer: rewards of the user's get it whole
        label, kept[WHOLE_LABEL] = None, label
    label = None if label is None else str(label)
    return Prompt(f"slime/{sample.group_index}", messages, label, str(metadata.get("task", "slime")), kept)


def put_response(sample: Any, response: TandemSample, *, junior_weight: float) -> None:
    """Fill a slime sample with a response: its own fields, and the record. An aborted one can be resumed from it.

    slime's loss mask is 1 where a token carries policy gradient, so that slime's own losses and means do what they say.
    """
    status = type(sample).Status
    R = len(response.response_ids)
    sample.tokens = [*response.prompt_ids, *response.response_ids]
    sample.response, sample.response_length = response.text, R
    counts = [a == SENIOR or junior_weight > 0 for a in response.authorship_mask]
    sample.loss_mask = [int(c and m) for c, m in zip(counts, response.loss_mask, strict=True)]
    sample.rollout_log_probs = list(response.log_probs)
    sample.status = {"stop": status.COMPLETED, "length": status.TRUNCATED, "abort": status.ABORTED}[
        response.finish_reason
    ]
    versions = [run.weight_version for run in response.runs if run.author == SENIOR]
    sample.weight_versions = list(dict.fromkeys(versions))
    key = response.key
    sample.metadata[RECORD] = {
        "key": [key.seed, key.rollout_id, key.sample_index],
        "finish_reason": response.finish_reason,
        "authorship_mask": list(response.authorship_mask),
        "log_probs": list(response.log_probs),
        "senior_log_probs": list(response.senior_log_probs),
        "runs": [[run.author, run.start, run.stop, run.weight_version] for run in response.runs],
        "discarded_tokens": response.discarded_tokens,
        "requests": response.requests,
        "inserted": [list(span) for span in response.inserted],
        "inserted_messages": [[m.as_dict() for m in turn] for turn in response.inserted_messages],
        "fallback_starts": list(response.fallback_starts),
    }


def put_ends(sample: Any, eos_ids: frozenset[int], text_markers: int) -> None:
    """Keep which of the response's ids end turns, and how many control tokens stand in its untrusted text."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    sample.metadata[RECORD] |= {"ends": sorted(eos_ids & set(response)), "text_markers": text_markers}


def ends_of(samples: Sequence[Any]) -> frozenset[int]:
    """The ids that end turns, as far as they stand in these responses."""
    return frozenset(i for s in samples for i in (s.metadata or {}).get(RECORD, {}).get("ends", ()))


def markers_of(samples: Sequence[Any]) -> float:
    """How many control tokens stand in the untrusted text of these samples."""
    return float(sum(s.metadata[RECORD].get("text_markers", 0) for s in samples))


def put_failure(sample: Any, reason: str, prompt_ids: Sequence[int], filler: int) -> None:
    """Mark a sample whose response could not be written: one token without weight (slime needs one), removed, not rewarded."""
    sample.tokens, sample.response, sample.response_length = [*prompt_ids, filler], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.remove_sample = [0], [0.0], True
    sample.reward, sample.status = 0.0, type(sample).Status.FAILED
    sample.metadata[RECORD] = {"failed": reason}


def failure_of(sample: Any) -> str | None:
    """Why a sample's response could not be written; None for one that was."""
    reason = (sample.metadata or {}).get(RECORD, {}).get("failed")
    return None if reason is None else str(reason)


def put_verdict(sample: Any, verdict: Verdict) -> None:
    """Keep what a reward of ours said beside its number: which limit it went past, why there is none, its parts."""
    found: dict[str, Any] = {}
    if verdict.problem is not None:
        found[PROBLEM] = verdict.problem
    if verdict.failed:
        found[UNREWARDED] = {"by": verdict.by, "why": verdict.why or str(verdict.problem)}
    if verdict.unasked:
        found[UNASKED] = True
    if verdict.parts:
        found[PARTS] = dict(verdict.parts)
    if found:
        sample.metadata = {**(sample.metadata or {}), **found}


def verdict_of(sample: Any) -> Verdict:
    """What `put_verdict` kept, for counting."""
    metadata = sample.metadata or {}
    if metadata.get(UNASKED):
        return Verdict(None)
    if UNREWARDED in metadata:
        return Verdict(None, metadata.get(PROBLEM), **metadata[UNREWARDED])
    return Verdict(0.0, metadata.get(PROBLEM))


def parts_of(sample: Any) -> dict[str, float]:
    """The named parts of a sample's reward: ours, or the numbers of slime's own mapping (`--reward-key`)."""
    found = (sample.metadata or {}).get(PARTS)
    if found is None:
        found = sample.reward if isinstance(sample.reward, Mapping) else {}
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def response_of(sample: Any, seed: int = 0) -> TandemSample:
    """The response in a slime sample. One without our record (slime's own generate wrote it) is the senior's alone.

    Raises DataError for a sample without log-probs, or whose tokens are not those of the record.
    """
    R = sample.response_length
    n = len(sample.tokens) - R
    prompt_ids, response_ids = tuple(sample.tokens[:n]), tuple(sample.tokens[n:])
    group = -1 if sample.group_index is None else sample.group_index
    record = (sample.metadata or {}).get(RECORD)
    status = type(sample).Status
    if record is None:
        log_probs = sample.rollout_log_probs
        if log_probs is None or len(log_probs) != R:
            got = None if log_probs is None else f"{len(log_probs)} values"
            expected = f"one log-prob for each of {R} tokens"
            raise DataError(f"rollout_log_probs of sample {sample.index}", got, expected, "let generate ask for them")
        sampled = [1] * R if sample.loss_mask is None else list(sample.loss_mask)
        ends: dict[Any, FinishReason] = {status.TRUNCATED: "length", status.ABORTED: "abort"}
        finish = ends.get(sample.status, "stop")
        return TandemSample(
            SampleKey(seed, 0, sample.index), group, prompt_of(sample), prompt_ids, response_ids, tuple(sampled),
            tuple(log_probs), finish, sample.response, (), requests=1, inserted=_zeros(sampled),
        )  # fmt: skip
    if len(record["authorship_mask"]) != R:
        raise DataError(
            f"tokens of sample {sample.index}",
            R,
            f"the {len(record['authorship_mask'])} that generate wrote",
            "leave a sample's tokens as they are, or remove its record from metadata",
        )
    return TandemSample(
        key=SampleKey(*record["key"]),
        group_id=group,
        prompt=prompt_of(sample),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        authorship_mask=tuple(record["authorship_mask"]),
        log_probs=tuple(record["log_probs"]),
        finish_reason=record["finish_reason"],
        text=sample.response,
        runs=tuple(AuthorRun(*run) for run in record["runs"]),
        discarded_tokens=record["discarded_tokens"],
        requests=record["requests"],
        inserted=tuple((a, b) for a, b in record["inserted"]),
        senior_log_probs=tuple(record["senior_log_probs"]),
        fallback_starts=tuple(record["fallback_starts"]),
        inserted_messages=tuple(tuple(Message.of(m) for m in turn) for turn in record["inserted_messages"]),
    )


def _zeros(mask: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Spans of zeros in a mask."""
    edges = np.flatnonzero(np.diff([1, *mask, 1]))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def put_scores(sample: Any, scores: AlignedScores | TeacherScoreError) -> None:
    """Keep what the teachers said of a sample, as plain arrays (an alignment's own tables stay behind)."""
    record = sample.metadata.setdefault(SCORES, {})
    if isinstance(scores, TeacherScoreError):
        error = [type(scores).__name__, scores.field, str(scores.value), scores.expected, scores.remedy]
        record.update(scores=None, teacher_error=error)
        return
    c, lists = scores.candidates, scores.lists
    record.update(
        scores={
            "log_probs": scores.log_probs,
            "mask": scores.mask,
            "unaligned": dict(scores.unaligned),
            "candidates": None if c is None else [c.ids, c.teacher_log_probs, c.student_log_probs],
            "lists": None if lists is None else lists.columns,
            "bounded": scores.bounded,
            "by_teacher": dict(scores.by_teacher) if len(scores.by_teacher) > 1 else {},  # one alone is the whole
        },
        teacher_error=None,
    )


def scores_of(sample: Any) -> tuple[AlignedScores | None, TeacherScoreError | None]:
    """(scores, why there are none) of a sample; (None, None) where no teacher was asked."""
    record = (sample.metadata or {}).get(SCORES)
    if record is None:
        return None, None
    kept = record["scores"]
    if kept is None:
        name, *parts = record["teacher_error"]
        kinds = (TeacherScoreError, UnreadRolesError, UnreadToolsError, UnreadTemplateError)
        return None, {kind.__name__: kind for kind in kinds}.get(name, TeacherScoreError)(*parts)
    return AlignedScores(
        log_probs=kept["log_probs"],
        mask=kept["mask"],
        unaligned=kept["unaligned"],
        candidates=None if kept["candidates"] is None else Candidates(*kept["candidates"]),
        lists=None if kept["lists"] is None else TopLists(*kept["lists"]),
        bounded=kept.get("bounded"),
        by_teacher=kept.get("by_teacher", {}),
    ), None
