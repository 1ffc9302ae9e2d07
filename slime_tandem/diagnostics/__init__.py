"""Fixed contexts, scored before and after training: what training did where a teacher disagreed (docs/diagnostics.md).

Needs the extra `diagnostics` (pandas, pyarrow, statsmodels).
"""
