"""A process that has imported torch and Megatron, and forks ranks on request.

Importing Megatron takes seconds and most of a rank's memory. A zygote pays once: a rank made by
fork starts in milliseconds and shares the pages. Started by ranks.py, one zygote for each version
of Megatron; it speaks pickled dicts over two pipes, and never uses a thread or a socket itself,
since neither survives a fork.

A job is N ranks and one process that keeps the TCPStore they meet in. The store is apart from the
ranks so that any of them may be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

ADDRESS = "127.0.0.1"
STORE_WAIT_S = 20.0
STACKS_WAIT_S = 0.5
_PR_SET_PDEATHSIG = 1


# --- messages -----------------------------------------------------------------------------------


def write_message(stream: BinaryIO, message: Any) -> None:
    """One pickled object, with its length in front."""
    data = pickle.dumps(message)
    stream.write(struct.pack("!Q", len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """The next object, or None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(stream.read(struct.unpack("!Q", header)[0]))


def end_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal when the parent dies: a killed test run must leave nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)


# --- in a rank ----------------------------------------------------------------------------------


def load_function(target: dict[str, str]) -> Any:
    """A module-level function, by module name or, where that is not importable, from its file."""
    try:
        module = importlib.import_module(target["module"])
    except ModuleNotFoundError:
        module = _load_file(target["module"], target["file"])
    return functools.reduce(getattr, target["name"].split("."), module)


def _load_file(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _redirect(path: str, stream: Any, descriptor: int) -> None:
    stream.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, descriptor)
    os.close(target)


def _rank_main(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the job's function as one rank; its result or traceback goes to a file."""
    folder = job["folder"]
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(os.path.join(folder, f"{rank}.out"), sys.stdout, 1)
    _redirect(os.path.join(folder, f"{rank}.err"), sys.stderr, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(job["environment"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["world_size"]),
        LOCAL_WORLD_SIZE=str(job["world_size"]),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # as under torchrun: the store is not a rank's own
    )
    status = 1
    try:
        result = load_function(job["function"])(**job["arguments"])
        with open(os.path.join(folder, f"{rank}.result"), "wb") as file:
            pickle.dump(result, file)
        status = 0
    except SystemExit as exit_request:
        code = exit_request.code
        status = code if isinstance(code, int) else int(code is not None)
        if status:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no teardown: a rank must not run the zygote's exit handlers


def _store_main(port_writer: int) -> NoReturn:
    """Keep the store until killed, and write the port it was given."""
    from torch.distributed import TCPStore

    end_with_parent(signal.SIGKILL)
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    os.write(port_writer, str(store.port).encode())
    os.close(port_writer)
    while True:
        signal.pause()


# --- in the zygote ------------------------------------------------------------------------------


def _start_store() -> tuple[int, int]:
    """Process id and port of a job's store."""
    reader, writer = os.pipe()
    store_pid = os.fork()
    if store_pid == 0:
        os.close(reader)
        _store_main(writer)
    os.close(writer)
    port = os.read(reader, 16) if wait([reader], STORE_WAIT_S) else b""
    os.close(reader)
    if not port:
        os.kill(store_pid, signal.SIGKILL)
        os.waitpid(store_pid, 0)
        raise RuntimeError(f"a job's TCPStore did not open within {STORE_WAIT_S:.0f} s")
    return store_pid, int(port)


def _wait(pids: dict[int, int], deadline: float, grace_s: float | None) -> dict[int, int]:
    """Exit status by rank; ranks that had to be killed are left out.

    The first failure starts the grace: the others may still fail by themselves and say why.
    """
    statuses: dict[int, int] = {}
    waiting = dict(pids)
    while waiting and time.monotonic() < deadline:
        for pid, rank in list(waiting.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del waiting[pid]
            statuses[rank] = os.waitstatus_to_exitcode(status)
            if statuses[rank] != 0 and grace_s is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.005)
    if waiting:
        _kill(list(waiting))
    return statuses


def _kill(pids: list[int]) -> None:
    """End ranks, after each has written where it hangs."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_job(job: dict[str, Any]) -> dict[int, int]:
    """Fork the ranks of a job and wait for them; exit status by rank, killed ones left out."""
    gc.collect()
    gc.freeze()  # or the ranks' collector would touch, and so copy, every shared page
    deadline = time.monotonic() + job["timeout_s"]
    store_pid, port = _start_store()
    pids: dict[int, int] = {}
    try:
        for rank in range(job["world_size"]):
            pid = os.fork()
            if pid == 0:
                _rank_main(job, rank, port)
            pids[pid] = rank
        return _wait(pids, deadline, job["grace_s"])
    finally:
        for pid in pids:
            _end_group(pid)
        os.kill(store_pid, signal.SIGKILL)
        os.waitpid(store_pid, 0)


def _end_group(pid: int) -> None:
    """End what a rank has started: Megatron's checkpoints leave a queue server of 400 MB."""
    with contextlib.suppress(ProcessLookupError):  # nothing may be left
        os.killpg(pid, signal.SIGKILL)


def _check_can_fork() -> None:
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise RuntimeError(f"the zygote has {num_threads} threads; its forks could hang")


def main() -> None:
    """Import, say so, then serve jobs until standard input ends."""
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of run_job's clean-up
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imports print must not mix with the replies
    # Megatron's parser reads the source of every configuration class, twice in each rank.
    inspect.getsource = functools.cache(inspect.getsource)
    from megatron_ntp import cpu_runtime
    from megatron_ntp.integration import preload
    from megatron_ntp.integration.catalog import ROWS

    cpu_runtime.install()
    preload.import_all()
    for row in ROWS:
        importlib.import_module(row.replacement.partition(":")[0])
    cpu_runtime.cpu_arguments()  # builds the parser, so fills that cache
    _check_can_fork()
    write_message(replies, {"ready": True})
    while (job := read_message(requests)) is not None:
        try:
            write_message(replies, {"statuses": run_job(job)})
        except Exception:
            write_message(replies, {"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
