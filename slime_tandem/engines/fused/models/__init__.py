"""The external model package for `SGLANG_EXTERNAL_MODEL_PACKAGE`: one module per architecture. Imported by SGLang only."""
