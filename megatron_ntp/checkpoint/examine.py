"""Whether one checkpoint is whole, and what it holds.

[Whole] means: the marker that is written last (`metadata.json`) is there; `.metadata` can be read;
every shard file that it names is there and long enough; the state that all ranks share can be read.
`contents` goes further and reads every byte.

[Content] Every tensor and object in a shard file is a torch archive, so it carries a CRC-32 of its
own. Megatron's `--verify-integrity` adds SHA-256 of each file, which covers `.metadata`, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ntp.checkpoint.folder import MARKER, Candidate
from megatron_ntp.checkpoint.inert import bad_members
from megatron_ntp.checkpoint.saved_job import SavedJob, describe
from megatron_ntp.checkpoint.stored import (
    COMMON_FILE,
    METADATA,
    Stored,
    StoredItem,
    read_common,
    read_stored,
)
from megatron_ntp.checkpoint.window import Window
from megatron_ntp.errors import DamagedFileError

HASHES = "integrity.json"

_BLOCK = 1 << 22


class Format(Enum):
    """How a checkpoint is stored. Megatron's names."""

    TORCH_DIST = "torch_dist"
    TORCH_DCP = "torch_dcp"
    LEGACY = "torch"
    ZARR = "zarr"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was examined.

    Attributes:
        problems: what makes it unusable for everyone; empty if it is whole.
        job: what it says about the job that saved it; None where that cannot be read.
        nbytes: size of all its files.
    """

    candidate: Candidate
    format: Format
    problems: tuple[str, ...]
    job: SavedJob | None = None
    stored: Stored | None = field(default=None, repr=False)
    nbytes: int = 0

    @property
    def is_whole(self) -> bool:
        return not self.problems

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def path(self) -> Path:
        return self.candidate.path


def examine(candidate: Candidate, look_at_sizes: bool = True) -> Checkpoint:
    """Looks at names, sizes and metadata of a checkpoint; its tensors are not read.

    Args:
        candidate: which one.
        look_at_sizes: ask the file system about every file, as many as the job that saved had
            ranks. Too much to be done by all ranks of a job at once.
    """
    try:
        sizes = _file_sizes(candidate.path, look_at_sizes)
    except OSError as error:
        return Checkpoint(candidate, Format.UNKNOWN, (_cannot_read(candidate.name, error),))
    format_, problem = _format(candidate.path, sizes)
    nbytes = sum(sizes.values()) if look_at_sizes else 0
    if problem:
        return Checkpoint(candidate, format_, (problem,), nbytes=nbytes)
    if format_ is not Format.TORCH_DIST:
        return Checkpoint(candidate, format_, (), nbytes=nbytes)
    problems: list[str] = []
    if MARKER not in sizes:
        problems.append(f"{MARKER} is missing: the save was not completed")
    stored, job = None, None
    try:
        stored = read_stored(candidate.path)
        problems += _missing_bytes(stored, sizes)
        job = describe(read_common(candidate.path, stored), stored)
    except OSError as error:
        name = os.path.basename(error.filename) if error.filename else METADATA
        if name not in sizes:
            problems.append(f"{name} is missing")
        else:
            problems.append(_cannot_read(name, error))
    except DamagedFileError as error:
        problems.append(str(error))
    return Checkpoint(candidate, format_, tuple(dict.fromkeys(problems)), job, stored, nbytes)


def contents(checkpoint: Checkpoint, share: int = 0, num_shares: int = 1) -> list[str]:
    """Reads every byte of a whole checkpoint; what is wrong with them. See [Content].

    The work can be dealt out: whoever is given `share` of `num_shares` reads its part of the files.
    """
    names = sorted(checkpoint.stored.file_nbytes) if checkpoint.stored else []
    if (checkpoint.path / COMMON_FILE).exists():
        names.append(COMMON_FILE)
    hashes, problem = read_hashes(checkpoint.path)
    names += sorted(set(hashes) - set(names))
    found = [problem] if problem and share == 0 else []
    items = _items_by_file(checkpoint)
    for name in names[share::num_shares]:
        try:
            found += _bad_content(checkpoint.path, name, hashes.get(name), items.get(name, ()))
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(_cannot_read(name, error))
    return found


def read_hashes(path: Path) -> tuple[dict[str, str], str]:
    """SHA-256 by file that Megatron noted when it saved, and a problem with the list, if any."""
    try:
        listed = json.loads((path / HASHES).read_text())
        algorithm, files = listed.get("algorithm", "sha256"), listed["files"]
        if algorithm != "sha256":
            return {}, f"{HASHES} is of algorithm {algorithm!r}, which is not known here"
        if any(os.path.basename(name) != name for name in files):
            return {}, f"{HASHES} names a file outside its folder"
        return {str(name): str(value) for name, value in files.items()}, ""
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, _cannot_read(HASHES, error)
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}, f"{HASHES} is torn"


def has_hashes(path: Path) -> bool:
    """Whether content hashes were written when it was saved."""
    return (path / HASHES).is_file()


def _items_by_file(checkpoint: Checkpoint) -> dict[str, list[StoredItem]]:
    found: dict[str, list[StoredItem]] = {}
    for item in checkpoint.stored.items if checkpoint.stored else ():
        found.setdefault(item.file, []).append(item)
    return found


def _bad_content(
    folder: Path, name: str, sha256: str | None, items: Iterable[StoredItem]
) -> Iterator[str]:
    with open(folder / name, "rb") as file:
        if sha256 is not None:
            if _sha256(file) != sha256:
                yield f"{name} does not match its SHA-256 in {HASHES}"
            return
        if name == COMMON_FILE:
            yield from bad_members(file, name)
        for item in items:
            window = Window(file.fileno(), item.offset, item.nbytes)
            yield from bad_members(window, f"{item.key} in {name}")


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _file_sizes(path: Path, look: bool) -> dict[str, int]:
    """Size of every file by name, and 0 for folders; without a look, any size will do."""
    if not look:
        return {entry.name: sys.maxsize for entry in os.scandir(path)}
    return {
        entry.name: entry.stat().st_size if entry.is_file() else 0 for entry in os.scandir(path)
    }


def _format(path: Path, sizes: dict[str, int]) -> tuple[Format, str]:
    """The format, and why nobody can say it."""
    if MARKER in sizes:
        try:
            backend = json.loads((path / MARKER).read_text())["sharded_backend"]
        except OSError as error:
            return Format.UNKNOWN, _cannot_read(MARKER, error)
        except (ValueError, KeyError, TypeError):
            return Format.UNKNOWN, f"{MARKER} is torn"
        known = [format_ for format_ in Format if format_.value == backend]
        return (known[0], "") if known else (Format.UNKNOWN, f"unknown format {backend!r}")
    if any(name.startswith("mp_rank_") for name in sizes):
        return Format.LEGACY, ""
    if not sizes:
        return Format.UNKNOWN, "the folder is empty"
    if COMMON_FILE not in sizes and METADATA in sizes and not _has_common_state(path):
        return Format.TORCH_DCP, ""
    return Format.TORCH_DIST, ""  # one whose save was not completed


def _has_common_state(path: Path) -> bool:
    try:
        return read_stored(path).item("common_state/") is not None
    except (DamagedFileError, OSError):
        return True  # cannot be told: the reader that comes next says why


def _missing_bytes(stored: Stored, sizes: dict[str, int]) -> Iterable[str]:
    for name, needed in sorted(stored.file_nbytes.items()):
        if name not in sizes:
            yield f"{name} is missing"
        elif sizes[name] < needed:
            yield f"{name} has {sizes[name]:,} of {needed:,} bytes"


def _cannot_read(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror or error}"
