"""One of two ranks: the loss of a small policy, cut up in every way, against the same loss computed whole by this rank alone.

`test_parallel.py` starts both: python parallel_cases.py RANK STORE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig
from slime_tandem.errors import DataError
from slime_tandem.objective.divergence import candidate_divergence, log_probs_of, log_rest_of
from slime_tandem.objective.logprobs import token_log_probs, top_log_probs
from slime_tandem.objective.loss import Denominators, PackedTokens, tandem_loss
from slime_tandem.objective.truncation import KeptIds, Replay, Truncation, kept_mask, thresholds

V, H, TEMPERATURE = 24, 8, 0.9
LENGTHS = (5, 1, 0, 7, 4)
"""Response tokens of the sequences; one response is empty."""
CUTS = [
    (Truncation(), False),
    (Truncation(6, 0.9, 0.01), False),
    (Truncation(top_p=0.8), False),
    (Truncation(top_k=4), True),
]
Parts = Sequence[Tensor]
Result = dict[str, Tensor]


class Batch:
    """Tokens, their weights and a policy: an embedding of the token before and an output layer."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.T = sum(LENGTHS)
        self.embedding, self.output = (torch.randn(V, H, generator=g) * 0.9 for _ in range(2))
        self.embedding[3] = self.embedding[4]
        self.output[20] = self.output[2]  # equal logits in both shards
        self.before, self.tokens = (torch.randint(V, (self.T,), generator=g) for _ in range(2))
        self.sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        rand = torch.rand(7, self.T, generator=g)
        self.replayed = rand[0] < 0.7
        self.weights = torch.where(rand[1] < 0.3, 0.0, rand[1] + 0.2)
        self.opd_weights = torch.where(rand[2] < 0.5, 0.0, rand[2])
        self.junior_weights = (rand[6] < 0.3).float()
        self.advantages, self.noise, self.teacher = rand[3] - 0.5, rand[4] * 0.8 - 0.4, -3 * rand[5]

    def kept_lists(self, cut: Truncation) -> list[list[int]]:
        logits = self.embedding[self.before] @ self.output.T
        mask = kept_mask(logits, cut.top_k, cut.top_p, cut.min_p, TEMPERATURE).scatter(1, self.tokens[:, None], True)
        return [row.nonzero().flatten().tolist() if r else [] for row, r in zip(mask, self.replayed, strict=True)]

    def padded(self) -> Tensor:
        """Indices of all tokens, each sequence padded to the longest with tokens of weight 0 (index T)."""
        rows = [torch.nonzero(self.sequence == s)[:, 0] for s in range(len(LENGTHS))]
        return torch.cat([torch.cat([r, torch.full((max(LENGTHS) - len(r),), self.T)]) for r in rows])

    def run(self, parts: Parts, cut: Truncation, lists: bool, *, tensor: bool = False, gather: bool = False) -> Result:
        """Loss, metrics and gradients, summed over `parts` (indices of tokens); `tensor`: this rank has half of the vocabulary,
        `gather`: this rank has half of the tokens."""
        embedding, output = self.embedding.clone().requires_grad_(), self.output.clone().requires_grad_()
        n = Denominators(*(float(x.sum()) for x in (self.weights, self.opd_weights, self.junior_weights)))
        objective = ObjectiveConfig(
            kl_coef=0.1, lambda_jun=0.1, entropy_coef=0.3, rollout_weights="truncated", rollout_weight_max=1.05
        )
        opd = OpdConfig()
        per_token = (self.weights, self.opd_weights, self.junior_weights, self.advantages, self.teacher, self.noise)
        pad = [torch.cat([x, x.new_zeros(1)]) for x in per_token]
        before, tokens, replayed = (torch.cat([x, x.new_zeros(1)]) for x in (self.before, self.tokens, self.replayed))
        kept = [*self.kept_lists(cut), []]
        out: Result = {}
        for part in parts:
            shard = output.chunk(2)[dist.get_rank()] if tensor else output
            logits = embedding[before[part]] @ shard.T
            replay = Replay(cut, replayed[part], KeptIds.of([kept[i] for i in part.tolist()]) if lists else None)
            group = dist.group.WORLD if tensor else None
            log_probs, entropy = token_log_probs(
                logits, tokens[part], TEMPERATURE, replay=replay, group=group, entropy_grad=True
            )
            weights, opd_weights, junior_weights, advantages, teacher, noise = (x[part] for x in pad)
            near = log_probs.detach()
            packed = PackedTokens(
                near + noise,
                advantages,
                weights,
                opd_weights,
                teacher,
                ref_log_probs=near - noise,
                rollout_log_probs=near + noise / 2,
                junior_weights=junior_weights,
                junior_log_probs=near - noise / 2,
            )
            loss, metrics = tandem_loss(log_probs, entropy, packed, n, objective, opd)
            loss.backward()
            for name, value in metrics.items():
                out[name] = out.get(name, torch.zeros(())) + value
        assert embedding.grad is not None
        assert output.grad is not None
        grads = {"d embedding": embedding.grad, "d output": output.grad}
        for x in [*(out.values() if gather else ()), *(grads.values() if gather or tensor else ())]:
            dist.all_reduce(x)
        return out | grads


def same(got: Result, want: Result, case: str) -> None:
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-5, (case, name, got[name], value)
        assert value.abs().max() > 0, (case, name, "compares nothing")


