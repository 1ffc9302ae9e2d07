"""SIGTERM and SIGINT, made alike: whatever stops a command, it ends in order. When one arrives is not decided here."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a scheduler's stop also leaves a checkpoint and no process; nothing outside the
    main thread.

    SIGINT gets Python's own handler even where it was ignored: a shell that starts a job in the background without job
    control ignores it, Python then installs none, and both signals would be lost.
    """

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone set handlers
        return

    def handler(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, handler),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def signals_wait() -> Iterator[None]:
    """SIGTERM and SIGINT that arrive within take effect at the end: what is started within is known to whoever must stop it.

    Nothing outside the main thread, as above. For moments only: a command in here cannot be stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    both: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in both}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        for number in arrived:
            signal.raise_signal(number)
