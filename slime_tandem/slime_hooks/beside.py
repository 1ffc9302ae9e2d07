"""How long teachers score while responses are written, and how long a rollout waits for them alone.

slime hands each response to the scoring hook as soon as it is written. Seconds in which a response is scored and another one is
written cost the rollout nothing; seconds in which nothing is written any more are what distillation adds to it. It counts calls
of one process and knows neither samples nor teachers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Beside:
    """Counts what is under way. `now`: a clock in seconds.

    >>> at = 0.0
    >>> count = Beside(lambda: at)
    >>> with count.writing():
    ...     with count.scoring():
    ...         at = 2.0
    >>> with count.scoring():
    ...     at = 5.0
    >>> count.take()
    {'rollout/scoring_exposed_s': 3.0, 'rollout/scoring_hidden_s': 2.0}
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since = now, now()
        self._writing = self._scoring = 0
        self._exposed = self._hidden = 0.0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around one response that is written."""
        self._count()
        self._writing += 1
        try:
            yield
        finally:
            self._count()
            self._writing -= 1

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around one response that is scored."""
        self._count()
        self._scoring += 1
        try:
            yield
        finally:
            self._count()
            self._scoring -= 1

    def take(self) -> dict[str, float]:
        """Seconds since the last call in which something was scored: while nothing was written, and beside writing."""
        self._count()
        found = {"rollout/scoring_exposed_s": self._exposed, "rollout/scoring_hidden_s": self._hidden}
        self._exposed = self._hidden = 0.0
        return found

    def _count(self) -> None:
        now = self._now()
        if self._scoring and self._writing:
            self._hidden += now - self._since
        elif self._scoring:
            self._exposed += now - self._since
        self._since = now
