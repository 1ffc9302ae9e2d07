"""What notebooks and scripts use: train, evaluate, score, align, recompute authors, read a run (docs/api.md).

`import slime_tandem` offers these functions and the records they take and give; everything else is private. Each is a command
without its command line: it decides nothing that the modules below do not. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_tandem.config import AlignmentPolicy, RunConfig, Thinking
from slime_tandem.errors import DataError, RunDirError
from slime_tandem.types import SampleKey

if TYPE_CHECKING:
    from slime_tandem.distill.alignment import Alignment
    from slime_tandem.evaluation.run import Evaluation
    from slime_tandem.report.summary import Summary
    from slime_tandem.rollout.boundaries import BoundaryRecord

_CACHE = Path(".cache/models")
"""Where built-in models are, as `models.cache_dir`."""


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> Run:
    """Run everything, as `slime-tandem train`; returns the run's folder, read back.

    `resume` goes on with a run of the same name, `overwrite` deletes it first; without either it is refused. `quiet`:
    no progress on standard error. Raises TandemError kinds; after KeyboardInterrupt a checkpoint of the last whole step is
    there and no process.
    """
    from slime_tandem.report.progress import RunProgress

    with _outside_an_event_loop(), RunProgress(quiet=quiet) as progress:
        progress.phase("loading libraries")
        from slime_tandem.local.run import train as run

        run(config, resume=resume, overwrite=overwrite, progress=progress)
    return Run(config.run_dir)


def evaluate(config: RunConfig, *, say: Callable[[str], None] | None = None) -> Evaluation:
    """Measure `config.models.senior` on held-out prompts, as `slime-tandem eval`; `say` gets a line for each part.

    `.results` are the figures with their intervals, `.to_json()` the same as plain data. Raises TandemError kinds.
    """
    from slime_tandem.evaluation.run import run_evaluation

    with _outside_an_event_loop():
        return run_evaluation(config, say or (lambda line: None))


def score(
    responses: Iterable[Mapping[str, Any]],
    student: str | Path,
    teacher: str | Path,
    *,
    teacher_url: str | None = None,
    policy: AlignmentPolicy = "strict",
    top_k: int = 0,
    thinking: Thinking = "keep",
    template_kwargs: Mapping[str, Any] | None = None,
    student_template_kwargs: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    dtype: str = "float32",
    cache_dir: str | Path = _CACHE,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """What a teacher thinks of responses, at the student's own tokens; one record per response, in order.

    `responses`: mappings with `prompt` (text) or `messages`, `response` (text) or `response_ids` (the student's), and perhaps
    `id`, as the lines of `slime-tandem score`. A record has `id`, `response_ids` [R], `teacher_log_probs` [R] (nats, None where
    there is none), `coverage`, `unaligned` (counts by reason), `error`, and with `top_k` also `candidate_ids` and
    `candidate_log_probs` [R, at most top_k]. Starts a server of the teacher and stops it, or asks `teacher_url`. Raises
    DataError for a response of another form, ModelError and EngineError kinds.
    """
    from slime_tandem.team.score_file import ScoreJob, score_file

    with tempfile.TemporaryDirectory() as folder, _outside_an_event_loop():
        source, output = Path(folder) / "responses", Path(folder) / "scores"
        try:
            lines = [json.dumps(dict(row)) for row in responses]
        except (TypeError, ValueError) as error:
            raise DataError(
                "responses", type(responses).__name__, f"mappings of plain data ({error})", "see docs/api.md"
            ) from None
        if not lines:
            return []
        source.write_text("\n".join(lines), encoding="utf-8")
        score_file(
            ScoreJob(
                source, output, str(student), str(teacher), Path(cache_dir),
                teacher_url=teacher_url, policy=policy, top_k=top_k, thinking=thinking,
                template_kwargs=None if template_kwargs is None else dict(template_kwargs),
                student_template_kwargs=None if student_template_kwargs is None else dict(student_template_kwargs),
                api_key=api_key, dtype=dtype, trust_remote_code=trust_remote_code,
            )
        )  # fmt: skip
        return [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]


@dataclass(frozen=True)
class TextAlignment:
    """A text in the tokens of a student and of a teacher; what has R entries is one per student token.

    `student_ids`, `pieces` [R] (their text, or a special token's name); `teacher_ids` [Rt]; `partners` [R]: the index in
    `teacher_ids` of the one token with the same bytes at the same place, None where there is none; `reasons` [R]: why there is
    none (`boundary`, `special`, ...: docs/distillation.md), None where there is. `alignment` carries scores over
    (`alignment.scores`).
    """

    student_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    teacher_ids: tuple[int, ...]
    partners: tuple[int | None, ...]
    reasons: tuple[str | None, ...]
    alignment: Alignment

    @property
    def coverage(self) -> float:
        """Share of the student's tokens with a partner; 1.0 for an empty text."""
        return sum(p is not None for p in self.partners) / max(len(self.partners), 1) if self.partners else 1.0


def align(
    text: str,
    student: str | Path,
    teacher: str | Path,
    *,
    thinking: Thinking = "keep",
    cache_dir: str | Path = _CACHE,
    trust_remote_code: bool = False,
) -> TextAlignment:
    """How a teacher's tokenizer cuts what a student's writes, as `slime-tandem align`: one finished turn of `text`.

    `student`, `teacher`: folder, tokenizer.json, tekken.json, *.model or `builtin:<role>`; no weights are read. Raises
    ModelError for a tokenizer that cannot be read or loses bytes.
    """
    from slime_tandem.distill.alignment import UNALIGNED_REASONS
    from slime_tandem.distill.conversation import aligner_of
    from slime_tandem.distill.teacher import read_turn
    from slime_tandem.models.text_tokenizer import load_text_tokenizer, sample_ids

    s, t = (
        load_text_tokenizer(str(name), Path(cache_dir), trust_remote_code=trust_remote_code)
        for name in (student, teacher)
    )
    ids = tuple(sample_ids(s, text))
    if s.chat and t.chat:
        aligner, written = read_turn(s.chat, t.chat, ids, thinking)
    else:
        aligner = aligner_of(s.tokens, t.tokens, t.markup, thinking)
        written = aligner.write(ids, t.encode)
    found = aligner.align(written)
    return TextAlignment(
        student_ids=ids,
        pieces=tuple(map(s.show, ids)),
        teacher_ids=tuple(written.ids),
        partners=tuple(None if i < 0 else i for i in found.teacher_index.tolist()),
        reasons=tuple(None if r < 0 else UNALIGNED_REASONS[r] for r in found.reason.tolist()),
        alignment=found,
    )


def authorship(
    response_ids: Sequence[int],
    record: BoundaryRecord,
    config: RunConfig,
    key: SampleKey,
    *,
    inserted: Iterable[tuple[int, int]] = (),
    fallback_starts: Iterable[int] = (),
) -> tuple[int, ...]:
    """Who wrote each token of a response [R], recomputed: 1 senior, 0 junior. Needs no model and no server.

    `record` and `config` are the run's (`Run.boundaries`, `Run.config`); `key` is the sample's, with the run's seed; `inserted`
    spans [start, stop) nobody sampled (0 there), `fallback_starts` are those of the sample (`types.TandemSample`). The authors
    of a run without a junior (`tandem.enabled=false`) are all the senior.
    """
    from slime_tandem.rollout.handoff import HandoffRule

    rule = record.rule if config.tandem.enabled else HandoffRule.from_config(config.tandem, record.ids)
    return rule.authorship(key, response_ids, inserted=inserted, fallback_starts=frozenset(fallback_starts))


def open_run(folder: str | Path) -> Run:
    """The run in a folder that `slime-tandem train` wrote, finished, stopped or at work; RunDirError for another folder."""
    run = Run(Path(folder))
    _ = run.config
    return run


@dataclass(frozen=True)
class Run:
    """A run's folder, read anew at each question; rows that are not there yet are left out.

    Rows are plain mappings by the names of docs/metrics.md; None: nothing to measure. Raises RunDirError for a damaged file.
    """

    folder: Path

    @property
    def config(self) -> RunConfig:
        """The settings that it was started with, resolved."""
        from slime_tandem.report.summary import load_config

        return load_config(self.folder)

    @property
    def summary(self) -> Summary:
        """What came of it: the numbers of the table that `slime-tandem train` prints."""
        from slime_tandem.report.summary import summarise

        return summarise(self.folder)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """One row per training step, in order."""
        return self._rows("metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per evaluation; `phase` is before, during or after."""
        return self._rows("eval.jsonl")

    @property
    def rewards(self) -> list[dict[str, Any]]:
        """One row per step and task: the histogram of its rewards."""
        return self._rows("rewards.jsonl")

    @property
    def reward_parts(self) -> list[dict[str, Any]]:
        """One row per step, phase, task and named part of a reward; none where it has no parts."""
        return self._rows("reward_parts.jsonl")

    @property
    def transcripts(self) -> list[dict[str, Any]]:
        """The responses that were kept: `step`, `phase`, `prompt`, `label`, `task`, `reward`, `finish_reason`, and `tokens`,
        each with `text`, `author` (1 senior, 0 junior, None inserted), `log_prob`, `teacher_log_prob` (nats, None: none)."""
        return self._rows("transcripts.jsonl")

    @property
    def boundaries(self) -> BoundaryRecord:
        """After which token ids runs ended."""
        from slime_tandem.files import read_text
        from slime_tandem.rollout.boundaries import BoundaryRecord

        path = self.folder / "boundaries.json"
        return BoundaryRecord.from_json(read_text(path, "boundary record"), str(path))

    @property
    def control(self) -> Run | None:
        """Its control run (setting `control`), None without one."""
        folder = self.folder / "control"
        return Run(folder) if (folder / "config.yaml").is_file() else None

    def frame(self, rows: str = "steps") -> Any:
        """`steps`, `evaluations`, `rewards` or `reward_parts` as a pandas data frame; RunDirError without pandas."""
        if rows not in ("steps", "evaluations", "rewards", "reward_parts"):
            raise RunDirError("rows", rows, "steps, evaluations, rewards or reward_parts", "choose one of these")
        try:
            import pandas
        except ImportError:
            remedy = "pip install pandas, or use the rows themselves"
            raise RunDirError("pandas", "not installed", "the package, for data frames", remedy) from None
        return pandas.DataFrame(getattr(self, rows))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        from slime_tandem.report.run_folder import read_rows

        return list(read_rows(self.folder / name))


@contextmanager
def _outside_an_event_loop() -> Iterator[None]:
    """Lets event loops of ours run in the thread of one that is at work: a notebook's cell is called inside the notebook's.

    Not in a thread of its own: Ctrl-C and SIGTERM reach the main thread alone.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None:  # what ended in between left none as the thread's
            asyncio.set_event_loop(loop)
