"""Divergences between student and teacher over candidate tokens. Pure torch.

A full distribution has a hundred thousand entries, a teacher reports a few. Both sides are therefore compared on the same
coarse partition: each candidate, and all the rest as one event. What comes out is a divergence between two proper
distributions: zero where they agree, never negative, never more than that of the full ones (data-processing inequality),
and without an invented probability for tokens that one list lacks. It must be a loss term: put in as an advantage, a top-k
reverse KL has no expected gradient (miles #2362). Which tokens are candidates, and which positions count, is the caller's.

A signal is a function of the two coarse distributions (`Divergence`); built-in ones and a user's own, `module:attribute`, come
through one table. Over tensor-parallel shards every rank holds the whole coarse distributions, so that any signal works there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tandem.errors import ConfigError
from slime_tandem.extensions import find, is_own
from slime_tandem.objective.truncation import Group, all_reduce, wide_type

Divergence = Callable[[Tensor, Tensor, float], Tensor]
"""What a signal is: (student, teacher, `opd.jsd_beta`) -> divergence per position [T], nats. `student`, `teacher` [T, K + 1]:
probabilities of the candidates (0 where there is none) and, last, of all other tokens. Pure torch; the gradient flows through
`student`. A position's value depends on that position alone: micro-batches and context-parallel ranks cut between positions."""

_LEAST_REST = 1e-6
"""Probability that the rest has at least: lists of log-probs in half precision sum to a little more than 1."""


def log_probs_of(logits: Tensor, ids: Tensor, temperature: float = 1.0, group: Group = None) -> Tensor:
    """Log-probs [T, K] (nats) of `ids` [T, K] under logits [T, V]; entries of -1 give those of id 0, ids beyond V NaN.

    `group`: `logits` are this rank's [T, V / ranks] columns, in the order of the ranks, all of one width; every rank gets the
    whole result and must use it alike, its gradient is that of its own columns.

    >>> log_probs_of(torch.zeros(1, 4), torch.tensor([[2, -1]])).exp().tolist()
    [[0.25, 0.25]]
    """
    scaled = logits.to(wide_type(logits.dtype)) / temperature
    here, column = _columns(scaled, ids.clamp(min=0), group)
    mine = scaled.gather(-1, column)
    found = _summed(torch.where(here, mine, 0.0), group) - _log_sum_exp(scaled, group)[:, None]
    width = scaled.shape[1] * (1 if group is None else dist.get_world_size(group))
    return torch.where(ids < width, found, torch.nan)


def log_rest_of(logits: Tensor, ids: Tensor, temperature: float = 1.0, group: Group = None) -> Tensor:
    """Log-prob [T] (nats) of all tokens but `ids` [T, K] (-1: none) under logits [T, V], exact however small it is; `group`
    as for `log_probs_of`.

    >>> log_rest_of(torch.zeros(1, 4), torch.tensor([[2, -1]])).exp().item()
    0.75
    """
    scaled = logits.to(wide_type(logits.dtype)) / temperature
    here, column = _columns(scaled, ids, group)
    listed = torch.zeros(scaled.shape[0], scaled.shape[1] + 1, dtype=torch.bool, device=scaled.device)
    listed.scatter_(-1, torch.where(here, column, scaled.shape[1]), True)
    rest = scaled.masked_fill(listed[:, :-1], -1e30)
    return _log_sum_exp(rest, group) - _log_sum_exp(scaled, group)


