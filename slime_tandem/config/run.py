"""The run configuration: one tree of checked settings, built from YAML and `--set key=value`.

Unknown or misspelt keys, wrong types, out-of-range values and contradictions raise `ConfigError` with the dotted name
of the field, its value, what was expected and the remedy. The resolved tree is written beside every run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from slime_tandem.errors import ConfigError, explain

Strategy = Literal["word", "bernoulli", "sentence", "chunk", "alternating"]
BoundaryClass = Literal["space", "newline", "punctuation"]
AuthorSchedule = Literal["draw", "alternate"]
KlEstimator = Literal["k1", "k2", "k3"]
Baseline = Literal["mean", "leave_one_out", "median"]
AdvantageScale = Literal["none", "std", "mad"]
Surrogate = Literal["clip", "cispo"]
RatioLevel = Literal["token", "sequence"]
Reduction = Literal["token_mean", "sequence_mean", "constant"]
RolloutWeights = Literal["none", "truncated", "masked"]
KlGuard = Literal["double", "skip_updates", "stop"]
OpdSignal = Literal["sampled", "reverse_kl", "forward_kl", "jsd"]
AlignmentPolicy = Literal["strict", "even", "proportional", "chain_rule"]
Thinking = Literal["keep", "text", "drop"]
Support = Literal["teacher", "student", "union"]
Selector = Literal[
    "full", "dlearn_high", "ca_softor", "entropy", "tip", "divergence", "random", "compatibility", "dincompat_high",
    "q3", "q3_highc", "q3_lowc", "q3_dlearn_high", "q3_dlearn_low", "q3_dincompat_high", "split_budget_ca",
]  # fmt: skip
SelectorName = Literal[Selector, "pure_opd", "teachability", "teachability_entropy"]
"""A selector, or its name in launch scripts."""
Budget = Literal["batch", "sequence"]
MissingMass = Literal["exact", "rest", "fill"]
Compatibility = Literal["mass", "overlap", "bhattacharyya", "prefix"]
Normalisation = Literal["batch_quantile", "batch_minmax", "none"]
Denominator = Literal["selected", "valid"]
SelectionRules = Literal["own", "reference"]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("another type than true or false")
        return value


def http_url(value: str | None) -> str | None:
    """The URL itself, or None; raises ValueError for anything but an http or https URL with a host."""
    try:
        parts = urlsplit(value or "http://none")
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a broken IPv6 address, a port that is no number
        good = False
    if value == "" or not good:
        raise ValueError("null or a URL such as http://127.0.0.1:30000")
    return value


class ModelsConfig(Section):
    """Who takes part. Each is a local Hugging Face folder, or `builtin:<name>` for a checkpoint that `pretrain` makes."""

    senior: str = Field("builtin:senior", description="trainable policy")
    junior: str = Field("builtin:junior", description="frozen partner that co-writes (same tokenizer as the senior)")
    teacher: str = Field("builtin:teacher", description="frozen scorer, any tokenizer")
    cache_dir: str = Field(".cache/models", description="where built-in checkpoints are made and kept")
    trust_remote_code: bool = Field(False, description="run Python code that a model folder brings")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="engine weights; the trainer keeps float32 masters"
    )


class TandemConfig(Section):
    """Tandem RL (arXiv 2606.28166): who writes which token."""

    enabled: bool = Field(True, description="False: the senior writes alone (plain GRPO)")
    selection_strategy: Strategy = Field("word", description="where a handoff may fall")
    prob_senior: Probability = Field(0.5, description="probability that a new run is the senior's")
    author_schedule: AuthorSchedule = Field(
        "draw",
        description="draw: every run's author by prob_senior; alternate: senior, junior, senior, ... "
        "(chunk and alternating always alternate)",
    )
    max_gap_tokens: int = Field(
        32, ge=1, le=2**31 - 1, description="a run ends after so many tokens without a boundary"
    )
    chunk_size: int = Field(16, ge=1, description="tokens per turn, strategy chunk only")
    boundary_classes: tuple[BoundaryClass, ...] = Field(
        ("space",),
        min_length=1,
        description="tokens that end a run, strategy word only: space (bytes begin with one; the paper's rule), newline (bytes "
        "hold one), punctuation (bytes end in a full stop, comma, colon, semicolon, exclamation or question mark)",
    )
    boundary_token_ids: tuple[int, ...] | None = Field(
        None, description="ids after which a run ends, instead of the classes; null: the classes' ids of this tokenizer"
    )
    junior_tokenizer: Literal["same", "any"] = Field(
        "same",
        description="any: the junior may have another tokenizer; handoffs then pass bytes (rollout/junior_text.py)",
    )
    on_unexpressible: Literal["senior", "error"] = Field(
        "senior",
        description="a junior run whose bytes the senior's vocabulary cannot spell: the senior writes it, or the sample fails",
    )
    junior_token_loss_weight: float = Field(
        0.0, ge=0.0, description="policy-gradient weight of junior tokens (not the paper's lambda_jun); paper: 0"
    )

    @field_validator("boundary_classes")
    @classmethod
    def _each_class_once(cls, value: tuple[BoundaryClass, ...]) -> tuple[BoundaryClass, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each class once; remove the repetition")
        return value

    def misuse(self) -> str | None:
        """What a setting that the chosen strategy would ignore is told; None when every setting has its effect.

        >>> TandemConfig(selection_strategy="sentence", chunk_size=4).misuse()
        "tandem.chunk_size=4: expected 16 (the default) with tandem.selection_strategy='sentence', which ignores it. \
Remedy: remove it, or choose chunk."
        """
        readers: dict[str, tuple[Strategy, ...]] = {
            "prob_senior": ("word", "bernoulli", "sentence"),
            "max_gap_tokens": ("word",),
            "chunk_size": ("chunk",),
            "boundary_classes": ("word",),
            "boundary_token_ids": ("word", "sentence"),
        }
        for name, strategies in readers.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and self.selection_strategy not in strategies:
                shown = list(value) if isinstance(value, tuple) else value
                usual = list(default) if isinstance(default, tuple) else "null" if default is None else default
                return explain(
                    f"tandem.{name}",
                    shown,
                    f"{usual} (the default) with tandem.selection_strategy={self.selection_strategy!r}, which ignores it",
                    f"remove it, or choose {' or '.join(strategies)}",
                )
        if self.author_schedule == "alternate" and self.prob_senior != type(self).model_fields["prob_senior"].default:
            return explain(
                "tandem.prob_senior",
                self.prob_senior,
                "0.5 (the default) with tandem.author_schedule='alternate', which ignores it",
                "remove it, or choose draw",
            )
        if self.boundary_token_ids is not None and self.boundary_classes != ("space",):
            return explain(
                "tandem.boundary_classes",
                list(self.boundary_classes),
                "['space'] (the default) with tandem.boundary_token_ids, which replaces the classes",
                "remove one of the two",
            )
        return None


class SamplingConfig(Section):
    """How responses are sampled; the same for every sample of a group."""

    temperature: float = Field(1.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus mass")
    top_k: int = Field(-1, ge=-1, description="-1: whole vocabulary")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="least probability, as a share of the greatest; 0: none")
    truncation_replay: Literal["kept_ids", "recompute"] = Field(
        "kept_ids",
        description="training with top_p, top_k or min_p: over which tokens the trainer renormalises. kept_ids: those that "
        "the senior's embedded server reports; recompute: found again in the trainer's logits, old log-probs too (any server)",
    )
    max_new_tokens: int = Field(64, ge=1, description="response cap in tokens, both authors together")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="strings that end the response, whoever writes them; left out of its text"
    )
    on_failed_sample: Literal["stop", "drop_sample"] = Field(
        "stop", description="what happens when an engine refuses a response or answers it unusably after all repeats"
    )

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def asks_kept_ids(self) -> bool:
        """Whether the senior's server is asked what it drew from (greedy tokens are not drawn)."""
        return self.truncates and self.temperature > 0.0 and self.truncation_replay == "kept_ids"


