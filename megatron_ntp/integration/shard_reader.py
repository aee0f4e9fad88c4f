"""Reads from a checkpoint's files what a rank asks for, and no more.

torch's own reader loads a stored chunk whole and then narrows it. A sync shard of another degree
touches two or three chunks of a tensor, so a rank would read up to three times what it keeps. Here
the place of the numbers inside a chunk's archive is looked up, and only wanted runs are read.

[Runs] A block of a row-major tensor is a list of equally long contiguous runs. Where they are
shorter than `_SHORTEST_RUN_NBYTES` a call for each is not worth it, and everything from the first
to the last is read.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_ntp.checkpoint.inert import load_pickle, open_archive, pickle_name
from megatron_ntp.checkpoint.window import Window
from megatron_ntp.errors import CheckpointError, DamagedFileError
from megatron_ntp.integration import context

_SHORTEST_RUN_NBYTES = 256
_LOCAL_HEADER_NBYTES = 30


@dataclass(frozen=True)
class Numbers:
    """Where the numbers of one stored chunk are: a plain row-major block at `offset`."""

    offset: int
    shape: tuple[int, ...]


class ShardReader(FileSystemReader):
    """torch's reader of a checkpoint folder, reading parts of chunks.

    Args:
        path: the folder.
        reads_metadata: another reader of it, which may keep what it has read.

    Attributes:
        nbytes_read: bytes read from shard files, metadata left out.
    """

    def __init__(self, path: Any, reads_metadata: FileSystemReader | None = None) -> None:
        super().__init__(path)
        self._reads_metadata = reads_metadata or FileSystemReader(path)
        self.nbytes_read = 0
        self._dtypes: dict[str, torch.dtype] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._reads_metadata.read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._dtypes = {
            key: entry.properties.dtype
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of a rank's plan, file by file in the order of their bytes."""
        places = [(self.storage_data[item.storage_index], item) for item in plan.items]
        by_file: dict[str, list[tuple[Any, ReadItem]]] = {}
        for place, item in places:
            by_file.setdefault(place.relative_path, []).append((place, item))
        for name, wanted in by_file.items():
            path = Path(self.path) / name
            wanted.sort(key=lambda pair: pair[0].offset)
            try:
                with open(path, "rb", buffering=0) as file:
                    for place, item in wanted:
                        self._read_item(file.fileno(), place, item, planner)
            except (OSError, EOFError, zipfile.BadZipFile, DamagedFileError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as its metadata says: {error}. Look at the disk, and "
                    f"at `megatron-ntp checkpoint verify {self.path}`"
                ) from error
        ntp = context.current()
        if ntp is not None:
            ntp.checkpoint_nbytes_read += self.nbytes_read
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, descriptor: int, place: Any, item: ReadItem, planner: LoadPlanner) -> None:
        window = Window(descriptor, place.offset, place.length)
        if item.type == LoadItemType.BYTE_IO or place.transform_descriptors:
            self._read_whole(window, place, item, planner)
        else:
            dtype = self._dtypes[item.storage_index.fqn]
            numbers = find_numbers(window, dtype.itemsize)
            if numbers is None:
                self._read_whole(window, place, item, planner)
            else:
                block = read_block(window, numbers, item.storage_offsets, item.lengths, dtype)
                target = planner.resolve_tensor(item).detach()
                target.copy_(block.view(target.shape))
                planner.commit_tensor(item, target)
        self.nbytes_read += window.nbytes_read

    def _read_whole(self, window: Window, place: Any, item: ReadItem, planner: LoadPlanner) -> None:
        """An object, or a tensor that is stored in a way that cannot be read in part."""
        buffer = bytearray(place.length)
        window.fill(0, memoryview(buffer))
        stream: Any = self.transforms.transform_load_stream(
            item, place.transform_descriptors or (), io.BytesIO(buffer)
        )
        plain = io.BytesIO(stream.read(-1))
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, plain)
            return
        tensor = torch.load(plain, map_location="cpu", weights_only=True)
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)


def find_numbers(window: Window, itemsize: int) -> Numbers | None:
    """Finds the numbers in an archive of one tensor.

    Returns:
        None if they are not one uncompressed row-major block.
    """
    with open_archive(window, "a stored tensor") as archive:
        member = pickle_name(archive, "a stored tensor")
        with archive.open(member) as stream:
            tensor = load_pickle(stream, "a stored tensor")
        if not getattr(tensor, "kind", "").endswith("._rebuild_tensor_v2"):
            return None
        storage, start, shape, strides = tensor.args[:4]
        name = member.removesuffix("data.pkl") + f"data/{storage.args[2]}"
        if name not in archive.namelist():
            return None
        info = archive.getinfo(name)
    is_plain = start == 0 and info.compress_type == zipfile.ZIP_STORED
    if not is_plain or strides != _row_major(shape):
        return None
    if info.file_size != math.prod(shape) * itemsize:
        return None
    header = bytearray(_LOCAL_HEADER_NBYTES)
    window.fill(info.header_offset, memoryview(header))
    name_nbytes, extra_nbytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    offset = info.header_offset + _LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
    return Numbers(offset, tuple(shape))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def read_block(
    window: Window,
    numbers: Numbers,
    offsets: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Reads a block of a stored tensor. See [Runs]."""
    block = torch.empty(tuple(lengths), dtype=dtype)
    if block.numel() == 0:
        return block
    start, itemsize = numbers.offset, block.element_size()
    run_numel, runs = _runs(numbers.shape, offsets, lengths)
    buffer = memoryview(block.view(-1).view(torch.uint8).numpy())
    run_nbytes = run_numel * itemsize
    if run_nbytes >= _SHORTEST_RUN_NBYTES or run_numel == block.numel():
        for index, first in enumerate(runs):
            part = buffer[index * run_nbytes : (index + 1) * run_nbytes]
            window.fill(start + first * itemsize, part)
        return block
    firsts = list(runs)
    span = bytearray((firsts[-1] + run_numel - firsts[0]) * itemsize)
    window.fill(start + firsts[0] * itemsize, memoryview(span))
    source, target = np.frombuffer(span, np.uint8), np.frombuffer(buffer, np.uint8)
    for index, first in enumerate(firsts):
        begin = (first - firsts[0]) * itemsize
        target[index * run_nbytes : (index + 1) * run_nbytes] = source[begin : begin + run_nbytes]
    return block


def _runs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[int, Iterator[int]]:
    """Length of the runs of a block, and where each begins, in elements."""
    strides = _row_major(shape)
    inner = len(shape)
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dimension inner - 1 is the last that is cut: its own range is contiguous.
    cut = max(inner - 1, 0)
    run_numel = math.prod(lengths[cut:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    outer = np.zeros((), np.int64)
    for length, stride in zip(lengths[:cut], strides[:cut], strict=True):
        outer = outer[..., None] + np.arange(length) * stride
    return run_numel, (base + int(first) for first in outer.reshape(-1))


def get_filesystem_reader(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `_get_filesystem_reader` of Megatron's torch strategy.

    Readers of other storage stay what they are; those that only keep the metadata
    (--ckpt-assume-constant-structure) read tensors as torch's does.
    """
    reader = original(*args, **kwargs)
    is_torchs = (
        isinstance(reader, FileSystemReader)
        and type(reader).read_data is FileSystemReader.read_data
        and type(reader.fs) is FileSystem
    )
    if not is_torchs or context.current() is None:
        return reader
    return ShardReader(reader.path, reads_metadata=reader)
