"""What a user may set, checked: one tree of sections. Every public name is here: `from slime_tandem.config import X`.

Nobody else states a default or a contradiction. Knows no model, no server and no file but the configuration's own.
"""

from slime_tandem.config.cluster import (
    ClusterConfig,
)
from slime_tandem.config.engine import (
    EngineConfig,
    ModelsConfig,
    TextMarkers,
)
from slime_tandem.config.load import (
    read_yaml_mapping,
)
from slime_tandem.config.objective import (
    AdvantageScale,
    Baseline,
    KlEstimator,
    KlGuard,
    ObjectiveConfig,
    OptimizerConfig,
    RatioLevel,
    Reduction,
    RolloutWeights,
    Surrogate,
)
from slime_tandem.config.opd import (
    SELECTOR_ALIASES,
    AlignmentPolicy,
    Budget,
    Compatibility,
    Denominator,
    MissingMass,
    Normalisation,
    OpdConfig,
    OpdSignal,
    SelectionConfig,
    SelectionRules,
    Selector,
    SelectorName,
    Support,
    TeacherSpec,
    Thinking,
)
from slime_tandem.config.run import (
    ENTRIES,
    RunConfig,
    choices_of,
    fields_of,
)
from slime_tandem.config.section import (
    Ignored,
    Named,
    Probability,
    Section,
    http_url,
)
from slime_tandem.config.sections import AnswerKind, EvalConfig, RewardConfig, Sections, TaskSpec, TrainConfig
from slime_tandem.config.serving import ServedModel, ServingConfig
from slime_tandem.config.tandem import (
    AuthorSchedule,
    BoundaryClass,
    SamplingConfig,
    StrategyName,
    TandemConfig,
)
from slime_tandem.config.tracking import Reporter, TrackingConfig

__all__ = [
    "ENTRIES",
    "SELECTOR_ALIASES",
    "AdvantageScale",
    "AlignmentPolicy",
    "AnswerKind",
    "AuthorSchedule",
    "Baseline",
    "BoundaryClass",
    "Budget",
    "ClusterConfig",
    "Compatibility",
    "Denominator",
    "EngineConfig",
    "EvalConfig",
    "Ignored",
    "KlEstimator",
    "KlGuard",
    "MissingMass",
    "ModelsConfig",
    "Named",
    "Normalisation",
    "ObjectiveConfig",
    "OpdConfig",
    "OpdSignal",
    "OptimizerConfig",
    "Probability",
    "RatioLevel",
    "Reduction",
    "Reporter",
    "RewardConfig",
    "RolloutWeights",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "Sections",
    "SelectionConfig",
    "SelectionRules",
    "Selector",
    "SelectorName",
    "ServedModel",
    "ServingConfig",
    "StrategyName",
    "Support",
    "Surrogate",
    "TandemConfig",
    "TaskSpec",
    "TeacherSpec",
    "TextMarkers",
    "Thinking",
    "TrackingConfig",
    "TrainConfig",
    "choices_of",
    "fields_of",
    "http_url",
    "read_yaml_mapping",
]
