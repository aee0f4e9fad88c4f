"""Blocks of stored tensors: right values, and no byte more than is asked for."""

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import SHARD, Maker, truncate
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from megatron_ntp.checkpoint.window import Window
from megatron_ntp.errors import CheckpointError
from megatron_ntp.integration import context
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.shard_reader import (
    Numbers,
    ShardReader,
    find_numbers,
    get_filesystem_reader,
    read_block,
)
from megatron_ntp.plan.topology import Topology
from megatron_ntp.settings import NTPSettings

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
LARGEST_DESCRIPTION_NBYTES = 1500


class Planner:
    """Takes what a reader gives it."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self.targets = targets
        self.objects: dict[str, bytes] = {}

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.dest_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, item: ReadItem, stream: Any) -> None:
        self.objects[item.dest_index.fqn] = stream.read()


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)


def read(
    reader: FileSystemReader, key: str, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> torch.Tensor:
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    dtype = metadata.state_dict_metadata[key].properties.dtype
    target = torch.zeros(lengths, dtype=dtype)
    zeros = torch.Size([0] * len(lengths))
    index = MetadataIndex(key, zeros)
    item = ReadItem(LoadItemType.TENSOR, index, zeros, index, torch.Size(offsets),
                    torch.Size(lengths))  # fmt: skip
    reader.read_data(LoadPlan([item]), Planner({key: target})).wait()
    return target


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_block_of_any_tensor(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    values = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    path = tmp_path_factory.getbasetemp() / "block"
    path.write_bytes(b"xyz" + values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    with open(path, "rb") as file:
        window = Window(file.fileno(), 3, path.stat().st_size - 3)
        lengths = [stop - start for start, stop in spans]
        found = read_block(
            window, Numbers(0, tuple(shape)), [start for start, _ in spans], lengths, dtype
        )
    assert torch.equal(found, values[tuple(slice(*span) for span in spans)])


@pytest.mark.parametrize("offsets, lengths", [
    ((0, 0), (96, 128)), ((32, 0), (16, 128)), ((0, 64), (96, 64)), ((8, 64), (3, 64)),
])  # fmt: skip
def test_only_the_block_is_read(
    tmp_path: Path, offsets: tuple[int, int], lengths: tuple[int, int]
) -> None:
    values = torch.randn(96, 128)
    save(tmp_path, {"w": values, "other": torch.randn(500)})
    reader = ShardReader(tmp_path)
    found = read(reader, "w", offsets, lengths)
    (r0, c0), (rows, columns) = offsets, lengths
    assert torch.equal(found, values[r0 : r0 + rows, c0 : c0 + columns])
    wanted = 4 * rows * columns
    assert wanted <= reader.nbytes_read <= wanted + LARGEST_DESCRIPTION_NBYTES


def test_a_reader_that_keeps_the_metadata_reads_blocks_too(tmp_path: Path) -> None:
    """--ckpt-assume-constant-structure."""
    save(tmp_path, {"w": torch.randn(96, 128)})
    with_ntp = NTPContext(NTPSettings(ntp=True), Topology.from_degrees((2, 1), 2, None), 0)
    context.activate(with_ntp)
    try:
        reader = get_filesystem_reader(CachedMetadataFileSystemReader, tmp_path)
    finally:
        context.activate(None)
    assert reader.read_metadata() is reader.read_metadata(), "kept"
    read(reader, "w", (0, 0), (8, 128))
    assert reader.nbytes_read <= 4 * 8 * 128 + LARGEST_DESCRIPTION_NBYTES


def test_the_count_is_what_the_process_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, {"w": torch.randn(64, 64)})
    reader = ShardReader(tmp_path)
    reader.read_metadata()
    sizes = []
    real = os.preadv

    def counting(*args: Any) -> int:
        sizes.append(real(*args))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counting)
    read(reader, "w", (0, 0), (32, 64))
    assert reader.nbytes_read == sum(sizes)


def test_short_runs_are_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(64, 64)
    save(tmp_path, {"w": values})
    calls = itertools.count()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (next(calls), real(*args))[1])
    assert torch.equal(read(ShardReader(tmp_path), "w", (0, 8), (64, 4)), values[:, 8:12])
    assert next(calls) < 30


def columns(size: int) -> torch.Tensor:
    return torch.randn(size, size).t()


def part_of_storage(size: int) -> torch.Tensor:
    return torch.randn(size * size + 3)[3:].view(size, size)


@pytest.mark.parametrize("make", [columns, part_of_storage])
def test_tensors_that_are_stored_in_another_order(tmp_path: Path, make: Any) -> None:
    values = make(32)
    torch.save(values, tmp_path / "it")
    with open(tmp_path / "it", "rb") as file:
        window = Window(file.fileno(), 0, (tmp_path / "it").stat().st_size)
        assert find_numbers(window, 4) is None
    save(tmp_path / "c", {"w": values})
    assert torch.equal(read(ShardReader(tmp_path / "c"), "w", (3, 4), (5, 6)), values[3:8, 4:10])


def test_types_that_have_no_storage_class(tmp_path: Path) -> None:
    values = torch.arange(64).view(8, 8).to(torch.uint16)
    save(tmp_path, {"w": values})
    assert torch.equal(read(ShardReader(tmp_path), "w", (2, 0), (3, 8)), values[2:5])


def test_same_as_torchs_reader(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(9, 5 + i).to(dtype) for i, dtype in enumerate(DTYPES)}
    save(tmp_path, {**state, "object": {"a": [1, 2]}})
    for reader in (ShardReader(tmp_path), FileSystemReader(tmp_path)):
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_file_that_was_cut_since_is_named(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1)
    reader = ShardReader(path)
    truncate(path / SHARD, 2500)
    with pytest.raises(CheckpointError, match=rf"{SHARD} cannot be read as its metadata says"):
        for key in ("decoder.weight", "embedding.word_embeddings.weight"):
            read(reader, key, (0, 0), (12, 8))
        read(reader, "optimizer.state.exp_avg.decoder.weight", (0, 0), (12, 8))
