"""Lets the fused model see whose prefill it is while SGLang replays a captured graph, and keeps the model's report.

SGLang replays a prefill graph on a batch that it builds anew, without request ids, and passes on the logits alone
(prefill_cuda_graph_runner.py of 0.5.15.post1: `load_batch` and the end of `execute`). A hook around `execute` remembers the
batch that was scheduled, and puts what the model handed on back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_installed = False


class _Replay:
    """One replay: the batch that was scheduled, what the model hands on."""

    now: _Replay | None = None

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.info: Any = None


def scheduled(batch: Any) -> Any:
    """The batch that SGLang scheduled, of which `batch` may be a graph's static view."""
    return batch if _Replay.now is None else _Replay.now.batch


def keep(output: Any) -> None:
    """Remember what `output` hands on to the sampler, if a graph is being replayed."""
    if _Replay.now is not None:
        _Replay.now.info = output.customized_info


def install() -> None:
    """Register the hook; once per process, however often it is called."""
    global _installed
    if not _installed:
        target = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute"
        HookRegistry.register(target, _execute, HookType.AROUND)
        HookRegistry.apply_hooks()
        _installed = True


def _execute(original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    replay = _Replay.now = _Replay(forward_batch)
    try:
        output = original(self, forward_batch, *args, **kwargs)
    finally:
        _Replay.now = None
    output.customized_info = replay.info
    return output
