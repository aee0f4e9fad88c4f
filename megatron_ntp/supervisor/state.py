"""What a job remembers between attempts and between supervisors: RUN_DIR/JOBID.

    job.json            who the job is, its attempts and guards; written by node 0, whole or not
    events.jsonl        the log of events
    attempt-NNN/        placement, output of ranks and agents of one attempt

and RUN_DIR/.locks/JOBID.node-R.json says which supervisor of node R is at work.

[Identity] A folder is taken over only by the same job. With --job-id that is whoever names it. A
Slurm job that was queued again has a higher SLURM_RESTART_COUNT; a supervisor started again inside
its allocation has the same, the same start time of the job, and the same training command. Anything
else under that number is another job, as after a controller was reset, or the next command of a
batch script: the folder is put aside as JOBID.stale-TIME. Without either, the folder goes by the
training command, and lasts until the machine is booted or the job has ended by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ntp.atomic import write_atomically
from megatron_ntp.errors import PlanError
from megatron_ntp.supervisor.guards import Ledger

STATE_VERSION = 1
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK_FRESH_S = 60.0
"""A lock of another host that was touched more recently belongs to a supervisor at work."""

_ATTEMPT = re.compile(r"attempt-(\d{3,})")


class RunStateError(PlanError):
    """The job's folder cannot be used: another supervisor is at work, or its state is damaged."""


@dataclass(frozen=True)
class Identity:
    """Who a job is. See [Identity]. `source` is explicit, slurm or command.

    `restart` is Slurm's count; `mark` says when the job, or the machine, was started; `command` is
    the short name of the training command.
    """

    source: str
    name: str
    restart: int = 0
    mark: str = ""
    command: str = ""

    def continues(self, earlier: Identity) -> bool:
        """Whether a job that left state under this name is the same one."""
        if (self.source, self.name) != (earlier.source, earlier.name):
            return False
        if self.source == "explicit":
            return True
        if self.source == "slurm" and self.restart != earlier.restart:
            return self.restart > earlier.restart
        return (self.mark, self.command) == (earlier.mark, earlier.command)


def identify(job_id: str | None, words: Sequence[str], environ: Mapping[str, str]) -> Identity:
    """The identity of a job started with this --job-id, training command and environment."""
    if job_id is not None:
        if not re.fullmatch(r"[\w.-]+", job_id) or job_id.startswith("."):
            raise RunStateError(
                f"--job-id {job_id!r} names a folder: use letters, digits, '.', '_' and '-'"
            )
        return Identity("explicit", job_id)
    told = json.dumps([os.getcwd(), *words])
    command = hashlib.sha256(told.encode()).hexdigest()[:8]
    slurm = environ.get("SLURM_JOB_ID")
    if slurm:
        count = environ.get("SLURM_RESTART_COUNT", "0")
        mark = environ.get("SLURM_JOB_START_TIME") or boot_id()
        return Identity("slurm", slurm, int(count) if count.isdecimal() else 0, mark, command)
    return Identity("command", f"job-{command}", 0, boot_id())


def boot_id() -> str:
    """Of the machine, since its last boot."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt. `ended` is empty while it runs; `status` None where nobody saw it end."""

    number: int
    degrees: tuple[int, ...] = ()
    from_checkpoint: int = -1
    ended: str = ""
    status: int | None = None


