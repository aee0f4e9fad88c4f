"""What a rank of a training job holds at every optimizer step, written down for tests.

`before` and `after` go to `ranks.run_training`; each rank's result is a `RankRecord`. A step is
recorded when the optimizer is called: gradients are those of this step, after data-parallel sync;
weights and optimizer state are what the steps before it, or a checkpoint, left.

This runs in plain Megatron and in nonuniform jobs alike, and reads Megatron's own objects: buffers,
bucket shards, optimizer state. Tensors are kept as this rank has them (a shard of a shard, with the
distributed optimizer); `logical` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Part:
    """Elements `start` onwards of the flat tensor that this rank's TP shard of a parameter is."""

    start: int
    values: np.ndarray


@dataclass
class ParamRecord:
    """Shapes of one parameter on one rank: as modules see it, and as the optimizer does."""

    shape: tuple[int, ...]
    sync_shape: tuple[int, ...] | None


@dataclass
class StepRecord:
    """One rank at one optimizer step.

    Attributes:
        iteration: finished iterations.
        consumed: Megatron's count of consumed training samples.
        weights: by parameter, what modules hold.
        tails: by parameter, the rest of the optimizer's flat tensor behind what modules hold.
        grads: by parameter; none on extra ranks.
        state: by kind (exp_avg, exp_avg_sq, and main where weights are not fp32) and parameter.
        adam_steps: Adam's own step count, of every parameter group that has parameters.
        answers: what the optimizer's step returned: success, gradient norm, zeros.
        samples: dataset indices read since the step before.
        exchanges: bytes that this rank sent in each all-to-all since the step before.
    """

    iteration: int
    consumed: int
    loss_scale: float
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    tails: dict[str, np.ndarray] = field(default_factory=dict)
    grads: dict[str, Part] = field(default_factory=dict)
    state: dict[str, dict[str, Part]] = field(default_factory=dict)
    adam_steps: list[int] = field(default_factory=list)
    answers: tuple[bool, float | None, int | None] = (False, None, None)
    samples: list[int] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)


