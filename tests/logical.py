"""Full logical tensors from what ranks recorded, and how far two of them are apart.

Written for tests, straight from the definitions in the design notes: this shares no code with the
package. A tensor-parallel parameter is seen as [outer, units, inner], uniform TP cuts the units
into equal parts, and nonuniform TP into the runs and pieces that the plan names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from recording import Part, RankRecord

Tensors = dict[str, np.ndarray]

FAMILIES = {
    "linear_qkv.weight": ("kv_group", 0),
    "linear_qkv.bias": ("kv_group", 0),
    "linear_proj.weight": ("kv_group", 1),
    "linear_fc1.weight": ("ffn", 0),
    "linear_fc1.bias": ("ffn", 0),
    "linear_fc2.weight": ("ffn", 1),
    "word_embeddings.weight": ("vocab", 0),
    "output_layer.weight": ("vocab", 0),
}
"""By end of name: family of units, and the dimension that TP cuts. Others are replicated."""

COPIES = 5e-7


class Logical:
    """Puts together the shards of one job's model.

    Args:
        units: number of units of each family in the whole model.
        gated: whether fc1 holds gate and up.
    """

    def __init__(self, units: Mapping[str, int], gated: bool) -> None:
        self._units = units
        self._gated = gated

    def weights(self, ranks: Sequence[RankRecord], step: int, dp_rank: int) -> Tensors:
        """Full weights as the modules of one replica hold them, extra ranks included."""
        replica = [rank for rank in ranks if rank.dp_rank == dp_rank]
        found: Tensors = {}
        for name in replica[0].params:
            shards = {rank.tp_rank: rank.steps[step].weights[name] for rank in replica}
            found[name] = self._from_shards(name, shards, replica[0])
        return found

    def optimizer_weights(self, ranks: Sequence[RankRecord], step: int, dp_rank: int) -> Tensors:
        """Full weights as the optimizer of one nonuniform replica's core ranks holds them."""
        cores = [rank for rank in ranks if rank.dp_rank == dp_rank and not rank.is_extra]
        found: Tensors = {}
        for name in cores[0].params:
            flats = {rank.tp_rank: self._sync_flat(name, rank, step) for rank in cores}
            found[name] = self._from_flats(name, flats, cores[0])
        return found

    def grads(self, ranks: Sequence[RankRecord], step: int) -> Tensors:
        """Full gradients after data-parallel sync. All replicas must agree on every bit.

        The TP ranks' copies of a replicated gradient may differ by rounding: with three replicas,
        the order in which gloo adds depends on where in a buffer a gradient lies, and buffers of
        uneven sync shards differ.
        """
        return self._gathered(ranks, lambda rank: rank.steps[step].grads, copies=COPIES)

    def state(self, ranks: Sequence[RankRecord], step: int) -> dict[str, Tensors]:
        """Full optimizer state by kind. All replicas must agree on every element."""
        kinds = {kind for rank in ranks for kind in rank.steps[step].state}
        return {
            kind: self._gathered(ranks, lambda rank, k=kind: rank.steps[step].state.get(k, {}))
            for kind in sorted(kinds)
        }

    # Cutting

    def _view(self, name: str, flat: np.ndarray, shape: tuple[int, ...], units: int) -> np.ndarray:
        """A tensor with this many units as [outer, units, inner]."""
        _, dim = _family(name)
        if dim == 1:
            return flat.reshape(shape[0], units, -1)
        outer = 2 if self._gated and "linear_fc1" in name else 1
        return flat.reshape(outer, units, -1)

    def _full_shape(self, name: str, rank: RankRecord) -> tuple[int, ...]:
        family, dim = _family(name)
        shape = list(rank.params[name].shape)
        shape[dim] = shape[dim] // self._local_units(family, rank) * self._units[family]
        return tuple(shape)

    def _local_units(self, family: str, rank: RankRecord) -> int:
        return sum(stop - start for start, stop in self._runs(family, rank, rank.tp_rank))

    def _runs(self, family: str, rank: RankRecord, tp_rank: int) -> list[tuple[int, int]]:
        """The logical units that a TP rank computes, in its order."""
        if rank.plan is not None:
            shard = rank.plan.layout(family).compute_shard(rank.tp_size, tp_rank)
            return [(run.start, run.stop) for run in shard]
        assert self._units[family] % rank.tp_size == 0, "plain Megatron cuts into equal parts"
        size = self._units[family] // rank.tp_size
        return [(tp_rank * size, (tp_rank + 1) * size)]

    def _from_shards(
        self,
        name: str,
        shards: Mapping[int, np.ndarray],
        rank: RankRecord,
        copies: float = 0.0,
    ) -> np.ndarray:
        """From row-major tensors, by TP rank. Copies of a replicated one may be so far apart."""
        if _family(name)[0] is None:
            first, *others = shards.values()
            apart = max((distance(other, first) for other in others), default=0.0)
            assert apart <= copies, f"{name}: TP ranks' copies differ by {apart:.1e}"
            return first
        family, _ = _family(name)
        whole: np.ndarray | None = None
        for tp_rank, shard in shards.items():
            runs = self._runs(family, rank, tp_rank)
            view = self._view(name, shard.reshape(-1), shard.shape, sum(b - a for a, b in runs))
            if whole is None:
                whole = np.full((view.shape[0], self._units[family], view.shape[2]), np.nan, "f4")
            position = 0
            for start, stop in runs:
                whole[:, start:stop] = view[:, position : position + stop - start]
                position += stop - start
        assert whole is not None
        return whole.reshape(self._full_shape(name, rank))

    def _from_flats(
        self,
        name: str,
        flats: Mapping[int, np.ndarray],
        rank: RankRecord,
        copies: float = 0.0,
    ) -> np.ndarray:
        """From flat sync shards in sync order (piece by piece), by TP rank."""
        family, _ = _family(name)
        if family is None or rank.plan is None:
            shape = rank.params[name].shape
            shards = {tp_rank: flat.reshape(shape) for tp_rank, flat in flats.items()}
            return self._from_shards(name, shards, rank, copies)
        full = self._full_shape(name, rank)
        whole = self._view(name, np.full(full, np.nan, "f4"), full, self._units[family])
        for tp_rank, flat in flats.items():
            position = 0
            for piece in rank.plan.layout(family).pieces(tp_rank):
                target = whole[:, piece.start : piece.stop]
                target[...] = flat[position : position + target.size].reshape(target.shape)
                position += target.size
            assert position == flat.size, f"{name}: the pieces hold {position} of {flat.size}"
        return whole.reshape(full)

    def _sync_flat(self, name: str, rank: RankRecord, step: int) -> np.ndarray:
        """A core rank's weights in sync order: what modules hold, cut at pieces, then the tail."""
        local = rank.steps[step].weights[name]
        tail = rank.steps[step].tails.get(name, np.zeros(0, "f4"))
        family, _ = _family(name)
        if family is None:
            return local.reshape(-1)
        ((start, stop),) = self._runs(family, rank, rank.tp_rank)
        view = self._view(name, local.reshape(-1), local.shape, stop - start)
        pieces = rank.plan.layout(family).pieces(rank.tp_rank)
        blocks = [view[:, p.start - start : p.stop - start] for p in pieces if p.start < stop]
        return np.concatenate([*(block.reshape(-1) for block in blocks), tail])

    def _gathered(self, ranks: Sequence[RankRecord], parts_of: Any, copies: float = 0.0) -> Tensors:
        cores = [rank for rank in ranks if not rank.is_extra]
        found: Tensors = {}
        for name, param in cores[0].params.items():
            flats = {}
            for tp_rank in sorted({rank.tp_rank for rank in cores}):
                dp_group = [rank for rank in cores if rank.tp_rank == tp_rank]
                numels = {int(np.prod(rank.params[name].sync_shape)) for rank in dp_group}
                assert len(numels) == 1, f"{name}: sync shards of {numels} elements in one DP group"
                parts = [parts_of(rank).get(name) for rank in dp_group]
                flats[tp_rank] = join(name, [p for p in parts if p is not None], numels.pop())
            if param.sync_shape is not None:
                found[name] = self._from_flats(name, flats, cores[0], copies)
        return found


