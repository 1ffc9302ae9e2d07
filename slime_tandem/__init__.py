"""slime_tandem: several language models share one trajectory.

What stands in `__all__` is public: it is documented in docs/api.md and changes with a line in CHANGELOG.md. All else is
private, whatever its name, but for what slime's flags name (`slime_tandem.slime_hooks`, docs/slime.md) and the protocols of
docs/extending.md. Nothing is loaded before it is asked for: the import alone brings neither torch nor transformers.

>>> import slime_tandem
>>> slime_tandem.RunConfig.load(overrides=["tandem.prob_senior=0.25"]).tandem.prob_senior
0.25
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_tandem.api import Run, TextAlignment, align, authorship, evaluate, open_run, score, train
    from slime_tandem.config import ObjectiveConfig, OpdConfig, RunConfig
    from slime_tandem.distill.selection import Ranking
    from slime_tandem.errors import ConfigError, DataError, TandemError
    from slime_tandem.objective.loss import Denominators, PackedTokens, tandem_loss
    from slime_tandem.rollout.boundaries import BoundaryRecord
    from slime_tandem.strategies import Mark, Strategy
    from slime_tandem.tasks.family import make_prompt
    from slime_tandem.tasks.judging import label_reward
    from slime_tandem.types import Message, Prompt, SampleKey

__version__ = "0.1.0"

__all__ = [
    "BoundaryRecord",
    "ConfigError",
    "DataError",
    "Denominators",
    "Mark",
    "Message",
    "ObjectiveConfig",
    "OpdConfig",
    "PackedTokens",
    "Prompt",
    "Ranking",
    "Run",
    "RunConfig",
    "SampleKey",
    "Strategy",
    "TandemError",
    "TextAlignment",
    "__version__",
    "align",
    "authorship",
    "evaluate",
    "label_reward",
    "make_prompt",
    "open_run",
    "score",
    "tandem_loss",
    "train",
]

_HOMES = {
    "api": ("Run", "TextAlignment", "align", "authorship", "evaluate", "open_run", "score", "train"),
    "config": ("ObjectiveConfig", "OpdConfig", "RunConfig"),
    "distill.selection": ("Ranking",),
    "errors": ("ConfigError", "DataError", "TandemError"),
    "objective.loss": ("Denominators", "PackedTokens", "tandem_loss"),
    "rollout.boundaries": ("BoundaryRecord",),
    "strategies": ("Mark", "Strategy"),
    "tasks.family": ("make_prompt",),
    "tasks.judging": ("label_reward",),
    "types": ("Message", "Prompt", "SampleKey"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'slime_tandem' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"slime_tandem.{_HOME_OF[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
