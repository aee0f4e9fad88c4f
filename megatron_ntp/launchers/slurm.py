"""`megatron-ntp slurm`: a batch script for a site, from one template (job.sbatch).

scripts/slurm/pretrain_ntp.sbatch is what this prints for the options in EXAMPLE; a test compares.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from megatron_ntp.launchers.nodes import Node, Shape, Slot, place
from megatron_ntp.launchers.start import refuse_rewinding

EXAMPLE = "--nodes 16 --gpus-per-node 8 --tp 8 --time 24:00:00"

DEFAULT_TRAIN = (
    "-m megatron_ntp run pretrain_gpt.py --tensor-model-parallel-size {tp} --ntp "
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --exit-signal-handler "
    "--save checkpoints --load checkpoints --save-interval 500"
)


def slurm(argv: Sequence[str]) -> int:
    """The subcommand: prints the script, or writes it to --output."""
    words = list(argv)
    train: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, train = words[:cut], words[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(words)
    if not options.het and options.nodes is None:
        parser.error("give --nodes, or --het for each part of a heterogeneous job")
    if options.het and options.nodes is not None:
        parser.error("--het takes the place of --nodes")
    limit_s = time_limit_s(options.time)
    if limit_s is not None and options.signal_before + 60 > limit_s:
        parser.error(
            f"--signal-before {options.signal_before} leaves no time to train in --time "
            f"{options.time}: Slurm may signal another 60 s earlier"
        )
    _check_shape(options)
    refuse_rewinding(train)
    text = script(options, train)
    if options.script is None:
        sys.stdout.write(text)
    else:
        options.script.write_text(text, encoding="utf-8")
        print(f"wrote {options.script}; submit it with: sbatch {shlex.quote(str(options.script))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp slurm",
        usage="megatron-ntp slurm --nodes N --gpus-per-node N --tp N [options] [-- TRAIN WORDS]",
        description="Write a batch script that checks the nodes, starts the job with the GPUs that "
        "are left, restarts it inside its allocation, and saves before the time limit.",
        epilog="Words after -- are the training command of each rank, e.g. -m megatron_ntp run "
        "pretrain_gpt.py FLAGS (a Python is put in front of -m and of a script).",
    )
    job = parser.add_argument_group("the job")
    job.add_argument("--nodes", type=int, metavar="N")
    job.add_argument("--gpus-per-node", type=int, required=True, metavar="N")
    job.add_argument("--tp", type=int, required=True, metavar="N", help="the healthy degree")
    job.add_argument("--pp", type=int, default=1, metavar="N")
    job.add_argument("--cp", type=int, default=1, metavar="N")
    job.add_argument("--replicas", type=int, metavar="N", help="fewer than fit leave spare nodes")
    job.add_argument("--job-name", default="pretrain-ntp", metavar="NAME")
    job.add_argument("--time", default="24:00:00", metavar="TIME")
    site = parser.add_argument_group("the site")
    site.add_argument("--partition", metavar="NAME")
    site.add_argument("--account", metavar="NAME")
    site.add_argument("--gres", action="store_true", help="ask with --gres=gpu:N")
    site.add_argument(
        "--segment", type=int, metavar="N", help="nodes per NVL domain, for topology/block"
    )
    site.add_argument(
        "--het",
        action="append",
        metavar="NODES:GPUS",
        help="one part of a heterogeneous job, once per part, e.g. --het 15:8 --het 1:7",
    )
    site.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other")
    site.add_argument("--container", metavar="OPTIONS", help="srun options, as one word")
    site.add_argument("--master-addr", default="", metavar="HOST")
    site.add_argument("--health", default="", metavar="COMMAND", help="prints DEVICE [reason]")
    site.add_argument("--faults", default="faults.txt", metavar="FILE")
    site.add_argument("--megatron-ntp", default="megatron-ntp", metavar="COMMAND")
    _restart_options(parser.add_argument_group("restarts"))
    parser.add_argument("--script", type=Path, metavar="FILE", help="write there, do not print")
    return parser


def _restart_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--run-dir", default="$PWD/ntp-runs", metavar="DIR")
    group.add_argument("--checkpoints", default="$PWD/checkpoints", metavar="DIR")
    group.add_argument("--output", default="%x-%j.out", metavar="PATTERN")
    group.add_argument("--max-attempts", type=int, default=20, metavar="N")
    group.add_argument("--backoff", type=int, default=10, metavar="SECONDS")
    group.add_argument(
        "--signal-before", type=int, default=600, metavar="SECONDS", help="time to save in"
    )
    group.add_argument(
        "--no-requeue", action="store_true", help="never start again in another allocation"
    )
    group.add_argument(
        "--requeue-at-limit", action="store_true", help="queue again after the time limit"
    )


def time_limit_s(text: str) -> int | None:
    """Seconds of a Slurm time such as 30, 12:00:00 or 2-12; None for one that is no number."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]):
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        int(part) * unit for part, unit in zip(parts, units, strict=False)
    )


