"""Uneven tensor-parallel layers and mappings.

`ColumnParallelLinear`, `RowParallelLinear` and `VocabParallelEmbedding` given a size that TP does
not divide split it into balanced parts: each rank builds the layer for its own part times the TP
degree, so Megatron's own division gives that part. The mappings split, gather and reduce-scatter
such parts.

[Rows] The vocabulary of the model follows the plan. On a replica with extra ranks, ranks own
scattered rows; token ids and targets go through one table that renumbers rows so that each rank's
rows are one range (plan.partition, [Rows]).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ntp.errors import NTPError
from megatron_ntp.integration import context
from megatron_ntp.plan.partition import RowInterval, balanced_sizes


def _tp_group(given: Any) -> Any:
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    return given if given is not None else get_tensor_model_parallel_group()


def _init_uneven(original: Callable[..., None], size_name: str, args: Any, kwargs: Any) -> bool:
    """Runs a layer's constructor with this rank's part of `size_name`, scaled by the TP degree.

    Returns whether the size was uneven.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    group = None if given.get("is_expert") else _tp_group(given.get("tp_group"))
    size = given[size_name]
    if group is None or size % group.size() == 0:
        original(*args, **kwargs)
        return False
    if size < group.size():
        raise NTPError(
            f"{type(given['self']).__name__} with {size_name} {size} cannot be split over "
            f"{group.size()} tensor-parallel ranks: each needs at least one"
        )
    given[size_name] = balanced_sizes(size, group.size())[group.rank()] * group.size()
    original(*bound.args, **bound.kwargs)
    setattr(given["self"], size_name, size)
    return True


def column_init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wraps `ColumnParallelLinear.__init__`."""
    _init_uneven(original, "output_size", args, kwargs)


def row_init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wraps `RowParallelLinear.__init__`."""
    _init_uneven(original, "input_size", args, kwargs)


def embedding_init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wraps `VocabParallelEmbedding.__init__`: corrects the row range it derives from its size."""
    _init_uneven(original, "num_embeddings", args, kwargs)
    layer = args[0] if args else kwargs["self"]
    sizes = balanced_sizes(layer.num_embeddings, layer.tp_group.size())
    layer.vocab_start_index = sum(sizes[: layer.tp_group.rank()])
    layer.vocab_end_index = layer.vocab_start_index + sizes[layer.tp_group.rank()]


def embedding_forward(original: Callable[..., Tensor], self: Any, input_: Tensor) -> Tensor:
    """Wraps `VocabParallelEmbedding.forward`. See [Rows]."""
    return original(self, model_rows(input_, self.num_embeddings))


_row_tables: dict[tuple[tuple[RowInterval, ...], torch.device], Tensor] = {}


def model_rows(token_ids: Tensor, num_rows: int) -> Tensor:
    """Token ids -> positions of their rows, if `num_rows` is the model's vocabulary."""
    ntp = context.current()
    if ntp is None or ntp.plan is None or num_rows != ntp.plan.model.padded_vocab_size:
        return token_ids
    intervals = ntp.layout("vocab").row_table(ntp.degree)
    if len(intervals) == 1:
        return token_ids
    key = (intervals, token_ids.device)
    if key not in _row_tables:
        table = torch.empty(num_rows, dtype=token_ids.dtype, device=token_ids.device)
        for start, stop, position in intervals:
            table[start:stop] = torch.arange(
                position, position + stop - start, dtype=table.dtype, device=table.device
            )
        _row_tables[key] = table
    return _row_tables[key][token_ids]


