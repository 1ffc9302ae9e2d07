"""Keeps out of SGLang's prefix cache what one of the two models may not have read.

A finished request's output enters the cache with its KV, and a catch-up engine leaves holes in it: a model that did not write
at the end has not read the end. Another request that found such a prefix would be read with the holes. How far both have read
is known without asking them (`Bounds.surely_read`), unless one model alone writes the request, whose output the other never
reads. So of an output by both all but the last tokens are inserted, of another one nothing; prompts are, both compute them,
and so is what was prefilled again behind a retraction.

SGLang asks `Req.skip_radix_cache_insert` when it releases a request; it must not be set before, because the same flag keeps
prompts out. It is set for every finished output, so that a cache that this file does not know gets none. SGLang 0.5.15's plain
`RadixCache` is then given the part that is whole; later releases say in other ways how much they insert, and there prompts
alone are found again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_tandem.engines.fused.catch_up import Bounds

_MARK = "tandem_kept_out"
"""An attribute of requests whose output this file, and nobody else, keeps out."""
_installed = False


def install(bounds: Bounds, both_write: Callable[[str], bool]) -> None:
    """Register the hooks; once per process, however often it is called. `both_write`: whether both may, by a request's id."""
    global _installed
    if not _installed:
        target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
        HookRegistry.register(target, _finish, HookType.AROUND)
        if takes_a_part():

            def insert(original: Callable[..., Any], self: Any, req: Any, is_insert: bool = True) -> Any:
                if type(self) is RadixCache and getattr(req, _MARK, False) and req.finished():
                    is_insert = True
                    _cut(self, req, bounds.surely_read(req.kv_committed_len) if both_write(req.rid) else 0)
                return original(self, req, is_insert)

            target = "sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req"
            HookRegistry.register(target, insert, HookType.AROUND)
        HookRegistry.apply_hooks()
        _installed = True


def takes_a_part() -> bool:
    """Whether this SGLang's cache inserts as much of a request as the request says is committed."""
    method = getattr(RadixCache, "cache_finished_req", None)
    return method is not None and list(inspect.signature(method).parameters) == ["self", "req", "is_insert"]


def _finish(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    # SGLang 0.5.23 keeps the count in a record of its own; 0.5.17 has the record, and the count beside it.
    holder = self if hasattr(self, "kv_committed_len") else self.kv
    # A request that only scores has written nothing behind its prompt, which is whole.
    if self.finished() and holder.kv_committed_len > len(self.origin_input_ids) and not self.skip_radix_cache_insert:
        self.skip_radix_cache_insert = True
        setattr(self, _MARK, True)
    return result


def _cut(tree: RadixCache, req: Any, read: int) -> None:
    """Give back the locations behind what is whole, so that what is committed is: `read` tokens, and whatever was prefilled.

    That is the prompt, of which the tree has nothing yet if the first token was the last one; and behind a retraction the
    tokens that there were, which are the tree's since.
    """
    whole = max(read, len(req.origin_input_ids)) // tree.page_size * tree.page_size
    end = max(whole, req.cache_protected_len)
    row = tree.req_to_token_pool.req_to_token[req.req_pool_idx]
    tree.token_to_kv_pool_allocator.free(row[end : req.kv_allocated_len])
    req.kv_committed_len = req.kv_allocated_len = end
