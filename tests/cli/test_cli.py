"""The command line under bad input and bad luck: one line that says what to do, the right exit code, nothing left running."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from slime_tandem import cli
from slime_tandem.cli import flags
from slime_tandem.cli.main import build_parser
from slime_tandem.config import RunConfig, fields_of
from slime_tandem.config.reference import own_settings, sections
from slime_tandem.report import run_folder

TASK = {"family": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
COMMANDS = (
    "train",
    "eval",
    "align",
    "score",
    "suite",
    "report",
    "config",
    "convert",
    "serve",
    "pretrain",
    "fetch-model",
)


@pytest.fixture(autouse=True)
def _no_traceback_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_TANDEM_TRACEBACK", raising=False)


@pytest.fixture
def config(trio, tmp_path: Path) -> Callable[..., str]:  # type: ignore[no-untyped-def]
    """Writes a config of a tiny run and returns its path; changes are merged into the sections."""

    def write(**changes: Any) -> str:
        tree: dict[str, Any] = {
            "name": "r",
            "runs_dir": str(tmp_path / "runs"),
            "models": {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")},
            "tasks": [TASK],
            "sampling": {"max_new_tokens": 6},
            "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "threads": 1},
            "eval": {"prompts": 2},
            "engine": {"cache_tokens": 4096, "backoff_s": 0.05, "max_retries": 1},
        }
        for name, value in changes.items():
            tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    return write


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *parts: str) -> None:
    """Exit code 2; a line on stderr names the command and holds `parts` and a remedy; only progress comes before."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"slime-tandem {argv[0]}: "))
    assert all(re.match(r" *[0-9]+\.[0-9] s  ", line) for line in lines[:at])
    first = lines[at]
    for part in (*parts, "expected ", "Remedy: "):
        assert part in first


SETTINGS = {
    "unknown key": ("tandem.prob_snior=0.3", ("tandem.prob_snior=0.3", "did you mean `tandem.prob_senior`?")),
    "misspelt strategy": ("tandem.selection_strategy=wrod", ("'wrod'", "did you mean 'word'?")),
    "above 1": ("tandem.prob_senior=1.5", ("tandem.prob_senior=1.5", "less than or equal to 1", "default: 0.5")),
    "below 0": ("tandem.prob_senior=-0.1", ("tandem.prob_senior=-0.1", "greater than or equal to 0")),
    "no value": ("seed", ("--set='seed'", "key=value")),
    "a section": ("train=3", ("train=3",)),
    "no URL": ("engine.senior_url=localhost:9", ("engine.senior_url='localhost:9'", "http://127.0.0.1:30000")),
    "broken URL": ("engine.teacher_url=http://[::1", ("engine.teacher_url=",)),
    "threads": ("train.threads=99999999999999", ("train.threads=", "less than or equal to 1024")),
    "family": ("tasks=[{family: chain_sun}]", ("tasks.0.family='chain_sun'", "did you mean `chain_sum`?")),
    "key not set": ("engine.api_key_env=NO_SUCH_KEY_X", ("engine.api_key_env='NO_SUCH_KEY_X'",)),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_bad_setting_is_refused(capsys: pytest.CaptureFixture[str], config: Callable[..., str], kind: str) -> None:
    setting, parts = SETTINGS[kind]
    refused(capsys, ["train", "--config", config(), "--set", setting], *parts)


FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "an existing YAML file"),
    "broken": (b"a: [1,\n b: {", "valid YAML"),
    "latin-1": ("name: é".encode("latin-1"), "UTF-8"),
    "key twice": (b"seed: 1\nname: a\nseed: 2\n", "the key `seed` stands twice"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", [["train", "--config"], ["config", "--check"]])
def test_a_bad_config_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], kind: str
) -> None:
    content, part = FILES[kind]
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    refused(capsys, [*command, str(path)], f"--config='{path}'", part)


def test_a_folder_is_no_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, ["train", "--config", str(tmp_path)], str(tmp_path), "Is a directory")


