"""Rewards of slime's samples by our judges: slime asks for one sample at a time, and a judge is asked about all that wait.

So an async function, a server and a function of batches have many responses at once here, too, and one thread waits for them.
What a verdict leaves in a sample is `wire`'s; what becomes of a failed one is the hooks'.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError
from slime_tandem.slime_hooks import wire
from slime_tandem.tasks.arguments import Response
from slime_tandem.tasks.families import judge_of, require_for_labels
from slime_tandem.tasks.judging import Judge, Verdict
from slime_tandem.types import Prompt


class Judges:
    """Of one configuration: a judge for each task, made when it is first needed, and who waits for it in which event loop."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._judges: dict[int, Judge] = {}
        self._waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Together]] = (
            weakref.WeakKeyDictionary()
        )

    def judge(self, index: int) -> Judge:
        """Of a task by number. Raises ConfigError as a `TaskSet`."""
        if index not in self._judges:
            spec, where = self.config.tasks[index], f"tasks.{index}"
            if spec.reward is None:  # a family's own scorer knows more than slime's sample holds
                spec = spec.model_copy(update={"reward": "label"})
            require_for_labels(spec, where)
            self._judges[index] = judge_of(spec, where, self.config.reward, None)
        return self._judges[index]

    def by_label(self, index: int) -> bool:
        """Whether a task's answers are compared with labels."""
        return self.config.tasks[index].reward in (None, "label")

    async def verdict(self, index: int, response: Response) -> Verdict:
        """On one response of a task."""
        judge = self.judge(index)
        if judge.own is None:
            (found,) = await asyncio.to_thread(judge.verdicts, [response])
            return found
        here = self._waiting.setdefault(asyncio.get_running_loop(), {})
        if index not in here:
            here[index] = _Together(judge, self.config.reward.own_processes)
        return await here[index].verdict(response)

    async def verdicts(self, index: int, responses: Sequence[Response]) -> list[Verdict]:
        """On a whole group of one task, in one call where the reward takes batches."""
        return await asyncio.to_thread(self.judge(index).verdicts, list(responses))


class _Together:
    """Asks a judge about all responses that wait, `most` times at once."""

    def __init__(self, judge: Judge, most: int) -> None:
        self._judge, self._most = judge, most
        self._waiting: list[tuple[Response, asyncio.Future[Verdict]]] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def verdict(self, response: Response) -> Verdict:
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((response, future))
        if len(self._asking) < self._most:
            task = asyncio.create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return await future

    async def _ask(self) -> None:
        await asyncio.sleep(0)  # who comes in the same turn of the loop goes along
        while self._waiting:
            part, self._waiting = self._waiting, []
            try:
                verdicts = await asyncio.to_thread(self._judge.verdicts, [response for response, _ in part])
            except BaseException as error:
                for _, future in part:
                    if not future.done():
                        future.set_exception(error) if isinstance(error, Exception) else future.cancel()
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), verdict in zip(part, verdicts, strict=True):
                if not future.done():
                    future.set_result(verdict)


def task_of(sample: Any, config: RunConfig) -> int:
    """The number of a sample's task: what a plan's prompts say, else the first."""
    index = (sample.metadata or {}).get("spec")
    return index if isinstance(index, int) and 0 <= index < len(config.tasks) else 0


def response_of(sample: Any, *, text_alone: bool) -> Response:
    """What a reward is given of a sample; `text_alone`: it compares with the label, and asks for no more.

    Raises DataError for a label that no answer can be compared with.
    """
    if text_alone:
        if isinstance(sample.label, list | dict | bool):
            remedy = "give one answer, or a reward of your own (tasks[].reward), which gets it whole"
            raise DataError(f"label of sample {sample.index}", sample.label, "a non-empty string or a number", remedy)
        label = None if sample.label is None else str(sample.label)
        return Response(Prompt(f"slime/{sample.group_index}", (), label, "slime"), sample.response)
    prompt = wire.prompt_of(sample)
    row: Mapping[str, Any] = sample.metadata or {}
    of_plans = set(wire.OF_PLANS) - row.get(wire.COLUMNS, {}).keys()
    metadata: Mapping[str, Any] = {name: value for name, value in prompt.metadata.items() if name not in of_plans}
    prompt = replace(prompt, prompt_id=str(row.get("prompt_id", prompt.prompt_id)), metadata=metadata)
    known = wire.RECORD in row or sample.rollout_log_probs is not None
    return Response(prompt, sample.response, wire.response_of(sample) if known else None)
