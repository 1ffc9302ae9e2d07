"""Junior and teachers on a card of the trainer's: servers of SGLang beside the job, which the launch script starts and stops.

slime gives every model GPUs of its own; a job of one or two cards has none to give. Frozen models then get servers that share
the last GPU of the machine, with a bounded part of it each, and the job asks them by their URLs, as it asks any server.
Here is which servers, with which flags, and whether all that is on a card fits on it. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_tandem.config import ClusterConfig, RunConfig, ServedModel
from slime_tandem.errors import ConfigError
from slime_tandem.slime_launch.layout import JUNIOR, TEACHER, junior_model, serving_of, teacher_models
from slime_tandem.slime_launch.memory import (
    GIB,
    RESERVED,
    EngineMemory,
    TrainerMemory,
    engine_memory,
)
from slime_tandem.slime_launch.served import Served

PREFILL = 2048
"""Most tokens of a prefill of a side server: what it computes at once stays small beside the trainer."""


@dataclass(frozen=True, slots=True)
class Side:
    """One server beside the job. `name`: its role or teacher; `gpu`: of the machine, shared; `fraction`: of that GPU, for
    weights and KV cache."""

    name: str
    model: str
    port: int
    gpu: int
    fraction: float
    serving: ServedModel

    @property
    def url(self) -> str:
        """Where the job finds it."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Words of the shell that start it; the variable SLIME_PYTHON is the Python of the job."""
        how = self.serving
        words = ["env", f"CUDA_VISIBLE_DEVICES={self.gpu}", "$SLIME_PYTHON", "-m", "sglang.launch_server"]
        words += ["--model-path", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        words += [
            "--mem-fraction-static",
            f"{how.mem_fraction or self.fraction:g}",
            "--chunked-prefill-size",
            str(PREFILL),
        ]
        for flag, value in (
            ("dtype", how.dtype), ("quantization", how.quantization), ("context-length", how.context_length),
        ):  # fmt: skip
            words += [f"--{flag}", str(value)] if value is not None else []
        return [*words, *(["--disable-cuda-graph"] if how.enforce_eager else [])]


def beside(config: RunConfig) -> tuple[RunConfig, tuple[Side, ...]]:
    """(the configuration with their URLs, the servers); nothing without `cluster.side_servers`.

    Raises ConfigError for a job of several machines, which would all need them at one address.
    """
    c = config.cluster
    frozen = {**junior_model(config), **teacher_models(config)} if c.side_servers else {}
    if not frozen:
        return config, ()
    if c.nodes > 1:
        expected = "false with several machines: give junior and teachers GPUs, or servers of your own"
        raise ConfigError("cluster.side_servers", True, expected, "set it to false, or cluster.nodes=1")
    sides = tuple(
        Side(name, model, c.side_port + i, c.gpus_per_node - 1, c.side_fraction, serving_of(config, name)[1])
        for i, (name, model) in enumerate(frozen.items())
    )
    urls = {side.name: side.url for side in sides}
    engine = {f"{name}_url": urls[name] for name in (JUNIOR, TEACHER) if name in urls and not _named(config, name)}
    teachers = tuple(t.model_copy(update={"url": urls.get(t.name, t.url)}) for t in config.opd.teachers)
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update=engine),
            "opd": config.opd.model_copy(update={"teachers": teachers}),
        }
    ), sides


def _named(config: RunConfig, name: str) -> bool:
    return any(teacher.name == name for teacher in config.opd.teachers)


def check_sides(
    config: RunConfig,
    sides: Sequence[Side],
    models: Mapping[str, Served],
    trainer: TrainerMemory,
    actor: EngineMemory,
    *,
    trains: bool,
    writes: bool,
) -> list[str]:
    """A line for each side server and one for their GPU; GiB. `trains`, `writes`: whether that GPU is also the trainer's, the
    senior's. Raises ConfigError where they do not fit on it together."""
    c = config.cluster
    lines, total = [], 0
    for side in sides:
        engine = engine_memory([models[side.name]], 1, c, side.serving.mem_fraction or side.fraction)
        wanted = config.sampling.max_new_tokens
        if engine.kv_tokens < wanted:
            share = (side.serving.mem_fraction or side.fraction) * c.gpu_memory_gib
            expected = (
                f"at least sampling.max_new_tokens={wanted}; weights take {engine.weights / GIB:.1f} of {share:.1f} GiB"
            )
            raise ConfigError(
                f"KV cache of {side.name}, tokens", engine.kv_tokens, expected, f"raise {_fraction_of(config, side)}"
            )
        total += engine.process()
        lines.append(
            f"{side.name}: beside the job on GPU {side.gpu}, {side.url}, {side.model}: {engine.process() / GIB:.1f} GiB "
            f"({engine.kv_tokens:,} tokens)"
        )
    return [*lines, _card_line(c, total, trainer, actor, trains=trains, writes=writes)]


def _fraction_of(config: RunConfig, side: Side) -> str:
    if side.serving.mem_fraction is None:
        return "cluster.side_fraction"
    return f"{serving_of(config, side.name)[0]}.mem_fraction"


def _card_line(
    c: ClusterConfig, sides: int, trainer: TrainerMemory, actor: EngineMemory, *, trains: bool, writes: bool
) -> str:
    training = trainer.total + RESERVED if trains else 0
    writing = actor.process() if writes else 0
    # In turns, slime takes the one off the card while the other works; what stays of it is in the reserves.
    shared = max(training, writing) if c.colocate else training + writing
    room = int(c.gpu_memory_gib * GIB)
    if sides + shared > room:
        parts = f"side servers {sides / GIB:.1f}, trainer {training / GIB:.1f}, senior {writing / GIB:.1f}"
        remedy = (
            "lower cluster.mem_fraction, side_fraction or max_tokens_per_gpu, set cluster.recompute, or take more GPUs"
        )
        expected = f"at most {c.gpu_memory_gib:g}: {parts}"
        raise ConfigError("memory of the shared GPU, GiB", round((sides + shared) / GIB, 1), expected, remedy)
    turns = " in turns" if c.colocate and trains and writes else ""
    return (
        f"that GPU: side servers {sides / GIB:.1f}, trainer {training / GIB:.1f}, senior {writing / GIB:.1f}{turns}: "
        f"{(sides + shared) / GIB:.1f} GiB of {c.gpu_memory_gib:g}"
    )
