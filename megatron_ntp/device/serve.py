"""The node's power helper: accepts connections of jobs and starts a keeper for each.

The helper runs as root and is a security boundary. It reads nothing from a client: it asks the
kernel who is there, admits users that have a grant, so many connections at a time and a minute, and
hands the connection to a keeper process that serves this client alone. So what a client sends, and
a GPU of its that hangs, is no other client's concern.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ntp.device import spawn
from megatron_ntp.device.client import KEEPER_MODULE
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder
from megatron_ntp.device.grants import Peer, read_grants

log = logging.getLogger("megatron_ntp.power.serve")

DEFAULT_SOCKET = Path("/run/megatron-ntp/power.sock")
MAX_CLIENTS, MAX_CLIENTS_PER_USER = 64, 8
MAX_STARTS_PER_USER, STARTS_WINDOW_S = 20, 60.0
STOP_TIMEOUT_S = 60.0
LISTEN_BACKLOG = 64


@dataclass
class Admission:
    """Who may start a keeper now. Floods of one user do not keep out another."""

    keepers: list[tuple[int, subprocess.Popen[bytes]]] = field(default_factory=list)
    starts: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def reap(self) -> None:
        self.keepers = [(uid, keeper) for uid, keeper in self.keepers if keeper.poll() is None]

    def refusal(self, uid: int, granted_uids: set[int]) -> str | None:
        """Why this user gets no keeper; None if it does."""
        if uid not in granted_uids:
            return f"uid {uid} has no GPUs on this node (no grant)"
        self.reap()
        if sum(1 for owner, _ in self.keepers if owner == uid) >= MAX_CLIENTS_PER_USER:
            return f"uid {uid} has {MAX_CLIENTS_PER_USER} connections already"
        if len(self.keepers) >= MAX_CLIENTS:
            return f"{MAX_CLIENTS} connections are open"
        recent = self.starts[uid]
        while recent and recent[0] < time.monotonic() - STARTS_WINDOW_S:
            recent.popleft()
        if len(recent) >= MAX_STARTS_PER_USER:
            return f"uid {uid} connected {len(recent)} times within {STARTS_WINDOW_S:g} s"
        recent.append(time.monotonic())
        return None


class Helper:
    """The listening process."""

    def __init__(self, path: Path, grants: Folder, keeper_arguments: Sequence[str]) -> None:
        self._grants = grants
        self._command = spawn.module_command(KEEPER_MODULE, keeper_arguments)
        self._path = path
        self._admission = Admission()
        self._listener = listen(path)

    def run(self) -> None:
        """Until SIGTERM or SIGINT; then ends its keepers, each of which restores."""
        stop_fd = _stop_signals()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(stop_fd, select.POLLIN)
        log.info("power helper listens at %s", self._path)
        while True:
            ready = {fd for fd, _ in poll.poll(1000)}
            self._admission.reap()
            if stop_fd in ready:
                break
            if self._listener.fileno() in ready:
                self._accept()
        self._stop()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            log.warning("accept: %s", error)
            time.sleep(0.1)  # out of descriptors, for instance
            return
        with connection:
            peer = Peer.of(connection)
            granted = {grant.uid for grant in read_grants(self._grants)}
            refusal = self._admission.refusal(peer.uid, granted)
            if refusal is not None:
                _refuse(connection, refusal)
                return
            keeper = spawn.start(self._command, connection)
            self._admission.keepers.append((peer.uid, keeper))
            log.info("keeper %d for uid %d, pid %d", keeper.pid, peer.uid, peer.pid)

    def _stop(self) -> None:
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        for _, keeper in self._admission.keepers:
            keeper.terminate()
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for _, keeper in self._admission.keepers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(max(0.0, give_up_at - time.monotonic()))


def _refuse(connection: socket.socket, reason: str) -> None:
    log.warning("refused: %s", reason)
    answer = {"id": None, "fault": Fault.REFUSED, "what": reason, "uuid": None}
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(json.dumps(answer).encode())


def listen(path: Path) -> socket.socket:
    """A socket that everybody may connect to, in a folder that only we can write."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with Folder(path.parent, private=True):
        if path.exists() or path.is_symlink():
            _remove_dead_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        os.chmod(path, 0o666)
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    return listener


def _remove_dead_socket(path: Path) -> None:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise DeviceError(Fault.REFUSED, f"{path} exists and is no socket; remove it by hand")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise DeviceError(Fault.BUSY, f"another power helper listens at {path}")


def _stop_signals() -> int:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read_fd
