"""The sync side of a model chunk: sync parameters, their storage, and reshard groups.

To DDP and the optimizer every replica is a TP = S model. `SyncModel` keeps, for each trainable
parameter, the compute parameter `p` that modules use and the sync parameter `q` that DDP and the
optimizer use:

- core rank whose replica has extra ranks: q has the sync shard's shape and p is a view of the first
  part of q's storage (data and main_grad), so nothing is copied on a healthy rank;
- core rank with nothing to reshard: q is p;
- extra rank: there is no q.

[Layout of q] q's flat storage is the sync shard in sync order (comm.packing), except that between
optimizer steps the part shared with p is in p's natural order. `pack_params` and `unpack_params`
switch between the two where they differ (p spans several pieces and is row-parallel or gated).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ntp.comm.packing import Packing, Segment
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.model import ParamRole, classify, layer_of
from megatron_ntp.plan.partition import UnitLayout


@dataclass(eq=False)
class SyncParam:
    """One trainable parameter, as compute and as sync see it.

    Attributes:
        name: as in `GPTModel.named_parameters()`.
        compute: p, what modules use.
        sync: q, what DDP and the optimizer use; None on extra ranks.
        role: TP parameter of a family, or replicated.
        layout: the family's layout; None if replicated.
        packing: pieces of the compute shard; None if replicated.
        shard_packing: pieces of the sync shard; None if replicated or on extra ranks.
        logical_numel: elements of the full parameter.
    """

    name: str
    compute: Parameter
    sync: Parameter | None
    role: ParamRole
    logical_numel: int
    layout: UnitLayout | None = None
    packing: Packing | None = None
    shard_packing: Packing | None = None

    @property
    def is_tp(self) -> bool:
        return self.layout is not None

    @property
    def shares_storage(self) -> bool:
        """Whether p is a part of a larger q."""
        return self.sync is not None and self.sync is not self.compute

    @property
    def is_repacked(self) -> bool:
        """Whether p's natural order differs from sync order. See [Layout of q]."""
        return self.sync is not None and self.packing is not None and not self.packing.is_natural

    def attach_storage(self) -> None:
        """Points p's data and gradient at the first part of q's, wherever DDP put those."""
        if not self.shares_storage:
            return
        assert self.sync is not None
        shape = self.compute.shape
        numel = shape.numel()
        self.compute.data = self.sync.data.view(-1)[:numel].view(shape)
        if hasattr(self.sync, "main_grad"):
            self.compute.main_grad = self.sync.main_grad.view(-1)[:numel].view(shape)

    def sync_order(self, flat: Tensor) -> Tensor:
        """Sync order of q's flat data, given as it is between steps (copied only if needed)."""
        if not self.is_repacked:
            return flat
        assert self.packing is not None
        numel = self.packing.numel
        return torch.cat([self.packing.pack(flat[:numel]), flat[numel:]])


@dataclass(eq=False)
class ReshardGroup:
    """Consecutive parameters whose pieces travel together, one exchange per direction.

    Membership follows from the full model's sizes, so it is the same on every rank of every
    replica; DDP buckets follow from local sizes and are not.
    """

    index: int
    name: str
    params: list[SyncParam] = field(default_factory=list)