class TeacherSpec(Section):
    """One of several teachers."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="its name; a prompt's `metadata.teacher` may choose it"
    )
    model: str = Field(description="local Hugging Face folder, or builtin:<name>, any tokenizer")
    url: str | None = Field(None, description="use this running server (SGLang or `slime-tandem serve`)")
    tasks: tuple[str, ...] | None = Field(
        None, min_length=1, description="task tags that it scores; null: every task that no other teacher names"
    )
    weight: float = Field(1.0, gt=0.0, description="among several teachers of one sample: weight of its log-probs")
    thinking: Thinking = Field(
        "keep",
        description="how it meets the student's thinking: keep (between its own markers), text (the markers as text), "
        "drop (not at all, those tokens carry no signal)",
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to its chat template, e.g. {enable_thinking: false}"
    )

    @field_validator("url")
    @classmethod
    def _is_http_url(cls, value: str | None) -> str | None:
        return http_url(value)


class SelectionConfig(Section):
    """Which tokens carry the teacher's signal (TA-OPD, arXiv 2605.26844; docs/teachability.md)."""

    selector: SelectorName = Field(
        "pure_opd",
        description="pure_opd (full): every aligned senior token, nothing more is asked of the servers; the others score each "
        "token by the lists of its likeliest tokens and keep the best",
    )
    ratio: float = Field(1.0, gt=0.0, le=1.0, description="share of the valid tokens that is kept, rounded up")
    budget: Budget = Field("batch", description="the share is taken of the whole rollout, or of each response")
    min_keep_per_sample: int = Field(
        1, ge=0, description="where a response has fewer selected tokens, the best by ca_softor are added"
    )
    top_k: int = Field(16, ge=1, description="length of student's and teacher's lists")
    missing_mass: MissingMass = Field(
        "exact",
        description="what a list lacks: exact asks for it (one more request per 32 positions and side), rest sums it up, fill "
        "is the reference's 1e-12",
    )
    compatibility: Compatibility = Field("mass", description="what C is")
    prefix_alpha: float = Field(
        0.9, ge=0.0, lt=1.0, description="compatibility prefix: weight of the past in its running mean"
    )
    divergence: Literal["forward", "reverse"] = Field(
        "forward", description="what D is: KL(teacher || student) or KL(student || teacher)"
    )
    normalisation: Normalisation = Field(
        "batch_quantile", description="how scores come to [0, 1]: 5% to 95% quantile, least to greatest, as they are"
    )
    gamma: float = Field(0.5, ge=0.0, le=1.0, description="split_budget_ca: share of the budget that goes by entropy")
    denominator: Denominator = Field(
        "selected",
        description="the distillation term is a mean over the selected tokens, or their sum over the number of all valid ones "
        "(each then counts as it does without a selection)",
    )
    rules: SelectionRules = Field(
        "own",
        description="reference: ties, quantiles, seeds and masks as the published code has them (docs/teachability.md)",
    )

    @property
    def mask(self) -> Selector:
        """The selector itself, whichever of its names was given.

        >>> SelectionConfig(selector="teachability", ratio=0.1).mask
        'dlearn_high'
        """
        named: str = self.selector
        return SELECTOR_ALIASES.get(named) or cast(Selector, named)

    def misuse(self) -> str | None:
        """What a setting that the others make void is told; None when every setting has its effect.

        >>> SelectionConfig(ratio=0.1).misuse()
        "opd.selection.ratio=0.1: expected 1.0 (the default) with opd.selection.selector='pure_opd', which ignores it. \
Remedy: remove it, or choose another selector."
        """
        names = [n for n in type(self).model_fields if n != "selector"]
        void = [(n, self.mask == "full", "selector", "choose another selector") for n in names]
        void += [
            ("gamma", self.mask != "split_budget_ca", "selector", "choose split_budget_ca"),
            ("prefix_alpha", self.compatibility != "prefix", "compatibility", "choose prefix"),
        ]
        for name, ignored, by, other in void:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if ignored and value != default:
                setting = f"opd.selection.{by}={getattr(self, by)!r}"
                expected = f"{default} (the default) with {setting}, which ignores it"
                return explain(f"opd.selection.{name}", value, expected, f"remove it, or {other}")
        fixed = {"missing_mass": "fill", "denominator": "selected", "budget": "batch"}
        for name, wanted in fixed.items():
            value = getattr(self, name)
            if self.rules == "reference" and value != wanted:
                expected = f"{wanted} with opd.selection.rules='reference', which has no other"
                return explain(f"opd.selection.{name}", value, expected, "set it, or rules=own")
        return None


