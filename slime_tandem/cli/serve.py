"""`slime-tandem serve`: one model folder behind the embedded server, or two in one real SGLang."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.config import EngineConfig
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.errors import ConfigError


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands, "serve", "Serve a model folder over the part of SGLang's HTTP API that slime_tandem uses."
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="local Hugging Face folder, or builtin:senior|junior|teacher"
    )
    parser.add_argument(
        "--fused",
        nargs=2,
        metavar=("SENIOR", "JUNIOR"),
        help="serve two models in one real SGLang instead (docs/fused.md); flags of sglang.launch_server may follow after --",
    )
    parser.add_argument(
        "--sglang-python",
        metavar="FILE",
        help="with --fused: the Python that has SGLang (or SLIME_TANDEM_SGLANG_PYTHON)",
    )
    parser.add_argument(
        "--fused-attention",
        choices=("auto", "every_step", "catch_up"),
        default=EngineConfig().fused_attention,
        help="with --fused: engine.fused_attention (default: %(default)s)",
    )
    parser.add_argument(
        "--fused-prefill",
        choices=("auto", "triton", "flashinfer"),
        default=EngineConfig().fused_prefill,
        help="with --fused: engine.fused_prefill (default: %(default)s)",
    )
    parser.add_argument("--allow-unknown-version", action="store_true", help="with --fused: any version of SGLang")
    parser.add_argument(
        "--boundary-ids", metavar="FILE", help="with --fused: a JSON list of ids, tandem.boundary_token_ids of the runs"
    )
    parser.add_argument("sglang_args", nargs="*", metavar="-- SGLANG_ARGS", help="with --fused")
    ServeOptions.add_flags(parser, "host", "port", "max_batch", "cache_tokens", "threads", "allowed_hosts")
    flags.add_dtype(parser, "weights")
    flags.add_api_key_env(parser, "environment variable with the key that clients must send")
    flags.add_cache_dir(parser)
    flags.add_trust_remote_code(parser, "the model folder")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Serve until the process is asked to stop."""
    from slime_tandem.engines.embedded.server import serve
    from slime_tandem.models.builtin import resolve_model

    key = flags.api_key(args)
    if args.fused:
        return _run_fused(args, key)
    if args.model is None or args.sglang_args:
        raise ConfigError("MODEL", args.model, "one model folder", "name it, or use --fused SENIOR JUNIOR")
    serve(str(resolve_model(args.model, Path(args.cache_dir))), ServeOptions.from_args(args, key))
    return 0


def _run_fused(args: argparse.Namespace, key: str | None) -> int:
    from slime_tandem.engines.fused.launch import FusedServer, Sglang, catch_up_of, shared_tables
    from slime_tandem.models.builtin import resolve_model
    from slime_tandem.models.hf import check_model_folder
    from slime_tandem.models.text_tokenizer import load_response

    cache = Path(args.cache_dir)
    senior, junior = (check_model_folder(resolve_model(name, cache)) for name in args.fused)
    tables = shared_tables(senior, junior, trust_remote_code=args.trust_remote_code)
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
        ServeOptions.from_args(args, key),
        tables=tables,
        sglang=Sglang(
            args.sglang_python,
            args.allow_unknown_version,
            extra,
            catch_up_of(args.fused_attention, senior),
            args.fused_prefill,
        ),
        log_file=None,
    )
    try:
        server.launch()
        return server.wait()
    finally:
        server.stop()
