"""What selectors would have chosen at equal budget, and what training did there, beyond what H, D and position explain. Pure.

Each selector of `distill/selection.py` takes its N best contexts of a bank. Their mean gain is compared with that of all
contexts, and (matched) with as many contexts that the selector left and that are alike in H, D and position: a difference
there is what the selector knows beside these three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from slime_tandem.diagnostics.bank import Metadata
from slime_tandem.diagnostics.gain import MATCHED_ON, Contexts, Resampler, gains, imbalance, match, matched_difference
from slime_tandem.diagnostics.output import Report, Row, plain
from slime_tandem.distill.selection import TokenKeys, overlap, resolve_selector, select
from slime_tandem.distill.teachability import Normalised, TokenScores
from slime_tandem.errors import ConfigError
from slime_tandem.types import BoolArray

_MEAN, _MINUS_ALL, _MINUS_ALIKE = "mean gain of the chosen", "chosen minus all", "chosen minus alike in H, D, position"


def bank_scores(table: pa.Table) -> TokenScores:
    """A bank's normalised scores [N] as selectors take them; every context is valid."""
    lines = (table.column(name).to_numpy() for name in ("H_line", "D_line", "C_line"))
    H, D, C = (Normalised(np.clip(line, 0.0, 1.0), line) for line in lines)
    return TokenScores(H, D, C, np.ones(len(table), np.bool_))


def top_n(
    c: Contexts,
    table: pa.Table,
    methods: Sequence[str],
    n: int,
    setup: Metadata,
    *,
    resamples: int,
    seed: int,
    caliper: float,
) -> Report:
    """The report of `tools/matched_fixed_context_topn.py`; `c` and `table` are of one bank. Gains are absolute, nats.

    Raises ConfigError for an N outside the bank and DataError for an unknown selector.
    """
    if not 1 <= n < len(c):
        raise ConfigError("--top-n", n, f"1 to {len(c) - 1}: some contexts must remain to compare with", "change it")
    boot = Resampler(c.sequence, resamples, seed)
    scores = bank_scores(table)
    keys = TokenKeys(c.sequence, table.column("position").to_numpy().astype(np.int64))
    chosen = {
        method: select(
            scores, keys, resolve_selector(method), n / len(c), seed=seed, rollout_id=0, min_keep_per_sample=0
        )
        for method in methods
    }
    facts = {**setup, "top_n": n, "resamples": resamples, "seed": seed, "caliper": caliper}
    return Report(
        f"The {n} best contexts of each selector",
        facts,
        _rows(c, chosen, boot, caliper),
        setup["notes"],
        references={_MINUS_ALL: 0.0, _MINUS_ALIKE: 0.0},
        details=frozenset({"balance"}),
    )


def _rows(c: Contexts, chosen: Mapping[str, BoolArray], boot: Resampler, caliper: float) -> list[Row]:
    """Section by section: mean gains, against all, against alike, KL before, balance of the pairs, overlaps."""
    y = gains(c.kl_before, c.kl_after, "absolute")
    everywhere = np.ones(len(c), np.bool_)
    features = np.column_stack([c.term(name) for name in MATCHED_ON])
    rows: list[list[Row]] = [[] for _ in range(6)]
    rows[0].append(Row(_MEAN, "all contexts", boot.mean(y, c.weight, everywhere), "nats", len(c)))
    for method, mask in chosen.items():
        m = int(mask.sum())
        rows[0].append(Row(_MEAN, method, boot.mean(y, c.weight, mask), "nats", m))
        rows[1].append(Row(_MINUS_ALL, method, boot.difference(y, c.weight, mask, everywhere), "nats", m))
        found = match(features, mask, ~mask, caliper)
        effect = matched_difference(c, y, found, boot)
        rows[2].append(Row(_MINUS_ALIKE, method, effect, "nats", len(found.treated)))
        rows[3].append(Row("KL before of the chosen", method, boot.mean(c.kl_before, c.weight, mask), "nats", m))
        rows[4].append(Row("balance", f"{method}: unmatched", plain(float(found.unmatched)), "contexts"))
        for x in (*MATCHED_ON, "C"):
            value = imbalance(c.term(x), found.treated, found.control)
            rows[4].append(
                Row("balance", f"{method}: {x}, matched", plain(value, "no spread or no pair"), "std. difference")
            )
        for other, theirs in chosen.items():
            if other > method:
                rows[5].append(
                    Row("overlap of the chosen", f"{method}, {other}", plain(overlap(mask, theirs)), "Jaccard")
                )
    return [r for part in rows for r in part]