def _check_shape(options: argparse.Namespace) -> None:
    """The healthy job must fit: better said now than after a night in the queue."""
    num_nodes = options.nodes or sum(nodes for nodes, _ in _het_parts(options))
    slots = tuple(Slot(str(number)) for number in range(options.gpus_per_node))
    healthy = [Node(f"node{number}", slots) for number in range(num_nodes)]
    shape = Shape(options.tp, options.pp, options.cp, options.gpus_per_node, options.replicas)
    place(healthy, shape)


def _het_parts(options: argparse.Namespace) -> list[tuple[int, int]]:
    parts = []
    for text in options.het or ():
        nodes, _, gpus = text.partition(":")
        if not (nodes.isdecimal() and gpus.isdecimal()):
            raise SystemExit(f"megatron-ntp slurm: --het {text}: expected NODES:GPUS, e.g. 15:8")
        parts.append((int(nodes), int(gpus)))
    return parts


def _resources(options: argparse.Namespace) -> str:
    """The #SBATCH lines about nodes, once per part of a heterogeneous job."""
    common = ["--ntasks-per-node=1", "--exclusive"]
    common += [f"--partition={options.partition}"] if options.partition else []
    common += [f"--account={options.account}"] if options.account else []
    common += [f"--segment={options.segment}"] if options.segment else []
    common += [word if word.startswith("-") else f"--{word}" for word in options.sbatch]
    parts = _het_parts(options) or [(options.nodes, options.gpus_per_node)]
    texts = []
    for nodes, gpus in parts:
        asked = f"--gres=gpu:{gpus}" if options.gres else f"--gpus-per-node={gpus}"
        texts.append("\n".join(f"#SBATCH {word}" for word in (f"--nodes={nodes}", asked, *common)))
    return "\n#SBATCH hetjob\n".join(texts)


def _hosts(options: argparse.Namespace) -> str:
    """Shell lines that set `hosts`, one per line, in the order of slots."""
    parts = len(options.het or ())
    if not parts:
        return 'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    lists = [f'scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{n}"' for n in range(parts)]
    return "hosts=$(" + "; ".join(lists) + ")"


def _train_lines(words: Sequence[str]) -> str:
    """The command, a flag with its values on each line, quoted for the shell."""
    command = ["python", *words] if words[0] == "-m" or words[0].endswith(".py") else list(words)
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return "\n".join("    " + " ".join(line) for line in lines)


def script(options: argparse.Namespace, train: Sequence[str]) -> str:
    """The batch script."""
    parts = len(options.het or ())
    words = list(train) or DEFAULT_TRAIN.format(tp=options.tp).split()
    values = {
        "job_name": options.job_name,
        "resources": _resources(options),
        "time": options.time,
        "signal_s": options.signal_before,
        "requeue": "no-requeue" if options.no_requeue else "requeue",
        "output": options.output,
        "tp": options.tp,
        "pp": options.pp,
        "cp": options.cp,
        "gpus_per_node": options.gpus_per_node,
        "replicas": options.replicas or "",
        "run_dir": options.run_dir,
        "faults": options.faults,
        "health": shlex.quote(options.health) if options.health else "",
        "checkpoints": options.checkpoints,
        "max_attempts": options.max_attempts,
        "requeue_at_limit": int(options.requeue_at_limit),
        "master_addr": options.master_addr,
        "container": options.container or "",
        "megatron_ntp": options.megatron_ntp,
        "train": _train_lines(words),
        "hosts": _hosts(options),
        "het": f"--het-group={','.join(map(str, range(parts)))} " if parts else "",
        "check_min": 10,
        "backoff_s": options.backoff,
    }
    text = (resources.files("megatron_ntp.launchers") / "job.sbatch").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", str(value))
    return text
