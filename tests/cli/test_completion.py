"""What a shell offers, asked of bash itself with the printed script."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from slime_tandem import cli
from slime_tandem.cli.completion import SHELLS, completion
from slime_tandem.cli.main import build_parser


def offered(*words: str) -> list[str]:
    """What bash offers for the last of these words behind `slime-tandem`."""
    line = f"COMP_WORDS=(slime-tandem {shlex.join(words)}) COMP_CWORD={len(words)}"
    # Outside of a completion, where this test is, bash has no options of it to set.
    script = f"compopt() {{ :; }}\n{completion(build_parser(), 'bash')}\n{line}\n_slime_tandem\necho ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], ["train"]),
        (["f"], ["fetch-model"]),
        (["--v"], ["--version"]),
        (["train", "--re"], ["--resume"]),
        (["train", "--set", "tandem.prob_s"], ["tandem.prob_senior="]),
        (["train", "--set", "seed=1", "tandem.prob_s"], ["tandem.prob_senior="]),
        (["train", "--set", "seed=1", "--ov"], ["--overwrite"]),
        (["train", "--config", "tandem.prob_s"], []),
        (["score", "a.jsonl", "--dtype", ""], ["float32", "bfloat16"]),
        (["suite", "s", "--backend", "s"], ["slime"]),
        (["fetch-model", ""], ["smollm2"]),
        (["report", "x"], []),
    ],
)
def test_what_is_offered(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_every_command_and_flag_is_offered() -> None:
    parser = build_parser()
    commands = next(a for a in parser._actions if a.dest == "command").choices
    assert offered("")[: len(commands)] == list(commands)  # type: ignore[arg-type]
    for name, sub in commands.items():  # type: ignore[union-attr]
        assert offered(name, "--") == [a.option_strings[-1] for a in sub._actions if a.option_strings]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_flag_prints_the_script_and_ends(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--print-completion", shell])
    assert caught.value.code == 0
    script = capsys.readouterr().out
    assert script == completion(build_parser(), shell)
    assert ("bashcompinit" in script) == (shell == "zsh")
