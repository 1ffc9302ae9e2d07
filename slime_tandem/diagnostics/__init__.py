"""Fixed contexts, scored before and after training: what training did where a teacher disagreed (docs/diagnostics.md).

Needs the extra `diagnostics` (pandas, pyarrow, statsmodels); importing without it raises ConfigError.
"""

from importlib.util import find_spec

from slime_tandem.errors import ConfigError

_MISSING = [name for name in ("pandas", "pyarrow", "statsmodels") if find_spec(name) is None]
if _MISSING:
    _REMEDY = "pip install -c constraints.txt -e '.[diagnostics]'"
    raise ConfigError("packages of the extra `diagnostics`", _MISSING, "none missing", _REMEDY)
