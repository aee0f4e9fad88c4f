"""Parameters on their way back from the optimizer to compute.

An optimizer step turns every parameter stale. A reshard group becomes fresh again when

    gathered  its DDP buckets were all-gathered over DP (distributed optimizer),
    unpacked  repacked parameters are back in natural order,
    sent      its pieces went from core to extra ranks (post-sync).

Without --overlap-param-gather `finish` does all groups after the step. With it, `ensure` is called
by forward pre-hooks: it completes groups in forward order and starts the next one's exchange ahead,
so that it travels under the compute of the current group. All ranks of a replica run the same
modules in the same order, so they issue the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_ntp.comm.exchange import NUM_SLOTS, Exchange
from megatron_ntp.integration.reshard import Resharder, flat_data
from megatron_ntp.integration.sync_model import ReshardGroup, SyncModel, SyncParam

Gather = Callable[[ReshardGroup], None]


class ParamSync:
    """Drives post-sync of one model chunk.

    Args:
        gather: finishes the all-gather of the DDP buckets that hold a group's sync parameters;
            called on core ranks, in forward order of groups.
    """

    def __init__(self, model: SyncModel, resharder: Resharder, gather: Gather) -> None:
        self._model = model
        self._gather = gather
        self._is_extra = model.ntp.is_extra
        self._exchanges: list[list[Exchange]] = resharder.post()
        self._resharder = resharder
        self._group_of = {sp: group.index for group in model.groups for sp in group.params}
        num_groups = len(model.groups)
        self._started = self._finished = num_groups
        self._in_sync_order = [False] * num_groups
        # Looking one group ahead makes a rank wait for that group's all-gather early. Only worth it
        # where an exchange follows.
        self._lookahead = 1 if any(self._exchanges) else 0

    def begin_update(self) -> None:
        """Before the optimizer changes parameters: sync order everywhere, all groups stale."""
        self.finish()
        self.expect_gather()

    def expect_gather(self) -> None:
        """Before an all-gather over DP, which puts together slices in sync order of all replicas.

        Nothing to do in the middle of an update.
        """
        if self._finished == len(self._exchanges):
            self._to_sync_order()
            self._started = self._finished = 0

    def ensure(self, sp: SyncParam) -> None:
        """Makes the group of `sp`, and all before it, fresh. Called by forward pre-hooks."""
        index = self._group_of[sp]
        if index < self._finished:
            return
        while self._finished <= index:
            self._finish_next()
        if self._started == self._finished < len(self._exchanges) and self._lookahead:
            self._start_next()

    def finish(self) -> None:
        """Makes every group fresh. All ranks of a replica call it at the same points."""
        while self._finished < len(self._exchanges):
            self._finish_next()

    def publish(self) -> None:
        """Sends what core ranks hold now to extra ranks, though no optimizer step was made.

        For parameters that were just loaded or initialized.
        """
        assert self._finished == len(self._exchanges), "publish with an update under way"
        _run(self._exchanges)

    @contextmanager
    def sync_order(self) -> Iterator[None]:
        """Sync parameters are in sync order inside, for code that treats them as flat shards."""
        self._to_sync_order()
        try:
            yield
        finally:
            for group in self._model.groups:
                self._to_natural_order(group)

    def align_replicas(self) -> None:
        """Makes the first replica's parameters everyone's. Called once, by all ranks of the job.

        Each rank drew its initial weights for its own shard. The first replica gathers its pieces
        to sync shards, these are broadcast over DP, and extra ranks get theirs back.
        """
        if self._model.ntp.rank.dp_rank == 0:
            _run(self._resharder.pre(flat_data))
        if not self._is_extra:
            dp = self._model.ntp.group("dp")
            with self.sync_order(), torch.no_grad():
                for sp in self._model.params:
                    assert sp.sync is not None
                    torch.distributed.broadcast(
                        sp.sync.data, src=dp.global_ranks[0], group=dp.group
                    )
        self.publish()

    def _to_sync_order(self) -> None:
        for group in self._model.groups:
            if not self._in_sync_order[group.index]:
                self._model.pack_params(group.params)
                self._in_sync_order[group.index] = True

    def _to_natural_order(self, group: ReshardGroup) -> None:
        if self._in_sync_order[group.index]:
            self._model.unpack_params(group.params)
            self._in_sync_order[group.index] = False

    @torch.no_grad()
    def _start_next(self) -> None:
        group = self._model.groups[self._started]
        if not self._is_extra:
            self._gather(group)
            self._to_natural_order(group)
        for exchange in self._exchanges[group.index]:
            exchange.start(group.index % NUM_SLOTS)
        self._started += 1

    @torch.no_grad()
    def _finish_next(self) -> None:
        if self._started == self._finished:
            self._start_next()
        for exchange in self._exchanges[self._finished]:
            exchange.finish()
        self._finished += 1


def _run(exchanges: list[list[Exchange]]) -> None:
    """One after the other; for start-up, where nothing is left to overlap with."""
    with torch.no_grad():
        for exchange in (exchange for group in exchanges for exchange in group):
            exchange.start(0)
            exchange.finish()
