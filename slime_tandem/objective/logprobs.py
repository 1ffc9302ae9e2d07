"""Log-probs of sampled tokens from logits, with the sampler's truncation replayed. Pure torch; Triton kernels on the GPU.

No [T, V] tensor in float32 is ever held: logits are widened a few tokens at a time, in the forward pass and again in the
backward, which keeps three numbers per token. The vocabulary may be sharded over the ranks of a process group (tensor
parallelism); each token stands alone, so sequences may be cut anywhere (context parallelism). It knows no model, and not what
the log-probs are for.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_tandem.errors import DataError
from slime_tandem.objective.truncation import Group, KeptIds, Replay, Truncation, all_reduce, thresholds, wide_type

_CHUNK = 2**22
"""Logits that are widened at once (16 MiB in float32)."""
_NO_REPLAY = Replay(Truncation())


class _Task(NamedTuple):
    """What does not change between forward and backward."""

    temperature: float
    replay: Replay
    group: Group
    in_place: bool
    entropy_grad: bool = False


def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    *,
    replay: Replay | None = None,
    group: Group = None,
    in_place: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs [T], entropies [T]) in nats of logits [T, V] at the sampled tokens [T]; float32 (float64 of float64).

    The log-probs are those of softmax(logits / temperature), what the engines report for output tokens; with `replay` those of
    the truncated and renormalised distribution, in which the sampled token always counts as kept: rounding may have put it just
    outside. The entropy is that of the full distribution; it carries a gradient with `entropy_grad` alone, which the kernels do
    not know.

    `group`: `logits` are this rank's [T, V / ranks] columns, in the order of the ranks; `tokens` are ids of the whole
    vocabulary, and every rank gets
    the whole result. `in_place`: the backward overwrites `logits` with their gradient, for callers who need them no more.

    -inf is a token of probability 0 (log-prob -inf if it was sampled); a NaN or +inf makes its row NaN. Raises DataError for a
    temperature that is not above 0, ids outside the vocabulary (the kernels give NaN instead: a check would wait for the GPU),
    kept ids outside of it, shapes that do not fit, and `in_place` logits whose rows share memory.

    >>> lp, h = token_log_probs(torch.zeros(1, 4), torch.tensor([2]))
    >>> round(lp.item(), 4), round(h.item(), 4)
    (-1.3863, 1.3863)
    >>> token_log_probs(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]), replay=Replay(Truncation(top_k=2)))[0].exp()
    tensor([0.5000])
    """
    task = _Task(temperature, replay or _NO_REPLAY, group, in_place, entropy_grad)
    _check(logits, tokens, task, ids=_kernels(logits, task) is None)
    log_probs, entropies = _TokenLogProbs.apply(logits, tokens, task)  # type: ignore[no-untyped-call]
    return log_probs, entropies


def top_log_probs(logits: Tensor, k: int, temperature: float = 1.0, *, group: Group = None) -> tuple[Tensor, Tensor]:
    """(log-probs [T, k], ids [T, k]) of the k most likely tokens, best first, without gradient; arguments as for
    `token_log_probs`.

    Raises DataError for a k that the vocabulary does not have.

    >>> top_log_probs(torch.tensor([[0.0, 3.0, 1.0]]), 2)[1].tolist()
    [[1, 2]]
    """
    T, V = logits.shape
    ranks, first = _shard(V, group)
    if not 1 <= k <= V * ranks:
        raise DataError("k", k, f"1 to {V * ranks}, the size of the vocabulary", "lower it")
    _check(
        logits,
        torch.zeros(T, dtype=torch.long, device=logits.device),
        _Task(temperature, _NO_REPLAY, group, False),
        ids=False,
    )
    dtype = wide_type(logits.dtype)
    out, out_ids = logits.new_empty(T, k, dtype=dtype), logits.new_empty(T, k, dtype=torch.long)
    for rows in _chunks(T, V * ranks):
        x = logits[rows].detach().to(dtype) / temperature
        peak, mass, _ = _normaliser(x, group)
        values, ids = x.topk(min(k, V), dim=-1)
        ids += first
        if group is not None:
            values, ids = (_gathered(part, group) for part in (values, ids))
            values, best = values.topk(k, dim=-1)
            ids = ids.gather(-1, best)
        out[rows], out_ids[rows] = values - (peak + mass.log())[:, None], ids
    return out, out_ids


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
        ctx.task, ctx.kernels = task, _kernels(logits, task)
        if ctx.kernels is not None:
            replay = task.replay
            log_probs, entropies, state = ctx.kernels.forward(
                logits, tokens, task.temperature, replay.truncation, replay.replayed
            )
        else:
            log_probs, entropies, state = _forward(logits, tokens, task)
        ctx.save_for_backward(tokens, *state)
        # Not among the saved tensors, whose version is checked: writing over them is what `in_place` means.
        ctx.logits = logits.detach()
        if not task.entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *state = ctx.saved_tensors
        task, logits = ctx.task, ctx.logits
        assert logits is not None, "in_place: the first backward has written over the logits"
        out = logits if task.in_place else torch.empty_like(logits)
        if ctx.kernels is not None:
            rows = ctx.kernels.RowState(*state)
            ctx.kernels.backward(logits, tokens, task.temperature, rows, grads, out)
        else:
            _backward(logits, tokens, task, _Rows(*state), grads, of_entropies, out)
        if task.in_place:
            ctx.logits = None
        return out, None, None


