"""The ``megatron-ntp`` command: a table of subcommands, each in a module of its own.

A subcommand is a function that takes its own words and returns an exit status. It is imported only
when called, so that commands without a model (plans, power) start without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_ntp import __version__
from megatron_ntp.errors import PlanError


class Command(NamedTuple):
    """A subcommand: where its function is (``module:function``), and one line of help."""

    target: str
    help: str

    def load(self) -> Callable[[Sequence[str]], int]:
        """The function, imported now."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


COMMANDS: dict[str, Command] = {
    "rehearse": Command(
        "megatron_ntp.rehearsal.command:main", "lose a GPU in a small CPU job, and carry on"
    ),
    "plan": Command("megatron_ntp.plan_command:plan", "plan a job that lost GPUs, show a plan"),
    "run": Command("megatron_ntp.launch:run", "run a training script, with --ntp or on CPU"),
    "report": Command("megatron_ntp.report.command:main", "show what became of a job"),
    "launch": Command(
        "megatron_ntp.supervisor.command:launch", "keep a job running with the GPUs that are left"
    ),
    "nodes": Command("megatron_ntp.launchers.command:nodes", "start a job on what nodes have left"),
    "slurm": Command("megatron_ntp.launchers.slurm:slurm", "write a batch script for Slurm"),
    "doctor": Command("megatron_ntp.doctor.command:doctor", "say what works here, and what not"),
    "flags": Command("megatron_ntp.flags:flags", "print the table of flags"),
    "patch": Command(
        "megatron_ntp.patching.cli:patch_main", "put --ntp into a Megatron-LM checkout"
    ),
    "checkpoint": Command(
        "megatron_ntp.checkpoint.command:main", "list, inspect and verify checkpoints"
    ),
    "patches": Command("megatron_ntp.patching.cli:patches_main", "check the run-time patches"),
    "health": Command("megatron_ntp.device.cli:health_main", "say which GPUs of a node can train"),
    "power": Command("megatron_ntp.device.cli:power_main", "show, boost and restore power limits"),
}


def usage() -> str:
    """The text of ``megatron-ntp --help``."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-ntp COMMAND ...",
            "       megatron-ntp COMMAND --help",
            "       megatron-ntp --version",
            "",
            "Nonuniform tensor parallelism for Megatron.",
            "",
            "commands:",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: hand the words after the command to it; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"megatron-ntp {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"megatron-ntp: no command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return command.load()(words[1:])
    except PlanError as error:  # says all there is to say: a traceback would bury it
        print(f"megatron-ntp {words[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
