"""Starts a real SGLang server with a senior and a junior inside, as a child process. Needs no SGLang in this Python.

`override_args` and `environment` are all that SGLang must be given (docs/fused.md says how slime passes them on).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import slime_tandem
from slime_tandem.engines.fused import pair
from slime_tandem.engines.fused.internals import KNOWN_VERSIONS
from slime_tandem.engines.processes import ChildServer
from slime_tandem.engines.serve_options import DEFAULT, ServeOptions
from slime_tandem.engines.sglang import free_port, refuse_key_flags
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.models.weight_files import weight_names

PYTHON_ENV = "SLIME_TANDEM_SGLANG_PYTHON"
MODEL_PACKAGE = "slime_tandem.engines.fused.models"
_SOURCE = Path(slime_tandem.__file__).parents[1]
CPU_POOL_TOKENS = 65536
"""KV pool of a fused server on a CPU, as `engine.cache_tokens` is by default; `engine.sglang_args` may give another."""
_PREFLIGHT = """
import json
from importlib import metadata
import torch
try:
    version = metadata.version("sglang")
except metadata.PackageNotFoundError:
    version = None
print(json.dumps({"version": version, "cuda": torch.cuda.is_available()}))
"""


def sglang_python(value: str | None = None) -> str:
    """The Python that has SGLang: `value`, else the environment's SLIME_TANDEM_SGLANG_PYTHON. Raises ConfigError."""
    python = value or os.environ.get(PYTHON_ENV)
    if not python or not os.access(python, os.X_OK):
        raise ConfigError(
            "--sglang-python",
            python,
            f"the Python of an environment with SGLang {' or '.join(KNOWN_VERSIONS)}",
            f"pass --sglang-python or export {PYTHON_ENV}; docs/fused.md says how to make one",
        )
    return python


