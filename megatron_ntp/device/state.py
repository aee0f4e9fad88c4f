"""Power limits as they were found, kept on disk until each GPU has its own back.

Per GPU there are two files in one private folder of the node:

    UUID.json   the record: found limit, the values that we may have written, boot, driver, job
    UUID.lock   locked by the process that may write the limit, for as long as it may

The record is on disk before the first write, and each later value is in it before it is written. So
after any death of any process the record tells a value of ours from somebody else's:

    the node rebooted, or the driver was loaded anew    limits are gone by themselves: left alone
    the limit is the found one                          nothing to do
    the limit is one that we wrote                      set back
    the limit is anything else                          an administrator's: left alone

Nobody records a found limit while an older record is there: it is settled first.
"""

from __future__ import annotations

import enum
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.files import Folder
from megatron_ntp.device.naming import is_gpu_uuid
from megatron_ntp.device.nvml import DeviceLayer, PowerLimits, PowerScope

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
DRIVER_FOLDER = Path("/sys/module/nvidia")
RESTORE_CLAIM_TIMEOUT_S = 0.5
_RECORD, _LOCK = ".json", ".lock"


def default_folder() -> Path:
    """One per node. It must outlive the job: in a container, mount it from the host."""
    if os.geteuid() == 0:
        return Path("/run/megatron-ntp/power")
    return Path(f"/tmp/megatron-ntp-power-{os.geteuid()}")


@dataclass(frozen=True)
class HostIdentity:
    """This boot, and this loading of the driver (the kernel gives each its own inode)."""

    boot_id: str
    driver_id: str | None

    @classmethod
    def read(
        cls, boot_id_file: Path = BOOT_ID_FILE, driver_folder: Path = DRIVER_FOLDER
    ) -> HostIdentity:
        try:
            driver_id = str(driver_folder.stat().st_ino)
        except OSError:
            driver_id = None
        return cls(boot_id_file.read_text(encoding="ascii").strip(), driver_id)


@dataclass(frozen=True)
class LimitRecord:
    """What one GPU's limit was before us, and which values on it are ours."""

    uuid: str
    job_id: str
    scope: PowerScope
    found_mw: int
    ours_mw: tuple[int, ...]  # every value that we may have left there
    boot_id: str
    driver_id: str | None
    energy_mj: int | None  # counts from the loading of the driver, so it only grows until the next

    def about_to_write(self, limit_mw: int, energy_mj: int | None) -> LimitRecord:
        """What is on the GPU stays in the record until the write is known to have landed."""
        ours_mw = tuple(dict.fromkeys((*self.ours_mw, limit_mw)))
        return replace(self, ours_mw=ours_mw, energy_mj=energy_mj)

    def landed(self, limit_mw: int) -> LimitRecord:
        return replace(self, ours_mw=(limit_mw,))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LimitRecord:
        found: dict[str, Any] = json.loads(text)
        ours_mw = tuple(int(value) for value in found["ours_mw"])
        return cls(**found | {"scope": PowerScope(found["scope"]), "ours_mw": ours_mw})


@dataclass(frozen=True)
class Claim:
    """The right to write one GPU's limit: an exclusive lock that dies with its holders.

    The descriptor is also open in the process that calls NVML (`hold`), so that the lock outlives a
    keeper that is killed while a write of its is still in the driver.
    """

    uuid: str
    fd: int
    layer: DeviceLayer

    def release(self) -> None:
        self.layer.let_go(self.fd)
        os.close(self.fd)


