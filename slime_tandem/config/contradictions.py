"""Rules between settings: what each section allows alone and the whole does not. One list, in the order of reporting.

A setting that another makes void is no rule of this list: its section says so (`section.Ignored`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slime_tandem.config.sections import Sections
from slime_tandem.config.serving import ServedModel
from slime_tandem.config.tracking import TrackingConfig
from slime_tandem.errors import ConfigError
from slime_tandem.extensions import is_own


class Rule(NamedTuple):
    """`broken(config)`: whether the rule is; `field`: the dotted setting that is named, with its value."""

    field: str
    broken: Callable[[Sections], bool]
    expected: Callable[[Sections], str]
    remedy: str


def _trains(c: Sections) -> bool:
    return c.train.steps > 0


def _fused(c: Sections) -> bool:
    return c.engine.mode == "fused"


def _truncated(c: Sections, replay: str) -> bool:
    return c.sampling.truncates and _trains(c) and c.sampling.truncation_replay == replay


def _read_by(name: str, *trackers: str) -> Rule:
    """A setting of `tracking` that none but some trackers read."""
    return Rule(
        f"tracking.{name}",
        lambda c: getattr(c.tracking, name) != getattr(TrackingConfig(), name) and not {*trackers} & {*c.report_to},
        lambda c: f"{' or '.join(trackers)} in report_to, which reads it",
        "remove it, or add that to report_to",
    )


def _by_reference(c: Sections) -> bool:
    return c.opd.selection.rules == "reference"


BEFORE_MISUSE: tuple[Rule, ...] = (
    Rule(
        "sampling.top_k",
        lambda c: c.sampling.top_k == 0,
        lambda c: "-1 (whole vocabulary) or at least 1, SGLang refuses 0",
        "set it to -1",
    ),
    Rule(
        "opd.enabled",
        lambda c: c.opd.enabled and (c.sampling.temperature == 0.0 or c.sampling.truncates),
        lambda c: (
            "sampling.temperature above 0, top_p=1, top_k=-1, min_p=0, because the teacher scores its full distribution"
        ),
        "set these, or opd.enabled=false",
    ),
    Rule(
        "opd.read_along",
        lambda c: c.opd.read_along is not None and c.opd.list_length > 0,
        lambda c: "null with a selection or a bank of tokens, whose lists come of whole responses",
        "set it, or opd.selection.selector=pure_opd",
    ),
    Rule(
        "opd.teacher_temperature",
        lambda c: c.opd.enabled and c.opd.teacher_temperature == "rollout" and c.opd.list_length > 0,
        lambda c: "1 with a selection or a bank of tokens, whose lists of the student are at temperature 1",
        "set it",
    ),
    Rule(
        "opd.teacher_temperature",
        lambda c: c.opd.teacher_temperature == "rollout" and any(t.scorer is not None for t in c.opd.teachers),
        lambda c: "1 with a teacher by `scorer`, which says itself what it scores",
        "set it, or give that teacher a model",
    ),
    Rule(
        "sampling.truncation_replay",
        lambda c: _truncated(c, "kept_ids") and _fused(c),
        lambda c: "recompute with engine.mode=fused, because SGLang does not report what it drew from",
        "set it",
    ),
    Rule(
        "objective.rollout_weights",
        lambda c: _truncated(c, "recompute") and c.objective.rollout_weights != "none",
        lambda c: (
            "none with sampling.truncation_replay=recompute, where the engine's log-probs are of another (the full) "
            "distribution"
        ),
        "set it to none, or use truncation_replay=kept_ids",
    ),
    Rule(
        "sampling.min_p",
        lambda c: (
            _truncated(c, "recompute")
            and (_fused(c) or c.engine.senior_url is not None)
            and c.sampling.min_p > 0.0
            and c.sampling.top_p < 1.0
        ),
        lambda c: (
            f"0 with top_p={c.sampling.top_p:g} and truncation_replay=recompute on a server that may be SGLang, which "
            "applies min-p after top-p, not before"
        ),
        "set one of the two to its default, or use the embedded server and truncation_replay=kept_ids",
    ),
    Rule(
        "sampling.temperature",
        lambda c: c.sampling.temperature == 0.0 and c.train.samples_per_prompt > 1 and _trains(c),
        lambda c: "a temperature above 0 for training, greedy groups are all alike",
        "set it to 1.0",
    ),
    Rule(
        "eval.chains",
        lambda c: c.eval.temperature == 0.0 and c.eval.chains > 1,
        lambda c: "1 with eval.temperature=0, greedy chains are all alike",
        "set eval.chains=1, or raise eval.temperature",
    ),
    Rule(
        "train.samples_per_prompt",
        lambda c: c.objective.reward_coef > 0 and c.train.samples_per_prompt == 1 and _trains(c),
        lambda c: "at least 2, a group of one has no relative advantage",
        "raise it, or set objective.reward_coef=0 to distil only",
    ),
    Rule(
        "objective.reward_coef",
        lambda c: c.objective.reward_coef == 0 and not (c.opd.enabled and c.opd.coef > 0) and _trains(c),
        lambda c: "opd.enabled=true with opd.coef above 0, else there is nothing to learn from",
        "raise objective.reward_coef, or switch opd on",
    ),
    _read_by("project", "wandb", "trackio"),
    _read_by("entity", "wandb"),
    _read_by("mode", "wandb"),
    Rule(
        "tandem.junior_token_loss_weight",
        lambda c: c.tandem.enabled and c.tandem.junior_token_loss_weight > 0 and c.sampling.temperature != 1.0,
        lambda c: "0 unless sampling.temperature=1, because engines score given tokens at temperature 1",
        "set sampling.temperature=1, or the weight to 0",
    ),
    Rule(
        "objective.lambda_jun",
        lambda c: c.tandem.junior_tokenizer == "any" and c.objective.lambda_jun > 0,
        lambda c: "0 with tandem.junior_tokenizer=any, whose tokens have no log-probs of their own in the senior's ids",
        "set it to 0, or junior_tokenizer=same",
    ),
)

AFTER_MISUSE: tuple[Rule, ...] = (
    Rule(
        "opd.alignment",
        lambda c: c.opd.list_length > 0 and c.opd.alignment != "strict",
        lambda c: (
            f"strict with opd.selection.selector={c.opd.selection.selector!r}: only one-to-one pairs have lists to score"
            if c.opd.selection.mask != "full"
            else "strict with opd.token_bank_dir: only one-to-one pairs have lists to score"
        ),
        "set it, or selector=pure_opd without opd.token_bank_dir",
    ),
    *(
        Rule(
            f"opd.selection.{name}",
            lambda c, name=name, only=only: _by_reference(c) and getattr(c.opd.selection, name) != only,  # type: ignore[misc]
            lambda c, only=only: f"{only} with opd.selection.rules='reference', which has no other",  # type: ignore[misc]
            "set it, or rules=own",
        )
        for name, only in (
            ("missing_mass", "fill"),
            ("denominator", "selected"),
            ("budget", "batch"),
            ("divergence", "forward"),
        )
    ),
    Rule(
        "opd.selection.selector",
        lambda c: _by_reference(c) and is_own(c.opd.selection.mask),
        lambda c: "a built-in selector with opd.selection.rules='reference', which has no other",
        "set rules=own",
    ),
    Rule(
        "opd.selection.top_k",
        lambda c: (
            c.opd.list_length == 0 and c.opd.selection.top_k != type(c.opd.selection).model_fields["top_k"].default
        ),
        lambda c: (
            f"16 (the default) with opd.selection.selector={c.opd.selection.selector!r} and no opd.token_bank_dir"
        ),
        "remove it, choose another selector, or set opd.token_bank_dir",
    ),
    Rule(
        "objective.kl_coef",
        lambda c: (
            c.objective.kl_target is not None
            and not c.objective.kl_coef_min <= c.objective.kl_coef <= c.objective.kl_coef_max
        ),
        lambda c: f"{c.objective.kl_coef_min:g} to {c.objective.kl_coef_max:g} (kl_coef_min, kl_coef_max)",
        "move it, or the bounds",
    ),
    Rule(
        "objective.kl_in",
        lambda c: c.objective.kl_in == "reward" and c.objective.reward_coef == 0,
        lambda c: "loss with reward_coef=0, which drops the reward",
        "set it",
    ),
    Rule(
        "objective.dual_clip",
        lambda c: c.objective.dual_clip is not None and c.objective.dual_clip <= 1 + c.objective.clip_high,
        lambda c: f"above 1 + clip_high = {1 + c.objective.clip_high:g}",
        "raise it",
    ),
    Rule(
        "opd.teachers",
        lambda c: (
            bool(c.opd.teachers)
            and (c.engine.teacher_url is not None or c.models.teacher != type(c.models).model_fields["teacher"].default)
        ),
        lambda c: "models.teacher and engine.teacher_url at their defaults, the list replaces them",
        "move them into an entry of opd.teachers (model, url)",
    ),
    *(
        Rule(
            field,
            lambda c, lists=lists: any(t.scorer is not None for t in c.opd.teachers) and lists(c),  # type: ignore[misc]
            lambda c, usual=usual: f"{usual} with a teacher by `scorer`, which gives no lists of likely tokens",  # type: ignore[misc]
            "set it, or give that teacher a model",
        )
        for field, usual, lists in (
            ("opd.signal", "sampled", lambda c: c.opd.signal != "sampled"),
            ("opd.selection.selector", "pure_opd", lambda c: c.opd.selection.mask != "full"),
            ("opd.token_bank_dir", "null", lambda c: c.opd.token_bank_dir is not None),
        )
    ),
    Rule(
        "cluster.reward",
        lambda c: c.cluster.reward is not None and any(task.reward is not None for task in c.tasks),
        lambda c: "null with tasks[].reward, or slime would reward by one and this machine by the other",
        "remove one of the two",
    ),
    Rule(
        "tandem.enabled",
        lambda c: _fused(c) and not c.tandem.enabled,
        lambda c: "true with engine.mode=fused, which decodes two models",
        "set it, or engine.mode=two_servers",
    ),
    Rule(
        "tandem.junior_tokenizer",
        lambda c: _fused(c) and c.tandem.junior_tokenizer == "any",
        lambda c: "same with engine.mode=fused, logits share one vocabulary",
        "set it, or engine.mode=two_servers",
    ),
    Rule(
        "engine.junior_url",
        lambda c: _fused(c) and c.engine.junior_url is not None,
        lambda c: "null with engine.mode=fused, senior_url serves both",
        "set it, or engine.mode=two_servers",
    ),
    Rule(
        "engine.sessions",
        lambda c: _fused(c) and c.engine.sessions,
        lambda c: "false with engine.mode=fused, a response is one request already",
        "set it, or engine.mode=two_servers",
    ),
    *(
        Rule(
            f"serving.{role}",
            lambda c, role=role, elsewhere=elsewhere: getattr(c.serving, role) != ServedModel() and elsewhere(c),  # type: ignore[misc]
            lambda c, expected=expected: expected,  # type: ignore[misc]
            "remove it",
        )
        for role, elsewhere, expected in (
            (
                "senior",
                lambda c: c.engine.senior_url is not None,
                "nothing with engine.senior_url, a server of your own",
            ),
            (
                "junior",
                lambda c: c.engine.junior_url is not None,
                "nothing with engine.junior_url, a server of your own",
            ),
            ("junior", _fused, "nothing with engine.mode=fused, one server for both: serving.senior has it"),
            (
                "teacher",
                lambda c: c.engine.teacher_url is not None,
                "nothing with engine.teacher_url, a server of your own",
            ),
            ("teacher", lambda c: bool(c.opd.teachers), "nothing with opd.teachers, which have settings of their own"),
        )
    ),
    Rule(
        "serving.senior.quantization",
        lambda c: c.serving.senior.quantization is not None,
        lambda c: "null: the senior is served with the weights that are trained",
        "remove it",
    ),
    Rule(
        "train.updates_per_step",
        lambda c: c.train.prompts_per_step % c.train.updates_per_step != 0,
        lambda c: f"a divisor of train.prompts_per_step={c.train.prompts_per_step}, mini-batches hold whole groups",
        "choose a divisor",
    ),
)


def first_contradiction(config: Sections) -> ConfigError | None:
    """The first rule that the settings break, or the first setting without effect; None where all hold."""
    return _first(BEFORE_MISUSE, config) or next(config.misuses(), None) or _first(AFTER_MISUSE, config)


def _first(rules: tuple[Rule, ...], config: Sections) -> ConfigError | None:
    for rule in rules:
        if rule.broken(config):
            return ConfigError(rule.field, _shown(config, rule.field), rule.expected(config), rule.remedy)
    return None


def _shown(config: Sections, field: str) -> object:
    value: object = config
    for part in field.split("."):
        value = getattr(value, part)
    return [entry.name for entry in value] if field == "opd.teachers" and isinstance(value, tuple) else value
