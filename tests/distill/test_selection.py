"""Budgets, ties and selectors: by hand, and as laws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import Budget, Selector
from slime_tandem.distill.selection import (
    ALIASES,
    RANKERS,
    SELECTION_METRICS,
    TokenKeys,
    find_ranker,
    overlap,
    resolve_selector,
    select,
    selection_metrics,
)
from slime_tandem.distill.teachability import Normalised, TokenScores
from slime_tandem.errors import ConfigError, DataError

SELECTORS: tuple[Selector, ...] = get_args(Selector)


def scores_of(h: list[float], d: list[float], c: list[float], valid: list[bool] | None = None) -> TokenScores:
    def one(x: list[float]) -> Normalised:
        return Normalised(np.clip(np.array(x, float), 0, 1), np.array(x, float))

    return TokenScores(one(h), one(d), one(c), np.array(valid if valid is not None else [True] * len(h)))


def keys_of(lengths: list[int]) -> TokenKeys:
    return TokenKeys(np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.arange(n) for n in (*lengths, 0)]))


def chosen(scores: TokenScores, selector: str, ratio: float, lengths: list[int], **options: object) -> list[int]:
    settings_: dict[str, object] = {"seed": 0, "rollout_id": 0, "min_keep_per_sample": 0, **options}
    mask = select(scores, keys_of(lengths), selector, ratio, **settings_)  # type: ignore[arg-type]
    return np.flatnonzero(mask).tolist()


#            0    1    2    3    4    5
H = [0.9, 0.1, 0.2, 0.8, 0.25, 0.5]
D = [0.1, 0.9, 0.8, 0.2, 0.7, 0.05]
C = [0.5, 0.1, 0.9, 0.6, 0.7, 0.3]
BY_HAND: dict[Selector, list[int]] = {
    "entropy": [0, 3],
    "divergence": [1, 2],
    "compatibility": [2, 4],
    "dlearn_high": [2, 4],  # .05 .09 .72 .12 .49 .015
    "dincompat_high": [1, 4],  # .05 .81 .08 .08 .21 .035
    "tip": [0, 1],  # .91 .91 .84 .84 .775 .525
    "ca_softor": [0, 3],  # .905 .181 .776 .824 .618 .508
    "q3": [2, 4],  # 1, 2, 4 are below the median of H and above that of D: .081 .576 .368
    "q3_highc": [2, 4],
    "q3_lowc": [1, 4],
    "q3_dlearn_high": [2, 4],
    "q3_dlearn_low": [1, 4],
    "q3_dincompat_high": [1, 4],
    "split_budget_ca": [0, 2],  # one by entropy, one by (1 - H) * Dlearn
}


@pytest.mark.parametrize("selector", BY_HAND)
def test_selectors_by_hand(selector: Selector) -> None:
    assert chosen(scores_of(H, D, C), selector, 0.33, [6]) == BY_HAND[selector]


def test_every_selector_has_a_hand_computed_case() -> None:
    assert {*BY_HAND, "full", "random"} == set(SELECTORS) == {*RANKERS, "full"}
    assert chosen(scores_of(H, D, C, [True] * 5 + [False]), "full", 0.1, [6]) == [0, 1, 2, 3, 4]


def test_aliases_of_launch_scripts() -> None:
    assert {resolve_selector(name) for name in ALIASES} == set(ALIASES.values())
    with pytest.raises(DataError, match="selector='teachabilty': expected one of full, "):
        resolve_selector("teachabilty")


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, math.nan])
def test_a_ratio_outside_is_refused(ratio: float) -> None:
    with pytest.raises(DataError, match=r"ratio=.*expected a number above 0 and at most 1"):
        chosen(scores_of(H, D, C), "entropy", ratio, [6])


def random_scores(seed: int, n: int, *, ties: bool = True) -> TokenScores:
    rng = np.random.default_rng(seed)
    grid = 4 if ties else 10_000
    h, d, c = ((rng.integers(0, grid + 2, n) / grid).tolist() for _ in range(3))
    return scores_of(h, d, c, (rng.random(n) < 0.85).tolist())


BUDGETED = [s for s in SELECTORS if not s.startswith("q3") and s != "full"]


@pytest.mark.parametrize("selector", BUDGETED)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 60), ratio=st.floats(0.01, 1.0))
def test_the_budget_is_exact_and_only_valid_tokens_are_chosen(
    selector: Selector, seed: int, n: int, ratio: float
) -> None:
    scores = random_scores(seed, n)
    got = chosen(scores, selector, ratio, [n])
    valid = int(scores.valid.sum())
    assert len(got) == (max(1, math.ceil(ratio * valid - 1e-9)) if valid else 0)
    assert scores.valid[got].all()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("budget", ["batch", "sequence"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_tokens_does_not_matter(selector: Selector, budget: Budget, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 5).tolist()
    scores, keys = random_scores(seed, sum(lengths)), keys_of(lengths)
    order = rng.permutation(sum(lengths))
    options = {"seed": seed, "rollout_id": 3, "budget": budget, "min_keep_per_sample": 2}
    straight = select(scores, keys, selector, 0.2, **options)  # type: ignore[arg-type]

    def take(x: Normalised) -> Normalised:
        return Normalised(x.clipped[order], x.unclipped[order])

    mixed = TokenScores(take(scores.H), take(scores.D), take(scores.C), scores.valid[order])
    again = select(mixed, TokenKeys(keys.sequence[order], keys.position[order]), selector, 0.2, **options)  # type: ignore[arg-type]
    assert again.tolist() == straight[order].tolist()


def test_each_response_gets_its_least() -> None:
    """All of the budget would go to the first response; every other one with valid tokens gets two, the best by ca_softor."""
    h = [0.9, 0.8, 0.7, 0.6, *[0.1, 0.3, 0.2], *[0.2, 0.1], *[0.5]]
    scores = scores_of(h, [0.0] * 10, [0.0] * 10, [True] * 7 + [True, False] + [False])
    got = chosen(scores, "entropy", 0.25, [4, 3, 2, 1], min_keep_per_sample=2)
    assert got == [0, 1, 5, 6, 7]


def test_a_budget_per_response() -> None:
    h = [0.9, 0.8, 0.7, 0.6, 0.1, 0.3]
    assert chosen(scores_of(h, [0.0] * 6, [0.0] * 6), "entropy", 0.5, [4, 2], budget="sequence") == [0, 1, 5]


def test_ties_spread_evenly_over_positions() -> None:
    """A tenth of the tokens is clipped to 1 at random places; half of these are chosen. The published rule takes the
    first half."""
    rng = np.random.default_rng(0)
    n, length = 20_000, 1000
    clipped = np.where(rng.random(n) < 0.1, 1.0, 0.3)
    flat = Normalised(clipped, clipped)
    scores = TokenScores(flat, flat, flat, np.ones(n, dtype=np.bool_))
    keys = keys_of([length] * (n // length))
    for selector in ("tip", "ca_softor", "entropy", "divergence", "dlearn_high"):
        mask = select(scores, keys, selector, 0.05, seed=0, rollout_id=0, min_keep_per_sample=0)
        assert keys.position[mask].mean() == pytest.approx(length / 2, rel=0.05)
        assert np.bincount(keys.sequence[mask]).std() < 10
    order = np.lexsort((keys.position, -clipped))  # the reference: by score, then the earliest position
    assert keys.position[order[: n // 20]].mean() < 0.3 * length


def test_what_is_clipped_keeps_its_order() -> None:
    d = [1.2, 3.0, 1.5, 0.9]
    assert chosen(scores_of([0.0] * 4, d, [1.0] * 4), "divergence", 0.25, [4]) == [1]
    assert chosen(scores_of([0.0] * 4, d, [1.0] * 4), "dlearn_high", 0.5, [4]) == [1, 2]


def test_draws_advance_with_seed_and_rollout() -> None:
    scores = scores_of([0.0] * 400, [0.0] * 400, [0.0] * 400)
    first, rollout, seed = (
        chosen(scores, "random", 0.1, [400], seed=s, rollout_id=r) for s, r in ((0, 0), (0, 1), (1, 0))
    )
    assert len({tuple(first), tuple(rollout), tuple(seed)}) == 3
    assert chosen(scores, "random", 0.1, [400], seed=0, rollout_id=2**62) == chosen(
        scores, "random", 0.1, [400], seed=0, rollout_id=2**62
    )
    many = np.zeros(400)
    for r in range(200):
        many[chosen(scores, "random", 0.1, [400], rollout_id=r)] += 1
    assert many.mean() == 20
    assert many.std() < 6, "binomial: 4.2"


def test_metrics_and_overlap() -> None:
    scores, keys = scores_of(H, D, C, [True] * 5 + [False]), keys_of([3, 3])
    mask = np.array([True, False, True, False, False, False])
    got = selection_metrics(mask, scores.valid, keys, scores)
    assert tuple(got) == SELECTION_METRICS
    assert {k: v for k, v in got.items() if v} == {
        "keep_ratio": 0.4,
        "H_mean": pytest.approx(0.55),
        "D_mean": pytest.approx(0.45),
        "C_mean": pytest.approx(0.7),
        "position_mean": pytest.approx(0.5),
        "position_0": 0.5,  # the first of three tokens, and the third
        "position_6": 0.5,
    }
    nothing = np.zeros(6, dtype=np.bool_)
    assert selection_metrics(nothing, scores.valid, keys, scores)["H_mean"] is None
    assert selection_metrics(mask, scores.valid, keys, None)["H_mean"] is None
    assert selection_metrics(nothing, nothing, keys, None)["keep_ratio"] is None
    assert overlap(mask, np.array([True, True, False, False, False, False])) == pytest.approx(1 / 3)
    assert overlap(nothing, nothing) is None


def test_nothing_to_choose_from() -> None:
    for selector in SELECTORS:
        assert chosen(scores_of([], [], []), selector, 0.5, [], min_keep_per_sample=1) == []
        assert chosen(scores_of([0.5] * 3, [0.5] * 3, [0.5] * 3, [False] * 3), selector, 0.5, [3]) == []


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module of the user's with one function `f`; gives the name to set."""

    def make(name: str, body: str) -> str:
        text = f"import numpy as np\nfrom slime_tandem.distill.selection import Ranking\ndef f(scores, gamma): {body}\n"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:f"

    return make


