"""The options of `megatron-ntp launch`: given, or read from Slurm's variables."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.errors import PlanTopologyError, UnsupportedFlagError
from megatron_ntp.launchers.nodes import Shape
from megatron_ntp.supervisor.guards import Limits
from megatron_ntp.supervisor.stall import Deadlines

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below what Linux gives to connections
_LIMITS, _DEADLINES = Limits(), Deadlines()


@dataclass(frozen=True)
class Options:
    """What a user decides. `endpoint` is None for a job of one node.

    Attributes:
        shape: sizes; tp, pp and cp are 0 where the training command says them.
        regrow_at_checkpoint: not only at the next restart.
        node_deadline_s: silence after which a node counts as lost.
        join_deadline_s: how long to wait for nodes at the start, or for node 0 to come back.
        stop_grace_s: between SIGTERM and SIGKILL.
        save_deadline_s: for ranks that were asked to save and end.
    """

    num_nodes: int
    node_rank: int
    endpoint: tuple[str, int] | None
    shape: Shape
    run_dir: Path
    job_id: str | None
    faults: Path | None
    health: str | None
    keep_replicas: bool
    min_degree: int
    regrow_at_checkpoint: bool
    limits: Limits
    deadlines: Deadlines
    stop_grace_s: float
    save_deadline_s: float
    node_deadline_s: float
    join_deadline_s: float
    health_interval_s: float
    nvml_deadline_s: float


def parser() -> argparse.ArgumentParser:
    """Of the words before the lone `--`."""
    made = argparse.ArgumentParser(
        prog="megatron-ntp launch",
        usage="megatron-ntp launch [options] -- TRAINING COMMAND",
        description="Keep a job running: on each node, start one rank per GPU that works, watch "
        "them, and start again with what is left when something fails (docs/restart.md). The "
        "training command is pretrain_gpt.py FLAGS, or -m megatron_ntp run pretrain_gpt.py FLAGS. "
        "Under Slurm: srun --ntasks-per-node=1 megatron-ntp launch ...",
        allow_abbrev=False,
    )
    _job_options(made.add_argument_group("the job"))
    _restart_options(made.add_argument_group("restarts"))
    _hang_options(made.add_argument_group("hangs: seconds without a sign of any rank"))
    _wait_options(made.add_argument_group("waiting, in seconds"))
    return made


def _job_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nnodes", type=int, metavar="N", help="default: Slurm's, else 1")
    group.add_argument("--node-rank", type=int, metavar="R", help="default: Slurm's, else 0")
    group.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where node 0 listens for the other nodes"
    )
    group.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="of a healthy node; default: Slurm's"
    )
    group.add_argument("--replicas", type=int, metavar="N", help="fewer than fit leave spares")
    for name in ("tp", "pp", "cp"):
        group.add_argument(f"--{name}", type=int, default=0, metavar="N", help=argparse.SUPPRESS)
    group.add_argument("--run-dir", type=Path, default=Path("ntp-runs"), metavar="DIR")
    group.add_argument("--job-id", metavar="ID", help="default: Slurm's, else by the command")
    group.add_argument("--faults", type=Path, metavar="FILE", help="lines HOST DEVICE [reason]")
    group.add_argument(
        "--health", metavar="COMMAND", help="of the site; prints lines DEVICE [reason]"
    )


def _restart_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--regrow-at",
        "--ntp-regrow-at",
        choices=("restart", "checkpoint"),
        default="restart",
        help="when a GPU that came back is used again (default: %(default)s)",
    )
    group.add_argument(
        "--keep-replicas", action="store_true", help="never drop a replica that can run"
    )
    group.add_argument(
        "--min-degree", type=int, default=1, metavar="N", help="below it a replica cannot run"
    )
    number = {"metavar": "N", "type": int}
    seconds = {"metavar": "S", "type": float}
    group.add_argument("--max-stalled", default=_LIMITS.max_fruitless, **number)  # type: ignore[arg-type]
    group.add_argument(
        "--max-restarts-per-hour",
        default=_LIMITS.max_restarts_per_hour,
        **number,  # type: ignore[arg-type]
    )
    group.add_argument("--backoff", default=_LIMITS.backoff_s, **seconds)  # type: ignore[arg-type]
    group.add_argument("--max-backoff", default=_LIMITS.max_backoff_s, **seconds)  # type: ignore[arg-type]


def _hang_options(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("start", _DEADLINES.start_s, "until checkpoints are read, and at the end"),
        ("load", _DEADLINES.load_s, "reading a checkpoint"),
        ("first-step", _DEADLINES.first_step_s, "after it was read"),
        ("eval", _DEADLINES.eval_s, "evaluating"),
        ("save", _DEADLINES.save_s, "writing one"),
        ("step-min", _DEADLINES.step_min_s, "least deadline of a step"),
    ):
        group.add_argument(
            f"--hang-{name}",
            type=float,
            default=default,
            metavar="S",
            help=f"{text} (default: %(default)g)",
        )
    group.add_argument(
        "--hang-factor",
        type=float,
        default=_DEADLINES.step_factor,
        metavar="X",
        help="deadline of a step: X times the longest of the last ones (default: %(default)g)",
    )
    group.add_argument(
        "--hang-step", type=float, metavar="S", help="deadline of a step, not learned"
    )


def _wait_options(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("stop-grace", 5.0, "between SIGTERM and SIGKILL"),
        ("save-deadline", 600.0, "for ranks that were asked to save and end"),
        ("node-deadline", 30.0, "silence after which a node counts as lost"),
        ("join-deadline", 300.0, "for all nodes at the start, and for node 0 to come back"),
        ("health-interval", 10.0, "between looks at the GPUs while ranks run"),
        ("nvml-deadline", 10.0, "for one call of the driver"),
    ):
        group.add_argument(
            f"--{name}",
            type=float,
            default=default,
            metavar="S",
            help=f"{text} (default: %(default)g)",
        )


def read(words: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line.

    Raises:
        PlanTopologyError: nodes or sizes are missing, or contradict each other.
        UnsupportedFlagError: the rendezvous endpoint is missing, or none.
        SystemExit: argparse has told what is wrong.
    """
    given = parser().parse_args(words)
    num_nodes = _first(given.nnodes, environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    node_rank = _first(given.node_rank, environ, "SLURM_NODEID", default=0)
    gpus = _first(given.gpus_per_node, environ, "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
    if not gpus:
        raise PlanTopologyError("give --gpus-per-node, the number of GPUs of a healthy node")
    if num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise PlanTopologyError(f"--node-rank {node_rank} is none of --nnodes {num_nodes}")
    return Options(
        num_nodes=num_nodes,
        node_rank=node_rank,
        endpoint=None if num_nodes == 1 else _endpoint(given.rdzv_endpoint, environ),
        shape=Shape(given.tp, given.pp, given.cp, gpus, given.replicas),
        run_dir=given.run_dir,
        job_id=given.job_id,
        faults=given.faults,
        health=given.health,
        keep_replicas=given.keep_replicas,
        min_degree=given.min_degree,
        regrow_at_checkpoint=given.regrow_at == "checkpoint",
        limits=Limits(
            given.max_stalled, given.max_restarts_per_hour, given.backoff, given.max_backoff
        ),
        deadlines=Deadlines(
            start_s=given.hang_start,
            load_s=given.hang_load,
            first_step_s=given.hang_first_step,
            eval_s=given.hang_eval,
            save_s=given.hang_save,
            step_min_s=given.hang_step_min,
            step_factor=given.hang_factor,
            step_s=given.hang_step,
        ),
        stop_grace_s=given.stop_grace,
        save_deadline_s=given.save_deadline,
        node_deadline_s=given.node_deadline,
        join_deadline_s=given.join_deadline,
        health_interval_s=given.health_interval,
        nvml_deadline_s=given.nvml_deadline,
    )


def _first(
    given: int | None, environ: Mapping[str, str], *names: str, default: int | None = None
) -> int:
    """What was given, else the first of these variables that holds a number, else the default."""
    if given is not None:
        return given
    for name in names:
        text = environ.get(name, "").rpartition(":")[2]  # SLURM_GPUS_PER_NODE may name a type
        if text.isdecimal():
            return int(text)
    return default or 0


def _endpoint(given: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    if given is not None:
        host, _, port = given.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UnsupportedFlagError(f"--rdzv-endpoint {given}: expected HOST:PORT, as n1:29400")
        return host, int(port)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job = environ.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdecimal():
        raise UnsupportedFlagError(
            "give --rdzv-endpoint HOST:PORT, the same on every node: where node 0 listens"
        )
    return _first_host(nodes), _FIRST_PORT + int(job) * 7 % _NUM_PORTS


def _first_host(nodes: str) -> str:
    """The first host of Slurm's list, such as n[01-16],m2."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UnsupportedFlagError(
            f"scontrol does not expand Slurm's list of nodes {nodes!r} ({error}): give "
            "--rdzv-endpoint HOST:PORT, the same on every node"
        ) from error
