"""Every setting of nonuniform TP, declared once: flags, messages and the README's table follow.

A field `ntp_degrees` is the flag `--ntp-degrees`. Values are plain strings and numbers, so that
they can be kept in a checkpoint's arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ntp.plan.batch import BatchPolicy

GROUP_TITLE = "nonuniform tensor parallelism"
DEFAULT_START_TIMEOUT_S = 300.0


def _setting(default: Any, help_text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "argument": argument})


@dataclass(frozen=True)
class NTPSettings:
    """Settings of one run. Every rank of a job must be given the same ones."""

    ntp: bool = _setting(
        False,
        "Turn nonuniform tensor parallelism on. Without it Megatron is untouched.",
        action="store_true",
    )
    ntp_plan: str | None = _setting(
        None,
        "Plan file (JSON, see `megatron-ntp plan`); instead of --ntp-degrees and --ntp-failed.",
        metavar="FILE",
    )
    ntp_degrees: str | None = _setting(
        None,
        "Tensor-parallel degree of each replica, e.g. 8,8,7; --tensor-model-parallel-size stays "
        "the healthy degree.",
        metavar="N,N,...",
    )
    ntp_failed: str | None = _setting(
        None,
        "Failed GPUs as REPLICA:SLOT, e.g. 2:5; degrees follow from it.",
        metavar="REPLICA:SLOT[,...]",
    )
    ntp_batch_policy: str | None = _setting(
        None,
        "Microbatches of a reduced replica: keep (as many as the others, the default), shrink "
        "(fewer, the global batch shrinks) or redistribute (fewer, the others take them over).",
        choices=tuple(policy.value for policy in BatchPolicy),
    )
    ntp_bucket_size: int | None = _setting(
        None,
        "Parameters of the full model per reshard exchange; default: as large as Megatron's own "
        "gradient buckets.",
        type=int,
        metavar="NUMEL",
    )
    ntp_start_timeout: float = _setting(
        DEFAULT_START_TIMEOUT_S,
        "Seconds to wait at start-up for all ranks before the missing ones are named.",
        type=float,
        metavar="SECONDS",
    )
    ntp_stats_dir: str | None = _setting(
        None,
        "Write one JSON file per rank with exchanges, bytes and optimizer state there.",
        metavar="DIR",
    )

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> NTPSettings:
        """The settings among Megatron's parsed arguments."""
        values: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(cls)}
        return cls(**values)


def flag_name(field_name: str) -> str:
    """`ntp_degrees` -> `--ntp-degrees`."""
    return "--" + field_name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags to a parser, in a group of their own."""
    group = parser.add_argument_group(GROUP_TITLE)
    for setting in fields(NTPSettings):
        group.add_argument(
            flag_name(setting.name),
            default=setting.default,
            help=setting.metadata["help"],
            **setting.metadata["argument"],
        )
    return parser
