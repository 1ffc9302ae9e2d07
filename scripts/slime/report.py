#!/usr/bin/env python3
"""What a run of real_run.py says in slime's own log, as Markdown: `scripts/slime/report.py WORK [--json FILE]`.

Per step: reward, senior's share, the teacher's divergence, loss, train/rollout log-prob difference, seconds by phase, and
whether the check-sum of the channels is the same on both sides.
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path

_LINE = re.compile(r"(?:- |\] )(slime_tandem|rollout|step|perf|eval) (\d+): (\{.*\})")
_SENT = re.compile(r"slime_tandem channels sent (\d+): samples (\d+) check-sum (\w+)")
_PROCESS = re.compile(r"\(\w+ pid=(\d+)")
_RECEIVED = re.compile(
    r"slime_tandem channels received: tokens (\d+) check-sum (\w+)(?: peak (\d+) bytes(?:, (\d+) retries)?)?"
)
_COLUMNS = {
    "reward": "rollout/reward_mean", "senior": "tandem/senior_token_fraction", "teacher KL": "opd/teacher_kl",
    "coverage": "opd/coverage", "kept": "selection/keep_ratio", "loss": "train/loss", "pg": "train/pg_loss",
    "opd": "train/opd_loss", "|dlogp|": "train/logprob_diff", "grad": "train/grad_norm", "rollout s": "perf/rollout_time",
    "train s": "perf/actor_train_time", "weights s": "perf/update_weights_time", "step s": "perf/step_time",
}  # fmt: skip


def read(log):
    """({rollout: {metric: value}}, [(rollout, sent, received, tokens, ranks)], (peak bytes, retries) of a rank) of a log.

    A resumed run's lines come later and count; ranks that received the same are listed once, with their number.
    """
    steps, sums, sent, peak, retries = {}, {}, {}, 0, 0
    for line in log.read_text(errors="replace").splitlines():
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if found := _SENT.search(line):
            sent[found[3]] = last = int(found[1])
        elif (found := _RECEIVED.search(line)) and sent:
            # train_async.py sends the next rollout before this one is trained on: they are known by their sums.
            number = sent.get(found[2], last)
            row = (number, found[2] if found[2] in sent else "none", found[2], int(found[1]))
            peak, retries = max(peak, int(found[3] or 0)), max(retries, int(found[4] or 0))
            process = _PROCESS.search(line)
            sums.setdefault(row, set()).add(process[1] if process else "")
        elif found := _LINE.search(line):
            try:
                values = ast.literal_eval(found[3].replace("nan", "None"))
            except (ValueError, SyntaxError):
                continue
            kind, number = found[1], int(found[2])
            if kind == "step":  # optimizer steps of one rollout share its row: the last one counts
                number = next(reversed(sums))[0] if sums else number
            steps.setdefault(number, {}).update(values)
    return steps, [(*row, len(ranks)) for row, ranks in sums.items()], (peak, retries)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    steps, sums, (peak, retries) = read(a.work / "train.log")
    print("| step | " + " | ".join(_COLUMNS) + " |\n|" + "---|" * (len(_COLUMNS) + 1))
    for number in sorted(steps):
        cells = [steps[number].get(name) for name in _COLUMNS.values()]
        print(f"| {number} | " + " | ".join("" if v is None else f"{v:.4g}" for v in cells) + " |")
    same = sum(s == r for _, s, r, _, _ in sums)
    example = sums[-1][1:3] if sums else None
    ranks = sorted({ranks for *_, ranks in sums})
    print(
        f"\nchannels: {same} of {len(sums)} rollouts with the same check-sum on both sides, e.g. {example};"
        f" each received by {' or '.join(map(str, ranks))} trainer ranks"
    )
    if peak:
        print(f"peak memory of a trainer rank before the last rollout: {peak / 2**30:.2f} GiB")
    if retries:
        print(f"the card was full {retries} times: the allocator gave its cache back, and steps took longer for it")
    for number in sorted(steps):
        eval_ = {k: v for k, v in steps[number].items() if k.startswith("eval/") and k.count("/") == 1}
        if eval_:
            print(f"evaluation before rollout {number}: {eval_}")
    if a.json is not None:
        a.json.write_text(
            json.dumps({"steps": steps, "check_sums": sums, "peak_bytes": peak, "retries": retries}, indent=1)
        )
    return 0 if sums and same == len(sums) else 1


if __name__ == "__main__":
    sys.exit(main())
