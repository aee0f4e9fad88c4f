"""What one rank knows about its nonuniform job: set once at start-up, read by every hook.

Start-up fills it in order: `topology` when flags are validated, `plan` when the model's logical
sizes are known (tokenizer built), `groups` when process groups exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ntp.comm.exchange import TrafficCounters
from megatron_ntp.comm.groups import Membership
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.errors import NTPError
from megatron_ntp.plan.batch import BatchShares
from megatron_ntp.plan.partition import UnitLayout
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.topology import RankInfo, Topology
from megatron_ntp.settings import NTPSettings

if TYPE_CHECKING:
    from megatron_ntp.integration.loading import LoadDecision
    from megatron_ntp.integration.power import PowerBoost


@dataclass
class NTPContext:
    """One rank's view of the job."""

    settings: NTPSettings
    topology: Topology
    global_rank: int
    plan: Plan | None = None
    groups: Mapping[str, Membership] = field(default_factory=dict)
    batch: BatchShares | None = None
    counters: TrafficCounters = field(default_factory=TrafficCounters)
    load: LoadDecision | None = None
    power: PowerSettings = field(default_factory=PowerSettings)
    boost: PowerBoost | None = None
    saves: list[Path] = field(default_factory=list)
    """The checkpoints of this run, the last of which may still be written in the background."""
    checkpoint_nbytes_read: int = 0
    steps: int = 0
    must_check_in: bool = False
    """Whether plans are still to be compared when process groups are made."""

    @property
    def rank(self) -> RankInfo:
        return self.topology.rank(self.global_rank)

    @property
    def is_extra(self) -> bool:
        return self.rank.is_extra

    @property
    def degree(self) -> int:
        """TP degree of this rank's replica."""
        return self.rank.degree

    def layout(self, family: str) -> UnitLayout:
        assert self.plan is not None, "layouts need the plan, which is made after the tokenizer"
        return self.plan.layout(family)

    def local_units(self, family: str) -> int:
        """Units of a family that this rank computes."""
        return self.layout(family).sizes(self.degree)[self.rank.tp_rank]

    def group(self, kind: str) -> Membership:
        if not self.groups:
            raise NTPError(
                "nonuniform TP has no process groups: initialize_model_parallel of megatron-core "
                "makes them, called once the plan was installed. A loop that makes groups of its "
                "own cannot train under it"
            )
        return self.groups[kind]


_current: NTPContext | None = None


def activate(context: NTPContext | None) -> None:
    """Makes `context` this process's job; None forgets it."""
    global _current
    _current = context


def current() -> NTPContext | None:
    """This process's job, or None without --ntp."""
    return _current


def require() -> NTPContext:
    """This process's job, for code that only runs with --ntp."""
    if _current is None:
        raise NTPError(
            "this rank has no nonuniform TP job: --ntp was given, but Megatron's validate_args did "
            "not run. Start the script through `python -m megatron_ntp run` or a patched checkout"
        )
    return _current
