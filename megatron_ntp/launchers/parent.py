"""Processes that do not outlive the one that started them, on Linux."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it, in `parent_pid`, has ended.

    It stays so through exec; children of this process have to ask for themselves.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel knew
        os._exit(1)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, not of init."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
