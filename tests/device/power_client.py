"""A client of the power helper that says what it is told, true or not. Needs no package.

    python power_client.py SOCKET UID ACTIONS-AS-JSON

Actions: {"send": OBJECT}, {"raw": TEXT}, {"bytes": true}, {"flood": SECONDS}, {"mute_flood": N},
{"connect": N more connections}, {"wait": SECONDS}, {"hear": true}. Prints what comes back, one JSON
object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any

READ = b'{"id": 7, "op": "read"}'


def connect(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(120)
    found.connect(path)
    return found


def hear(connection: socket.socket) -> None:
    try:
        data = connection.recv(1 << 17)
    except OSError as error:
        data = json.dumps({"broken": str(error)}).encode()
    print(data.decode() or '{"closed": true}', flush=True)


def flood(connection: socket.socket, seconds: float) -> None:
    """As fast as possible, reading nothing; then everything that was answered."""
    connection.setblocking(False)
    sent, heard, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            connection.send(READ)
            sent += 1
        with contextlib.suppress(BlockingIOError):
            heard += bool(connection.recv(1 << 17))
    print(json.dumps({"sent": sent, "heard": heard}), flush=True)


def mute_flood(connection: socket.socket, count: int) -> None:
    """Many messages, and the answers are never read."""
    try:
        for _ in range(count):
            connection.send(READ)
    except OSError as error:
        print(json.dumps({"broken": str(error)}), flush=True)


def act(path: str, connection: socket.socket, action: dict[str, Any]) -> None:
    ((name, value),) = action.items()
    if name == "connect":
        others = [connect(path) for _ in range(value)]
        for other in others:
            with contextlib.suppress(BrokenPipeError):  # refused, as it then says
                other.send(READ)
            hear(other)
    elif name == "wait":
        time.sleep(value)
    elif name == "flood":
        flood(connection, value)
    elif name == "mute_flood":
        mute_flood(connection, value)
    elif name == "hear":
        hear(connection)
    else:
        texts = {"send": json.dumps(value), "raw": value, "bytes": "x" * 70_000}
        connection.send(str(texts[name]).encode())
        hear(connection)


def main() -> None:
    path, uid, actions = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    connection = connect(path)
    for action in actions:
        act(path, connection, action)


if __name__ == "__main__":
    main()
