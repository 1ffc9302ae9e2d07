"""Signals that wait for what is being started."""

from __future__ import annotations

import os
import signal

import pytest

from slime_tandem.signals import signals_wait


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_takes_effect_at_the_end(number: int) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    began = []

    def begin() -> None:
        with signals_wait():
            os.kill(os.getpid(), number)
            began.append("child")

    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            begin()
        assert began == ["child"]
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


def test_nothing_arrives_where_nothing_was_sent() -> None:
    with signals_wait():
        pass
