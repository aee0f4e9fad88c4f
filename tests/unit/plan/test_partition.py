"""Cuts of one family: exact intervals first, then what must hold for any units and degrees."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.errors import PlanLookupError, PlanTypeError, PlanUnitsError
from megatron_ntp.plan.partition import (
    Piece,
    Route,
    RowInterval,
    UnitLayout,
    UnitRange,
    balanced_sizes,
    imbalance,
)


@st.composite
def layouts(draw: st.DrawFn) -> UnitLayout:
    degrees = draw(st.sets(st.integers(1, 24), min_size=1, max_size=5))
    units = draw(st.one_of(st.integers(max(degrees), 150), st.integers(max(degrees), 300_000)))
    return UnitLayout(units, tuple(degrees))


def every_rank(layout: UnitLayout) -> list[tuple[int, int]]:
    return [(degree, rank) for degree in layout.degrees for rank in range(degree)]


def assert_partition(runs: list[UnitRange], start: int, stop: int) -> None:
    """The runs, in any order, cover `start`..`stop` exactly once, and none is empty."""
    position = start
    for run in sorted(runs):
        assert run.start == position
        assert run.stop > run.start
        position = run.stop
    assert position == stop


# Exact intervals


@pytest.mark.parametrize(
    ("units", "parts", "sizes"),
    [
        (32, 7, (5, 5, 5, 5, 4, 4, 4)),
        (32, 8, (4,) * 8),
        (8, 7, (2, 1, 1, 1, 1, 1, 1)),
        (7, 7, (1,) * 7),
        (0, 2, (0, 0)),
        (3, 5, (1, 1, 1, 0, 0)),
    ],
)
def test_balanced_sizes(units: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert balanced_sizes(units, parts) == sizes


@pytest.mark.parametrize(
    ("heads", "sizes", "tail_owners"),
    [
        (8, (2, 1, 1, 1, 1, 1, 1), [0]),
        (16, (3, 3, 2, 2, 2, 2, 2), [0, 1]),
        (24, (4, 4, 4, 3, 3, 3, 3), [0, 1, 2]),
        (32, (5, 5, 5, 5, 4, 4, 4), [0, 1, 2, 3]),
        (64, (10, 9, 9, 9, 9, 9, 9), [0, 0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_heads_from_8_to_7(heads: int, sizes: tuple[int, ...], tail_owners: list[int]) -> None:
    layout = UnitLayout(heads, (8, 7))
    assert layout.sizes(7) == sizes
    assert layout.sizes(8) == (heads // 8,) * 8
    assert layout.sync_degree == 7
    assert layout.routes(7) == ()
    given_up = [r.core_rank for r in layout.routes(8) for _ in range(r.piece.size)]
    assert given_up == tail_owners
    assert {route.extra_rank for route in layout.routes(8)} == {7}


def test_two_degrees_with_several_extras() -> None:
    layout = UnitLayout(12, (2, 5))  # 5 parts: 3, 3, 2, 2, 2; sync shards 0..5 and 6..11
    assert layout.sync_shards == ((0, 6), (6, 12))
    shards = [layout.compute_shard(5, rank) for rank in range(5)]
    assert shards == [((0, 3),), ((6, 9),), ((3, 5),), ((5, 6), (9, 10)), ((10, 12),)]
    assert layout.cuts(0) == (3, 5)
    assert layout.cuts(1) == (3, 4)
    assert layout.pieces(0) == (Piece(0, 0, 0, 3), Piece(0, 1, 3, 5), Piece(0, 2, 5, 6))
    assert layout.routes(5) == (
        Route(0, 2, Piece(0, 1, 3, 5)),
        Route(0, 3, Piece(0, 2, 5, 6)),
        Route(1, 3, Piece(1, 1, 9, 10)),
        Route(1, 4, Piece(1, 2, 10, 12)),
    )
    assert layout.compute_pieces(5, 3) == (Piece(0, 2, 5, 6), Piece(1, 1, 9, 10))
    assert layout.position_ranges(5) == ((0, 3), (3, 6), (6, 8), (8, 10), (10, 12))
    assert layout.row_table(5) == (
        RowInterval(0, 3, 0),
        RowInterval(3, 6, 6),  # two runs, of ranks 2 and 3, that happen to stay adjacent
        RowInterval(6, 9, 3),
        RowInterval(9, 12, 9),
    )


def test_mixed_8_8_7_6_moves_nested_tails() -> None:
    layout = UnitLayout(24, (8, 8, 7, 6))
    assert layout.degrees == (8, 7, 6)
    assert layout.sizes(6) == (4,) * 6
    assert layout.compute_shard(7, 6) == ((15, 16), (19, 20), (23, 24))
    assert layout.compute_shard(8, 6) == ((3, 4), (7, 8), (11, 12))
    assert layout.compute_shard(8, 7) == ((15, 16), (19, 20), (23, 24))
    assert layout.pieces(3) == (Piece(3, 0, 12, 15), Piece(3, 1, 15, 16))


@pytest.mark.parametrize("degrees", [(8, 7), (8, 8, 7, 6), (64, 63), (72, 71, 70)])
def test_vocabulary_50257_padded_for_the_healthy_degree(degrees: tuple[int, ...]) -> None:
    multiple = 128 * max(degrees)
    padded = ceil(50257 / multiple) * multiple
    layout = UnitLayout(padded, degrees, family="vocab")
    for degree in layout.degrees:
        ranges = layout.position_ranges(degree)
        assert ranges[0].start == 0
        assert ranges[-1].stop == padded
        assert max(r.size for r in ranges) - min(r.size for r in ranges) <= 1
    assert layout.row_table(layout.sync_degree) == ((0, padded, 0),)


def test_route_post_is_the_reverse_of_pre() -> None:
    route = UnitLayout(8, (8, 7)).routes(8)[0]
    assert route.pre == (7, 0)
    assert route.post == (0, 7)


def test_one_degree_has_nothing_to_move() -> None:
    layout = UnitLayout(10, (4, 4))
    assert layout.routes(4) == ()
    assert [layout.cuts(j) for j in range(4)] == [()] * 4
    assert [layout.compute_shard(4, j)[0] for j in range(4)] == list(layout.sync_shards)


def test_equal_whatever_the_order_of_degrees_and_the_name() -> None:
    layout = UnitLayout(10, (2, 4, 2), family="ffn")
    assert layout == UnitLayout(10, (4, 2), family="units")
    assert hash(layout) == hash(UnitLayout(10, (4, 2)))


# What must hold for any units and degrees


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_balanced_sizes_follow_the_formula(units: int, parts: int) -> None:
    sizes = balanced_sizes(units, parts)
    assert sum(sizes) == units
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == [-((j - units) // parts) if j <= units else 0 for j in range(parts)]


@given(layouts())
def test_shards_of_every_degree_partition_the_units(layout: UnitLayout) -> None:
    assert_partition(list(layout.sync_shards), 0, layout.num_units)
    for degree in layout.degrees:
        runs = [run for rank in range(degree) for run in layout.compute_shard(degree, rank)]
        assert_partition(runs, 0, layout.num_units)


@given(layouts())
def test_every_rank_is_balanced_at_every_degree(layout: UnitLayout) -> None:
    for degree, rank in every_rank(layout):
        size = sum(run.size for run in layout.compute_shard(degree, rank))
        assert size == balanced_sizes(layout.num_units, degree)[rank] == layout.sizes(degree)[rank]


@given(layouts())
def test_core_shards_are_nested_prefixes_of_the_sync_shard(layout: UnitLayout) -> None:
    for core_rank, shard in enumerate(layout.sync_shards):
        stops = []
        for degree in layout.degrees:  # highest first
            (run,) = layout.compute_shard(degree, core_rank)
            assert run.start == shard.start
            stops.append(run.stop)
        assert stops == sorted(stops)
        assert stops[-1] == shard.stop


@given(layouts())
def test_core_ranks_of_the_highest_degree_compute_one_piece(layout: UnitLayout) -> None:
    for core_rank in range(layout.sync_degree):
        assert layout.compute_pieces(layout.degrees[0], core_rank) == layout.pieces(core_rank)[:1]


@given(layouts())
def test_pieces_partition_each_sync_shard_and_no_degree_cuts_one(layout: UnitLayout) -> None:
    for core_rank, shard in enumerate(layout.sync_shards):
        pieces = layout.pieces(core_rank)
        assert_partition([UnitRange(p.start, p.stop) for p in pieces], *shard)
        assert [(p.core_rank, p.index) for p in pieces] == [
            (core_rank, i) for i in range(len(pieces))
        ]
        assert layout.cuts(core_rank) == tuple(p.start - shard.start for p in pieces[1:])
        for piece in pieces:
            for degree in layout.degrees:
                owner = layout.owner(degree, piece)
                runs = layout.compute_shard(degree, owner)
                assert any(r.start <= piece.start and piece.stop <= r.stop for r in runs)


@given(layouts())
def test_pieces_are_maximal(layout: UnitLayout) -> None:
    """Two neighbours in a shard have different owners, or are apart, in some degree."""
    for core_rank in range(layout.sync_degree):
        pieces = layout.pieces(core_rank)
        for left, right in pairwise(pieces):
            assert any(layout.owner(d, left) != layout.owner(d, right) for d in layout.degrees)


@given(layouts())
def test_routes_cover_the_extra_shards_once_and_nothing_else(layout: UnitLayout) -> None:
    for degree in layout.degrees:
        routes = layout.routes(degree)
        moved: dict[int, list[Piece]] = {}
        order = [(route.core_rank, route.piece.index) for route in routes]
        assert order == sorted(order)
        for route in routes:
            assert route.core_rank == route.piece.core_rank < layout.sync_degree
            assert route.extra_rank == layout.owner(degree, route.piece) >= layout.sync_degree
            moved.setdefault(route.extra_rank, []).append(route.piece)
        for extra in range(layout.sync_degree, degree):
            assert tuple(moved.pop(extra)) == layout.compute_pieces(degree, extra)
        assert not moved
        # Minimal: an extra's own shard, once.
        own = sum(layout.sizes(degree)[layout.sync_degree :])
        assert sum(route.piece.size for route in routes) == own


@given(layouts())
def test_compute_pieces_are_the_compute_shard_in_local_order(layout: UnitLayout) -> None:
    for degree, rank in every_rank(layout):
        runs = list(layout.compute_shard(degree, rank))
        position = 0
        for piece in layout.compute_pieces(degree, rank):
            assert layout.local_start(degree, piece) == position
            position += piece.size
            run = runs.pop(0)
            assert piece.start == run.start
            if piece.stop < run.stop:
                runs.insert(0, UnitRange(piece.stop, run.stop))
        assert not runs


@given(layouts(), st.data())
def test_row_table_sends_each_row_into_its_owner(layout: UnitLayout, data: st.DataObject) -> None:
    for degree in layout.degrees:
        table = layout.row_table(degree)
        assert_partition(
            [UnitRange(r.logical_start, r.logical_stop) for r in table], 0, layout.num_units
        )
        images = [UnitRange(r[2], r[2] + r.logical_stop - r.logical_start) for r in table]
        assert_partition(images, 0, layout.num_units)
        shifts = [row.position_start - row.logical_start for row in table]
        assert all(a != b for a, b in pairwise(shifts)), "not merged"
    degree, rank = data.draw(st.sampled_from(every_rank(layout)))
    position = layout.position_ranges(degree)[rank].start
    for run in layout.compute_shard(degree, rank):
        for row in {run.start, run.stop - 1}:
            (hit,) = [
                r for r in layout.row_table(degree) if r.logical_start <= row < r.logical_stop
            ]
            assert hit.position_start + row - hit.logical_start == position + row - run.start
        position += run.size
    assert position == layout.position_ranges(degree)[rank].stop


def test_large_families_cost_no_more_than_their_ranks() -> None:
    layout = UnitLayout(10**12, (72, 71, 70, 69))
    assert sum(p.size for j in range(69) for p in layout.pieces(j)) == 10**12
    assert len(layout.row_table(72)) < 72 * 3


# Errors


def test_too_few_units_lists_the_degrees_that_work_and_their_cost() -> None:
    with pytest.raises(PlanUnitsError) as caught:
        UnitLayout(4, (8, 7), family="kv_group")
    message = str(caught.value)
    assert "kv_group: 4 units cannot be cut for TP degrees 8, 7" in message
    assert "1 (1.00), 2 (1.00), 3 (1.50), 4 (1.00)" in message
    assert imbalance(4, 3) == 1.5


@pytest.mark.parametrize(
    ("units", "degrees", "message"),
    [
        (0, (2,), "num_units must be at least 1, got 0"),
        (8, (2, 0), "TP degree must be at least 1, got 0"),
        (8, (), "needs the TP degree of at least one replica"),
        (8, (True,), "TP degree must be an integer, got True"),
    ],
)
def test_impossible_layouts(units: int, degrees: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanUnitsError, match=message):
        UnitLayout(units, degrees)


def test_balanced_sizes_refuses_no_parts() -> None:
    with pytest.raises(PlanTypeError, match="num_parts must be at least 1, got 0"):
        balanced_sizes(8, 0)


def test_lookups_name_what_exists() -> None:
    layout = UnitLayout(8, (4, 3), family="ffn")
    with pytest.raises(PlanLookupError, match=r"ffn: no replica .* degree 5; .* degrees are 4, 3"):
        layout.routes(5)
    with pytest.raises(PlanLookupError, match=r"ffn: TP rank 3 is outside 0\.\.2"):
        layout.compute_shard(3, 3)
    with pytest.raises(PlanLookupError, match=r"TP rank -1 is outside 0\.\.2"):
        layout.pieces(-1)