def vocab_parallel_cross_entropy(
    original: Callable[..., Tensor],
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> Tensor:
    """Wraps `vocab_parallel_cross_entropy`: logits of uneven vocabulary shards.

    Logits are `[..., rows of this rank]`, targets logical token ids `[...]`.
    """
    group = _tp_group(tp_group)
    num_local = vocab_parallel_logits.size(-1)
    sizes, num_rows = _vocab_sizes(num_local, group)
    # Megatron smooths over each rank's own rows, so the loss of a replica goes by its degree.
    if label_smoothing > 0 and (len(set(sizes)) > 1 or context.current() is not None):
        raise NTPError("label smoothing assumes equal vocabulary shards, which --ntp cuts unevenly")
    start = sum(sizes[: group.rank()])
    with _vocab_range(start, start + num_local):
        # Up to 0.18 there is no group to choose: it is the TP group.
        given = {} if tp_group is None else {"tp_group": tp_group}
        return original(
            vocab_parallel_logits, model_rows(target, num_rows), label_smoothing, **given
        )


def _vocab_sizes(num_local: int, group: Any) -> tuple[Sequence[int], int]:
    """Rows of every rank of the group, and their sum.

    The model's own vocabulary is known from the plan; for any other the ranks tell each other.
    """
    ntp = context.current()
    if ntp is not None and ntp.plan is not None and group.size() == ntp.degree:
        sizes = ntp.layout("vocab").sizes(ntp.degree)
        if sizes[group.rank()] == num_local:
            return sizes, sum(sizes)
    gathered = _gather_sizes(num_local, group)
    return gathered, sum(gathered)


_vocab_range_override: list[tuple[int, int]] = []


class _vocab_range:
    """Inside, Megatron's vocabulary range of this rank is the given one."""

    def __init__(self, start: int, stop: int) -> None:
        self._range = (start, stop)

    def __enter__(self) -> None:
        _vocab_range_override.append(self._range)

    def __exit__(self, *unused: object) -> None:
        _vocab_range_override.pop()


def vocab_range_from_per_partition(
    original: Callable[..., Sequence[int]], *args: Any, **kwargs: Any
) -> Sequence[int]:
    """Wraps `VocabUtility.vocab_range_from_per_partition_vocab_size`."""
    return _vocab_range_override[-1] if _vocab_range_override else original(*args, **kwargs)


# Mappings. Where the full size is at hand the parts are known; where only the local part is, ranks
# tell each other their sizes (these mappings are not on the path of a GPT training step).


def _gather_sizes(size: int, group: Any) -> list[int]:
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine, group=group)
    return [int(each) for each in sizes]


def _split_uneven(input_: Tensor, group: Any, dim: int) -> Tensor:
    sizes = balanced_sizes(input_.size(dim), group.size())
    return input_.split(list(sizes), dim=dim)[group.rank()].contiguous()


def _gather_uneven(input_: Tensor, sizes: Sequence[int], group: Any, dim: int) -> Tensor:
    """All-gather of parts of different size, as parts padded to the largest."""
    balanced = balanced_sizes(sum(sizes), group.size())
    if tuple(sizes) != balanced:
        raise NTPError(
            f"parts of sizes {', '.join(map(str, sizes))} cannot be gathered: gradients are handed "
            f"back in balanced parts, {', '.join(map(str, balanced))}. Cut the tensor like that"
        )
    moved = input_.movedim(dim, 0)
    padded = moved.new_zeros((max(sizes), *moved.shape[1:]))
    padded[: moved.size(0)] = moved
    gathered = moved.new_empty((group.size() * max(sizes), *moved.shape[1:]))
    dist.all_gather_into_tensor(gathered, padded.contiguous(), group=group)
    parts = gathered.view(group.size(), max(sizes), *moved.shape[1:])
    whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _reduce_scatter_uneven(input_: Tensor, group: Any, dim: int) -> Tensor:
    reduced = input_.contiguous().clone()
    dist.all_reduce(reduced, group=group)
    return _split_uneven(reduced, group, dim)


def split_along_last_dim(original: Callable[..., Tensor], input_: Tensor, group: Any) -> Tensor:
    """Wraps `mappings._split_along_last_dim`."""
    if input_.size(-1) % group.size() == 0:
        return original(input_, group)
    return _split_uneven(input_, group, -1)


def split_along_first_dim(original: Callable[..., Tensor], input_: Tensor, group: Any) -> Tensor:
    """Wraps `mappings._split_along_first_dim`."""
    if input_.size(0) % group.size() == 0:
        return original(input_, group)
    return _split_uneven(input_, group, 0)


def gather_along_last_dim(original: Callable[..., Tensor], input_: Tensor, group: Any) -> Tensor:
    """Wraps `mappings._gather_along_last_dim`."""
    sizes = _gather_sizes(input_.size(-1), group)
    if len(set(sizes)) == 1:
        return original(input_, group)
    return _gather_uneven(input_, sizes, group, input_.dim() - 1)


def gather_along_first_dim(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: Any,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Wraps `mappings._gather_along_first_dim`."""
    if output_split_sizes is None:
        sizes = _gather_sizes(input_.size(0), group)
        if len(set(sizes)) > 1:
            return _gather_uneven(input_, sizes, group, 0)
    return original(input_, group, output_split_sizes, use_global_buffer)


def reduce_scatter_along_last_dim(
    original: Callable[..., Tensor], input_: Tensor, group: Any
) -> Tensor:
    """Wraps `mappings._reduce_scatter_along_last_dim`."""
    if input_.size(-1) % group.size() == 0:
        return original(input_, group)
    return _reduce_scatter_uneven(input_, group, -1)


def reduce_scatter_along_first_dim(
    original: Callable[..., Tensor],
    input_: Tensor,
    group: Any,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Wraps `mappings._reduce_scatter_along_first_dim`."""
    if input_split_sizes is not None or input_.size(0) % group.size() == 0:
        return original(input_, group, input_split_sizes, use_global_buffer)
    return _reduce_scatter_uneven(input_, group, 0)
