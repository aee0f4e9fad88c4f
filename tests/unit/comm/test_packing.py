"""Flat orders of one parameter, against a naive reference that moves one element at a time."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ntp.comm.packing import Packing, Segment

packings = st.builds(
    Packing,
    st.lists(st.builds(Segment, st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3).map(
        tuple
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
)


def sync_order(packing: Packing) -> list[int]:
    """Place in natural order of each element of the sync order, straight from the definition."""
    places: list[int] = []
    bounds = list(accumulate(packing.piece_sizes, initial=0))
    for piece, start in enumerate(bounds[:-1]):
        base = 0
        for segment in packing.segments:
            for block in range(segment.outer):
                for unit in range(start, bounds[piece + 1]):
                    first = base + (block * packing.num_units + unit) * segment.inner
                    places += range(first, first + segment.inner)
            base += segment.outer * packing.num_units * segment.inner
    return places


def numbered(packing: Packing) -> torch.Tensor:
    return torch.arange(packing.numel)


@settings(deadline=None)  # a busy machine says nothing about the code
@given(packings)
def test_pack_follows_the_definition(packing: Packing) -> None:
    assert packing.pack(numbered(packing)).tolist() == sync_order(packing)


@settings(deadline=None)
@given(packings)
def test_unpack_is_the_inverse(packing: Packing) -> None:
    natural = numbered(packing)
    assert packing.unpack(packing.pack(natural)).equal(natural)
    assert packing.pack(packing.unpack(natural)).equal(natural)


@settings(deadline=None)
@given(packings)
def test_in_place_is_the_same(packing: Packing) -> None:
    flat = numbered(packing)
    packing.pack_(flat)
    assert flat.tolist() == sync_order(packing)
    packing.unpack_(flat)
    assert flat.equal(numbered(packing))


@settings(deadline=None)
@given(packings)
def test_a_piece_is_one_run_of_sync_order(packing: Packing) -> None:
    natural = numbered(packing)
    packed = packing.pack(natural)
    offsets = packing.piece_offsets()
    assert offsets[0] == 0 and offsets[-1] == packing.numel
    for index in range(len(packing.piece_sizes)):
        views = packing.piece_views(natural, index)
        assert len(views) == len(packing.segments)
        elements = [element for view in views for element in view.flatten().tolist()]
        assert elements == packed[offsets[index] : offsets[index + 1]].tolist()


@settings(deadline=None)
@given(packings)
def test_piece_views_share_memory(packing: Packing) -> None:
    natural = torch.zeros(packing.numel)
    for index in range(len(packing.piece_sizes)):
        for view in packing.piece_views(natural, index):
            view += 1
    assert natural.eq(1).all()


@settings(deadline=None)
@given(packings)
def test_natural_means_that_nothing_moves(packing: Packing) -> None:
    moves = sync_order(packing) != list(range(packing.numel))
    assert not (packing.is_natural and moves)


@pytest.mark.parametrize(
    ("segments", "pieces", "natural"),
    [
        ([Segment(1, 6)], (3, 2, 2), True),  # column-parallel: rows in order
        ([Segment(5, 2)], (3,), True),  # row-parallel, one piece
        ([Segment(5, 2)], (3, 1), False),  # row-parallel
        ([Segment(2, 6)], (3, 1), False),  # gate and up
        ([Segment(1, 2), Segment(1, 2)], (1, 1), False),  # two segments
    ],
)
def test_which_kinds_need_no_copy(
    segments: list[Segment], pieces: tuple[int, ...], natural: bool
) -> None:
    packing = Packing(tuple(segments), pieces)
    assert packing.is_natural is natural
    assert natural == (sync_order(packing) == list(range(packing.numel)))


def test_in_place_without_a_copy_where_nothing_moves() -> None:
    flat = torch.arange(6)
    version = flat._version
    Packing((Segment(1, 2),), (2, 1)).pack_(flat)
    assert flat._version == version


def test_row_parallel_example() -> None:
    """[2 rows, 3 columns], cut into the pieces of columns {0, 1} and {2}."""
    packing = Packing((Segment(2, 1),), (2, 1))
    assert packing.pack(torch.tensor([1, 2, 3, 4, 5, 6])).tolist() == [1, 2, 4, 5, 3, 6]
