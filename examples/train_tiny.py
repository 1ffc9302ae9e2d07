"""Two steps of tandem training with a teacher: `python examples/train_tiny.py [MODELS [RUNS]]`."""

import sys

import slime_tandem

models, runs = (*sys.argv[1:], *("builtin", "runs")[len(sys.argv) - 1 :])
join = ":" if models == "builtin" else "/"
config = slime_tandem.RunConfig.from_mapping(
    {
        "name": "tiny",
        "runs_dir": runs,
        "models": {role: f"{models}{join}{role}" for role in ("senior", "junior", "teacher")},
        "sampling": {"max_new_tokens": 16},
        "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4},
        "eval": {"prompts": 4},
    }
)
run = slime_tandem.train(config, overwrite=True)
for row in run.steps:
    print(row["step"], {name: row[name] for name in ("rollout/reward_mean", "opd/teacher_kl", "opd/coverage")})
print(run.summary["verdict"]["text"])
