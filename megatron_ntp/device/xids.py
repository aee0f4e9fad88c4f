"""XID errors: what the kernel log says of the past, and what each number means for a GPU.

NVML reports XIDs only to who listens when they happen, so a check that starts later reads the
kernel's messages ("NVRM: Xid (PCI:0000:3b:00): 79, ..."). Numbers are sorted by what NVIDIA's
catalog advises: reset the GPU or the machine (fatal), restart the program (application), or look
into it (everything else). A site that knows better says so (`megatron-ntp health --treat`).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
DEFAULT_SINCE_S = 3600.0

# Off the bus, halted controllers, uncontained memory errors, failed recovery: a reset at least.
FATAL = frozenset({46, 62, 64, 79, 95, 109, 119, 120, 136, 140, 143})
# A kernel's illegal access or exception: the program's fault before it is the GPU's.
APPLICATION = frozenset({11, 13, 31, 32, 43, 45, 68, 69})

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")
_RECORD_BYTES = 8192


@dataclass(frozen=True)
class LoggedXid:
    """One line of the kernel log."""

    pci_bus_id: str
    xid: int
    age_s: float


def same_device(left: str, right: str) -> bool:
    """Whether two PCI addresses are one device; tools differ in zeros and in the function."""
    return _address(left) == _address(right)


def _address(text: str) -> tuple[int, ...]:
    domain, bus, device = text.split(":")[:3]
    return int(domain, 16), int(bus, 16), int(device.split(".")[0], 16)


def logged_xids(path: Path = KERNEL_LOG, since_s: float = DEFAULT_SINCE_S) -> list[LoggedXid]:
    """XIDs of the last `since_s` seconds. Raises OSError where the log may not be read."""
    now_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = []
    for record in _records(path):
        match = _XID.search(record)
        if match is None:
            continue
        age_s = now_s - _stamp_us(record) / 1e6
        if age_s <= since_s:
            found.append(LoggedXid(match.group(1), int(match.group(2)), age_s))
    return found


def _stamp_us(record: str) -> int:
    """Of a record such as "4,1234,98765432,-;NVRM: ..."; microseconds since the node booted."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) if len(fields) > 2 and fields[2].isdecimal() else 0


def _records(path: Path) -> Iterator[str]:
    """The kernel's device gives one record a read, and an error when there are no more."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISCHR(os.fstat(fd).st_mode):
            with os.fdopen(os.dup(fd), encoding="utf-8", errors="replace") as file:
                yield from file
            return
        while True:
            try:
                yield os.read(fd, _RECORD_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # overwritten while we read; the next read goes on after the hole
    finally:
        os.close(fd)
