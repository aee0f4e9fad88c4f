"""Node 0's desk: what it knows of the nodes, and how it waits. For the loop and for its watch."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_ntp.errors import CheckpointError
from megatron_ntp.events import EventLog
from megatron_ntp.launchers.nodes import Node, distrust_numbers, silent_node
from megatron_ntp.supervisor.board import Board, Seen
from megatron_ntp.supervisor.options import Options
from megatron_ntp.supervisor.training import Training
from megatron_ntp.supervisor.worker import Worker

POLL_S = 0.1


class Desk:
    """Every wait goes through `until`, which keeps the own node's worker going.

    Attributes:
        nodes: reports that the last decision was made from, in order of node rank.
        instances: the supervisors that gave them, by node rank.
        detected_at: when the last fault was seen, of CLOCK_MONOTONIC; None before the first.
    """

    def __init__(
        self,
        options: Options,
        training: Training,
        board: Board,
        worker: Worker,
        log: EventLog,
        keep_alive: Callable[[], None],
    ) -> None:
        self.options, self.training, self._log = options, training, log
        self._board, self._worker, self._keep_alive = board, worker, keep_alive
        self._session = f"{time.time():.6f}"
        self._host_names: dict[int, str] = {}
        self.nodes: tuple[Node, ...] = ()
        self.instances: dict[int, str] = {}
        self.detected_at: float | None = None

    def give(self, kind: str, **fields: Any) -> None:
        """The order for all nodes, see `worker`."""
        self._board.give({"session": self._session, "kind": kind, **fields})

    def note(self, event: str, **fields: Any) -> None:
        """Into the log of events."""
        self._log.note(event, **fields)

    def until(self, done: Callable[[], Any], deadline_s: float) -> bool:
        """Keeps the own worker going until `done`; False after the deadline."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            self._worker.tick(time.monotonic())
            self._keep_alive()
            if done():
                return True
            if time.monotonic() >= give_up_at:
                return False
            time.sleep(POLL_S)

    def seen(self) -> dict[int, Seen]:
        """The last word of every node that has given one, however long ago."""
        return self._board.seen()

    def alive(self) -> dict[int, Seen]:
        """Nodes that are not lost."""
        deadline_s = self.options.node_deadline_s
        return {rank: seen for rank, seen in self.seen().items() if seen.age_s <= deadline_s}

    def is_of_session(self, seen: Seen) -> bool:
        """Whether a node has heard of this node 0 already."""
        return bool(seen.status["session"] == self._session)

    def reports(self, seen: Mapping[int, Seen]) -> tuple[Node, ...]:
        """In order of node rank, each under a name of its own; nodes not in `seen` are dead."""
        nodes = []
        for rank in range(self.options.num_nodes):
            if rank in seen:
                node = Node.from_json(seen[rank].status["report"])
                self._host_names[rank] = node.host
            else:
                host = self._host_names.get(rank, f"node{rank}")
                node = silent_node(host, self.training.shape.gpus_per_node)
            nodes.append(node)
        hosts = [node.host for node in nodes]
        return distrust_numbers(
            [
                replace(node, host=f"{node.host}#{rank}") if hosts.count(node.host) > 1 else node
                for rank, node in enumerate(nodes)
            ]
        )

    def signal(self) -> int:
        """A signal that some supervisor of the job got, 0 for none."""
        return next((s.status["signal"] for s in self.alive().values() if s.status["signal"]), 0)

    def status_of_signal(self) -> int:
        """Exit status where a signal came while no rank was running."""
        number = self.signal()
        return 0 if number == signal.SIGUSR1 else 128 + number

    def newest_checkpoint(self) -> int:
        """What cannot be read counts as none: the guards see to it that this does not go on."""
        try:
            return self.training.newest_checkpoint()
        except CheckpointError as error:
            self.say(f"checkpoints: {error}")
            return -1

    @staticmethod
    def say(text: str) -> None:
        """To whoever reads the supervisor's output."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def rounded(seconds: float | None) -> float | None:
    """For the log of events."""
    return None if seconds is None else round(seconds, 3)
