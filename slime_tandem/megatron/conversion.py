"""Checkpoints between Hugging Face folders and Megatron's `torch_dist`: `slime-tandem convert`, tools/convert_checkpoint.py.

Dense llama, qwen2 and qwen3 (`megatron.weights`), bit for bit and in the dtype they come in. Weights pass one at a time: memory
holds one Megatron parameter with its sources on the way to Megatron, one output file on the way back. Files are made in a
hidden folder beside the output with a record of what is done, so that a stopped conversion goes on; the output appears whole.

Towards Megatron the output is laid out as Megatron's `--load` wants it: `latest_checkpointed_iteration.txt` (release) and
`release/`. Names are those of `megatron.torch_dist`, which slime's standard Transformer Engine spec and Megatron's local spec
read alike.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_tandem.errors import CheckpointError, ConfigError, ModelError
from slime_tandem.files import read_json, record_of, resolved, whole_file
from slime_tandem.megatron.architecture import Architecture, architecture_of, hf_shapes, load_hf_config
from slime_tandem.megatron.checkpoint import disk_is_full, file_sha256, fsync, load_sharded
from slime_tandem.megatron.core import GPTModel, ensure_initialized
from slime_tandem.megatron.policy import COMPANIONS, MegatronPolicy, described_parameters
from slime_tandem.megatron.recorded import KEY, differences, recorded, untold, with_told
from slime_tandem.megatron.torch_dist import (
    TRACKER,
    Piece,
    TorchDistReader,
    find_torch_dist,
    finish_folder,
    write_pieces,
)
from slime_tandem.megatron.weights import (
    build_model,
    check_names_and_shapes,
    hf_recipes,
    megatron_recipes,
)
from slime_tandem.models.hf import load_model, read_model_config
from slime_tandem.models.weight_files import hf_weight_files, require_listed, require_once

Say = Callable[[str], None]
_MOE_HINTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ITEM_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The same: what is carried over bit for bit. Anything else (8 bits, integers) means nothing without scales beside it."""
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
VERIFY_NATS = 1e-3
"""Largest difference of log-probs, in nats, between both sides that `--verify` takes for rounding (float32, other kernels)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion. `like`: the Hugging Face folder with config and tokenizer, needed towards Hugging Face.

    `max_file_bytes`: where a file of the output ends (a single larger weight has a file of its own).
    """

    source: Path
    output: Path
    like: Path | None = None
    force: bool = False
    max_file_bytes: int = 4 * 2**30


def require_one_checkpoint(source: Path) -> None:
    """Raise ConfigError, with one of them, for a folder of a run's checkpoints."""
    steps = sorted(p for p in source.glob("step-[0-9]*") if find_torch_dist(p) is not None)
    if steps and find_torch_dist(source) is None and not (source / "config.json").is_file():
        expected = "one checkpoint; this folder holds a run's"
        raise ConfigError("source", str(source), expected, f"name one, e.g. {steps[-1]}")


def convert(job: Job, say: Say = print) -> tuple[Path, Path]:
    """Convert in the direction that the source asks for; returns the (Hugging Face, torch_dist) folders.

    Raises ConfigError for an output that exists, ModelError and CheckpointError for what cannot be converted.
    """
    _check_output(job)
    require_one_checkpoint(job.source)
    inner = find_torch_dist(job.source)
    if inner is None:
        if job.like is not None:
            raise ConfigError(
                "--like",
                str(job.like),
                "no such flag with a Hugging Face source, which has its own config",
                "leave it out",
            )
        return job.source, _to_torch_dist(job, say)
    if job.like is None:
        raise ConfigError(
            "--like",
            None,
            "the Hugging Face folder with config.json and tokenizer of this model",
            "name the one it came from",
        )
    return _to_hf(job, inner, say), inner


def _check_output(job: Job) -> None:
    """Refuse an output that cannot take a folder's place, or whose replacement would delete what is read."""
    output = job.output
    if output.name in ("", ".."):
        raise ConfigError("output", str(output), "a path that ends in a name", "name a new folder")
    place = resolved(output, "output")
    for flag, folder in (("source", job.source), ("--like", job.like)):
        if folder is not None and place in ((read := resolved(folder, flag)), *read.parents):
            raise ConfigError("output", str(output), f"a folder that does not hold {flag} {folder}", "choose another")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ConfigError("output", str(output), "a folder, no link and no file", "choose another, or remove this one")
    if output.exists() and not job.force:
        raise ConfigError("output", str(output), "a path that does not exist yet", "choose another, or pass --force")


