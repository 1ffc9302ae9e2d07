"""`slime-tandem score`: a teacher's log-probs for a file of responses, written whole or not at all.

Each line of the input is a JSON object: `messages` (or `prompt`, a text), the response as `response_ids` (the student's
own ids, which are never re-tokenised) or `response` (text: one finished turn, encoded by the student's tokenizer), and
optionally `id`. The output has the same lines with, at the student's positions:
  response_ids, teacher_log_probs (nats, null where there is no value), coverage, unaligned (counts by reason), error
  (null, or why the teacher gave nothing); with candidates also candidate_ids and candidate_log_probs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_tandem.config import AlignmentPolicy, Thinking, http_url
from slime_tandem.distill.teacher import Scoring, Teacher, check_teacher
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.processes import ServerProcess
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import ConfigError, DataError, RunDirError, TeacherScoreError
from slime_tandem.files import parse_json, require_place, whole_file
from slime_tandem.models.builtin import resolve_model
from slime_tandem.models.hf import check_model_folder, check_served_model
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.tasks.jsonl import parse_messages
from slime_tandem.types import AlignedScores, Prompt, SampleKey, TandemSample

_KEYS = ("id", "messages", "prompt", "response", "response_ids")
_PART = 256
"""Responses scored between two writes: of scores, no more than so many are held."""


@dataclass(frozen=True)
class ScoreJob:
    """What to score with what. `teacher_url`: a running server; None starts an embedded one of `teacher`.

    `policy` as `opd.alignment`; `proportional` and `chain_rule` need the student's log-probs, which a file does not have,
    and are refused. `top_k` candidates of the teacher per position, 0 for none. `template_kwargs`, `student_template_kwargs`:
    variables of the teacher's and of the student's chat template.
    """

    source: Path
    output: Path
    student: str
    teacher: str
    cache_dir: Path
    teacher_url: str | None = None
    policy: AlignmentPolicy = "strict"
    top_k: int = 0
    thinking: Thinking = "keep"
    template_kwargs: dict[str, Any] | None = None
    student_template_kwargs: dict[str, Any] | None = None
    api_key: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ScoreResult:
    """Lines written, those without scores, and the share of response tokens with a value."""

    lines: int
    failed: int
    coverage: float | None


def score_file(job: ScoreJob) -> ScoreResult:
    """Score every line; the output appears when all is done.

    Raises RunDirError for an output that cannot be written, ConfigError and DataError for values of `job` (fields are named as
    the flags of `slime-tandem score`), DataError for a broken line, ModelError and EngineError kinds.
    """
    _check(job)
    trust = job.trust_remote_code
    student = ModelTokenizer.load(
        resolve_model(job.student, job.cache_dir),
        trust_remote_code=trust,
        template_kwargs=job.student_template_kwargs,
    )
    folder = resolve_model(job.teacher, job.cache_dir)
    tokenizer = ModelTokenizer.load(folder, trust_remote_code=trust, template_kwargs=job.template_kwargs)
    samples = list(read_responses(job.source, student))
    with tempfile.TemporaryDirectory() as logs:
        server = None
        url = job.teacher_url
        try:
            if url is None:
                job = replace(job, api_key=job.api_key or secrets.token_urlsafe(32))
                options = ServeOptions(
                    dtype=job.dtype, threads=os.cpu_count() or 1, api_key=job.api_key, trust_remote_code=trust
                )
                server = ServerProcess(check_model_folder(folder), options, log_file=Path(logs) / "teacher.log")
                server.start()
                url = server.url
            return asyncio.run(_score(job, url, student, tokenizer, samples))
        finally:
            if server is not None:
                server.stop()


def _check(job: ScoreJob) -> None:
    require_place(job.output, "--output")
    if job.output.exists() and not job.output.is_file():  # it would be replaced, be it /dev/null
        raise RunDirError("--output", str(job.output), "a regular file or none yet", "name another")
    if job.output.exists() and job.source.exists() and job.output.samefile(job.source):
        raise RunDirError("--output", str(job.output), "another file than FILE", "name another; it would be lost")
    if job.top_k < 0:
        raise ConfigError("--top-k", job.top_k, "at least 0", "raise it")
    try:
        http_url(job.teacher_url)
    except ValueError as error:
        raise ConfigError("--teacher-url", job.teacher_url, str(error), "e.g. http://127.0.0.1:30000") from None
    if job.policy in ("proportional", "chain_rule"):
        raise DataError(
            "--policy", job.policy, "strict or even: a file has no student log-probs", "choose one of these"
        )


async def _score(
    job: ScoreJob,
    url: str,
    student: ModelTokenizer,
    tokenizer: ModelTokenizer,
    samples: Sequence[tuple[Any, TandemSample]],
) -> ScoreResult:
    failed = covered = total = 0
    async with EngineClient(url, role="teacher", api_key=job.api_key) as client:
        info = await client.model_info()
        check_served_model(info, tokenizer.folder, url)
        limit = info.get("max_total_tokens")
        teacher = Teacher.by_template(
            client,
            student.chat(),
            tokenizer.chat(),
            job.thinking,
            max_batch=16,
            max_tokens=limit if isinstance(limit, int) else None,
        )
        check_teacher(teacher)
        scoring = Scoring(job.policy, job.top_k)
        with whole_file(job.output) as unfinished, unfinished.open("w", encoding="utf-8") as out:
            for at in range(0, len(samples), _PART):
                part = samples[at : at + _PART]
                scores = await teacher.score([s for _, s in part], scoring)
                for (name, sample), score in zip(part, scores, strict=True):
                    out.write(json.dumps(_row(name, sample, score), ensure_ascii=False, allow_nan=False) + "\n")
                    failed += isinstance(score, TeacherScoreError)
                    if isinstance(score, AlignedScores):
                        covered, total = covered + int(score.mask.sum()), total + len(score.mask)
    return ScoreResult(len(samples), failed, covered / total if total else None)


def _row(name: Any, sample: TandemSample, score: AlignedScores | TeacherScoreError) -> dict[str, Any]:
    row: dict[str, Any] = {"id": name, "response_ids": list(sample.response_ids)}
    if isinstance(score, TeacherScoreError):
        return row | {"teacher_log_probs": None, "coverage": None, "unaligned": None, "error": str(score)}
    row["teacher_log_probs"] = [float(v) if ok else None for v, ok in zip(score.log_probs, score.mask, strict=True)]
    row |= {"coverage": score.coverage, "unaligned": dict(score.unaligned), "error": None}
    if score.candidates is not None:
        c = score.candidates
        row["candidate_ids"] = [[int(i) for i in ids if i >= 0] for ids in c.ids]
        row["candidate_log_probs"] = [
            [float(v) for i, v in zip(ids, values, strict=True) if i >= 0]
            for ids, values in zip(c.ids, c.teacher_log_probs, strict=True)
        ]
    return row


def read_responses(path: Path, student: ModelTokenizer) -> Iterator[tuple[Any, TandemSample]]:
    """(id, sample) of each line; raises DataError with path and line number for the first bad one."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028, which JSON may hold
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError("FILE", str(path), f"a readable JSONL file ({why})", "check the path") from None
    number = 0
    for n, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse(line, f"{path}:{n}", number, student)
            number += 1
    if not number:
        raise DataError("FILE", str(path), "at least one line", "add responses to the file")


