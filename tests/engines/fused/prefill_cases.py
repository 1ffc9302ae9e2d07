"""Run by test_prefill_graph.py in SGLang's Python: the replay of a prefill graph, played without a GPU."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import flashinfer_stand_in
import torch

from slime_tandem.engines.fused import prefill_attention, prefill_graph
from slime_tandem.engines.fused.flashinfer_prefill import Heads
from slime_tandem.engines.fused.model import refuse_unsupported, stack_junior
from slime_tandem.errors import ConfigError


def replay(broken: bool) -> Any:
    """As SGLang does: a batch built anew goes to the model, an output built anew comes back."""
    live, static = SimpleNamespace(rids=["a"]), SimpleNamespace(rids=None)

    def execute(self: Any, batch: Any, **kwargs: Any) -> Any:
        assert kwargs == {"more": 1}
        assert prefill_graph.scheduled(static).rids == ["a"]
        prefill_graph.keep(SimpleNamespace(customized_info={"codes": 7}))
        if broken:
            raise RuntimeError("no replay")
        return SimpleNamespace(customized_info=None)

    return prefill_graph._execute(execute, None, live, more=1)


assert replay(broken=False).customized_info == {"codes": 7}
try:
    replay(broken=True)
except RuntimeError:
    pass
else:
    raise AssertionError("hides an error")
plain = SimpleNamespace(rids=["b"], customized_info={"codes": 1})
assert prefill_graph.scheduled(plain) is plain, "what is not replayed is its own batch, after an error too"
prefill_graph.keep(plain)


class Layers(torch.nn.Module):
    """The loop of SGLang's models over their own layers."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in factors])
        self.end_layer = len(factors)
        for layer, factor in zip(self.layers, factors, strict=True):
            torch.nn.init.constant_(layer.weight, factor)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        for i in range(self.end_layer):
            x = self.layers[i](x)
        return x


senior, junior = Layers([2.0, 3.0]), Layers([5.0])
names = [name for name, _ in senior.named_parameters()]
stack_junior(senior, junior)
x = torch.ones(1, 1)
assert [float(y) for y in senior(x, x, None)] == [6.0, 5.0], "each runs its own layers"
assert [float(layer.weight) for layer in senior.layers] == [2.0, 3.0, 5.0], "in the order of the KV layers"
assert [name for name, _ in senior.named_parameters()] == names, (
    "weights keep their names, and the junior is no submodule"
)

own = dict.fromkeys(("enable_mixed_chunk", "enable_streaming_session", "enable_deterministic_inference"), True)
own |= {"attention_backend": "fa3", "dcp_size": 2, "kv_cache_dtype": "fp8_e5m2", "enable_unified_memory": True}
own |= {"enable_return_hidden_states": True}
args = SimpleNamespace(pp_size=1, enable_memory_saver=False, device="cuda", **own)
refuse_unsupported(args)
told = ""
try:
    refuse_unsupported(args, catch_up=True)
except ConfigError as error:
    told = str(error)
assert all(name in told for name in own), told
kept = SimpleNamespace(
    pp_size=1, enable_memory_saver=False, device="cpu", attention_backend="torch_native", kv_cache_dtype="auto"
)
refuse_unsupported(kept, catch_up=True)

# Who prefills: FlashInfer only under settings and for heads that it takes, and only if a trial of it comes out right.
gpu = {"device": "cuda", "attention_backend": "triton", "prefill_attention_backend": None, "kv_cache_dtype": "auto"}
half, large = torch.bfloat16, Heads(32, 8, 128, 0.1)
unfit: Any = prefill_attention._unfit
assert unfit(SimpleNamespace(**gpu), [large, Heads(16, 8, 128, 0.1)], half, False) is None
for setting, word in (
    ({"device": "cpu"}, "cpu"),
    ({"attention_backend": "fa3"}, "fa3"),
    ({"prefill_attention_backend": "fa3"}, "fa3"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "quantized"),
    ({"enable_deterministic_inference": True}, "enable_deterministic_inference"),
    ({"enable_unified_memory": True}, "enable_unified_memory"),
    ({"dcp_size": 2}, "dcp_size"),
):
    assert word in unfit(SimpleNamespace(**{**gpu, **setting}), [large], half, False), setting
assert "float32" in unfit(SimpleNamespace(**gpu), [large], torch.float32, False)
assert "quantized" in unfit(SimpleNamespace(**gpu), [large], half, True)
assert "80" in unfit(SimpleNamespace(**gpu), [Heads(32, 8, 80, 0.1)], half, False)
assert "128 heads" in unfit(SimpleNamespace(**gpu), [Heads(128, 8, 128, 0.1)], half, False)

layers = [SimpleNamespace(tp_q_head_num=n, tp_k_head_num=2, qk_head_dim=64, scaling=0.125) for n in (4, 4, 2)]
told = SimpleNamespace(**{**gpu, "device": "cpu"})
for wanted in ("auto", "triton"):
    assert prefill_attention.choose(wanted, told, layers, half, False) is None
refused = ""
try:
    prefill_attention.choose("flashinfer", told, layers, half, False)
except ConfigError as error:
    refused = str(error)
assert "engine.fused_prefill" in refused and "cpu" in refused, "starts without what was asked for"  # noqa: PT018
sys.modules["flashinfer"] = flashinfer_stand_in  # type: ignore[assignment]
heads = [Heads(n, 2, 64, 0.125) for n in (4, 4, 2)]
prefill_attention._try(heads, torch.float32, torch.device("cpu"))
merge, flashinfer_stand_in.merge_state_in_place = flashinfer_stand_in.merge_state_in_place, lambda *_: None  # type: ignore[assignment]
try:
    prefill_attention._try(heads, torch.float32, torch.device("cpu"))
except ArithmeticError:
    flashinfer_stand_in.merge_state_in_place = merge
else:
    raise AssertionError("a wrong kernel passes")
print("all cases hold")