SELECTOR_ALIASES: dict[str, Selector] = {
    "pure_opd": "full",
    "teachability": "dlearn_high",
    "teachability_entropy": "ca_softor",
}
"""Names of methods in launch scripts that are not the selector's own."""


class OpdConfig(Section):
    """On-policy distillation: the teacher scores what the policy sampled."""

    enabled: bool = Field(True, description="score with the teacher and add its signal")
    coef: float = Field(
        1.0, ge=0.0, description="advantage -= coef * (log pi_student - log pi_teacher) per aligned token"
    )
    clip: float | None = Field(
        10.0, gt=0.0, description="clamp |log pi_student - log pi_teacher| to so many nats; null: no clip"
    )
    signal: OpdSignal = Field(
        "sampled",
        description="sampled: log pi_student - log pi_teacher of the sampled token, as an advantage; reverse_kl, forward_kl, "
        "jsd: a divergence over `top_k` candidates and the rest, as a loss term",
    )
    top_k: int = Field(16, ge=1, description="candidates per position, all signals but sampled")
    support: Support = Field("teacher", description="whose top-k lists the candidates come from")
    jsd_beta: float = Field(
        0.5, gt=0.0, lt=1.0, description="signal jsd: weight of the teacher in the mixture (0.5: Jensen-Shannon)"
    )
    position_discount: float = Field(
        1.0, gt=0.0, le=1.0, description="weight of response position t is this to the power t; 1: all alike"
    )
    alignment: AlignmentPolicy = Field(
        "strict",
        description="strict: tokens that both tokenizers cut out alike; even, proportional, chain_rule: also spans of several "
        "tokens (docs/distillation.md)",
    )
    thinking: Thinking = Field(
        "keep", description="how models.teacher meets the student's thinking; opd.teachers have settings of their own"
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to the chat template of models.teacher"
    )
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    teachers: tuple[TeacherSpec, ...] = Field((), description="several teachers, instead of models.teacher")
    concurrency: int = Field(4, ge=1, description="scoring requests under way at once, per teacher")
    overlap: int | None = Field(
        None,
        ge=1,
        description="score while others are still being written, as soon as so many responses are finished; null: after all "
        "(a run then repeats bit for bit)",
    )
    on_failed_sample: Literal["drop_opd", "drop_sample", "stop"] = Field(
        "drop_opd", description="what happens to a sample whose teacher answer is unusable"
    )

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, value: tuple[TeacherSpec, ...]) -> tuple[TeacherSpec, ...]:
        names = [t.name for t in value]
        if len(set(names)) < len(names):
            raise ValueError("a name of its own for each teacher; rename one")
        return value

    def misuse(self) -> str | None:
        """What a setting that the others make void is told; None when every setting has its effect.

        >>> OpdConfig(top_k=8).misuse()
        "opd.top_k=8: expected 16 (the default) with opd.signal='sampled', which ignores it. Remedy: remove it, or choose \
reverse_kl, forward_kl or jsd."
        """
        ignored: list[tuple[str, bool, str, str]] = [
            (name, self.signal == "sampled", f"opd.signal={self.signal!r}", "choose reverse_kl, forward_kl or jsd")
            for name in ("top_k", "support")
        ]
        ignored += [
            ("jsd_beta", self.signal != "jsd", f"opd.signal={self.signal!r}", "choose jsd"),
            ("clip", self.signal != "sampled", f"opd.signal={self.signal!r}", "choose sampled"),
            ("alignment", self.signal != "sampled", f"opd.signal={self.signal!r}", "choose sampled"),
            ("thinking", bool(self.teachers), "opd.teachers", "set it on the teachers"),
            ("template_kwargs", bool(self.teachers), "opd.teachers", "set it on the teachers"),
        ]
        for name, void, by, other in ignored:
            value, default = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
            if void and value != default:
                usual = "{}" if default == {} else default
                return explain(
                    f"opd.{name}", value, f"{usual} (the default) with {by}, which ignores it", f"remove it, or {other}"
                )
        if self.selection.mask != "full" and self.alignment != "strict":
            return explain(
                "opd.alignment",
                self.alignment,
                f"strict with opd.selection.selector={self.selection.selector!r}: only one-to-one pairs have lists to score",
                "set it, or selector=pure_opd",
            )
        return self.selection.misuse()


