"""One coalesced move of pieces between the extra and the core ranks of a replica.

An `Exchange` belongs to one reshard group (a few layers) and one direction. Every rank of the
replica's reshard process group calls `start` and `finish` for the same exchanges in the same order;
`comm` never decides that order (integration.grad_sync and integration.param_sync do).

    start   copy-in to staging, then one `all_to_all_single`, asynchronous
    finish  wait, then copy-out from staging

[Two in flight] Staging is reused: two slots a direction and dtype, taken in turn. So at most two
exchanges of a direction are under way, and the caller finishes number k before it starts k + 2.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ntp.errors import NTPError

NUM_SLOTS = 2


@dataclass
class TrafficCounters:
    """What one rank did since the last `reset`; for tests, `rehearse` and the statistics.

    `blocked_s` is the time that the training thread spent in `Exchange.start` and `finish`: copies
    and waits that nothing covered. On GPU both only enqueue, so it is the launch overhead there.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    tp_sums: int = 0
    blocked_s: float = 0.0

    def reset(self) -> None:
        self.exchanges = self.bytes_sent = self.tp_sums = 0
        self.blocked_s = 0.0


@dataclass
class Staging:
    """Flat send and receive buffers shared by all exchanges of one direction. See [Two in flight].

    `reserve` is called while exchanges are built; memory is taken at the first `buffer`.
    """

    device: torch.device
    _numel: dict[tuple[str, torch.dtype], int] = field(default_factory=dict)
    _buffers: dict[tuple[str, torch.dtype, int], Tensor] = field(default_factory=dict)

    def reserve(self, name: str, dtype: torch.dtype, numel: int) -> None:
        key = (name, dtype)
        assert not any(used[:2] == key for used in self._buffers), f"staging {key} is in use"
        self._numel[key] = max(self._numel.get(key, 0), numel)

    def buffer(self, name: str, dtype: torch.dtype, slot: int, numel: int) -> Tensor:
        """The first `numel` elements of the buffer; the same storage at every call."""
        key = (name, dtype, slot)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(
                self._numel[name, dtype], dtype=dtype, device=self.device
            )
        return self._buffers[key][:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held when every slot is in use."""
        return NUM_SLOTS * sum(numel * dtype.itemsize for (_, dtype), numel in self._numel.items())


class Exchange:
    """Moves views of local tensors to or from peers of one process group, in one collective.

    Args:
        name: for errors, e.g. "gradients of layers 0-3".
        group: the replica's reshard group; ranks of the group are TP ranks.
        peer_views: per peer TP rank, this rank's views to send (or fill), in an order both ends
            agree on; any strides. Each pair of ends must have the same number of elements.
        sends: whether this rank sends its views (else it fills them).
        staging: buffers shared with the other exchanges of this direction.
        counters: what `start` adds to.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        peer_views: Mapping[int, Sequence[Tensor]],
        sends: bool,
        dtype: torch.dtype,
        staging: Staging,
        counters: TrafficCounters,
    ) -> None:
        self.name = name
        self._group = group
        self._sends = sends
        self._dtype = dtype
        self._staging = staging
        self._counters = counters
        self._peers = sorted(peer_views)
        self._views = [view for peer in self._peers for view in peer_views[peer]]
        wrong = {view.dtype for view in self._views} - {dtype}
        assert not wrong, f"exchange '{name}' is for {dtype} but got views of {wrong}"
        numels = [sum(v.numel() for v in peer_views.get(peer, ())) for peer in range(group.size())]
        nothing = [0] * group.size()
        self._send_splits: list[int] = numels if sends else nothing
        self._receive_splits: list[int] = nothing if sends else numels
        self.numel = sum(numels)
        staging.reserve("send", dtype, self.numel if sends else 0)
        staging.reserve("receive", dtype, 0 if sends else self.numel)
        self._work: dist.Work | None = None
        self._slot = 0
        self._staged: dict[int, list[Tensor]] = {}

    @property
    def sent_nbytes(self) -> int:
        return self.numel * self._dtype.itemsize if self._sends else 0

    def start(self, slot: int) -> None:
        """Copies this rank's pieces in and starts the collective, without waiting for it."""
        assert self._work is None, f"exchange '{self.name}' is already under way"
        began = time.perf_counter()
        self._slot = slot
        if self._sends and self._views:
            torch._foreach_copy_(self._staged_views(slot), self._views)
        self._work = dist.all_to_all_single(
            self._buffer("receive", slot),
            self._buffer("send", slot),
            self._receive_splits,
            self._send_splits,
            group=self._group,
            async_op=True,
        )
        self._counters.exchanges += 1
        self._counters.bytes_sent += self.sent_nbytes
        self._counters.blocked_s += time.perf_counter() - began

    def finish(self) -> None:
        """Waits (on the current stream where the backend has streams) and copies pieces out."""
        assert self._work is not None, f"exchange '{self.name}' was not started"
        began = time.perf_counter()
        try:
            self._work.wait()
        except RuntimeError as error:
            peers = dist.get_process_group_ranks(self._group)
            raise NTPError(
                f"global rank {dist.get_rank()}: exchange '{self.name}' with global ranks {peers} "
                f"did not complete ({error}). A rank of this replica died or hangs: look for the "
                "first error in the logs of those ranks"
            ) from error
        self._work = None
        if not self._sends and self._views:
            torch._foreach_copy_(self._views, self._staged_views(self._slot))
        self._counters.blocked_s += time.perf_counter() - began

    def _buffer(self, name: str, slot: int) -> Tensor:
        numel = self.numel if (name == "send") == self._sends else 0
        return self._staging.buffer(name, self._dtype, slot, numel)

    def _staged_views(self, slot: int) -> list[Tensor]:
        if slot not in self._staged:
            flat = self._buffer("send" if self._sends else "receive", slot)
            parts = flat.split([view.numel() for view in self._views])
            self._staged[slot] = [
                part.view(view.shape) for part, view in zip(parts, self._views, strict=True)
            ]
        return self._staged[slot]
