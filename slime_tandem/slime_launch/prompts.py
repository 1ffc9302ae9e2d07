"""The prompt files of a plan, and slime's flags that name them.

They hold the run's own prompts, so that both runtimes train and test on the same. It makes texts and writes nothing; models,
GPUs and the loss are not its business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.slime_launch.layout import to_yaml
from slime_tandem.types import Prompt

Text = str | Iterable[str]
"""What a file of a plan holds: its text, or its lines, which are made when they are asked for."""


class Lines:
    """Lines of a file, made anew each time that they are asked for: a file of millions of prompts is never held whole."""

    def __init__(self, prompts: Callable[[], Iterator[Prompt]]) -> None:
        self._prompts = prompts

    def __iter__(self) -> Iterator[str]:
        return map(_line, self._prompts())


def prompt_data(config: RunConfig, folder: Path, *, with_junior: str) -> tuple[list[str], dict[Path, Text]]:
    """(flags of the prompt data, text of each file in `folder` that they name).

    Whatever format and columns a prompt file has, slime gets JSON lines with `messages`, `label` and `metadata`; a bad row that
    was not looked at beforehand (`tasks.jsonl`) is refused when they are written.

    `with_junior`: import string of the function by which an evaluation set is co-written. Raises ConfigError for tasks without
    prompts to train on, for prompts without a label that nobody else rewards (unless nothing is learnt from rewards), and
    for prompts that JSON cannot hold.
    """
    from slime_tandem.tasks.families import TaskSet  # reasoning-gym: not for those who only ask for sizes

    theirs = config.cluster.reward is not None and (
        "." in config.cluster.reward or config.cluster.reward.endswith("remote_rm")
    )  # knows what it reads, if it reads a label at all
    labels = config.objective.reward_coef > 0 and not theirs
    tasks = TaskSet(config.tasks, config.seed, config.reward, labels=labels)
    listed = all(spec.family == "jsonl" for spec in config.tasks)
    prompts, heldout, sets = folder / "prompts.jsonl", folder / "heldout.jsonl", folder / "eval.yaml"
    texts: dict[Path, Text] = {prompts: _training_lines(config, tasks, listed=listed)}
    flags = ["--prompt-data", str(prompts)]
    flags += ["--input-key", "messages", "--label-key", "label", "--metadata-key", "metadata"]
    flags += ["--apply-chat-template", "--rollout-seed", str(config.seed)]
    if listed:
        flags.append("--rollout-shuffle")
    if config.eval.every is not None:
        texts[heldout] = _lines(tasks.heldout_prompts(config.eval.prompts))
        texts[sets] = to_yaml(_evaluation(config, heldout, with_junior))
        flags += ["--eval-interval", str(config.eval.every), "--eval-config", str(sets)]
    return flags, texts


def _training_lines(config: RunConfig, tasks: Any, *, listed: bool) -> Text:
    """Those of the local run in its order; of a file of prompts all but the held out, which slime then shuffles."""
    from slime_tandem.tasks.family import is_held_out

    if listed:
        lines = Lines(lambda: (p for p in tasks.listed_prompts if not is_held_out(p.messages)))
        if next(iter(lines), None) is None:
            raise ConfigError("tasks", 0, "at least one prompt that is not held out", "add lines to the file")
        return lines  # one without a label was refused when the file was read
    train = [p for step in range(config.train.steps) for p in tasks.train_prompts(step, config.train.prompts_per_step)]
    by_label = {i for i, spec in enumerate(config.tasks) if spec.reward in (None, "label")}
    unlabelled = next((p for p in train if p.label is None and p.metadata["spec"] in by_label), None)
    if unlabelled is not None and config.cluster.reward is None and config.objective.reward_coef > 0:
        expected = "a label on every prompt, which the reward compares answers with"
        remedy = "choose another data set, or set tasks[].reward or cluster.reward"
        raise ConfigError("tasks", unlabelled.task, expected, remedy)
    return _lines(train)


def _evaluation(config: RunConfig, prompts: Path, with_junior: str) -> Mapping[str, Any]:
    both: dict[str, Any] = {"path": str(prompts), "input_key": "messages", "label_key": "label"}
    both["n_samples_per_eval_prompt"] = config.eval.samples_per_prompt
    sets = [{"name": "solo", **both}]
    if config.tandem.enabled or config.eval.tandem:
        sets.append({"name": "tandem", **both, "custom_generate_function_path": with_junior})
    return {"eval": {"datasets": sets}}


def _lines(prompts: Sequence[Prompt]) -> str:
    return "".join(map(_line, prompts))


def _line(prompt: Prompt) -> str:
    from slime_tandem.slime_hooks.wire import metadata_of  # torch: not for those who only ask for sizes

    row = {
        "messages": [m.as_dict() for m in prompt.messages],
        "label": prompt.label,
        "metadata": metadata_of(prompt),
    }
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except TypeError as error:
        expected = f"prompts that JSON can hold ({error})"
        raise ConfigError("tasks", prompt.task, expected, "choose another data set for slime") from None