class ObjectiveConfig(Section):
    """GRPO: group-relative advantages and a clipped surrogate on weighted tokens (docs/objective.md)."""

    reward_coef: float = Field(1.0, ge=0.0, description="weight of the task-reward advantage; 0: distillation alone")
    baseline: Baseline = Field(
        "mean",
        description="what a reward is compared with: its group's mean, the mean of the others (leave_one_out), or the median",
    )
    scale_advantages: AdvantageScale = Field(
        "none", description="divide group-centred rewards by the group's std, or by its scaled MAD (robust)"
    )
    clip_advantages: float | None = Field(
        None, gt=0.0, description="clamp advantages to +- this, last of all; null: no clip"
    )
    surrogate: Surrogate = Field(
        "clip",
        description="clip: min of raw and clipped ratio (PPO); cispo: clipped ratio as a constant weight of log pi",
    )
    ratio: RatioLevel = Field(
        "token", description="importance ratio of the task reward: of each token, or of the whole response (GSPO)"
    )
    clip_low: float = Field(0.2, gt=0.0, lt=1.0, description="ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0.0, description="ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1.0, description="negative advantages: the ratio counts at most this much; null: without bound"
    )
    reduction: Reduction = Field(
        "token_mean",
        description="token_mean: over all weighted tokens; sequence_mean: over responses of each one's mean; constant: sum "
        "over (responses * constant_length) (Dr. GRPO)",
    )
    constant_length: int | None = Field(
        None, ge=1, description="reduction constant: tokens that each response counts; null: sampling.max_new_tokens"
    )
    rollout_weights: RolloutWeights = Field(
        "none",
        description="none: the engine's log-probs are the old policy; truncated, masked: the trainer computes its own, and "
        "trainer/engine weights each token, cut at rollout_weight_max, or 0 outside [rollout_weight_min, rollout_weight_max]",
    )
    rollout_weight_max: float = Field(2.0, ge=1.0, description="largest weight of a token between engine and trainer")
    rollout_weight_min: float = Field(0.5, ge=0.0, le=1.0, description="rollout_weights masked: smallest weight")
    kl_coef: float = Field(0.0, ge=0.0, description="weight of the KL to the frozen start weights")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of its own; reward: taken off each response's reward, summed over its tokens"
    )
    kl_estimator: KlEstimator = Field(
        "k3", description="k1 = r, k2 = r^2/2, k3 = exp(-r) - 1 + r, r = log pi - log ref"
    )
    kl_target: float | None = Field(
        None, gt=0.0, description="nats per token; kl_coef then adapts to it after each update; null: kl_coef stays"
    )
    kl_step: float = Field(
        0.2, gt=0.0, description="with kl_target: kl_coef *= exp(clip((KL - target) / target, -kl_step, kl_step))"
    )
    kl_coef_min: float = Field(1e-4, gt=0.0, description="with kl_target: least kl_coef")
    kl_coef_max: float = Field(10.0, gt=0.0, description="with kl_target: greatest kl_coef")
    kl_guard: KlGuard = Field(
        "double",
        description="with kl_target, when an update's KL exceeds twice the target: double kl_coef at once, also skip the "
        "rollout's remaining updates, or stop the run",
    )
    lambda_jun: float = Field(
        0.0,
        ge=0.0,
        description="weight of the senior's KL pull toward the junior on junior-written tokens, a loss term",
    )

    def misuse(self) -> str | None:
        """What a setting that the others make void is told; None when every setting has its effect.

        >>> ObjectiveConfig(kl_step=0.1).misuse()
        'objective.kl_step=0.1: expected 0.2 (the default) with objective.kl_target=None, which ignores it. Remedy: remove \
it, or set kl_target.'
        """
        adaptive = [(n, self.kl_target is None, "kl_target", "set kl_target") for n in
                    ("kl_step", "kl_coef_min", "kl_coef_max", "kl_guard")]  # fmt: skip
        void = [
            *adaptive,
            ("kl_in", self.kl_coef == 0, "kl_coef", "raise kl_coef"),
            ("kl_target", self.kl_coef == 0, "kl_coef", "raise kl_coef, from where it adapts"),
            ("dual_clip", self.surrogate == "cispo", "surrogate", "choose clip"),
            ("clip_low", self.surrogate == "cispo", "surrogate", "choose clip"),
            ("constant_length", self.reduction != "constant", "reduction", "choose constant"),
            ("rollout_weight_max", self.rollout_weights == "none", "rollout_weights", "choose truncated or masked"),
            ("rollout_weight_min", self.rollout_weights != "masked", "rollout_weights", "choose masked"),
        ]
        for name, ignored, by, other in void:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if ignored and value != default:
                usual = "null" if default is None else default
                expected = f"{usual} (the default) with objective.{by}={getattr(self, by)!r}, which ignores it"
                return explain(f"objective.{name}", value, expected, f"remove it, or {other}")
        if self.kl_target is not None and not self.kl_coef_min <= self.kl_coef <= self.kl_coef_max:
            bounds = f"{self.kl_coef_min:g} to {self.kl_coef_max:g} (kl_coef_min, kl_coef_max)"
            return explain("objective.kl_coef", self.kl_coef, bounds, "move it, or the bounds")
        if self.kl_in == "reward" and self.reward_coef == 0:
            return explain("objective.kl_in", "reward", "loss with reward_coef=0, which drops the reward", "set it")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            return explain(
                "objective.dual_clip", self.dual_clip, f"above 1 + clip_high = {1 + self.clip_high:g}", "raise it"
            )
        return None


