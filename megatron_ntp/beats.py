"""How far each rank is, for whoever watches it from outside: one small record per rank in a folder.

A rank overwrites its record in place when its phase or iteration changes, in one write of
microseconds; nobody waits for anybody. The folder lies on a file system of the node. A reader that
meets a record while it is written sees a wrong checksum and reads again.

    start -> setup -> load -> train <-> save, eval ... -> done

`setup` begins with the call of Megatron's own `pretrain`. A rank that makes its process groups
without it is in a loop of another library: `other`, whenever it is in nothing else of these.
`train` begins when checkpoints have been read, so it holds what is built before the first step;
`done` follows the last step. Only --ntp, or a start through `megatron-ntp run`, reports phases and
steps (`integration.progress`).
"""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.environment import BEATS_ENV

ENV = BEATS_ENV
"""Names the folder to ranks. Set by the supervisor, which makes a new folder for each attempt."""

PHASES = ("start", "other", "setup", "load", "train", "eval", "save", "done")
FIRST_STEP = "first-step"
"""A mark beside those of phases: when the first step of the process was complete."""

_MARKS = (*PHASES, FIRST_STEP)
_MAGIC = b"NTPB"
_BODY = struct.Struct(f"<4sHHIIqdd{len(_MARKS)}d")
_CHECKSUM = struct.Struct("<I")
RECORD_NBYTES = _BODY.size + _CHECKSUM.size

_SUFFIX = ".beat"
_NUM_READS = 5
_READ_AGAIN_S = 0.001


@dataclass(frozen=True)
class Beat:
    """What a rank last said.

    Attributes:
        rank: its global rank.
        phase: one of `PHASES`.
        iteration: steps that the job has completed, those before a restart included; -1 before the
            rank knows.
        since: CLOCK_MONOTONIC of the last change, in seconds.
        marks: seconds from the start of the process to the first time of each phase it has had, and
            to `FIRST_STEP`.
        pid: its process.
        started: CLOCK_MONOTONIC of the start of the process, in seconds.
    """

    rank: int
    phase: str
    iteration: int
    since: float
    marks: Mapping[str, float]
    pid: int = 0
    started: float = 0.0


class BeatWriter:
    """A rank's own record. Phases and steps may be said any number of times."""

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        """Opens the record and says `start`. Raises OSError where the folder cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(_path(folder, rank), flags, 0o644)
        self._rank, self._pid = rank, os.getpid()
        self._started = process_started()
        self._marks = [math.nan] * len(_MARKS)
        self.phase = PHASES[0]
        self.iteration = -1
        self.say(self.phase)

    def say(self, phase: str, iteration: int | None = None) -> None:
        """The rank is in this phase now, and as far as `iteration` (None: as before)."""
        self.phase = phase
        if iteration is not None:
            self.iteration = iteration
        self._write(_MARKS.index(phase))

    def step_done(self, iteration: int) -> None:
        """A step is complete, the job's `iteration`th."""
        self.phase, self.iteration = "train", iteration
        self._write(_MARKS.index(FIRST_STEP))

    def _write(self, mark: int) -> None:
        now = time.monotonic()
        if math.isnan(self._marks[mark]):
            self._marks[mark] = now - self._started
        phase = PHASES.index(self.phase)
        head = (_MAGIC, phase, 0, self._rank, self._pid, self.iteration, now, self._started)
        body = _BODY.pack(*head, *self._marks)
        os.pwrite(self._file, body + _CHECKSUM.pack(zlib.crc32(body)), 0)

    def close(self) -> None:
        os.close(self._file)


def read(folder: str | os.PathLike[str]) -> dict[int, Beat]:
    """The last word of every rank in a folder, by rank; empty where there is no folder yet.

    A rank that has just made its record, and one whose record stays torn, is left out.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
    except FileNotFoundError:
        return {}
    beats = (_read_one(Path(folder) / name) for name in names)
    return {beat.rank: beat for beat in beats if beat is not None}


def _read_one(path: Path) -> Beat | None:
    for _ in range(_NUM_READS):
        beat = parse(path.read_bytes())
        if beat is not None:
            return beat
        time.sleep(_READ_AGAIN_S)
    return None


def parse(record: bytes) -> Beat | None:
    """A record's content; None if it is torn, or is none."""
    if len(record) != RECORD_NBYTES or not record.startswith(_MAGIC):
        return None
    body, checksum = record[: _BODY.size], record[_BODY.size :]
    if _CHECKSUM.unpack(checksum) != (zlib.crc32(body),):
        return None
    _, phase, _, rank, pid, iteration, since, started, *marks = _BODY.unpack(body)
    had = {name: at for name, at in zip(_MARKS, marks, strict=True) if not math.isnan(at)}
    return Beat(rank, PHASES[phase], iteration, since, had, pid, started)


def _path(folder: str | os.PathLike[str], rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05d}{_SUFFIX}")


def process_started() -> float:
    """CLOCK_MONOTONIC of the start of this process, in seconds, to a hundredth."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        after_name = file.read().rpartition(")")[2].split()
    ticks = int(after_name[19])  # proc(5): field 22, after two that precede the split
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    return time.monotonic() - age
