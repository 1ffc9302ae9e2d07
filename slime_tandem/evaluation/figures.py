"""The figures of an evaluation, from what was right and what was scored. Pure.

Inputs are grouped by prompt: `chains` consecutive samples belong to one prompt. Names are those of the JSON output. It asks no
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from slime_tandem.config import KlEstimator
from slime_tandem.evaluation.scoring import Reading
from slime_tandem.objective.kl import kl_estimate
from slime_tandem.report.statistics import Estimate, Ratio, pass_at_k, pass_ks
from slime_tandem.report.teachers import EvaluationTeachers
from slime_tandem.types import FloatArray, TandemSample

Part = Literal["solo", "teacher", "handoff", "transfer", "drift", "start", "legibility"]
TITLES: dict[Part, str] = {
    "solo": "solo",
    "teacher": "KL to the teachers",
    "handoff": "handoff",
    "transfer": "the junior goes on from the senior's answers",
    "drift": "drift from the junior",
    "start": "drift from the start",
    "legibility": "legibility to the junior",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its name (`part/...`), a label for the eye, the unit, and its sums over prompts."""

    name: str
    label: str
    unit: str
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class Result:
    """A figure with its estimate, or (all None) why it is not defined."""

    name: str
    label: str
    unit: str
    estimate: Estimate

    @property
    def part(self) -> str:
        """Which of the four parts it belongs to."""
        return self.name.split("/", 1)[0]


def undefined(part: Part, reason: str) -> list[Result]:
    """The headline results of a part that could not be measured, with the reason."""
    names = {
        "solo": [("solo/pass@1", "pass@1", "fraction")],
        "teacher": [("teacher/k1", "KL(senior || teacher), k1", "nats/token")],
        "handoff": [("handoff/pass@1", "pass@1", "fraction"), ("handoff/retention@1", "retention of pass@1", "ratio")],
        "transfer": [(f"transfer/{k}", label, "fraction") for k, label in _TRANSFER.items()],
        "drift": [(f"drift/{k}", f"KL(senior || junior), {k}", "nats/token") for k in ("k1", "k3")],
        "start": [(f"start/{k}", f"KL(senior || start), {k}", "nats/token") for k in ("k1", "k3")],
        "legibility": [(f"legibility/nats_per_{u}", f"log-likelihood per {u}", f"nats/{u}") for u in ("token", "byte")],
    }[part]
    return [Result(n, label, unit, Estimate(None, None, None, reason)) for n, label, unit in names]


def by_prompt(values: Sequence[float], chains: int) -> FloatArray:
    """Sums over each prompt's samples, [N * chains] to [N].

    >>> by_prompt([1, 0, 2, 3], chains=2).tolist()
    [1.0, 5.0]
    """
    sums: FloatArray = np.asarray(values, np.float64).reshape(-1, chains).sum(axis=1)
    return sums


def solo_figures(samples: Sequence[TandemSample], correct: Sequence[bool] | None, chains: int) -> list[Figure]:
    """pass@k (None: there is no reward), response length and truncation of what the senior wrote alone."""
    return ([] if correct is None else _accuracy("solo", correct, chains)) + _shape("solo", samples, chains)


def teacher_figures(found: EvaluationTeachers) -> list[Figure]:
    """KL of the senior to its teachers, nats per token that it sampled: of all as one, and of each where there are several."""
    by_name = found["by_name"] if len(found["by_name"]) > 1 else {}
    return [
        Figure(
            f"teacher/{name}",
            label,
            "nats/token",
            Ratio(
                np.array(f["kl_sums"], np.float64),
                np.array(f["tokens"], np.float64),
                "no token has a teacher's log-prob",
            ),
        )
        for name, label, f in (
            ("k1", "KL(senior || teacher), k1", found["all"]),
            *((f"{name}/k1", f"KL(senior || {name}), k1", figures) for name, figures in by_name.items()),
        )
    ]


def handoff_figures(
    samples: Sequence[TandemSample],
    correct: Sequence[bool] | None,
    solo_correct: Sequence[bool] | None,
    chains: int,
) -> list[Figure]:
    """pass@k with handoffs, its ratio to and difference from solo (paired by prompt), and how often the turn changed hands.

    `correct`, `solo_correct` None: there is no reward."""
    figures: list[Figure] = []
    if correct is not None and solo_correct is not None:
        figures += _accuracy("handoff", correct, chains) + _compared(correct, solo_correct, chains)
    switches = [s.switches for s in samples]
    tokens = by_prompt([len(s.response_ids) for s in samples], chains)
    figures += [
        Figure(
            "handoff/chains_with_handoff",
            "chains with a handoff",
            "fraction",
            Ratio(by_prompt([n > 0 for n in switches], chains) / chains),
        ),
        Figure("handoff/per_chain", "handoffs per chain", "handoffs", Ratio(by_prompt(switches, chains) / chains)),
        Figure(
            "handoff/senior_token_fraction",
            "tokens by the senior",
            "fraction",
            Ratio(by_prompt([s.senior_tokens for s in samples], chains), tokens),
        ),
    ]
    return figures + _shape("handoff", samples, chains)


