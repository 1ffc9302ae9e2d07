"""What shells offer, asked of the shells themselves: keys are typed into an interactive one on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slime_tandem
from slime_tandem import cli
from slime_tandem.cli.completion import SHELLS, completion, settings
from slime_tandem.config import fields_of

from ..waiting import PATIENCE_S

TAB, START, END = "\t", "\x01", "\x05"


class Typed:
    """An interactive shell; `line(keys)` gives the words of the command line after the keys."""

    def __init__(self, command: list[str], environment: dict[str, str], set_up: str) -> None:
        self._file, inner = pty.openpty()
        self._shell = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self._type(f"{set_up}; echo rea''dy\n")
        self._until("ready\r\n")

    def line(self, keys: str) -> list[str]:
        """Type keys, wait for what the shell makes of a tab, then have it print the line's words."""
        self._type(keys)
        if TAB in keys:
            self._quiet()
        self._type(f"{START}printf '<%s>' {END}; echo; echo do''ne\n")
        shown = self._until("done\r\n")
        output = shown[shown.rindex("<slime-tandem>") :].split("\r")[0]
        return output.strip("<>").split("><")[1:]

    def close(self) -> None:
        self._shell.kill()
        self._shell.wait(PATIENCE_S)
        os.close(self._file)

    def _type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def _until(self, mark: str) -> str:
        end, seen = time.monotonic() + PATIENCE_S, ""
        while mark not in seen:
            assert time.monotonic() < end, seen
            if select.select([self._file], [], [], 0.1)[0]:
                seen += os.read(self._file, 2**16).decode("utf-8", "replace")
        return seen

    def _quiet(self) -> None:
        """Until the program has answered: it leaves a line in a file."""
        end = time.monotonic() + PATIENCE_S
        while not self._asked():
            assert time.monotonic() < end, "the shell never asked"
            time.sleep(0.02)

    _asked: Callable[[], bool]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `slime-tandem` is this package's program; it notes in $ANSWERED that it has answered."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "slime-tandem"
    root = Path(slime_tandem.__file__).parents[1]
    script.write_text(
        f'#!/bin/sh\n{shlex.quote(sys.executable)} -m slime_tandem.cli "$@"\n'
        'code=$?\n[ -z "$_ARGCOMPLETE" ] || echo >> "$ANSWERED"\nexit $code\n'
    )
    script.chmod(0o755)
    (folder / "empty").mkdir()
    return {
        **{k: v for k, v in os.environ.items() if k not in ("PROMPT_COMMAND", "PS1", "BASH_ENV", "ENV")},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(root),
        "ANSWERED": str(folder / "answered"),
        "HOME": str(folder / "empty"),
        "TERM": "dumb",
        "PS1": "$ ",
        "EMPTY": str(folder / "empty"),
    }


def typed(command: list[str], environment: dict[str, str], set_up: str) -> Iterator[Typed]:
    shell = Typed(command, environment, f"cd $EMPTY; {set_up}")
    answered, before = Path(environment["ANSWERED"]), [0]

    def asked() -> bool:
        now = len(answered.read_text().splitlines()) if answered.exists() else 0
        more = now > before[0]
        before[0] = now
        return more

    asked()
    shell._asked = asked  # type: ignore[method-assign]
    try:
        yield shell
    finally:
        shell.close()


@pytest.fixture(scope="module")
def bash(program: dict[str, str]) -> Iterator[Typed]:
    quiet = "bind 'set bell-style none'; bind 'set enable-bracketed-paste off'"
    yield from typed(
        ["bash", "--norc", "--noprofile", "-i"], program, f"{quiet}; source <(slime-tandem --print-completion bash)"
    )


CASES = [
    ("slime-tandem tr", ["train"]),
    ("slime-tandem train --re", ["train", "--resume"]),
    ("slime-tandem train --set tandem.prob_s", ["train", "--set", "tandem.prob_senior="]),
    ("slime-tandem train --set seed=1 models.dtype=b", ["train", "--set", "seed=1", "models.dtype=bfloat16"]),
    (
        "slime-tandem train --config tandem.prob_s",
        ["train", "--config", "tandem.prob_s"],
    ),  # a file, of which there is none
    ("slime-tandem suite s --backend sl", ["suite", "s", "--backend", "slime"]),
    ("slime-tandem report x --wa", ["report", "x", "--watch"]),
]


@pytest.mark.parametrize(("keys", "words"), CASES, ids=[keys for keys, _ in CASES])
def test_bash_completes(bash: Typed, keys: str, words: list[str]) -> None:
    assert bash.line(keys + TAB) == words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(program: dict[str, str]) -> None:
    set_up = (
        "unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D; bindkey -e; "
        "source <(slime-tandem --print-completion zsh)"
    )
    for shell in typed(["zsh", "-f", "-i"], program, set_up):
        assert shell.line("slime-tandem tr" + TAB) == ["train"]
        assert shell.line("slime-tandem train --set tandem.prob_s" + TAB) == ["train", "--set", "tandem.prob_senior="]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(program: dict[str, str]) -> None:
    ask = "slime-tandem --print-completion fish | source; "
    for line, expected in (("slime-tandem tr", "train"), ("slime-tandem train --set models.dtype=b", "bfloat16")):
        done = subprocess.run(
            ["fish", "--no-config", "-c", ask + f"complete -C {shlex.quote(line)}"],
            check=True, capture_output=True, text=True, env=program,
        )  # fmt: skip
        (offered,) = done.stdout.splitlines()
        assert offered.split("\t")[0].endswith(expected)


def test_every_setting_is_offered_behind_set() -> None:
    assert list(settings("")) == [f"{name}=" for name, _, _ in fields_of()]
    assert list(settings("control=")) == ["control=true", "control=false"]
    assert list(settings("no.such=")) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_flag_prints_the_script_and_ends(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    assert script == completion("slime-tandem", shell) + "\n"
    assert ("complete --command slime-tandem" in script) == (shell == "fish")
