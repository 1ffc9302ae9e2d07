"""Answers that came at once are read one in each turn of the loop, whoever gives up meanwhile."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.engines.one_by_one import OneByOne


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_the_loop_turns_between_two_and_all_but_the_cancelled_have_a_turn(cancelled: list[bool], rounds: int) -> None:
    events: list[object] = []

    async def run() -> None:
        turn = OneByOne()

        async def read(i: int) -> None:
            await turn()
            events.append(i)

        async def beat() -> None:
            while True:
                events.append(".")
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        for _ in range(rounds):  # a second burst finds it ready again
            tasks = [asyncio.create_task(read(i)) for i in range(len(cancelled))]
            await asyncio.sleep(0)  # all wait
            for task, gives_up in zip(tasks, cancelled, strict=True):
                if gives_up:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert [task.cancelled() for task in tasks] == cancelled
        beating.cancel()

    asyncio.run(run())
    read_in_order = [e for e in events if e != "."]
    assert read_in_order == [i for i, gives_up in enumerate(cancelled) if not gives_up] * rounds
    assert all(a == "." or b == "." for a, b in itertools.pairwise(events)), "no two in one turn"