def check_losses(batch: Batch, rank: int) -> None:
    everything = torch.arange(batch.T)
    padding = torch.full((5,), batch.T)
    empty = everything[:0]
    first = torch.cat([torch.nonzero(batch.sequence == s)[: (n + 1) // 2, 0] for s, n in enumerate(LENGTHS)])
    rest = torch.tensor([i for i in everything.tolist() if i not in first.tolist()])
    sequences = [torch.nonzero(batch.sequence == s)[:, 0] for s in range(len(LENGTHS))]
    shuffled = torch.cat([sequences[s] for s in (3, 0, 4, 2, 1)])
    for cut, lists in CUTS:
        want = batch.run([everything], cut, lists)
        whole = {
            "packed in another order": [shuffled],
            "a micro-batch for each sequence, one of them empty": sequences,
            "micro-batches that cut sequences": list(everything.split(3)),
            "padded": [batch.padded()],
            "padding alone in a micro-batch": [everything, padding, empty],
        }
        for name, parts in whole.items():
            same(batch.run(parts, cut, lists), want, f"{name}, {cut}")
            same(batch.run(parts, cut, lists, tensor=True), want, f"{name}, vocabulary in two shards, {cut}")
        shards = {
            "data in two halves": ([sequences[0], sequences[1]], [sequences[2], sequences[3], sequences[4]]),
            "sequences in two halves": ([first], [rest]),
            "one rank has only padding": ([everything], [padding]),
        }
        for name, halves in shards.items():
            same(batch.run(halves[rank], cut, lists, gather=True), want, f"{name}, {cut}")


def check_shards(rank: int) -> None:
    """Thresholds, best tokens and refusals where the vocabulary is sharded."""
    world = dist.group.WORLD
    g = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = (torch.randn(9, V, generator=g, dtype=torch.float64) * 2).to(dtype)
        logits[0], logits[1, : V // 2], logits[2, ::2] = 1.0, -torch.inf, logits[2, 1::2].clone()
        mine = logits.chunk(2, dim=1)[rank].contiguous()
        for cut in ((5, 1.0, 0.0), (-1, 0.8, 0.0), (-1, 1.0, 0.2), (9, 0.7, 0.01), (1000, 0.5, 0.0)):
            assert torch.equal(thresholds(mine, *cut, 0.8, world), thresholds(logits, *cut, 0.8)), (dtype, cut)
        want, got = top_log_probs(logits.double(), 5, 0.8), top_log_probs(mine.double(), 5, 0.8, group=world)
        assert (want[0] - got[0]).abs().max() < 1e-12
        assert torch.equal(want[1][3:], got[1][3:])
    broken = mine.clone()
    broken[3, 0] = torch.nan if rank else 0.0
    values, _ = token_log_probs(broken, torch.zeros(9, dtype=torch.long), replay=Replay(Truncation(2)), group=world)
    assert values.isnan().tolist() == [i == 3 for i in range(9)], "a NaN on one rank is every rank's"
    for bad, tokens in ((mine[:, : V // 2 - rank], torch.zeros(9)), (mine, torch.full((9,), V))):
        try:
            token_log_probs(bad, tokens.long(), group=world)
        except DataError:
            continue
        raise AssertionError("shards of two sizes and ids of no shard are refused on every rank")


def own_signal(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """A signal of a user's: squared Hellinger distance."""
    return beta * (1.0 - (student.clamp(min=1e-30) * teacher).sqrt().sum(-1))


def check_divergences(rank: int) -> None:
    """Value and gradient of every divergence, where candidates lie in both shards, in one, or are none or all of a row."""
    g = torch.Generator().manual_seed(2)
    T, K = 9, V // 2
    logits = torch.randn(T, V, generator=g, dtype=torch.float64) * 3
    logits[4, 5] = 60.0  # all but the whole mass on a candidate: what is left of it must not be rounded away
    ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(T)])
    ids[0], ids[1, 2:], ids[2], ids[4, 0] = torch.arange(K), -1, torch.arange(K, V), 5
    edges = torch.tensor([[0, K - 1, K, V - 1, V, -1]])
    beyond = log_probs_of(logits[:1].chunk(2, 1)[rank], edges, group=dist.group.WORLD)
    assert torch.allclose(beyond[0, :4], torch.log_softmax(logits[0], -1)[edges[0, :4]]), "at the shards' edges"
    assert beyond[0].isnan().tolist() == [False, False, False, False, True, False], "in no shard"
    teacher = torch.log_softmax(torch.randn(T, K + 1, generator=g, dtype=torch.float64), -1)[:, :K]
    for kind in ("reverse_kl", "forward_kl", "jsd", f"{__name__}:own_signal"):
        found = []
        for part, group in ((logits, None), (logits.chunk(2, 1)[rank], dist.group.WORLD)):
            leaf = part.clone().requires_grad_()
            own, rest = (f(leaf, ids, TEMPERATURE, group) for f in (log_probs_of, log_rest_of))
            value = candidate_divergence(own, teacher, ids >= 0, kind, 0.3, rest)
            (value * torch.arange(1.0, T + 1)).sum().backward()
            assert leaf.grad is not None
            found.append((value.detach(), own.detach(), rest.detach(), leaf.grad))
        (value, own, rest, grad), (value2, own2, rest2, grad2) = found
        for one, two in ((value, value2), (own, own2), (rest, rest2), (grad.chunk(2, 1)[rank], grad2)):
            assert one.abs().max() > 1e-3, "compares nothing"
            assert torch.allclose(one, two, atol=1e-10, rtol=1e-10), (kind, one, two)


if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    check_losses(Batch(), rank)
    check_shards(rank)
    check_divergences(rank)
    dist.destroy_process_group()
    print("all cases hold")
