"""Two Llama models in one engine."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM

from slime_tandem.engines.fused.model import TandemModel


class TandemLlamaForCausalLM(TandemModel, LlamaForCausalLM):  # type: ignore[misc]
    """The senior is the module itself, with plain Hugging Face weight names; the junior is `tandem_junior`."""

    single = LlamaForCausalLM


EntryClass = TandemLlamaForCausalLM
