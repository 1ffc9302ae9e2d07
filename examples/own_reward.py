"""A reward of two parts: `python examples/own_reward.py [MODELS [RUNS]]`. The YAML would say `reward: own_reward:two_parts`."""

import sys

import slime_tandem


def two_parts(prompt: slime_tandem.Prompt, text: str, authorship_mask: list[int]) -> dict[str, float]:
    """Whether the answer is the label, in few words; and, measured alone, how much of it the senior wrote."""
    return {
        "correct": slime_tandem.label_reward(prompt, text),
        "brief": min(1.0, 5 / max(len(text.split()), 1)),
        "senior": sum(authorship_mask) / len(authorship_mask),
    }


if __name__ == "__main__":
    models, runs = (*sys.argv[1:], *("builtin", "runs")[len(sys.argv) - 1 :])
    join = ":" if models == "builtin" else "/"
    weights = {"correct": 1.0, "brief": 0.1, "senior": 0.0}
    config = slime_tandem.RunConfig.from_mapping(
        {
            "name": "two_parts",
            "runs_dir": runs,
            "models": {role: f"{models}{join}{role}" for role in ("senior", "junior")},
            "tasks": [{"family": "chain_sum", "reward": "own_reward:two_parts", "reward_weights": weights}],
            "opd": {"enabled": False},
            "sampling": {"max_new_tokens": 16},
            "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4},
            "eval": {"prompts": 4},
        }
    )
    run = slime_tandem.train(config, overwrite=True)
    for part in run.reward_parts:
        if part["phase"] == "train":
            print(f"{part['part']}: {part['mean']:.3f}")
    print("mean reward:", run.steps[0]["rollout/reward_mean"])
