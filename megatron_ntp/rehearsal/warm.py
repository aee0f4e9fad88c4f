"""The warm way to start ranks: this process imports torch and Megatron once, and ranks are forks.

Only the imports are shared. A forked rank is a process with its own memory, log, sockets and exit
status, and runs `megatron-ntp run` on the same words as a cold one. Nothing may start a thread here
before the last fork, since a thread does not survive one: `prepare` checks that.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ntp.errors import NTPError
from megatron_ntp.rehearsal.processes import die_with_parent, own_group


def prepare(log: Path) -> None:
    """Imports everything; what the imports print goes to `log`."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    _redirect(log)
    try:
        from megatron_ntp import cpu_runtime

        cpu_runtime.install()
        from megatron_ntp.integration import preload

        preload.import_all()
        # Megatron's parser reads the source of every configuration class, twice in each rank.
        cached: Any = functools.cache(inspect.getsource)
        inspect.getsource = cached
        cpu_runtime.cpu_arguments()  # builds the parser, so fills that cache
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise NTPError(
            f"importing Megatron has started {num_threads - 1} threads, and a fork would lose "
            "them. Use --cold"
        )
    gc.collect()
    gc.freeze()  # or the ranks' collector would touch, and so copy, every shared page


def start_warm(words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """A `Starter`: a fork of this process, which `prepare` has made ready."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        own_group(parent_pid)
        _redirect(log)
        os.environ.update(environment)
        from megatron_ntp.cli import main
        from megatron_ntp.integration import preload

        preload.start_result_queue(functools.partial(die_with_parent, os.getpid()))
        status = main(words)
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no teardown: the exit handlers are the parent's


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
