"""How one family of units is cut for a job whose replicas have different TP degrees.

`UnitLayout` answers, for KV groups, FFN columns or vocabulary rows: which units a rank owns in the
optimizer's view (sync shards), which it owns in its own replica's forward and backward (compute
shards), and what therefore moves between the ranks of one TP group (routes).

[Nesting] A family of U units cut into n parts gives part j `ceil((U - j) / n)` units, which never
grows with n. So a core rank of any degree can own a *prefix* of its sync shard, and the prefix of a
higher degree lies inside the prefix of a lower one. What the cores of a degree give up (the tails)
is, put end to end in order of core rank, cut among that degree's extra ranks.

[Pieces] The cuts that all degrees make inside one sync shard divide it into pieces. No degree cuts
a piece, so a piece is the smallest thing that is ever moved, and a parameter laid out piece by
piece has the same flat order in every replica.

Everything is interval arithmetic: the cost depends on the number of ranks, never on U.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_ntp.errors import PlanLookupError, PlanUnitsError
from megatron_ntp.plan._checks import require_int


class UnitRange(NamedTuple):
    """Units `start` to `stop - 1`, in logical coordinates (those of the unsharded family)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """Maximal run of units inside one sync shard that no degree's cut divides.

    `core_rank` is the sync shard it lies in, `index` its place in that shard, and `start` and
    `stop` are logical unit coordinates.
    """

    core_rank: int
    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Route:
    """One piece that an extra rank computes and a core rank syncs.

    Written once for both directions: gradients follow `pre`, parameters come back along `post`.
    Both are (source TP rank, destination TP rank).
    """

    core_rank: int
    extra_rank: int
    piece: Piece

    @property
    def pre(self) -> tuple[int, int]:
        return (self.extra_rank, self.core_rank)

    @property
    def post(self) -> tuple[int, int]:
        source, destination = self.pre
        return (destination, source)


class RowInterval(NamedTuple):
    """Logical rows `logical_start` to `logical_stop - 1` sit at `position_start` onwards."""

    logical_start: int
    logical_stop: int
    position_start: int


