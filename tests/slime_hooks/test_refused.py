"""The one list of what does not go together: every rule can be broken, is documented, and names flags that slime has."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.slime_hooks.refused import (
    FOLLOWED,
    KEY,
    PLANNED,
    REMEDIES,
    RULES,
    Job,
    Rule,
    argument,
    check_flags,
    instead_of,
)

ROOT = Path(__file__).parents[2]
FLAGS = sorted({rule.name for rule in RULES if rule.name.startswith("--")})


def test_a_rule_asks_of_a_flag_only_where_it_holds() -> None:
    rule = Rule("--a-b", lambda job: f"no {job.config.seed}", when=lambda job: job.config.tandem.enabled)
    alone = RunConfig.load(overrides=["tandem.enabled=false"])
    rule.check(Job(Namespace(), RunConfig()))
    rule.check(Job(Namespace(a_b=0), RunConfig()))
    rule.check(Job(Namespace(a_b=1), alone))
    with pytest.raises(ConfigError, match=r"^--a-b=1: expected no 0\. Remedy: remove it\.$"):
        rule.check(Job(Namespace(a_b=1), RunConfig()))


def test_arguments_without_any_flag_break_the_rules_of_the_loss_alone() -> None:
    """slime's default is its own loss; opd.enabled is ours."""
    with pytest.raises(ConfigError, match=r"--loss-type=None: .*set slime_tandem\.opd\.enabled=false"):
        check_flags(Namespace(), RunConfig())
    check_flags(Namespace(), RunConfig.load(overrides=["opd.enabled=false", "objective.clip_high=0.2"]))


@pytest.mark.parametrize(
    "flag", ["--use-routing-replay", "--prefill-num-servers", "--rollout-external-engine-addrs", "--rm-type"]
)
def test_some_rules_hold_for_a_plan_alone(flag: str) -> None:
    config = RunConfig.load(overrides=["opd.enabled=false"])
    args = SimpleNamespace(**{argument(flag): True})
    check_flags(args, config)
    with pytest.raises(ConfigError, match=f"^{flag}=True"):
        check_flags(args, config, planned=True)


def test_every_name_is_a_setting_that_exists() -> None:
    config = RunConfig()
    named = [n for text in {**FOLLOWED, **PLANNED}.values() for n in re.split(r", | and | or ", text)]
    for name in (*named, *(rule.name.removeprefix(f"{KEY}.") for rule in RULES if not rule.name.startswith("--"))):
        node: Any = config
        for part in name.split("."):
            node = getattr(node, part)
    assert not FOLLOWED.keys() & PLANNED.keys()
    assert not {**FOLLOWED, **PLANNED}.keys() & REMEDIES.keys()


@pytest.mark.parametrize("flag", FLAGS)
def test_the_documentation_names_every_flag_of_the_list(flag: str) -> None:
    refused = (ROOT / "docs" / "slime-reference.md").read_text().partition("## What is refused")[2]
    assert re.search(rf"`{flag}\b", refused), "docs/slime-reference.md, What is refused"


def test_a_remedy_is_true() -> None:
    """A function of one's own is a setting of the task; for a column of one's own there is none."""
    for flag in ("--custom-rm-path", "--input-key"):
        assert "instead (--set)" not in instead_of(flag, hook=flag == "--custom-rm-path", of_model=False)
    remedy = instead_of("--custom-rm-path", hook=True, of_model=False)
    assert "tasks[].reward" in remedy
    assert "cluster.reward" in remedy
    assert "tasks" in instead_of("--input-key", hook=False, of_model=False)
    assert instead_of("--num-layers", hook=False, of_model=True).endswith("models.senior")
    assert "without a plan" in instead_of("--rollout-data-postprocess-path", hook=True, of_model=False)


def test_slime_has_every_flag_of_the_list(slime_here: Any) -> None:
    slime = slime_here.slime / "slime"
    files = [slime / "utils" / "arguments.py", *(slime / "backends" / "sglang_utils").glob("*.py")]
    known = {flag for file in files for flag in re.findall(r"--[a-z0-9-]+", file.read_text())}
    # An argument that slime itself sets, with --advantage-estimator ppo; and one of Megatron's.
    assert set(FLAGS) - known == {"--use-critic", "--lr-decay-style"}


def test_a_reward_path_beside_one_of_slimes_rewards_is_refused_in_a_plan() -> None:
    config = RunConfig.from_mapping({"cluster": {"reward": "math"}, "opd": {"enabled": False}})
    with pytest.raises(
        ConfigError, match=r"--custom-rm-path='my\.fn': expected not to be set with cluster\.reward='math'"
    ):
        check_flags(Namespace(rm_type="math", custom_rm_path="my.fn"), config, planned=True)
    check_flags(Namespace(rm_type="math"), config, planned=True)