def _family(name: str) -> tuple[Any, int]:
    for ending, found in FAMILIES.items():
        if name.endswith(ending):
            return found
    return None, 0


def join(name: str, parts: Iterable[Part], numel: int) -> np.ndarray:
    """A flat tensor from slices that cover it; where they overlap they must agree bit by bit."""
    whole = np.full(numel, np.nan, "f4")
    covered = np.zeros(numel, bool)
    for part in parts:
        span = slice(part.start, part.start + part.values.size)
        old = covered[span]
        assert np.array_equal(whole[span][old], part.values[old], equal_nan=True), (
            f"{name}: ranks of one data-parallel group hold different values"
        )
        whole[span], covered[span] = part.values, True
    assert covered.all(), f"{name}: {int((~covered).sum())} of {numel} elements on no rank"
    return whole


# --- distances ----------------------------------------------------------------------------------


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over largest element."""
    assert ours.shape == theirs.shape, f"{ours.shape} and {theirs.shape}"
    largest = float(np.abs(theirs).max())
    difference = float(np.abs(ours.astype("f8") - theirs.astype("f8")).max())
    assert np.isfinite(difference), "not finite"
    return difference / largest if largest else difference


def distances(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """`distance` by parameter; both must have the same parameters."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return {name: distance(ours[name], theirs[name]) for name in ours}


def unequal(ours: Tensors, theirs: Tensors) -> list[str]:
    """Parameters that are not equal bit by bit."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return [name for name in ours if not np.array_equal(ours[name], theirs[name])]