def _parse(line: str, where: str, number: int, student: ModelTokenizer) -> tuple[Any, TandemSample]:
    example = 'e.g. {"prompt": "2 + 2 =", "response": "4"}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(where, line[:80], f"one JSON object ({error})", example) from None
    if not isinstance(row, dict) or not set(row) <= set(_KEYS):
        known = f"a JSON object with keys among {', '.join(_KEYS)}"
        raise DataError(where, line[:80], known, example)
    if ("prompt" in row) == ("messages" in row) or ("response" in row) == ("response_ids" in row):
        expected = "`prompt` or `messages`, and `response` or `response_ids`"
        raise DataError(where, sorted(row), expected, example)
    key = "prompt" if "prompt" in row else "messages"
    messages = parse_messages(row[key], f"{where} {key}", may_be_text=key == "prompt")
    if "response" in row:
        if not isinstance(row["response"], str):
            raise DataError(f"{where} response", row["response"], "a text", example)
        ids = student.chat().finished(row["response"])
    else:
        ids = row["response_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise DataError(f"{where} response_ids", ids, "a list of token ids", "e.g. [1, 2, 3]")
    n = len(ids)
    prompt = Prompt(f"{where}", messages, None, "file")
    sample = TandemSample(
        SampleKey(0, 0, number), 0, prompt, (), tuple(ids), (1,) * n, (0.0,) * n, "stop", "", ()
    )  # fmt: skip
    return row.get("id", number), sample
