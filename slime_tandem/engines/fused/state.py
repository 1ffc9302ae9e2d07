"""Who writes next, for every running request: kept in tensors beside SGLang's own request slots.

A request's rule arrives with its id when it is prefilled and stays in its slot (`req_pool_indices`); every decode step folds
the token just written into (run, start). Token ids are kept by KV location as well, so that a request which is prefilled
again after a retraction is replayed from the tokens it had, cached or not. A catch-up engine also keeps here how many tokens
of each request a model has read. Slot 0 and location 0 are SGLang's padding rows: what graph warm-ups write there harms
nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from slime_tandem.engines import handoff_wire
from slime_tandem.engines.fused import rule_tensors
from slime_tandem.engines.fused.catch_up import Bounds, Snapshot, Step, lay_out, plan
from slime_tandem.protocol import table_fingerprint
from slime_tandem.types import JUNIOR

logger = logging.getLogger(__name__)

_LOW, _HIGH, _THRESHOLD, _ALTERNATE, _TABLE, _CAP, _REFUSED = range(7)
_RUN, _START = range(2)
_PLAIN = (0, 0, 1 << 32, 0, 0, rule_tensors.NO_CAP, 0)
"""A request without a rule: all of it is the senior's."""


class Authors:
    """The authorship state of one engine.

    `tables` [K, V] bool on the device, row 0 all False; `slots` and `locations`: how many request slots and KV locations
    SGLang has.
    """

    def __init__(self, tables: torch.Tensor, slots: int, locations: int) -> None:
        self.tables = tables
        self.device = tables.device
        self.junior_scores: list[bool] = []
        self._host_tables = tables.cpu()
        self._rows = {table_fingerprint(frozenset(row.nonzero().flatten().tolist())): i for i, row in
                      reversed(list(enumerate(self._host_tables)))}  # fmt: skip
        self._rules = torch.tensor([_PLAIN], dtype=torch.int64, device=self.device).repeat(slots, 1)
        self._state = torch.zeros((slots, 2), dtype=torch.int64, device=self.device)
        self._tokens = torch.zeros(locations, dtype=torch.int32, device=self.device)
        self._read = torch.zeros((2, slots), dtype=torch.int64, device=self.device)  # by JUNIOR and SENIOR

    def decode(self, token: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, location: torch.Tensor) -> Any:
        """[B] int32 author codes of the tokens that follow `token` [B] at `position` [B]; tensor operations only."""
        self._tokens[location] = token.to(torch.int32)
        rule, state = self._rules[slot], self._state[slot]
        run, start = rule_tensors.advance(
            self.tables, rule[:, _TABLE], rule[:, _CAP], state[:, _RUN], state[:, _START], token, position
        )
        self._state[slot] = torch.stack([run, start], dim=1)
        return self._codes(rule, run)

    def step(
        self,
        model: int,
        codes: torch.Tensor,
        slot: torch.Tensor,
        length: torch.Tensor,
        snapshot: Snapshot,
        bounds: Bounds,
    ) -> Step:
        """What `model` (JUNIOR or SENIOR) reads in a decode step behind which `codes` [B] write; tensor operations only.

        `length` [B]: tokens so far, the newest one included, which `decode` has been told of.
        """
        rule, read = self._rules[slot], self._read[model]
        threshold = rule[:, _THRESHOLD]
        solo = (rule[:, _ALTERNATE] == 0) & ((threshold == 0) | (threshold == 1 << 32))
        writes = codes == JUNIOR if model == JUNIOR else codes != JUNIOR
        if length.is_cuda:
            from slime_tandem.engines.fused import step_kernels

            return step_kernels.plan(writes, solo, length, slot, read, snapshot, self._tokens, bounds)
        taken = plan(writes, solo, length.long(), read[slot], bounds)
        read[slot] = torch.where(taken > 0, length.long(), read[slot])
        return lay_out(taken, length.long(), snapshot, self._tokens, bounds)

    def extend(
        self,
        token: torch.Tensor,
        location: torch.Tensor,
        slot: torch.Tensor,
        lengths: Sequence[int],
        rids: Sequence[str | None],
        slot_locations: torch.Tensor,
    ) -> Any:
        """[B] int32 author codes after a prefill, in which request b came to hold `lengths[b]` tokens.

        `token` and `location` cover the tokens prefilled now; `slot_locations` is SGLang's table of KV locations by slot and
        position. `junior_scores` then says whose input log-probs are the junior's.
        """
        self.junior_scores = []
        self._tokens[location] = token.to(torch.int32)
        rules, states = [], []
        for i, (rid, n) in enumerate(zip(rids, lengths, strict=True)):
            rule: tuple[int, ...] = _PLAIN
            run, start = 0, n
            self.junior_scores.append(False)
            try:
                parsed = handoff_wire.parse(rid or "")
                if parsed is not None:
                    h, input_length = parsed
                    row = self._rows[h.table] if h.table else 0
                    cap = h.cap or rule_tensors.NO_CAP
                    rule = (h.akey & 0xFFFFFFFF, h.akey >> 32, h.threshold, int(h.alternate), row, cap, 0)
                    run, start = h.run, input_length - h.run_length
                    self.junior_scores[i] = h.junior_scores
                    if n > input_length:  # prefilled again: retracted, or a decode row of a mixed batch
                        where = slot_locations[slot[i], input_length:n].long()
                        run, length = rule_tensors.replay(
                            self._tokens[where].cpu().long(), self._host_tables[row], cap, h.run, h.run_length
                        )
                        start = n - length
            except (KeyError, ValueError) as error:
                # An exception here would end the whole server: the answer says that this request was not understood.
                logger.error("request %s is not written in tandem: %r", rid, error)
                rule = (*_PLAIN[:_REFUSED], 1)
            rules.append(rule)
            states.append((run, start))
        rows, state = self._upload(rules), self._upload(states)
        self._rules[slot], self._state[slot] = rows, state
        self._read[:, slot] = self._upload([[n] for n in lengths])[:, 0]
        return self._codes(rows, state[:, _RUN])

    def both_write(self, rid: str) -> bool:
        """Whether either model may write in the request of that id: it has a rule, one that `extend` follows."""
        try:
            parsed = handoff_wire.parse(rid)
        except ValueError:
            return False
        return parsed is not None and not parsed[0].one_writes and parsed[0].table in ("", *self._rows)

    def _upload(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    @staticmethod
    def _codes(rule: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
        senior = rule_tensors.writes_senior(
            rule[:, _LOW], rule[:, _HIGH], rule[:, _THRESHOLD], rule[:, _ALTERNATE], run
        )
        return senior.to(torch.int32).masked_fill(rule[:, _REFUSED] != 0, handoff_wire.REFUSED)