class OptimizerConfig(Section):
    """AdamW on float32 master weights."""

    lr: float = Field(1e-3, gt=0.0, description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up, in optimizer steps")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="first-moment decay")
    beta2: float = Field(0.95, ge=0.0, lt=1.0, description="second-moment decay")
    eps: float = Field(1e-8, gt=0.0, description="denominator floor")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled, on matrices only")
    grad_clip: float = Field(1.0, gt=0.0, description="global gradient norm is clipped to this")


class TaskSpec(Section):
    """One task family and its share of the prompts."""

    family: str = Field(description="a reasoning-gym data set, or `jsonl`")
    weight: float = Field(1.0, gt=0.0, description="share of the prompts, relative to the other tasks")
    config: dict[str, Any] = Field(default_factory=dict, description="passed to the reasoning-gym data set")
    path: str | None = Field(None, description="prompt file, family jsonl only")
    environment: str | None = Field(
        None,
        description="what answers between the models' turns: calculator, or a function of your own as module:function "
        "(docs/distillation.md); null: one turn",
    )
    max_turns: int = Field(2, ge=2, description="with an environment: most turns of the models in one response")

    @model_validator(mode="after")
    def _turns_go_with_an_environment(self) -> TaskSpec:
        if self.environment is None and self.max_turns != TaskSpec.model_fields["max_turns"].default:
            raise ValueError("`max_turns` needs an `environment`; without one a response is one turn")
        return self

    @model_validator(mode="after")
    def _path_goes_with_jsonl(self) -> TaskSpec:
        if (self.family == "jsonl") != (self.path is not None):
            raise ValueError("`path` is needed by family `jsonl` and by no other; set both or neither")
        return self


class TrainConfig(Section):
    """How much is rolled out and learnt."""

    steps: int = Field(20, ge=0, description="rollout + update rounds")
    prompts_per_step: int = Field(32, ge=1, description="groups per rollout")
    samples_per_prompt: int = Field(8, ge=1, description="group size K")
    updates_per_step: int = Field(1, ge=1, description="optimizer steps per rollout (mini-batches of whole groups)")
    micro_batch_tokens: int = Field(8192, ge=1, description="padded tokens per forward pass of the trainer")
    save_every: int = Field(10, ge=1, description="steps between checkpoints")
    threads: int | None = Field(None, ge=1, le=1024, description="torch threads of the trainer; null: all cores")


class EvalConfig(Section):
    """Held-out evaluation, never on training prompts."""

    prompts: int = Field(128, ge=1, description="held-out prompts")
    samples_per_prompt: int = Field(1, ge=1, description="responses per held-out prompt")
    every: int | None = Field(None, ge=1, description="steps between evaluations; null: only before and after")
    tandem: bool = Field(
        False,
        description="co-written responses also where the senior trains alone (tandem.enabled=false): starts the junior",
    )
    chains: int = Field(8, ge=1, description="`slime-tandem eval`: responses per prompt, alone and with handoffs each")
    temperature: float = Field(0.7, ge=0.0, description="`slime-tandem eval`: sampling of these; 0 is greedy")
    top_p: float = Field(0.8, gt=0.0, le=1.0, description="`slime-tandem eval`: nucleus mass")
    top_k: int = Field(20, ge=-1, description="`slime-tandem eval`: -1: whole vocabulary")
    handoff_strategy: Strategy = Field(
        "sentence",
        description="`slime-tandem eval`: where the pen changes hands, senior first (sentence: at blank lines, the paper's; "
        "choose word where answers have none)",
    )
    drift_samples: int = Field(
        4,
        ge=1,
        description="`slime-tandem eval`: solo responses per prompt at temperature 1 without truncation, for the drift",
    )
    resamples: int = Field(2000, ge=100, description="`slime-tandem eval`: bootstrap resamples of the prompts")

    @field_validator("top_k")
    @classmethod
    def _top_k_is_not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("-1 (whole vocabulary) or at least 1, SGLang refuses 0")
        return value


class EngineConfig(Section):
    """The servers, and how the client treats them."""

    mode: Literal["two_servers", "fused"] = Field(
        "two_servers",
        description="fused: senior and junior decode inside one SGLang server, at about the cost of both models "
        "(docs/fused.md); the teacher keeps a server of its own",
    )
    sglang_python: str | None = Field(
        None, description="mode fused: the Python that has SGLang; null: the variable SLIME_TANDEM_SGLANG_PYTHON"
    )
    sglang_args: tuple[str, ...] = Field((), description="mode fused: further flags of sglang.launch_server")
    host: str = Field("127.0.0.1", description="address the servers bind to; loopback unless told otherwise")
    senior_url: str | None = Field(
        None, description="use this running server (SGLang or `slime-tandem serve`) for the senior"
    )
    junior_url: str | None = Field(None, description="the same for the junior")
    teacher_url: str | None = Field(None, description="the same for the teacher")
    api_key_env: str | None = Field(None, description="environment variable that holds the servers' API key")
    start_timeout_s: float = Field(120.0, gt=0.0, description="seconds a server may take to come up")
    request_timeout_s: float = Field(120.0, gt=0.0, description="seconds one request may take")
    environment_timeout_s: float = Field(
        60.0, gt=0.0, description="seconds one answer of a task's environment may take; its response then fails"
    )
    max_retries: int = Field(5, ge=0, description="repeats after disconnects, time-outs and 5xx answers")
    backoff_s: float = Field(0.2, ge=0.0, description="first pause before a repeat; doubles, at most 5 s")
    max_batch: int = Field(256, ge=1, le=2**20, description="sequences an embedded server decodes at once")
    cache_tokens: int = Field(65536, ge=256, le=2**31, description="KV cache of an embedded server, in tokens")
    threads: int = Field(1, ge=1, le=1024, description="torch threads of an embedded server")
    sessions: bool = Field(
        False,
        description="keep contexts on the servers and send new tokens only: traffic grows linearly with the response",
    )
    tokens_per_request: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="most tokens asked for in one co-writing request; null: whole chains of runs; auto: 6 for up to 128 "
        "responses at once, whole chains beyond (what was fastest on two GPU servers)",
    )

    @field_validator("senior_url", "junior_url", "teacher_url")
    @classmethod
    def _is_http_url(cls, value: str | None) -> str | None:
        return http_url(value)