def balanced_sizes(num_units: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of `num_parts` parts that differ by at most 1, larger parts first."""
    require_int("num_units", num_units)
    require_int("num_parts", num_parts, minimum=1)
    base, remainder = divmod(num_units, num_parts)
    return (base + 1,) * remainder + (base,) * (num_parts - remainder)


def ranges_of(sizes: Iterable[int]) -> tuple[UnitRange, ...]:
    """Contiguous ranges with these sizes, from 0."""
    bounds = accumulate(sizes, initial=0)
    return tuple(UnitRange(start, stop) for start, stop in pairwise(bounds))


def imbalance(num_units: int, degree: int) -> float:
    """The slowest rank's units over the ideal `num_units / degree`: 1.0 is a perfect cut."""
    return balanced_sizes(num_units, degree)[0] * degree / num_units


@dataclass(frozen=True)
class UnitLayout:
    """One family of units, cut for replicas of the given TP degrees.

    `degrees` may be given in any order and with repeats; it is kept as the distinct degrees,
    highest first. `family` is a name for messages and takes no part in comparisons.
    """

    num_units: int
    degrees: tuple[int, ...]
    family: str = field(default="units", compare=False)

    def __post_init__(self) -> None:
        require_int("num_units", self.num_units, minimum=1, error=PlanUnitsError)
        for degree in self.degrees:
            require_int("TP degree", degree, minimum=1, error=PlanUnitsError)
        if not self.degrees:
            raise PlanUnitsError("a layout needs the TP degree of at least one replica, got none")
        object.__setattr__(self, "degrees", tuple(sorted(set(self.degrees), reverse=True)))
        if self.num_units < self.degrees[0]:
            raise PlanUnitsError(_too_few_units(self.family, self.num_units, self.degrees))

    @property
    def sync_degree(self) -> int:
        """S: the number of parts that data parallelism and the optimizer see."""
        return self.degrees[-1]

    @cached_property
    def sync_shards(self) -> tuple[UnitRange, ...]:
        return ranges_of(balanced_sizes(self.num_units, self.sync_degree))

    def sizes(self, degree: int) -> tuple[int, ...]:
        """Number of units that each TP rank of a replica of this degree computes."""
        self._require_degree(degree)
        return balanced_sizes(self.num_units, degree)

    def compute_shard(self, degree: int, tp_rank: int) -> tuple[UnitRange, ...]:
        """The runs of units that this rank computes, in its local order.

        One run, a prefix of the rank's sync shard, on a core rank; one or more on an extra rank.
        """
        self._require_rank(degree, tp_rank)
        return self._compute_shards[degree][tp_rank]

    def compute_pieces(self, degree: int, tp_rank: int) -> tuple[Piece, ...]:
        """The same units as `compute_shard`, in the same order, piece by piece."""
        self._require_rank(degree, tp_rank)
        return self._compute_pieces[degree][tp_rank]

    def cuts(self, core_rank: int) -> tuple[int, ...]:
        """Where any degree cuts inside sync shard `core_rank`, in units from its start."""
        self._require_rank(self.sync_degree, core_rank)
        return self._cuts[core_rank]

    def pieces(self, core_rank: int) -> tuple[Piece, ...]:
        """The pieces of sync shard `core_rank`, in order."""
        self._require_rank(self.sync_degree, core_rank)
        return self._pieces[core_rank]

    def owner(self, degree: int, piece: Piece) -> int:
        """The TP rank that computes `piece` in a replica of this degree."""
        self._require_degree(degree)
        starts, tp_ranks = self._owners[degree]
        return tp_ranks[bisect_right(starts, piece.start) - 1]

    def local_start(self, degree: int, piece: Piece) -> int:
        """Where `piece` starts, in units, inside its owner's compute shard."""
        offset = 0
        for run in self.compute_shard(degree, self.owner(degree, piece)):
            if run.start <= piece.start < run.stop:
                break
            offset += run.size
        return offset + piece.start - run.start

    def routes(self, degree: int) -> tuple[Route, ...]:
        """Every piece that an extra rank computes, by core rank and piece. Empty at degree S."""
        self._require_degree(degree)
        return self._routes[degree]

    def position_ranges(self, degree: int) -> tuple[UnitRange, ...]:
        """Per TP rank, its units' positions when the ranks' compute shards are put end to end."""
        return ranges_of(self.sizes(degree))

    def row_table(self, degree: int) -> tuple[RowInterval, ...]:
        """Logical row -> position, as intervals sorted by logical row and merged where possible.

        [Rows] A vocabulary embedding wants each rank's rows to be one range. Extra ranks own
        scattered rows, so rows are renumbered: positions run through the ranks' compute shards in
        order of TP rank. Token ids and targets go through this table; weights are never permuted.
        """
        self._require_degree(degree)
        moved: list[RowInterval] = []
        position = 0
        for shard in self._compute_shards[degree]:
            for run in shard:
                moved.append(RowInterval(run.start, run.stop, position))
                position += run.size
        merged: list[RowInterval] = []
        for row in sorted(moved):
            # Sorted rows leave no gap, so a run goes on exactly where its shift stays the same.
            if merged and _shift(merged[-1]) == _shift(row):
                merged[-1] = merged[-1]._replace(logical_stop=row.logical_stop)
            else:
                merged.append(row)
        return tuple(merged)

    # Tables. Each is built once, on first use.

    @cached_property
    def _compute_shards(self) -> dict[int, tuple[tuple[UnitRange, ...], ...]]:
        return {degree: self._cut(degree) for degree in self.degrees}

    def _cut(self, degree: int) -> tuple[tuple[UnitRange, ...], ...]:
        """Compute shards of every TP rank of one degree. See [Nesting]."""
        sizes = balanced_sizes(self.num_units, degree)
        prefixes = [
            UnitRange(shard.start, shard.start + size)
            for shard, size in zip(self.sync_shards, sizes, strict=False)
        ]
        tails = [
            UnitRange(prefix.stop, shard.stop)
            for shard, prefix in zip(self.sync_shards, prefixes, strict=True)
            if prefix.stop < shard.stop
        ]
        extras = _deal(tails, sizes[self.sync_degree :])
        return (*((prefix,) for prefix in prefixes), *extras)

    @cached_property
    def _owners(self) -> dict[int, tuple[list[int], list[int]]]:
        """Per degree: the starts of all runs, ascending, and the TP rank that owns each."""
        owners: dict[int, tuple[list[int], list[int]]] = {}
        for degree, shards in self._compute_shards.items():
            runs = sorted((run.start, tp_rank) for tp_rank, s in enumerate(shards) for run in s)
            owners[degree] = ([start for start, _ in runs], [tp_rank for _, tp_rank in runs])
        return owners

    @cached_property
    def _cuts(self) -> tuple[tuple[int, ...], ...]:
        shard_starts = [shard.start for shard in self.sync_shards]
        # Runs cover the family without gaps, so every cut is the start of some run.
        cuts = sorted({start for starts, _ in self._owners.values() for start in starts})
        found: list[list[int]] = [[] for _ in shard_starts]
        for cut in cuts:
            core_rank = bisect_right(shard_starts, cut) - 1
            if cut > shard_starts[core_rank]:
                found[core_rank].append(cut - shard_starts[core_rank])
        return tuple(tuple(relative) for relative in found)

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        pieces: list[tuple[Piece, ...]] = []
        for core_rank, (shard, cuts) in enumerate(zip(self.sync_shards, self._cuts, strict=True)):
            bounds = pairwise((0, *cuts, shard.size))
            pieces.append(
                tuple(
                    Piece(core_rank, index, shard.start + start, shard.start + stop)
                    for index, (start, stop) in enumerate(bounds)
                )
            )
        return tuple(pieces)

    @cached_property
    def _compute_pieces(self) -> dict[int, tuple[tuple[Piece, ...], ...]]:
        table: dict[int, tuple[tuple[Piece, ...], ...]] = {}
        for degree in self.degrees:
            owned: list[list[Piece]] = [[] for _ in range(degree)]
            for shard_pieces in self._pieces:
                for piece in shard_pieces:
                    owned[self.owner(degree, piece)].append(piece)
            table[degree] = tuple(tuple(pieces) for pieces in owned)
        return table

    @cached_property
    def _routes(self) -> dict[int, tuple[Route, ...]]:
        # Extras take the tails in order of core rank, so extra by extra is core by core as well.
        return {
            degree: tuple(
                Route(piece.core_rank, extra_rank, piece)
                for extra_rank in range(self.sync_degree, degree)
                for piece in shards[extra_rank]
            )
            for degree, shards in self._compute_pieces.items()
        }

    def _require_degree(self, degree: int) -> None:
        if degree not in self.degrees:
            raise PlanLookupError(
                f"{self.family}: no replica of this job has TP degree {degree}; "
                f"the job's degrees are {', '.join(map(str, self.degrees))}"
            )

    def _require_rank(self, degree: int, tp_rank: int) -> None:
        self._require_degree(degree)
        if not 0 <= tp_rank < degree:
            raise PlanLookupError(
                f"{self.family}: TP rank {tp_rank} is outside 0..{degree - 1}, "
                f"the ranks of TP degree {degree}"
            )


def _shift(row: RowInterval) -> int:
    return row.position_start - row.logical_start


def _deal(tails: Sequence[UnitRange], sizes: Sequence[int]) -> tuple[tuple[UnitRange, ...], ...]:
    """Cut `tails`, taken end to end, into consecutive parts of these sizes."""
    queue = list(reversed(tails))
    parts: list[tuple[UnitRange, ...]] = []
    for size in sizes:
        runs: list[UnitRange] = []
        missing = size
        while missing:
            tail = queue.pop()
            stop = min(tail.stop, tail.start + missing)
            runs.append(UnitRange(tail.start, stop))
            missing -= stop - tail.start
            if stop < tail.stop:
                queue.append(UnitRange(stop, tail.stop))
        parts.append(tuple(runs))
    assert not queue, f"tails {tails} hold more units than the extra ranks take: {sizes}"
    return tuple(parts)


def _too_few_units(family: str, num_units: int, degrees: tuple[int, ...]) -> str:
    working = ", ".join(f"{d} ({imbalance(num_units, d):.2f})" for d in range(1, num_units + 1))
    return (
        f"{family}: {num_units} units cannot be cut for TP degrees "
        f"{', '.join(map(str, degrees))}: every TP rank needs at least one unit. "
        f"TP degrees that work, with the slowest rank's cost against an ideal cut: {working}. "
        "Use one of these degrees, or a model with more units in this family"
    )
