"""Keeps out of SGLang's prefix cache what one of the two models may not have read.

A finished request's output enters the cache with its KV, and a catch-up engine leaves holes in it: a model that did not write
at the end has not read the end. Another request that found such a prefix would be read with the holes. So no output is
inserted; prompts are, both models compute them. SGLang asks `Req.skip_radix_cache_insert` when it releases a request; it
must not be set before, because the same flag keeps prompts out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_installed = False


def install() -> None:
    """Register the hook; once per process, however often it is called."""
    global _installed
    if not _installed:
        target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
        HookRegistry.register(target, _finish, HookType.AROUND)
        HookRegistry.apply_hooks()
        _installed = True


def _finish(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    # SGLang 0.5.23 keeps the count in a record of its own; 0.5.17 has the record, and the count beside it.
    holder = self if hasattr(self, "kv_committed_len") else self.kv
    # A request that only scores has written nothing behind its prompt, which is whole.
    if self.finished() and holder.kv_committed_len > len(self.origin_input_ids):
        self.skip_radix_cache_insert = True
    return result
