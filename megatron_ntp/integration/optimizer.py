"""Megatron's optimizer over sync parameters, and its absence on extra ranks.

`get_megatron_optimizer` runs while modules hold sync parameters, so parameter groups, weight decay
and the distributed optimizer's shards are those of a TP = S model. Extra ranks give it no parameter
groups: Megatron then makes its stub optimizer, without state, and the stub takes every answer from
the core ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_ntp.integration import context, stats
from megatron_ntp.integration.checkpoint import check_optimizer_format
from megatron_ntp.integration.ddp import NTPDistributedDataParallel, chunks_of
from megatron_ntp.integration.parallel_state import CORE_REPLICA, CORE_WORLD, RESHARD
from megatron_ntp.integration.refusals import refuse_config

_MISSING = -1.0
"""Stands for None in the answers: norms and counts are never negative."""


class NTPOptimizer(ChainedOptimizer):
    """What Megatron's optimizer object becomes under nonuniform TP.

    Whatever reads or writes parameters as flat shards runs while they are in sync order.
    """

    ntp: context.NTPContext
    ntp_chunks: list[NTPDistributedDataParallel]

    def step(self) -> tuple[bool, float | None, int | None]:
        """One update. All ranks of a replica agree on its answers afterwards."""
        for chunk in self.ntp_chunks:
            chunk.ntp_params.begin_update()
            chunk.ntp_in_step = True
        own = None if self.ntp.is_extra else super().step()
        answers = self._share_answers(own)
        for chunk in self.ntp_chunks:
            chunk.ntp_in_step = False
            config = chunk.ddp_config
            if not (config.use_distributed_optimizer and config.overlap_param_gather):
                chunk.ntp_params.finish()
        self.ntp.steps += 1
        stats.write(self.ntp, self.ntp_chunks, self)
        return answers

    def reload_model_params(self, *args: Any, **kwargs: Any) -> None:
        with self._sync_order():
            super().reload_model_params(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._sync_order():
            super().load_state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        check_optimizer_format(kwargs.get("metadata"))
        with self._sync_order(), self._offsets_without_padding():
            return super().sharded_state_dict(*args, **kwargs)

    def share_loss_scale(self) -> None:
        """Extra ranks take over the loss scale that core ranks have loaded."""
        self._share_answers(None if self.ntp.is_extra else (True, None, None))

    @contextmanager
    def _sync_order(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self.ntp_chunks:
                stack.enter_context(chunk.ntp_params.sync_order())
            yield

    @contextmanager
    def _offsets_without_padding(self) -> Iterator[None]:
        """Parameter offsets of the buffers leave out the padding at the ends of buckets inside.

        To save fully reshardable state, Megatron (0.17 to 0.19) puts a buffer together without that
        padding, and takes parameters from it at offsets that count it. Where a bucket that is not
        the last has padding, it would save the state of other parameters. Uneven shards do.
        """
        buffers = [buffer for chunk in self.ntp_chunks for buffer in chunk.buffers]
        padded = [buffer.param_index_map for buffer in buffers]
        for buffer in buffers:
            sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
            gaps = [
                bucket.offset - offset
                for bucket, offset in zip(
                    buffer.buckets, accumulate(sizes, initial=0), strict=False
                )
            ]
            buffer.param_index_map = {
                param: (start - gaps[bucket_id], end - gaps[bucket_id], bucket_id)
                for param, (start, end, bucket_id) in buffer.param_index_map.items()
            }
        try:
            yield
        finally:
            for buffer, index_map in zip(buffers, padded, strict=True):
                buffer.param_index_map = index_map

    @torch.no_grad()
    def _share_answers(
        self, own: tuple[bool, float | None, int | None] | None
    ) -> tuple[bool, float | None, int | None]:
        """Core TP rank 0 tells the extra ranks of its replica what the step gave.

        All ranks of a replica that has extra ranks call it, once per step.
        """
        topology = self.ntp.topology
        if self.ntp.degree == topology.sync_degree:
            assert own is not None
            return own
        scale = self.get_loss_scale()
        answers = torch.zeros(4, dtype=torch.float64, device=scale.device)
        if own is not None:
            success, grad_norm, num_zeros = own
            known = [_MISSING if x is None else float(x) for x in (grad_norm, num_zeros)]
            own_answers = [float(success), *known, float(scale)]
            answers.copy_(torch.tensor(own_answers, dtype=torch.float64))
        reshard = self.ntp.group(RESHARD)
        dist.broadcast(answers, src=reshard.global_ranks[0], group=reshard.group)
        if own is not None:
            return own
        success, grad_norm, num_zeros, new_scale = answers.tolist()
        self._set_loss_scale(scale, new_scale)
        return (
            bool(success),
            None if grad_norm == _MISSING else grad_norm,
            None if num_zeros == _MISSING else int(num_zeros),
        )

    def _set_loss_scale(self, scale: Tensor, value: float) -> None:
        """An extra rank sees no overflow of its own, so it follows the core ranks' loss scale."""
        if float(scale) != value:
            scale.fill_(value)


def get_megatron_optimizer(
    original: Callable[..., Any], config: Any, model_chunks: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps `megatron.core.optimizer.get_megatron_optimizer`.

    All ranks of the job call it at once: Megatron gathers parameter groups over the whole job.
    """
    ntp = context.current()
    if ntp is None or ntp.plan is None:
        return original(config, model_chunks, *args, **kwargs)
    refuse_config(config)
    chunks = chunks_of(model_chunks)
    # --timing-log-level 1 and 2: barriers of all ranks within a step, where extra ranks never are.
    config.barrier_with_L1_time = False
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.ntp_params.sync_order())
            stack.enter_context(chunk.ntp_model.sync_view())
        optimizer = original(config, model_chunks, *args, **kwargs)
    kind = CORE_WORLD if chunks[0].ddp_config.use_distributed_optimizer else CORE_REPLICA
    assert type(optimizer) is ChainedOptimizer, f"Megatron made a {type(optimizer).__name__}"
    for part in optimizer.chained_optimizers:
        # Norms and overflow: every sync shard once, and the same sum in every replica.
        part.grad_stats_parallel_group = ntp.group(kind).group
    optimizer.__class__ = NTPOptimizer
    optimizer.ntp = ntp
    optimizer.ntp_chunks = chunks
    return optimizer


def optimizer_of_param_groups(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `_get_megatron_optimizer_based_on_param_groups`: no groups, no state on extra ranks."""
    ntp = context.current()
    if ntp is None or ntp.plan is None or not ntp.is_extra:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["param_groups"] = []
    return original(*bound.args, **bound.kwargs)
