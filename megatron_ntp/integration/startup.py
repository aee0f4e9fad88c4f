"""The last step before the first collective: the full plan, and a check-in of all ranks.

The plan needs the padded vocabulary, so it is made after the tokenizer and before
`torch.distributed` is initialized. Ranks meet in the rendezvous store first: whoever is missing, or
holds another plan, is named there instead of in a collective that hangs.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from megatron_ntp.comm.board import Board
from megatron_ntp.errors import PlanBatchError, StartError
from megatron_ntp.integration import context, power
from megatron_ntp.integration.loading import decide
from megatron_ntp.integration.meeting import meet
from megatron_ntp.integration.saving import print_warnings
from megatron_ntp.plan.batch import BatchPolicy
from megatron_ntp.plan.model import ModelDims, num_mlp_matrices
from megatron_ntp.plan.plan import Plan


def model_dims(args: argparse.Namespace) -> ModelDims:
    """Logical sizes of the model that Megatron's arguments describe."""
    heads = args.num_attention_heads
    return ModelDims(
        num_attention_heads=heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else heads,
        kv_channels=args.kv_channels,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        padded_vocab_size=args.padded_vocab_size,
        num_layers=args.num_layers,
        mlp_matrices=num_mlp_matrices(args),
    )


def complete_plan(ntp: context.NTPContext, args: argparse.Namespace) -> Plan:
    """The plan of this run: the given file checked against the model, or one made for it."""
    dims = model_dims(args)
    policy = ntp.settings.ntp_batch_policy
    if ntp.plan is None:
        return Plan(ntp.topology, dims, policy or BatchPolicy.KEEP.value)
    ntp.plan.check_model(dims)
    if policy not in (None, ntp.plan.batch_policy):
        raise PlanBatchError(
            f"--ntp-batch-policy {policy} disagrees with plan {ntp.settings.ntp_plan}, which says "
            f"{ntp.plan.batch_policy}. Give one of the two"
        )
    return ntp.plan


def initialize_distributed(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wraps `megatron.training.initialize._initialize_distributed`."""
    ntp = context.current()
    if ntp is None:
        original(*args, **kwargs)
        return
    megatron_args = get_args()
    ntp.plan = complete_plan(ntp, megatron_args)
    num_microbatches = megatron_args.global_batch_size // (
        megatron_args.micro_batch_size * ntp.topology.num_replicas
    )
    ntp.batch = ntp.plan.batch(num_microbatches)
    bound = inspect.signature(original).bind(*args, **kwargs)
    board = store = None
    if not dist.is_initialized():
        store = bound.arguments.get("store")
        if store is None:
            store = _rendezvous(ntp, megatron_args.world_size)
            bound.arguments["store"] = store
        meet(store, ntp)
        board = Board(
            store,
            "checkpoint",
            ntp.global_rank,
            megatron_args.world_size,
            ntp.settings.ntp_start_timeout,
        )
    if ntp.global_rank == 0:
        print(f"nonuniform TP plan:\n{ntp.plan.table()}", flush=True)
    ntp.load = decide(ntp, megatron_args, board)
    _start_power(ntp, megatron_args, num_microbatches, store)
    print_warnings(ntp, megatron_args, "start")
    original(*bound.args, **bound.kwargs)


def _start_power(
    ntp: context.NTPContext, args: argparse.Namespace, num_microbatches: int, store: Any
) -> None:
    """Power limits, and microbatches for what power will leave of a replica's lag."""
    if not ntp.power.is_on:
        return
    assert ntp.plan is not None
    board = Board(
        store if store is not None else dist.distributed_c10d._get_default_store(),
        "power",
        ntp.global_rank,
        args.world_size,
        ntp.settings.ntp_start_timeout,
    )
    ntp.boost = power.start(ntp, args, board)
    if ntp.boost is not None:
        ntp.batch = ntp.plan.batch(num_microbatches, ntp.boost.slowness)


def _rendezvous(ntp: context.NTPContext, world_size: int) -> dist.Store:
    """The store that `init_process_group` would make from MASTER_ADDR and MASTER_PORT.

    Where rank 0 keeps it (no torchrun), torch would have rank 0 wait for the others in there, and
    report their number only; here the check-in waits for them, and names them.
    """
    timeout_s = ntp.settings.ntp_start_timeout
    timeout = timedelta(seconds=timeout_s)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(
                dist.rendezvous("env://", ntp.global_rank, world_size, timeout=timeout)
            )
        else:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                world_size,
                is_master=ntp.global_rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StartError(
            f"the rendezvous store at {address} (MASTER_ADDR, MASTER_PORT) did not answer within "
            f"{timeout_s:g} s. Rank 0, or torchrun on its node, keeps it: look at its log and node"
        ) from error
    return dist.PrefixStore("default_pg", store)
