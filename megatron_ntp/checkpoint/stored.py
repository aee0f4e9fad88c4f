"""What a torch distributed checkpoint says about itself: keys, shapes, and the bytes they need.

`.metadata` names for every tensor its chunks, and for every chunk the shard file, the offset and
the length. From these follow the files that must be there, and how long each must be.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ntp.checkpoint.inert import Inert, kind_of, load_archive, load_pickle
from megatron_ntp.checkpoint.window import Window
from megatron_ntp.errors import DamagedFileError

METADATA = ".metadata"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One chunk of a tensor, or one object: where its bytes are.

    `offsets` is the chunk's place in its tensor, None for an object.
    """

    key: str
    offsets: tuple[int, ...] | None
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Stored:
    """The content of `.metadata`.

    Attributes:
        tensors: shape of every full tensor by key.
        dtypes: its type by key, as `float32`.
        items: every stored chunk and object.
        file_nbytes: the length that each shard file must have at least.
    """

    tensors: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    items: tuple[StoredItem, ...] = field(repr=False)
    file_nbytes: dict[str, int]

    def item(self, key_start: str) -> StoredItem | None:
        """The first object whose key starts so."""
        return next((item for item in self.items if item.key.startswith(key_start)), None)

    def all_keys(self) -> Iterator[str]:
        """Keys of tensors and objects, each once."""
        yield from dict.fromkeys(item.key for item in self.items)


def read_stored(folder: Path) -> Stored:
    """Reads `.metadata`.

    Raises:
        DamagedFileError: it is torn, or is not what torch writes.
        OSError: it cannot be read.
    """
    with open(folder / METADATA, "rb") as stream, _without_collector():
        found = load_pickle(stream, METADATA)
        try:
            return _stored(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{METADATA} is not the metadata of a torch distributed checkpoint ({error})"
            ) from error


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python would look through all objects again and again as they become more, and free none.

    That is most of the time with the metadata of a large job: 20 s for 300,000 chunks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _stored(metadata: Inert) -> Stored:
    tensors: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for key, entry in metadata.fields["state_dict_metadata"].items():
        size = entry.get("size")
        if size is not None:
            tensors[key] = tuple(int(extent) for extent in size)
            dtypes[key] = _dtype(entry.fields["properties"])
    items = tuple(
        _item(index, info) for index, info in (metadata.fields["storage_data"] or {}).items()
    )
    file_nbytes: dict[str, int] = {}
    for item in items:
        end = item.offset + item.nbytes
        file_nbytes[item.file] = max(file_nbytes.get(item.file, 0), end)
    return Stored(tensors, dtypes, items, file_nbytes)


def _item(index: Inert, info: Inert) -> StoredItem:
    offsets = index.get("offset")
    path = str(info.fields["relative_path"])
    if os.path.isabs(path) or ".." in Path(path).parts:
        raise ValueError(f"it names a shard file outside its folder: {path}")
    return StoredItem(
        key=str(index.fields["fqn"]),
        offsets=None if offsets is None else tuple(int(x) for x in offsets),
        file=path,
        offset=int(info.fields["offset"]),
        nbytes=int(info.fields["length"]),
    )


def _dtype(properties: Any) -> str:
    state = properties.get("__state__") or ()
    return kind_of(state[0]).rpartition(".")[2] if state else ""


def read_common(folder: Path, stored: Stored) -> dict[str, Any]:
    """The state that all ranks share: arguments, iteration, schedules. Tensors are stand-ins.

    A file of its own up to core 0.18, an object among the shards from 0.19 on.

    Raises:
        DamagedFileError: it is not there, or is torn.
        OSError: it cannot be read.
    """
    item = stored.item(COMMON_KEY)
    if item is None:
        path = folder / COMMON_FILE
        if not path.exists():
            raise DamagedFileError(f"{COMMON_FILE} is missing")
        with open(path, "rb") as stream:
            found = load_archive(stream, COMMON_FILE)
    else:
        with open(folder / item.file, "rb") as file:
            window = Window(file.fileno(), item.offset, item.nbytes)
            found = load_archive(window, f"the common state in {item.file}")
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, dict):
        raise DamagedFileError(f"the common state is a {type(found).__name__}, not a dict")
    return found
