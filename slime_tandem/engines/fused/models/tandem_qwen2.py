"""Two Qwen2 models in one engine."""

from __future__ import annotations

from sglang.srt.models.qwen2 import Qwen2ForCausalLM

from slime_tandem.engines.fused.model import TandemModel


class TandemQwen2ForCausalLM(TandemModel, Qwen2ForCausalLM):  # type: ignore[misc]
    """The senior is the module itself, with plain Hugging Face weight names; the junior is `tandem_junior`."""

    single = Qwen2ForCausalLM


EntryClass = TandemQwen2ForCausalLM