def _columns(logits: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(whether this rank has the column of each id, that column, 0 where it has not), both [T, K]."""
    size = logits.shape[1]
    column = ids if group is None else ids - dist.get_rank(group) * size
    here = (ids >= 0) & (column >= 0) & (column < size)
    return here, torch.where(here, column, 0)


def _log_sum_exp(x: Tensor, group: Group) -> Tensor:
    """[T] over all columns of all ranks."""
    if group is None:
        return torch.logsumexp(x, dim=-1)
    peak = all_reduce(x.detach().amax(-1), dist.ReduceOp.MAX, group)
    return peak + _summed((x - peak[:, None]).exp().sum(-1), group).log()


def _summed(x: Tensor, group: Group) -> Tensor:
    return x if group is None else _OverRanks.apply(x, group)  # type: ignore[no-untyped-call]


class _OverRanks(torch.autograd.Function):
    """The sum over ranks that all go on with it alike: what comes back is each one's own gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x.clone(), dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def candidate_divergence(
    student: Tensor,
    teacher: Tensor,
    known: Tensor,
    kind: str,
    jsd_beta: float = 0.5,
    student_rest: Tensor | None = None,
) -> Tensor:
    """Divergence `kind` (a name in `DIVERGENCES`, or a user's own) per position [T], nats, over candidates and the rest.

    The gradient flows through `student`.

    `student`, `teacher` [T, K]: log-probs of the same candidates; `known` [T, K] bool marks the entries that exist.
    reverse_kl is KL(student || teacher), forward_kl KL(teacher || student), jsd the generalised Jensen-Shannon divergence
    with the mixture m = beta * teacher + (1 - beta) * student: beta * KL(teacher || m) + (1 - beta) * KL(student || m)
    (GKD, arXiv 2306.13649). `student_rest` [T]: log-prob of all that is no candidate (`log_rest_of`); None: what the
    candidates leave of 1, which rounding makes worthless below 1e-6, its gradient first. Raises ConfigError as
    `find_divergence`.

    >>> half = torch.tensor([[0.5, 0.25]]).log()
    >>> everywhere = torch.ones(1, 2, dtype=torch.bool)
    >>> candidate_divergence(half, half, everywhere, "reverse_kl").tolist()
    [0.0]
    """
    s, t = _with_rest(student, known, student_rest), _with_rest(teacher, known)
    return find_divergence(kind)(s, t, jsd_beta)


def _with_rest(log_probs: Tensor, known: Tensor, log_rest: Tensor | None = None) -> Tensor:
    """Probabilities [T, K + 1]: candidates (0 where unknown), then all the rest."""
    p = torch.where(known, log_probs, torch.full_like(log_probs, -torch.inf)).exp()
    if log_rest is not None:
        return torch.cat([p, log_rest[:, None].exp()], dim=-1)
    rest = (1.0 - p.sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([p, rest], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum p log(p / q); 0 where p is 0 (both are, for candidates that do not exist)."""
    there = p > 0
    # Entries outside are replaced before the logarithm: their gradient would be 0 * inf.
    safe_p, safe_q = torch.where(there, p, 1.0), torch.where(there, q.clamp(min=1e-38), 1.0)
    return (torch.where(there, p, 0.0) * (safe_p.log() - safe_q.log())).sum(-1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    m = beta * teacher + (1 - beta) * student
    return beta * _kl(teacher, m) + (1 - beta) * _kl(student, m)


DIVERGENCES: Mapping[str, Divergence] = {
    "reverse_kl": lambda student, teacher, _: _kl(student, teacher),
    "forward_kl": lambda student, teacher, _: _kl(teacher, student),
    "jsd": _jsd,
}
"""Built-in signals by name; `sampled` compares no distributions (objective/loss.py)."""


@lru_cache(maxsize=64)
def find_divergence(name: str) -> Divergence:
    """The function of a signal. Raises ConfigError for a user's own that cannot be imported, or that fails on a small example:
    another shape, a value that is not finite, no gradient, or a position's value that depends on other positions."""
    found = find(name, DIVERGENCES, "opd.signal")
    if is_own(name) and (fault := _fault(found)):
        expected = f"a divergence per position [T] of (student [T, K + 1], teacher [T, K + 1], beta); this one {fault}"
        raise ConfigError("opd.signal", name, expected, "mend the function (docs/extending.md)")
    return found


def _fault(divergence: Divergence) -> str | None:
    """What is wrong with a user's function, seen on three positions, the last with a candidate that does not exist."""
    student = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.7, 0.0, 0.3]], requires_grad=True)
    teacher = torch.tensor([[0.2, 0.2, 0.6], [0.3, 0.6, 0.1], [0.4, 0.0, 0.6]])
    try:
        with torch.enable_grad():
            values = divergence(student, teacher, 0.5)
            if not isinstance(values, Tensor) or values.shape != (3,):
                return f"answers {tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__}"
            if not values.requires_grad:
                return "has no gradient"
            (grad,) = torch.autograd.grad(values.sum(), student)
        apart = torch.cat([divergence(student[i : i + 1], teacher[i : i + 1], 0.5) for i in range(3)])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code
        return f"raises {' '.join(f'{type(error).__name__}: {error}'.split())}"
    if not values.isfinite().all() or not grad.isfinite().all():
        return "is not finite, or its gradient is not, where a candidate does not exist"
    return None if torch.allclose(values, apart, atol=1e-5) else "mixes positions"
