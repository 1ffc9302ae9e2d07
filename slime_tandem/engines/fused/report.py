"""Tells the client who wrote each token, with the author's and the senior's log-prob of it.

The model hands (author codes, senior logits) to the sampler in `LogitsProcessorOutput.customized_info`. A hook around
`Sampler.forward`, registered with SGLang's own `HookRegistry`, replaces them by one value per request, which the scheduler
collects and returns in `meta_info`. SGLang creates its sampler before it imports an external model package, so a backend
given to `register_sampler_backend` would need a plug-in entry point, that is, an installation; the hook does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_tandem.engines import handoff_wire

_HANDED_ON = "tandem_handed_on"
_installed = False


def hand_on(output: Any, codes: torch.Tensor, senior_logits: torch.Tensor) -> None:
    """Give the sampler's hook what it needs of this step: author codes [B], the senior's logits [B, V]."""
    output.customized_info = {_HANDED_ON: (codes, senior_logits)}


def install() -> None:
    """Register the hook; once per process, however often it is called."""
    global _installed
    if not _installed:
        HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", _sample_and_report, HookType.AROUND)
        HookRegistry.apply_hooks()
        _installed = True


class Report:
    """(author, author's log-prob, senior's log-prob) by row of the batch, copied to the host while the GPU goes on.

    The scheduler indexes it after the step has ended. Log-probs are None for a batch that asked for none.
    """

    def __init__(self, codes: torch.Tensor, values: torch.Tensor | None) -> None:
        self._rows: list[tuple[int, float | None, float | None]] | None = None
        columns = codes.double().unsqueeze(1) if values is None else torch.cat([codes.double().unsqueeze(1), values], 1)
        self._event = None
        if columns.is_cuda:
            self._host = torch.empty(columns.shape, dtype=columns.dtype, pin_memory=True)
            self._host.copy_(columns, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = columns

    def __getitem__(self, row: int) -> tuple[int, float | None, float | None]:
        if self._rows is None:
            if self._event is not None:
                self._event.synchronize()
            padding = (None, None) if self._host.shape[1] == 1 else ()
            self._rows = [(int(code), *rest, *padding) for code, *rest in self._host.tolist()]
        return self._rows[row]


def _sample_and_report(
    original: Callable[..., torch.Tensor],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    handed_on = (logits_output.customized_info or {}).get(_HANDED_ON)
    if handed_on is None:
        return original(self, logits_output, sampling_info, return_logprob, *args, **kwargs)
    logits_output.customized_info = None
    ids = original(self, logits_output, sampling_info, return_logprob, *args, **kwargs)
    codes, senior_logits = handed_on
    n = ids.shape[0]
    codes, values = codes[:n], None
    if return_logprob:
        written = logits_output.next_token_logprobs.double()
        logits = senior_logits[:n].float()
        if not sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
            logits.div_(sampling_info.temperatures)  # our own copy
        senior = (logits.gather(1, ids.long().unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)).double()
        # A senior token's two values are one number, not two roundings of it.
        values = torch.stack([written, torch.where(codes == 0, senior, written)], dim=1)
    logits_output.customized_info = {handoff_wire.REPORT: Report(codes, values)}
    return ids
