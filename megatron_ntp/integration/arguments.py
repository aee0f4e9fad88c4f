"""Flags on Megatron's own parser, and validation for a world size that is a sum.

`args` stay nominal: tensor parallel size, data parallel size and padded vocabulary are those of the
healthy job, for validation, microbatch maths, logs and checkpoints. Only `args.world_size` is the
number of processes that run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from megatron_ntp import settings as ntp_settings
from megatron_ntp.errors import PlanTopologyError, PlanWorldError
from megatron_ntp.integration import context
from megatron_ntp.integration.power import checked_settings
from megatron_ntp.integration.refusals import refuse_unsupported
from megatron_ntp.integration.saving import refuse_lost_state
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.spans import count_hint
from megatron_ntp.plan.topology import Topology, parse_degrees, parse_failed
from megatron_ntp.settings import NTPSettings


def add_megatron_arguments(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Wraps `megatron.training.arguments.add_megatron_arguments`."""
    return ntp_settings.add_arguments(original(parser))


def validate_args(
    original: Callable[..., Any], args: argparse.Namespace, *rest: Any, **kwargs: Any
) -> Any:
    """Wraps `megatron.training.arguments.validate_args`.

    Checks the job, then validates it as the healthy one it stands for.
    """
    settings = NTPSettings.from_namespace(args)
    if not settings.ntp:
        return original(args, *rest, **kwargs)
    refuse_unsupported(args)
    world_size = args.world_size
    topology, plan = job_topology(settings, args)
    policy = None if plan is None else plan.batch_policy
    refuse_unsupported(args, policy)
    power = checked_settings(args)
    refuse_lost_state(args, topology.is_reduced)
    args.world_size = topology.nominal_world_size
    try:
        result = original(args, *rest, **kwargs)
    finally:
        args.world_size = world_size
    # Megatron derives some settings (gradient type, sequence parallelism) while it validates.
    refuse_unsupported(args, policy)
    context.activate(
        context.NTPContext(
            settings=settings, topology=topology, global_rank=args.rank, plan=plan, power=power
        )
    )
    return result


def job_topology(settings: NTPSettings, args: argparse.Namespace) -> tuple[Topology, Plan | None]:
    """The replicas of this job, checked against the number of started processes.

    Returns the plan too where a plan file gives it.

    Raises:
        PlanError: with what does not fit, both values and the cure.
    """
    nominal_tp = args.tensor_model_parallel_size
    world_size = args.world_size
    failed = None if settings.ntp_failed is None else parse_failed(settings.ntp_failed)
    degrees = None if settings.ntp_degrees is None else parse_degrees(settings.ntp_degrees)
    plan = None
    if settings.ntp_plan is not None:
        plan = _load_plan(settings, nominal_tp)
        topology = plan.topology
        if degrees is not None and degrees != topology.degrees:
            raise PlanTopologyError(
                f"--ntp-degrees {settings.ntp_degrees} disagrees with plan {settings.ntp_plan}, "
                f"whose degrees are {','.join(map(str, topology.degrees))}. Give one of the two"
            )
        if failed is not None and tuple(sorted(failed)) != topology.failed:
            raise PlanTopologyError(
                f"--ntp-failed {settings.ntp_failed} disagrees with plan {settings.ntp_plan}. "
                "Give one of the two"
            )
    elif degrees is not None:
        topology = Topology.from_degrees(degrees, nominal_tp, failed)
    else:
        num_replicas = _num_replicas(world_size, nominal_tp, failed or ())
        topology = Topology.from_failed(num_replicas, nominal_tp, failed or ())
    _check_world(topology, world_size)
    return topology, plan


def _load_plan(settings: NTPSettings, nominal_tp: int) -> Plan:
    assert settings.ntp_plan is not None
    plan = Plan.load(settings.ntp_plan)
    if plan.topology.nominal_tp != nominal_tp:
        raise PlanTopologyError(
            f"plan {settings.ntp_plan} is for a healthy TP degree of {plan.topology.nominal_tp}, "
            f"but --tensor-model-parallel-size is {nominal_tp}. Keep the healthy degree there; the "
            "plan lowers it per replica"
        )
    if plan.topology.pp != 1 or plan.topology.cp != 1:
        raise PlanTopologyError(
            f"plan {settings.ntp_plan} has pp {plan.topology.pp} and cp {plan.topology.cp}; "
            "pipeline and context parallelism are not supported with --ntp yet"
        )
    return plan


def _num_replicas(world_size: int, nominal_tp: int, failed: tuple[tuple[int, int], ...]) -> int:
    healthy = world_size + len(set(failed))
    if healthy % nominal_tp:
        raise PlanWorldError(
            f"{world_size} processes and {len(set(failed))} failed slots do not make whole "
            f"replicas of {nominal_tp} slots (--tensor-model-parallel-size). Say which replicas "
            "are reduced with --ntp-degrees or --ntp-failed, or start another number of processes"
            + count_hint(os.environ)
        )
    return healthy // nominal_tp


def _check_world(topology: Topology, world_size: int) -> None:
    if topology.world_size != world_size:
        degrees = ",".join(map(str, topology.degrees))
        raise PlanWorldError(
            f"degrees {degrees} need {topology.world_size} processes "
            f"({topology.num_replicas} data-parallel replicas), but {world_size} were started "
            f"(WORLD_SIZE). Start {topology.world_size}, or change --ntp-degrees / --ntp-failed"
            + count_hint(os.environ)
        )
