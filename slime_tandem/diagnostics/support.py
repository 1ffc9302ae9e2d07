"""Whether the findings hang on how the student's support is defined: its K best tokens, a nucleus, or another measure.

Definitions of C, from a bank's lists (K is the bank's):
  mass@k          the teacher's mass on the student's k best
  top_p@p         the same on the student's nucleus: its best tokens until they hold p; cut at K where the list ends before
  overlap, bhattacharyya   as `distill/teachability.py`
Each is compared with the reference, mass@K: by rank correlation over contexts, by the tokens that `dlearn_high` takes, and,
with evaluations, by the two findings that rest on C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from slime_tandem.diagnostics.bank import BANK, Bank, Metadata, top_lists
from slime_tandem.diagnostics.gain import Contexts, Resampler, gains, load_contexts, r_squared_gains, thirds
from slime_tandem.diagnostics.output import Report, Row, plain
from slime_tandem.diagnostics.topn import bank_scores
from slime_tandem.distill.selection import TokenKeys, overlap, select
from slime_tandem.distill.teachability import Compatibility, MissingMass, Normalisation, TopLists, normalise, raw_scores
from slime_tandem.errors import ConfigError
from slime_tandem.types import BoolArray, FloatArray

_DIFFERENCE, _MORE = "low H, high D: gain at high minus low C", "R² of the gain: C beside base"


def first_of(lists: TopLists, keep: BoolArray) -> TopLists:
    """The student's list without the entries where `keep` [N, K] is False."""
    return replace(lists, student_ids=np.where(keep, lists.student_ids, -1))


def nucleus(lists: TopLists, p: float) -> tuple[BoolArray, int]:
    """(entries of the student's list [N, K] until they hold `p`, how many rows' lists end before that).

    >>> ids, lp = np.array([[1, 2, 3]]), np.log([[0.6, 0.3, 0.05]])
    >>> lists = TopLists(ids, lp, ids, lp)
    >>> nucleus(lists, 0.8)[0].tolist(), nucleus(lists, 0.99)
    ([[True, True, False]], (array([[ True,  True,  True]]), 1))
    """
    there = lists.student_ids >= 0
    mass = np.where(there, np.exp(lists.student_log_probs), 0.0)
    before = np.cumsum(mass, axis=1) - mass
    return there & (before < p), int((mass.sum(axis=1) < p).sum())


def compatibilities(
    lists: TopLists, rule: MissingMass, ks: Sequence[int], ps: Sequence[float]
) -> tuple[dict[str, FloatArray], list[str]]:
    """({definition: C [N]}, notes). The reference, mass at the full K, is the first."""
    K = lists.student_ids.shape[1]
    out = {f"mass@{K}": raw_scores(lists, rule).compatibility}
    notes = []
    for k in ks:
        keep = np.broadcast_to(np.arange(K) < k, lists.student_ids.shape)
        out[f"mass@{k}"] = raw_scores(first_of(lists, keep), rule).compatibility
    for p in ps:
        keep, short = nucleus(lists, p)
        out[f"top_p@{p:g}"] = raw_scores(first_of(lists, keep), rule).compatibility
        if short:
            notes.append(
                f"top_p@{p:g}: the student's list of {K} ends before it holds {p:g} at {short} of {len(lists)} contexts."
            )
    others: tuple[Compatibility, ...] = ("overlap", "bhattacharyya")
    for name in others:
        out[name] = raw_scores(lists, rule, name).compatibility
    return out, notes


