"""Many methods over many seeds from one base configuration: a suite, which can be stopped and gone on with at any time.

A method is written `name:number:idx`, as launch scripts of TA-OPD write it: `teachability:0.10:20`. For distillation methods
(any selector or alias of `opd.selection.selector`, a name of the published scripts (`METHOD_NAMES`), or a selector of one's
own, `module:attribute`) the number is the share of tokens that is kept; `pure_opd` and its names keep all, whatever the number,
as published. For tandem methods it is
`tandem.prob_senior`: `solo_grpo:1.0:10`, `tandem_word:0.5:20`, `tandem_sentence`, `tandem_bernoulli`, `tandem_chunk`,
`tandem_alternating` (the last two always alternate: 0.5). `idx` names the method for good.

The suite's folder holds `method_mapping.csv` and one run folder per method and seed; `slime-tandem report SUITE` compares them.
`run_suite` runs it on this machine, `slime_launch.suite` under slime. It knows nothing of what is in a run.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock

from slime_tandem.config import RunConfig, SelectorName
from slime_tandem.config.load import load_yaml
from slime_tandem.errors import ConfigError, RunDirError
from slime_tandem.extensions import is_own
from slime_tandem.report.comparison import MAPPING, MAPPING_COLUMNS, read_mapping
from slime_tandem.report.run_folder import disk_errors, replace_file, require_same_settings
from slime_tandem.report.summary import summarise
from slime_tandem.strategies import STRATEGIES

_ENTRY = re.compile(r"([A-Za-z0-9_.:]+):([0-9.]+):([0-9]{1,6})")
_SELECTORS = tuple(n for part in get_args(SelectorName) for n in (get_args(part) or (part,)))
_TANDEM = ("solo_grpo", *(f"tandem_{s}" for s in STRATEGIES))
METHOD_NAMES: dict[str, SelectorName] = {
    **dict.fromkeys(("full_opd", "none"), "pure_opd"),
    **dict.fromkeys(("teachability_high", "dlearn"), "teachability"),
    **dict.fromkeys(("entropy_teachability", "ta_softor", "dlearn_entropy"), "teachability_entropy"),
    **dict.fromkeys(("teachability_entropy_split", "entropy_teachability_split", "ta_split"), "split_budget_ca"),
    **dict.fromkeys(("high_d", "raw_d"), "divergence"),
    "high_entropy": "entropy",
    "high_c": "compatibility",
    "tip_softor": "tip",
    "q3_highC": "q3_highc",
    "q3_teachability_high": "q3_dlearn_high",
    "q3_teachability_low": "q3_dlearn_low",
}
"""Further names that TA-OPD's scripts and flags take, and the selector of each."""


