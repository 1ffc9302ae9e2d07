"""The run: evaluate, then rollout -> reward -> score -> update -> new weights to the engine, step by step; evaluate again.

A run folder holds the tandem run; its control (solo GRPO: no junior, no teacher, same start, prompts, draws and budget)
goes into `control/`. The control is evaluated with the same junior and teacher, so that both are measured alike.
Everything random is a function of (seed, step), so a run that was killed goes on from its last checkpoint as if nothing
had happened. What a step computes is known elsewhere (`team.rollouts`, `training`): here is the order, and what survives a
kill.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from slime_tandem.config import RunConfig
from slime_tandem.config.section import set_in
from slime_tandem.distill.teacher import describe_special
from slime_tandem.errors import RunDirError, TandemError, TeacherScoreError
from slime_tandem.files import read_json, read_text, record_of
from slime_tandem.megatron.architecture import architecture_of, load_hf_config
from slime_tandem.megatron.checkpoint import drop_older, newest_checkpoint, step_folder, step_of, unusable
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.objective.advantages import reward_histograms
from slime_tandem.report.html import write_report
from slime_tandem.report.progress import PROGRESS_FILE, RunProgress
from slime_tandem.report.run_folder import (
    EvalPhase,
    RunWriter,
    disk_errors,
    read_rows,
    require_same_settings,
    transcript_of,
)
from slime_tandem.report.summary import Summary, summarise, write_summary
from slime_tandem.report.trackers import Trackers, require_trackers
from slime_tandem.rollout.boundaries import BoundaryRecord
from slime_tandem.signals import terminate_as_interrupt
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.first_look import looks, why_equal
from slime_tandem.tasks.row_files import Source
from slime_tandem.team.rollouts import evaluate, rollout, with_revival
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.team.token_bank import TokenBank
from slime_tandem.training.metrics import part_means, rewards_by_task, rollout_metrics
from slime_tandem.training.rows import build_rows
from slime_tandem.training.trainer import Trainer
from slime_tandem.types import Prompt, ScoredSample

_TRAIN_TRANSCRIPTS = 2
_EVAL_TRANSCRIPTS = 12
_KEPT_CHECKPOINTS = 2
_LOCK = ".lock"
_OLD = ".replaced"
"""Where the run that `overwrite` replaces waits until the new one's settings, data and models are accepted."""
_PROBE, _PROBE_BYTES = ".probe", 2**18
_SLIMES = ("engine.client_processes", "engine.gather_requests")
# What a start that failed, or `slime-tandem eval`, leaves in a run folder: nobody's work.
_NO_WORK = (_LOCK, _PROBE, PROGRESS_FILE, "logs")


class _Kept(BaseModel):
    """What a run keeps beside its weights; older ones have no `kl_coef`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    step: int = Field(ge=0)
    kl_coef: float | None = Field(None, ge=0.0)


@dataclass(frozen=True)
class Arm:
    """One of the runs in a run folder. `config` decides how it rolls out and learns."""

    name: str
    config: RunConfig
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints, `step-000020` and so on."""
        return self.folder / "checkpoints"

    def last_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return newest_checkpoint(self.checkpoints)


def control_config(config: RunConfig) -> RunConfig:
    """The control of a run: solo GRPO on the task reward alone, all else equal.

    >>> c = control_config(RunConfig())
    >>> c.tandem.enabled, c.opd.enabled, c.objective.reward_coef
    (False, False, 1.0)
    """
    return config.model_copy(
        update={
            "tandem": config.tandem.model_copy(update={"enabled": False}),
            "opd": config.opd.model_copy(update={"enabled": False}),
            "objective": config.objective.model_copy(update={"reward_coef": config.objective.reward_coef or 1.0}),
            "control": False,
        }
    )


