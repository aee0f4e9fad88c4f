"""Megatron's DistributedDataParallel over sync parameters.

DDP is built by Megatron's own constructor while modules hold sync parameters, so buffers, buckets
and layouts are those of a TP = S model. Then modules get their compute parameters back, and the
instance becomes an `NTPDistributedDataParallel`: same object, a few methods that first run pre-sync
or afterwards run post-sync. Nothing of the class itself is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from torch.nn import Module, Parameter

from megatron_ntp.errors import NTPError
from megatron_ntp.integration import context
from megatron_ntp.integration.grad_sync import GradSync
from megatron_ntp.integration.install import verify_installed
from megatron_ntp.integration.param_sync import ParamSync
from megatron_ntp.integration.refusals import refuse_config
from megatron_ntp.integration.reshard import Resharder
from megatron_ntp.integration.sync_model import ReshardGroup, SyncModel, SyncParam

# Megatron's own rule for the default size of a gradient bucket.
_MIN_BUCKET_NUMEL = 40_000_000
_BUCKET_NUMEL_PER_REPLICA = 1_000_000


class NTPBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose parameters become ready only once their pieces have arrived."""

    ntp_grads: GradSync
    ntp_model: SyncModel

    def register_grad_ready(self, param: Parameter, force_all_reduce: bool | None = False) -> None:
        """Called by Megatron's hook: the gradient is final on this rank."""
        if self.is_last_microbatch:
            self.ntp_grads.mark_ready(self.ntp_model.by_param[param])

    def register_synced(self, param: Parameter) -> None:
        """Called by GradSync: the gradient is final in this replica, DP may start."""
        super().register_grad_ready(param)


class NTPDistributedDataParallel(DistributedDataParallel):
    """DDP of one model chunk under nonuniform TP. Made from a built DDP by `attach`."""

    ntp_model: SyncModel
    ntp_grads: GradSync
    ntp_params: ParamSync
    ntp_in_step: bool = False

    @property
    def _is_extra(self) -> bool:
        return self.ntp_model.ntp.is_extra

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Pre-sync first, then Megatron's DP reduce. Extra ranks have nothing to reduce."""
        self.ntp_grads.finish()
        if self._is_extra:
            return
        boost = self.ntp_model.ntp.boost
        if boost is None or boost.waits is None:
            super().finish_grad_sync(*args, **kwargs)
            return
        with boost.waits.waiting():
            super().finish_grad_sync(*args, **kwargs)

    def start_grad_sync(self, *unused: Any) -> None:
        raise NTPError("DDP.start_grad_sync cannot be called under --ntp: use finish_grad_sync")

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Megatron's all-gather over DP, then post-sync where it is not left to forward hooks.

        Also called when nothing has changed since the last one, for example after an evaluation.
        In an optimizer step only core ranks come here (up to 0.17); post-sync is left to its end,
        where extra ranks take part.
        """
        self.ntp_params.expect_gather()
        if not self._is_extra:
            super().start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)
        if self.ntp_in_step:
            return
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.ntp_params.finish()

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        for sp in self.ntp_model.params:
            if sp.shares_storage:
                sp.compute.grad_added_to_main_grad = False

    def broadcast_params(self) -> None:
        self.ntp_params.align_replicas()

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        def hook(module: Module, *unused: Any) -> None:
            for param in module.parameters(recurse=False):
                sp = self.ntp_model.by_param.get(param)
                if sp is not None:
                    self.ntp_params.ensure(sp)

        return hook

    def _ntp_gather(self, group: ReshardGroup) -> None:
        """Finishes the all-gathers of the buckets that hold a reshard group's parameters."""
        if not self.ddp_config.overlap_param_gather:
            return
        wanted = {self.param_to_bucket_group[sp.sync] for sp in group.params}
        # Bucket groups are listed in backward order; each dispatches the one before it in the list.
        for bucket_group in reversed(self.bucket_groups):
            if bucket_group in wanted:
                bucket_group.finish_param_sync(
                    skip_next_bucket_dispatch=self.ddp_config.align_param_gather
                )

    def _ntp_on_synced(self, sp: SyncParam) -> None:
        if self.ddp_config.overlap_grad_reduce:
            self.param_to_bucket_group[sp.sync].register_synced(sp.sync)

    def _ntp_accumulate_hook(self, sp: SyncParam) -> Callable[[Parameter], None]:
        """What Megatron's backward hook does, for a compute parameter that DDP does not know."""

        def hook(param: Parameter) -> None:
            if param.grad is not None and (
                not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False)
            ):
                param.main_grad.add_(param.grad.data)
            param.grad = None
            if self.ddp_config.overlap_grad_reduce:
                self.param_to_bucket_group[sp.sync].register_grad_ready(sp.sync)

        return hook


