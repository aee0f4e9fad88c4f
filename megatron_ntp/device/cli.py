"""`megatron-ntp power` and `megatron-ntp health`: words in, exit status out."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ntp.device import commands, health_command, keeper_process
from megatron_ntp.device.errors import DeviceError
from megatron_ntp.device.grants import DEFAULT_GRANTS_FOLDER
from megatron_ntp.device.health import HOOK_TIMEOUT_S
from megatron_ntp.device.serve import DEFAULT_SOCKET
from megatron_ntp.device.settings import DEFAULT_DEADLINE_S
from megatron_ntp.device.xids import DEFAULT_SINCE_S, KERNEL_LOG

Run = Callable[[argparse.Namespace], int]
GPUS_HELP = (
    "indices or UUIDs, separated by commas, or `cuda` for those of CUDA_VISIBLE_DEVICES; "
    "default: all of the node"
)


def power_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ntp power`."""
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    arguments = _power_parser().parse_args(words)
    arguments.command = command
    return _run(arguments.run, arguments)


def health_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ntp health`."""
    arguments = _health_parser().parse_args(sys.argv[1:] if argv is None else argv)
    return _run(health_command.health, arguments)


def _health_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp health",
        description="Which GPUs of this node can train. Exit status: 0 all ok, 1 not known, "
        "2 wrong usage, 3 some are suspect, 4 some are dead.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON instead of a table")
    form.add_argument(
        "--lines",
        action="store_true",
        help="one line `UUID reason` per dead GPU and status 0, as `megatron-ntp slurm --health` "
        "reads it",
    )
    parser.add_argument(
        "--deadline", type=float, default=DEFAULT_DEADLINE_S, help="seconds an NVML call may take"
    )
    parser.add_argument("--gpus", help=GPUS_HELP)
    parser.add_argument("--expect", default="", help="UUIDs that must be there, comma-separated")
    parser.add_argument(
        "--expect-idle", action="store_true", help="processes on a GPU make it suspect"
    )
    parser.add_argument("--hook", default="", help="site's command that prints JSON verdicts")
    parser.add_argument("--hook-timeout", type=float, default=HOOK_TIMEOUT_S, metavar="SECONDS")
    parser.add_argument(
        "--treat",
        action="append",
        default=[],
        metavar="REASON=VERDICT",
        help="overrule what a reason means, e.g. nvlink-down=dead or xid-48=dead",
    )
    parser.add_argument("--kernel-log", type=Path, default=KERNEL_LOG, help="where XIDs are logged")
    parser.add_argument(
        "--xids-since", type=float, default=DEFAULT_SINCE_S, metavar="SECONDS", help="how far back"
    )
    return parser


def _run(run: Run, arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        return run(arguments)
    except (DeviceError, ValueError, OSError) as error:
        print(f"megatron-ntp: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _power_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp power", description="Power limits of this node's GPUs, by UUID."
    )
    common = argparse.ArgumentParser(add_help=False)
    keeper_process.add_arguments(common)
    common.add_argument("--json", action="store_true", help="JSON instead of a table")
    common.add_argument("--dry-run", action="store_true", help="show what would be done only")
    gpus = argparse.ArgumentParser(add_help=False)
    gpus.add_argument("--gpus", help=GPUS_HELP)
    commands_parser = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Run, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        summary = (run.__doc__ or "").strip().splitlines()[0]
        found = commands_parser.add_parser(
            name, help=summary, description=summary, parents=[common, *parents]
        )
        found.set_defaults(run=run)
        return found

    add("status", commands.status, gpus)
    _add_plan_arguments(add("plan", commands.plan, gpus))
    _add_boost_arguments(add("boost", commands.boost, gpus))
    add("restore", commands.restore, gpus)
    _add_helper_arguments(add)
    return parser


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full-degree", type=int, required=True, help="GPUs of a whole domain")
    parser.add_argument("--degree", type=int, help="GPUs that are left; default: the next three")
    parser.add_argument("--nominal", type=float, metavar="WATTS", help="cap of healthy GPUs")
    parser.add_argument("--model", type=Path, help="curves that earlier jobs measured")
    parser.add_argument("--board-max", type=float, metavar="WATTS", help="plan without this node")
    parser.add_argument("--board-name", default="board", help="with --board-max: name in --model")


def _add_boost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "megatron-ntp power boost [options] [-- COMMAND ...]"
    parser.add_argument("--full-degree", type=int, help="GPUs of the whole domain, dead ones too")
    parser.add_argument("--dead", help="dead GPUs of this node, whose share is free")
    parser.add_argument("--nominal", type=float, metavar="WATTS", help="cap of healthy GPUs")
    parser.add_argument("--watts", type=float, help="limit to set; default: the ceiling")
    parser.add_argument("--socket", type=Path, help="use the node's helper")


def _add_helper_arguments(add: Callable[..., argparse.ArgumentParser]) -> None:
    grants = argparse.ArgumentParser(add_help=False)
    grants.add_argument(
        "--grants", type=Path, default=DEFAULT_GRANTS_FOLDER, help="folder with root's grants"
    )
    serve = add("serve", commands.serve, grants)
    way = serve.add_mutually_exclusive_group()
    way.add_argument("--socket", type=Path, default=DEFAULT_SOCKET, help="where to listen")
    way.add_argument("--stdio", action="store_true", help="serve one job on standard input (sudo)")
    grant = add("grant", commands.grant, grants)
    grant.add_argument("--job", required=True, help="job id")
    grant.add_argument("--uid", type=int, required=True, help="user whose job it is")
    grant.add_argument("--gpus", required=True, help="indices or UUIDs, separated by commas")
    grant.add_argument("--cgroup", default="", help="part of the job's control group's name")
    revoke = add("revoke", commands.revoke, grants)
    revoke.add_argument("--job", required=True, help="job id")
