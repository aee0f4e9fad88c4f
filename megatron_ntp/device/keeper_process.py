"""A keeper as a process: one client on one socket, and limits given back whatever ends it.

The socket is standard input, whoever started the process: the client itself (with its own rights),
the client through sudo, or the node's helper that accepted the client's connection. The client is
gone when its end closes or its process exits, which a socket that leaked into a child of it would
hide. Then, and on SIGTERM, SIGINT and SIGHUP, everything is restored. This is the only way out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ntp.device import protocol
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Access, GrantedRights, OwnRights, Peer
from megatron_ntp.device.keeper import CLAIM_TIMEOUT_S, Keeper
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.device.settings import DEFAULT_DEADLINE_S
from megatron_ntp.device.site import SitePower, load_site
from megatron_ntp.device.state import (
    BOOT_ID_FILE,
    DRIVER_FOLDER,
    HostIdentity,
    LimitStore,
    default_folder,
)

CHECK_RIGHTS_EVERY_S = 1.0
SEND_TIMEOUT_S = 2.0
MAX_BAD_MESSAGES = 8
MESSAGES_PER_S, BURST = 20.0, 40.0


class _Pace:
    """Lets a client send so many messages a second and no more: the others wait in its socket."""

    def __init__(self) -> None:
        self._tokens, self._filled_at = BURST, time.monotonic()

    def delay_s(self) -> float:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled_at) * MESSAGES_PER_S)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / MESSAGES_PER_S)


class ClientLoop:
    """Answers one client until there is a reason to stop, and returns the reason."""

    def __init__(self, connection: socket.socket, keeper: Keeper, peer_fd: int | None) -> None:
        self._connection, self._keeper = connection, keeper
        self._pace = _Pace()
        self._bad_messages = 0
        self._signal_fd = _signals_as_fd()
        self._poll = select.poll()
        for fd in (connection.fileno(), self._signal_fd, peer_fd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        self._peer_fd = peer_fd

    def run(self) -> str:
        next_check = time.monotonic() + CHECK_RIGHTS_EVERY_S
        while True:
            ready = {fd for fd, _ in self._poll.poll(CHECK_RIGHTS_EVERY_S * 1000)}
            if self._signal_fd in ready:
                number = os.read(self._signal_fd, 1)[0]
                return f"{signal.Signals(number).name} received"
            if self._connection.fileno() in ready:
                reason = self._answer_one()
                if reason:
                    return reason
            elif self._peer_fd in ready:
                return "the client's process ended"
            if time.monotonic() >= next_check:
                try:
                    self._keeper.check_rights()
                except DeviceError as error:
                    return str(error)
                next_check = time.monotonic() + CHECK_RIGHTS_EVERY_S

    def _answer_one(self) -> str | None:
        self._connection.settimeout(SEND_TIMEOUT_S)
        try:
            data = self._connection.recv(protocol.MAX_MESSAGE_BYTES + 1)
            if not data:
                return "the client closed the connection"
            time.sleep(self._pace.delay_s())
            reply, is_last = self._reply(data)
            self._connection.send(json.dumps(reply).encode())
        except TimeoutError:
            return "the client does not read its answers"
        except OSError as error:
            return f"the connection broke: {error}"
        if self._bad_messages >= MAX_BAD_MESSAGES:
            return "too many bad messages"
        return "the client asked to close" if is_last else None

    def _reply(self, data: bytes) -> tuple[dict[str, Any], bool]:
        number: Any = None
        try:
            if len(data) > protocol.MAX_MESSAGE_BYTES:
                raise protocol.bad_message(f"more than {protocol.MAX_MESSAGE_BYTES} bytes")
            message = protocol.parse(data)
            number = message.get("id") if type(message.get("id")) is int else None
            return {"id": number, "ok": self._do(message)}, message.get("op") == "close"
        except DeviceError as error:
            if error.what.startswith("bad message"):
                self._bad_messages += 1
            return {
                "id": number,
                "fault": error.fault,
                "what": error.what,
                "uuid": error.uuid,
            }, False

    def _do(self, message: dict[str, Any]) -> Any:
        operation = message.get("op")
        if operation == "open":
            return asdict(self._keeper.open(protocol.OpenRequest.from_json(message)))
        if operation == "set":
            results = self._keeper.set_limits(protocol.parse_limits(message))
            return {uuid: asdict(result) for uuid, result in results.items()}
        if operation == "read":
            readings = self._keeper.readings()
            return {uuid: asdict(entry) if entry else None for uuid, entry in readings.items()}
        if operation == "close":
            return [asdict(settled) for settled in self._keeper.restore()]
        raise protocol.bad_message("op must be open, set, read or close")


def _signals_as_fd() -> int:
    """Signals that are to end us, as bytes in a pipe. They interrupt no call in progress."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return read_fd