def ddp_init(
    original: Callable[..., None],
    self: Any,
    config: Any,
    ddp_config: Any,
    module: Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wraps `DistributedDataParallel.__init__`."""
    ntp = context.current()
    if ntp is None or ntp.plan is None:
        original(self, config, ddp_config, module, *args, **kwargs)
        return
    verify_installed()
    refuse_config(ddp_config)
    _agree_on_bucket_size(ddp_config, module, ntp)
    # A layout that was computed from compute parameters does not fit; DDP computes its own.
    kwargs.pop("full_param_layout", None)
    group_numel = (
        ntp.settings.ntp_bucket_size
        or ddp_config.bucket_size
        or max(_MIN_BUCKET_NUMEL, _BUCKET_NUMEL_PER_REPLICA * ntp.topology.num_replicas)
    )
    model = SyncModel(_gpt_model(module), ntp, group_numel)
    with model.sync_view():
        original(self, config, ddp_config, module, *args, **kwargs)
    attach(self, model)


def _agree_on_bucket_size(ddp_config: Any, module: Module, ntp: context.NTPContext) -> None:
    """Makes the bucket size of global rank 0 everyone's. Called once, by all ranks of the job.

    Buckets must be cut alike over DP, and reshard groups within a replica. Megatron works the size
    out on each rank: for --ddp-num-buckets from the parameters that it computes with, and by
    default (0.19) from the size of its DP group, in which an extra rank is alone.
    """
    device = next(module.parameters()).device
    size = torch.tensor([ddp_config.bucket_size or 0], dtype=torch.int64, device=device)
    torch.distributed.broadcast(size, src=0, group=ntp.group("world").group)
    ddp_config.bucket_size = int(size) or None


def attach(ddp: Any, model: SyncModel) -> None:
    """Turns a DDP that was built over sync parameters into one that reshards."""
    ntp = model.ntp
    hooked = bool(ddp.remove_forward_pre_hook_handles)
    if hooked:
        ddp.disable_forward_pre_hook(param_sync=False)
    ddp.__class__ = NTPDistributedDataParallel
    model.attach_storage()
    model.model._ntp_model = model
    resharder = Resharder(model)
    ddp.ntp_model = model
    ddp.ntp_grads = GradSync(
        model, resharder, ddp._ntp_on_synced, ddp.ddp_config.overlap_grad_reduce
    )
    ddp.ntp_params = ParamSync(model, resharder, ddp._ntp_gather)
    for bucket_group in ddp.bucket_groups:
        bucket_group.__class__ = NTPBucketGroup
        bucket_group.ntp_grads = ddp.ntp_grads
        bucket_group.ntp_model = model
    for sp in model.params:
        if sp.shares_storage:
            sp.compute.grad_added_to_main_grad = False
            sp.compute.register_post_accumulate_grad_hook(ddp._ntp_accumulate_hook(sp))
    _weight_by_microbatches(ddp, ntp)
    if hooked:
        ddp.enable_forward_pre_hook()
    ddp.ntp_params.align_replicas()
    ntp.counters.reset()


def _weight_by_microbatches(ddp: Any, ntp: context.NTPContext) -> None:
    """Weighs this replica's gradients by its share of the step's microbatches.

    Megatron averages over a replica's own microbatches and then over replicas, 1 / (m_r R); the
    mean over all samples is 1 / M, so a replica is weighted m_r R / M. Per-token loss sums instead
    and divides by all tokens later, which is right as it is.
    """
    assert ntp.batch is not None
    share = ntp.batch.shares[ntp.rank.dp_rank]
    weight = share * len(ntp.batch.shares) / ntp.batch.total
    if weight == 1.0 or ddp.config.calculate_per_token_loss:
        return
    for bucket_group in ddp.bucket_groups:
        for bucket in bucket_group.buckets:
            bucket.gradient_scaling_factor *= weight


def _gpt_model(module: Module) -> Module:
    """The bare GPTModel inside Megatron's wrappers."""
    bare = module
    while not isinstance(bare, GPTModel) and hasattr(bare, "module"):
        bare = bare.module
    if not isinstance(bare, GPTModel):
        raise NTPError(
            f"--ntp supports megatron.core's GPTModel, but the model is a {type(bare).__name__}. "
            "Train it without --ntp"
        )
    return bare


def chunks_of(model_chunks: Any) -> list[NTPDistributedDataParallel]:
    """The given chunks, which must all be under nonuniform TP."""
    chunks = list(model_chunks)
    for chunk in chunks:
        if not isinstance(chunk, NTPDistributedDataParallel):
            raise NTPError(
                f"a model chunk is a {type(chunk).__name__}, not a DistributedDataParallel that "
                "was built under --ntp"
            )
    return chunks
