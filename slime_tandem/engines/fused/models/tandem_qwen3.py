"""Two Qwen3 models in one engine."""

from __future__ import annotations

from sglang.srt.models.qwen3 import Qwen3ForCausalLM

from slime_tandem.engines.fused.model import TandemModel


class TandemQwen3ForCausalLM(TandemModel, Qwen3ForCausalLM):  # type: ignore[misc]
    """The senior is the module itself, with plain Hugging Face weight names; the junior is `tandem_junior`."""

    single = Qwen3ForCausalLM


EntryClass = TandemQwen3ForCausalLM
