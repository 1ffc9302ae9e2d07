#!/usr/bin/env python3
"""What Megatron allocates for weights, gradients and optimizer, beside the estimate of slime_launch/memory.py; needs no GPU.

    scripts/slime/measure_memory.py qwen3-0.6B:1:1 qwen3-0.6B:2:1     # published size : tensor parallel : ranks of the trainer

The real model, buffers of distributed data parallel and distributed optimizer of one rank, as slime 624b824a builds them (bf16,
gradients in float32), on the meta device; other ranks are imagined; a step makes Adam's moments. A JSON object a line, bytes.
"""

import argparse
import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from shim.cpu_device import _CudaIsCpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3Config

from slime_tandem.config import ClusterConfig
from slime_tandem.megatron.weights import transformer_config_from_hf
from slime_tandem.slime_hooks.spec import layer_spec
from slime_tandem.slime_launch.memory import trainer_memory
from slime_tandem.slime_launch.sizes import PUBLISHED


class _OnNothing(_CudaIsCpu):
    """The same for tensors without memory: they, too, say that they are on a GPU, as Megatron's optimizer demands."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out.replace(".meta", "") if func is torch.Tensor.type and isinstance(out, str) else out


def size(tensors):
    """Bytes of the storages that these tensors lie in, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def allocated(arch, tensor_parallel):
    """{part: bytes} of rank 0."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, create_gloo_process_groups=False
    )
    hf = Qwen3Config(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=arch.ffn_size,
        num_hidden_layers=arch.num_layers, num_attention_heads=arch.num_heads, num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_dim, tie_word_embeddings=arch.tied,
    )  # fmt: skip
    config = transformer_config_from_hf(hf)
    config.tensor_model_parallel_size, config.sequence_parallel = tensor_parallel, tensor_parallel > 1
    config.bf16, config.params_dtype = True, torch.bfloat16
    config.add_qkv_bias, config.qk_layernorm = arch.qkv_bias, arch.qk_norm
    with torch.device("meta"):
        model = GPTModel(
            config=config, transformer_layer_spec=layer_spec(None, config), vocab_size=arch.vocab_size,
            max_sequence_length=64, share_embeddings_and_output_weights=arch.tied, position_embedding_type="rope",
        )  # fmt: skip
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False, bucket_size=None
    )
    model = DistributedDataParallel(config, ddp, Float16Module(config, model))
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
    (optimizer,) = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False).chained_optimizers
    masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.optimizer.step()
    moments = [v for state in optimizer.optimizer.state.values() for n, v in state.items() if n.startswith("exp_avg")]
    found = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": size(p.data for p in model.parameters()),
        "gradients": size(p.main_grad for p in model.parameters()),
        "optimizer": size([*masters, *moments]),
    }
    parallel_state.destroy_model_parallel()
    return found


def case_of(text):
    """(architecture, tensor parallel size, ranks) of SIZE:TENSOR_PARALLEL:RANKS; ArgumentTypeError for what cannot be built."""
    name, *numbers = text.split(":")
    if name not in PUBLISHED or len(numbers) != 2 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected SIZE:TENSOR_PARALLEL:RANKS, of {', '.join(PUBLISHED)}")
    arch, tp, world = PUBLISHED[name], *map(int, numbers)
    if world % tp or any(n % tp for n in (arch.num_heads, arch.num_kv_heads, arch.ffn_size, arch.vocab_size)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a tensor parallel size that divides ranks, heads and vocabulary"
        )
    return text, arch, tp, world


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="+", type=case_of, help="SIZE:TENSOR_PARALLEL:RANKS")
    for case, arch, tp, world in parser.parse_args().case:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        torch.cuda.current_device = lambda: torch.device("meta")
        with _OnNothing():
            found = allocated(arch, tp)
        dist.destroy_process_group()
        estimate = trainer_memory(arch, ClusterConfig(tensor_parallel=tp), world)
        ratio = {part: round(value / getattr(estimate, part), 5) for part, value in found.items()}
        print(json.dumps({"case": case, "allocated": found, "to_estimate": ratio}), flush=True)


if __name__ == "__main__":
    main()
