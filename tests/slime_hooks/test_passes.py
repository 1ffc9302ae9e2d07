"""Several passes over a rollout, and the tail of the KL, without slime (test_against_slime.py has both in it)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.errors import DataError
from slime_tandem.slime_hooks import passes
from slime_tandem.slime_hooks.kl_tail import KlTail

values = st.lists(st.floats(-5, 5, width=32), max_size=6).map(lambda v: np.array(v, dtype=np.float64))


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_what_slime_holds_is_repeated_and_what_it_reads_later_is_one_pass(n: int, counts: list[int]) -> None:
    indices = [[i] for i in range(sum(counts))]
    data: dict[str, Any] = {
        "num_microbatches": [*counts], "global_batch_sizes": [4] * len(counts), "micro_batch_indices": [*indices],
    }  # fmt: skip
    held = dict(data)
    passes.repeat(data, n)
    assert held["num_microbatches"] == counts * n
    assert held["global_batch_sizes"] == [4] * len(counts) * n
    assert held["micro_batch_indices"] == indices * n
    assert (data["num_microbatches"], data["micro_batch_indices"]) == (counts, indices)


def test_a_schedule_of_another_kind_and_steps_that_were_not_taken_are_errors() -> None:
    data: dict[str, Any] = {"num_microbatches": (1,), "global_batch_sizes": [4], "micro_batch_indices": [[0]]}
    with pytest.raises(DataError, match=r"num_microbatches.*tuple.*expected a list"):
        passes.repeat(data, 2)
    passes.repeat(data, 1)
    passes.check_taken(0, 3, 2)
    passes.check_taken(6, 3, 2)
    with pytest.raises(DataError, match="steps of the last rollout=3: expected 6"):
        passes.check_taken(3, 3, 2)


@given(st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_tail_is_the_quantile_over_ranks_and_micro_batches(steps: list[list[Any]]) -> None:
    other = np.array([0.5, -2.0])
    told: list[tuple[int, float]] = []
    tail = KlTail(lambda mine: [mine, other], lambda step, value: told.append((step, value)))
    for number, parts in enumerate(steps):
        tail.start_step(number, len(parts))
        for part in parts:
            batch = object()
            tail.after_micro_batch(batch, part)
            tail.after_micro_batch(batch, part)  # computed again: counts once
    assert told == [(n, float(np.quantile(np.concatenate([*parts, other]), 0.95))) for n, parts in enumerate(steps)]


def test_a_rank_that_gathers_nothing_and_a_step_without_tokens_report_nothing() -> None:
    told: list[Any] = []
    for gather in (lambda mine: None, lambda mine: [mine]):
        tail = KlTail(gather, lambda *what: told.append(what))
        tail.start_step(0, 1)
        tail.after_micro_batch(object(), np.zeros(0))
    assert not told
