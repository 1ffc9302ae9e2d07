"""A rollout's tokens as TA-OPD's published code writes them: `opd.token_bank_dir`, one file a rollout.

A row for each token, columns and file names as published: `rollout_000000.csv` (or `.jsonl`), `summary.csv`, `config.json`. It
decides nothing: scores are `distill.published`'s, which tokens were kept is the rollout's mask.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slime_tandem.config import RunConfig
from slime_tandem.distill.opd_mask import OpdMask, joined_lists, token_keys
from slime_tandem.distill.published import PublishedScores, budget_score, published_scores
from slime_tandem.errors import RunDirError
from slime_tandem.files import csv_cell, whole_file
from slime_tandem.types import BoolArray, ScoredSample, TopLists

_QUADRANTS = {
    (True, True): "Q1_highH_highD",
    (True, False): "Q2_highH_lowD",
    (False, True): "Q3_lowH_highD",
    (False, False): "Q4_lowH_lowD",
}
_SCHEMA = 1
_NAN = float("nan")


class TokenBank:
    """Writes the banks of a run. A relative `opd.token_bank_dir` lies in the run's folder."""

    def __init__(self, config: RunConfig) -> None:
        assert config.opd.token_bank_dir is not None
        self.config = config
        self.folder = config.run_dir / config.opd.token_bank_dir

    @classmethod
    def of(cls, config: RunConfig) -> TokenBank | None:
        """None for a run that writes none."""
        return cls(config) if config.opd.enabled and config.opd.token_bank_dir is not None else None

    def write(self, rollout: int, samples: Sequence[ScoredSample], usable: Sequence[BoolArray], mask: OpdMask) -> None:
        """The tokens of one rollout; its file is replaced if it is there (a resumed run writes it again).

        `usable` [R] per response: whether a token might carry the signal. Raises RunDirError.
        """
        if not samples or not sum(map(len, usable)):
            return
        rows = list(self._rows(rollout, samples, usable, mask))
        opd, text = self.config.opd, io.StringIO()
        if opd.token_bank_format == "jsonl":  # noqa: S105 - no password
            text.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            _csv(text, rows)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put(f"rollout_{rollout:06d}.{opd.token_bank_format}", text.getvalue())
            self._summarise(rollout, rows)
            if not (self.folder / "config.json").exists():
                self._put("config.json", json.dumps(self._settings(), indent=2) + "\n")
        except OSError as error:
            raise RunDirError.of_os_error(self.folder, error) from error

    def _put(self, name: str, text: str) -> None:
        with whole_file(self.folder / name) as file:
            file.write_text(text, encoding="utf-8", newline="")

    def _rows(
        self, rollout: int, samples: Sequence[ScoredSample], usable: Sequence[BoolArray], mask: OpdMask
    ) -> Iterator[dict[str, Any]]:
        config, chosen = self.config, self.config.opd.selection
        lists = joined_lists([t.lists if (t := s.teacher) else None for s in samples], usable, chosen)
        scores = mask.published
        if scores is None:
            scores = published_scores(lists, token_keys([s.sample.key for s in samples], usable), chosen)
        teachers = [t.name for t in config.opd.teachers] or [config.models.teacher]
        i = 0
        for ordinal, (scored, able, keep) in enumerate(zip(samples, usable, mask.masks, strict=True)):
            sample, teacher = scored.sample, scored.teacher
            R = len(sample.response_ids)
            for at in range(R):
                mine = sample.log_probs[at]
                theirs = float(teacher.log_probs[at]) if teacher is not None and teacher.mask[at] else _NAN
                yield {
                    "schema_version": _SCHEMA,
                    "pair_id": config.opd.token_bank_pair_id,
                    "teacher_name": ",".join(teachers),
                    "student_name": config.models.senior,
                    "seed": config.seed,
                    "rollout_id": rollout,
                    "sample_index": sample.key.sample_index,
                    "group_index": sample.group_id,
                    "sample_ordinal": ordinal,
                    "tok_pos": at,
                    "pos_norm": at / max(R - 1, 1),
                    "prompt_len": len(sample.prompt_ids),
                    "resp_len": R,
                    "total_len": len(sample.prompt_ids) + R,
                    "truncated": int(sample.finish_reason == "length"),
                    "token_id": sample.response_ids[at],
                    "student_logp_sampled": mine,
                    "teacher_logp_sampled": theirs,
                    "sampled_reverse_kl": mine - theirs,
                    "sampled_teacher_adv": theirs - mine,
                    **_of_lists(lists, scores, i, sample.response_ids[at]),
                    "loss_mask_original": int(able[at]),
                    **_normalised(scores, i),
                    "budget_method": chosen.mask,
                    "budget_ratio": chosen.ratio,
                    "budget_score": budget_score(scores, chosen.mask, i),
                    "budget_keep": int(keep[at]),
                    **_raw(lists, i, kept=config.opd.token_bank_raw_topk),
                }
                i += 1

    def _summarise(self, rollout: int, rows: Sequence[dict[str, Any]]) -> None:
        valid = [row for row in rows if row["loss_mask_original"]]
        kept = sum(row["budget_keep"] for row in valid)
        means = ("H_norm", "D_norm", "C_norm", "tip_score", "ca_softor_score", "reach_t1")
        mine = {
            "rollout_id": rollout,
            "num_tokens": len(rows),
            "num_valid_tokens": len(valid),
            "num_kept_tokens": kept,
            "keep_ratio": kept / max(len(valid), 1),
            **{f"mean_{name}": sum(row[name] for row in valid) / max(len(valid), 1) for name in means},
            "q3_tokens": sum(row["quadrant"] == "Q3_lowH_highD" for row in valid),
            "budget_method": rows[0]["budget_method"],
            "budget_ratio": rows[0]["budget_ratio"],
        }
        path, text = self.folder / "summary.csv", io.StringIO()
        old: list[dict[str, Any]] = []
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                old = [row for row in csv.DictReader(file) if row["rollout_id"] != str(rollout)]
        _csv(text, [*old, mine])
        self._put(path.name, text.getvalue())

    def _settings(self) -> dict[str, Any]:
        s = self.config.opd.selection
        return {
            "schema_version": _SCHEMA,
            "opd_topk_metrics_k": s.top_k,
            "opd_budget_mask": s.mask,
            "opd_budget_ratio": s.ratio,
            "opd_budget_gamma": s.gamma,
            "opd_compat_proxy": {"overlap": "set", "bhattacharyya": "bc", "prefix": "prefix_ema"}.get(
                s.compatibility, "mass"
            ),
            "opd_metric_normalization": s.normalisation,
            "opd_exact_cmass": s.exact_cmass,
            "rules": s.rules,
            "notes": "H, D, C by the published definitions; with rules=own tokens were kept by others (docs/teachability.md).",
        }


