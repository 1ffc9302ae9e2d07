"""The model folders of tests/engines."""

from ..engines.conftest import folders, model_copy

__all__ = ["folders", "model_copy"]