def train(
    config: RunConfig, *, resume: bool = False, overwrite: bool = False, progress: RunProgress | None = None
) -> Summary:
    """Run everything and return the summary; the folder is `runs_dir/name`.

    An existing run is refused unless `resume` (go on from the last checkpoint) or `overwrite` (delete it) is given, and a
    folder where another process runs always. KeyboardInterrupt leaves a checkpoint of the last whole step and no process.
    `progress`: an entered one, which is told of every phase; None: one of its own. Raises TandemError kinds.
    """
    if progress is None:
        with RunProgress() as own:
            return train(config, resume=resume, overwrite=overwrite, progress=own)
    run_dir = config.run_dir
    slimes = [*set_in(config.cluster, "cluster")]
    slimes += [item for item in set_in(config.engine, "engine") if item[0] in _SLIMES]
    if unread := [f"{name}={value!r}" for name, value in slimes]:
        progress.warn(f"read under slime alone, a local run takes no notice: {', '.join(unread)}")
    with disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with _only_one(run_dir):
        _put_back(run_dir)
        _prepare_folder(run_dir, resume=resume, overwrite=overwrite)
        try:
            # A full disk is refused now: a server that cannot even write its log would not say why.
            with disk_errors(run_dir):
                probe = run_dir / _PROBE
                probe.write_bytes(bytes(_PROBE_BYTES))
                probe.unlink()
            return _train(config, progress, resume=resume)
        except BaseException:
            _put_back(run_dir)
            raise


def _train(config: RunConfig, progress: RunProgress, *, resume: bool) -> Summary:
    run_dir = config.run_dir
    arms = [Arm("run", config, run_dir)]
    if config.control:
        arms.append(Arm("control", control_config(config), run_dir / "control"))
    require_trackers(config)
    progress.phase("reading prompts")
    tasks = TaskSet(config.tasks, config.seed, config.reward, labels=config.needs_labels)
    for note in tasks.notes:
        progress.say(note)
    held_out = tasks.heldout_prompts(config.eval.prompts)
    with terminate_as_interrupt():
        try:
            for arm in arms:
                if resume and (arm.folder / "config.yaml").exists():
                    require_same_settings(arm.folder / "config.yaml", arm.config)
            progress.record_in(run_dir)
            progress.phase("finding models, making built-in ones where they are missing")
            roster = Roster(config, log=progress.say)
            architecture_of(load_hf_config(roster.folders["senior"], config.models.trust_remote_code))
            _check_boundaries(run_dir / "boundaries.json", roster.boundaries)
            _check_data(run_dir / "data.json", tasks)
            _drop_old(run_dir)
            team = Team(roster, run_dir / "logs", ready=lambda role: progress.advance(f"{role}: answers"))
            progress.phase(f"starting servers: {', '.join(roster.roles)}", total=len(roster.roles), unit="server")
            with team:
                for role, chat in roster.chats.items():
                    progress.say("\n  ".join([f"turns of the {role}:", *chat.lines()]))
                if roster.teacher_specs:
                    for teacher in team.panel.teachers:
                        progress.say(describe_special(teacher.aligner, teacher.name))
                    for prompt in tasks.tagged_prompts:  # a name that no teacher has is refused now, not when drawn
                        team.panel.route(prompt)
                _keep_boundaries(run_dir / "boundaries.json", roster.boundaries)
                _keep_turns(run_dir / "turns.json", roster)
                _keep_data(run_dir / "data.json", tasks)
                for arm in arms:
                    _run_arm(arm, team, tasks, held_out, progress, resume=resume)
                progress.phase("stopping servers")
        except BaseException as error:
            # Of a run that was cut short, too, what there is can be looked at. If even that fails (a full disk), the reason
            # for the stop is what must be shown first.
            try:
                _write_results(run_dir)
            except (TandemError, OSError) as second:
                error.add_note(f"no report: {second}")
            raise
        progress.phase("writing the report")
        _write_results(run_dir)
    return summarise(run_dir)


def _write_results(run_dir: Path) -> None:
    if (run_dir / "config.yaml").exists():
        write_summary(run_dir)
        write_report(run_dir)


