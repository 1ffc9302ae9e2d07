"""What the docs name exists: links with their headings, pages, files, functions; docs/structure.md is the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "slime_tandem"
PAGES = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(REPO.glob("docs/**/*.md"))
GENERATED = {REPO / "docs" / name for name in ("settings.md", "metrics.md")}
CODE = [
    path
    for folder in ("slime_tandem", "scripts", "tools", "tests", "examples")
    for path in sorted((REPO / folder).rglob("*"))
    if path.suffix in {".py", ".sh", ".yaml", ".j2"} and path != Path(__file__).resolve()
]
TOPS = {path.name for path in REPO.iterdir() if path.is_dir()} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PAGE = re.compile(r"\bdocs/[\w/.-]+\.(?:md|svg|png)\b")
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"([\w.*-]+(?:/[\w.*-]+)*/[\w.*-]+\.(?:py|sh|yaml|txt))(?::(?:\d+)?)?(?: ([A-Za-z_.]+))?")
DOTTED = re.compile(r"\bslime_tandem((?:\.\w+)+)")
LONGEST_LINE, LONGEST_CELL = 128, 120


def name(page: Path) -> str:
    return str(page.relative_to(REPO))


def prose(text: str) -> Iterator[str]:
    """The lines outside of code blocks."""
    code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield line


def slug(heading: str) -> str:
    """GitHub's anchor of a heading.

    >>> slug("`slime-tandem doctor`, in short")
    'slime-tandem-doctor-in-short'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line.lstrip("#")) for line in prose(page.read_text(encoding="utf-8")) if line.startswith("#")}