class ClusterConfig(Section):
    """slime only: the machines, who gets which GPUs, and how the trainer is cut (docs/scaling.md)."""

    nodes: int = Field(1, ge=1, le=1024, description="machines")
    gpus_per_node: int = Field(8, ge=1, le=16, description="GPUs of each")
    gpu_memory_gib: float = Field(79.0, gt=0.0, description="memory of a GPU as torch reports it (H100 80GB: 79)")
    host_memory_gib: float = Field(1024.0, gt=0.0, description="main memory of a machine")
    colocate: bool = Field(True, description="trainer and rollout engines take turns on the same GPUs")
    trainer_gpus: int | None = Field(
        None,
        ge=1,
        description="the trainer's, from the first on; null with colocate: what fits of those that the frozen models leave",
    )
    senior_gpus: int | None = Field(
        None,
        ge=1,
        description="the senior's engines, from the first GPU on (colocate) or behind the trainer; null: the rest",
    )
    junior_gpus: int = Field(
        1, ge=1, description="the junior's engines, behind the senior's; unused without engines of its own"
    )
    teacher_gpus: int = Field(1, ge=1, description="the engines of each teacher without a URL, behind the junior's")
    senior_tp: int = Field(1, ge=1, description="GPUs of one engine of the senior")
    junior_tp: int = Field(1, ge=1, description="the same for the junior")
    teacher_tp: int = Field(1, ge=1, description="the same for the teachers")
    mem_fraction: float = Field(0.7, gt=0.0, lt=1.0, description="share of a GPU for weights and KV cache of an engine")
    tensor_parallel: int = Field(1, ge=1, description="the trainer's tensor parallel size")
    pipeline_parallel: int = Field(1, ge=1, description="its pipeline parallel size")
    context_parallel: int = Field(1, ge=1, description="its context parallel size")
    max_tokens_per_gpu: int = Field(8192, ge=1, description="tokens of a micro-batch on one GPU of the trainer")
    recompute: bool = Field(True, description="compute activations again in the backward pass instead of keeping them")
    reference: str | None = Field(
        None,
        description="the senior's start weights as torch_dist (`slime-tandem convert`); null: the Hugging Face folder",
    )
    reward: str | None = Field(None, description="slime's --rm-type; null: this package scores the task")
    layer_spec: Literal["transformer_engine", "own"] = Field(
        "transformer_engine", description="own: layers without Transformer Engine, for machines that lack it"
    )
    slime_flags: tuple[str, ...] = Field(
        (), description="further flags of slime, a word each, checked like those after --"
    )