@pytest.mark.parametrize("budget", ["batch", "sequence"])
def test_a_selector_of_ones_own_is_as_good_as_a_built_in_one(own: Callable[[str, str], str], budget: Budget) -> None:
    name = own(f"sel_tip_{budget}", "return Ranking(scores.tip, scores.H.unclipped + scores.D.unclipped)")
    split = own(
        f"sel_split_{budget}",
        "return [Ranking(scores.H.clipped, scores.H.unclipped, share=gamma), "
        "Ranking((1 - scores.H.clipped) * scores.dlearn, scores.D.unclipped)]",
    )
    array = own(f"sel_array_{budget}", "return scores.C.clipped")
    for seed in range(5):
        scores = random_scores(seed, 40)
        for mine, theirs in ((name, "tip"), (split, "split_budget_ca")):
            a, b = (chosen(scores, s, 0.3, [25, 15], budget=budget, gamma=0.4) for s in (mine, theirs))
            assert a == b
        assert len(chosen(scores, array, 0.3, [25, 15])) == math.ceil(0.3 * int(scores.valid.sum()))


def test_ties_of_a_selector_of_ones_own_go_by_the_hash_and_not_by_place(own: Callable[[str, str], str]) -> None:
    scores = scores_of([0.5] * 400, [0.5] * 400, [0.5] * 400)
    flat = own("sel_flat", "return np.zeros(len(scores.valid))")
    assert chosen(scores, flat, 0.1, [400]) == chosen(scores, "random", 0.1, [400])
    some = own("sel_some", "return Ranking(None, among=np.arange(len(scores.valid)) < 3)")
    assert set(chosen(scores, some, 0.1, [400])) == {0, 1, 2}, "no more than may be chosen"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return scores.H.clipped[:1]", "score as an array of numbers"),
        ("return scores.H.clipped * np.nan", "score without NaN"),
        ("return list(scores.H.clipped)", "an array [N] or a Ranking"),
        ("return None", "an array [N], a Ranking, or several"),
        ("return []", "an array [N], a Ranking, or several"),
        ("return scores.entropy", "AttributeError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_selector_that_is_none_is_refused_before_it_is_used(
    own: Callable[[str, str], str], body: str, says: str
) -> None:
    name = own(f"sel_bad_{abs(hash(body))}", body)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        find_ranker(name)
    assert (caught.value.field, caught.value.value) == ("opd.selection.selector", name)


def test_a_coroutine_is_no_selector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sel_async.py").write_text("async def f(scores, gamma): return scores.H.clipped\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="coroutine"):
        find_ranker("sel_async:f")
