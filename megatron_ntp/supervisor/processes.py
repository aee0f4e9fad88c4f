"""Ends what an attempt has started: every process, also those that lost their parent.

[Owner] All processes of a supervisor inherit a variable that names job, node and supervisor, and
says whether they belong to its attempt or help the supervisor itself. So they are found whoever
their parent is by now, also by the supervisor's warden and by its successor. A process of an
attempt that has dropped its variables is found as a descendant: a supervisor adopts orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

OWNER_ENV = "MEGATRON_NTP_OWNER"
RANKS, HELPERS = "ranks", "helpers"
_POLL_S = 0.02
_SEEN_TWICE_S = 0.2
_GONE = frozenset("ZX")


@dataclass(frozen=True)
class _Stat:
    """A line of /proc/PID/stat, as far as it matters here."""

    state: str
    parent: int


def stat(pid: int) -> _Stat | None:
    """None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(words[0], int(words[1])) if len(words) > 1 else None


def _pids() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())


@dataclass(frozen=True)
class Owner:
    """See [Owner]. `job` and `node` name a place in a job, `supervisor` the process in charge."""

    job: str
    node: int
    supervisor: str

    @property
    def place(self) -> str:
        """What all supervisors of this place have in common."""
        return f"{self.job}/{self.node}/"

    @property
    def prefix(self) -> str:
        """What all processes of this supervisor have in common."""
        return f"{self.place}{self.supervisor}/"

    @property
    def ranks(self) -> str:
        return self.prefix + RANKS

    @property
    def helpers(self) -> str:
        return self.prefix + HELPERS


def _owner(pid: int) -> str | None:
    prefix = f"{OWNER_ENV}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    found = [entry for entry in entries if entry.startswith(prefix)]
    return found[0][len(prefix) :].decode(errors="replace") if found else None


def owned(is_ours: Callable[[str], bool]) -> set[int]:
    """Living processes whose [Owner] is one of ours."""
    found = set()
    for pid in _pids():
        owner = _owner(pid)
        if owner is not None and is_ours(owner):
            state = stat(pid)
            if state is not None and state.state not in _GONE:
                found.add(pid)
    return found


def of_attempt(owner: Owner) -> set[int]:
    """Living processes of this supervisor's attempt: marked ones, and descendants but helpers."""
    children: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for pid in _pids():
        found = stat(pid)
        if found is not None:
            children.setdefault(found.parent, []).append(pid)
            states[pid] = found.state
    below: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in below and _owner(child) != owner.helpers:
                below.add(child)
                queue.append(child)
    living = {pid for pid in below if states[pid] not in _GONE}
    return living | owned(owner.ranks.__eq__)


def kill_all(find: Callable[[], set[int]], give_up_s: float) -> set[int]:
    """SIGKILL until nothing is found any more. Returns what would not go, stuck in the kernel."""
    give_up_at = time.monotonic() + give_up_s
    while True:
        left = find() - {os.getpid()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > give_up_at:
            return left
        time.sleep(_POLL_S)


def reap_adopted(started: Collection[int]) -> None:
    """Takes the status of adopted children that have ended.

    `started` are this process's own children, whose status somebody still asks for. Any other own
    child is waited for by a thread at once, so it is not seen twice.
    """
    ended = _ended_children() - set(started)
    if ended:
        time.sleep(_SEEN_TWICE_S)
    for pid in ended & _ended_children():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _ended_children() -> set[int]:
    found = {pid: stat(pid) for pid in _pids()}
    me = os.getpid()
    return {pid for pid, s in found.items() if s and s.state == "Z" and s.parent == me}
