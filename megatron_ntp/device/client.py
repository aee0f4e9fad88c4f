"""The other end of a keeper: start one of our own, or connect to the node's helper.

Calls block until the keeper answers, so they are made by a thread of their own and never by the one
that trains. Every failure is a DeviceError.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ntp.device import protocol, spawn
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.nvml import GpuReading, PowerLimits
from megatron_ntp.device.nvml_process import reading_from_json
from megatron_ntp.device.protocol import OpenReply, OpenRequest, SetResult
from megatron_ntp.device.settings import DEFAULT_DEADLINE_S
from megatron_ntp.device.state import BOOT_ID_FILE, DRIVER_FOLDER, Outcome, Settled

KEEPER_MODULE = "megatron_ntp.device.keeper_process"
# The keeper has deadlines of its own; this one is for a keeper that is stopped or gone astray.
ANSWER_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class KeeperOptions:
    """How to start a keeper with the caller's own rights."""

    site: Path | None = None
    state_dir: Path | None = None
    deadline_s: float = DEFAULT_DEADLINE_S
    boot_id_file: Path = BOOT_ID_FILE
    driver_dir: Path = DRIVER_FOLDER
    claim_timeout_s: float | None = None

    def arguments(self) -> list[str]:
        """Command line of keeper_process."""
        found = ["--deadline", str(self.deadline_s), "--boot-id-file", str(self.boot_id_file)]
        found += ["--driver-dir", str(self.driver_dir)]
        if self.claim_timeout_s is not None:
            found += ["--claim-timeout", str(self.claim_timeout_s)]
        if self.site is not None:
            found += ["--site", str(self.site.resolve())]
        if self.state_dir is not None:
            found += ["--state-dir", str(self.state_dir.resolve())]
        return found


class KeeperClient:
    """One conversation with a keeper. When it ends, however it ends, limits are restored."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._connection, self._process = connection, process
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        self._last_id = 0

    @classmethod
    def start(cls, options: KeeperOptions) -> KeeperClient:
        """A keeper of our own, with our own rights."""
        return cls._spawn(spawn.module_command(KEEPER_MODULE, options.arguments()))

    @classmethod
    def start_command(cls, command: list[str]) -> KeeperClient:
        """A keeper that a command starts for us with other rights, as `sudo -n ... --stdio`."""
        return cls._spawn(command)

    @classmethod
    def _spawn(cls, command: list[str]) -> KeeperClient:
        ours, theirs = spawn.socket_pair()
        try:
            process = spawn.start(command, theirs)
        except OSError as error:
            ours.close()
            raise DeviceError(Fault.FAILED, f"{command[0]} cannot be started: {error}") from error
        finally:
            theirs.close()
        return cls(ours, process)

    @classmethod
    def connect(cls, path: Path) -> KeeperClient:
        """The node's helper (`megatron-ntp power serve --socket PATH`)."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise DeviceError(
                Fault.NO_PERMISSION, f"no power helper answers at {path}: {error}"
            ) from error
        return cls(connection)

    def open(self, request: OpenRequest) -> OpenReply:
        found = self._ask("open", **request.to_json())
        return OpenReply(**found | {"settled": tuple(found["settled"])})

    def set_limits(self, limits_mw: Mapping[str, int]) -> dict[str, SetResult]:
        return {
            uuid: SetResult(
                limits=PowerLimits(**entry["limits"]) if entry["limits"] else None,
                fault=Fault(entry["fault"]) if entry["fault"] else None,
                message=entry["message"],
            )
            for uuid, entry in self._ask("set", limits_mw=dict(limits_mw)).items()
        }

    def readings(self) -> dict[str, GpuReading | None]:
        return {
            uuid: reading_from_json(entry) if entry else None
            for uuid, entry in self._ask("read").items()
        }

    def close(self) -> list[Settled]:
        """Has everything restored and says how that went."""
        try:
            return [_settled(entry) for entry in self._ask("close")]
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Hangs up. The keeper restores by itself."""
        # Also for copies of the descriptor that forked children may have.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._process is not None:
            self._process.poll()

    def _ask(self, operation: str, **fields: Any) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "op": operation, **fields}
        try:
            self._connection.send(json.dumps(message).encode())
            answer = self._receive()
            while answer.get("id") not in (self._last_id, None):
                answer = self._receive()
        except TimeoutError as error:
            raise DeviceError(
                Fault.TIMEOUT, f"the power keeper did not answer within {ANSWER_TIMEOUT_S:g} s"
            ) from error
        except OSError as error:
            raise self._last_words(str(error)) from error
        return self._result(answer)

    def _receive(self) -> dict[str, Any]:
        data = self._connection.recv(protocol.MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection")
        return protocol.parse(data)

    def _last_words(self, what: str) -> DeviceError:
        """What a keeper that hung up said before, if anything."""
        try:
            self._connection.settimeout(0)
            self._result(self._receive())
        except DeviceError as error:
            return error
        except OSError:
            pass
        return DeviceError(Fault.FAILED, f"the power keeper is gone ({what})")

    def _result(self, answer: dict[str, Any]) -> Any:
        if "closing" in answer:
            raise DeviceError(Fault.REFUSED, f"the power keeper ended: {answer['closing']}")
        if "fault" in answer:
            raise DeviceError(Fault(answer["fault"]), answer["what"], answer["uuid"])
        return answer["ok"]


def _settled(entry: dict[str, Any]) -> Settled:
    fault = Fault(entry["fault"]) if entry["fault"] else None
    return Settled(**entry | {"outcome": Outcome(entry["outcome"]), "fault": fault})
