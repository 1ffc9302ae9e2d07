"""What an installation inside slime's image would change there: nothing (scripts/slime/check_install.sh tries it with pip)."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_nothing_of_the_image_is_asked_for_in_another_version() -> None:
    lines = (ROOT / "scripts" / "slime" / "image_packages.txt").read_text().splitlines()
    image = {
        canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if not line.startswith("#"))
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = [Requirement(text) for text in project["dependencies"]]
    wrong = {r.name for r in base if r.name in image and not r.specifier.contains(image[r.name], prereleases=True)}
    assert not wrong
    assert "megatron-core" not in {r.name for r in base}
    of_a_job = [Requirement(text) for text in project["optional-dependencies"]["slime"]]
    assert {"sglang", "ray", "transformer-engine"} <= {canonicalize_name(r.name) for r in of_a_job}
    for r in of_a_job:
        assert r.specifier.contains(image[canonicalize_name(r.name)], prereleases=True), r
    (local,) = (Requirement(text) for text in project["optional-dependencies"]["local"])
    assert local.name == "megatron-core"
    assert not local.specifier.contains(image["megatron-core"], prereleases=True), "why it is no base dependency"
