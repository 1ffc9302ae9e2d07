"""Engines of frozen models that died come back: slime starts its senior's again before each weight update, theirs never.

slime's health check (`--use-fault-tolerance`) takes a dead engine of any model out of its router and forgets it.
`RolloutServer.recover` then starts what is missing; slime calls it for the model that gets new weights alone
(ray/rollout.py, `recover_updatable_engines`). A frozen model needs nothing but its folder, so it is called for them behind a
rollout, while the trainer is at work. Nothing is started here: the rollout manager is asked to, by slime's own method.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def heal_frozen(args: Any) -> None:
    """Have this process's rollout manager restart dead frozen engines once it is free; to be called within a rollout.

    Nothing without `--use-fault-tolerance`, which alone tells slime that an engine is dead, and nothing outside of an actor.
    """
    if not getattr(args, "use_fault_tolerance", False):
        return
    import ray

    try:
        manager = ray.get_runtime_context().current_actor
    except RuntimeError:  # slime's own tests and ours call the hooks without Ray
        return
    # A method that every actor has, which is given the actor's object: it runs behind the rollout under way.
    manager.__ray_call__.remote(restart_frozen)


def restart_frozen(manager: Any) -> list[str]:
    """The frozen models of slime's `RolloutManager` of which engines were missing and are there again.

    A model that takes turns with the trainer is left alone: between two phases slime counts on what its engines hold. A
    failure is logged, and tried again behind the next rollout: the others of its model go on meanwhile.
    """
    healed = []
    for name, server in manager.servers.items():
        groups = server.server_groups
        if server.update_weights or all(engine is not None for group in groups for engine in group.all_engines):
            continue
        if any(group.needs_offload for group in groups):
            logger.warning(
                "slime_tandem: an engine of %s is dead; it takes turns with the trainer and stays away", name
            )
            continue
        manager.health_monitoring_pause()  # as slime does before it recovers; the next rollout resumes
        try:
            server.recover()
        except Exception:
            logger.exception("slime_tandem: an engine of %s did not come up again", name)
            continue
        server.num_new_engines = 0
        logger.warning("slime_tandem: dead engines of %s started again", name)
        healed.append(name)
    return healed
