"""Settings, curves and transcripts of a run: `python examples/read_a_run.py runs/NAME`."""

import sys

import slime_tandem

run = slime_tandem.open_run(sys.argv[1])
print("prob_senior:", run.config.tandem.prob_senior)
print("reward by step:", [row["rollout/reward_mean"] for row in run.steps])
print("accuracy before and after:", [(row["phase"], row["eval/tandem_accuracy"]) for row in run.evaluations])
for t in run.transcripts[:1]:
    print(t["prompt"], "->", "".join(f"[{k['text']}]" if k["author"] == 0 else k["text"] for k in t["tokens"]))
