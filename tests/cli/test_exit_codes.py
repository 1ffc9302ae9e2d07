"""Exit codes: one table, in the code, in `--help` and in the docs; no page tells another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_tandem.cli import main
from slime_tandem.cli.exit_codes import EXIT_CODES, FAULT, in_words
from slime_tandem.cli.main import build_parser
from slime_tandem.doctor.probes import Finding, reward_signal

from ..training.test_metrics import scored

REPO = Path(__file__).resolve().parents[2]
TOLD = re.compile(r"[Ee]xit (?:code|status) (\d+)|exits? with (?:code )?(\d+)|rc[= ](\d+)")
OTHERS = {
    "published.md": {2},  # the published scripts' own
    "slime-cpu.md": {0, 1},  # of train.py, as it was seen
}
"""Pages on other programs' exit codes."""


def test_the_docs_table_is_the_codes() -> None:
    page = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    table = page.split("| exit code |", 1)[1].split("\n\n", 1)[0]
    told = {int(n): what for n, what in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)}
    assert told == dict(EXIT_CODES)


def test_help_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert in_words() in " ".join(capsys.readouterr().out.split())
    assert build_parser().epilog == f"Exit codes: {in_words()}."
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert f"Exit code {FAULT} if a probe failed" in " ".join(capsys.readouterr().out.split())


def test_no_page_and_no_text_tells_another_code() -> None:
    pages = [
        REPO / "README.md",
        *sorted((REPO / "docs").rglob("*.md")),
        *sorted((REPO / "slime_tandem/cli").glob("*.py")),
    ]
    found = {
        (path.name, int(next(filter(None, groups))))
        for path in pages
        for groups in TOLD.findall(path.read_text(encoding="utf-8"))
    }
    assert len({name for name, _ in found}) >= 4, "the search still finds them"
    wrong = {(name, code) for name, code in found if code not in EXIT_CODES and code not in OTHERS.get(name, ())}
    assert not wrong


def test_every_code_that_commands_return_is_in_the_table() -> None:
    """`run` of a command returns 0, a name of the table, or a child's code (`convert`)."""
    returned = set()
    for path in sorted((REPO / "slime_tandem/cli").glob("*.py")):
        returned |= {
            (path.name, int(code))
            for code in re.findall(r"\breturn (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        }
    assert {code for _, code in returned} <= set(EXIT_CODES)
    numbers = {name for name, code in returned if code != 0}
    assert not numbers - {"completion.py"}, "a code has a name"


def test_equal_rewards_are_a_fault_that_a_script_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_tandem.doctor import run as doctor

    found = scored_finding()
    assert found.status == "fail"

    def run(config: object, say: object, **_: object) -> list[Finding]:
        return [Finding("models", "pass", "m"), found]

    monkeypatch.setattr(doctor, "run_doctor", run)
    assert main(["doctor", "--json"]) == FAULT == 3
    monkeypatch.setattr(doctor, "run_doctor", lambda *_, **__: [Finding("special tokens", "warn", "w")])
    assert main(["doctor", "--json"]) == 0


def scored_finding() -> Finding:
    """Of four responses that are all worth the same."""
    from slime_tandem.config import RunConfig

    return reward_signal([scored((1, 2), (1, 1)) for _ in range(4)], RunConfig().tasks)