def _kernels(logits: Tensor, task: _Task) -> Any:
    """The Triton kernels if they can do this task, else None."""
    fits = logits.is_cuda and logits.dtype != torch.float64 and logits.stride(-1) == 1
    if not fits or task.group is not None or task.replay.kept is not None or task.entropy_grad:
        return None
    return _triton_module()


@cache
def _triton_module() -> Any:
    if find_spec("triton") is None:
        return None
    from slime_tandem.objective import logprobs_triton

    return logprobs_triton


class _Rows(NamedTuple):
    """What a backward needs of each row, all [T]: log-normalisers of the kept set, thresholds; and where entropies have a
    gradient (else empty), log-normalisers of the full distribution, and the entropies."""

    normalisers: Tensor
    limits: Tensor
    full: Tensor
    entropies: Tensor


def _forward(logits: Tensor, tokens: Tensor, task: _Task) -> tuple[Tensor, Tensor, _Rows]:
    """(log-probs [T], entropies [T], what the backward needs)."""
    T, V = logits.shape
    ranks, first = _shard(V, task.group)
    dtype = wide_type(logits.dtype)
    log_probs, entropies, normalisers, full = (logits.new_empty(T, dtype=dtype) for _ in range(4))
    limits = logits.new_full((T,), -torch.inf)
    for rows in _chunks(T, V * ranks):
        part = logits[rows].detach()
        cut = task.replay.truncation
        if cut.active and task.replay.kept is None:
            limits[rows] = thresholds(part, cut.top_k, cut.top_p, cut.min_p, task.temperature, task.group)
            if task.replay.replayed is not None:
                limits[rows].masked_fill_(~task.replay.replayed[rows], -torch.inf)
        x = part.to(dtype) / task.temperature
        peak, mass, dot = _normaliser(x, task.group)
        mine = _mine(tokens[rows], first, V)
        kept = _kept(part, limits[rows], mine, task.replay.kept, rows, first)
        sums = torch.stack(
            [torch.where(kept, (x - peak[:, None]).exp(), 0.0).sum(-1), torch.where(mine, x, 0.0).sum(-1)]
        )
        kept_mass, chosen = all_reduce(sums, dist.ReduceOp.SUM, task.group)
        # mass - mass: a NaN or infinity anywhere in the row is shown, never truncated away.
        normalisers[rows] = peak + kept_mass.log() + (mass - mass)
        log_probs[rows] = chosen - normalisers[rows]
        entropies[rows] = mass.log() - dot / mass
        full[rows] = peak + mass.log()
    nothing = full[:0]
    kept_back = (full, entropies.clone()) if task.entropy_grad else (nothing, nothing)
    return log_probs, entropies, _Rows(normalisers, limits, *kept_back)


def _backward(
    logits: Tensor, tokens: Tensor, task: _Task, state: _Rows, grads: Tensor, of_entropies: Tensor, out: Tensor
) -> None:
    """`out` = grads * (one-hot - kept probabilities) / temperature; 0 outside the kept set and in rows without gradient.

    With `task.entropy_grad` also of_entropies * d entropy: -p (log p + entropy) / temperature, p of the full distribution.
    """
    T, V = logits.shape
    ranks, first = _shard(V, task.group)
    for rows in _chunks(T, V * ranks):
        part = logits[rows]
        mine = _mine(tokens[rows], first, V)
        kept = _kept(part, state.limits[rows], mine, task.replay.kept, rows, first) & (grads[rows] != 0)[:, None]
        x = part.to(state.normalisers.dtype) / task.temperature
        p = (x - state.normalisers[rows, None]).exp_()
        slope = (mine.to(p.dtype) - p) * (grads[rows] / task.temperature)[:, None]
        slope = torch.where(kept, slope, 0.0)
        if task.entropy_grad:
            log_p = x - state.full[rows, None]
            bonus = log_p.exp() * (log_p + state.entropies[rows, None])
            bonus = bonus * (-of_entropies[rows] / task.temperature)[:, None]
            # A token of probability 0 has no slope, and a row without gradient may hold anything.
            slope += torch.where((of_entropies[rows] != 0)[:, None] & (log_p != -torch.inf), bonus, 0.0)
        out[rows] = slope.to(out.dtype)


