"""Saves in the background (--async-save): a writer that fails or dies is heard of.

A rank hands its part of a checkpoint to a writer, a process of its own, and goes on training. Of
what goes wrong there, Megatron hears only if it does in the last of the writer's threads. Where
another thread fails, or the process is killed, the writer has ended without a word: no later save
ever comes to its end, and the next one waits for it for good.

Here every failure is the writer's result, and a writer that has ended counts as done. So Megatron
looks for its result, and all ranks learn together that it is an error or that there is none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_ntp.integration import context

LOOK_AGAIN_S = 0.1
_ENDED = -1  # in place of the number of the save that the writer would have called done


def get_save_function_and_args(original: Callable[..., Any], self: Any) -> tuple[Any, Any, Any]:
    """Wraps `FileSystemWriterAsync.get_save_function_and_args`. Saves at once write so, too.

    Returns:
        What writes this rank's part, what stages it, and the arguments of what writes.
    """
    write, stage, arguments = original(self)
    if write is not None and context.current() is not None:
        write = partial(write_and_tell, write)
    return write, stage, arguments


def write_and_tell(write: Callable[..., None], rank: int, buckets: Any, results: Any) -> None:
    """Runs in the writer, where nothing of Megatron is patched unless it is a fork.

    Args:
        write: what Megatron would run there, with the same arguments.
        rank: of the process whose part is written.
        buckets: what is written, a bucket for each thread.
        results: queue of that process; gets what `write` would put there, or the first failure.
    """
    written: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _noting_failures() as failures:
        try:
            write(rank, buckets, written)
        except Exception as error:
            failures.append(error)
    with suppress(ConnectionError, EOFError):  # the job has ended meanwhile: nobody listens
        results.put(_portable(failures[0]) if failures else written.get_nowait())


@contextmanager
def _noting_failures() -> Iterator[list[Exception]]:
    """What fails in any thread: Megatron itself keeps only the type of it."""
    failures: list[Exception] = []
    original = FileSystemWriterAsync.__dict__["write_preloaded_data"]

    @wraps(original.__func__)
    def write(*args: Any, results_queue: Any, count_queue: Any, **kwargs: Any) -> Any:
        try:
            result = original.__func__(*args, results_queue=None, count_queue=None, **kwargs)
        except Exception as error:
            result = kwargs["local_proc_idx"], error
        if isinstance(result[1], Exception):
            failures.append(result[1])  # before the thread that waits for this one goes on
        if results_queue is not None:
            results_queue.put(result)
        if count_queue is not None:
            count_queue.get()
            count_queue.task_done()
        return result

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
    try:
        yield failures
    finally:
        FileSystemWriterAsync.write_preloaded_data = original


def _portable(error: Exception) -> Exception:
    """The error in a form that can be pickled, whatever it holds."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror)
    return RuntimeError(f"{type(error).__name__}: {error}")


class _ToWriter:
    """A queue to the writer whose `join` also ends when the writer has ended."""

    def __init__(self, items: Any, writer: Any) -> None:
        self._items, self._writer = items, writer

    def put(self, item: Any) -> None:
        self._items.put(item)

    def join(self) -> None:
        taken = threading.Thread(target=self._items.join, daemon=True)
        taken.start()
        while taken.is_alive() and self._writer.is_alive():
            taken.join(LOOK_AGAIN_S)


def schedule_async_call(original: Callable[..., None], self: Any, async_req: Any) -> None:
    """Wraps `PersistentAsyncCaller.schedule_async_call`, which waits until a save is staged."""
    if context.current() is None or async_req.async_fn is None:
        return original(self, async_req)
    if self.process is None:
        self.process = self._get_process(torch.distributed.get_rank())
    for items in (self._persistent_queue, self._persistent_preload_q):
        items.cancel_join_thread()  # what no writer reads any more must not hold up the exit
    self._persistent_preload_q = _ToWriter(self._persistent_preload_q, self.process)
    try:
        return original(self, async_req)
    finally:
        del self._persistent_preload_q  # the class has the queue itself


def is_current_async_call_done(
    original: Callable[..., bool], self: Any, blocking: bool = False, no_dist: bool = False
) -> bool:
    """Wraps `PersistentAsyncCaller.is_current_async_call_done`.

    It would wait for a writer that has ended as for one that is busy.
    """
    while context.current() is not None and self.process is not None and self.cur_item is None:
        has_ended = not self.process.is_alive()  # before looking for what it said last
        try:
            self.cur_item = self._persistent_comp_q.get(timeout=LOOK_AGAIN_S if blocking else 0)
        except queue.Empty:
            if has_ended:
                self.cur_item = _ENDED
            elif not blocking:
                break
    return original(self, blocking, no_dist)


def close(original: Callable[..., None], self: Any, abort: bool = False) -> None:
    """Wraps `PersistentAsyncCaller.close`, which asks the writer to end and waits for its word."""
    if self.process is None:
        return original(self, abort)
    self._persistent_queue = _ToWriter(self._persistent_queue, self.process)
    try:
        return original(self, abort)
    finally:
        del self._persistent_queue
