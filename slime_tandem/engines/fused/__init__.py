"""Senior and junior inside one unpatched SGLang engine: every step decodes both and keeps the author's logits.

This package is imported by SGLang's own Python too, where only SGLang and its dependencies are installed.
"""
