"""On-policy distillation: teachers, their signal, and which tokens carry it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from slime_tandem.config.section import Ignored, Named, Section, http_url
from slime_tandem.config.serving import ServedModel
from slime_tandem.extensions import is_own

OpdSignal = Literal["sampled", "reverse_kl", "forward_kl", "jsd"]
"""A built-in signal."""
AlignmentPolicy = Literal["strict", "even", "proportional", "chain_rule"]
Thinking = Literal["keep", "text", "drop"]
Support = Literal["teacher", "student", "union"]
Selector = Literal[
    "full", "dlearn_high", "ca_softor", "entropy", "tip", "divergence", "random", "compatibility", "dincompat_high",
    "q3", "q3_highc", "q3_lowc", "q3_dlearn_high", "q3_dlearn_low", "q3_dincompat_high", "split_budget_ca",
]  # fmt: skip
"""A built-in selector."""
SelectorName = Literal[Selector, "pure_opd", "teachability", "teachability_entropy"]
"""A built-in selector, or its name in launch scripts."""
Budget = Literal["batch", "sequence"]
MissingMass = Literal["exact", "rest", "fill"]
Compatibility = Literal["mass", "overlap", "bhattacharyya", "prefix"]
Normalisation = Literal["batch_quantile", "batch_minmax", "none"]
Denominator = Literal["selected", "valid"]
SelectionRules = Literal["own", "reference"]


SELECTOR_ALIASES: dict[str, Selector] = {
    "pure_opd": "full",
    "teachability": "dlearn_high",
    "teachability_entropy": "ca_softor",
}
"""Names of methods in launch scripts that are not the selector's own."""


