"""Distributed checkpoints in sync shards, with logical offsets.

A checkpoint holds full parameters and full optimizer state, in Megatron's own keys and shapes, cut
into the sync shards of core ranks. Plain Megatron at any TP degree and any nonuniform job read it.
Extra ranks neither write nor read; after a load they get their parameters by post-sync.

[One factory] Megatron builds optimizer entries by putting optimizer tensors into the model's
entries. So one `ShardedTensorFactory` per TP parameter serves both. Optimizer tensors are in sync
order; the parameter itself is recognised by identity and converted first (sync_model, [Layout of
q]).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.exchange_utils import ShardDistribution
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.training import get_args
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ntp.errors import CheckpointError, NTPError
from megatron_ntp.integration import context, loading, saving
from megatron_ntp.integration.ddp import chunks_of
from megatron_ntp.integration.sync_model import SyncModel, SyncParam

_PARAM = "param"
_STATE = "state"
_OWN = "own"


@dataclasses.dataclass(frozen=True)
class _ShardWriter:
    """Turns one parameter's sync shard into logical blocks and back.

    Attributes:
        sp: the parameter, on a core rank.
        template: Megatron's own entry, for the layer axis, the dtype and the shape check.
    """

    sp: SyncParam
    template: ShardedTensor

    def build(self, key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        """`ShardedTensorFactory.build_fn`. `data` has the sync parameter's shape."""
        assert flattened_range is None and self.sp.shard_packing is not None
        is_param = data is self.sp.sync
        flat = data.detach().reshape(-1)
        if is_param:
            flat = self.sp.sync_order(flat)
        if not self.sp.shard_packing.is_natural:
            flat = self.sp.shard_packing.unpack(flat)
        shard = flat.view(self._shape)
        blocks = {
            index: self._sharded_tensor(key, block, index, replica_id)
            for index, block in enumerate(shard.chunk(self._outer, dim=self._dim))
        }
        return {_PARAM if is_param else _STATE: blocks}

    def merge(self, loaded: dict[str, dict[int, Tensor]]) -> Tensor:
        """`ShardedTensorFactory.merge_fn`: what `build` gave, with loaded tensors."""
        packing, sync = self.sp.shard_packing, self.sp.sync
        assert packing is not None and sync is not None
        ((what, blocks),) = loaded.items()
        parts = [blocks[index].view(self._block_shape) for index in range(self._outer)]
        flat = torch.cat(parts, dim=self._dim).view(-1)
        if not packing.is_natural:
            flat = packing.pack(flat)
        if what == _STATE:
            return flat.view(sync.shape)
        with torch.no_grad():
            sync.data.view(-1).copy_(flat)
            if self.sp.is_repacked:
                assert self.sp.packing is not None
                self.sp.packing.unpack_(self.sp.compute.data.view(-1))
        # load_state_dict copies this onto itself; the rest of the sync shard is in place already.
        return self.sp.compute.data

    @property
    def _kind(self) -> Any:
        assert self.sp.role.kind is not None
        return self.sp.role.kind

    @property
    def _dim(self) -> int:
        return int(self._kind.dim)

    @property
    def _outer(self) -> int:
        return int(self._kind.outer)

    @property
    def _shape(self) -> torch.Size:
        assert self.sp.sync is not None
        return self.sp.sync.shape

    @property
    def _block_shape(self) -> tuple[int, ...]:
        shape = list(self._shape)
        shape[self._dim] //= self._outer
        return tuple(shape)

    def _sharded_tensor(
        self, key: str, block: Tensor, index: int, replica_id: Any
    ) -> ShardedTensor:
        sp, prepended = self.sp, self.template.prepend_axis_num
        assert sp.layout is not None and sp.packing is not None and sp.shard_packing is not None
        width = self._kind.unit_width(sp.compute.shape, sp.packing.num_units)
        total = sp.layout.num_units * width
        first_unit = sp.layout.sync_shards[context.require().rank.tp_rank].start
        global_shape = list(self._shape)
        global_shape[self._dim] = total * self._outer
        offset = [0] * len(global_shape)
        offset[self._dim] = index * total + first_unit * width
        # An irregular tensor cannot have a prepended axis, so the layer axis becomes an own one.
        data = block[(None,) * prepended]
        return ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=(*self.template.global_shape[:prepended], *global_shape),
            global_offset=(*self.template.global_offset[:prepended], *offset),
            axis_fragmentations=None,
            replica_id=replica_id,
            allow_shape_mismatch=self.template.allow_shape_mismatch,
        )


