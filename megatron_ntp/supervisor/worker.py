"""Every node: carries out what node 0 orders, and says how things are.

Orders (dictionaries, `kind`): `check` - report the node's health in this `round`; `run` - start
this node's part of an attempt; `save` - ask its ranks to save and end; `stop` - end it; `end` - go,
with `status`. An order that has been carried out is a state that holds.

[Fencing] A node that has not heard of node 0 for the node deadline counts as lost there. So it
ends its ranks by itself, and waits for node 0 to come back. A new node 0 has a new session: what an
older one has started is ended.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ntp import events
from megatron_ntp.device.errors import DeviceError
from megatron_ntp.inject.firing import FAULTS_ENV
from megatron_ntp.launchers.check import CheckError
from megatron_ntp.launchers.nodes import Node, Placement
from megatron_ntp.supervisor.attempt import NodeAttempt
from megatron_ntp.supervisor.board import Board
from megatron_ntp.supervisor.health import NodeWatch
from megatron_ntp.supervisor.options import Options
from megatron_ntp.supervisor.processes import Owner


class Worker:
    """One node's supervisor. `tick` is called from the main thread, often, and does not wait."""

    def __init__(
        self, options: Options, board: Board, watch: NodeWatch, owner: Owner, host: str
    ) -> None:
        self._options, self._board, self._watch = options, board, watch
        self._owner, self._host = owner, host
        self._session: str | None = None
        self._background: _Background | None = None
        self._address = own_address(options.endpoint)
        self._round = -1
        self._report: Node | None = None
        self._port = 0
        self._attempt: NodeAttempt | None = None
        self._fault = ""
        self._left: set[int] = set()
        self._is_waiting = False  # while others run an attempt that may grow by this node
        self._next_look_s = 0.0
        self.signal = 0
        self.signal_count = 0
        self.end_status: int | None = None

    # ---- what it does ----

    def tick(self, now: float) -> None:
        """Carries out the order that holds, looks around, and says how things are."""
        order = self._board.order()
        if order is not None and order["session"] != self._session:
            self.end_attempt()
            self._session = order["session"]
            self._round, self._attempt = -1, None
        if order is not None:
            self._carry_out(order)
        self._look_around(now)
        self._board.say(self.status())

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        kind = order["kind"]
        is_part = (
            self._attempt is not None and not self._attempt.is_over and bool(self._attempt.devices)
        )
        self._is_waiting = self._options.regrow_at_checkpoint and kind == "run" and not is_part
        if kind == "check":
            self._check(order["round"])
        elif kind == "run":
            if not self._has(order["attempt"]):
                self.end_attempt()  # of an earlier one, whose end this node has missed
                if order["round"] == self._round:
                    self._start(order)
        elif kind == "save":
            if self._attempt is not None and self._has(order["attempt"]):
                self._attempt.ask_ranks_to_save()
        elif kind == "stop":
            self.end_attempt()
        elif kind == "end":
            self.end_attempt()
            self.end_status = order["status"]

    def _has(self, number: int) -> bool:
        return self._attempt is not None and self._attempt.number == number

    def _check(self, number: int) -> None:
        """In the background, since it may take minutes on a sick node."""
        if number == self._round or self._background is not None:
            return
        self.end_attempt()

        def take(report: Node) -> None:
            self._report, self._round, self._port = report, number, free_port()

        self._background = _Background(self._watch.report, take)

    def _start(self, order: Mapping[str, Any]) -> None:
        environ = {**os.environ, events.ENV: order["events"]}
        if self._options.faults is not None:
            environ[FAULTS_ENV] = str(self._options.faults.absolute())
        self._attempt = NodeAttempt(
            number=order["attempt"],
            placement=Placement.from_json(order["placement"]),
            host=order["hosts"][str(self._options.node_rank)],
            address=(order["address"][0], order["address"][1]),
            folder=Path(order["folder"]),
            command=order["command"],
            owner=self._owner,
            environ=environ,
            grace_s=self._options.stop_grace_s,
        )
        self._fault, self._left = "", set()
        self._next_look_s = 0.0
        try:
            self._attempt.start()
        except OSError as error:
            self._fault = (
                f"{self._host}: ranks cannot be started: {error}. The folder of --run-dir must be "
                "the same on all nodes"
            )

    def end_attempt(self) -> None:
        """Ends what runs, if anything does."""
        if self._attempt is not None and not self._attempt.is_over:
            self._left = self._attempt.end()

    def _look_around(self, now: float) -> None:
        """Finishes what ran in the background; while ranks run, looks at their GPUs."""
        if self._background is not None:
            if not self._background.is_done():
                return
            self._background = None
        is_running = self._attempt is not None and not self._attempt.is_over
        if now < self._next_look_s or not (is_running or self._is_waiting):
            return
        first = not self._next_look_s
        self._next_look_s = now + self._options.health_interval_s
        if first:
            return
        if self._options.regrow_at_checkpoint:
            self._background = _Background(self._look_at_all, self._take_all)
        else:
            self._background = _Background(self._look_at_own, self._take_faults)

    def _look_at_own(self) -> dict[str, str]:
        devices = () if self._attempt is None else self._attempt.devices
        try:
            return self._watch.bad_among(devices)
        except (CheckError, DeviceError, OSError) as error:  # the next check tells in full
            print(f"{self._host}: {error}", flush=True)
            return {}

    def _take_faults(self, bad: Mapping[str, str]) -> None:
        if bad and not self._fault:
            self._fault = "; ".join(
                f"{self._host}: {device}: {reason}" for device, reason in bad.items()
            )

    def _look_at_all(self) -> tuple[Node, dict[str, str]]:
        bad = self._look_at_own()
        return self._watch.report(), bad

    def _take_all(self, found: tuple[Node, dict[str, str]]) -> None:
        self._report = found[0]
        self._take_faults(found[1])

    # ---- what it says ----

    def status(self) -> dict[str, Any]:
        """For the board, see the fields."""
        found: dict[str, Any] = {
            "host": self._host,
            "instance": self._owner.supervisor,
            "session": self._session,
            "address": [self._address, self._port],
            "round": self._round,
            "report": None if self._report is None else self._report.to_json(),
            "signal": self.signal,
            "signal_count": self.signal_count,
            "ending": self.end_status is not None,
            "attempt": None,
        }
        if self._attempt is None:
            return found
        statuses = self._attempt.statuses()
        over = self._attempt.is_over or all(s is not None for s in statuses.values())
        found |= {
            "attempt": self._attempt.number,
            "is_over": over,
            "is_clean": self._attempt.is_over,
            "statuses": [status for status in statuses.values() if status],
            "failures": [asdict(failure) for failure in self._attempt.failures()],
            "fault": self._fault,
            "left": sorted(self._left),
            "tail": self._attempt.tail,
        }
        if not self._attempt.is_over:
            signs, longest_s, first = self._attempt.look()
            found["signs"] = [asdict(sign) for sign in signs.values()]
            found["longest_s"] = longest_s
            found["first_step"] = None if first is None else asdict(first)
        return found

    def is_cut_off(self) -> bool:
        """See [Fencing]. Ends the attempt if so."""
        if self._board.silence_s() <= self._options.node_deadline_s:
            return False
        self.end_attempt()
        return True

    def close(self) -> None:
        """Ends everything that this supervisor has started, but the warden."""
        self.end_attempt()
        if self._background is not None:
            self._background.wait(self._options.nvml_deadline_s)
        self._watch.close()


class _Background:
    """A call in a thread of its own; what it returns is handed over in the main thread."""

    def __init__(self, call: Callable[[], Any], take: Callable[[Any], None]) -> None:
        self._call, self._take = call, take
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised again where somebody sees it
            self._error = error

    def is_done(self) -> bool:
        """Hands the result over once there is one. Raises what the call raised."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        self._take(self._result)
        return True

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


def own_address(endpoint: tuple[str, int] | None) -> str:
    """This node's address as the others reach it: that of its way to the rendezvous endpoint.

    Node 0's own name may stand for the loopback address there, as some systems have it in
    /etc/hosts; the others reach it by the name that they were given.
    """
    if endpoint is None:
        return "127.0.0.1"
    try:
        family, kind, *_, target = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return endpoint[0] if ipaddress.ip_address(address).is_loopback else address


def free_port() -> int:
    """A port that is free now, for the agent of the first ranks if it comes to run here."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