@contextmanager
def _only_one(run_dir: Path) -> Iterator[None]:
    """Hold the run folder's lock; the system lets go of it however this process ends."""
    lock = FileLock(run_dir / _LOCK)
    try:
        with disk_errors(run_dir / _LOCK):
            lock.acquire(timeout=0)
    except RunDirError as error:
        if not isinstance(error.__cause__, Timeout):
            raise
        raise RunDirError(
            "name", run_dir.name, f"no other run at work in {run_dir}", "wait for it, stop it, or rename"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _prepare_folder(run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    if overwrite:
        here = list(run_dir.iterdir())
        if not (run_dir / "config.yaml").exists() and any(path.name not in _NO_WORK for path in here):
            raise RunDirError(
                "--overwrite", str(run_dir), "a run folder (with config.yaml)", "delete the folder yourself"
            )
        with disk_errors(run_dir):
            old = run_dir / _OLD
            old.mkdir()
            for path in here:
                if path.name != _LOCK:
                    path.rename(old / path.name)
    if not resume and (run_dir / "config.yaml").exists():
        raise RunDirError(
            "name", run_dir.name, f"no run at {run_dir}", "--resume goes on with it, --overwrite deletes it, or rename"
        )


def _drop_old(run_dir: Path) -> None:
    """The run that `overwrite` replaces is deleted: settings, data and models of the new one are accepted."""
    with disk_errors(run_dir):
        if (run_dir / _OLD).exists():
            shutil.rmtree(run_dir / _OLD)


def _put_back(run_dir: Path) -> None:
    """The run that `overwrite` was to replace stands again, where the new one has been refused, or was killed before that."""
    old = run_dir / _OLD
    if not old.exists():
        return
    with disk_errors(run_dir):
        for path in list(run_dir.iterdir()):
            if path.name not in (_LOCK, _OLD):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in list(old.iterdir()):
            path.rename(run_dir / path.name)
        old.rmdir()


def _keep_boundaries(path: Path, record: BoundaryRecord) -> None:
    """Save where runs end."""
    if not path.exists():
        with disk_errors(path.parent):
            path.write_text(record.to_json(), encoding="utf-8")


def _keep_turns(path: Path, roster: Roster) -> None:
    """Save what each model's chat template was found to write around turns."""
    with disk_errors(path.parent):
        text = json.dumps({role: chat.as_dict() for role, chat in roster.chats.items()}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _check_boundaries(path: Path, record: BoundaryRecord) -> None:
    """On a resumed run: that runs still end where they did (another tokenizer would move every author)."""
    if path.exists() and BoundaryRecord.from_json(read_text(path, "boundary record"), str(path)) != record:
        raise RunDirError(
            "boundaries of the run",
            str(path),
            "those of the tokenizer and settings now in use",
            "resume with the models and tandem settings that the run was started with",
        )


def _keep_data(path: Path, tasks: TaskSet) -> None:
    """Save what the prompt files are."""
    if not path.exists():
        with disk_errors(path.parent):
            kept = {str(task): source._asdict() for task, source in tasks.sources.items()}
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_data(path: Path, tasks: TaskSet) -> None:
    """On a resumed run: that the prompt files are those that it was started with, to the byte."""
    if not path.exists():
        return
    try:
        kept = record_of(dict[str, dict[str, Any]], read_json(path))
        sources = {task: Source(**source) for task, source in kept.items()}
    except (ValueError, TypeError, OSError) as error:
        raise RunDirError(
            "record of the data", str(path), f"what this run kept ({error})", "restore the file"
        ) from None
    for task, source in tasks.sources.items():
        old = sources.get(str(task), source)
        if (old.size, old.digest) != (source.size, source.digest):
            raise RunDirError(
                f"tasks.{task}.path",
                source.name,
                f"the rows that the run was started with: {old.size} bytes with SHA-256 {old.digest[:12]}..., not "
                f"{source.size} with {source.digest[:12]}...",
                "restore the file, or start again under another `name`",
            )


def _run_arm(
    arm: Arm, team: Team, tasks: TaskSet, held_out: list[Prompt], progress: RunProgress, *, resume: bool
) -> None:
    config = arm.config
    progress.phase(f"{arm.name}: loading the policy{' and its reference' if config.objective.kl_coef > 0 else ''}")
    trainer, step = _trainer(arm, team, resume=resume)
    resumed = resume and (arm.folder / "config.yaml").exists()
    with (
        Trackers(config, arm.folder, name=_tracked_as(arm), say=progress.warn) as trackers,
        RunWriter(
            arm.folder,
            resume_step=step if resumed else None,
            tensorboard="tensorboard" in config.report_to,
            trackers=trackers,
        ) as writer,
    ):
        writer.write_config(config)
        writer.require_rewards()
        done = {(row["step"], row.get("phase")) for row in read_rows(arm.folder / "eval.jsonl")}
        if step >= config.train.steps and (config.train.steps, "after") in done:
            return
        _send(trainer.policy, arm, team, step)
        if step and (0, "before") not in done:
            raise RunDirError(
                str(arm.folder / "eval.jsonl"),
                "no row of the evaluation before training",
                "the evaluation of weights that are gone",
                "restore the file, or start again under another `name`",
            )
        if (0, "before") not in done:
            _evaluate(writer, team, tasks, held_out, arm, progress, step, "before")
        step = _take_steps(arm, team, tasks, held_out, trainer, writer, progress, step)
        if step:
            _evaluate(writer, team, tasks, held_out, arm, progress, step, "after")


def _tracked_as(arm: Arm) -> str:
    return arm.config.name if arm.name == "run" else f"{arm.config.name}-{arm.name}"


def _trainer(arm: Arm, team: Team, *, resume: bool) -> tuple[Trainer, int]:
    """(the trainer of an arm, steps done): from the start weights, or from its last checkpoint."""
    config, start = arm.config, team.roster.folders["senior"]
    policy = MegatronPolicy.from_hf(
        start,
        config.optimizer,
        trust_remote_code=config.models.trust_remote_code,
        threads=config.train.threads,
        checkpointed=config.train.gradient_checkpointing,
    )
    reference = None
    if config.objective.kl_coef > 0:
        reference = MegatronPolicy.from_hf(start, None, trust_remote_code=config.models.trust_remote_code)
    trainer = Trainer(config, policy, reference)
    checkpoint = arm.last_checkpoint() if resume else None
    if checkpoint is None:
        return trainer, 0
    extra = policy.load_checkpoint(checkpoint)
    step = kept_state(extra, checkpoint)
    trainer.restore(extra)
    return trainer, step


def kept_state(extra: Mapping[str, Any], checkpoint: Path) -> int:
    """The steps that were done when a checkpoint was written, by what the run kept in it; raises CheckpointError for anything
    else, and for a step that is not the folder's."""
    try:
        kept = record_of(_Kept, extra)
    except ValueError as error:
        raise unusable(checkpoint, f"state.json extra.{error}", "what a run keeps beside its weights") from None
    if kept.step != step_of(checkpoint):
        raise unusable(checkpoint, f"state.json extra.step={kept.step}", "the step of the folder's name")
    return kept.step


def _take_steps(
    arm: Arm,
    team: Team,
    tasks: TaskSet,
    held_out: list[Prompt],
    trainer: Trainer,
    writer: RunWriter,
    progress: RunProgress,
    step: int,
) -> int:
    """From `step` to the last one, with the evaluations between; returns the steps done.

    A KeyboardInterrupt leaves a checkpoint of the last whole step.
    """
    config = arm.config
    progress.steps(arm.name, config.train.steps, step)
    saved, whole = step, True
    try:
        while step < config.train.steps:
            t0, retries, skipped = time.perf_counter(), team.servers.retries, tasks.skipped_rows
            scored, seconds = _rollout(arm, team, tasks, step, progress)
            if step == 0 and config.objective.reward_coef > 0:
                _say_if_equal(progress, tasks, scored)
            # From the update to the counter a step is all or nothing: an interrupt in between would leave weights,
            # rows and checkpoint of different steps. It waits until the block is done.
            with _shielded():
                whole = False
                row = _learn(trainer, arm, team, step, scored, seconds, progress)
                row["rollout/skipped_rows"] = float(tasks.skipped_rows - skipped)
                row["engine/retries"] = float(team.servers.retries - retries)
                row["time/step_s"] = time.perf_counter() - t0
                writer.write_step(step, row)
                writer.write_rewards(step, reward_histograms(*rewards_by_task(scored)))
                writer.write_parts(step, "train", part_means(scored))
                shown = scored[:: config.train.samples_per_prompt][:_TRAIN_TRANSCRIPTS]
                writer.write_transcripts(step, "train", [_transcript(team, s) for s in shown])
                progress.step(row)
                step += 1
                if step % config.train.save_every == 0 or step == config.train.steps:
                    progress.part("writing a checkpoint")
                    _save(trainer, arm, step)
                    saved = step
                whole = True
            if config.eval.every and step % config.eval.every == 0 and step < config.train.steps:
                _evaluate(writer, team, tasks, held_out, arm, progress, step, "during")
                progress.steps(arm.name, config.train.steps, step)
    except KeyboardInterrupt:
        # A second interrupt breaks the block itself: then only the last checkpoint is sound.
        if whole and saved != step:
            with _shielded():
                _save(trainer, arm, step)
        raise
    return step


def _say_if_equal(progress: RunProgress, tasks: TaskSet, scored: Sequence[ScoredSample]) -> None:
    """A run whose rewards are all equal learns nothing from them: it is said at once, not by a flat line at the end."""
    cause = why_equal(tasks.specs, looks(scored))
    if cause is not None:
        progress.warn(cause.warning)


def _rollout(
    arm: Arm, team: Team, tasks: TaskSet, step: int, progress: RunProgress
) -> tuple[list[ScoredSample], dict[str, float]]:
    train, tandem, opd = arm.config.train, arm.config.tandem.enabled, arm.config.opd.enabled
    prompts = tasks.train_prompts(step, train.prompts_per_step)
    return rollout(
        team, tasks, prompts, step, train.samples_per_prompt, tandem=tandem, score=opd, told=progress.part,
        where=f"{arm.name}: rollout of step {step}",
    )  # fmt: skip


def _learn(
    trainer: Trainer,
    arm: Arm,
    team: Team,
    step: int,
    scored: list[ScoredSample],
    seconds: dict[str, float],
    progress: RunProgress,
) -> dict[str, float | None]:
    """Update, send the new weights; the step's row of metrics but for `rollout/skipped_rows`, `engine/retries` and
    `time/step_s`."""
    t1 = time.perf_counter()
    progress.part("updating the senior")
    reference = trainer.reference_log_probs([s.sample for s in scored])
    eos_ids, bank = team.roster.student.tokens.eos_ids, TokenBank.of(arm.config)
    rows, group_metrics = build_rows(scored, arm.config, reference, trainer.kl_coef, bank, eos_ids=eos_ids)
    if not rows:
        first = next((s.teacher_error for s in scored if s.teacher_error is not None), None)
        raise TeacherScoreError(
            "samples that a teacher has scored",
            f"0 of {len(scored)}",
            "some with opd.on_failed_sample=drop_sample",
            "mend what the first one says, or set opd.on_failed_sample=drop_opd",
            "" if first is None else str(first),
        )
    train_metrics = trainer.update(rows)
    t2 = time.perf_counter()
    progress.part("giving its server the new weights")
    _send(trainer.policy, arm, team, step + 1)
    return {
        **rollout_metrics(scored, eos_ids, team.roster.student.chat().markers_in),
        **group_metrics,
        **train_metrics,
        **seconds,
        "engine/weight_version": float(step),
        "time/train_s": t2 - t1,
        "time/sync_s": time.perf_counter() - t2,
    }


def _send(policy: MegatronPolicy, arm: Arm, team: Team, step: int) -> None:
    """Give the senior's server the policy's weights, as version `<arm>-<step>`."""
    folder = arm.folder / "senior"
    with disk_errors(folder):
        policy.save_hf(folder)
    version = f"{arm.name}-{step}"
    with_revival(team, lambda: team.send_weights(folder, version))


def _save(trainer: Trainer, arm: Arm, step: int) -> None:
    with disk_errors(arm.checkpoints):
        arm.checkpoints.mkdir(parents=True, exist_ok=True)
    trainer.policy.save_checkpoint(step_folder(arm.checkpoints, step), {"step": step, "kl_coef": trainer.kl_coef})
    drop_older(arm.checkpoints, keep=_KEPT_CHECKPOINTS)


def _evaluate(
    writer: RunWriter,
    team: Team,
    tasks: TaskSet,
    held_out: list[Prompt],
    arm: Arm,
    progress: RunProgress,
    step: int,
    phase: EvalPhase,
) -> None:
    when = f"at step {step}" if phase == "during" else f"{phase} training"
    progress.phase(f"{arm.name}: evaluation {when}, {len(held_out)} held-out prompts")
    name = f"{arm.name}: evaluation {when}" + ("" if phase == "during" else f", step {step}")
    found = evaluate(team, tasks, held_out, arm.config.eval.samples_per_prompt, when=name, told=progress.part)
    writer.write_eval(step, phase, found.metrics, found.right, found.teachers, found.rewards)
    writer.write_parts(step, "eval", part_means(found.samples))
    writer.write_transcripts(step, "eval", [_transcript(team, s) for s in found.samples[:_EVAL_TRANSCRIPTS]])


def _transcript(team: Team, scored: ScoredSample):  # type: ignore[no-untyped-def]
    return transcript_of(scored, [team.roster.student.show(t) for t in scored.sample.response_ids])


@contextmanager
def _shielded() -> Iterator[None]:
    """Hold an interrupt (Ctrl-C) back until the block is done, then raise it; a second one does not wait."""
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        raise KeyboardInterrupt
