"""Scores a bank's contexts over the full vocabulary with any two models, in constant memory, and goes on where it was killed.

Contexts of `PART` responses at a time become a part file beside the output; finished parts are kept, so a second start of
the same job does the rest, and the output appears when all are there. Logits exist for a limited number of positions at once.

What is compared (the bank says which):
  tokens     the next token, over all ids of the tokenizer that both share; ids beyond it (padding) are left out on both sides
  next_byte  two vocabularies: the next byte, or the end of the turn, or anything else that has no bytes; each side's mass is
             summed over the tokens that begin with that byte, which is exact at places where both tokenizers cut the text
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock, Timeout

from slime_tandem.diagnostics.bank import (
    BANK,
    EVALUATION,
    Bank,
    Comparison,
    Metadata,
    vocabulary_of,
    weights_fingerprint,
    writing,
)
from slime_tandem.diagnostics.output import Report, Row, plain, write_report
from slime_tandem.errors import DataError, ModelError
from slime_tandem.files import whole_file
from slime_tandem.models.hf import load_model
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.tokens.token_bytes import TokenBytes

PART = 32
"""Responses per part file."""
_END, _OTHER = 256, 257
_CONTEXT = ["sample", "position", "token"]
_SIDES = {
    "student": ("prompt_ids", "response_ids", "position"),
    "teacher": ("teacher_prompt_ids", "teacher_response_ids", "teacher_position"),
}
_BATCH_TOKENS = 16384
"""Padded tokens of a forward pass, unless one context alone has more."""


@dataclass(frozen=True)
class EvaluationJob:
    """Which bank with which models, under which `label`; `logit_mib` bounds the
    log-probs of one model held at once, in MiB."""

    bank: Path
    output: Path
    label: str
    student: Path
    teacher: Path
    dtype: str = "float32"
    device: str = "cpu"
    logit_mib: float = 256.0
    trust_remote_code: bool = False


def first_outcomes(tokens: TokenBytes) -> torch.Tensor:
    """[V]: which of the 258 outcomes a token begins with: a byte, the end of the turn (256), anything without bytes (257).

    >>> first_outcomes(TokenBytes((b"ab", None, None), frozenset({1, 2}), frozenset({1}))).tolist()
    [97, 256, 257]
    """
    ends = tokens.eos_ids
    return torch.tensor([_END if i in ends else data[0] if data else _OTHER for i, data in enumerate(tokens.table)])


def outcome_log_probs(logits: torch.Tensor, size: int, outcomes: torch.Tensor | None) -> torch.Tensor:
    """Log-probs [n, E] (nats, float64) of logits [n, W] over the first `size` ids, summed by `outcomes` [size] if given.

    >>> logits = torch.tensor([[0.5, 0.25, 0.25, 1e9]]).log()
    >>> outcome_log_probs(logits, 3, torch.tensor([97, 97, 256])).exp()[0, [97, 256]].round(decimals=6).tolist()
    [0.75, 0.25]
    """
    log_p = torch.log_softmax(logits[:, :size].double(), -1)
    if outcomes is None:
        return log_p
    index = outcomes.to(log_p.device).expand(len(log_p), -1)
    shape = (len(log_p), _OTHER + 1)
    top = log_p.new_full(shape, -torch.inf).scatter_reduce(1, index, log_p, "amax")
    base = torch.where(top.isfinite(), top, 0.0)
    total = log_p.new_zeros(shape).scatter_add(1, index, (log_p - base.gather(1, index)).exp())
    return total.log() + base


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) [n], nats, of log-probs [n, E]; infinite where q lacks what p has.

    >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log()
    >>> round(float(divergence(p, q)), 4), round(float(entropy(p)), 4)
    (0.1438, 0.6931)
    """
    there = log_p > -torch.inf
    return torch.where(there, log_p.exp() * (log_p - log_q), 0.0).sum(-1).clamp_min(0.0)


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    """[n], nats."""
    return -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)


