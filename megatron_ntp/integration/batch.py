"""Microbatches and samples of replicas that do not all run the same number.

A global batch of M microbatches is dealt out in rounds: in round i every replica that runs more
than i microbatches takes the next one, in DP order. With equal shares this is Megatron's own order
of samples; with any shares each sample of the batch is used by exactly one replica.

`get_num_microbatches` stays nominal everywhere; only the training schedule of a replica is given
its own number. Evaluation is dealt out evenly, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.datasets.utils import Split
from megatron.training import get_args
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from megatron_ntp.integration import context
from megatron_ntp.integration.power_waits import StepWaits
from megatron_ntp.plan.batch import BatchPolicy, BatchShares


class SharedBatchSampler(MegatronPretrainingSampler):
    """Yields the sample indices of this replica's next microbatch of the shared global batch.

    Made from Megatron's sampler of the training data by `build_pretraining_data_loader`.
    """

    ntp_shares: tuple[int, ...]

    def __iter__(self) -> Iterator[list[int]]:
        size = self.micro_batch_size
        owners = deal(self.ntp_shares)
        own = [place * size for place, dp_rank in enumerate(owners) if dp_rank == self._own_rank]
        batch_samples = len(owners) * size
        start = self.consumed_samples
        while start + batch_samples <= self.total_samples:
            for offset in own:
                yield list(range(start + offset, start + offset + size))
            start += batch_samples

    @property
    def _own_rank(self) -> int:
        return int(self.data_parallel_rank)


def deal(shares: tuple[int, ...]) -> list[int]:
    """DP rank of each microbatch of a global batch, in sample order."""
    return [
        dp_rank
        for turn in range(max(shares))
        for dp_rank, share in enumerate(shares)
        if turn < share
    ]


def _waits() -> StepWaits | None:
    ntp = context.current()
    return ntp.boost.waits if ntp is not None and ntp.boost is not None else None


def _uneven_batch() -> tuple[context.NTPContext, BatchShares] | None:
    ntp = context.current()
    if ntp is None or ntp.batch is None or len(set(ntp.batch.shares)) == 1:
        return None
    return ntp, ntp.batch


def build_pretraining_data_loader(
    original: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps the function of this name in `megatron.training.datasets.data_samplers`."""
    loader = original(dataset, *args, **kwargs)
    uneven = _uneven_batch()
    if uneven is None or loader is None:
        return loader
    split = getattr(dataset, "split", getattr(dataset, "index_split", Split.train))
    sampler = loader.batch_sampler
    if split is Split.train and isinstance(sampler, MegatronPretrainingSampler):
        sampler.__class__ = SharedBatchSampler
        sampler.ntp_shares = uneven[1].shares
    return loader


def get_forward_backward_func(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `schedules.get_forward_backward_func`: this replica's own number of microbatches."""
    schedule = original(*args, **kwargs)
    uneven = _uneven_batch()
    if uneven is None:
        return schedule
    ntp, batch = uneven

    def own_share(*schedule_args: Any, **schedule_kwargs: Any) -> Any:
        if not schedule_kwargs.get("forward_only", False):
            schedule_kwargs["num_microbatches"] = batch.shares[ntp.rank.dp_rank]
        return schedule(*schedule_args, **schedule_kwargs)

    return own_share


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.training.train_step`: counts the samples that were really used.

    Megatron's loop adds the nominal batch after each step; what a shrunken batch lacks is taken off
    here. Steps are timed where the power boost wants to know.
    """
    waits = _waits()
    if waits is not None:
        waits.begin_step()
    result = original(*args, **kwargs)
    if waits is not None:
        waits.end_step()
    uneven = _uneven_batch()
    if uneven is not None and uneven[1].policy == BatchPolicy.SHRINK:
        batch = uneven[1]
        megatron_args = get_args()
        lacking = batch.num_microbatches * len(batch.shares) - batch.total
        megatron_args.consumed_train_samples -= lacking * megatron_args.micro_batch_size
    return result