class LimitStore:
    """The records and locks of a node."""

    def __init__(self, folder: Folder, read_host: Callable[[], HostIdentity]) -> None:
        self.folder, self.read_host = folder, read_host

    def claim(self, layer: DeviceLayer, uuid: str, job_id: str, timeout_s: float) -> Claim:
        """Waits a little for a holder that is about to go, such as the last attempt's keeper."""
        _check_name(uuid)
        fd = self.folder.open_file(uuid + _LOCK, os.O_RDWR | os.O_CREAT)
        if not _lock(fd, timeout_s):
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise DeviceError(Fault.BUSY, f"the power limit is in the hands of {holder}", uuid)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"job {job_id} (pid {os.getpid()})\n".encode(), 0)
        layer.hold(fd)
        return Claim(uuid, fd, layer)

    def is_claimed(self, uuid: str) -> bool:
        """Whether somebody has the right to write this limit now. A moment later it may differ."""
        _check_name(uuid)
        fd = self.folder.open_file(uuid + _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def read(self, uuid: str) -> LimitRecord | None:
        text = self.folder.read(uuid + _RECORD)
        if text is None:
            return None
        try:
            record = LimitRecord.from_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise DeviceError(
                Fault.REFUSED,
                f"record {self.folder.path / (uuid + _RECORD)} is damaged ({error!r}); compare the "
                "GPU's limit with the site's by hand, then delete the file",
            ) from error
        if record.uuid != uuid:
            raise DeviceError(
                Fault.REFUSED,
                f"record {self.folder.path / (uuid + _RECORD)} is about another GPU, "
                f"{record.uuid}; delete it",
            )
        return record

    def write(self, record: LimitRecord) -> None:
        _check_name(record.uuid)
        self.folder.write(record.uuid + _RECORD, record.to_json())

    def drop(self, uuid: str) -> None:
        self.folder.remove(uuid + _RECORD)

    def recorded_uuids(self) -> list[str]:
        files = [name for name in self.folder.names() if name.endswith(_RECORD)]
        return [
            uuid for uuid in (name.removesuffix(_RECORD) for name in files) if is_gpu_uuid(uuid)
        ]


def _lock(fd: int, timeout_s: float) -> bool:
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                return False
        time.sleep(0.02)


def _check_name(uuid: str) -> None:
    if not is_gpu_uuid(uuid):
        raise DeviceError(Fault.REFUSED, f"{uuid!r} is not the UUID of a whole GPU")


class Outcome(enum.StrEnum):
    """How a record ended, or why it is still there."""

    RESTORED = "restored"
    UNCHANGED = "already at the found limit"
    REBOOTED = "left alone: the node rebooted since"
    RELOADED = "left alone: the driver was loaded anew since"
    CHANGED = "left alone: somebody else changed it"
    PENDING = "not restored yet"
    BUSY = "in use by a live job"


@dataclass(frozen=True)
class Settled:
    """One GPU's record after an attempt to be done with it."""

    uuid: str
    outcome: Outcome
    found_mw: int | None
    limit_mw: int | None = None
    detail: str = ""
    fault: Fault | None = None

    @property
    def is_over(self) -> bool:
        return self.outcome not in (Outcome.PENDING, Outcome.BUSY)


def settle(
    layer: DeviceLayer, store: LimitStore, record: LimitRecord, keep_record: bool = False
) -> Settled:
    """Gives a GPU its found limit back, by the table above. The caller holds its claim."""
    try:
        settled = _settle(layer, store, record)
    except DeviceError as error:
        return _failed(record.uuid, error, record.found_mw)
    if settled.is_over and not keep_record:
        store.drop(record.uuid)
    return settled


def _settle(layer: DeviceLayer, store: LimitStore, record: LimitRecord) -> Settled:
    host, uuid, found_mw = store.read_host(), record.uuid, record.found_mw
    if record.boot_id != host.boot_id:
        return Settled(uuid, Outcome.REBOOTED, found_mw)
    if not layer.writes_settled():
        detail = "an earlier call into the driver hangs and may still take effect"
        return Settled(uuid, Outcome.PENDING, found_mw, detail=detail)
    limits, reading = layer.limits(uuid, record.scope), layer.reading(uuid)
    now_mw = limits.requested_mw
    if driver_is_new(record, host, reading.energy_mj):
        return Settled(uuid, Outcome.RELOADED, found_mw, now_mw)
    if now_mw == found_mw:
        return Settled(uuid, Outcome.UNCHANGED, found_mw, now_mw)
    if now_mw not in record.ours_mw:
        return Settled(uuid, Outcome.CHANGED, found_mw, now_mw)
    after: PowerLimits = layer.set_limit(uuid, found_mw, record.scope)
    if after.requested_mw != found_mw:
        detail = f"set to {found_mw / 1000:g} W, but {after.requested_mw / 1000:g} W was read back"
        return Settled(uuid, Outcome.PENDING, found_mw, after.requested_mw, detail)
    return Settled(uuid, Outcome.RESTORED, found_mw, after.requested_mw)


def driver_is_new(record: LimitRecord, host: HostIdentity, energy_mj: int | None) -> bool:
    """Whether the driver was loaded anew, or the GPU reset, since the record was written."""
    if record.driver_id and host.driver_id and record.driver_id != host.driver_id:
        return True
    return record.energy_mj is not None and energy_mj is not None and energy_mj < record.energy_mj


def _failed(uuid: str, error: DeviceError, found_mw: int | None = None) -> Settled:
    outcome = Outcome.BUSY if error.fault is Fault.BUSY else Outcome.PENDING
    return Settled(uuid, outcome, found_mw, detail=str(error), fault=error.fault)


def restore_all(
    layer: DeviceLayer,
    store: LimitStore,
    uuids: list[str] | None = None,
    claim_timeout_s: float = RESTORE_CLAIM_TIMEOUT_S,
    keep_records: bool = False,
) -> list[Settled]:
    """Settles every record whose job is gone. None: all GPUs that have a record.

    `claim_timeout_s` is for all of them together: a job that is about to go lets go of all at once.
    """
    results = []
    give_up_at = time.monotonic() + claim_timeout_s
    for uuid in store.recorded_uuids() if uuids is None else uuids:
        try:
            left_s = max(0.0, give_up_at - time.monotonic())
            claim = store.claim(layer, uuid, "power restore", left_s)
        except DeviceError as error:
            results.append(_failed(uuid, error))
            continue
        try:
            record = store.read(uuid)
            if record is not None:
                results.append(settle(layer, store, record, keep_records))
        except DeviceError as error:
            results.append(_failed(uuid, error))
        finally:
            claim.release()
    return results
