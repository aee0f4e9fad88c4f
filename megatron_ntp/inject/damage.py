"""Damages the newest whole checkpoint of a folder, as disks, people and lost writes do."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.examine import Checkpoint
from megatron_ntp.checkpoint.folder import TRACKER, list_folder
from megatron_ntp.checkpoint.window import Window
from megatron_ntp.errors import CheckpointError
from megatron_ntp.inject.grammar import How

_KEPT_SHARE = 0.6
_NUMBER_NBYTES, _HIGH_BYTE = 4, 3  # of fp32, and of two bf16
_EXPONENT_BIT = 0x40
_ZIP_LENGTHS_AT = 26  # in a member's local header: lengths of its name and of what follows it


def damage(folder: Path, how: How) -> str:
    """Does it, and says what was done to which file.

    Raises:
        CheckpointError: there is no whole checkpoint in the folder, or no tracker to remove.
    """
    if how is How.NO_TRACKER:
        try:
            (folder / TRACKER).unlink()
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no {TRACKER} to remove") from None
        return f"removed {TRACKER}"
    checkpoint = choose(list_folder(folder)).chosen
    if checkpoint is None or checkpoint.stored is None:
        raise CheckpointError(f"{folder} holds no whole checkpoint to damage")
    return _truncate(checkpoint) if how is How.TRUNCATE else _flip(checkpoint)


def _truncate(checkpoint: Checkpoint) -> str:
    assert checkpoint.stored is not None
    sizes = checkpoint.stored.file_nbytes
    name = max(sizes, key=lambda file: sizes[file])
    kept = int(sizes[name] * _KEPT_SHARE)
    os.truncate(checkpoint.path / name, kept)
    return f"cut {checkpoint.name}/{name} from {sizes[name]} to {kept} bytes"


def _flip(checkpoint: Checkpoint) -> str:
    """The high bit of an exponent amid the largest tensor: all sizes stay, a weight explodes."""
    assert checkpoint.stored is not None
    tensors = [item for item in checkpoint.stored.items if item.offsets is not None]
    item = max(tensors, key=lambda stored: stored.nbytes)
    with open(checkpoint.path / item.file, "r+b") as file:
        at = item.offset + _middle_of_numbers(Window(file.fileno(), item.offset, item.nbytes))
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ _EXPONENT_BIT]))
    return f"flipped a bit of {item.key} in {checkpoint.name}/{item.file}"


def _middle_of_numbers(archive: Window) -> int:
    """Where in a tensor's archive its numbers are: in the largest member, which is stored as is."""
    with zipfile.ZipFile(archive) as members:
        largest = max(members.infolist(), key=lambda member: member.file_size)
    archive.seek(largest.header_offset + _ZIP_LENGTHS_AT)
    name_nbytes, extra_nbytes = struct.unpack("<HH", archive.read(4))
    start = largest.header_offset + _ZIP_LENGTHS_AT + 4 + name_nbytes + extra_nbytes
    return int(start + largest.file_size // 2 // _NUMBER_NBYTES * _NUMBER_NBYTES + _HIGH_BYTE)