@dataclass(frozen=True, slots=True)
class Method:
    """One entry of a method list.

    >>> Method.parse("teachability:0.10:20")
    Method(name='teachability', number=0.1, idx=20)
    """

    name: str
    number: float
    idx: int

    @classmethod
    def parse(cls, text: str) -> Method:
        """Read `name:number:idx`; raises ConfigError for another form or an unknown method.

        >>> Method.parse("full_opd:0.3:10"), Method.parse("my.module:best:0.1:20").selector
        (Method(name='full_opd', number=1.0, idx=10), 'my.module:best')
        """
        found = _ENTRY.fullmatch(text)
        try:
            number = float(found[2]) if found else 0.0
        except ValueError:
            found = None
        if not found:
            raise ConfigError(
                "METHOD_LIST", text, "entries method:ratio:idx", "e.g. teachability:0.10:20, separated by blanks"
            )
        names = [*_SELECTORS, *METHOD_NAMES, *_TANDEM]
        if found[1] not in names and not is_own(found[1]):
            close = difflib.get_close_matches(found[1], names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "choose one of these"
            expected = f"a method among {', '.join(names)}, or a selector of your own as module:attribute"
            raise ConfigError("METHOD_LIST", found[1], expected, hint)
        method = cls(found[1], number, int(found[3]))
        return replace(method, number=1.0) if method.keeps_all else method

    @property
    def selector(self) -> str:
        """Of a distillation method: what `opd.selection.selector` is set to."""
        return METHOD_NAMES.get(self.name, self.name)

    @property
    def keeps_all(self) -> bool:
        """Whether it distils on every token, so that it has no number."""
        return self.selector in ("full", "pure_opd")

    def overrides(self, top_k: int) -> list[str]:
        """The settings that make the base configuration this method's; `top_k`: length of the lists for selectors.

        >>> Method("tip", 0.1, 30).overrides(16)
        ['opd.enabled=true', 'opd.selection.selector=tip', 'opd.selection.ratio=0.1', 'opd.selection.top_k=16']
        >>> Method("tandem_word", 0.25, 5).overrides(16)[2:]
        ['tandem.enabled=true', 'tandem.selection_strategy=word', 'tandem.prob_senior=0.25']
        """
        if self.name not in _TANDEM:
            out = [
                "opd.enabled=true",
                f"opd.selection.selector={self.selector}",
                f"opd.selection.ratio={self.number:.15g}",
            ]
            return out if self.keeps_all else [*out, f"opd.selection.top_k={top_k}"]
        out = ["opd.enabled=false", "objective.reward_coef=1.0"]
        strategy = self.name.removeprefix("tandem_")
        drawn = strategy in STRATEGIES and not STRATEGIES[strategy].alternates
        fixed = self.number if drawn else 1.0 if strategy == "solo_grpo" else 0.5
        if self.number != fixed:
            entry = f"{self.name}:{self.number:.15g}:{self.idx}"
            raise ConfigError("METHOD_LIST", entry, f"the number {fixed:.15g}, it has no other", "correct it")
        if self.name == "solo_grpo":
            return [*out, "tandem.enabled=false", "eval.tandem=true"]
        out += ["tandem.enabled=true", f"tandem.selection_strategy={strategy}"]
        return [*out, f"tandem.prob_senior={self.number:.15g}"] if drawn else out


def parse_methods(text: str) -> list[Method]:
    """Methods of a list separated by blanks or commas; raises ConfigError for an empty list and an idx that stands twice."""
    methods = [Method.parse(entry) for entry in text.replace(",", " ").split()]
    if not methods:
        raise ConfigError("METHOD_LIST", text, "at least one method:ratio:idx", "e.g. pure_opd:1.0:10")
    for method in methods:
        if sum(m.idx == method.idx for m in methods) > 1:
            raise ConfigError("METHOD_LIST", text, "an idx of its own for each method", f"change {method.idx}")
    return methods


def parse_seeds(text: str) -> list[int]:
    """Seeds of a list separated by blanks; raises ConfigError for anything but different whole numbers."""
    seeds = text.split()
    if not seeds or not all(s.isdecimal() for s in seeds) or len({int(s) for s in seeds}) < len(seeds):
        raise ConfigError("SEEDS", text, "different whole numbers separated by blanks", "e.g. 0 1 2")
    return [int(s) for s in seeds]


@dataclass(frozen=True, slots=True)
class Suite:
    """What is run: each method with each seed, in `folder`. `overrides` are the user's, of all methods alike."""

    folder: Path
    methods: Sequence[Method]
    seeds: Sequence[int]
    config_file: Path | None
    overrides: Sequence[str] = ()
    top_k: int = 16

    def settings(self, method: Method, seed: int) -> list[str]:
        """All overrides of one run."""
        called = method.name.replace(":", ".")
        name = f"{method.idx:03d}-{called}-{method.number:.15g}-seed{seed}"
        own = [f"name={name}", f"runs_dir={json.dumps(str(self.folder))}", f"seed={seed}"]
        return [*self._of_method(method, name), *method.overrides(self.top_k), *own]

    def _of_method(self, method: Method, run: str) -> list[str]:
        """The user's overrides, without those that say how tokens are selected where a method selects none or by other rules.

        An absolute `opd.token_bank_dir` is a folder with one of each run.
        """
        left_out: list[str] = []
        if method.name in _TANDEM:
            left_out = ["opd.selection.", "opd.token_bank_"]
        elif method.keeps_all:
            left_out = ["opd.selection."]
        elif method.selector != "split_budget_ca" and not is_own(method.selector):
            left_out = ["opd.selection.gamma="]
        if method.selector != "random":
            left_out.append("opd.selection.mask_seed=")
        kept = [o for o in self.overrides if not o.startswith(tuple(left_out))]
        return [_bank_of(o, run) if o.startswith("opd.token_bank_dir=") else o for o in kept]

    def runs(self) -> list[tuple[Method, int, RunConfig]]:
        """Every run, seed by seed, so that a suite that was stopped compares all methods on the seeds it has."""
        return [
            (method, seed, RunConfig.load(self.config_file, self.settings(method, seed)))
            for seed in self.seeds
            for method in self.methods
        ]


def _bank_of(override: str, run: str) -> str:
    folder = load_yaml(override.partition("=")[2])
    own = isinstance(folder, str) and Path(folder).is_absolute()
    return f"opd.token_bank_dir={json.dumps(str(Path(folder) / run))}" if own else override


def run_suite(suite: Suite, *, dry_run: bool = False, say: Callable[[str], None] = print) -> None:
    """Run what is not finished yet: finished runs are kept, half ones resumed. `dry_run` prints the commands.

    Raises ConfigError, ModelError and RunDirError before anything runs, for settings and models that do not go together, and
    for settings that differ from those that a run of the folder was started with.
    """
    runs = suite.runs()
    merged_mapping(suite.folder, runs)
    for _, _, config in runs:
        if (config.run_dir / "config.yaml").exists():
            require_same_settings(config.run_dir / "config.yaml", config)
    _check_models([config for _, seed, config in runs if seed == suite.seeds[0]])
    if not dry_run:
        write_mapping(suite.folder, runs)
    for number, (method, seed, config) in enumerate(runs, 1):
        state = _state(config)
        say(f"[{number}/{len(runs)}] {config.name}: {state}")
        if dry_run:
            flags = ["--config", str(suite.config_file)] if suite.config_file else []
            say(
                "  " + shlex.join(["slime-tandem", "train", *flags, "--set", *suite.settings(method, seed), "--resume"])
            )
        elif state != "finished":
            from slime_tandem.local.run import train  # torch, Megatron: not for a dry run

            train(config, resume=True)


def _check_models(configs: Sequence[RunConfig]) -> None:
    """Raise for models that do not go together, of every method before the first runs; built-in ones always do."""
    if any(
        not model.startswith("builtin:")
        for config in configs
        for model in (config.models.senior, config.models.junior, config.models.teacher)
    ):
        from slime_tandem.team.roster import check_models  # torch

        for config in configs:
            check_models(config)


def write_mapping(folder: Path, runs: Sequence[tuple[Method, int, RunConfig]]) -> None:
    """Write `method_mapping.csv` with the rows of these runs beside the old ones; raises RunDirError, as `merged_mapping`."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".mapping.lock"):  # another part of the suite may be starting
            text = io.StringIO()
            writer = csv.DictWriter(text, MAPPING_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(merged_mapping(folder, runs))
            replace_file(folder / MAPPING, text.getvalue().encode())


def _state(config: RunConfig) -> Literal["new", "half", "finished"]:
    if not (config.run_dir / "config.yaml").exists():
        return "new"
    summary = summarise(config.run_dir)
    return "finished" if summary["complete"] and summary["run"]["steps"] >= config.train.steps else "half"


def merged_mapping(folder: Path, runs: Sequence[tuple[Method, int, RunConfig]]) -> list[dict[str, str]]:
    """The mapping's rows, old and new; raises RunDirError where an idx means another method than it did."""
    old = read_mapping(folder) if (folder / MAPPING).exists() else []
    rows = {row["run"]: row for row in old}
    for method, seed, config in runs:
        number = f"{method.number:.15g}"
        for row in old:
            if int(row["idx"]) == method.idx and (row["method"], row["ratio"]) != (method.name, number):
                was = f"{row['method']}:{row['ratio']}:{row['idx']}"
                raise RunDirError(
                    "METHOD_LIST", f"{method.name}:{number}:{method.idx}", f"{was}, as in {folder}", "use a new idx"
                )
        mask = method.name if method.name in _TANDEM else config.opd.selection.mask
        values = (str(method.idx), method.name, mask, number, str(seed), config.name)
        rows[config.name] = dict(zip(MAPPING_COLUMNS, values, strict=True))
    return sorted(rows.values(), key=lambda row: (int(row["idx"]), int(row["seed"])))
