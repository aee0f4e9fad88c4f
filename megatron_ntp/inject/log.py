"""Which faults have happened: one file per fault in a folder that outlives the job's attempts.

Whoever makes a fault's file has claimed the fault, so that each happens once per job, also when a
restart repeats its step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ntp import events
from megatron_ntp.inject.grammar import Fault, InjectError

_LIST = "faults.json"


class FaultLog:
    """The folder of one job."""

    def __init__(self, folder: Path, faults: Sequence[Fault], event_log: str | None = None) -> None:
        """Makes the folder, or goes on with it.

        Raises:
            InjectError: it cannot be made, or belongs to a job with other faults.
        """
        self.folder = folder
        self.faults = tuple(faults)
        self._event_log = events.EventLog(event_log) if event_log else None
        wanted = [str(fault) for fault in self.faults]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _create(folder / _LIST, wanted):
                self._note("faults-armed", faults=wanted)
            found = json.loads((folder / _LIST).read_text())
        except OSError as error:
            raise InjectError(
                f"the folder of injected faults {folder} cannot be written: {error.strerror}"
            ) from error
        if found != wanted:
            raise InjectError(
                f"{folder} belongs to a job with the faults {'; '.join(found)}. Give the same "
                "--ntp-inject, or another folder with --ntp-inject-state"
            )

    def claim(self, index: int, **about: Any) -> bool:
        """Whether the fault has not happened yet; from now on it has."""
        about = {"fault": str(self.faults[index]), "pid": os.getpid(), **about}
        if not _create(self._path(index), {**about, "time": events.now()}):
            return False
        self._note("fault-injected", **about)
        return True

    def has_happened(self, index: int) -> bool:
        return self._path(index).exists()

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults that have not happened."""
        return tuple(f for index, f in enumerate(self.faults) if not self.has_happened(index))

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:02d}-{self.faults[index].kind.value}.json"

    def _note(self, event: str, **fields: Any) -> None:
        if self._event_log is not None:
            self._event_log.write(event, **fields)


def _create(path: Path, content: Any) -> bool:
    """Makes a file that is whole from the start; False if there is one."""
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_text(json.dumps(content) + "\n")
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True