def preflight(python: str, *, allow_unknown_version: bool = False) -> dict[str, Any]:
    """{"version", "cuda"} of the SGLang in `python`; raises ConfigError for none, or for an unknown version."""
    done = subprocess.run(  # noqa: S603 - the user's own interpreter, no shell
        [python, "-c", _PREFLIGHT], capture_output=True, text=True, check=False, timeout=300
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError(
            "--sglang-python", python, "a Python with torch", done.stderr.strip()[-300:] or "check the path"
        ) from None
    if found["version"] is None:
        raise ConfigError("--sglang-python", python, "a Python with SGLang", "install it (docs/fused.md)")
    if found["version"] not in KNOWN_VERSIONS and not allow_unknown_version:
        raise ConfigError(
            "SGLang version",
            found["version"],
            f"one of {', '.join(KNOWN_VERSIONS)}, on which the tests pass",
            "install one of these, or pass --allow-unknown-version",
        )
    return found


def shared_tables(senior: Path, junior: Path, *, trust_remote_code: bool = False) -> list[frozenset[int]]:
    """Boundary ids of word and sentence in the one tokenizer of two model folders, for a server without a run's settings.

    Raises ModelError for a tokenizer with an id that its model has no row for, TokenizerMismatchError where the two differ.
    """
    from slime_tandem.models.tokenizer import ModelTokenizer, require_rows, require_same_tokenizer  # transformers
    from slime_tandem.rollout.boundaries import boundary_ids
    from slime_tandem.strategies import STRATEGIES

    first, second = (ModelTokenizer.load(folder, trust_remote_code=trust_remote_code) for folder in (senior, junior))
    for tokenizer in (first, second):
        require_rows(tokenizer)
    require_same_tokenizer(first, second)
    named = [name for name, strategy in STRATEGIES.items() if strategy.by_text]
    return [boundary_ids(name, first.tokens.table, first.tokens.special) for name in named]


def write_tables(path: Path, tables: Collection[frozenset[int]], vocab_size: int) -> str:
    """Write boundary tables for the engine: bool [1 + K, V], row 0 empty; returns the file's SHA-256.

    Raises ConfigError for ids outside the vocabulary.
    """
    rows = np.zeros((1 + len(tables), vocab_size), np.bool_)
    for row, ids in zip(rows[1:], tables, strict=True):
        wrong = sorted(i for i in ids if not 0 <= i < vocab_size)[:5]
        if wrong:
            raise ConfigError("boundary ids", wrong, f"ids in [0, {vocab_size})", "correct the list")
        row[list(ids)] = True
    data = io.BytesIO()
    np.save(data, rows, allow_pickle=False)
    path.write_bytes(data.getvalue())
    return hashlib.sha256(data.getvalue()).hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError("model", str(folder), "a folder with a readable config.json", str(error)) from None
    if not isinstance(config, dict):
        raise ModelError("model", str(folder), "an object in config.json", "save the model again")
    return config


def override_args(
    senior: Mapping[str, Any],
    junior: Mapping[str, Any],
    *,
    junior_folder: Path | None,
    tables: Path,
    tables_sha256: str,
    catch_up: Mapping[str, int] | None = None,
    prefill: str = "auto",
) -> dict[str, Any]:
    """The value of SGLang's `--json-model-override-args` for two configs.

    `junior_folder` None: the junior's weights are SGLang's to make up (`--load-format dummy`) or come by name. `catch_up`
    and `prefill` as in `Sglang`. Raises ModelError for a pair that does not fit.
    """
    pair.require_fitting(senior, junior)
    if catch_up is not None:
        pair.require_catching_up(senior)
    kind = senior["model_type"]
    layers = senior["num_hidden_layers"] + junior["num_hidden_layers"]
    args: dict[str, Any] = {
        "architectures": [f"Tandem{pair.ARCHITECTURES[kind]}ForCausalLM"],
        "num_hidden_layers": layers,
        "tandem": {
            "senior_layers": senior["num_hidden_layers"],
            "junior": {k: v for k, v in junior.items() if k not in ("architectures", "auto_map")},
            "junior_folder": None if junior_folder is None else str(junior_folder.resolve()),
            "tables": str(tables.resolve()),
            "tables_sha256": tables_sha256,
            "catch_up": None if catch_up is None else dict(catch_up),
            "prefill": prefill,
        },
    }
    if kind != "llama":
        args |= {"layer_types": ["full_attention"] * layers, "max_window_layers": layers}
    return args


def environment(base: Mapping[str, str], *, cuda: bool) -> dict[str, str]:
    """The environment of the SGLang process: `base` with our source and model package made known to it."""
    env = {**base, "SGLANG_EXTERNAL_MODEL_PACKAGE": MODEL_PACKAGE, "HF_HUB_OFFLINE": "1"}
    # Only our package: this Python's other modules are not SGLang's.
    env["PYTHONPATH"] = os.pathsep.join([str(_SOURCE), *filter(None, [base.get("PYTHONPATH")])])
    if not cuda:
        # Compiling pays on no CPU; several processes share the cores.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def default_flags(*, cuda: bool, context: int | None = None) -> dict[str, str | None]:
    """Flags of `sglang.launch_server` for this kind of device and `pair.context_length`; None: a flag without a value."""
    flags: dict[str, str | None] = {"--sampling-backend": "pytorch", "--grammar-backend": "none"}
    if context is not None:
        flags["--context-length"] = str(context)
    if cuda:
        return {**flags, "--attention-backend": "triton"}
    # An idle scheduler would take a whole core, and the cores are shared; a pool of its own choice takes most of the memory.
    cpu = {
        "--max-total-tokens": str(CPU_POOL_TOKENS),
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--disable-cuda-graph": None,
        "--sleep-on-idle": None,
    }
    return {**flags, **cpu}


def slime_settings(
    senior: Path,
    junior: Path,
    tables: Collection[frozenset[int]],
    folder: Path,
    catch_up: Mapping[str, int] | None = None,
    prefill: str = "auto",
) -> tuple[dict[str, str], list[str]]:
    """(environment, flags of slime's train.py) under which slime's own SGLang servers are fused ones.

    `catch_up` and `prefill` as in `Sglang`. Writes the boundary tables into `folder`, which every node must see under the same
    path, as it must the models. Raises ModelError for a pair that does not fit, ConfigError if `folder` cannot be written.
    """
    configs = read_config(senior), read_config(junior)
    pair.require_fitting(*configs)
    file = folder.resolve() / "tables.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = write_tables(file.with_suffix(".tmp"), tables, configs[0]["vocab_size"])
        os.replace(file.with_suffix(".tmp"), file)
    except OSError as error:
        raise ConfigError("folder of the tables", str(folder), "a folder to write to", str(error)) from None
    override = override_args(
        *configs, junior_folder=junior, tables=file, tables_sha256=digest, catch_up=catch_up, prefill=prefill
    )
    own, flags = slime_sizes(*configs)
    told = ["--hf-checkpoint", str(senior.resolve()), "--sglang-json-model-override-args", json.dumps(override)]
    return own, [*told, *flags]


def slime_sizes(senior: Mapping[str, Any], junior: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """`slime_settings` of a pair known by its sizes alone, for a plan: without what needs the folders (`--hf-checkpoint`,
    `--sglang-json-model-override-args`, boundary tables). Raises ModelError for a pair that does not fit.
    """
    pair.require_fitting(senior, junior)
    own = environment({}, cuda=True)
    flags: list[str] = []
    for flag, value in default_flags(cuda=True, context=pair.context_length(senior, junior)).items():
        flags += [f"--sglang-{flag.removeprefix('--')}", *([] if value is None else [value])]
    # slime's colocation releases weights; it sends the senior again, the junior comes back from this copy only.
    flags.append("--sglang-enable-weights-cpu-backup")
    return {name: own[name] for name in ("SGLANG_EXTERNAL_MODEL_PACKAGE", "PYTHONPATH")}, flags


@dataclass(frozen=True)
class Sglang:
    """Whose SGLang a fused server is, and how it is called beyond `ServeOptions`.

    `python` as `sglang_python` reads it; `allow_unknown_version`: also one on which no test has passed; `args`: further flags
    of `sglang.launch_server`, which come last and win; `catch_up`: the bounds of the engine's catch-up steps (fields of
    `catch_up.Bounds`, {} for its own), None: both models read every sequence in every step; `prefill`: as
    `engine.fused_prefill`.
    """

    python: str | None = None
    allow_unknown_version: bool = False
    args: Sequence[str] = ()
    catch_up: Mapping[str, int] | None = None
    prefill: str = "auto"


_SGLANG = Sglang()


def catch_up_of(attention: str, senior: str | os.PathLike[str]) -> Mapping[str, int] | None:
    """`Sglang.catch_up` for a value of `engine.fused_attention` and the senior's folder.

    Raises ModelError for a folder that is none.

    >>> catch_up_of("catch_up", "anywhere"), catch_up_of("every_step", "anywhere")
    ({}, None)
    """
    if attention == "auto":
        return {} if pair.catches_up(read_config(Path(senior))) else None
    return {} if attention == "catch_up" else None


class FusedServer(ChildServer):
    """A fused SGLang server as a child process.

    `tables` are the boundary sets that requests may name. Of `options` it takes host, port, dtype, threads (OpenMP's, of each
    process), key and trust; ConfigError for others. Raises ConfigError, DataError and ModelError before it starts.
    """

    # SGLang 0.5.15 answers /health by generating a token, after a sleep of a second (http_server.py:633).
    health_timeout_s = 10.0

    def __init__(
        self,
        senior: str | os.PathLike[str],
        junior: str | os.PathLike[str],
        options: ServeOptions = DEFAULT,
        *,
        tables: Sequence[frozenset[int]],
        sglang: Sglang = _SGLANG,
        log_file: str | os.PathLike[str] | None,
        start_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(senior, options, log_file=log_file, start_timeout_s=start_timeout_s)
        options.only("host", "port", "dtype", "threads", "api_key", "trust_remote_code", server="FusedServer")
        options.require_key()
        refuse_key_flags(sglang.args, "engine.sglang_args")
        self.senior, self.junior = Path(senior), Path(junior)
        self._python = sglang_python(sglang.python)
        self._cuda = bool(preflight(self._python, allow_unknown_version=sglang.allow_unknown_version)["cuda"])
        if sglang.prefill == "flashinfer" and not self._cuda:
            raise ConfigError(
                "engine.fused_prefill", sglang.prefill, "auto or triton: FlashInfer needs a GPU", "set it to auto"
            )
        self._tables = list(tables)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._configs = read_config(self.senior), read_config(self.junior)
        pair.require_fitting(*self._configs)
        self._catch_up, self._prefill = sglang.catch_up, sglang.prefill
        for folder in (self.senior, self.junior):
            weight_names(folder)  # SGLang starts with whatever files are there
        self._flags = ["--model-path", str(self.senior), "--host", options.host, "--dtype", options.dtype]
        for flag, value in default_flags(cuda=self._cuda, context=pair.context_length(*self._configs)).items():
            self._flags += [flag] if value is None else [flag, value]
        if options.trust_remote_code:
            self._flags.append("--trust-remote-code")
        self._flags += sglang.args

    def _environment(self) -> Mapping[str, str]:
        base = {**os.environ, "OMP_NUM_THREADS": str(self._options.threads), **self._options.environment()}
        return environment(base, cuda=self._cuda)

    def _command(self) -> list[str]:
        self._port = free_port(self.host, self._port)
        self._folder = tempfile.TemporaryDirectory(prefix="slime-tandem-fused-")
        file = Path(self._folder.name) / "tables.npy"
        digest = write_tables(file, self._tables, self._configs[0]["vocab_size"])
        override = override_args(
            *self._configs,
            junior_folder=self.junior,
            tables=file,
            tables_sha256=digest,
            catch_up=self._catch_up,
            prefill=self._prefill,
        )
        return [
            self._python, "-m", "slime_tandem.engines.fused.main", str(os.getpid()), *self._flags,
            "--json-model-override-args", json.dumps(override), "--port", str(self._port),
        ]  # fmt: skip

    def _find_port(self) -> bool:
        return True

    def stop(self, timeout_s: float = 15.0) -> None:
        """As for every server; its table file goes with it."""
        super().stop(timeout_s)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
