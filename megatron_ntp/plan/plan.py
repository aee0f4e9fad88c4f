"""The plan of a job: everything that its ranks must agree on, decided before any of them starts.

A `Plan` is small data (topology, model sizes, batch policy) from which every layout follows. Ranks
read the same file or build the same plan from the same settings, and compare `digest()` before
their first collective; `digest_entries()` then names what differs. `serial` reads and writes plans,
`table` prints them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_ntp.errors import PlanModelError, PlanTopologyError, PlanVersionError, PlanWorldError
from megatron_ntp.plan import serial, table
from megatron_ntp.plan._checks import require_int
from megatron_ntp.plan.batch import BatchPolicy, BatchShares, parse_policy, plan_batch
from megatron_ntp.plan.model import FAMILIES, ModelDims, require_family
from megatron_ntp.plan.partition import UnitLayout
from megatron_ntp.plan.topology import FailedSlot, Topology, format_degrees

PLAN_VERSION = serial.PLAN_VERSION


@dataclass(frozen=True)
class Plan:
    """A validated plan: every family can be cut for every degree of the job."""

    topology: Topology
    model: ModelDims
    batch_policy: str = BatchPolicy.KEEP.value
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise PlanVersionError(serial.wrong_version(self.version))
        object.__setattr__(self, "batch_policy", parse_policy(self.batch_policy).value)
        _ = self._layouts  # Raises where a family has too few units.

    # Layouts and costs

    def layout(self, family: str) -> UnitLayout:
        """How `family` (one of FAMILIES) is cut in this job."""
        require_family(family)
        return self._layouts[family]

    @cached_property
    def _layouts(self) -> dict[str, UnitLayout]:
        degrees = self.topology.distinct_degrees
        return {name: UnitLayout(self.model.num_units(name), degrees, name) for name in FAMILIES}

    def slowness(self, degree: int) -> float:
        """Estimated time of a microbatch at this degree over that at the nominal degree.

        cost(n) = sum over families of `ceil(units / n) * unit_cost`, that is, the work of TP rank
        0, which owns the most of every family; slowness = cost(n) / cost(nominal_tp). Attention
        scores, norms, communication and power boost are left out: measure where it matters.
        """
        require_int("TP degree", degree, minimum=1)
        return self.model.cost(degree) / self.model.cost(self.topology.nominal_tp)

    @property
    def dp_slowness(self) -> tuple[float, ...]:
        """Estimated slowness by DP rank."""
        return tuple(self.slowness(degree) for degree in self.topology.dp_degrees)

    def batch(self, num_microbatches: int, slowness: Sequence[float] | None = None) -> BatchShares:
        """Microbatches of each DP rank when a healthy job runs `num_microbatches` per replica.

        `slowness` (by DP rank) takes the place of the estimate where it was measured. Every rank
        must pass the same.
        """
        return plan_batch(
            self.batch_policy,
            num_microbatches,
            self.topology.dp_degrees,
            self.topology.nominal_tp,
            self.dp_slowness if slowness is None else slowness,
            self.topology.pp,
        )

    # Agreement

    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex: equal for equal plans, on any machine."""
        return hashlib.sha256(serial.canonical_json(self).encode()).hexdigest()

    def digest_entries(self) -> tuple[tuple[str, str], ...]:
        """(name, short value) of everything that the digest covers, always in the same order."""
        return serial.flat_entries(self)

    def check_model(self, dims: ModelDims) -> None:
        """Raise PlanModelError unless the plan was made for a model of these sizes."""
        differences = self.model.differences(dims)
        if differences:
            listed = "; ".join(f"{name}: plan {own}, model {its}" for name, own, its in differences)
            raise PlanModelError(
                f"the plan was made for a model of other sizes ({listed}). Make the plan again for "
                "this model, or run the model that the plan is for"
            )

    def check_world(self, world_size: int) -> None:
        """Raise PlanWorldError unless this many processes were started."""
        expected = self.topology.world_size
        if world_size != expected:
            degrees = format_degrees(self.topology.degrees)
            raise PlanWorldError(
                f"the plan needs {expected} processes and {world_size} were started. Degrees "
                f"{degrees} x pp {self.topology.pp} x cp {self.topology.cp} = {expected}; the same "
                f"job without failed slots would have {self.topology.nominal_world_size}. Start "
                "one process per live slot, or make the plan again for the slots that are left"
            )

    # Files and text

    def to_json(self) -> str:
        """The plan as indented JSON with a final newline."""
        return serial.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `to_json`'s text. Each kind of defect raises its own PlanError."""
        parts = serial.parse(text)
        return cls(parts.topology, parts.model, parts.batch_policy, parts.version)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan such that `path` holds the old file or the new one, never half of it."""
        serial.write_plan_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan file. Messages begin with the path."""
        with serial.naming_file(path):
            return cls.from_json(serial.read_text(path))

    def table(self) -> str:
        """The plan for people: replicas, families and ranks as plain text."""
        return table.render(self)


class Difference(NamedTuple):
    """One entry of two digests that differs. None: that side has no such entry."""

    name: str
    ours: str | None
    theirs: str | None


def first_difference(
    ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]
) -> Difference | None:
    """The first entry in which two `digest_entries()` differ, or None if they agree."""
    their_values = dict(theirs)
    for name, value in ours:
        if their_values.get(name) != value:
            return Difference(name, value, their_values.get(name))
    our_names = {name for name, _ in ours}
    for name, value in theirs:
        if name not in our_names:
            return Difference(name, None, value)
    return None


def build_plan(
    model: ModelDims,
    *,
    degrees: Sequence[int] | None = None,
    failed: Collection[FailedSlot] | None = None,
    num_replicas: int | None = None,
    nominal_tp: int | None = None,
    pp: int = 1,
    cp: int = 1,
    batch_policy: str = BatchPolicy.KEEP.value,
) -> Plan:
    """Make a plan from degrees, from failed slots, or from both if they agree.

    Without `degrees`, `num_replicas` and `nominal_tp` say what the healthy job looks like.
    """
    if degrees is not None:
        if num_replicas not in (None, len(degrees)):
            raise PlanTopologyError(
                f"{len(degrees)} degrees ({format_degrees(degrees)}) disagree with num_replicas "
                f"{num_replicas}: give one degree per replica"
            )
        topology = Topology.from_degrees(degrees, nominal_tp, failed, pp=pp, cp=cp)
    elif num_replicas is None or nominal_tp is None:
        raise PlanTopologyError(
            "a plan needs the degrees, or num_replicas and nominal_tp with the failed slots; got "
            f"degrees None, num_replicas {num_replicas}, nominal_tp {nominal_tp}"
        )
    else:
        topology = Topology.from_failed(num_replicas, nominal_tp, failed or (), pp=pp, cp=cp)
    return Plan(topology, model, batch_policy)