def replace_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "folder"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors weights"),
    "weights cut short": (lambda f: os.truncate(f / "model.safetensors", 5000), "a whole safetensors file"),
    "empty weights": (lambda f: os.truncate(f / "model.safetensors", 0), "a whole safetensors file"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "broken tokenizer": (replace_text("tokenizer.json", "{]"), "a tokenizer that transformers loads"),
    "broken config": (replace_text("config.json", "{]"), "config.json"),
    "config is a list": (replace_text("config.json", "[]"), "config.json"),
    "broken generation config": (replace_text("generation_config.json", "{]"), "generation_config.json"),
    "end of turn is a word": (replace_text("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id='x'"),
    "end of turn out of range": (replace_text("generation_config.json", '{"eos_token_id": 9999}'), "eos_token_id=9999"),
    "broken template": (replace_text("chat_template.jinja", "{% for"), "chat template"),
    "template refuses": (replace_text("chat_template.jinja", "{{ raise_exception('no') }}"), "chat template"),
}


ROLES = ("senior", "junior", "teacher")


# Every damage once, every role in turn, and the plainest one for all.
@pytest.mark.parametrize(
    ("role", "damage"),
    [(ROLES[i % 3], name) for i, name in enumerate(DAMAGE)] + [(role, "no weights") for role in ("senior", "teacher")],
)
def test_a_damaged_model_folder_is_refused_before_any_server_starts(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], trio, tmp_path: Path, role: str, damage: str
) -> None:  # type: ignore[no-untyped-def]
    folder = Path(shutil.copytree(getattr(trio, role), tmp_path / "damaged"))
    spoil, part = DAMAGE[damage]
    spoil(folder)
    refused(capsys, ["train", "--config", config(models={role: str(folder)})], f"models.{role}", str(folder), part)
    assert not (tmp_path / "runs" / "r" / "logs").exists()


def test_an_architecture_that_cannot_be_trained_is_refused_before_any_server_starts(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], trio, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    folder = Path(shutil.copytree(trio.senior, tmp_path / "odd"))
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**tree, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    refused(capsys, ["train", "--config", config(models={"senior": str(folder)})], "model_type='gpt2'")
    assert not (tmp_path / "runs" / "r" / "logs").exists()


@pytest.mark.parametrize(
    ("mode", "role"), [*(("two_servers", role) for role in ROLES), ("fused", "senior"), ("fused", "junior")]
)
def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused_before_any_server_starts(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], trio, tmp_path: Path, mode: str, role: str
) -> None:  # type: ignore[no-untyped-def]
    folder = Path(shutil.copytree(getattr(trio, role), tmp_path / "narrow"))
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, "vocab_size": tree["vocab_size"] - 2}))
    told = f"tokenizer of {folder}='2 ids beyond the model, the first {tree['vocab_size'] - 2} ("
    argv = ["train", "--config", config(models={role: str(folder)}, engine={"mode": mode})]
    refused(capsys, argv, f"models.{role}", told, f"ids below vocab_size={tree['vocab_size'] - 2}")
    assert not (tmp_path / "runs" / "r" / "logs").exists()
    if mode == "fused":
        refused(capsys, ["serve", "--fused", str(trio.senior), str(folder)], told)


def test_a_junior_with_another_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], trio
) -> None:  # type: ignore[no-untyped-def]
    for command in ("train", "eval"):
        refused(
            capsys,
            [command, "--config", config(models={"junior": str(trio.teacher)})],
            f"models.junior='{trio.teacher}'",
            "the senior's tokenizer",
        )


def test_an_empty_model_name_is_not_the_current_folder(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str]
) -> None:
    refused(capsys, ["train", "--config", config(), "--model", ""], "models.senior", "model=''")


