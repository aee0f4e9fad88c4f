"""`megatron-ntp checkpoint list|inspect|verify`: what lies in a folder, and whether it is good.

Reads files only: no torch, no Megatron, nothing in the folder is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ntp.checkpoint.choose import choose, told
from megatron_ntp.checkpoint.examine import Checkpoint, Format, contents, examine, has_hashes
from megatron_ntp.checkpoint.folder import TRACKER as TRACKER_FILE
from megatron_ntp.checkpoint.folder import Candidate, Folder, list_folder, read_tracker, unreadable
from megatron_ntp.checkpoint.saved_job import OptimizerFormat
from megatron_ntp.errors import CheckpointError

NOT_USABLE = 1
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TITLES = ("iteration", "complete", "format", "optimizer", "TP/PP/DP", "ranks", "reshardable",
           "size")  # fmt: skip
_FACTS = ("path", "complete", "problems", "format", "optimizer_format", "reshardable", "tp", "pp",
          "dp", "world_size", "degrees", "consumed_samples", "has_hashes")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One checkpoint as it is shown. `problems` are all that is known to be wrong with it."""

    checkpoint: Checkpoint
    problems: tuple[str, ...]
    is_next: bool
    set_back: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether a job whose replicas are reduced could load it, optimizer and all."""
        job = self.checkpoint.job
        if self.problems or job is None:
            return False
        if self.checkpoint.candidate.iteration is None:
            return True  # of a release the weights are loaded, and nothing else
        return job.optimizer_format is not OptimizerFormat.NONE and self.reshardable is True

    @property
    def reshardable(self) -> bool | None:
        if self.checkpoint.format is not Format.TORCH_DIST:
            return False
        job = self.checkpoint.job
        return None if job is None else job.optimizer_format.is_reshardable

    def as_json(self) -> dict[str, Any]:
        """Everything that is known, in plain values."""
        checkpoint, job = self.checkpoint, self.checkpoint.job
        return {
            "name": checkpoint.name,
            "path": str(checkpoint.path),
            "iteration": checkpoint.candidate.iteration,
            "complete": not self.problems,
            "problems": list(self.problems),
            "would_be_loaded": self.is_next,
            "set_back": bool(self.set_back),
            "usable_after_failure": self.is_usable,
            "format": checkpoint.format.value,
            "optimizer_format": job.optimizer_format.value if job else None,
            "reshardable": self.reshardable,
            "tp": job.tp if job else None,
            "pp": job.pp if job else None,
            "dp": job.dp if job else None,
            "world_size": job.world_size if job else None,
            "degrees": job.degrees if job else None,
            "consumed_samples": job.consumed_samples if job else None,
            "model": dict(job.model) if job else {},
            "bytes": checkpoint.nbytes,
            "has_hashes": has_hashes(checkpoint.path),
        }

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        job = self.checkpoint.job
        iteration = self.checkpoint.candidate.iteration
        sizes = "/".join(_number(n) for n in (job.tp, job.pp, job.dp)) if job else "-"
        degrees = f" ({job.degrees})" if job and job.degrees else ""
        return (
            ("* " if self.is_next else "  ") + ("release" if iteration is None else str(iteration)),
            "no" if self.problems else "yes",
            self.checkpoint.format.value,
            job.optimizer_format.value if job else "-",
            sizes + degrees,
            _number(job.world_size) if job else "-",
            {True: "yes", False: "no", None: "-"}[self.reshardable],
            _size(self.checkpoint.nbytes),
        )


def main(argv: Sequence[str]) -> int:
    """The subcommand."""
    given = _parser().parse_args(argv)
    try:
        return int(given.run(given))
    except CheckpointError as error:
        print(f"megatron-ntp checkpoint: {error}", file=sys.stderr)
    except OSError as error:
        print(f"megatron-ntp checkpoint: {unreadable(given.path, error)}", file=sys.stderr)
    return 2


def _list(given: argparse.Namespace) -> int:
    folder = list_folder(given.path)
    rows = rows_of(folder)
    if given.json:
        _print_json(folder, rows)
    elif rows:
        print(_table([_TITLES, *(row.cells() for row in rows)]))
        _print_notes(folder, rows)
    else:
        print(f"{folder.path} {'holds no checkpoint' if folder.exists else 'does not exist'}")
    return _status(rows)


def rows_of(folder: Folder) -> list[Row]:
    """Every checkpoint of a folder, newest first; the one that a job would load is marked."""
    examined = {candidate: examine(candidate) for candidate in folder.candidates}
    choice = choose(folder, look=examined.__getitem__)
    set_back = {skip.name: skip.why for skip in choice.skipped if skip.is_set_back}
    return [
        Row(
            checkpoint,
            checkpoint.problems,
            is_next=choice.chosen is not None and candidate == choice.chosen.candidate,
            set_back=set_back.get(candidate.name, ""),
        )
        for candidate, checkpoint in examined.items()
    ]


def _inspect(given: argparse.Namespace) -> int:
    row = _one(given.path)
    stored = row.checkpoint.stored
    if given.json:
        shapes = {key: list(shape) for key, shape in stored.tensors.items()} if stored else {}
        files = dict(stored.file_nbytes) if stored else {}
        print(json.dumps({**row.as_json(), "tensors": shapes, "files": files}, indent=1))
        return _status([row])
    facts = row.as_json()
    for name in _FACTS:
        print(f"{name.replace('_', ' '):<18} {_plain(facts[name])}")
    print(f"{'size':<18} {_size(row.checkpoint.nbytes)}")
    for name, value in sorted(facts["model"].items()):
        print(f"  {name:<34} {value}")
    if stored is not None:
        print(f"{len(stored.tensors)} tensors in {len(stored.file_nbytes)} files:")
        for key, shape in sorted(stored.tensors.items()):
            print(f"  {key:<72} {stored.dtypes[key]:<9} {list(shape)}")
    return _status([row])


def _verify(given: argparse.Namespace) -> int:
    row = _one(given.path)
    problems = list(row.problems)
    if not problems and row.checkpoint.format is Format.TORCH_DIST:
        problems = contents(row.checkpoint)
    verified = Row(row.checkpoint, tuple(problems), row.is_next)
    if given.json:
        print(json.dumps(verified.as_json(), indent=1))
    elif problems:
        print(f"{row.checkpoint.path} is damaged:\n  " + "\n  ".join(problems))
    else:
        how = "SHA-256 of every file" if has_hashes(row.checkpoint.path) else "CRC-32 of all data"
        print(f"{row.checkpoint.path} is whole: {_size(row.checkpoint.nbytes)} read, {how}")
    return _status([verified])


def _one(path: Path) -> Row:
    """The checkpoint at a path; of a folder of them, the newest."""
    if read_tracker(path).name is None and not list(path.glob("iter_*")):
        if not path.is_dir():
            raise CheckpointError(f"{path} is no folder")
        number = path.name.rpartition("_")[2]
        checkpoint = examine(Candidate(path, int(number) if number.isdecimal() else None))
        return Row(checkpoint, checkpoint.problems, True)
    rows = rows_of(list_folder(path))
    if not rows:
        raise CheckpointError(f"{path} holds {TRACKER_FILE} but no checkpoint")
    return rows[0]


def _status(rows: Sequence[Row]) -> int:
    """By the newest checkpoint; one that was set back by hand does not count."""
    newest = next((row for row in rows if not row.set_back), None)
    return 0 if newest is not None and newest.is_usable else NOT_USABLE


def _print_json(folder: Folder, rows: Sequence[Row]) -> None:
    facts = {
        "path": str(folder.path),
        "tracker": folder.tracker.name,
        "tracker_problem": folder.tracker.problem or None,
        "checkpoints": [row.as_json() for row in rows],
    }
    print(json.dumps(facts, indent=1))


def _print_notes(folder: Folder, rows: Sequence[Row]) -> None:
    if folder.tracker.problem:
        print(f"tracker: {folder.tracker.problem}")
    for row in rows:
        if row.problems:
            print(f"{row.checkpoint.name}: {told(row.problems)}")
        elif row.set_back:
            print(f"{row.checkpoint.name}: {row.set_back}")
    if any(row.is_next for row in rows):
        print("* would be loaded")
    elif rows:
        print("none of them can be loaded")


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp checkpoint",
        description="Look at checkpoints. Ends with 1 when the newest could not be loaded after a "
        "failure, and with 2 when there is no such folder or it cannot be read.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, help_text in (
        ("list", _list, "all checkpoints of a folder, newest first"),
        ("inspect", _inspect, "what one of them holds"),
        ("verify", _verify, "read every byte of one of them and check it"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text.capitalize())
        what = "a folder of checkpoints" if name == "list" else (
            "a checkpoint (iter_...), or a folder of them for the newest")  # fmt: skip
        command.add_argument("path", type=Path, metavar="PATH", help=what)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
    return parser
