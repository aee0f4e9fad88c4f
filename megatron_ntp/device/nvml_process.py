"""NVML behind a deadline: every call is made by a process that can be given up.

A dead GPU can hang any NVML call on its node, inside the kernel, where no thread can be stopped.
So a small process makes the calls, one at a time, and answers over a socket. If one does not come
in time the process is killed and the next call starts another. The caller never waits for a killed
process to go away, since one that hangs in the kernel may not.

A killed process may still finish the write it was in. `writes_settled` says whether that is over,
and descriptors given to `hold` are open in every such process, so that a lock on one of them lasts
until no write can land any more (see state.Claim).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_ntp.device import spawn
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.nvml import (
    GpuIdentity,
    GpuReading,
    HealthFacts,
    Nvml,
    PowerLimits,
    PowerScope,
    XidEvent,
)
from megatron_ntp.device.settings import DEFAULT_DEADLINE_S

START_DEADLINE_S = 60.0  # a Python that starts on a loaded machine, not a driver
MAX_MESSAGE_BYTES = 1 << 16
_READY = b"ready"


class NvmlProcess:
    """The methods of nvml.Nvml, each with a deadline. For one thread at a time."""

    def __init__(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._held: list[int] = []
        self._given_up: list[subprocess.Popen[bytes]] = []  # killed inside a call
        self._ended: list[subprocess.Popen[bytes]] = []  # asked to go between calls

    # ---- who is there ----

    def count(self) -> int:
        return int(self._call("count"))

    def identity(self, index: int) -> GpuIdentity:
        found = self._call("identity", index)
        return GpuIdentity(**found | {"mig_uuids": tuple(found["mig_uuids"])})

    # ---- power and clocks ----

    def limits(self, uuid: str, scope: PowerScope = PowerScope.GPU) -> PowerLimits:
        return PowerLimits(**self._call("limits", uuid, scope))

    def set_limit(
        self, uuid: str, limit_mw: int, scope: PowerScope = PowerScope.GPU
    ) -> PowerLimits:
        return PowerLimits(**self._call("set_limit", uuid, limit_mw, scope))

    def lock_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        self._call("lock_clocks", uuid, min_mhz, max_mhz)

    def reset_clocks(self, uuid: str) -> None:
        self._call("reset_clocks", uuid)

    def reading(self, uuid: str) -> GpuReading:
        found = self._call("reading", uuid)
        return reading_from_json(found)

    # ---- condition ----

    def health(self, uuid: str) -> HealthFacts:
        found = self._call("health", uuid)
        lists = {key: tuple(found[key]) for key in ("reasons", "pids")}
        return HealthFacts(**found | lists)

    def pids(self, uuid: str) -> tuple[int, ...]:
        return tuple(self._call("pids", uuid))

    def watch_xids(self, uuids: tuple[str, ...]) -> None:
        """A process that is started anew listens no more; call it again after a TIMEOUT."""
        self._call("watch_xids", uuids)

    def xids(self) -> tuple[XidEvent, ...]:
        return tuple(XidEvent(**event) for event in self._call("xids"))

    # ---- the process ----

    def hold(self, fd: int) -> None:
        """Keeps a descriptor open in every process that makes calls for us."""
        self._held.append(fd)
        if self._socket is not None:
            self._send({"hold": fd}, [fd])

    def let_go(self, fd: int) -> None:
        """The opposite, once the last call that the descriptor guards has returned."""
        self._held.remove(fd)
        if self._socket is not None:
            self._send({"let_go": fd}, [])

    def writes_settled(self) -> bool:
        """Whether every process that was given up is really gone."""
        self._given_up = [process for process in self._given_up if process.poll() is None]
        return not self._given_up

    def close(self) -> None:
        """The end of the socket is the process's sign to go; it is not waited for."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._ended.append(self._process)
        self._socket = self._process = None
        self._ended = [process for process in self._ended if process.poll() is None]

    def _call(self, method: str, *arguments: Any) -> Any:
        connection = self._socket or self._start()
        uuid = arguments[0] if arguments and isinstance(arguments[0], str) else None
        what = f"NVML {method}{arguments}"
        self._send({"method": method, "arguments": arguments}, [])
        reply = self._receive(connection, self.deadline_s, what, uuid)
        answer = json.loads(reply)
        if "fault" in answer:
            raise DeviceError(Fault(answer["fault"]), answer["what"], answer["uuid"])
        return answer["result"]

    def _start(self) -> socket.socket:
        ours, theirs = spawn.socket_pair()
        self._process = spawn.start(spawn.module_command(__name__), theirs)
        theirs.close()
        self._socket = ours
        self._receive(ours, START_DEADLINE_S, "start of the process that calls NVML", None)
        for fd in self._held:
            self._send({"hold": fd}, [fd])
        return ours

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except OSError as error:
            self._give_up()
            raise DeviceError(
                Fault.FAILED, f"the process that calls NVML is gone: {error}"
            ) from error

    def _receive(
        self, connection: socket.socket, deadline_s: float, what: str, uuid: str | None
    ) -> bytes:
        connection.settimeout(deadline_s)
        try:
            reply = connection.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            self._give_up()
            raise DeviceError(
                Fault.TIMEOUT, f"{what} did not answer within {deadline_s:g} s", uuid
            ) from error
        except OSError:
            reply = b""
        if not reply:
            self._give_up()
            raise DeviceError(Fault.FAILED, f"the process that calls NVML died in {what}", uuid)
        return reply

    def _give_up(self) -> None:
        """For a process that does not answer: it is in some call, or dead."""
        if self._process is not None:
            self._process.kill()
            self._given_up.append(self._process)
            self._process = None
        self.close()


def wait_until_settled(layer: Any, timeout_s: float) -> bool:
    """Waits for writes of given-up processes to be over."""
    give_up_at = time.monotonic() + timeout_s
    while not layer.writes_settled():
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(0.01)
    return True


def reading_from_json(found: dict[str, Any]) -> GpuReading:
    """The reading that `asdict` and JSON took apart."""
    return GpuReading(
        **found | {"limits": PowerLimits(**found["limits"]), "reasons": tuple(found["reasons"])}
    )


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(entry) for entry in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _answer(nvml: Nvml, message: dict[str, Any]) -> dict[str, Any]:
    arguments = message["arguments"]
    if message["method"] in ("limits", "set_limit"):
        arguments[-1] = PowerScope(arguments[-1])
    try:
        return {"result": _to_json(getattr(nvml, message["method"])(*arguments))}
    except DeviceError as error:
        return {"fault": error.fault, "what": error.what, "uuid": error.uuid}


def main() -> int:
    """The process: answers one call after the other until the caller goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the keeper still has limits to restore
    connection = socket.socket(fileno=os.dup(0))
    nvml, held = Nvml(), dict[int, int]()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller was killed
        _serve(nvml, held, connection)
    return 0


def _serve(nvml: Nvml, held: dict[int, int], connection: socket.socket) -> None:
    connection.send(_READY)
    while True:
        data, fds, _flags, _address = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        message = json.loads(data)
        if "method" in message:
            connection.send(json.dumps(_answer(nvml, message)).encode())
        elif "hold" in message:
            held[message["hold"]] = fds[0]
        else:
            os.close(held.pop(message["let_go"]))


if __name__ == "__main__":
    sys.exit(main())
