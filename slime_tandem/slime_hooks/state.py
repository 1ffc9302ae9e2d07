"""What the hooks keep between two calls, in one object. slime hands its arguments to every hook and nothing of ours.

Each process has its own, and one owner writes each part: the rollout manager `manager`, a trainer rank `trainer`; `settings` is
made by whichever hook comes first there. The two never share a process (slime starts one Ray actor for the manager and one for
each rank), so nothing is locked. Tests call `reset`. It knows nothing of what it holds.
"""

from __future__ import annotations

import asyncio
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_tandem.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ManagerState:
    """Of the rollout manager, read and written by runtime.py, and `judges` by hooks.py, alone.

    `installed`: the `runtime.Runtime` that every event loop is to use, None for one each; `running`: the runtime of each loop,
    being made or ready, forgotten with its loop; `heartbeats`: the `heartbeat.Heartbeat` of each; `judges`: the
    `rewarding.Judges` of the configuration; `roster`: a configuration and its `Roster`, being made beside slime's
    own start; `beside`: the `beside.Beside` of the process, hooks.py's, too.
    """

    installed: Any = None
    roster: tuple[RunConfig, Future[Any]] | None = None
    judges: Any = None
    beside: Any = None
    running: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    heartbeats: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = field(
        default_factory=weakref.WeakKeyDictionary
    )


@dataclass
class Parked:
    """The rollout that is trained on, between the hooks of one trainer rank.

    `rollout_data`: slime's own, by identity. `channels`: [r, C] of each sample, None on a pipeline stage without the loss.
    `weighted`: of each optimizer step of a pass, whether any token of any rank carries policy-gradient weight. `steps`: begun
    so far, over all passes.
    """

    rollout_data: dict[str, Any]
    channels: list[Tensor] | None = None
    weighted: list[bool] = field(default_factory=list)
    steps: int = 0


@dataclass
class TrainerState:
    """Of one trainer rank, read and written by hooks.py alone.

    `parked`: the rollout under way, set by `advantages` or `data_post_process`, replaced by the next rollout's; `coef`: the
    `adaptive.AdaptiveCoef`, KL coefficient of `objective.kl_target`, made before the first step and kept to the end; `tail`:
    the `kl_tail.KlTail`, likewise, where there is a KL; `agreement`: the `agreement.Agreement` with the engines,
    over the first step of a rollout.
    """

    parked: Parked | None = None
    coef: Any = None
    tail: Any = None
    agreement: Any = None


@dataclass
class State:
    """Everything of one process. `settings`: the configuration, and the arguments that it was made from (settings.py's).

    >>> state = State(settings=(None, RunConfig()))
    >>> state.reset()
    >>> state == State()
    True
    """

    settings: tuple[Any, RunConfig] | None = None
    manager: ManagerState = field(default_factory=ManagerState)
    trainer: TrainerState = field(default_factory=TrainerState)

    def reset(self) -> None:
        """Forget everything, as a new process."""
        self.settings, self.manager, self.trainer = None, ManagerState(), TrainerState()


STATE = State()
"""This process's."""