def check_support(
    bank: Path,
    evaluations: Sequence[Path],
    before: str,
    after: str,
    *,
    ks: Sequence[int],
    ps: Sequence[float],
    ratio: float,
    resamples: int,
    seed: int,
) -> Report:
    """The report of `tools/support_definition_robustness.py`; without evaluations there are no findings on the gain.

    H and D are the bank's; C is normalised anew over its contexts for each definition. Raises ConfigError for a k or p that
    cannot be, and what `load_contexts` raises.
    """
    with Bank(bank, BANK) as file:
        meta = file.metadata
        table = file.read()
    contexts = None
    setup: Metadata = {"bank": bank.name, "contexts": len(table), "notes": []}
    if evaluations:
        contexts, table, setup = load_contexts(bank, evaluations, before, after)
    lists, scores = top_lists(table, meta["k"]), bank_scores(table)
    _require_within(lists.student_ids.shape[1], ks, ps)
    rule: MissingMass = meta["missing_mass"]
    mode: Normalisation = meta["normalisation"]
    definitions, notes = compatibilities(lists, rule, [k for k in ks if k != lists.student_ids.shape[1]], ps)
    lines = {name: normalise(C, scores.valid, mode) for name, C in definitions.items()}
    sequence = pd.factorize(np.array(table.column("sample").to_pylist()))[0].astype(np.int64)
    keys = TokenKeys(sequence, table.column("position").to_numpy().astype(np.int64))
    masks = {
        name: select(
            replace(scores, C=line), keys, "dlearn_high", ratio, seed=seed, rollout_id=0, min_keep_per_sample=0
        )
        for name, line in lines.items()
    }
    rows = _agreement(definitions, masks, ratio)
    references: dict[str, float] = {}
    if contexts is not None:
        boot = Resampler(contexts.sequence, resamples, seed)
        rows += _findings(contexts, {name: line.clipped for name, line in lines.items()}, boot)
        references = {_DIFFERENCE: 0.0, _MORE: 0.0}
    facts = {**setup, "ratio": ratio, "resamples": resamples, "seed": seed}
    return Report("Definitions of the student's support", facts, rows, [*setup["notes"], *notes], references)


def _require_within(K: int, ks: Sequence[int], ps: Sequence[float]) -> None:
    for k in ks:
        if not 1 <= k <= K:
            raise ConfigError("--k", k, f"1 to {K}, the bank's K", "export a bank with a larger --top-k")
    for p in ps:
        if not 0.0 < p < 1.0:
            raise ConfigError("--p", p, "a number between 0 and 1", "0.5 to 0.99 are usual")


def _agreement(definitions: Mapping[str, FloatArray], masks: Mapping[str, BoolArray], ratio: float) -> list[Row]:
    """Each definition against the reference, which is the first: its mean, its ranks, what is selected by it."""
    reference = next(iter(definitions))
    rows = [Row("mean of C", name, plain(float(C.mean())), "0 to 1", len(C)) for name, C in definitions.items()]
    for name, C in definitions.items():
        rho = _rank_correlation(C, definitions[reference])
        rows.append(Row(f"rank correlation with {reference}", name, plain(rho, "C is the same everywhere")))
    for name in definitions:
        shared = plain(overlap(masks[name], masks[reference]))
        rows.append(Row(f"dlearn_high at {ratio:g}: overlap with {reference}", name, shared, "Jaccard"))
    return rows


def _findings(contexts: Contexts, lines: Mapping[str, FloatArray], boot: Resampler) -> list[Row]:
    """The two findings that rest on C, with each definition's normalised C [N] in its place."""
    y = gains(contexts.kl_before, contexts.kl_after, "absolute")
    differences, more = [], []
    for name, line in lines.items():
        c = replace(contexts, C=line)
        high, low = thirds(c, c.quadrant == 3)
        n = int(high.sum() + low.sum())
        differences.append(Row(_DIFFERENCE, name, boot.difference(y, c.weight, high, low), "nats", n))
        more.append(Row(_MORE, name, r_squared_gains(c, y, boot)["R² C - base"], "fraction", len(c)))
    return differences + more


def _rank_correlation(a: FloatArray, b: FloatArray) -> float | None:
    if not np.ptp(a) or not np.ptp(b):
        return None
    return float(spearmanr(a, b).statistic)