def test_a_broken_prompt_file_is_refused(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "label": "2"}\n{"prompt":\n')
    refused(capsys, ["train", "--config", config(tasks=[{"family": "jsonl", "path": str(path)}])], f"{path}:2=")
    refused(
        capsys, ["train", "--config", config(tasks=[{"family": "jsonl", "path": str(tmp_path)}])], f"path='{tmp_path}'"
    )


def test_an_api_key_that_no_header_can_hold_is_refused_unseen(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_KEY", "secret\n")
    argv = ["train", "--config", config(engine={"api_key_env": "BAD_KEY"})]
    refused(capsys, argv, "BAD_KEY", "engine.api_key_env")
    assert cli.main(argv) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_file_where_the_runs_should_be_is_named(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "runs").write_text("mine")
    refused(capsys, [command, "--config", config()], str(tmp_path / "runs"), "Not a directory")


def test_eval_refuses_an_impossible_output_before_the_work(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path
) -> None:
    for path in (tmp_path / "no" / "x.json", tmp_path):
        refused(capsys, ["eval", "--config", config(), "--output", str(path)], f"--output='{path}'")
    assert not (tmp_path / "runs").exists()


def test_two_runs_do_not_share_a_folder(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    with FileLock(run / ".lock"):
        for flags in ([], ["--resume"], ["--overwrite"]):
            refused(capsys, ["train", "--config", config(), *flags], "name='r'", f"no other run at work in {run}")
    assert (run / "config.yaml").exists()
    refused(capsys, ["train", "--config", config()], "name='r'", "--resume", "--overwrite")


def test_what_a_failed_start_leaves_does_not_stop_overwrite(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path, trio
) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "runs" / "r"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "senior.log").write_text("old")
    bad = config(models={"junior": str(trio.teacher)})
    refused(capsys, ["train", "--config", bad, "--overwrite"], "models.junior")
    assert (run / "logs" / "senior.log").read_text() == "old", "what is refused overwrites nothing"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--port", "70000"), "port=70000"),
        (("--port", "-1"), "port=-1"),
        (("--port", "0", "--cache-tokens", "0"), "cache_tokens=0"),
        (("--port", "0", "--threads", "99999999999999"), "threads=99999999999999"),
        (("--port", "0", "--host", "192.0.2.1"), "host='192.0.2.1'"),
        (("--port", "0", "--host", "0.0.0.0"), "--api-key-env"),
        (("--port", "0", "--api-key-env", "NO_SUCH_KEY_X"), "--api-key-env='NO_SUCH_KEY_X'"),
    ],
)
def test_serve_refuses_bad_flags(capsys: pytest.CaptureFixture[str], trio, flags: tuple[str, ...], part: str) -> None:  # type: ignore[no-untyped-def]
    refused(capsys, ["serve", str(trio.senior), *flags], part)


def test_serve_names_a_busy_port_and_a_missing_folder(capsys: pytest.CaptureFixture[str], trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(capsys, ["serve", str(trio.senior), "--port", str(port)], f"port={port}", "a free port")
    refused(capsys, ["serve", str(tmp_path / "no")], str(tmp_path / "no"))


def test_report_names_what_is_damaged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, ["report", str(tmp_path)], str(tmp_path), "config.yaml")
    (tmp_path / "config.yaml").write_text(RunConfig().to_yaml())
    metrics, transcripts = tmp_path / "metrics.jsonl", tmp_path / "transcripts.jsonl"
    for line, part in (("garbage", ":1='garbage"), ('{"step": 3}', "step 3: rollout/reward_mean='missing'")):
        metrics.write_text(line + "\n")
        refused(capsys, ["report", str(tmp_path)], str(metrics), part)
    metrics.unlink()
    transcripts.write_text('{"step": 0, "phase": "eval"}\n')
    refused(capsys, ["report", str(tmp_path)], "transcripts.jsonl", str(tmp_path))


def test_report_on_a_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RunConfig().to_yaml())
    (tmp_path / "summary.json").symlink_to("/dev/full")
    refused(capsys, ["report", str(tmp_path)], str(tmp_path / "summary.json"), "No space left", "free space")


def test_a_full_disk_at_the_start_is_told_before_any_server_starts(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / ".probe").symlink_to("/dev/full")
    refused(capsys, ["train", "--config", config()], str(run), "No space left", "free space")
    assert not (run / "logs").exists()


