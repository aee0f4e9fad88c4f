"""Whose GPUs are whose: the right of a client to have limits set on its behalf.

A keeper that a job started itself has the job's own rights, and the driver decides. A keeper with
privileges acts for others and believes only the kernel (who is at the other end of the socket) and
the grants that root wrote when the job got its GPUs, one file per job in a folder of root's:

    {"job_id": "1234", "uid": 1000, "gpu_uuids": ["GPU-..."], "cgroup": "job_1234"}

`cgroup`, if not empty, must be a part of the client's control group: it tells two jobs of one user
apart. A Slurm prolog writes the file (`megatron-ntp power grant`), the epilog removes it.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder
from megatron_ntp.device.naming import is_gpu_uuid

DEFAULT_GRANTS_FOLDER = Path("/run/megatron-ntp/grants")
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        size = struct.calcsize("3i")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return cls(*struct.unpack("3i", raw))

    def cgroup(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


@dataclass(frozen=True)
class Grant:
    """One job's GPUs on this node."""

    job_id: str
    uid: int
    gpu_uuids: tuple[str, ...]
    cgroup: str = ""

    def __post_init__(self) -> None:
        if not _JOB_ID.fullmatch(self.job_id):
            raise ValueError(f"job id {self.job_id!r} must be letters, digits, '.', '_' and '-'")
        bad = [uuid for uuid in self.gpu_uuids if not is_gpu_uuid(uuid)]
        if bad or not self.gpu_uuids:
            raise ValueError(f"job {self.job_id}: needs UUIDs of whole GPUs, not {bad or 'none'}")

    def is_for(self, peer: Peer) -> bool:
        return self.uid == peer.uid and (not self.cgroup or self.cgroup in peer.cgroup())


class Access(Protocol):
    """What a client may do, asked again and again: a grant can be taken back."""

    @property
    def is_trusted(self) -> bool: ...
    def job_of(self, claimed_job_id: str, gpu_uuids: tuple[str, ...]) -> str: ...
    def num_gpus(self) -> int | None: ...


class OwnRights:
    """The client started this keeper, which can do no more than the client itself."""

    is_trusted = True

    def job_of(self, claimed_job_id: str, gpu_uuids: tuple[str, ...]) -> str:
        return claimed_job_id

    def num_gpus(self) -> int | None:
        return None


class GrantedRights:
    """The client is a stranger with a grant."""

    is_trusted = False

    def __init__(self, folder: Folder, peer: Peer) -> None:
        self._folder, self._peer = folder, peer

    def grants(self) -> list[Grant]:
        return [grant for grant in read_grants(self._folder) if grant.is_for(self._peer)]

    def job_of(self, claimed_job_id: str, gpu_uuids: tuple[str, ...]) -> str:
        """The job that these GPUs are granted to; it must be one of the peer's."""
        for grant in self.grants():
            if set(gpu_uuids) <= set(grant.gpu_uuids):
                return grant.job_id
        raise DeviceError(
            Fault.REFUSED,
            f"uid {self._peer.uid} (pid {self._peer.pid}) has no grant for all of "
            f"{', '.join(gpu_uuids)}; the node's prolog must run `megatron-ntp power grant`",
        )

    def num_gpus(self) -> int | None:
        return max((len(grant.gpu_uuids) for grant in self.grants()), default=0)


def read_grants(folder: Folder) -> list[Grant]:
    """Every readable grant. A file that is not one of ours is as good as none."""
    found = []
    for name in folder.names():
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            entry = json.loads(folder.read(name) or "")
            grant = Grant(
                job_id=str(entry["job_id"]),
                uid=int(entry["uid"]),
                gpu_uuids=tuple(str(uuid) for uuid in entry["gpu_uuids"]),
                cgroup=str(entry.get("cgroup", "")),
            )
        except (DeviceError, ValueError, KeyError, TypeError, AttributeError):
            continue
        found.append(grant)
    return found


def write_grant(folder: Folder, grant: Grant) -> None:
    """Root's side: a job got GPUs."""
    folder.write(f"{grant.job_id}.json", json.dumps(asdict(grant)) + "\n")


def remove_grant(folder: Folder, job_id: str) -> None:
    """Root's side: the job is over. Its keeper restores and goes within a second or so."""
    if not _JOB_ID.fullmatch(job_id):
        raise ValueError(f"job id {job_id!r} must be letters, digits, '.', '_' and '-'")
    folder.remove(f"{job_id}.json")