class TeacherSpec(Section):
    """One of several teachers."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="its name; a prompt's `metadata.teacher` may choose it"
    )
    model: str = Field(
        "", description="local Hugging Face folder, or builtin:<name>, any tokenizer; needed without `scorer`"
    )
    scorer: str | None = Field(
        None,
        description="a scorer of your own in the place of a served model, as module:attribute (docs/extending.md); it is given "
        "this entry",
    )
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

    gpus: int | None = Field(None, ge=1, description="GPUs of its engines under slime; null: cluster.teacher_gpus")
    tp: int | None = Field(None, ge=1, description="GPUs of one engine of it; null: cluster.teacher_tp")
    serving: ServedModel = Field(default_factory=ServedModel)

    @model_validator(mode="after")
    def _a_model_or_a_scorer(self) -> TeacherSpec:
        if not self.model and self.scorer is None:
            raise ValueError("a `model`, or a `scorer` of your own; give one of them")
        served = self.gpus is not None or self.tp is not None or self.serving != ServedModel()
        if served and (self.url is not None or self.scorer is not None):
            raise ValueError("no `gpus`, `tp` or `serving` with a `url` or a `scorer`: it is served by somebody else")
        if self.scorer is not None and (self.url is not None or not is_own(self.scorer)):
            raise ValueError("a `scorer` as module:attribute and no `url`, as it is asked in the run's own process")
        return self

    @field_validator("url")
    @classmethod
    def _is_http_url(cls, value: str | None) -> str | None:
        return http_url(value)


class SelectionConfig(Section):
    """Which tokens carry the teacher's signal (TA-OPD, arXiv 2605.26844; docs/teachability.md)."""

    selector: Annotated[str, Named(get_args(SelectorName))] = Field(
        "pure_opd",
        description="pure_opd (full): every aligned senior token, nothing more is asked of the servers; the others, and one of "
        "your own, score each token by the lists of its likeliest tokens and keep the best",
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
    depth: int = Field(
        0,
        ge=0,
        le=4096,
        description="missing_mass exact: 0 asks for what a list lacks; more: lists of so many entries are asked for in one "
        "pass, of which top_k count, and what the other side's does not hold counts as the most that it can be "
        "(opd/bounded_mass); requests then grow with the responses alone",
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
    gamma: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="split_budget_ca: share of the budget that goes by entropy; given to a selector of your own, too",
    )
    denominator: Denominator = Field(
        "selected",
        description="the distillation term is a mean over the selected tokens, or their sum over the number of all valid ones "
        "(each then counts as it does without a selection)",
    )
    rules: SelectionRules = Field(
        "own",
        description="reference: scores, normalisation, ties, draws and masks of TA-OPD's published code, bit for bit, at about "
        "0.04 ms a token (docs/teachability.md)",
    )
    exact_cmass: bool = Field(
        False,
        description="rules reference: C is the teacher's exact mass on the student's list (published: --opd-exact-cmass), not "
        "what the teacher's own list tells of it",
    )
    mask_seed: int = Field(
        42,
        ge=0,
        lt=2**63,
        description="rules reference: seed of selector random; the rollout's number is added where opd.token_bank_dir is set",
    )

    ignored: ClassVar = (
        *(
            Ignored(name, lambda s: s.mask == "full", "selector", "choose another selector")
            for name in (
                "ratio", "budget", "min_keep_per_sample", "missing_mass", "compatibility", "prefix_alpha",
                "divergence", "normalisation", "gamma", "denominator", "rules",
            )
        ),
        *(
            Ignored(name, lambda s: s.rules != "reference", "rules", "choose reference")
            for name in ("exact_cmass", "mask_seed")
        ),
        Ignored(
            "gamma",
            lambda s: s.mask != "split_budget_ca" and not is_own(s.mask),
            "selector",
            "choose split_budget_ca",
        ),
        Ignored("depth", lambda s: not s.asks_cross, "missing_mass", "set missing_mass=exact, or leave depth out"),
        Ignored("prefix_alpha", lambda s: s.compatibility != "prefix", "compatibility", "choose prefix"),
    )  # fmt: skip

    @property
    def mask(self) -> str:
        """The selector itself, whichever of its names was given: a `Selector`, or a user's own.

        >>> SelectionConfig(selector="teachability", ratio=0.1).mask
        'dlearn_high'
        """
        return SELECTOR_ALIASES.get(self.selector, self.selector)

    @property
    def asks_ids(self) -> bool:
        """Whether servers are asked for the values of given ids."""
        return self.asks_cross and self.depth == 0

    @property
    def asks_cross(self) -> bool:
        """Whether each side is asked for its exact values of the other's entries."""
        return self.mask != "full" and (self.missing_mass == "exact" or self.exact_cmass)


class OpdConfig(Section):
    """On-policy distillation: the teacher scores what the policy sampled."""

    enabled: bool = Field(True, description="score with the teacher and add its signal")
    coef: float = Field(
        1.0,
        ge=0.0,
        description="weight of the distillation term in the loss; the term is a mean over the tokens that carry it",
    )
    clip: float | None = Field(
        10.0, gt=0.0, description="clamp |log pi_student - log pi_teacher| to so many nats; null: no clip"
    )
    signal: Annotated[str, Named(get_args(OpdSignal))] = Field(
        "sampled",
        description="sampled: log pi_student - log pi_teacher of the sampled token, as an advantage; all others, and one of "
        "your own: a divergence over `top_k` candidates and the rest, as a loss term",
    )
    top_k: int = Field(16, ge=1, description="candidates per position, all signals but sampled")
    support: Support = Field("teacher", description="whose top-k lists the candidates come from")
    jsd_beta: float = Field(
        0.5,
        gt=0.0,
        lt=1.0,
        description="signal jsd: weight of the teacher in the mixture (0.5: Jensen-Shannon); given to "
        "a signal of your own, too",
    )
    teacher_temperature: Literal[1, "rollout"] = Field(
        1,
        description="temperature of the teacher's distribution: 1, so that the policy at sampling.temperature comes to the "
        "teacher itself, or rollout, the same for both (embedded servers alone; SGLang scores at 1 whatever it is asked) "
        "(docs/distillation.md)",
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
    concurrency: int = Field(
        4,
        ge=1,
        description="scoring requests under way at once, per teacher; under slime, which scores each sample by itself, as "
        "many samples at once as these requests could hold (times engine.max_batch)",
    )
    overlap: int | None = Field(
        None,
        ge=1,
        description="local runtime: score while others are still being written, as soon as so many responses are finished; "
        "null: after all (a run then repeats bit for bit); slime always scores each response as soon as it is written",
    )
    read_along: int | None = Field(
        None,
        ge=16,
        description="slime: a response is written by requests of so many tokens at most, and its teachers score each part "
        "while the next one is written, so that little is left to score behind its end; null: whole responses, each as soon as "
        "it is written",
    )
    on_failed_sample: Literal["drop_opd", "drop_sample", "stop"] = Field(
        "drop_opd", description="what happens to a sample whose teacher answer is unusable"
    )
    token_bank_dir: str | None = Field(
        None,
        description="write every token's scores of each rollout there, a file a rollout, in TA-OPD's published columns (H, D, "
        "C by its definitions, and whether the token was kept); asks both sides for lists of selection.top_k; a relative path "
        "is below the run's folder",
    )
    token_bank_format: Literal["csv", "jsonl"] = Field("csv", description="format of these files")
    token_bank_raw_topk: bool = Field(False, description="with both sides' lists in them")
    token_bank_pair_id: str = Field("", description="their column pair_id")

    ignored: ClassVar = (
        Ignored("top_k", lambda s: s.signal == "sampled", "signal", "choose reverse_kl, forward_kl or jsd"),
        Ignored("support", lambda s: s.signal == "sampled", "signal", "choose reverse_kl, forward_kl or jsd"),
        Ignored("jsd_beta", lambda s: s.signal != "jsd" and not is_own(s.signal), "signal", "choose jsd"),
        Ignored("clip", lambda s: s.signal != "sampled", "signal", "choose sampled"),
        Ignored("alignment", lambda s: s.signal != "sampled", "signal", "choose sampled"),
        Ignored("read_along", lambda s: s.signal != "sampled", "signal", "choose sampled"),
        *(
            Ignored(name, lambda s: s.token_bank_dir is None, "token_bank_dir", "set it")
            for name in ("token_bank_format", "token_bank_raw_topk", "token_bank_pair_id")
        ),
        Ignored("thinking", lambda s: bool(s.teachers), "teachers", "set it on the teachers"),
        Ignored("template_kwargs", lambda s: bool(s.teachers), "teachers", "set it on the teachers"),
    )

    @property
    def list_length(self) -> int:
        """Length of both sides' lists that tokens are scored by; 0: none are asked for."""
        return self.selection.top_k if self.selection.mask != "full" or self.token_bank_dir is not None else 0

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, value: tuple[TeacherSpec, ...]) -> tuple[TeacherSpec, ...]:
        names = [t.name for t in value]
        if len(set(names)) < len(names):
            raise ValueError("a name of its own for each teacher; rename one")
        return value