def test_a_disk_that_fills_in_mid_run_ends_the_run(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to the metrics fail; so does the report. (A link to /dev/full would not do: reading it never ends.)"""
    run = tmp_path / "runs" / "r"
    (run / "report.html").mkdir(parents=True)
    write = run_folder._write_all

    def full(file: FileIO, content: bytes) -> None:
        if str(file.name).endswith("metrics.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    monkeypatch.setattr(run_folder, "_write_all", full)
    assert cli.main(["train", "--config", config(tandem={"enabled": False}, opd={"enabled": False})]) == 2
    told = capsys.readouterr().err.splitlines()  # before it, what the run was doing
    lines = told[next(i for i, line in enumerate(told) if line.startswith("slime-tandem train: ")) :]
    assert lines[0].startswith(f"slime-tandem train: {run / 'metrics.jsonl'}='No space left on device': expected ")
    assert "Remedy: free space" in lines[0]
    assert lines[1].startswith("no report: "), "a second failure is told after the first"
    assert len(lines) == 2
    assert servers_of(run) == []


def servers_of(run: Path) -> list[int]:
    """Process ids of servers that log into this run folder, by role: junior, senior, teacher."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                log = os.readlink(proc / "fd" / "1")
            except OSError:
                continue
            if log.startswith(f"{run.resolve()}/logs/"):
                found.append((log, int(proc.name)))
    return [pid for _, pid in sorted(found)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_default(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    parser = build_parser()
    sub = next(a for a in parser._actions if a.dest == "command").choices[command]  # type: ignore[index]
    flat = " ".join(text.split())
    for action in sub._actions:
        if action.option_strings and action.dest != "help":
            assert action.option_strings[-1] in text
            if action.default == argparse.SUPPRESS:  # short for a setting, whose default is in the list below
                assert "(default: " in (action.help or "")
            elif action.default not in (None, False, []) and not action.required:
                assert f"(default: {action.default})" in flat
    if command in ("train", "eval"):
        for name, section in sections():
            assert f"  {name} " in text or not own_settings(section)
        assert "slime-tandem config --list" in text
        assert len(text.splitlines()) < 60, "it fits on a screen or two"


def test_config_lists_every_setting_of_all_sections_or_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--list"]) == 0
    text = capsys.readouterr().out
    for name, default, _ in fields_of():
        assert f"{name} = {flags.shown(default)}\n" in text
    assert "tasks[].family (required)" in text
    assert cli.main(["config", "--list", "opd.selection"]) == 0
    names = [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert names
    assert all(name.startswith("opd.selection.") for name in names)
    assert cli.main(["config", "--list", "tandm"]) == 2
    assert "did you mean tandem?" in capsys.readouterr().err


def test_help_of_all_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_what_only_prints_help_loads_no_model_library() -> None:
    """Startup is what a person waits for at each --help and each mistake: what is heavy is imported where it is used."""
    code = (
        "import sys\nfrom slime_tandem.cli.main import build_parser\nbuild_parser().format_help()\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "slime_tandem" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "numpy", "megatron", "aiohttp", "rich", "ray", "sglang"})


@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["train", "--bogus"], ["serve", "m", "--port", "x"], ["config"],
             ["train", "--resume", "--overwrite"], ["suite", "s", "--methods", "tip:0.1:3", "--set"],
             ["--print-completion", "tcsh"]]
)  # fmt: skip
def test_bad_flags_end_with_usage_and_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_serve_without_a_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert "MODEL=None: expected one model folder. Remedy: name it, or use --fused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("tasks=[{family: chain_summ}]", "did you mean `chain_sum`?"),
        ("tasks=[{family: 'no_such:Family'}]", "tasks.0.family"),
        ("tasks=[{family: chain_sum}, {family: chain_sum, reward: 'math:no_such'}]", "tasks.1.reward"),
        ("tasks=[{family: chain_sum, environment: calculater}]", "tasks.0.environment"),
        ("opd.teachers=[{name: t, scorer: 'no_such:scorer', tokenizer: x}]", "opd.teachers"),
        ("opd.signal=no_such:signal", "opd.signal"),
        ("opd.selection.selector=no_such:selector", "opd.selection.selector"),
    ],
)
def test_config_check_finds_names_that_stand_for_nothing(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], setting: str, part: str
) -> None:
    refused(capsys, ["config", "--check", config(), "--set", setting], part)