class SyncModel:
    """All sync parameters of one model chunk on this rank.

    Args:
        model: the bare GPTModel.
        ntp: this rank's job.
        group_numel: elements of the full model after which a reshard group is closed.
    """

    def __init__(self, model: Module, ntp: NTPContext, group_numel: int) -> None:
        self.model = model
        self.ntp = ntp
        gated = bool(model.config.gated_linear_unit)
        self.params = [
            self._sync_param(name, param, classify(name, param, gated))
            for name, param in model.named_parameters()
            if param.requires_grad
        ]
        self.groups = _make_groups(self.params, group_numel)
        self.by_name = {p.name: p for p in self.params}
        self.by_param = {p.compute: p for p in self.params}
        self.by_param.update({p.sync: p for p in self.params if p.sync is not None})

    def _sync_param(self, name: str, param: Parameter, role: ParamRole) -> SyncParam:
        rank = self.ntp.rank
        kind = role.kind
        if kind is None:
            return SyncParam(name, param, param if rank.is_core else None, role, param.numel())
        layout = self.ntp.layout(kind.family)
        local_units = layout.sizes(rank.degree)[rank.tp_rank]
        segments = kind.segments(param.shape, local_units)
        numel_per_unit = sum(segment.numel_per_unit for segment in segments)
        assert numel_per_unit * local_units == param.numel(), (
            f"{name}: {tuple(param.shape)} does not hold {local_units} units of {segments}"
        )
        pieces = layout.compute_pieces(rank.degree, rank.tp_rank)
        packing = Packing(segments, tuple(piece.size for piece in pieces))
        result = SyncParam(
            name, param, None, role, layout.num_units * numel_per_unit, layout, packing
        )
        if rank.is_core:
            result.shard_packing = Packing(
                segments, tuple(piece.size for piece in layout.pieces(rank.tp_rank))
            )
            result.sync = self._make_sync_parameter(result, segments)
        return result

    def _make_sync_parameter(self, sp: SyncParam, segments: tuple[Segment, ...]) -> Parameter:
        assert sp.shard_packing is not None and sp.packing is not None
        param = sp.compute
        if sp.shard_packing.numel == param.numel():
            return param
        kind = sp.role.kind
        assert kind is not None
        shape = list(param.shape)
        width = kind.unit_width(param.shape, sp.packing.num_units)
        shape[kind.dim] = width * kind.outer * sp.shard_packing.num_units
        data = torch.zeros(shape, dtype=param.dtype, device=param.device)
        data.view(-1)[: param.numel()].copy_(param.data.view(-1))
        sync = Parameter(data, requires_grad=True)
        # Weight decay, norms, embeddings and TP bookkeeping all go by attributes of the parameter.
        sync.__dict__.update(param.__dict__)
        return sync

    def attach_storage(self) -> None:
        for sp in self.params:
            sp.attach_storage()

    @contextmanager
    def sync_view(self) -> Iterator[None]:
        """Modules hold sync parameters in place of compute parameters.

        For code that collects parameters (DDP, optimizer), never for compute.
        """
        replaced: list[tuple[Module, str, Parameter]] = []
        for module in self.model.modules():
            for name, param in module._parameters.items():
                sp = self.by_param.get(param) if param is not None else None
                if param is not None and sp is not None and sp.shares_storage:
                    replaced.append((module, name, param))
                    module._parameters[name] = sp.sync
        try:
            yield
        finally:
            for module, name, param in replaced:
                module._parameters[name] = param

    def pack_grads(self, params: list[SyncParam]) -> None:
        """Natural -> sync order, in place, of the gradients of these parameters."""
        for sp in params:
            if sp.is_repacked:
                assert sp.packing is not None
                sp.packing.pack_(sp.compute.main_grad.view(-1))

    def pack_params(self, params: list[SyncParam]) -> None:
        for sp in params:
            if sp.is_repacked:
                assert sp.packing is not None
                sp.packing.pack_(sp.compute.data.view(-1))

    def unpack_params(self, params: list[SyncParam]) -> None:
        for sp in params:
            if sp.is_repacked:
                assert sp.packing is not None
                sp.packing.unpack_(sp.compute.data.view(-1))


def _make_groups(params: list[SyncParam], group_numel: int) -> list[ReshardGroup]:
    """Groups of whole layers in forward order, each closed once it holds `group_numel` elements."""
    groups: list[ReshardGroup] = []
    numel = 0
    last_layer = ""
    for sp in params:
        layer = layer_of(sp.name)
        is_new_layer = layer != last_layer
        if not groups or (is_new_layer and numel >= group_numel):
            groups.append(ReshardGroup(len(groups), layer))
            numel = 0
        group = groups[-1]
        if is_new_layer and group.params:
            group.name = f"{group.name.split(' to ')[0]} to {layer}"
        group.params.append(sp)
        numel += sp.logical_numel
        last_layer = layer
    return groups