class HfWeights:
    """The weights of a Hugging Face folder, read one at a time. Raises ModelError as `load_hf_folder` does."""

    def __init__(self, folder: Path) -> None:
        self.files, listed = hf_weight_files(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """As safetensors names them."""
        self.sizes: dict[str, int] = {}
        """Bytes of each weight."""
        self._file: dict[str, Path] = {}
        for file in self.files:
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    require_once(file, name, self._file)
                    stored = weights.get_slice(name)
                    self.shapes[name] = tuple(stored.get_shape())
                    self.dtypes[name] = stored.get_dtype()
                    self.sizes[name] = _count(self.shapes[name]) * _ITEM_SIZES.get(stored.get_dtype(), 4)
                    self._file[name] = file
        require_listed(folder, listed, self.shapes)

    def read(self, name: str) -> torch.Tensor:
        """One weight, on the CPU."""
        with _opened(self._file[name]) as weights:
            tensor: torch.Tensor = weights.get_tensor(name)
        return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise ModelError(str(file), str(error), "a whole safetensors file", "fetch it anew") from error


def _not_finite(tensor: torch.Tensor) -> str:
    """What a weight has that no model computes with; "" for none. A run that diverged saves such weights."""
    broken = tensor.numel() - int(tensor.isfinite().sum())
    return f"{broken} of {tensor.numel()} values NaN or infinite" if broken else ""


def _to_torch_dist(job: Job, say: Say) -> Path:
    arch = _architecture(job.source)
    weights = HfWeights(job.source)
    shapes = {n: s for n, s in weights.shapes.items() if not n.endswith("rotary_emb.inv_freq")}
    if arch.tied and "lm_head.weight" in shapes:
        del shapes["lm_head.weight"]
        if not torch.equal(weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight")):
            raise ModelError(
                "config.json tie_word_embeddings",
                True,
                "lm_head.weight equal to model.embed_tokens.weight",
                "set it to false",
            )
    check_names_and_shapes(shapes, hf_shapes(arch))
    recipes = megatron_recipes(arch)
    for name, recipe in recipes.items():  # before anything is written
        kinds = sorted({weights.dtypes[source] for source in recipe.sources})
        if not set(kinds) <= set(_ITEM_SIZES):
            expected = f"one of {', '.join(_ITEM_SIZES)}, which are carried over bit for bit"
            raise ModelError(f"dtype of {recipe.sources[0]}", kinds, expected, "save the model in bfloat16 first")
        if len(kinds) > 1:
            raise ModelError(f"weights of {name}", kinds, "one dtype, they become one tensor", "cast the model first")

    def make(name: str) -> torch.Tensor:
        tensor = recipes[name].make([weights.read(source) for source in recipes[name].sources])
        if broken := _not_finite(tensor):
            named = f"weights of {name} ({', '.join(recipes[name].sources)})"
            raise ModelError(named, broken, "finite values", "fetch or save the model again")
        return tensor

    sizes = {name: sum(weights.sizes[source] for source in recipe.sources) for name, recipe in recipes.items()}
    groups = {f"__{n}_0.distcp": names for n, names in enumerate(_grouped(sizes, job.max_file_bytes))}
    with _Work(job, "torch_dist", [*weights.files, job.source / "config.json"], say) as work:
        inner = work.folder / "release"
        inner.mkdir(exist_ok=True)
        pieces: dict[str, list[Piece]] = {}
        for file, names in groups.items():
            if (found := work.done(f"release/{file}")) is not None:
                pieces[file] = [Piece(**{**p, "shape": tuple(p["shape"])}) for p in found]
                continue
            pieces[file] = write_pieces(inner / file, names, make)
            work.finished(f"release/{file}", [asdict(piece) for piece in pieces[file]])
        finish_folder(inner, pieces, arch.num_layers, _common(arch))
        (work.folder / TRACKER).write_text("release", encoding="utf-8")
    return job.output / "release"


def _to_hf(job: Job, inner: Path, say: Say) -> Path:
    assert job.like is not None
    arch = _architecture(job.like)
    reader = TorchDistReader(inner)
    recipes, shapes = hf_recipes(arch), hf_shapes(arch)
    _require_the_function_of(arch, inner, job.like, say)
    padded = _require_weights_of(arch, reader, job.like, say)

    cached: dict[str, torch.Tensor] = {}

    def parameter(name: str) -> torch.Tensor:
        if name not in cached:  # q, k, v and gate, up come from one parameter: read once, one held
            cached.clear()
            tensor = reader.read(name)
            cached[name] = tensor[: arch.vocab_size] if name in padded else tensor
        return cached[name]

    def make(name: str) -> torch.Tensor:
        tensor = recipes[name].make([parameter(source) for source in recipes[name].sources])
        if broken := _not_finite(tensor):
            raise CheckpointError(
                f"weights of {name} in {inner}", broken, "finite values", "convert an earlier checkpoint of the run"
            )
        return tensor.clone(memory_format=torch.contiguous_format)

    dtypes = {name: reader.dtype(recipe.sources[0]) for name, recipe in recipes.items()}
    if strange := [name for name, dtype in dtypes.items() if dtype not in _DTYPES]:
        found, expected = f"{dtypes[strange[0]]} of {strange[0]}", ", ".join(map(str, _DTYPES))
        raise CheckpointError(f"checkpoint {inner}", found, f"one of {expected}", "save it in bfloat16")
    sizes = {name: _count(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    groups = _grouped(sizes, job.max_file_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    with _Work(job, "huggingface", [p for p in inner.iterdir() if p.is_file()], say) as work:
        for file, group in zip(names, groups, strict=True):
            if work.done(file) is None:
                tensors = {name: make(name) for name in group}
                check_names_and_shapes({n: tuple(t.shape) for n, t in tensors.items()}, {n: shapes[n] for n in group})
                save_file(tensors, work.folder / file, metadata={"format": "pt"})
                del tensors
                work.finished(file, [])
        if len(groups) > 1:
            weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            _write_json(work.folder / "model.safetensors.index.json", index)
        _write_companions(work.folder, job.like, dtypes["model.embed_tokens.weight"])
    return job.output


def _require_the_function_of(arch: Architecture, inner: Path, like: Path, say: Say) -> None:
    """Refuse a `like` that computes another function from the same shapes; say what the checkpoint does not tell."""
    told = recorded(inner)
    for name, theirs, ours in differences(arch, told):
        field = f"checkpoint {inner} {name}"
        raise CheckpointError(field, theirs, f"{ours!r}, as in {like}", "name the model that it came from with --like")
    if missing := untold(told):
        say(f"not compared with {like}: {', '.join(missing)}, of which the checkpoint says nothing")


def _require_weights_of(arch: Architecture, reader: TorchDistReader, like: Path, say: Say) -> frozenset[str]:
    """Refuse a checkpoint of another architecture than `like`'s; returns the parameters that may have rows behind its ids."""
    megatron, field = megatron_recipes(arch), f"checkpoint {reader.folder}"
    unknown = [k for k in reader.keys if k not in reader.used_keys(megatron)]
    optimizer = [key for key in unknown if key.startswith(("optimizer.", "chained_"))]
    if len(optimizer) < len(unknown):
        left = sorted(set(unknown) - set(optimizer))
        found = f"{len(left)} tensors: {', '.join(left[:3])}"
        raise CheckpointError(field, found, f"only weights of {like}", "check --like")
    if unknown or reader.others:
        say(f"left out: {len(unknown)} tensors of the optimizer, {len(reader.others)} pickled objects (states)")
    layers = reader.layers("decoder.layers.0.mlp.linear_fc2.weight")
    if layers not in (None, arch.num_layers):
        raise CheckpointError(field, f"{layers} layers", f"{arch.num_layers}, as in {like}", "check --like")
    padding = {name: reader.shape(name)[0] - arch.vocab_size for name in _EMBEDDINGS if name in megatron}
    if any(extra < 0 for extra in padding.values()):
        raise CheckpointError(field, padding, f"{arch.vocab_size} rows of vocabulary", "check --like")
    if any(padding.values()):
        say(f"left out: {max(padding.values())} rows behind the vocabulary (Megatron's padding)")
    return frozenset(padding)


def _write_companions(folder: Path, like: Path, dtype: torch.dtype) -> None:
    """`like`'s config, with the dtype of the weights, and its tokenizer's files."""
    config = read_model_config(like)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    for name in COMPANIONS:
        if (like / name).is_file():
            shutil.copyfile(like / name, folder / name)


def _common(arch: Architecture) -> dict[str, Any]:
    # What Megatron's load_checkpoint asks of common.pt, and slime's tools/convert_torch_dist_to_hf.py of its `args`.
    args = Namespace(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        group_query_attention=arch.num_kv_heads != arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        max_position_embeddings=arch.max_positions,
        vocab_size=arch.vocab_size,
        padded_vocab_size=arch.vocab_size,
        untie_embeddings_and_output_weights=not arch.tied,
        num_experts=None,
        q_lora_rank=None,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": metadata,
        KEY: arch.as_json(),
    }


def _architecture(folder: Path) -> Architecture:
    config = load_hf_config(folder)
    for name in _MOE_HINTS:
        if getattr(config, name, None):
            raise ModelError(
                f"config.json {name}",
                getattr(config, name),
                "a dense model: experts are converted by slime's own tools only",
                "set SLIME_DIR to a checkout of slime and pass --model-args FILE",
            )
    return architecture_of(config)


def is_moe(folder: Path) -> bool:
    """Whether a Hugging Face folder holds a mixture of experts."""
    config = read_model_config(folder)
    return any(config.get(name) for name in _MOE_HINTS)


def needs_slime(job: Job) -> bool:
    """Whether the job's model is a mixture of experts, which slime's own converter takes (`slime_command`), not `convert`.

    Raises ConfigError for a source that is no single checkpoint, ModelError for a folder without a readable config.json.
    """
    require_one_checkpoint(job.source)
    back = find_torch_dist(job.source) is not None
    return is_moe(job.like if back and job.like is not None else job.source)


def slime_command(job: Job, slime: Path | None, model_args: Sequence[str]) -> list[str]:
    """The command of slime's own converter for a mixture of experts, from a checkout with what it needs installed.

    Raises ConfigError where the checkout, Megatron or the model's flags are missing.
    """
    _check_output(job)
    back = find_torch_dist(job.source)
    tool = (
        (slime or Path("SLIME_DIR"))
        / "tools"
        / ("convert_torch_dist_to_hf.py" if back else "convert_hf_to_torch_dist.py")
    )
    missing = [name for name in ("megatron.training", "slime") if not _found(name)]
    if slime is None or not tool.is_file() or missing:
        problem = f"{tool}, missing: {', '.join(missing) or 'the tool'}"
        raise ConfigError(
            "mixture of experts",
            problem,
            "slime's converter with slime and Megatron-LM on PYTHONPATH",
            "set SLIME_DIR and PYTHONPATH",
        )
    if back:
        return [
            sys.executable,
            str(tool),
            "--input-dir",
            str(back),
            "--output-dir",
            str(job.output),
            "--origin-hf-dir",
            str(job.like),
        ]
    if not model_args:
        raise ConfigError(
            "--model-args", None, "the model's Megatron flags", "name slime's scripts/models/*.sh of this model"
        )
    return [sys.executable, str(tool), *model_args, "--hf-checkpoint", str(job.source), "--save", str(job.output)]


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class _Told(BaseModel):
    """A `Piece`."""

    model_config = ConfigDict(extra="forbid")
    parameter: str
    shape: list[Annotated[int, Field(ge=0)]]
    dtype: str
    offset: int = Field(ge=0)
    length: int = Field(ge=1)


class _Done(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sha256: str
    told: list[_Told]


class _Record(BaseModel):
    """`progress.json`: what is converted, and the files that are finished."""

    model_config = ConfigDict(extra="forbid")
    plan: list[Any]
    done: dict[str, _Done]


class _Work:
    """The hidden folder in which an output is made, with a record of finished files; takes the output's place at the end."""

    def __init__(self, job: Job, kind: str, sources: Iterable[Path], say: Say) -> None:
        self._job, self._say = job, say
        self.folder = job.output.with_name(f".{job.output.name}.converting")
        stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(sources)]
        like = None if job.like is None else str(job.like.resolve())
        plan = [kind, str(job.source.resolve()), like, job.max_file_bytes, stats]
        self._record: dict[str, Any] = {"plan": json.loads(json.dumps(plan)), "done": {}}
        self._lock = FileLock(job.output.with_name(f".{job.output.name}.lock"))

    def __enter__(self) -> _Work:
        try:
            self._job.output.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                "output",
                str(self._job.output),
                "an output that no other conversion is writing",
                "wait for it, or choose another",
            ) from None
        except OSError as error:
            raise ConfigError.of_os_error(self._job.output, error) from None
        try:
            old = record_of(_Record, read_json(self._file))
        except (OSError, ValueError):  # not ours, or damaged: begun anew
            old = None
        if old is not None and old.plan == self._record["plan"]:
            self._record = old.model_dump()
        else:
            if self.folder.exists():
                self._say(f"starting anew: {self.folder} was made from another source or with other settings")
                shutil.rmtree(self.folder)
            self.folder.mkdir()
            self._save()
        return self

    @property
    def _file(self) -> Path:
        return self.folder / "progress.json"

    def _save(self) -> None:
        with whole_file(self._file) as file:
            _write_json(file, self._record)

    def done(self, file: str) -> list[dict[str, Any]] | None:
        """What was noted of a file that is finished and undamaged; None for any other."""
        entry = self._record["done"].get(file)
        path = self.folder / file
        if entry is None or not path.is_file() or file_sha256(path) != entry["sha256"]:
            return None
        self._say(f"{file}: there already")
        notes: list[dict[str, Any]] = entry["told"]
        return notes

    def finished(self, file: str, notes: list[dict[str, Any]]) -> None:
        """Record a file as finished."""
        fsync(self.folder / file)
        self._record["done"][file] = {"sha256": file_sha256(self.folder / file), "told": notes}
        self._save()
        self._say(f"{file}: {(self.folder / file).stat().st_size / 2**20:,.1f} MiB")

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                self._take_place()
            elif isinstance(error, OSError):
                raise CheckpointError.of_os_error(self.folder, error) from error
            elif isinstance(error, SafetensorError) or "inline_container" in str(error) or disk_is_full(self.folder):
                # What safetensors and torch's writer make of a full disk, or anything else on one.
                reason = str(error).splitlines()[0]
                raise CheckpointError(
                    str(self.folder), reason, "a disk that takes the files", "free space; the same command goes on"
                ) from error
            elif self._record["done"]:
                error.add_note(f"what is done is kept in {self.folder}: the same command goes on from there")
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self._lock.release()

    def _take_place(self) -> None:
        """The finished folder becomes the output. A kill at any point leaves what the same command can finish.

        The record goes last: until then a new run finds every file done and comes here again.
        """
        output = self._job.output
        replaced = output.with_name(f".{output.name}.replaced")
        if output.exists():
            if replaced.exists():  # of a run that was killed while it removed it
                shutil.rmtree(replaced)
            output.rename(replaced)
        self.folder.rename(output)
        fsync(output.parent)
        (output / self._file.name).unlink()
        if replaced.exists():
            shutil.rmtree(replaced)


def _grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut before a group would pass `limit` bytes.

    >>> _grouped({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        if not groups or total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def verify(hf: Path, torch_dist: Path, *, by_megatron: bool, say: Say = print) -> float:
    """Largest difference of log-probs, in nats, between transformers on `hf` and Megatron's GPTModel on `torch_dist`.

    Both float32, on 2 x 48 ids, each side by its own config: the Hugging Face folder by its config.json, the other by what it
    states itself (`recorded`; where it states nothing, by that config.json, and that is said). `by_megatron`: Megatron itself
    loads the folder; else `TorchDistReader` reads it (one whose `common.pt` holds objects that only a Megatron installation
    can unpickle). Needs the memory of both models. Raises
    CheckpointError above `VERIFY_NATS`.
    """
    model = load_model(hf)
    arch = architecture_of(model.config)
    ids = torch.randint(arch.vocab_size, (2, min(48, arch.max_positions)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference = model(ids).logits.log_softmax(-1)
    ensure_initialized(seed=0)
    told = recorded(torch_dist)
    own = with_told(model.config, told)
    policy = MegatronPolicy(build_model(own), own, hf, None)
    _fill(policy.model, torch_dist, arch, by_megatron=by_megatron)
    with torch.no_grad():
        logits = policy.logits(ids)
    difference = float((logits.log_softmax(-1) - reference).abs().max())
    if not math.isfinite(difference):
        expected = "finite log-probs of both checkpoints"
        raise CheckpointError("--verify", difference, expected, f"look for NaN or infinite weights in {hf}")
    if difference > VERIFY_NATS:
        raise CheckpointError(
            "--verify",
            difference,
            f"at most {VERIFY_NATS} nats between both checkpoints",
            "report this, do not use them",
        )
    say(f"verified: log-probs differ by at most {difference:.1e} nats on {ids.numel()} tokens")
    if missing := untold(told):
        say(f"taken from {hf} on both sides: {', '.join(missing)}, of which {torch_dist} says nothing")
    return difference


def _fill(model: GPTModel, folder: Path, arch: Architecture, *, by_megatron: bool) -> None:
    reader = TorchDistReader(folder)  # also the check that `.metadata`, a pickle, holds nothing but an index
    if by_megatron:
        with torch.serialization.safe_globals([Namespace]):
            loaded = load_sharded({"model": described_parameters(model)}, folder)["model"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = loaded[name] if by_megatron else reader.read(name)
            parameter.copy_(tensor[: arch.vocab_size] if name in _EMBEDDINGS else tensor)
