"""The exchanges of a model chunk: which views of which tensors travel between which TP ranks.

Both directions follow one table, the routes of the plan. Gradient pieces go from extra to core
ranks (pre-sync), parameter pieces from core to extra ranks (post-sync), and the latter carries
replicated parameters too, since extra ranks have no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ntp.comm.exchange import Exchange, Staging
from megatron_ntp.integration.parallel_state import RESHARD
from megatron_ntp.integration.sync_model import ReshardGroup, SyncModel, SyncParam

FlatOf = Callable[[Parameter], Tensor]


def flat_data(param: Parameter) -> Tensor:
    """A parameter's data, flat."""
    return param.data.view(-1)


def flat_grad(param: Parameter) -> Tensor:
    """A parameter's accumulated gradient, flat."""
    grad: Tensor = param.main_grad
    return grad.view(-1)


class Resharder:
    """Builds the exchanges of one model chunk. Those of one direction share staging.

    Args:
        model: the chunk, its storage already attached.
    """

    def __init__(self, model: SyncModel) -> None:
        self._model = model
        self._ntp = model.ntp
        self._rank = model.ntp.rank
        self._sync_degree = model.ntp.topology.sync_degree

    def pre(self, flat_of: FlatOf) -> list[list[Exchange]]:
        """Extra -> core exchanges of TP pieces: per reshard group, one per dtype.

        None at all on a replica that reshards nothing.
        """
        staging = self._new_staging()
        return [
            self._exchanges("pre", g, [sp for sp in g.params if sp.is_tp], flat_of, staging)
            for g in self._model.groups
        ]

    def post(self) -> list[list[Exchange]]:
        """Core -> extra exchanges of TP pieces and replicated parameters, likewise."""
        staging = self._new_staging()
        return [
            self._exchanges("post", g, g.params, flat_data, staging) for g in self._model.groups
        ]

    def _new_staging(self) -> Staging:
        return Staging(self._model.params[0].compute.device)

    def _exchanges(
        self,
        direction: str,
        group: ReshardGroup,
        params: list[SyncParam],
        flat_of: FlatOf,
        staging: Staging,
    ) -> list[Exchange]:
        if self._rank.degree == self._sync_degree:
            return []
        # The same dtypes in the same order on every rank of the replica.
        by_dtype: dict[torch.dtype, list[SyncParam]] = {}
        for sp in params:
            if sp.layout is None or sp.layout.routes(self._rank.degree):
                by_dtype.setdefault(flat_of(sp.compute).dtype, []).append(sp)
        return [
            Exchange(
                name=f"{'gradients' if direction == 'pre' else 'parameters'} of {group.name}",
                group=self._ntp.group(RESHARD).group,
                peer_views=self._peer_views(some, flat_of),
                sends=self._rank.is_extra == (direction == "pre"),
                dtype=dtype,
                staging=staging,
                counters=self._ntp.counters,
            )
            for dtype, some in by_dtype.items()
        ]

    def _peer_views(self, params: list[SyncParam], flat_of: FlatOf) -> dict[int, list[Tensor]]:
        """Per peer, views in the order both ends agree on: parameter, then piece."""
        views_of = self._extra_views if self._rank.is_extra else self._core_views
        peers = (
            range(self._sync_degree)
            if self._rank.is_extra
            else range(self._sync_degree, self._rank.degree)
        )
        views = {
            peer: [view for sp in params for view in views_of(sp, peer, flat_of)] for peer in peers
        }
        return {peer: found for peer, found in views.items() if found}

    def _core_views(self, sp: SyncParam, extra_rank: int, flat_of: FlatOf) -> list[Tensor]:
        """Runs of q that this core rank keeps for one extra rank."""
        assert sp.sync is not None
        if sp.layout is None:
            is_source = self._replicated_source(extra_rank) == self._rank.tp_rank
            return [flat_of(sp.sync)] if is_source else []
        assert sp.shard_packing is not None
        offsets = sp.shard_packing.piece_offsets()
        flat = flat_of(sp.sync)
        return [
            flat[offsets[route.piece.index] : offsets[route.piece.index + 1]]
            for route in sp.layout.routes(self._rank.degree)
            if route.core_rank == self._rank.tp_rank and route.extra_rank == extra_rank
        ]

    def _extra_views(self, sp: SyncParam, core_rank: int, flat_of: FlatOf) -> list[Tensor]:
        """Blocks of p that belong to one core rank's sync shard."""
        flat = flat_of(sp.compute)
        if sp.layout is None:
            return [flat] if self._replicated_source(self._rank.tp_rank) == core_rank else []
        assert sp.packing is not None
        pieces = sp.layout.compute_pieces(self._rank.degree, self._rank.tp_rank)
        return [
            view
            for index, piece in enumerate(pieces)
            if piece.core_rank == core_rank
            for view in sp.packing.piece_views(flat, index)
        ]

    def _replicated_source(self, extra_rank: int) -> int:
        """The core rank that sends replicated parameters to an extra rank."""
        return (extra_rank - self._sync_degree) % self._sync_degree


def minimum_nbytes(model: SyncModel) -> tuple[int, int]:
    """Fewest bytes that this rank's replica can move in one step, as (gradients, parameters).

    Each extra rank's own shard once each way; replicated parameters only come back.
    """
    topology = model.ntp.topology
    degree = model.ntp.degree
    grads = parameters = 0
    for sp in model.params:
        sizes = (
            [sp.logical_numel] * degree
            if sp.layout is None
            else [sp.logical_numel // sp.layout.num_units * n for n in sp.layout.sizes(degree)]
        )
        numel = sum(sizes[topology.sync_degree :])
        parameters += numel * sp.compute.dtype.itemsize
        if sp.layout is not None:
            grads += numel * sp.compute.main_grad.dtype.itemsize
    return grads, parameters
