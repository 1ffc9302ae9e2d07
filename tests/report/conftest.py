"""Rows, run folders and a headless Chromium for the report tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages.browser import Browser, chromium

from slime_tandem.config import RunConfig
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken

from ..waiting import PATIENCE_S


def step_row(**values: float) -> dict[str, float | None]:
    """A full step row: `rollout__reward_mean=0.5` sets rollout/reward_mean, the rest is None."""
    return {**dict.fromkeys(row_keys("step")), **{k.replace("__", "/"): v for k, v in values.items()}}


def eval_row(**values: float) -> dict[str, float | None]:
    """A full evaluation row: `solo_accuracy=0.5` sets eval/solo_accuracy, the rest is None."""
    return {**dict.fromkeys(row_keys("eval")), **{f"eval/{k}": v for k, v in values.items()}}


def transcript(
    texts: tuple[str, ...], *, reward: float = 1.0, prompt: str = "4 + 3 =", teacher: bool = True
) -> Transcript:
    tokens = tuple(
        TranscriptToken(text, i % 2, -0.5, (-1.0 if i % 3 else None) if teacher else None)
        for i, text in enumerate(texts)
    )
    return Transcript(prompt, "7", "chain_sum", reward, "stop", tokens)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Builds a run folder with `steps` steps, evaluations, transcripts and, if asked, a control."""

    def make(
        steps: int = 4, *, control: bool = True, finished: bool = True, texts: tuple[str, ...] = ("a", " b")
    ) -> Path:
        run_dir = tmp_path / "demo"
        config = RunConfig.load(overrides=["name=demo", f"train.steps={steps}", "eval.prompts=100"])
        for folder, gain in ((run_dir, 0.3), (run_dir / "control", 0.1))[: 2 if control else 1]:
            with RunWriter(folder, resume_step=None) as writer:
                if folder == run_dir:
                    writer.write_config(config)
                writer.write_eval(0, "before", eval_row(solo_accuracy=0.5, tandem_accuracy=0.25, teacher_kl=1.5))
                writer.write_transcripts(0, "eval", [transcript(texts, reward=0.0), transcript(texts, prompt="other")])
                for step in range(steps):
                    writer.write_step(
                        step,
                        step_row(
                            rollout__reward_mean=0.25 + step / 16,
                            tandem__senior_token_fraction=0.5,
                            opd__teacher_kl=1.5 - step / 8,
                            engine__retries=1,
                            time__rollout_s=1.0 + step,
                            time__scoring_s=0.5,
                            time__train_s=2.0,
                            time__sync_s=0.25,
                            time__step_s=4.0 + step,
                        ),
                    )
                    writer.write_transcripts(step, "train", [transcript(texts), transcript(texts, reward=0.0)])
                if finished:
                    after = eval_row(solo_accuracy=0.75, tandem_accuracy=0.25 + gain, teacher_kl=0.5)
                    writer.write_eval(steps, "after", after)
                    writer.write_transcripts(steps, "eval", [transcript(texts), transcript(texts, prompt="other")])
        return run_dir

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium from $SLIME_TANDEM_CHROMIUM or the PATH; a missing one fails the test."""
    try:
        with chromium(tmp_path_factory.mktemp("chromium"), PATIENCE_S) as address:
            yield Browser(address, PATIENCE_S)
    except FileNotFoundError as error:
        pytest.fail(str(error))
