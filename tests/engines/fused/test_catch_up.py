"""Who reads what in a catch-up step: laws of the plan over random decodes, with requests that come and go."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.engines.fused.catch_up import Bounds, Snapshot, lay_out, plan

SOLO_OF_BOTH = (None, 0, 1)
"""Who writes a request: both, or one of the two models alone."""


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.builds(Bounds, st.integers(0, 9), st.integers(1, 6)),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.randoms(use_true_random=False),
)
def test_every_model_computes_every_token_once_and_in_order(
    sequences: int, bounds: Bounds, turns: float, random: object
) -> None:
    """Before it writes it has read all; the other follows within the bounds, or never where it never writes."""
    rng = torch.Generator().manual_seed(random.randrange(2**31))  # type: ignore[attr-defined]

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=rng))

    def begun() -> tuple[int, int | None, int]:
        return draw(20) + 1, SOLO_OF_BOTH[draw(3)], draw(2)

    requests = [begun() for _ in range(sequences)]  # length, alone, author
    read = torch.tensor([[n for n, *_ in requests]] * 2)
    for _ in range(25):
        for b in range(sequences):
            n, alone, author = requests[b]
            if draw(12) == 0:  # another request takes the slot, prefilled by both models
                requests[b] = n, alone, author = begun()
                read[:, b] = n
            author = author if draw(100) >= 100 * turns else 1 - author
            requests[b] = n + 1, alone, author if alone is None else alone
        length = torch.tensor([n for n, *_ in requests])
        starts = torch.cat([length.new_zeros(1), length.cumsum(0)])
        locations = torch.randperm(int(starts[-1]), generator=rng) + 1
        ids_at = torch.arange(int(starts[-1]) + 1) + 100
        for model in (0, 1):
            writes = torch.tensor([author == model for *_, author in requests])
            solo = torch.tensor([alone is not None for _, alone, _ in requests])
            taken = plan(writes, solo, length, read[model], bounds)
            follows = ~solo | writes
            assert ((taken == 0) | (taken == length - read[model])).all(), "all that is missing, or nothing"
            assert (taken[writes] > 0).all()
            assert (taken[~follows] == 0).all()
            left = (length - read[model])[follows & (taken == 0)]
            assert int(left.sum()) <= bounds.budget
            assert (left < bounds.longest).all()
            assert int(taken.sum()) <= bounds.rows(sequences)
            step = lay_out(taken, length, Snapshot(starts, locations), ids_at, bounds)
            row = 0
            for b, d in enumerate(taken.tolist()):
                for position in range(int(length[b]) - d, int(length[b])):
                    where = int(locations[int(starts[b]) + position])
                    found = [int(t[row]) for t in (step.sequence, step.position, step.location, step.ids)]
                    assert found == [b, position, where, where + 100]
                    row += 1
            assert (step.sequence[row:] == sequences).all()
            assert not step.ids[row:].any()
            assert step.end.tolist() == taken.cumsum(0).tolist()
            read[model] = torch.where(taken > 0, length, read[model])
            again = plan(writes, solo, length, read[model], bounds)
            assert (again[writes] == 1).all(), "done twice, the newest token is computed again, and no more"
            assert (again <= torch.where(follows, bounds.longest, 0)).all()


def test_a_budget_of_nothing_is_an_engine_that_reads_everything_in_every_step() -> None:
    writes, solo = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    length = torch.tensor([5, 6, 7])
    assert plan(writes, solo, length, length - 1, Bounds(0, 1)).tolist() == [1, 1, 0]
