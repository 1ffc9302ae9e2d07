"""Tells the client who wrote each token, with the author's and the senior's log-prob of it.

The model hands (author codes, senior logits) to the sampler in `LogitsProcessorOutput.customized_info`. A hook around
`Sampler.forward`, registered with SGLang's own `HookRegistry`, replaces them by one value per request, which the scheduler
collects and returns in `meta_info`. SGLang creates its sampler before it imports an external model package, so a backend
given to `register_sampler_backend` would need a plug-in entry point, that is, an installation; the hook does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers import sampler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_tandem.engines import handoff_wire
from slime_tandem.engines.fused.catch_up import Step

_HANDED_ON = "tandem_handed_on"
_installed = False


class CatchUp(NamedTuple):
    """The senior's part of a catch-up step, and the id behind each row [R] that is not its sequence's last."""

    step: Step
    following: torch.Tensor


def hand_on(output: Any, codes: torch.Tensor, senior_logits: torch.Tensor, caught_up: CatchUp | None = None) -> None:
    """Give the sampler's hook what it needs of this step: author codes [B], the senior's logits [B, V].

    In a catch-up step the logits are those of its rows, [R, V].
    """
    output.customized_info = {_HANDED_ON: (codes, senior_logits, caught_up)}


def install() -> None:
    """Register the hook; once per process, however often it is called."""
    global _installed
    if not _installed:
        HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", _sample_and_report, HookType.AROUND)
        HookRegistry.apply_hooks()
        _installed = True


Row = tuple[int, float | None, float | None] | tuple[int, float | None, float | None, list[float]]


class Report:
    """What is told of a step by row of the batch, copied to the host while the GPU goes on.

    (author, author's log-prob, senior's log-prob); log-probs are None for a batch that asked for none. In a catch-up step the
    senior's is None where it did not read the sequence, and its log-probs of tokens before this one, which it has just caught
    up on, come as a fourth. The scheduler indexes it after the step has ended.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        values: torch.Tensor | None,
        step: Step | None = None,
        late: torch.Tensor | None = None,
    ) -> None:
        """Codes [B], log-probs [B, 2]; the senior's part of a catch-up step, its log-probs [R] of the ids behind its rows."""
        columns = [codes.double().unsqueeze(1)]
        if values is not None:
            columns.append(values)
        if step is not None:
            columns.append(torch.stack([step.taken, step.end], dim=1)[: len(codes)].double())
        self._room = None if step is None else len(step.sequence)
        self._has_values = values is not None
        self._rows: list[Row] | None = None
        self._event = None
        self._host = [torch.cat(columns, 1), *([] if late is None else [late])]
        if codes.is_cuda:
            pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._host]
            for to, tensor in zip(pinned, self._host, strict=True):
                to.copy_(tensor, non_blocking=True)
            self._host = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __getitem__(self, row: int) -> Row:
        if self._rows is None:
            if self._event is not None:
                self._event.synchronize()
            self._rows = self._read_host()
        return self._rows[row]

    def _read_host(self) -> list[Row]:
        columns = self._host[0].tolist()
        late: list[float] = self._host[1].tolist() if len(self._host) > 1 else []
        rows: list[Row] = []
        for code, *rest in columns:
            written, senior = rest[:2] if self._has_values else (None, None)
            if self._room is None:
                rows.append((int(code), written, senior))
                continue
            count, end = int(rest[-2]), int(rest[-1])
            assert end <= self._room, f"a catch-up step needed {end} rows and had {self._room}"
            rows.append((int(code), written, senior if count else None, late[end - count : end - 1] if count else []))
        return rows


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
    codes, senior_logits, caught_up = handed_on
    n = ids.shape[0]
    codes, values, late = codes[:n], None, None
    step = None if caught_up is None else caught_up.step
    if return_logprob:
        written = logits_output.next_token_logprobs.double()
        if step is None:
            row, logits = torch.arange(n, device=ids.device), senior_logits[:n]
        else:
            row, logits = (step.end[:n] - 1).clamp(min=0), senior_logits
        temperature = None
        if not sampler.SGLANG_RETURN_ORIGINAL_LOGPROB:
            of = row if step is None else step.sequence.clamp(max=n - 1)
            temperature = sampling_info.temperatures.flatten()[of]
        log_probs = _LogProbs(logits, temperature)
        senior = log_probs.of(row, ids.long()).double()
        if caught_up is not None:
            late = log_probs.of(torch.arange(len(logits), device=ids.device), caught_up.following).double()
        # A senior token's two values are one number, not two roundings of it.
        values = torch.stack([written, torch.where(codes == 0, senior, written)], dim=1)
    logits_output.customized_info = {handoff_wire.REPORT: Report(codes, values, step, late)}
    return ids


class _LogProbs:
    """Log-probs by `logits` [R, V], each row at its `temperature` [R] (None: 1), of any of their entries."""

    def __init__(self, logits: torch.Tensor, temperature: torch.Tensor | None) -> None:
        self._logits, self._temperature = logits, temperature
        if logits.is_cuda:
            from slime_tandem.engines.fused import step_kernels

            self._mass = step_kernels.mass(logits, temperature)
        else:
            scaled = logits.float() if temperature is None else logits.float() / temperature.unsqueeze(1)
            self._mass = scaled.logsumexp(dim=1)

    def of(self, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """[N] float32: of `token` [N] in `row` [N]."""
        logit = self._logits[row, token].float()
        if self._temperature is not None:
            logit = logit / self._temperature[row]
        return logit - self._mass[row]
