"""Nonuniform tensor parallelism for Megatron: a job goes on when a replica loses a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from megatron_ntp.plan.plan import Plan

__version__ = "0.1.0"


def install(
    plan: str | os.PathLike[str] | Plan | None = None,
    *,
    num_microbatches: int | None = None,
    **options: Any,
) -> None:
    """Puts nonuniform TP into this process's Megatron, for scripts with a loop of their own.

    Every rank calls it before model parallelism is initialized. A second call with the same plan
    changes nothing.

    Args:
        plan: Plan or plan file of the job (`megatron-ntp plan`). None: the script uses Megatron's
            own argument parser, and settings come from its --ntp flags.
        num_microbatches: What each replica would run in the healthy job; needed where the plan's
            batch policy is not keep.
        options: Flags without --ntp-, such as bucket_size=10_000_000.

    Raises:
        PlanError: the plan does not fit this job.
        StartError: it is too late, or this Megatron is not one that can be patched.
    """
    from megatron_ntp.integration.api import install_plan

    install_plan(plan, num_microbatches, options)


def uninstall() -> None:
    """Takes everything out again. Model and process groups that were made stay what they are."""
    from megatron_ntp.integration.api import uninstall as undo

    undo()


def install_from_argv() -> None:
    """Installs nonuniform TP if this process was started with --ntp; else does nothing at all.

    A patched checkout and `megatron-ntp run` call it before Megatron's training code is used.

    Raises:
        UnsupportedFlagError: --ntp-... flags were given without --ntp.
        StartError: this process's Megatron is not one that nonuniform TP can be put into.
    """
    import sys

    flags = [word for word in sys.argv[1:] if word == "--ntp" or word.startswith("--ntp-")]
    if flags:
        from megatron_ntp.reporting import install_excepthook

        install_excepthook()
        _check_switch(flags)
        from megatron_ntp import watching

        watching.begin(sys.argv[1:])
        from megatron_ntp.integration.install import install

        install()
        watching.watch()


def _check_switch(flags: list[str]) -> None:
    """Megatron's own parser would only say that it does not know the other flags."""
    if "--ntp" not in flags:
        from megatron_ntp.errors import UnsupportedFlagError

        raise UnsupportedFlagError(
            f"{', '.join(flags)} without --ntp: nonuniform tensor parallelism is off. Add --ntp, "
            "or remove what belongs to it"
        )
