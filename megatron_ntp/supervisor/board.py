"""What supervisors tell each other: every node its status, node 0 its order for all.

Both are whole states, written again and again, never messages that could get lost: a supervisor
that was away sees the newest of each. With several nodes they lie in a TCPStore that node 0 holds
at the rendezvous endpoint. A thread keeps the copies fresh, so that neither a dead node nor a dead
network ever blocks a supervisor; what it has is as old as `silence_s` and `Seen.age_s` say.

[Stuck] The thread does not speak for a supervisor that is stuck, say in a file system that is gone:
a status that was not said anew for long enough grows old.

[Order mark] An order of a large job is large. Nodes fetch it when a short mark beside it changes.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

PERIOD_S = 0.1
_CALL_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Seen:
    """A node's status, and how long ago node 0 saw it change last; it changes all the time."""

    status: Mapping[str, Any]
    age_s: float


class Board(Protocol):
    """See above. `give` and `seen` are for node 0."""

    def say(self, status: Mapping[str, Any]) -> None: ...
    def order(self) -> Mapping[str, Any] | None: ...
    def give(self, order: Mapping[str, Any]) -> None: ...
    def seen(self) -> dict[int, Seen]: ...
    def silence_s(self) -> float: ...
    def problem(self) -> str: ...
    def close(self) -> None: ...


class LocalBoard:
    """For a job of one node."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None
        self._order: Mapping[str, Any] | None = None

    def say(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def order(self) -> Mapping[str, Any] | None:
        return self._order

    def give(self, order: Mapping[str, Any]) -> None:
        self._order = order

    def seen(self) -> dict[int, Seen]:
        return {} if self._status is None else {0: Seen(self._status, 0.0)}

    def silence_s(self) -> float:
        return 0.0

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        pass


class StoreBoard:
    """For several nodes.

    Args:
        endpoint: host and port where node 0 listens.
        node_rank: of this node.
        num_nodes: of the job.
        stuck_s: see [Stuck].

    Raises:
        OSError: node 0 cannot listen at the endpoint.
    """

    def __init__(
        self, endpoint: tuple[str, int], node_rank: int, num_nodes: int, stuck_s: float
    ) -> None:
        self._stuck_s = stuck_s
        self._endpoint, self._rank, self._num_nodes = endpoint, node_rank, num_nodes
        self._server = self._listen() if node_rank == 0 else None
        self._client: Any = None
        self._lock = threading.Lock()
        self._status: Mapping[str, Any] | None = None
        self._said_at = time.monotonic()
        self._own_order: Mapping[str, Any] | None = None
        self._order: Mapping[str, Any] | None = None
        self._order_mark = b""
        self._problem = ""
        self._statuses: dict[int, tuple[Mapping[str, Any], float]] = {}
        self._texts: dict[int, bytes] = {}
        self._sequence = 0
        self._heard_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="board", daemon=True)
        self._thread.start()

    def _listen(self) -> Any:
        import torch.distributed as dist

        host, port = self._endpoint
        try:
            return dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CALL_TIMEOUT_S),
            )
        except (dist.DistError, RuntimeError) as error:
            raise OSError(
                f"node 0 cannot listen at --rdzv-endpoint {host}:{port}: {error}"
            ) from error

    # ---- for supervisors ----

    def say(self, status: Mapping[str, Any]) -> None:
        with self._lock:
            self._status, self._said_at = status, time.monotonic()

    def order(self) -> Mapping[str, Any] | None:
        with self._lock:
            return self._own_order if self._rank == 0 else self._order

    def give(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            self._own_order = order

    def seen(self) -> dict[int, Seen]:
        now = time.monotonic()
        with self._lock:
            found = {rank: Seen(s, now - at) for rank, (s, at) in self._statuses.items()}
            if self._status is not None:
                found[self._rank] = Seen(self._status, 0.0)
        return found

    def silence_s(self) -> float:
        """How long ago the store answered."""
        with self._lock:
            return time.monotonic() - self._heard_at

    def problem(self) -> str:
        """Why the store did not answer the last time, empty if it did."""
        with self._lock:
            return self._problem

    def close(self) -> None:
        """Ends the thread; node 0's store goes with it."""
        self._closing.set()
        self._thread.join(_CONNECT_TIMEOUT_S)

    # ---- the thread ----

    def _keep_fresh(self) -> None:
        while not self._closing.is_set():
            try:
                if self._client is None:
                    self._client = self._connect()
                self._exchange(self._client)
                with self._lock:
                    self._heard_at, self._problem = time.monotonic(), ""
            except Exception as error:  # of the network, in several classes; silence_s tells
                self._client = None
                with self._lock:
                    self._problem = str(error).partition("\n")[0]
            self._closing.wait(PERIOD_S)

    def _connect(self) -> Any:
        import torch.distributed as dist

        if self._server is not None:
            return self._server
        host, port = self._endpoint
        socket.create_connection((host, port), _PROBE_TIMEOUT_S).close()  # the store would be loud
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
        )

    def _exchange(self, store: Any) -> None:
        with self._lock:
            status, order = self._status, self._own_order
            if time.monotonic() - self._said_at < self._stuck_s:
                self._sequence += 1
        if status is not None:
            store.set(f"node/{self._rank}", json.dumps([self._sequence, status]))
        if self._rank == 0:
            self._write_order(store, order)
            self._read_statuses(store)
        elif store.check(["order-mark"]):
            self._read_order(store)

    def _write_order(self, store: Any, order: Mapping[str, Any] | None) -> None:
        """See [Order mark]: it comes last, so that it never stands for an older order."""
        if order is None or order is self._order:
            return
        text = json.dumps(order)
        store.set("order", text)
        store.set("order-mark", hashlib.sha256(text.encode()).hexdigest())
        self._order = order

    def _read_order(self, store: Any) -> None:
        mark = store.get("order-mark")
        if mark == self._order_mark:
            return
        found = json.loads(store.get("order"))
        self._order_mark = mark
        with self._lock:
            self._order = found

    def _read_statuses(self, store: Any) -> None:
        for rank in range(1, self._num_nodes):
            if not store.check([f"node/{rank}"]):
                continue
            text = store.get(f"node/{rank}")
            if text != self._texts.get(rank):
                self._texts[rank] = text
                with self._lock:
                    self._statuses[rank] = json.loads(text)[1], time.monotonic()