def test_config_prints_the_resolved_tree(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path
) -> None:
    assert cli.main(["config", "--check", config(), "--set", "seed=7"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert RunConfig.load(printed) == RunConfig.load(config(), ["seed=7"])


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_other_endings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: Callable[..., str]
) -> None:
    """Ctrl-C is 130, an error of the system 2, and a fault of ours 1 with a first line before its traceback."""
    argv = ["config", "--check", config()]
    monkeypatch.setattr(RunConfig, "to_yaml", failing(KeyboardInterrupt()))
    assert cli.main(argv) == 130
    assert "slime-tandem config: stopped" in capsys.readouterr().err
    monkeypatch.setattr(RunConfig, "to_yaml", failing(PermissionError(13, "Permission denied", "/some/file")))
    refused(capsys, argv, "/some/file='Permission denied'")
    monkeypatch.setattr(RunConfig, "to_yaml", failing(ZeroDivisionError("oops")))
    assert cli.main(argv) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("slime-tandem config: internal error (ZeroDivisionError). Please report")
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ZeroDivisionError: oops"


def test_the_traceback_of_a_user_error_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIME_TANDEM_TRACEBACK", "1")
    assert cli.main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("slime-tandem report: run folder=")


def test_a_closed_pipe_is_exit_code_1_and_silent(config: Callable[..., str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "slime_tandem.cli", "config", "--check", config()],
            stdout=write, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_under_the_output_is_told(config: Callable[..., str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slime_tandem.cli", "config", "--check", config()],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("slime-tandem config: output='No space left on device': expected ")
    assert len(done.stderr.splitlines()) == 1


def test_an_ascii_terminal_gets_the_table_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RunConfig().to_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "slime_tandem.cli", "report", str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "solo accuracy" in done.stdout


def test_a_server_whose_parent_is_gone_ends_before_it_has_begun() -> None:
    """Process 1 is not its parent; had it begun, the missing folder would give exit code 2."""
    command = [sys.executable, "-m", "slime_tandem.engines.embedded.child", "1", "/no/such/folder", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\r"


def raw_controls(text: str) -> list[str]:
    return [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028"]


def test_control_characters_of_others_texts_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], trio, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    """A label, a key, a path and a response that clear the screen, set the title and turn the text around."""
    prompts, text = tmp_path / f"p{HOSTILE[:4]}.jsonl", tmp_path / "text.txt"
    row = {"prompt": "a", "label": "1", HOSTILE: 1}
    for content in (json.dumps(row), HOSTILE, json.dumps({"prompt": "a", "label": [HOSTILE]}, ensure_ascii=False)):
        prompts.write_text(content)
        path = config(tasks=[{"family": "jsonl", "path": str(prompts)}])
        assert cli.main(["train", "--config", path]) == 2
        err = capsys.readouterr().err
        assert "\\x1b[2J" in err
        assert raw_controls(err) == []
    text.write_text(HOSTILE + " and words", newline="")
    assert cli.main(["align", "--student", str(trio.senior), "--teacher", str(trio.teacher), str(text)]) == 0
    out = capsys.readouterr().out
    assert "\\x1b" in out
    assert raw_controls(out) == []


def test_a_finding_is_printable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: Callable[..., str]
) -> None:
    from slime_tandem.doctor.probes import Finding

    def examine(_: object, say: Callable[[Finding], None], **__: Any) -> list[Finding]:
        found = Finding("reward", "fail", f"answer {HOSTILE}", f"mend {HOSTILE}.")
        say(found)
        return [found]

    monkeypatch.setattr("slime_tandem.doctor.run.run_doctor", examine)
    assert cli.main(["doctor", "--config", config()]) == 3
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out
    assert raw_controls(out) == []


def test_a_missing_package_is_one_line_and_our_own_fault_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("filelock", 2), ("slime_tandem.nowhere", 1)):

        def run(args: argparse.Namespace, name: str = name) -> int:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        parser = argparse.ArgumentParser(prog="slime-tandem")
        parser.set_defaults(action=run)
        assert cli.main([], parser) == code
        err = capsys.readouterr().err
        assert ("Traceback" in err) == (code == 1)
        assert (f"package={name!r}: expected installed for {sys.executable}. Remedy: install" in err) == (code == 2)