@dataclass(frozen=True)
class JobState:
    """The content of job.json."""

    identity: Identity
    attempts: tuple[AttemptRecord, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    finished: bool = False
    version: int = STATE_VERSION

    def with_attempt(self, record: AttemptRecord) -> JobState:
        """With this record, in place of one of the same number."""
        others = tuple(entry for entry in self.attempts if entry.number != record.number)
        return replace(self, attempts=(*others, record))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """Raises ValueError, KeyError or TypeError where the text is something else."""
        found: dict[str, Any] = json.loads(text)
        if found["version"] != STATE_VERSION:
            raise ValueError(f"version {found['version']}, not {STATE_VERSION}")
        records = [{**entry, "degrees": tuple(entry["degrees"])} for entry in found["attempts"]]
        ledger = {**found["ledger"], "failures": tuple(found["ledger"]["failures"])}
        return cls(
            identity=Identity(**found["identity"]),
            attempts=tuple(AttemptRecord(**entry) for entry in records),
            ledger=Ledger(**ledger),
            finished=found["finished"],
        )


class JobFolder:
    """RUN_DIR/JOBID, as node 0 uses it."""

    def __init__(self, run_dir: Path, identity: Identity) -> None:
        self.path = run_dir / identity.name
        self.identity = identity

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def open(self) -> tuple[JobState, Path | None]:
        """The state to go on with, and where a stale folder was put. See [Identity].

        Raises:
            RunStateError: the folder cannot be made, or its state read.
        """
        aside = None
        with _told_if_unusable(self.path):
            earlier = self._read()
            if earlier is not None and not self._is_ours(earlier):
                aside = self._put_aside()
                earlier = None
            self.path.mkdir(parents=True, exist_ok=True)
        state = JobState(self.identity) if earlier is None else earlier
        state = replace(state, identity=self.identity)
        self.write(state)
        return state, aside

    def _is_ours(self, earlier: JobState) -> bool:
        ended_by_itself = earlier.finished and self.identity.source == "command"
        return self.identity.continues(earlier.identity) and not ended_by_itself

    def _read(self) -> JobState | None:
        path = self.path / "job.json"
        try:
            return JobState.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RunStateError(
                f"{path} is not the state of a job ({error!r}). Move {self.path} away, or give "
                "another --job-id"
            ) from error

    def _put_aside(self) -> Path:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        target = self.path.with_name(f"{self.path.name}.stale-{stamp}-{os.getpid()}")
        self.path.rename(target)
        return target

    def write(self, state: JobState) -> None:
        """Replaces job.json."""
        with _told_if_unusable(self.path):
            write_atomically(self.path / "job.json", state.to_json())

    def next_number(self, state: JobState) -> int:
        """A number that no attempt has had."""
        numbers = [record.number for record in state.attempts]
        with _told_if_unusable(self.path):
            names = os.listdir(self.path)
        numbers += [int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))]
        return max(numbers, default=0) + 1

    def make_attempt(self, number: int, placement: str) -> Path:
        """The folder of an attempt, made now, with its placement."""
        folder = self.path / f"attempt-{number:03d}"
        with _told_if_unusable(self.path):
            folder.mkdir()
            write_atomically(folder / "placement.json", placement)
        return folder


@contextlib.contextmanager
def _told_if_unusable(folder: Path) -> Iterator[None]:
    """Raises RunStateError where this folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunStateError(
            f"the job's folder {folder} cannot be used: {error.strerror or error}. Give a folder "
            "that all nodes share and this user may write to, with --run-dir"
        ) from error


# --- one supervisor per node ---------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A supervisor process, told apart from a later one with the same process id."""

    host: str
    boot: str
    pid: int
    started: int

    @classmethod
    def me(cls, host: str) -> Holder:
        return cls(host, boot_id(), os.getpid(), process_start(os.getpid()) or 0)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


class NodeLock:
    """Keeps a second supervisor of the same node and job away. Touch it now and then."""

    def __init__(self, path: Path, me: Holder) -> None:
        self._path, self._me = path, me

    def take(self) -> Holder | None:
        """Takes the lock; returns who held it before and is dead.

        Raises:
            RunStateError: a supervisor that is at work holds it.
        """
        before = self._read()
        if before is not None and self._is_alive(before):
            raise RunStateError(
                f"a supervisor of this job is at work already: process {before.pid} on "
                f"{before.host} ({self._path}). End it first, or give another --job-id"
            )
        with _told_if_unusable(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(self._me)) + "\n")
        if self._read() != self._me:
            raise RunStateError(f"another supervisor took {self._path} at the same moment")
        return before

    def touch(self) -> None:
        """Says that this supervisor is at work, to other hosts."""
        os.utime(self._path)

    def release(self) -> None:
        if self._read() == self._me:
            self._path.unlink(missing_ok=True)

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _is_alive(self, holder: Holder) -> bool:
        if holder == self._me:
            return False
        if (holder.host, holder.boot) == (self._me.host, self._me.boot):
            return process_start(holder.pid) == holder.started
        try:
            return time.time() - self._path.stat().st_mtime < LOCK_FRESH_S
        except OSError:
            return False