@dataclass(frozen=True, eq=False)
class Reader:
    """A model that reads contexts: `size` ids of its tokenizer count, merged into `outcomes` [size] if there are any."""

    model: Any
    size: int
    outcomes: torch.Tensor | None
    device: str

    @torch.no_grad()
    def read(self, sequences: Sequence[Sequence[int]], at: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probs [len(at[i]), E] of what follows the first `at[i][j]` ids of sequence i (1 or more of them)."""
        longest = max(map(len, sequences))
        ids = torch.zeros((len(sequences), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        kept = sorted({n - 1 for positions in at for n in positions})
        out = self.model(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            logits_to_keep=torch.tensor(kept, device=self.device),
            use_cache=False,
        ).logits
        place = {position: i for i, position in enumerate(kept)}
        return [
            outcome_log_probs(out[row, [place[n - 1] for n in positions]], self.size, self.outcomes)
            for row, positions in enumerate(at)
        ]


def evaluate_bank(job: EvaluationJob, say: Callable[[str], None]) -> Report:
    """Write the evaluation to `job.output` and a report beside it; finished parts of an interrupted run are used.

    Raises DataError for a broken bank, another job's parts or output, and models that the bank is not for; ModelError for
    folders that cannot be loaded.
    """
    with Bank(job.bank, BANK) as bank:
        comparison = _check_models(job, bank.metadata)
        facts: Metadata = {
            "banks": bank.metadata["banks"],
            "comparison": comparison,
            "models": {
                job.label: {
                    role: {"model": str(folder), "weights": weights_fingerprint(folder)}
                    for role, folder in (("student", job.student), ("teacher", job.teacher))
                }
            },
        }
        identity = {**facts, "label": job.label, "dtype": job.dtype, "device": job.device, "logit_mib": job.logit_mib}
        parts = job.output.with_name(f".{job.output.name}.parts")
        parts.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(parts / "lock", timeout=0):
                if job.output.exists():
                    _same_output(job.output, facts)
                    say(f"{job.output} is finished already")
                else:
                    _claim(parts, identity)
                    files = _evaluate_parts(job, bank, comparison, parts, say)
                    with writing(job.output, EVALUATION, facts) as sink:
                        for file in files:
                            with Bank(file, EVALUATION) as part:
                                for table in part.batches():
                                    sink.write(table)
                shutil.rmtree(parts)
        except Timeout:
            remedy = "wait for it, or choose another --output"
            raise DataError("--output", str(job.output), "a file that no other process writes", remedy) from None
    with Bank(job.output, EVALUATION) as done:
        report = _describe(done.read(), job, facts)
    write_report(report, job.output.with_suffix(""))
    return report


def _check_models(job: EvaluationJob, meta: Metadata) -> Comparison:
    for role, folder in (("student", job.student), ("teacher", job.teacher)):
        tokens = ModelTokenizer.load(folder, trust_remote_code=job.trust_remote_code).tokens
        if vocabulary_of(tokens) != meta[role]["vocabulary"]:
            across = meta["comparison"] == "next_byte"
            kind = "two vocabularies (next_byte)" if across else "one vocabulary (tokens)"
            raise DataError(
                f"--{role}",
                str(folder),
                f"a model with the tokenizer and ends of turn of {meta[role]['model']}: this bank compares {kind}",
                "export a bank with these two models, it then holds the contexts in their ids",
            )
    comparison: Comparison = meta["comparison"]
    return comparison


def _same_output(output: Path, facts: Metadata) -> None:
    with Bank(output, EVALUATION) as old:
        if any(old.metadata[name] != facts[name] for name in facts):
            remedy = "choose another --output, or delete it"
            raise DataError("--output", str(output), "no file, or one of this very job", remedy)


def _claim(parts: Path, identity: Metadata) -> None:
    """Note whose parts these are; DataError if they are another job's."""
    file = parts / "job.json"
    text = json.dumps(identity, indent=1)
    if file.exists():
        if file.read_text(encoding="utf-8") != text:
            remedy = f"choose another --output, or delete {parts}"
            raise DataError(str(file), "another job", "the parts of the same bank, models and options", remedy)
        return
    with whole_file(file) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _load(folder: Path, job: EvaluationJob, comparison: Comparison) -> Reader:
    tokens = ModelTokenizer.load(folder, trust_remote_code=job.trust_remote_code).tokens
    model = load_model(folder, job.dtype, job.trust_remote_code)
    width = model.get_output_embeddings().weight.shape[0]
    size = len(tokens.table)
    if width < size:
        # Ids that the tokenizer names and the model has no row for can never be written.
        raise ModelError("model", str(folder), f"at least {size} logits, has {width}", "take its own tokenizer")
    try:
        model = model.to(job.device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        why = " ".join(str(error).split())[:200]
        raise ModelError("--device", job.device, f"a device that torch has ({why})", "choose cpu") from None
    return Reader(model, size, first_outcomes(tokens) if comparison == "next_byte" else None, job.device)


def _evaluate_parts(
    job: EvaluationJob, bank: Bank, comparison: Comparison, parts: Path, say: Callable[[str], None]
) -> list[Path]:
    """Part files of the whole bank, those that are missing made now."""
    files: list[Path] = []
    readers: dict[str, Reader] = {}
    for number, rows in enumerate(_parts_of(bank)):
        file = parts / f"part-{number:06}.parquet"
        files.append(file)
        if file.exists():
            continue
        if not readers:
            readers = {"student": _load(job.student, job, comparison), "teacher": _load(job.teacher, job, comparison)}
        table = _score(rows, readers, job)
        with writing(
            file, EVALUATION, {"banks": bank.metadata["banks"], "comparison": comparison, "models": {}}
        ) as sink:
            sink.write(table)
        say(f"part {number + 1}: {len(table)} contexts of {len(bank)}")
    return files


def _parts_of(bank: Bank) -> Iterator[list[dict[str, Any]]]:
    """The bank's rows, `PART` runs of one response at a time."""
    rows: list[dict[str, Any]] = []
    responses, last = 0, None
    for table in bank.batches([*_CONTEXT, *dict.fromkeys(n for names in _SIDES.values() for n in names), "log_prob"]):
        for row in table.to_pylist():
            if row["sample"] != last:
                if responses == PART:
                    yield rows
                    rows, responses = [], 0
                responses, last = responses + 1, row["sample"]
            rows.append(row)
    if rows:
        yield rows


def _score(rows: Sequence[dict[str, Any]], readers: dict[str, Reader], job: EvaluationJob) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in EVALUATION.schema.names}
    width = max(r.size for r in readers.values())
    limit = max(1, int(job.logit_mib * 2**20 / (8 * width)))  # positions whose float64 log-probs are held at once
    for batch in _batches(rows, limit):
        dists = {side: _distributions(batch, side, reader) for side, reader in readers.items()}
        for i, group in enumerate(batch):
            s, t = dists["student"][i], dists["teacher"][i]
            values = {
                "kl": divergence(t, s),
                "reverse_kl": divergence(s, t),
                "student_entropy": entropy(s),
                "teacher_entropy": entropy(t),
            }
            # The sampled token's own outcome: itself, or the byte that it begins with.
            for side, dist, reader in (
                ("log_prob", s, readers["student"]),
                ("teacher_log_prob", t, readers["student"]),
            ):
                token = torch.tensor([row["token"] for row in group])
                outcome = token if reader.outcomes is None else reader.outcomes[token]
                values[side] = dist.gather(1, outcome.to(dist.device)[:, None])[:, 0]
            _check_finite(values, group, job)
            for row in group:
                columns["label"].append(job.label)
                columns["sample"].append(row["sample"])
                columns["position"].append(row["position"])
            for name, numbers in values.items():
                columns[name] += numbers.tolist()
    return pa.table(columns, schema=EVALUATION.schema)


def _check_finite(values: dict[str, torch.Tensor], group: Sequence[dict[str, Any]], job: EvaluationJob) -> None:
    for name, numbers in values.items():
        bad = np.flatnonzero(~numbers.isfinite().cpu().numpy())
        if len(bad):
            row = group[int(bad[0])]
            raise DataError(
                f"{name} at ({row['sample']}, {row['position']})",
                float(numbers[int(bad[0])]),
                "a finite number: one model gives no probability at all to what the other might write, or fails",
                f"check {job.student} and {job.teacher}, or try --dtype float32",
            )


def _batches(rows: Sequence[dict[str, Any]], limit: int) -> Iterator[list[list[dict[str, Any]]]]:
    """Groups of one response's rows; as many groups as fit into `limit` padded positions with logits, one at least.

    A response with more positions than that is cut, and its context computed again for each piece.
    """
    batch: list[list[dict[str, Any]]] = []
    for group in _groups(rows, limit):
        # Rows of a padded batch share the set of positions that are kept, on either side.
        sets = [{_length(row, side) for g in [*batch, group] for row in g} for side in _SIDES]
        n = len(batch) + 1
        if batch and (max(map(len, sets)) * n > limit or max(map(max, sets)) * n > _BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(group)
    yield batch


def _groups(rows: Sequence[dict[str, Any]], limit: int) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for row in rows:
        if group and (row["sample"] != group[0]["sample"] or len(group) == limit):
            yield group
            group = []
        group.append(row)
    yield group


def _length(row: dict[str, Any], side: str) -> int:
    """Ids of a context."""
    prompt, _, position = _SIDES[side]
    return len(row[prompt]) + int(row[position])


def _distributions(batch: Sequence[list[dict[str, Any]]], side: str, reader: Reader) -> list[torch.Tensor]:
    prompt, response, position = _SIDES[side]
    at = [[_length(row, side) for row in group] for group in batch]
    sequences = [
        [*group[0][prompt], *group[0][response][: max(row[position] for row in group)]] for group in batch
    ]  # fmt: skip
    empty = next((group[0]["sample"] for group, lengths in zip(batch, at, strict=True) if min(lengths) < 1), None)
    if empty is not None:
        raise DataError(f"context of {empty}", "no ids", "a prompt of at least one token", "export it again")
    return reader.read(sequences, at)


def _describe(table: pa.Table, job: EvaluationJob, facts: Metadata) -> Report:
    rows = []
    names = {
        "kl": "KL(teacher || student)",
        "reverse_kl": "KL(student || teacher)",
        "student_entropy": "entropy of the student",
        "teacher_entropy": "entropy of the teacher",
    }
    for column, name in names.items():
        values = table.column(column).to_numpy()
        rows.append(Row(name, "mean", plain(float(values.mean())), "nats", len(values)))
        rows += [Row(name, f"{p}%", plain(float(np.quantile(values, p / 100))), "nats") for p in (5, 25, 50, 75, 95)]
    setup = {"bank": job.bank.name, "label": job.label, "dtype": job.dtype, "device": job.device, **facts}
    return Report(f"{job.label}: contexts of {job.bank.name} over the full vocabulary", setup, rows)