def _kept(part: Tensor, limits: Tensor, mine: Tensor, kept: KeptIds | None, rows: slice, first: int) -> Tensor:
    """[c, V] bool: the sampled token, and what the server's lists or the thresholds keep."""
    if kept is None:
        return mine | ~(part < limits[:, None])
    return mine | kept.mask(rows.start, rows.stop, first, part.shape[1])


def _mine(tokens: Tensor, first: int, V: int) -> Tensor:
    """[c, V] bool: this rank's column of the sampled token."""
    return tokens[:, None] == torch.arange(first, first + V, device=tokens.device)


def _normaliser(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """(greatest logit, sum of e = exp(logit - greatest), sum of e * (logit - greatest)) of each row of x [c, V]."""
    peak = all_reduce(x.amax(-1), dist.ReduceOp.MAX, group)
    d = x - peak[:, None]
    e = d.exp()
    sums = torch.stack([e.sum(-1), torch.where(e > 0, e * d, 0.0).sum(-1)])
    mass, dot = all_reduce(sums, dist.ReduceOp.SUM, group)
    return peak, mass, dot


def _gathered(x: Tensor, group: Group) -> Tensor:
    """[c, k * ranks]: every rank's [c, k], side by side."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim=-1)


def _shard(V: int, group: Group) -> tuple[int, int]:
    """(ranks, this rank's first id)."""
    if group is None:
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group) * V


def _chunks(T: int, V: int) -> list[slice]:
    """Rows that are widened together; the same on every rank."""
    step = max(1, _CHUNK // max(1, V))
    return [slice(a, min(T, a + step)) for a in range(0, T, step)]


def _check(logits: Tensor, tokens: Tensor, task: _Task, ids: bool) -> None:
    if not task.temperature > 0.0:
        raise DataError("temperature", task.temperature, "a number above 0, greedy tokens have no log-prob", "raise it")
    if logits.ndim != 2 or tokens.shape != logits.shape[:1] or not logits.is_floating_point():
        shapes = f"{logits.dtype} {tuple(logits.shape)} and {tuple(tokens.shape)}"
        raise DataError("logits, tokens", shapes, "floats [T, V] and ids [T]", "pack the response tokens")
    T, V = logits.shape
    ranks, _ = _shard(V, task.group)
    replay = task.replay
    for name, rows in (
        ("replayed", replay.replayed if replay.replayed is not None else tokens),
        ("kept.offsets", replay.kept.offsets[1:] if replay.kept is not None else tokens),
    ):
        if rows.shape != tokens.shape:
            raise DataError(f"replay.{name}", f"{len(rows)} rows", f"{T}, one per token", "pack them alike")
    if ranks > 1:
        # Shards of different sizes would shift the ids of all that follow, unseen.
        same = torch.tensor([T, -T, V, -V], device=logits.device)
        most = all_reduce(same.clone(), dist.ReduceOp.MAX, task.group)
        if not torch.equal(same, most):
            expected = f"[{most[0]}, {most[2]}] on every rank of the group"
            raise DataError("logits", [T, V], expected, "pad the vocabulary to a multiple of the ranks")
    kept_ids = tokens[:0] if replay.kept is None else replay.kept.ids
    if len(kept_ids) and not bool(((kept_ids >= 0) & (kept_ids < V * ranks)).all()):
        found = (int(kept_ids.min()), int(kept_ids.max()))
        raise DataError("replay.kept.ids", found, f"ids in [0, {V * ranks})", "ask the server of this model")
    if task.in_place and 0 in logits.stride() and logits.numel() > 1:
        raise DataError("logits", f"strides {logits.stride()}", "memory of its own per logit", "clone them")
    if ids and T and not bool(((tokens >= 0) & (tokens < V * ranks)).all()):
        found = (int(tokens.min()), int(tokens.max()))
        raise DataError("tokens", found, f"ids in [0, {V * ranks})", "tokenise with this model's tokenizer")
