"""Distillation: token bytes, byte-exact alignment, teacher scoring."""
