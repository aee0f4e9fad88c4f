"""Flat order of one TP parameter: natural (what modules use) and sync (what replicas share).

A rank owns some units of a parameter. Modules want them as an ordinary row-major tensor, the
natural order. Gradient sync, optimizer and checkpoints want an order that is the same in every
replica, whatever its TP degree.

[Sync order] Piece-major: for each piece, for each segment, the block `[outer, units, inner]` of
that piece. A piece is a contiguous run of the flat sync order, so it is sent, received and stored
without looking inside. With one piece, or one segment of `outer == 1`, sync order is natural
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Part of a parameter seen as `[outer, units, inner]`.

    Column-parallel weight: outer 1, inner = unit width x columns. Row-parallel weight `[out, in]`:
    outer = out, inner = unit width. Gated fc1: outer 2 (gate, up).
    """

    outer: int
    inner: int

    @property
    def numel_per_unit(self) -> int:
        return self.outer * self.inner


@dataclass(frozen=True)
class Packing:
    """How the pieces of one shard lie in its flat natural and flat sync order.

    Args:
        segments: the parameter's segments, in memory order.
        piece_sizes: units of each piece that the shard holds, in the shard's own order.
    """

    segments: tuple[Segment, ...]
    piece_sizes: tuple[int, ...]

    @property
    def numel_per_unit(self) -> int:
        return sum(segment.numel_per_unit for segment in self.segments)

    @property
    def num_units(self) -> int:
        return sum(self.piece_sizes)

    @property
    def numel(self) -> int:
        return self.num_units * self.numel_per_unit

    @property
    def is_natural(self) -> bool:
        """Whether sync order and natural order are the same, so that nothing is ever copied."""
        return len(self.piece_sizes) <= 1 or (
            len(self.segments) == 1 and self.segments[0].outer == 1
        )

    def piece_offsets(self) -> tuple[int, ...]:
        """Start of each piece in flat sync order, in elements, and the end of the last."""
        return tuple(size * self.numel_per_unit for size in accumulate(self.piece_sizes, initial=0))

    def piece_views(self, natural: Tensor, index: int) -> list[Tensor]:
        """Where one piece lies in a flat tensor of natural order: a view per segment.

        Args:
            natural: flat, `numel` elements.
            index: which of the shard's pieces.

        Returns:
            views `[outer, units of the piece, inner]`; their elements, in turn, are the piece in
            sync order.
        """
        start = sum(self.piece_sizes[:index])
        stop = start + self.piece_sizes[index]
        views = []
        segment_start = 0
        for segment in self.segments:
            segment_stop = segment_start + self.num_units * segment.numel_per_unit
            block = natural[segment_start:segment_stop].view(
                segment.outer, self.num_units, segment.inner
            )
            views.append(block[:, start:stop])
            segment_start = segment_stop
        return views

    def _block_pairs(self, natural: Tensor, packed: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(natural view, sync view) of every piece and segment."""
        blocks = [
            view
            for index in range(len(self.piece_sizes))
            for view in self.piece_views(natural, index)
        ]
        parts = packed.split([block.numel() for block in blocks])
        return [(block, part.view(block.shape)) for block, part in zip(blocks, parts, strict=True)]

    def pack(self, natural: Tensor) -> Tensor:
        """Flat natural order -> new flat tensor in sync order."""
        packed = torch.empty_like(natural)
        for source, destination in self._block_pairs(natural, packed):
            destination.copy_(source)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Flat sync order -> new flat tensor in natural order."""
        natural = torch.empty_like(packed)
        for destination, source in self._block_pairs(natural, packed):
            destination.copy_(source)
        return natural

    def pack_(self, flat: Tensor) -> None:
        """Natural -> sync order in place, through a temporary of this one parameter."""
        if not self.is_natural:
            flat.copy_(self.pack(flat))

    def unpack_(self, flat: Tensor) -> None:
        """Sync -> natural order in place, through a temporary of this one parameter."""
        if not self.is_natural:
            flat.copy_(self.unpack(flat))
