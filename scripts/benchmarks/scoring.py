"""Answers scored per second: in this process, as before, and in the processes that can be killed, as a run does it.

`python scripts/benchmarks/scoring.py [--answers N]`: a table (docs/results/scoring.md). "with" is `TaskSet.verdicts`, one call
for all answers, workers started beforehand; "without" calls the same scorers in this process, one answer after the other. The
last row has one endless answer in a hundred, which nothing but a process survives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slime_tandem.config import RewardConfig, TaskSpec
from slime_tandem.tasks.families import TaskSet, scorer_of
from slime_tandem.types import Prompt


def jsonl(folder: Path, name: str, label: Callable[[int], str]) -> TaskSpec:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f'{{"prompt": "{name} {n}", "label": "{label(n)}"}}\n' for n in range(64)))
    return TaskSpec(family="jsonl", path=str(path))


def measured(what: str, spec: TaskSpec, form: str, answers: int, *, endless: bool = False) -> str:
    """One row of the table."""
    tasks = TaskSet([spec], 0, RewardConfig())
    prompts = tasks.train_prompts(0, 64)
    asked: list[tuple[Prompt, str]] = [
        (p, f"<answer>{form.format(p.label)}</answer>") for p in (prompts[i % 64] for i in range(answers))
    ]
    if endless:
        asked[50::100] = [(p, "<answer>9^{9^{9}}</answer>") for p, _ in asked[50::100]]
    tasks.verdicts(asked[:64])
    begin = time.perf_counter()
    verdicts = tasks.verdicts(asked)
    inside = answers / (time.perf_counter() - begin)
    quick = sum(tasks._judges[0]._at_once(*response) is not None for response in asked[:64]) / 64
    without = "-"
    if not endless:
        score = scorer_of(spec, "tasks.0")
        score(*asked[0])
        begin = time.perf_counter()
        for response in asked:
            score(*response)
        without = f"{answers / (time.perf_counter() - begin):,.0f}"
    right = sum(verdict.reward == 1.0 for verdict in verdicts) / answers
    return f"| {what} | {without} | {inside:,.0f} | {quick:.0%} | {right:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=2000)
    n = parser.parse_args().answers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers, words = jsonl(folder, "numbers", str), jsonl(folder, "words", lambda i: f"word {i}")
        formulas = jsonl(folder, "formulas", lambda i: f"x^2+{i + 2}x")
        print("| answers | without, per second | with, per second | of these in this process | right |")
        print("|---|---|---|---|---|")
        print(measured("numbers", numbers, "{}.0", n))
        print(measured("words", words, "{}", n))
        print(measured("numbers, as `x = 5`", numbers, "x = {}", n))
        print(measured("formulas, another form", formulas, "1x + {} - x", n // 4))
        print(measured("`chain_sum`", TaskSpec(family="chain_sum"), "{}", n))
        print(measured("`gsm_symbolic`", TaskSpec(family="gsm_symbolic"), "{}", n))
        print(measured("`countdown`", TaskSpec(family="countdown"), "{}", n))
        print(measured("numbers, one in a hundred endless", numbers, "x = {}", n // 4, endless=True))


if __name__ == "__main__":
    main()
