"""Outlives a supervisor that was killed, just long enough to end its attempt.

    python -m megatron_ntp.supervisor.warden PREFIX        standard input: a socket

The end of the socket says that the supervisor is gone, however it went. Then every process whose
owner begins like this is killed: agents and ranks have died with their parents by then, what ranks
have started has not. See processes [Owner].
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from megatron_ntp.supervisor.processes import kill_all, owned

GIVE_UP_S = 60.0


def main(argv: list[str]) -> int:
    """Waits, kills, ends."""
    (prefix,) = argv
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=os.dup(0))
    while connection.recv(1):
        pass
    return 1 if kill_all(lambda: owned(lambda owner: owner.startswith(prefix)), GIVE_UP_S) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