class RunConfig(Section):
    """Everything one run needs.

    >>> RunConfig.load(overrides=["tandem.prob_senior=0.25", "optimizer.lr=1e-5"]).tandem.prob_senior
    0.25
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder under runs_dir")
    runs_dir: str = Field("runs", description="where runs are kept")
    seed: int = Field(0, ge=0, lt=2**63, description="keys every random draw of the run")
    models: ModelsConfig = Field(default_factory=ModelsConfig)
    tasks: tuple[TaskSpec, ...] = Field(
        (TaskSpec(family="chain_sum", config={"min_terms": 2, "max_terms": 2}),),
        min_length=1,
        description="training and evaluation tasks",
    )
    tandem: TandemConfig = Field(default_factory=TandemConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    opd: OpdConfig = Field(default_factory=OpdConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    control: bool = Field(
        False, description="also run solo GRPO (no junior, no teacher) from the same start with the same budget"
    )

    @model_validator(mode="after")
    def _no_contradictions(self) -> RunConfig:
        s = self.sampling
        if s.top_k == 0:
            raise ValueError(
                "sampling.top_k=0: expected -1 (whole vocabulary) or at least 1, SGLang refuses 0. Remedy: set it to -1"
            )
        if self.opd.enabled and (s.temperature != 1.0 or s.truncates):
            raise ValueError(
                "opd.enabled=True: expected sampling.temperature=1, top_p=1, top_k=-1, min_p=0, because the teacher scores its "
                "full distribution at temperature 1. Remedy: set these, or opd.enabled=false"
            )
        truncated, fused = s.truncates and self.train.steps > 0, self.engine.mode == "fused"
        if truncated and s.truncation_replay == "kept_ids" and fused:
            raise ValueError(
                "sampling.truncation_replay='kept_ids': expected recompute with engine.mode=fused, because SGLang does not "
                "tell what it drew from. Remedy: set it"
            )
        if truncated and s.truncation_replay == "recompute" and self.objective.rollout_weights != "none":
            raise ValueError(
                f"objective.rollout_weights={self.objective.rollout_weights!r}: expected none with "
                "sampling.truncation_replay=recompute, where the engine's log-probs are of another (the full) distribution. "
                "Remedy: set it to none, or use truncation_replay=kept_ids"
            )
        foreign = s.truncation_replay == "recompute" and (fused or self.engine.senior_url is not None)
        if truncated and foreign and s.min_p > 0.0 and s.top_p < 1.0:
            raise ValueError(
                f"sampling.min_p={s.min_p:g}: expected 0 with top_p={s.top_p:g} and truncation_replay=recompute on a server "
                "that may be SGLang, which applies min-p after top-p, not before. Remedy: set one of the two to its "
                "default, or use the embedded server and truncation_replay=kept_ids"
            )
        if s.temperature == 0.0 and self.train.samples_per_prompt > 1 and self.train.steps > 0:
            raise ValueError(
                "sampling.temperature=0: expected a temperature above 0 for training, greedy groups are all alike. "
                "Remedy: set it to 1.0"
            )
        if self.eval.temperature == 0.0 and self.eval.chains > 1:
            raise ValueError(
                f"eval.chains={self.eval.chains}: expected 1 with eval.temperature=0, greedy chains are all alike. "
                "Remedy: set eval.chains=1, or raise eval.temperature"
            )
        if self.objective.reward_coef > 0 and self.train.samples_per_prompt == 1 and self.train.steps > 0:
            raise ValueError(
                "train.samples_per_prompt=1: expected at least 2, a group of one has no relative advantage. "
                "Remedy: raise it, or set objective.reward_coef=0 to distil only"
            )
        if self.objective.reward_coef == 0 and not (self.opd.enabled and self.opd.coef > 0) and self.train.steps > 0:
            raise ValueError(
                "objective.reward_coef=0: expected opd.enabled=true with opd.coef above 0, else there is nothing to learn "
                "from. Remedy: raise objective.reward_coef, or switch opd on"
            )
        t = self.tandem
        if t.enabled and t.junior_token_loss_weight > 0 and s.temperature != 1.0:
            raise ValueError(
                f"tandem.junior_token_loss_weight={t.junior_token_loss_weight:g}: expected sampling.temperature=1, because "
                "engines score given tokens at temperature 1. Remedy: set sampling.temperature=1, or the weight to 0"
            )
        if t.junior_tokenizer == "any" and self.objective.lambda_jun > 0:
            raise ValueError(
                f"objective.lambda_jun={self.objective.lambda_jun:g}: expected 0 with tandem.junior_tokenizer=any, whose "
                "tokens have no log-probs of their own in the senior's ids. Remedy: set it to 0, or junior_tokenizer=same"
            )
        if problem := t.misuse() or self.opd.misuse() or self.objective.misuse():
            raise ValueError(problem.removesuffix("."))
        if self.opd.teachers and (self.engine.teacher_url or self.models.teacher != ModelsConfig().teacher):
            raise ValueError(
                "opd.teachers: expected models.teacher and engine.teacher_url at their defaults, the list replaces them. "
                "Remedy: move them into an entry of opd.teachers (model, url)"
            )
        e = self.engine
        if e.mode == "fused":
            wrong = [
                f"{name}: expected {wanted} with engine.mode=fused, {why}. Remedy: set it, or engine.mode=two_servers"
                for name, bad, wanted, why in (
                    ("tandem.enabled=False", not t.enabled, "true", "which decodes two models"),
                    (
                        "tandem.junior_tokenizer='any'",
                        t.junior_tokenizer == "any",
                        "same",
                        "logits share one vocabulary",
                    ),
                    (f"engine.junior_url={e.junior_url!r}", e.junior_url is not None, "null", "senior_url serves both"),
                    ("engine.sessions=True", e.sessions, "false", "a response is one request already"),
                )
                if bad
            ]
            if wrong:
                raise ValueError(wrong[0])
        if self.train.prompts_per_step % self.train.updates_per_step:
            raise ValueError(
                f"train.updates_per_step={self.train.updates_per_step}: expected a divisor of train.prompts_per_step="
                f"{self.train.prompts_per_step}, mini-batches hold whole groups. Remedy: choose a divisor"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.runs_dir) / self.name

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a YAML file (safe loader), apply `key=value` overrides (values are YAML), check everything.

        Raises ConfigError for a missing file, broken YAML, or any setting that does not hold.
        """
        tree: dict[str, Any] = {}
        if path is not None:
            tree = read_yaml_mapping(Path(path))
        for item in overrides:
            _set_override(tree, item)
        return cls.from_mapping(tree)

    @classmethod
    def from_mapping(cls, tree: Mapping[str, Any]) -> RunConfig:
        """Build from a nested mapping; raises ConfigError that lists every problem found."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(_problems(error))) from None

    def to_yaml(self) -> str:
        """The resolved tree as YAML; `load` of it gives an equal config."""
        tree = self.model_dump()
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        if set(text) & set("\x85\u2028\u2029"):  # PyYAML writes these line breaks as they are and reads them as spaces
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)
        return text


class _Loader(yaml.SafeLoader):
    """The safe loader, but a key that stands twice in one mapping is an error: PyYAML would drop the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's; raises ConstructorError for a key that is there already."""
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    problem = f"the key `{key_node.value}` stands twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read one YAML mapping with the safe loader; raises ConfigError otherwise."""
    try:
        loaded = _load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(explain("--config", str(path), "an existing YAML file", "check the path")) from None
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable UTF-8 text file ({why})"
        raise ConfigError(explain("--config", str(path), expected, "give a YAML file, saved as UTF-8")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # PyYAML lets a month 13 through as ValueError
        expected = f"valid YAML ({' '.join(str(error).split())})"
        raise ConfigError(explain("--config", str(path), expected, "correct the file at this place")) from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise ConfigError(explain("--config", str(path), "a mapping of section names", "see scripts/train/configs/"))
    return loaded


def _set_override(tree: dict[str, Any], item: str) -> None:
    key, eq, raw = item.partition("=")
    if not eq or not key:
        raise ConfigError(explain("--set", item, "key=value with a dotted key", "e.g. --set tandem.prob_senior=0.3"))
    try:
        value = _load_yaml(raw) if raw else ""
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(explain("--set", item, "a YAML value", "quote it")) from None
    node = tree
    *parents, leaf = key.split(".")
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(explain("--set", item, f"a section at `{part}`", "give the dotted name of one setting"))
        node = child
    node[leaf] = value


def fields_of(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every leaf setting as (dotted name, default, description); `--help` and the unknown-key hint use it."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields_of(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.get_default(call_default_factory=True), info.description or ""


def choices_of(name: str) -> tuple[str, ...]:
    """The literal values that the setting with this dotted name takes; empty for any other kind of setting.

    >>> choices_of("objective.scale_advantages"), choices_of("optimizer.lr")
    (('none', 'std', 'mad'), ())
    """
    model: Any = RunConfig
    *parents, leaf = name.split(".")
    for part in parents:
        model = model.model_fields[part].annotation
    annotation = model.model_fields[leaf].annotation
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def _problems(error: ValidationError) -> Iterator[str]:
    defaults = {name: default for name, default, _ in fields_of()}
    known = list(defaults) + list(RunConfig.model_fields) + [f"tasks.{n}" for n in TaskSpec.model_fields]
    known += [f"opd.teachers.{n}" for n in TeacherSpec.model_fields]
    items = error.errors(include_url=False)
    for item in items:
        if item["type"] == "too_short" and any(other["loc"][:1] == item["loc"] != other["loc"] for other in items):
            continue  # pydantic leaves broken list items out and then finds the list too short
        where = ".".join(str(part) for part in item["loc"])
        value, kind = item.get("input"), item["type"]
        if kind == "extra_forbidden":
            plain = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
            close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
            hint = (
                f"did you mean `{close[0]}`?" if close else "remove it; `slime-tandem train --help` lists all settings"
            )
            yield explain(where, value, "a known setting", hint)
        elif kind == "value_error" and not where:
            yield str(item["msg"]).removeprefix("Value error, ") + "."
        elif kind == "literal_error":
            field = where.rsplit(".", 1)[-1]
            choices = (
                [str(c) for c in get_args(Strategy)] if field in ("selection_strategy", "handoff_strategy") else []
            )
            close = difflib.get_close_matches(str(value), choices, n=1)
            yield explain(
                where,
                value,
                f"one of {item['ctx']['expected']}",
                f"did you mean {close[0]!r}?" if close else "choose one of these",
            )
        else:
            yield explain(
                where or "config",
                value,
                str(item["msg"]).removeprefix("Value error, ").removeprefix("Input should be "),
                f"correct this setting (default: {defaults[where]!r})" if where in defaults else "correct this setting",
            )