def _open_peer(peer: Peer) -> int | None:
    """A descriptor that becomes readable when the peer's process exits.

    None: it is out of sight, as in another PID namespace; the end of the connection has to do.
    """
    try:
        return os.pidfd_open(peer.pid) if peer.pid > 0 else None
    except OSError:
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a keeper needs, for whoever starts one."""
    parser.add_argument("--site", type=Path, help="site file with budgets (YAML)")
    parser.add_argument(
        "--state-dir", type=Path, default=None, help="where found limits are kept; one per node"
    )
    parser.add_argument(
        "--deadline", type=float, default=DEFAULT_DEADLINE_S, help="seconds an NVML call may take"
    )
    parser.add_argument(
        "--boot-id-file", type=Path, default=BOOT_ID_FILE, help="names this boot of the node"
    )
    parser.add_argument(
        "--driver-dir", type=Path, default=DRIVER_FOLDER, help="its inode names this driver load"
    )
    parser.add_argument(
        "--claim-timeout",
        type=float,
        default=None,
        help="seconds to wait for GPUs that the keeper of an earlier job still has",
    )


def open_store(arguments: argparse.Namespace) -> LimitStore:
    """The node's records, as the arguments say."""
    folder = Folder(arguments.state_dir or default_folder(), private=True)
    return LimitStore(
        folder, lambda: HostIdentity.read(arguments.boot_id_file, arguments.driver_dir)
    )


def check_helper_site(site: SitePower) -> None:
    """A helper without bounds of its own would hand out the board's maximum."""
    if site.gpu.max_w is None or site.domain.num_gpus is None:
        raise ValueError(
            "a power helper needs bounds: state gpu.max_w and domain.num_gpus in its site file"
        )


def serve_connection(
    connection: socket.socket, arguments: argparse.Namespace, grants: Path | None
) -> str:
    """Serves the client on a connection to the end; returns why it ended."""
    peer = Peer.of(connection)
    site = load_site(arguments.site, must_be_roots=bool(grants)) if arguments.site else SitePower()
    access: Access = OwnRights()
    if grants is not None:
        check_helper_site(site)
        access = GrantedRights(Folder(grants, private=True), peer)
    layer = NvmlProcess(arguments.deadline)
    claim_timeout_s = arguments.claim_timeout
    if claim_timeout_s is None:
        claim_timeout_s = CLAIM_TIMEOUT_S
    keeper = Keeper(layer, open_store(arguments), site, access, claim_timeout_s)
    peer_fd = _open_peer(peer)
    loop = ClientLoop(connection, keeper, peer_fd)
    reason = "an error of the keeper's own"
    try:
        reason = loop.run()
        return reason
    finally:
        keeper.restore()
        layer.close()
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(json.dumps({"id": None, "closing": reason}).encode())


def main(argv: Sequence[str] | None = None) -> int:
    """The process. A start that fails is told to the client as its last words."""
    parser = argparse.ArgumentParser(description="keeper of power limits (internal)")
    add_arguments(parser)
    parser.add_argument("--grants", type=Path, help="act for others: folder with root's grants")
    arguments = parser.parse_args(argv)
    connection = socket.socket(fileno=os.dup(0))
    try:
        serve_connection(connection, arguments, arguments.grants)
    except (DeviceError, ValueError) as error:
        fault = error.fault if isinstance(error, DeviceError) else Fault.REFUSED
        what = error.what if isinstance(error, DeviceError) else str(error)
        with contextlib.suppress(OSError):
            connection.send(
                json.dumps({"id": None, "fault": fault, "what": what, "uuid": None}).encode()
            )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
