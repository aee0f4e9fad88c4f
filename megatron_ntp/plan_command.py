"""`megatron-ntp plan`: make a plan for a job that lost GPUs, or show one that was made.

Sizes are given as to Megatron. No torch, no Megatron: a plan can be made on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_ntp.errors import PlanDimsError, PlanTopologyError
from megatron_ntp.plan import (
    BATCH_POLICIES,
    ModelDims,
    Plan,
    build_plan,
    parse_degrees,
    parse_failed,
)

DEFAULT_VOCAB_DIVISOR = 128
"""Megatron's default of --make-vocab-size-divisible-by."""


def plan(argv: Sequence[str]) -> int:
    """The subcommand. A PlanError goes to `cli.main`, which prints it and returns 2."""
    if argv and argv[0] == "show":
        return _show(argv[1:])
    given = _parser().parse_args(argv)
    made = plan_from(given)
    print(made.table(), end="")
    if given.output is not None:
        made.save(given.output)
        print(f"\nwrote {given.output}; start the job with --ntp --ntp-plan {given.output}")
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp plan show", description="Check a plan file and print it as a table."
    )
    parser.add_argument("file", metavar="FILE")
    print(Plan.load(parser.parse_args(argv).file).table(), end="")
    return 0


def plan_from(given: argparse.Namespace) -> Plan:
    """The plan that the options describe. Raises PlanError where they do not describe one."""
    if given.degrees is None and given.failed is None:
        raise PlanTopologyError(
            "say what is left: --failed REPLICA:SLOT[,...] or --degrees N,N,... (one per replica)"
        )
    if given.degrees is None and given.replicas is None:
        raise PlanTopologyError("--failed needs --replicas, the number of data-parallel replicas")
    groups = given.query_groups
    dims = ModelDims(
        num_attention_heads=given.heads,
        num_query_groups=given.heads if groups is None else groups,
        kv_channels=_kv_channels(given),
        hidden_size=given.hidden,
        ffn_hidden_size=4 * given.hidden if given.ffn is None else given.ffn,
        padded_vocab_size=padded_vocab_size(given.vocab, given.vocab_divisor, given.tp),
        num_layers=given.layers,
        mlp_matrices=3 if given.swiglu else 2,
    )
    return build_plan(
        dims,
        degrees=None if given.degrees is None else parse_degrees(given.degrees),
        failed=None if given.failed is None else parse_failed(given.failed),
        num_replicas=given.replicas,
        nominal_tp=given.tp,
        pp=given.pp,
        cp=given.cp,
        batch_policy=given.policy,
    )


def padded_vocab_size(vocab_size: int, divisor: int, nominal_tp: int) -> int:
    """As Megatron pads it, once, for the healthy degree."""
    for name, value in (("--vocab", vocab_size), ("--make-vocab-size-divisible-by", divisor)):
        if value < 1:
            raise PlanDimsError(f"{name} must be at least 1, got {value}")
    if nominal_tp < 1:
        raise PlanTopologyError(f"--tp must be at least 1, got {nominal_tp}")
    multiple = divisor * nominal_tp
    return -(-vocab_size // multiple) * multiple


def _kv_channels(given: argparse.Namespace) -> int:
    if given.kv_channels is not None:
        return int(given.kv_channels)
    if given.heads < 1 or given.hidden % given.heads:
        raise PlanDimsError(
            f"--hidden {given.hidden} is not a multiple of --heads {given.heads}: give the size of "
            "a head with --kv-channels"
        )
    return int(given.hidden // given.heads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp plan",
        usage="%(prog)s --tp N --replicas N --failed R:S[,...] SIZES [-o FILE]\n"
        "       %(prog)s --tp N --degrees N,N,... SIZES [-o FILE]\n"
        "       %(prog)s show FILE",
        description="Plan a job that goes on without its failed GPUs: print who owns what, and "
        "write the plan for --ntp-plan.",
        allow_abbrev=False,
    )
    job = parser.add_argument_group("the job")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    job.add_argument("--tp", required=True, help="healthy TP degree", **number)
    job.add_argument("--replicas", help="data-parallel replicas", **number)
    job.add_argument("--failed", metavar="R:S[,...]", help="failed GPUs as replica:slot, e.g. 2:5")
    job.add_argument("--degrees", metavar="N,N,...", help="TP degree left in each replica")
    job.add_argument("--pp", default=1, help="pipeline stages (default 1)", **number)
    job.add_argument("--cp", default=1, help="context-parallel size (default 1)", **number)
    job.add_argument(
        "--policy",
        choices=BATCH_POLICIES,
        default="keep",
        help="microbatches of a reduced replica (default keep)",
    )
    sizes = parser.add_argument_group("sizes of the whole model, as given to Megatron")
    sizes.add_argument("--layers", required=True, **number)
    sizes.add_argument("--hidden", required=True, **number)
    sizes.add_argument("--heads", required=True, help="attention heads", **number)
    sizes.add_argument("--query-groups", help="KV groups (default: one per head)", **number)
    sizes.add_argument("--kv-channels", help="size of a head (default: hidden / heads)", **number)
    sizes.add_argument("--ffn", help="FFN size (default: 4 x hidden)", **number)
    sizes.add_argument("--swiglu", action="store_true", help="the MLP is gated")
    sizes.add_argument("--vocab", required=True, help="vocabulary, before padding", **number)
    sizes.add_argument(
        "--make-vocab-size-divisible-by",
        dest="vocab_divisor",
        default=DEFAULT_VOCAB_DIVISOR,
        help="as given to Megatron (default %(default)s)",
        **number,
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan there")
    return parser