def _csv(file: io.StringIO, rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, list(rows[-1]))
    writer.writeheader()
    writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in rows)


def _of_lists(lists: TopLists, scores: PublishedScores, i: int, token: int) -> dict[str, Any]:
    s_ids, t_ids = ([int(x) for x in ids[i] if x >= 0] for ids in (lists.student_ids, lists.teacher_ids))
    t = scores.tokens[i]
    return {
        "student_top1_id": s_ids[0] if s_ids else None,
        "teacher_top1_id": t_ids[0] if t_ids else None,
        "student_top1_prob": _first(lists.student_ids[i], lists.student_log_probs[i]),
        "teacher_top1_prob": _first(lists.teacher_ids[i], lists.teacher_log_probs[i]),
        "student_topk_mass": t.student_mass,
        "teacher_topk_mass": t.teacher_mass,
        "Hs_topk": t.student_entropy,
        "Ht_topk": t.teacher_entropy,
        "Hs_topk_norm": t.student_entropy_norm,
        "Ht_topk_norm": t.teacher_entropy_norm,
        "KLf_union": t.forward,
        "KLr_union": t.reverse,
        "Cmass": t.mass,
        "Cmass_topk": t.mass_listed,
        "Cmass_true": t.mass if t.exact else "",
        "Cmass_exact": int(t.exact),
        "Coverlap": t.overlap,
        "CBC": t.bhattacharyya,
        "Cprefix_ema": t.prefix,
        "reach_t1": int(bool(t_ids) and t_ids[0] in s_ids),
        "target_in_student_topk": int(token in s_ids),
        "target_in_teacher_topk": int(token in t_ids),
        "target_student_rank": s_ids.index(token) + 1 if token in s_ids else None,
        "target_teacher_rank": t_ids.index(token) + 1 if token in t_ids else None,
    }


def _first(ids: Any, log_probs: Any) -> float:
    there = np.flatnonzero(ids >= 0)
    return math.exp(float(log_probs[there[0]])) if len(there) else 0.0


def _normalised(s: PublishedScores, i: int) -> dict[str, Any]:
    return {
        "H_norm": s.H[i],
        "D_norm": s.D[i],
        "C_norm": s.C[i],
        "DC_norm": s.DC[i],
        "Dlearn": s.dlearn(i),
        "Dincompat": s.dincompat(i),
        "tip_score": s.tip(i),
        "ca_softor_score": s.ca_softor(i),
        "split_ca_score": s.split_ca(i),
        "quadrant": _QUADRANTS[s.high_h[i], s.high_d[i]],
    }


def _raw(lists: TopLists, i: int, *, kept: bool) -> dict[str, str]:
    columns = {
        "student_top": (lists.student_ids[i], lists.student_log_probs[i]),
        "teacher_top": (lists.teacher_ids[i], lists.teacher_log_probs[i]),
    }
    out = {}
    for name, (ids, values) in columns.items():
        there = ids >= 0
        out[f"{name}_ids"] = json.dumps(ids[there].tolist()) if kept else ""
        out[f"{name}_logps"] = json.dumps(values[there].tolist()) if kept else ""
    return out