@dataclass
class RankRecord:
    """One rank of a job. Where it is in the job, its plan if it has one, and its steps."""

    dp_rank: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    is_extra: bool = False
    plan: Any = None
    params: dict[str, ParamRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    optimizer_nbytes: int = 0
    seconds: float = 0.0


_record = RankRecord()
_samples: list[int] = []
_exchanges: list[int] = []


def before(
    state_at: tuple[int, ...] = (),
    grads_at: tuple[int, ...] = (0,),
    token_stride: int = 1,
    poison: tuple[int, int, int] | None = None,
) -> None:
    """Sets up the recording in a rank.

    Args:
        state_at: steps, from 0, at which optimizer state is recorded.
        grads_at: steps, from 0, at which gradients are recorded.
        token_stride: distance of neighbouring token ids of the mock data, so that all of a large
            vocabulary is used.
        poison: (step, DP rank, TP rank): where a gradient becomes infinite in backward.
    """
    from megatron.training import training

    _count_exchanges()
    _note_samples(token_stride)
    original = training.setup_model_and_optimizer

    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        chunk = model[0]
        _describe(chunk)
        _wrap_step(chunk, optimizer, state_at, grads_at)
        if poison is not None:
            _poison(chunk, *poison)
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup


def after(**unused: object) -> RankRecord:
    """What was recorded in this rank."""
    return _record


# --- observers ----------------------------------------------------------------------------------


def _count_exchanges() -> None:
    import torch.distributed as dist

    original = dist.all_to_all_single

    def counted(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        _exchanges.append(input.numel() * input.element_size())
        return original(output, input, *args, **kwargs)

    dist.all_to_all_single = counted


def _note_samples(token_stride: int) -> None:
    from megatron.core.datasets import gpt_dataset

    read = gpt_dataset.GPTDataset.__getitem__
    document = gpt_dataset.MockGPTLowLevelDataset.__getitem__

    def noted(self: Any, idx: int | None) -> Any:
        _samples.append(-1 if idx is None else int(idx))
        return read(self, idx)

    def strided(self: Any, idx: int) -> Any:
        return document(self, idx) * token_stride % self.vocab_size

    gpt_dataset.GPTDataset.__getitem__ = noted
    if token_stride != 1:
        gpt_dataset.MockGPTLowLevelDataset.__getitem__ = strided


def _wrap_step(
    chunk: Any, optimizer: Any, state_at: tuple[int, ...], grads_at: tuple[int, ...]
) -> None:
    from megatron.training import get_args

    step = optimizer.step

    def recorded() -> Any:
        args = get_args()
        index = len(_record.steps)
        now = StepRecord(
            args.curr_iteration,
            args.consumed_train_samples,
            float(optimizer.get_loss_scale()),
        )
        now.samples, now.exchanges = list(_samples), list(_exchanges)
        _samples.clear()
        _exchanges.clear()
        _record_weights(chunk, now)
        if index in grads_at and not _record.is_extra:
            now.grads = dict(_grads(chunk))
        if index in state_at:
            now.state, now.adam_steps = _optimizer_state(chunk, optimizer)
        _record.steps.append(now)
        now.answers = step()
        _record.optimizer_nbytes = _optimizer_nbytes(optimizer)
        return now.answers

    optimizer.step = recorded


def _poison(chunk: Any, step: int, dp_rank: int, tp_rank: int) -> None:
    if (_record.dp_rank, _record.tp_rank) != (dp_rank, tp_rank):
        return
    param = dict(_bare(chunk).named_parameters())["decoder.layers.0.mlp.linear_fc1.weight"]

    def infect(grad: Any) -> Any:
        return grad * float("inf") if len(_record.steps) == step else grad

    param.register_hook(infect)


# --- reading Megatron ---------------------------------------------------------------------------


def _bare(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def _optimizer_params(chunk: Any) -> dict[str, Any]:
    """By name, the parameters that buffers and optimizer are built of."""
    names = dict(_bare(chunk).named_parameters())
    if not hasattr(chunk, "ntp_model"):
        return names
    return {sp.name: sp.sync for sp in chunk.ntp_model.params if sp.sync is not None}


def _describe(chunk: Any) -> None:
    from megatron.core import parallel_state as mpu

    from megatron_ntp.integration import context

    ntp = context.current()
    _record.dp_rank = mpu.get_data_parallel_rank()
    _record.tp_rank = mpu.get_tensor_model_parallel_rank()
    _record.tp_size = mpu.get_tensor_model_parallel_world_size()
    if ntp is not None:
        _record.plan = ntp.plan
        _record.is_extra = _record.tp_rank >= ntp.topology.sync_degree
    optimizer_params = _optimizer_params(chunk)
    for name, param in _bare(chunk).named_parameters():
        sync = optimizer_params.get(name)
        _record.params[name] = ParamRecord(
            tuple(param.shape), None if sync is None else tuple(sync.shape)
        )


def _record_weights(chunk: Any, now: StepRecord) -> None:
    optimizer_params = _optimizer_params(chunk)
    for name, param in _bare(chunk).named_parameters():
        now.weights[name] = _array(param.data)
        sync = optimizer_params.get(name)
        if sync is not None and sync.numel() > param.numel():
            now.tails[name] = _array(sync.data.view(-1)[param.numel() :])


def _grads(chunk: Any) -> Iterator[tuple[str, Part]]:
    """The reduced gradients that this rank has: its slice of each bucket, or all of it."""
    names = {id(param): name for name, param in _optimizer_params(chunk).items()}
    distributed = chunk.ddp_config.use_distributed_optimizer
    for buffer in chunk.buffers:
        group = buffer.data_parallel_group
        for param, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            low, high = start, end
            if distributed:
                size = bucket.grad_data.numel() // group.size()
                first = bucket.offset + group.rank() * size
                low, high = max(start, first), min(end, first + size)
            if low < high:
                values = bucket.grad_data[low - bucket.offset : high - bucket.offset]
                yield names[id(param)], Part(low - start, _array(values))


def _parts(optimizer: Any) -> list[Any]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def _optimizer_state(chunk: Any, optimizer: Any) -> tuple[dict[str, dict[str, Part]], list[int]]:
    names = {id(param): name for name, param in _optimizer_params(chunk).items()}
    found: dict[str, dict[str, Part]] = {}
    steps = []
    for part in _parts(optimizer):
        steps += [int(g.get("step", 0)) for g in part.optimizer.param_groups if g["params"]]
        for param, start, tensors in _owned_state(part):
            for kind, tensor in tensors.items():
                flat = _array(tensor).reshape(-1)
                found.setdefault(kind, {})[names[id(param)]] = Part(start, flat)
    return found, steps


def _owned_state(part: Any) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """(model parameter, first element, main weight and moments) of one Megatron optimizer."""
    if hasattr(part, "model_param_gbuf_map"):
        for param in part.model_param_gbuf_map:
            tensors = part._get_main_param_and_optimizer_states(param)
            own = part._get_model_param_range_map(param)["param"]
            main = tensors.pop("param")
            yield param, own.start, _with_main(param, main, tensors)
        return
    pairs: list[tuple[Any, Any]] = []
    for model, main in zip(
        getattr(part, "float16_groups", []),
        getattr(part, "fp32_from_float16_groups", []),
        strict=True,
    ):
        pairs += zip(model, main, strict=True)
    mains = {id(main) for _, main in pairs}
    plain = [p for group in part.optimizer.param_groups for p in group["params"]]
    pairs += [(p, p) for p in plain if id(p) not in mains]
    for model, main in pairs:
        moments = {k: v for k, v in part.optimizer.state[main].items() if hasattr(v, "numel")}
        yield model, 0, _with_main(model, main, moments)


def _with_main(param: Any, main: Any, moments: dict[str, Any]) -> dict[str, Any]:
    """The moments, and the main weight where it is more than the parameter itself."""
    return moments if main.dtype == param.dtype else {"main": main, **moments}


def _optimizer_nbytes(optimizer: Any) -> int:
    """Bytes of main weights (where they are copies) and moments in this rank's optimizer."""
    tensors: list[Any] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if inner is not None:
            tensors += [t for s in inner.state.values() for t in s.values() if hasattr(t, "numel")]
            tensors += [p for group in inner.param_groups for p in group["params"]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
