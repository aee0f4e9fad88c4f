"""Gradients on their way to data-parallel sync.

Backward finishes the gradients of one reshard group after the other, last layer first. For each
group, in that order on every rank of a replica:

    issue     the pre-sync exchange, and the sum of partial gradients over the TP group (QK norm)
    complete  wait for both, repack what must be repacked, then hand the group's sync parameters to
              Megatron's bucket groups, which reduce over DP when a bucket is full

[One behind] Group k is completed when group k + 1 was issued, so that the exchange has one group's
worth of backward to hide behind, on any backend and without a stream of our own.

Without --overlap-grad-reduce everything happens in `finish`, still pipelined over groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ntp.comm.exchange import NUM_SLOTS, Exchange
from megatron_ntp.integration.parallel_state import RESHARD
from megatron_ntp.integration.reshard import Resharder, flat_grad
from megatron_ntp.integration.sync_model import ReshardGroup, SyncModel, SyncParam

OnSynced = Callable[[SyncParam], None]


class TPSum:
    """Adds up, over all TP ranks of a replica, gradients that each rank holds a part of.

    It must come before DP sync: after a reduce-scatter the ranks of a TP group own different
    slices, since their sync shards differ in size. Megatron's own sum after DP sync is off.
    """

    def __init__(self, params: list[SyncParam], group: dist.ProcessGroup) -> None:
        self._grads = [flat_grad(sp.compute) for sp in params]
        self._group = group
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._flat = torch.cat(self._grads)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        assert self._work is not None and self._flat is not None
        self._work.wait()
        parts = self._flat.split([grad.numel() for grad in self._grads])
        torch._foreach_copy_(self._grads, list(parts))
        self._flat = self._work = None


@dataclass
class _GroupState:
    """One reshard group's gradients in the current step."""

    group: ReshardGroup
    exchanges: list[Exchange]
    tp_sums: list[TPSum]
    waiting: set[SyncParam] = field(default_factory=set)


class GradSync:
    """Drives pre-sync of one model chunk.

    Args:
        on_synced: called for each parameter of a completed group, on core ranks only.
        overlap: whether groups are issued from backward hooks.
    """

    def __init__(
        self, model: SyncModel, resharder: Resharder, on_synced: OnSynced, overlap: bool
    ) -> None:
        self._model = model
        self._on_synced = on_synced
        self._overlap = overlap
        self._counters = model.ntp.counters
        tp_group = model.ntp.group(RESHARD).group
        self._states = []
        self._state_of: dict[SyncParam, _GroupState] = {}
        for group, exchanges in zip(
            reversed(model.groups), reversed(resharder.pre(flat_grad)), strict=True
        ):
            partial = [sp for sp in group.params if sp.role.tp_partial]
            state = _GroupState(
                group,
                exchanges,
                [TPSum(partial, tp_group)] if partial and tp_group.size() > 1 else [],
            )
            self._states.append(state)
            self._state_of.update(dict.fromkeys(group.params, state))
        self._reset()

    def mark_ready(self, sp: SyncParam) -> None:
        """A gradient is final on this rank. Called by backward hooks in the last microbatch."""
        self._state_of[sp].waiting.discard(sp)
        if self._overlap:
            while self._issued < len(self._states) and not self._states[self._issued].waiting:
                self._issue_next()

    def finish(self) -> None:
        """Issues and completes whatever is left. All ranks of a replica call it once per step."""
        while self._issued < len(self._states):
            self._issue_next()
        while self._completed < self._issued:
            self._complete_next()
        self._reset()

    def _reset(self) -> None:
        self._issued = self._completed = 0
        for state in self._states:
            state.waiting = set(state.group.params)

    @torch.no_grad()
    def _issue_next(self) -> None:
        state = self._states[self._issued]
        for exchange in state.exchanges:
            exchange.start(self._issued % NUM_SLOTS)
        for tp_sum in state.tp_sums:
            tp_sum.start()
            self._counters.tp_sums += 1
        self._issued += 1
        # See [One behind]; this also keeps at most NUM_SLOTS exchanges under way.
        if self._issued - self._completed == NUM_SLOTS:
            self._complete_next()

    @torch.no_grad()
    def _complete_next(self) -> None:
        state = self._states[self._completed]
        for exchange in state.exchanges:
            exchange.finish()
        for tp_sum in state.tp_sums:
            tp_sum.finish()
        self._completed += 1
        if self._model.ntp.is_extra:
            return
        self._model.pack_grads(state.group.params)
        for sp in state.group.params:
            self._on_synced(sp)
