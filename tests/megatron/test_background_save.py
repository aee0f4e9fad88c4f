"""What becomes of a save in the background, where no ranks are needed to see it.

The process that writes is started as on GPUs: a new Python, in which nothing is patched.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import queue
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron_ntp.integration.background_save import write_and_tell

FULL = Path("/dev/full")


def bucket(path: Path) -> tuple[str, str, tuple[list[Any], list[Any]]]:
    """What one thread writes."""
    item = WriteItem(MetadataIndex(path.name), WriteItemType.BYTE_IO)
    return str(path), path.name, ([(item, io.BytesIO(b"x" * 100_000))], [])


def write_saves(saves: list[list[Path]], results: Any) -> None:
    """In the writer: several saves; the last path of each is written by the main thread."""
    transforms = [_StorageWriterTransforms()]
    write = partial(FileSystemWriterAsync.write_preloaded_data_multithread, transforms, False)
    for paths in saves:
        write_and_tell(write, 0, [bucket(path) for path in paths], results)


def test_a_failure_in_any_thread_is_told(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    saves = [[tmp_path / "a", tmp_path / "b"], [FULL, tmp_path / "c"], [tmp_path / "d", FULL]]
    with context.Manager() as manager:
        results = manager.Queue()
        writer = context.Process(target=write_saves, args=(saves, results))
        writer.start()
        writer.join()  # its status tells nothing: torch crashes at exit where a write has failed
        written, *failures = [results.get_nowait() for _ in saves]
    assert [written[thread][0].index.fqn for thread in (0, 1)] == ["a", "b"]
    assert (tmp_path / "a").stat().st_size == (tmp_path / "b").stat().st_size == 100_000
    for failure in failures:
        assert isinstance(failure, OSError)
        assert failure.errno == errno.ENOSPC


def test_a_thread_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(fail))
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    write_saves([[tmp_path / "a", tmp_path / "b"]], results)
    assert results.get_nowait().errno == errno.EMFILE