def _compared(correct: Sequence[bool], solo_correct: Sequence[bool], chains: int) -> list[Figure]:
    figures = []
    for k in pass_ks(chains):
        both, alone = _pass(correct, chains, k), _pass(solo_correct, chains, k)
        retention = Ratio(both, alone, "solo is never right")
        figures += [
            Figure(f"handoff/retention@{k}", f"retention of pass@{k}", "ratio", retention),
            Figure(f"handoff/difference@{k}", f"pass@{k} minus solo", "fraction", Ratio(both - alone)),
        ]
    return figures


def set_figures(part: Part, correct: Sequence[bool], sets: Sequence[str], chains: int) -> list[Figure]:
    """pass@k of each set of prompts (`part/<set>/pass@k`), and `part/macro/pass@k`, where every set counts alike.

    `sets` [N]: the task tag of each prompt. Nothing for one set: it is the whole. In resamples of the prompts the macro average
    keeps the sets' own sizes.
    """
    names, of = np.unique(np.array(sets), return_inverse=True)
    if len(names) < 2:
        return []
    sizes = np.bincount(of)
    out = []
    for k in pass_ks(chains):
        values = _pass(correct, chains, k)
        for number, name in enumerate(names):
            mine = (of == number).astype(np.float64)
            ratio = Ratio(values * mine, mine, "no prompt of it")
            out.append(Figure(f"{part}/{name}/pass@{k}", f"pass@{k}, {name}", "fraction", ratio))
        weights = len(of) / (len(names) * sizes[of])
        out.append(Figure(f"{part}/macro/pass@{k}", f"pass@{k}, mean of the sets", "fraction", Ratio(values * weights)))
    return out


_TRANSFER = {
    "half": "right from the senior's first half",
    "alone": "right without it",
    "gain": "gain by the first half",
}


def transfer_figures(from_half: Sequence[bool], alone: Sequence[bool], chains: int) -> list[Figure]:
    """How often the junior is right when it goes on from the first half of the senior's answers, when it writes all, and the
    difference, paired by sample."""
    half, whole = (by_prompt(right, chains) / chains for right in (from_half, alone))
    values = {"half": half, "alone": whole, "gain": half - whole}
    return [Figure(f"transfer/{k}", _TRANSFER[k], "fraction", Ratio(v)) for k, v in values.items()]


def drift_figures(
    senior: Sequence[FloatArray], other: Sequence[FloatArray], per_prompt: int, *, part: Literal["drift", "start"]
) -> list[Figure]:
    """KL of the senior to the junior (`drift`) or to its start weights (`start`), mean over tokens, nats: k1 and k3 of both
    models' log-probs [R] at tokens the senior sampled.

    Both are unbiased only if the tokens come from the senior's own full distribution at temperature 1.
    """
    tokens = by_prompt([len(a) for a in senior], per_prompt)
    return [
        Figure(
            f"{part}/{kind}",
            f"KL(senior || {'junior' if part == 'drift' else 'start'}), {kind}",
            "nats/token",
            Ratio(
                by_prompt([_kl(a, b, kind) for a, b in zip(senior, other, strict=True)], per_prompt),
                tokens,
                "no tokens",
            ),
        )
        for kind in _KINDS
    ]


_KINDS: tuple[KlEstimator, ...] = ("k1", "k3")


def legibility_figures(readings: Sequence[Reading], log_probs: Sequence[FloatArray], chains: int) -> list[Figure]:
    """The reader's log-likelihood of the text, nats per token of its own and per byte of text; nearer to 0 is more legible.

    Tokens without text (end of turn, special tokens) are conditioned on, not counted.
    """
    likelihood = by_prompt([float(v[r.is_text].sum()) for r, v in zip(readings, log_probs, strict=True)], chains)
    counts: list[tuple[str, Callable[[Reading], int]]] = [
        ("token", lambda r: int(r.is_text.sum())),
        ("byte", lambda r: r.text_bytes),
    ]
    return [
        Figure(
            f"legibility/nats_per_{unit}",
            f"log-likelihood per {unit}",
            f"nats/{unit}",
            Ratio(likelihood, by_prompt([count(r) for r in readings], chains), "no response holds text"),
        )
        for unit, count in counts
    ]


def _kl(senior: FloatArray, junior: FloatArray, kind: KlEstimator) -> float:
    return float(kl_estimate(torch.from_numpy(senior), torch.from_numpy(junior), kind).sum())


def _pass(correct: Sequence[bool], chains: int, k: int) -> FloatArray:
    return pass_at_k(by_prompt(correct, chains).astype(np.int64), chains, k)


def _accuracy(part: Part, correct: Sequence[bool], chains: int) -> list[Figure]:
    return [
        Figure(f"{part}/pass@{k}", f"pass@{k}", "fraction", Ratio(_pass(correct, chains, k))) for k in pass_ks(chains)
    ]


def _shape(part: Part, samples: Sequence[TandemSample], chains: int) -> list[Figure]:
    lengths = by_prompt([len(s.response_ids) for s in samples], chains) / chains
    cut = by_prompt([s.finish_reason == "length" for s in samples], chains) / chains
    return [
        Figure(f"{part}/response_tokens", "response length", "tokens", Ratio(lengths)),
        Figure(f"{part}/truncated", "cut at the length cap", "fraction", Ratio(cut)),
    ]
