"""Makes an agent of a supervisor start its ranks as forks of itself, which has imported Megatron.

A start then costs the imports once instead of once per rank. A rank stays what it is otherwise: a
process of its own, child of the agent of torch.distributed.elastic, with its own session, variables
and output, which signals reach as they would reach any. `scripts/chaos.py --cold` does without.

A fork shows the variables of its agent in /proc, so it leaves its process id in the working folder.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PIDS = "pids"
_FIRST_DESCRIPTOR, _MOST_DESCRIPTORS = 3, 4096


def install() -> None:
    """In an agent, before it does anything: imports, and changes how it starts processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from megatron_ntp.rehearsal import warm

    warm.prepare(Path(os.devnull))
    subprocess_handler.Popen = ForkedRank


class ForkedRank(subprocess.Popen[bytes]):
    """`Popen` for what an agent starts."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self._variables = dict(env)
        super().__init__(args, env=env, **options)

    def _execute_child(self, args: Sequence[str], *unused: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(args, self._variables)
        self._child_created = True


def _become_rank(args: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """In the fork: `python -m MODULE WORDS`, as far as possible as if this were a new Python."""
    status = 1
    try:
        os.setsid()
        os.closerange(_FIRST_DESCRIPTOR, _MOST_DESCRIPTORS)
        _reset_signals()
        os.environ.clear()
        os.environ.update(variables)
        os.execvp = _run_module  # type: ignore[assignment]  # how launchers.rank goes on to the training
        status = _run_module(args[0], args)
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no teardown: the exit handlers are the agent's


def _reset_signals() -> None:
    """What a new program would find: handlers gone, what was ignored still ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def _run_module(python: str, args: Sequence[str]) -> int:
    """Runs `python -m MODULE WORDS` in this process."""
    _, flag, module, *words = args
    assert flag == "-m", args
    if module == "megatron_ntp":
        return _train(words)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _train(words: Sequence[str]) -> int:
    from megatron_ntp.atomic import write_atomically
    from megatron_ntp.cli import main
    from megatron_ntp.integration import preload

    folder = Path(PIDS)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / os.environ["RANK"], str(os.getpid()))
    preload.start_result_queue(_die_with_rank)
    sys.exit(main(words))


def _die_with_rank() -> None:
    """In the server of the queue: it is of no use without its rank."""
    from megatron_ntp.rehearsal.processes import die_with_parent

    die_with_parent(os.getppid())
