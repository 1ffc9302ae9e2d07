"""The public surface: what it offers, that it is light, that docs/api.md is true of it, that it works inside an event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slime_tandem
from slime_tandem.errors import DataError, RunDirError
from slime_tandem.rollout.boundaries import BoundaryRecord
from slime_tandem.tokens.token_bytes import TokenBytes

from .waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("forked_servers")

DOCS = Path(__file__).parents[1] / "docs" / "api.md"
TEXT = DOCS.read_text(encoding="utf-8")


def test_all_is_there_and_listed() -> None:
    assert {*slime_tandem.__all__} <= {*dir(slime_tandem)}
    for name in slime_tandem.__all__:
        assert getattr(slime_tandem, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trains'"):
        slime_tandem.trains  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_what_is_there() -> None:
    source = inspect.getsource(slime_tandem)
    static = source[source.index("if TYPE_CHECKING:") : source.index("__version__ =")]
    names = set(re.findall(r"\b(\w+)\b", " ".join(re.findall(r"import (.*)", static))))
    assert names == {*slime_tandem.__all__} - {"__version__"}


def test_the_import_is_light() -> None:
    names = "[m for m in sys.modules if m.split('.')[0] in ('slime_tandem', 'torch')]"
    code = f"import json, sys, slime_tandem; print(json.dumps({names}))"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    assert json.loads(out) == ["slime_tandem"]


def test_every_public_name_is_documented_with_its_signature() -> None:
    for name in {*slime_tandem.__all__} - {"__version__"}:
        assert re.search(rf"\b{name}\b", TEXT), name
    for name in ("train", "evaluate", "score", "align", "open_run", "authorship", "tandem_loss"):
        parameters = inspect.signature(getattr(slime_tandem, name)).parameters
        (text,) = re.findall(rf"^```\n{name}\((.*?)\) -> .*?\n```", TEXT, re.MULTILINE | re.DOTALL)
        shown = [part.split("=")[0].strip() for part in text.replace("()", "[]").split(",")]
        assert [p for p in shown if p != "*"] == list(parameters), name


def test_the_examples_of_the_docs(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {
        "student": str(trio.senior), "teacher": str(trio.teacher), "models": str(trio.senior.parent), "runs": str(tmp_path),
    }  # fmt: skip
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        assert len([line for line in block.splitlines() if line and not line.startswith("import ")]) <= 10
        exec(compile(block, str(DOCS), "exec"), space)
    run = space["run"]
    assert [row["step"] for row in run.steps] == [0]
    assert [row["phase"] for row in run.evaluations] == ["before", "after"]
    assert run.control is None
    assert {t["phase"] for t in run.transcripts} == {"train", "eval"}
    frame = run.frame()
    assert list(frame["opd/teacher_kl"]) == [run.steps[0]["opd/teacher_kl"]]
    assert set(run.frame("evaluations")["phase"]) == {"before", "after"}
    with pytest.raises(RunDirError, match="rows='all'"):
        run.frame("all")
    assert len(space["scored"]["teacher_log_probs"]) == len(space["scored"]["response_ids"])
    assert "retention" in capsys.readouterr().out


def test_it_works_inside_an_event_loop(trio: Any, side_url: Any) -> None:
    async def cell() -> list[dict[str, Any]]:
        found = slime_tandem.score(
            [{"prompt": "2 + 3 =", "response": "5", "id": "a"}],
            trio.senior,
            trio.teacher,
            teacher_url=side_url("teacher"),
        )
        await asyncio.sleep(0)  # the notebook's own loop goes on
        assert asyncio.get_running_loop().is_running()
        return found

    (scored,) = asyncio.run(cell())
    assert scored["id"] == "a"
    assert scored["error"] is None


def test_what_is_no_response_is_refused_before_anything_starts(trio: Any) -> None:
    assert slime_tandem.score([], trio.senior, trio.teacher) == []
    with pytest.raises(DataError, match="responses='list': expected mappings"):
        slime_tandem.score([{"prompt": object()}], trio.senior, trio.teacher)
    with pytest.raises(DataError, match="`response` or `response_ids`"):
        slime_tandem.score([{"prompt": "2"}], trio.senior, trio.teacher)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="a folder that `slime-tandem train` wrote"):
        slime_tandem.open_run(tmp_path)


def test_an_alignment_by_hand(trio: Any) -> None:
    found = slime_tandem.align("answer", trio.senior, trio.teacher)
    assert "".join(found.pieces[:-1]) == "answer"
    assert found.partners[-1] == len(found.teacher_ids) - 1, "the ends of turn pair by role"
    assert all((p is None) != (r is None) for p, r in zip(found.partners, found.reasons, strict=True))
    assert 0 < found.coverage <= 1
    same = slime_tandem.align("answer", trio.senior, trio.junior)
    assert same.coverage == 1.0
    assert same.student_ids == same.teacher_ids


def test_authorship_is_the_rules(trio: Any) -> None:
    config = slime_tandem.RunConfig()
    tokens = TokenBytes((b"a", b" b"), frozenset(), frozenset())
    record = BoundaryRecord.resolve(config.tandem, tokens)
    key = slime_tandem.SampleKey(7, 0, 3)
    mask = slime_tandem.authorship([0, 0, 1, 0, 1, 0], record, config, key)
    assert mask == (1, 1, 1, 1, 1, 0)
    assert slime_tandem.authorship([0, 0, 1], record, config, key, inserted=[(0, 1)]) == (0, 1, 1)
    alone = slime_tandem.RunConfig.load(overrides=["tandem.enabled=false"])
    assert slime_tandem.authorship([0, 0, 1, 0, 1, 0], record, alone, key) == (1,) * 6
