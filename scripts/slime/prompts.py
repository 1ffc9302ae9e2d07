#!/usr/bin/env python3
"""Prompts of a reasoning-gym task as the JSONL file that slime reads: `python scripts/slime/prompts.py chain_sum 256 FILE`.

The rows hold `prompt` (chat messages) and `label`; `--held-out` takes the held-out tenth, `--config` is the task's (YAML).
"""

import argparse
import json
from pathlib import Path

import yaml

from slime_tandem.config import TaskSpec
from slime_tandem.tasks.families import TaskSet

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("family")
parser.add_argument("count", type=int)
parser.add_argument("file", type=Path)
parser.add_argument("--held-out", action="store_true")
parser.add_argument("--config", type=yaml.safe_load, default={"min_terms": 2, "max_terms": 2})
parser.add_argument("--seed", type=int, default=0)
a = parser.parse_args()
tasks = TaskSet([TaskSpec(family=a.family, config=a.config)], a.seed)
prompts = tasks.heldout_prompts(a.count) if a.held_out else tasks.train_prompts(0, a.count)
rows = [{"prompt": [m.as_dict() for m in p.messages], "label": p.label} for p in prompts]
a.file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
