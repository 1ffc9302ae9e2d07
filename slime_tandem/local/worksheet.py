"""Worked solutions of two-digit sums and differences: the texts that the built-in models are pre-trained on.

` 7+8 =15 ; 4+3+1 =8 ; 85 ; check ok <answer>85</answer>` solves 47 + 38: ones, tens, result, answer. Words carry their
leading space, so handoffs at word starts fall between and inside the steps. A negative result is worked out as the
opposite difference after the word ` neg`.

Worksheets also hold slips (a wrong operand or value). After a slip any later word of the attempt may be ` no`: the attempt
is given up and written again from the start. So a co-author can repair a partner's slip, and a model can learn to do so.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Piece = tuple[str, bool]
"""A piece of text, and whether it is worth imitating (False: a slip, or a step that ignores an earlier slip)."""


@dataclass(frozen=True, slots=True)
class Care:
    """How carefully worksheets are written. All are probabilities but the last.

    `slip` per step; `repair` at each word after a slip where ` no` can stand; `alarm` the same where nothing is wrong. The
    last of `attempts` has no slips and no alarms of its own.
    """

    slip: float
    repair: float
    alarm: float = 0.0
    attempts: int = 3


def worksheet(expression: str, care: Care, rng: Random) -> list[Piece]:
    """A solution of `a + b` or `a - b`, both terms of two digits, as pieces whose texts join to the response.

    >>> "".join(text for text, _ in worksheet("12 - 57", Care(slip=0.0, repair=0.0), Random(0)))
    ' neg 7-2 =5 ; 5-1 =4 ; -45 ; check ok <answer>-45</answer>'
    """
    left, operator, right = expression.split()
    pieces: list[Piece] = []
    for attempt in range(1, care.attempts + 1):
        writer = _Attempt(int(left), operator, int(right), care if attempt < care.attempts else Care(0.0, 0.0), rng)
        finished = writer.write()
        pieces += writer.pieces
        if finished:
            break
    return pieces


class _Attempt:
    """One attempt; `pieces` holds what was written, up to and including ` no` if it was given up."""

    def __init__(self, a: int, operator: str, b: int, care: Care, rng: Random):
        self.a, self.operator, self.b, self.care, self.rng = a, operator, b, care, rng
        self.pieces: list[Piece] = []
        self.wrong = False

    def write(self) -> bool:
        """Write it; True if it ends in an answer, False if it was given up."""
        negative = self.operator == "-" and self.a < self.b
        if self.operator == "-" and self._slips(0.5):
            negative, self.wrong = not negative, True
        x, y = (self.b, self.a) if negative else (self.a, self.b)
        if negative:
            self._put(" neg")
        values: list[int] = []
        borrow = self.operator == "-" and x % 10 < y % 10
        for tens in (False, True):
            if tens:
                carry = ["+1"] if self.operator == "+" and values[0] >= 10 else ["-1"] if borrow else []
                terms = [str(x // 10), f"{self.operator}{y // 10}", *carry]
            else:
                terms = [str(x % 10 + 10 * borrow), f"{self.operator}{y % 10}"]
            values.append(self._step(terms))
            if self._gives_up():
                return False
        result = self._state(values[1] * 10 + values[0] % 10, lead=" ", sign=-1 if negative else 1)
        if self._gives_up():
            return False
        for word in (" check", " ok"):
            self._put(word)
            if self._gives_up():
                return False
        self._put(f" <answer>{result}</answer>")
        return True

    def _step(self, terms: list[str]) -> int:
        self._put(" ")
        if self._slips(0.4):
            self.wrong = True
            i = self.rng.randrange(len(terms))
            if i == 2:
                terms = terms[:2]
            else:
                sign, digits = (terms[i][0], terms[i][1:]) if terms[i][0] in "+-" else ("", terms[i])
                terms = [*terms[:i], sign + str(_near(int(digits), self.rng)), *terms[i + 1 :]]
        self._put("".join(terms))
        self._put(" =")
        return self._state(sum(int(term) for term in terms))

    def _state(self, value: int, lead: str = "", sign: int = 1) -> int:
        """Write a value (perhaps a wrong one) and the closing mark; return what was written."""
        if lead:
            self._put(lead)
        if self._slips(0.6):
            self.wrong = True
            value = _near(abs(value), self.rng) * (-1 if value < 0 else 1)
        self._put(str(sign * value))
        self._put(" ;")
        return sign * value

    def _slips(self, share: float) -> bool:
        return self.rng.random() < self.care.slip * share

    def _gives_up(self) -> bool:
        if self.rng.random() >= (self.care.repair if self.wrong else self.care.alarm):
            return False
        self.pieces.append((" no", self.wrong))
        return True

    def _put(self, text: str) -> None:
        self.pieces.append((text, not self.wrong))


def _near(value: int, rng: Random) -> int:
    """Another number >= 0 of about the same size."""
    digits = len(str(value))
    while True:
        kind = rng.random()
        if kind < 0.4:
            other = value + rng.choice((-1, 1))
        elif kind < 0.6:
            other = value + rng.choice((-10, 10))
        else:
            other = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if other >= 0 and other != value:
            return other
