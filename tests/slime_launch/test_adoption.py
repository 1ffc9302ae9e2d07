"""docs/results/slime-adoption.md and the recipes of docs/slime.md, as written: asked of slime's own parser and of our hooks."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = "slime_tandem.slime_hooks.hooks"
TANDEM = ["--custom-generate-function-path", f"{HOOKS}.generate", "--custom-config-path"]


def block(text: str, start: str) -> str:
    """The code block that begins with `start`."""
    (found,) = (b for b in re.findall(r"```\w+\n(.*?)```", text, re.S) if b.lstrip().startswith(start))
    return str(found)


def words(script: str) -> list[str]:
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def stock(slime: Path) -> list[str]:
    """What slime's scripts/run-qwen3-4B.sh gives train.py; its lists alone are run, the rest ends every Python."""
    lines = (slime / "scripts" / "run-qwen3-4B.sh").read_text()
    arrays = re.findall(r"^([A-Z]+_ARGS)=\((.*?)^\)", lines, re.S | re.M)
    text = "".join(f"{name}=({body})\n" for name, body in arrays)
    names = " ".join(f'"${{{name}[@]}}"' for name in ["MODEL_ARGS", *(name for name, _ in arrays)])
    source = f"source {slime}/scripts/models/qwen3-4B.sh\n{text}printf '%s\\0' {names}"
    return ["--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8", "--colocate", *words(source)]


def recipe_two(text: str) -> list[str]:
    return words(block(text, "H=slime_tandem") + "printf '%s\\0' \"${TANDEM[@]}\"")[:-2]  # without its file


def recipe_one(text: str) -> list[str]:
    """The flags of "Recipe 1, complete", without its two files."""
    script = block(text, "# in a Ray job").split("python $SLIME_DIR/train.py", 1)[1]
    models = Path(__file__).parents[2] / "scripts" / "train" / "models" / "qwen3-4B.sh"
    flags = words(f"source {models}; printf '%s\\0' {script}")
    for name in ("--sglang-config", "--custom-config-path"):
        at = flags.index(name)
        del flags[at : at + 2]
    return flags


def test_every_line(slime_here: Any, tmp_path: Path) -> None:
    text = (DOCS / "slime.md").read_text()
    script = stock(slime_here.slime)

    def settings(name: str, **tree: Any) -> str:
        (tmp_path / name).write_text(yaml.safe_dump({"slime_tandem": tree}))
        return str(tmp_path / name)

    def servers(name: str, **overrides: Any) -> list[str]:
        """An actor on 6 GPUs and the named models on the last two."""
        roles = name.split("-")
        tree = [{"name": "actor", "update_weights": True, "server_groups": [{"worker_type": "regular", "num_gpus": 6}]}]
        for role in roles:
            group = {"worker_type": "regular", "num_gpus": 2 // len(roles), "overrides": overrides}
            tree.append({"name": role, "update_weights": False, "server_groups": [group]})
        file = tmp_path / f"{name}-{len(overrides)}.yaml"
        file.write_text(yaml.safe_dump({"sglang": tree}))
        return ["--sglang-config", str(file)]

    backup = {"enable_weights_cpu_backup": True}
    models = {"junior": "/models/Qwen3-0.6B", "teacher": "/models/Llama-3.1-8B-Instruct"}
    without = settings("without.yaml", models=models, opd={"enabled": False})
    of_recipe = tmp_path / "of_recipe.yaml"
    of_recipe.write_text(block(text, "slime_tandem:\n     models: {junior: /models/Qwen3-0.6B}"))
    (tmp_path / "of_page.yaml").write_text(block(text, "# sglang.yaml"))
    hooks, eight = recipe_two(text), recipe_one(text)
    distil = settings("distil.yaml", models=models, tandem={"enabled": False}, opd={"coef": 0.2})
    both = tmp_path / "both.yaml"
    both.write_text(block(text, "slime_tandem:\n  models: {junior: /models/Qwen3-0.6B, teacher"))
    asked = {
        "1": (script, ""),
        "2": ([*script, *TANDEM, settings("plain.yaml", models=models)], "set slime_tandem.opd.enabled=false"),
        "3": ([*script, *TANDEM, without], "a model named junior in --sglang-config"),
        "4": ([*script, *TANDEM, without, *servers("junior")], "enable_weights_cpu_backup: true"),
        "5": ([*script, *TANDEM, without, *servers("junior", **backup)], ""),
        "6": ([*script, *hooks, "--custom-config-path", distil, *servers("teacher", **backup)], ""),
        "7": ([*script, *hooks, "--custom-config-path", str(both), *servers("junior-teacher", **backup)], ""),
        "recipe 1": (
            [*eight, "--sglang-config", str(tmp_path / "of_page.yaml"), "--custom-config-path", str(of_recipe)],
            "",
        ),
    }
    program = """
import contextlib, io, json, sys
from slime_tandem.slime_launch.real_parser import main, parse
with contextlib.suppress(SystemExit):
    parse([])  # imports what is particular about its stderr
answers = {}
for name, flags in json.load(sys.stdin).items():
    with contextlib.redirect_stderr(io.StringIO()) as told:
        answers[name] = [main(flags), told.getvalue()]
print("ANSWERS" + json.dumps(answers))
"""
    done = subprocess.run(
        [slime_here.python, "-W", "ignore", "-c", program], input=json.dumps({n: f for n, (f, _) in asked.items()}),
        env=slime_here.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    answers = json.loads(done.stdout.split("ANSWERS")[1])
    for name, (_, refusal) in asked.items():
        code, told = answers[name]
        assert (code, refusal in told) == (2 if refusal else 0, True), (name, told)
