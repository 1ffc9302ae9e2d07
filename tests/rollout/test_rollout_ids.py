"""One table of rollout ids: every reader draws by an id of its own, and none of them by training's."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import slime_tandem
from slime_tandem.rollout import rollout_ids
from slime_tandem.rollout.handoff import sampling_seed
from slime_tandem.types import SampleKey

ROOT = Path(slime_tandem.__file__).parent
TABLE = {name: value for name, value in vars(rollout_ids).items() if name.isupper()}
SOURCES = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in sorted(ROOT.rglob("*.py"))}
del SOURCES["rollout/rollout_ids.py"]
READERS = {
    "TRAINING": set(),
    "EVALUATION": {"team/rollouts.py", "evaluation/run.py", "slime_hooks/runtime.py"},  # the same draws on purpose
    "DRIFT": {"evaluation/run.py"},
    "BANK": {"diagnostics/export.py"},
    "DOCTOR": {"doctor/run.py"},
}


def test_recorded_results_depend_on_these() -> None:
    assert (rollout_ids.EVALUATION, rollout_ids.DRIFT, rollout_ids.BANK) == (2**62, 2**62 + 1, 2**62 + 2)
    assert range(2**62) == rollout_ids.TRAINING


def test_no_two_entries_share_an_id() -> None:
    spans = sorted((v, v) if isinstance(v, int) else (v[0], v[-1]) for v in TABLE.values())
    assert all(last < first for (_, last), (first, _) in pairwise(spans))
    assert spans[-1][1] < 2**63, "files hold them as signed 64-bit numbers"


def test_every_reader_has_an_id_of_its_own() -> None:
    used = {name: {path for path, s in SOURCES.items() if f"rollout_ids.{name}" in s} for name in TABLE}
    assert used == READERS


def test_no_other_module_makes_up_an_id() -> None:
    made_up = re.compile(r"2 ?\*\* ?62\b|1 ?<< ?62\b|rollout_ids\.\w+ ?[-+]|\w*ROLLOUT_ID *=")
    assert made_up.findall("2**62 + 2; rollout_ids.BANK + 1")
    assert not {path: found for path, s in SOURCES.items() if (found := made_up.findall(s))}


def test_the_ids_draw_apart() -> None:
    ids = [0, rollout_ids.EVALUATION, rollout_ids.DRIFT, rollout_ids.BANK, *rollout_ids.DOCTOR[:9]]
    assert len({sampling_seed(SampleKey(3, i, 5)) for i in ids}) == len(ids)