def gpt_sharded_state_dict(
    original: Callable[..., dict[str, Any]], self: Any, prefix: str = "", *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Wraps `GPTModel.sharded_state_dict`."""
    entries = original(self, prefix, *args, **kwargs)
    model: SyncModel | None = getattr(self, "_ntp_model", None)
    if context.current() is None:
        return entries
    if model is None:
        raise NTPError(
            "a checkpoint of a model without DistributedDataParallel was asked for; --ntp can save "
            "and load only models that train"
        )
    for sp in model.params:
        name = prefix + sp.name
        if name not in entries:
            raise NTPError(
                f"parameter '{sp.name}' is not in Megatron's sharded state dict under '{name}'. "
                "This Megatron names it in another way than the tested versions"
            )
        entries[name] = _entry(sp, entries[name])
    return entries


def _entry(sp: SyncParam, megatrons: Any) -> Any:
    """What stands for one parameter in this rank's sharded state dict."""
    if sp.sync is None:
        return LocalNonpersistentObject(sp.compute.data)
    if not sp.is_tp:
        return megatrons
    template = megatrons
    if isinstance(megatrons, ShardedTensorFactory):
        template = _first_leaf(megatrons.build())
    writer = _ShardWriter(sp, template)
    return ShardedTensorFactory(
        megatrons.key, sp.sync, writer.build, writer.merge, megatrons.replica_id
    )


def _first_leaf(tree: Any) -> Any:
    while isinstance(tree, dict | list):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def check_optimizer_format(metadata: Any) -> None:
    """Refuses an optimizer format that cannot be cut for another TP degree.

    What is loaded was judged before (loading.decide); this one is for state made from flags.
    """
    kind = (metadata or {}).get("distrib_optim_sharding_type")
    if kind == "dp_reshardable" and not context.require().topology.is_reduced:
        return  # cut as plain Megatron cuts it; whoever saves it is warned
    if kind not in (None, "fully_reshardable"):
        raise NTPError(
            f"the checkpoint holds distributed optimizer state in the format '{kind}', which "
            "cannot be read at another TP degree. Resume once at the TP and PP it was saved with, "
            "without --ntp, and save with --dist-ckpt-optim-fully-reshardable; or give up the "
            "optimizer state with --no-load-optim"
        )


def save_checkpoint(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.checkpointing.save_checkpoint`. All ranks call it at once."""
    ntp = context.current()
    if ntp is None:
        return original(iteration, *args, **kwargs)
    saving.print_warnings(ntp, get_args(), f"checkpoint of iteration {iteration}")
    path = Path(get_args().save) / f"iter_{iteration:07d}"
    ntp.saves.append(path)
    with saving.guarded(path):
        saving.prepare(ntp, get_args(), path)
        return original(iteration, *args, **kwargs)


def determine_main_replica_uniform_distribution(
    original: Callable[..., ShardDistribution | None], *args: Any, **kwargs: Any
) -> ShardDistribution | None:
    """Wraps the function of Megatron that deals the writing of a checkpoint out in a DP group.

    With --ckpt-assume-constant-structure a rank keeps what it gives, and does not exchange metadata
    in later saves. For a rank that is alone in its group, as an extra rank is, it gives None: that
    rank would take part in a world-wide exchange which the others leave out, and hang.
    """
    found = original(*args, **kwargs)
    if found is None and context.current() is not None:
        return ShardDistribution({}, set(), {}, {})  # nobody looks into it where there is one rank
    return found


def finalize_async_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.async_utils.maybe_finalize_async_save`.

    There Megatron learns how a save in the background (--async-save) ended.
    """
    ntp = context.current()
    try:
        return original(*args, **kwargs)
    except (Exception, CheckpointException):
        if ntp is None or not ntp.saves:
            raise
        with saving.guarded(saving.oldest_unfinished(ntp.saves)):
            raise


def get_rng_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.checkpointing.get_rng_state`: one object per nominal TP rank.

    So plain Megatron finds what it expects. Where no replica has the last TP ranks any more, one
    rank stands in for them, when saving and when loading: Megatron wants each object accounted for.
    """
    state = original(*args, **kwargs)
    ntp = context.current()
    if ntp is None or not isinstance(state, ShardedObject):
        return state
    nominal_tp = ntp.topology.nominal_tp
    shape = (state.global_shape[0], nominal_tp)
    own = dataclasses.replace(state, global_shape=shape, replica_id=ntp.rank.dp_rank)
    missing = range(max(ntp.topology.degrees), nominal_tp)
    if not missing or ntp.rank.dp_rank != 0 or ntp.rank.tp_rank != 0:
        return own

    def build(*unused: Any) -> dict[str, ShardedObject]:
        others = {
            str(tp_rank): dataclasses.replace(own, global_offset=(0, tp_rank))
            for tp_rank in missing
        }
        return {_OWN: own, **others}

    def merge(loaded: dict[str, Any]) -> Any:
        return loaded[_OWN]

    return ShardedTensorFactory(own.key, own.data, build, merge, own.replica_id)


def load_checkpoint(
    original: Callable[..., Any],
    model_chunks: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps `megatron.training.checkpointing.load_checkpoint`. All ranks call it at once.

    Loads what was decided at start-up; afterwards extra ranks get their parameters.
    """
    ntp = context.current()
    rest = (model_chunks, optimizer, opt_param_scheduler, load_arg, *args)
    if ntp is None:
        return original(*rest, **kwargs)
    decision = ntp.load if load_arg == "load" else None
    if decision is None:
        result = original(*rest, **kwargs)
    elif decision.name is None:
        result = (0, 0)  # new weights, as loading.decide has said
    else:
        with loading.as_decided(decision), _own_errors(), _no_quiet_end(decision):
            result = original(*rest, **kwargs)
        if ntp.checkpoint_nbytes_read == 0 and not ntp.is_extra:
            raise CheckpointError(
                f"Megatron has loaded nothing of {decision.path}, and would go on with new "
                "weights. This Megatron finds checkpoints in another way than the tested versions"
            )
        is_resumed = not (get_args().finetune or decision.is_release)
        if is_resumed and decision.without_moments and opt_param_scheduler is not None:
            _load_schedule(decision, opt_param_scheduler)
    for chunk in chunks_of(model_chunks):
        chunk.ntp_params.publish()
    if optimizer is not None:
        optimizer.share_loss_scale()
    if ntp.steps == 0:
        ntp.counters.reset()  # they count the traffic of steps
    return result


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises errors of ours as such, out of what torch's checkpoint code wraps them in."""
    try:
        yield
    except CheckpointException as error:
        own = saving.own_error(error)
        if own is None:
            raise
        raise own from error


@contextmanager
def _no_quiet_end(decision: loading.LoadDecision) -> Iterator[None]:
    """Megatron ends the process with status 0 where it cannot load: a job that has finished."""
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise CheckpointError(
            f"Megatron gave up loading {decision.path}; its reason is what rank 0 printed last"
        ) from error


def _load_schedule(decision: loading.LoadDecision, opt_param_scheduler: Any) -> None:
    """Goes on with learning rate and weight decay; Megatron loads them with the moments only."""
    common = load_common_state_dict(str(decision.path))
    if "opt_param_scheduler" in common:
        opt_param_scheduler.load_state_dict(common["opt_param_scheduler"])
