"""Nonuniform TP for scripts with a training loop of their own (Megatron-Bridge, NeMo, your own).

Where Megatron's own arguments do not describe the job, a plan file does: replicas, failed slots and
the model's sizes. `megatron_ntp.install(plan=...)` puts the patches in and makes the plan this
process's job; the rest follows when the script makes process groups, model, DDP and optimizer with
megatron-core as it always does.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_ntp.errors import PlanTopologyError, StartError, UnsupportedFlagError
from megatron_ntp.integration import context, install
from megatron_ntp.plan.batch import BatchPolicy
from megatron_ntp.plan.plan import Plan
from megatron_ntp.settings import NTPSettings

_NOT_OPTIONS = ("ntp", "ntp_config", "ntp_plan", "ntp_degrees", "ntp_failed", "ntp_batch_policy")


def install_plan(
    plan: str | os.PathLike[str] | Plan | None,
    num_microbatches: int | None,
    options: Mapping[str, Any],
) -> None:
    """What `megatron_ntp.install` does; see there."""
    if plan is None:
        if options or num_microbatches is not None:
            raise UnsupportedFlagError(
                "megatron_ntp.install() without plan takes its settings from the command line "
                f"(--ntp-...): remove {', '.join(options) or 'num_microbatches'}, or give plan"
            )
        install.install()
        return
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    name = None if isinstance(plan, Plan) else os.fspath(plan)
    settings = _settings(name, found, options)
    _check_plan(found, num_microbatches)
    world_size, rank = _environment_int("WORLD_SIZE"), _environment_int("RANK")
    found.check_world(world_size)
    if _is_running(found):
        return
    install.install()
    context.activate(
        context.NTPContext(
            settings=settings,
            topology=found.topology,
            global_rank=rank,
            plan=found,
            batch=found.batch(num_microbatches or 1),
            must_check_in=True,
        )
    )


def uninstall() -> None:
    """Forgets the plan and takes the patches out."""
    install.uninstall()
    context.activate(None)


def _settings(name: str | None, plan: Plan, options: Mapping[str, Any]) -> NTPSettings:
    known = [f.name.removeprefix("ntp_") for f in fields(NTPSettings) if f.name not in _NOT_OPTIONS]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(known)}"
            raise UnsupportedFlagError(f"megatron_ntp.install() has no option {option!r}: {hint}")
    given = {f"ntp_{option}": value for option, value in options.items()}
    return NTPSettings(ntp=True, ntp_plan=name, ntp_batch_policy=plan.batch_policy, **given)


def _check_plan(plan: Plan, num_microbatches: int | None) -> None:
    topology = plan.topology
    if topology.pp != 1 or topology.cp != 1:
        raise PlanTopologyError(
            f"the plan has pp {topology.pp} and cp {topology.cp}; pipeline and context "
            "parallelism are not supported yet"
        )
    if plan.batch_policy != BatchPolicy.KEEP and num_microbatches is None:
        raise PlanTopologyError(
            f"the plan's batch policy is {plan.batch_policy}: replicas run different numbers of "
            "microbatches, so give num_microbatches, the number that each would run in the "
            "healthy job, and deal your data out accordingly (plan.batch(n).shares)"
        )


def _environment_int(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError) as error:
        raise StartError(
            f"{name} is not set to a number: start the script with torchrun, or set RANK and "
            "WORLD_SIZE before megatron_ntp.install()"
        ) from error


def _is_running(plan: Plan) -> bool:
    """Whether this plan is this process's job already. Raises where another one is."""
    from megatron.core import parallel_state

    running = context.current()
    if running is not None:
        if running.plan == plan:
            return True
        raise StartError("megatron_ntp.install() was called before with another plan")
    if parallel_state.is_initialized():
        raise StartError(
            "megatron_ntp.install() must come before initialize_model_parallel: process groups of "
            "the uniform job exist already"
        )
    return False
