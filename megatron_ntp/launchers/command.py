"""`megatron-ntp nodes check|place|start` and `megatron-ntp slurm`.

Exit status: 0 done, 2 wrong usage or a job that cannot be placed; `start` ends with the status of
the rank that failed, and with 93 where a restart could not help.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ntp.errors import PlanError
from megatron_ntp.launchers.check import (
    CheckError,
    check_node,
    read_reports,
    this_host,
    write_report,
)
from megatron_ntp.launchers.nodes import Placement, Shape, place
from megatron_ntp.launchers.start import DO_NOT_RESTART, NodeRun, training_command


def nodes(argv: Sequence[str]) -> int:
    """The subcommand `nodes`."""
    words = list(argv)
    training: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, training = words[:cut], words[cut + 1 :]
    options = _parser().parse_args(words)
    run = {"check": _check, "place": _place, "start": _start}[options.verb]
    try:
        return run(options, training)
    except (CheckError, PlanError, OSError) as error:
        print(f"megatron-ntp nodes {options.verb}: {error}", file=sys.stderr)
        return DO_NOT_RESTART if options.verb == "start" else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp nodes",
        description="Start a job on several nodes with the GPUs that are left: check on every "
        "node, place once, start on every node. `megatron-ntp slurm` writes a script that does.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    check = verbs.add_parser("check", help="on each node: report the GPUs that can be used")
    check.add_argument("--gpus-per-node", type=int, required=True, metavar="N")
    check.add_argument("--output", type=Path, required=True, metavar="DIR", help="for the report")
    check.add_argument("--faults", type=Path, metavar="FILE", help="lines HOST DEVICE [reason]")
    check.add_argument(
        "--command", metavar="CMD", help="health command of the site; prints lines DEVICE [reason]"
    )
    placing = verbs.add_parser("place", help="once: decide which GPU is which rank")
    placing.add_argument("--checks", type=Path, required=True, metavar="DIR")
    placing.add_argument("--hosts", required=True, metavar="HOST,...", help="in order")
    placing.add_argument("--gpus-per-node", type=int, required=True, metavar="N")
    placing.add_argument("--tp", type=int, required=True, help="the healthy TP degree")
    placing.add_argument("--pp", type=int, default=1)
    placing.add_argument("--cp", type=int, default=1)
    placing.add_argument(
        "--replicas", type=int, metavar="N", help="default: all nodes; fewer leave spares"
    )
    placing.add_argument("--output", type=Path, required=True, metavar="FILE")
    start = verbs.add_parser("start", help="on each node: start its ranks; command after --")
    start.add_argument("placement", type=Path, metavar="FILE")
    start.add_argument("--logs", type=Path, required=True, metavar="DIR")
    start.add_argument("--master-addr", metavar="HOST", help="default: the node of rank 0")
    start.add_argument("--master-port", type=int, default=29500, metavar="PORT")
    return parser


def _check(options: argparse.Namespace, training: list[str]) -> int:
    node = check_node(options.gpus_per_node, os.environ, options.faults, options.command)
    write_report(node, options.output)
    return 0


def _place(options: argparse.Namespace, training: list[str]) -> int:
    hosts = [host for host in options.hosts.split(",") if host]
    shape = Shape(options.tp, options.pp, options.cp, options.gpus_per_node, options.replicas)
    placement = place(read_reports(options.checks, hosts, options.gpus_per_node), shape)
    options.output.write_text(placement.to_json(), encoding="utf-8")
    print(placement.table(), flush=True)
    return 0


def _start(options: argparse.Namespace, training: list[str]) -> int:
    if not training:
        raise PlanError("give the training command after --")
    placement = Placement.from_json(options.placement.read_text(encoding="utf-8"))
    command = training_command(training, placement)
    host = this_host(os.environ)
    address = (options.master_addr or placement.agents[0].host, options.master_port)
    options.logs.mkdir(parents=True, exist_ok=True)
    return NodeRun(placement, host, address, options.logs, command).run(os.environ)
