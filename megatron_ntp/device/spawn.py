"""Start one of this package's own modules as a process, with one socket as its standard input.

A fresh interpreter and no fork: the caller may be a training process with CUDA and threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import megatron_ntp

PACKAGE_ROOT = Path(megatron_ntp.__file__).resolve().parent.parent


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Message boundaries are kept: a message comes whole or not at all."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def run_bounded(
    command: Sequence[str] | str, timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Runs a site's command, a text in a shell, and keeps its standard output.

    `subprocess.run` waits for what it has killed. A program that asks a dead GPU may hang in the
    kernel, where no signal reaches it, so here nobody waits.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def module_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command line that runs a module of this package with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start(command: Sequence[str], stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own.

    Signals sent to the caller's process group, as torchrun and shells do, do not reach it.
    """
    env = dict(os.environ)
    paths = [str(PACKAGE_ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.Popen(
        command,
        stdin=stdin.fileno(),
        stdout=subprocess.DEVNULL,
        env=env,
        cwd="/",
        start_new_session=True,
    )