def broken_links(page: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall("\n".join(prose(text))):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            found.append(target)
    return found


def missing_pages(text: str) -> list[str]:
    return sorted({p for p in PAGE.findall(text) if not (REPO / p).exists()})


def missing_paths(text: str) -> list[str]:
    """Files in backticks that are not there, and names behind `file.py: ` that the file does not define.

    A file is named from the repository, or from the package (`rollout/handoff.py`); what begins with a folder of neither is
    somebody else's.
    """
    found = []
    for span in SPAN.findall(text):
        if (match := PATH.match(span)) is None or match[1].split("/")[0] not in TOPS:
            continue
        files = [p for root in (REPO, PACKAGE) for p in root.glob(match[1])]
        if not files:
            found.append(span)
        elif match[2] and ":" in span:
            last = match[2].rpartition(".")[2]
            if not re.search(rf"\b(?:def|class) {last}\b", files[0].read_text(encoding="utf-8")):
                found.append(span)
    return found


def missing_modules(text: str) -> list[str]:
    """Dotted names `slime_tandem.room.module.attribute` of which no module, or no such attribute, is there."""
    found = []
    for dotted in sorted(set(DOTTED.findall(text))):
        parts = dotted.strip(".").split(".")
        at = PACKAGE
        while parts and (at / parts[0]).is_dir():
            at /= parts.pop(0)
        file = at / f"{parts.pop(0)}.py" if parts and (at / f"{parts[0]}.py").exists() else at / "__init__.py"
        if parts and not re.search(rf"\b{parts[0]}\b", file.read_text(encoding="utf-8")):
            found.append(f"slime_tandem{dotted}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_pages_files_and_functions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not missing_pages(text)
    assert not missing_paths(text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_modules_exist(page: Path) -> None:
    # `slime_tandem.opd` and the like are settings under the one key of slime's file.
    settings = r"\.(?:sampling|opd|objective|tandem|optimizer|train|engine|models)\b"
    text = re.sub(rf"\bslime_tandem{settings}(?:\.\w+)*(?! import)", "", page.read_text(encoding="utf-8"))
    assert not missing_modules(text)


def test_pages_that_code_names_exist() -> None:
    assert {name(p): missing for p in CODE if (missing := missing_pages(p.read_text(encoding="utf-8")))} == {}


def test_what_is_missing_is_found() -> None:
    page = REPO / "README.md"
    assert broken_links(page, "[a](docs/nowhere.md), [b](#no-heading), [c](docs/slime.md#no-heading)") == [
        "docs/nowhere.md", "#no-heading", "docs/slime.md#no-heading",
    ]  # fmt: skip
    assert missing_pages("see docs/nowhere.md and docs/slime.md") == ["docs/nowhere.md"]
    lost = "`rollout/nowhere.py`, `rollout/handoff.py: Nobody`, `scripts/no.sh`"
    assert len(missing_paths(lost)) == 3
    assert missing_paths("`rollout/handoff.py: HandoffRule`, `layers/utils/logprob.py:117`, `scripts/slime/*.py`") == []
    assert missing_modules("slime_tandem.rollout.handoff.Nobody slime_tandem.rollout.handoff.HandoffRule") == [
        "slime_tandem.rollout.handoff.Nobody"
    ]


@pytest.mark.parametrize("page", [p for p in PAGES if p not in GENERATED], ids=name)
def test_lines_and_cells_can_be_read(page: Path) -> None:
    for line in prose(page.read_text(encoding="utf-8")):
        seen = LINK.sub(lambda m: m[0].partition("](")[0], line)
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", seen.strip().strip("|"))]
            assert all(len(cell) <= LONGEST_CELL for cell in cells), line
        else:
            assert len(seen) <= LONGEST_LINE, line


def test_every_page_is_in_the_index() -> None:
    index = REPO / "docs" / "README.md"
    linked = {(index.parent / t.partition("#")[0]).resolve() for t in LINK.findall(index.read_text(encoding="utf-8"))}
    pages = {p.resolve() for p in REPO.glob("docs/*.md")} - {index.resolve()}
    assert pages <= linked


def test_every_result_is_in_the_table_of_results() -> None:
    index = REPO / "docs" / "results" / "README.md"
    linked = {(index.parent / t.partition("#")[0]).resolve() for t in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {p.resolve() for p in REPO.glob("docs/results/*.md")} - {index.resolve()} <= linked


def tree_of(text: str) -> set[str]:
    """The files of the drawn tree in docs/structure.md, as paths below slime_tandem/."""
    drawn = text.split("```\nslime_tandem/\n")[1].split("```")[0]
    files, folders = set(), list[str]()
    for line in drawn.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        word = line.split()[0]
        folders = folders[:depth]
        if word.endswith("/"):
            folders.append(word.rstrip("/"))
        else:
            files.add("/".join([*folders, word]))
    return files


def test_the_tree_is_the_package() -> None:
    there = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    assert tree_of((REPO / "docs" / "structure.md").read_text(encoding="utf-8")) == there


def test_the_rooms_are_those_of_the_import_test() -> None:
    values = {}
    for node in ast.parse((REPO / "tests" / "test_imports.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named = node.targets[0].id
            if named in ("ROOMS", "WORDS", "PURE"):
                values[named] = ast.literal_eval(node.value)
            elif named == "ALLOWED":
                assert isinstance(node.value, ast.Dict)
                pairs = zip(node.value.keys, node.value.values, strict=True)
                values[named] = {
                    ast.literal_eval(k): set() if isinstance(v, ast.Call) else ast.literal_eval(v)
                    for k, v in pairs
                    if k is not None
                }
    text = (REPO / "docs" / "structure.md").read_text(encoding="utf-8")
    section = text.split("| room | rule | may import |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    assert [row[0] for row in rows] == list(values["ROOMS"])
    for room, _, below in rows:
        if room != "cli":
            assert set(below.split(", ")) - {"-"} == values["ALLOWED"].get(room, set()), room
    shown = " ".join(text.split())
    assert ", ".join(r for r in values["ROOMS"] if r in values["WORDS"]) in shown
    assert ", ".join(f"`{r}`" for r in values["PURE"]) in shown
