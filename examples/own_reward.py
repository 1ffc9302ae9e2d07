"""A reward of one's own: `python examples/own_reward.py [MODELS [RUNS]]`. The YAML would say `reward: own_reward:brief`."""

import sys

import slime_tandem


def brief(prompt: slime_tandem.Prompt, text: str) -> float:
    """1.0 for a response of at most five words, less for more."""
    return min(1.0, 5 / max(len(text.split()), 1))


if __name__ == "__main__":
    models, runs = (*sys.argv[1:], *("builtin", "runs")[len(sys.argv) - 1 :])
    join = ":" if models == "builtin" else "/"
    config = slime_tandem.RunConfig.from_mapping(
        {
            "name": "brief",
            "runs_dir": runs,
            "models": {role: f"{models}{join}{role}" for role in ("senior", "junior")},
            "tasks": [{"family": "chain_sum", "reward": "own_reward:brief"}],
            "opd": {"enabled": False},
            "sampling": {"max_new_tokens": 16},
            "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4},
            "eval": {"prompts": 4},
        }
    )
    run = slime_tandem.train(config, overwrite=True)
    print("mean reward:", run.steps[0]["rollout/reward_mean"])
