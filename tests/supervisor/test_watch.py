"""Who is behind a failure, what supervisors tell each other, and whom node 0 waits for."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from supervised import wait_for

from megatron_ntp.supervisor.attempt import Failure
from megatron_ntp.supervisor.board import StoreBoard
from megatron_ntp.supervisor.controller import Controller
from megatron_ntp.supervisor.watch import culprit
from megatron_ntp.supervisor.worker import own_address

STUCK_S = 2.0


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(0, 1), (3, -9), (2, 1)], 3),
        ([(0, 1), (3, -9), (2, 93)], 2),
        ([(5, -15), (0, 1)], 5),
        ([(0, 1), (5, -signal.SIGSEGV)], 5),
        ([(4, 7)], 4),
    ],
)
def test_ranks_that_lost_a_peer_are_not_behind_it(
    failures: list[tuple[int, int]], rank: int
) -> None:
    assert culprit([Failure(*failure) for failure in failures]).rank == rank


def test_failures_are_told_in_words() -> None:
    assert str(Failure(3, -9)) == "rank 3 was ended by SIGKILL"
    assert str(Failure(3, 2)) == "rank 3 ended with status 2"


@pytest.fixture
def endpoint() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


@pytest.fixture
def boards() -> Iterator[list[StoreBoard]]:
    found: list[StoreBoard] = []
    yield found
    for board in reversed(found):
        board.close()


def test_status_and_orders_travel_and_silence_is_noticed(
    endpoint: tuple[str, int], boards: list[StoreBoard]
) -> None:
    boards.append(StoreBoard(endpoint, 1, 2, STUCK_S))  # a node may be there before node 0
    wait_for("a reason", lambda: "refused" in boards[0].problem())
    boards.append(StoreBoard(endpoint, 0, 2, STUCK_S))
    other, first = boards
    first.say({"n": 0})
    other.say({"n": 1})
    first.give({"kind": "check"})
    wait_for("the order", lambda: other.order() == {"kind": "check"})
    wait_for("both", lambda: {r: s.status["n"] for r, s in first.seen().items()} == {0: 0, 1: 1})
    order = other.order()
    time.sleep(1.0)
    assert first.seen()[1].age_s < 1.0 and other.silence_s() < 1.0 and not other.problem()
    assert other.order() is order, "an order travels once: it is large in a large job"
    first.give({"kind": "stop"})
    wait_for("the next order", lambda: other.order() == {"kind": "stop"})
    other.close()
    wait_for("silence", lambda: first.seen()[1].age_s > 1.0, 10)
    assert first.seen()[1].status == {"n": 1} and first.seen()[0].age_s == 0


def test_a_supervisor_that_is_stuck_falls_silent(
    endpoint: tuple[str, int], boards: list[StoreBoard]
) -> None:
    """Its thread goes on, but must not speak for it: what it says of ranks is old."""
    boards.append(StoreBoard(endpoint, 0, 2, 0.5))
    boards.append(StoreBoard(endpoint, 1, 2, 0.5))
    first, other = boards
    other.say({"n": 1})
    wait_for("its word", lambda: first.seen().get(1))
    wait_for("silence", lambda: first.seen()[1].age_s > 1.0, 10)
    assert other.silence_s() < 1.0
    other.say({"n": 1})
    wait_for("its word again", lambda: first.seen()[1].age_s < 0.5, 10)


@pytest.mark.parametrize("name", ["127.0.1.1", "localhost", "127.0.0.1"])
def test_where_a_name_is_loopback_others_take_the_name(name: str) -> None:
    """On node 0, if /etc/hosts has its name as 127.0.1.1: no other node may be sent there."""
    assert own_address((name, 29400)) == name


def test_an_endpoint_that_is_taken(endpoint: tuple[str, int], boards: list[StoreBoard]) -> None:
    with socket.socket() as other:
        other.bind(endpoint)
        other.listen()
        with pytest.raises(OSError, match="cannot listen at --rdzv-endpoint"):
            boards.append(StoreBoard(endpoint, 0, 2, STUCK_S))


class NodesOf:
    """A desk of four nodes, of which some are gone, and back after so many looks."""

    def __init__(self, gone: set[int], back_after: int) -> None:
        self.options = SimpleNamespace(node_deadline_s=7.0)
        self.instances = dict.fromkeys(range(4), "")
        self._gone, self._back_after = gone, back_after
        self.waited_s: list[float] = []
        self.said = ""

    def alive(self) -> dict[int, Any]:
        return {rank: None for rank in range(4) if rank not in self._gone}

    def signal(self) -> int:
        return 0

    def say(self, text: str) -> None:
        self.said += text

    def until(self, done: Callable[[], Any], deadline_s: float) -> bool:
        self.waited_s.append(deadline_s)
        for _ in range(self._back_after):
            if done():
                return True
        self._gone = set()
        return bool(done())


@pytest.mark.parametrize(("gone", "waits"), [(set(), []), ({2}, []), ({1, 2}, [7.0])])
def test_nodes_lost_at_once_get_a_second_chance(gone: set[int], waits: list[float]) -> None:
    """A switch that was gone for a minute must not leave a job on one node."""
    desk = NodesOf(gone, 3)
    controller = Controller(cast(Any, desk), cast(Any, None), cast(Any, None))
    controller._await_network()
    assert desk.waited_s == waits and ("several nodes" in desk.said) == bool(waits)
    assert not waits or len(desk.alive()) == 4
