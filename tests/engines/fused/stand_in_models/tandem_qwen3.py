"""The engine's own."""

from slime_tandem.engines.fused.models.tandem_qwen3 import EntryClass

__all__ = ["EntryClass"]
