"""Which words of an answer decide: authors word by word, shares and the order over seeds by hand, the page by its data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slime_tandem.rollout.handoff import HandoffRule

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("places")


def test_one_digit_a_word(module: ModuleType) -> None:
    rule = HandoffRule.of("word", 0.5, 32, 16, {1})
    sample = SimpleNamespace(response_ids=(5, 6, 1, 5, 1, 5), authorship_mask=(0, 0, 0, 1, 1, 0))
    assert module.authors(sample, rule) == "010"


# The second word decides; answers of three words. The third word is too rare to count.
COUNTS = {"10": [8, 10], "11": [1, 10], "00": [9, 10], "01": [2, 10], "101": [1, 1]}


def test_shares_and_differences_by_hand(module: ModuleType) -> None:
    assert module.share(COUNTS, {}) == 21 / 41
    assert module.share(COUNTS, {2: "0"}) != module.share(COUNTS, {2: "0"}), "no answer has it"
    first, second = module.differences(COUNTS)
    assert first == pytest.approx(10 / 21 - 11 / 20)
    assert second == pytest.approx(3 / 20 - 18 / 21)
    assert module.deciding(COUNTS, 1) == [1]
    assert module.deciding(COUNTS) == [0, 1]
    assert module.expected_in_turns(COUNTS) == pytest.approx(9 / 11), "senior, then junior: `10` and `101`"


def test_the_order_over_seeds(module: ModuleType) -> None:
    """Three seniors, of which turns suit one more than the other; the chains order them alike, then the other way."""
    suits = [{"10": [n, 10], "01": [0, 10], "11": [0, 10]} for n in (3, 6, 9)]
    rows = [{"arm": "sentence", "seed": s, "counts": c} for s, c in enumerate(suits)]

    def chains(*found: float) -> list[dict[str, object]]:
        return [{"arm": "sentence", "seed": s, "results": {"handoff/pass@1": f}} for s, f in enumerate(found)]

    shown = module.table(rows, chains(0.1, 0.5, 0.9))
    assert "| sentence | 0 | 0.100 |" in shown
    assert "1 (senior), 2 (junior) | 0.300 | 0.100 |" in shown
    assert "- sentence: Spearman's correlation 1.00 over 3 seniors." in shown
    assert "- both: Spearman's correlation -1.00" in module.table(rows, chains(0.9, 0.5, 0.1))
    assert "correlation" not in module.table(rows, chains(0.9))
    assert math.isnan(module.share({}, {}))


def test_the_pages_table_is_the_datas(module: ModuleType) -> None:
    rows, chains = (
        [json.loads(line) for line in (RESULTS / "data" / "seeds_1_to_5" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("places", "eight_chains")
    )
    page = (RESULTS / "question-a-tandem-against-solo.md").read_text(encoding="utf-8")
    shown, said = module.table(rows, chains).split("\n\n")
    assert shown in page
    assert "both: Spearman's correlation 0.90 over 10 seniors." in said
    assert "0.90 over the ten seniors, 1.00 for `sentence`, 0.70 for solo GRPO" in page
