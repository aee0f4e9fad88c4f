"""``megatron-ntp run``: start a training script in this process as Python itself would.

Used by every rank, for example ``torchrun ... -m megatron_ntp run SCRIPT.py FLAGS``. What changes
Megatron is set up before the script starts, so that the script stays what it is.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from megatron_ntp import install_from_argv, watching


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp run",
        description="Run a training script in this process. Words after SCRIPT are its own flags.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run Megatron on CPU with gloo, for rehearsals and tests; refused where a GPU is "
        "visible; adds the flags a CPU run needs",
    )
    parser.add_argument(
        "--loss-log",
        metavar="FILE",
        help="append each step's losses to FILE as JSON lines, at full precision (by the last "
        "rank); with or without --ntp",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script, a Python file")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its flags")
    return parser


def run(argv: Sequence[str]) -> int:
    """The subcommand. Every rank of a job calls it with the same words."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r} (working folder: {os.getcwd()})")
    arguments = list(options.arguments)
    _put_script_folder_first(options.script)  # before megatron is imported: it may lie there
    try:
        watching.begin(arguments)
        if options.cpu:
            arguments += _cpu_arguments(parser, arguments)
        sys.argv = [options.script, *arguments]
        install_from_argv()
        watching.watch()
        if options.loss_log:
            from megatron_ntp.integration import loss_log

            loss_log.install(options.loss_log)
        runpy.run_path(options.script, run_name="__main__")
    except Exception as error:
        from megatron_ntp import reporting

        if not reporting.report(error):
            raise
        return reporting.STATUS
    return 0


def _cpu_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Puts the CPU runtime in; returns the flags that it adds."""
    from megatron_ntp import cpu_runtime

    try:
        cpu_runtime.check_arguments(arguments)
        cpu_runtime.install()
    except (ValueError, cpu_runtime.GpuVisibleError) as refusal:
        parser.error(str(refusal))
    return cpu_runtime.cpu_arguments()


def _put_script_folder_first(script: str) -> None:
    """Make the script's folder ``sys.path[0]``, in place of the one Python put there for us.

    That one is the working folder (``python -m``) or the folder of the console script. Left in
    place, the first could bring in another Megatron than the script's own run would.
    """
    folder = os.path.dirname(os.path.abspath(script))
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
