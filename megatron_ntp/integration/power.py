"""The power boost of a training job: who holds which session, and what all ranks agree on.

Before the first collective, through the rendezvous store: every rank says which GPU of which host
it has; the holders start their sessions and say how that went; rank 0 judges, for all ranks alike,
whether training may start (`require`), which sessions have to close again, and how slow each
replica will be, from which the batch policy deals out microbatches.

During training, the lag of each boosted replica goes to its holders (power_waits.py). The sessions
close when Megatron's training loop ends, in whatever way; should the process die, its keeper
restores the limits.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from megatron_ntp.comm.board import Board
from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.client import ANSWER_TIMEOUT_S
from megatron_ntp.device.controller import BoostState, ControlSettings
from megatron_ntp.device.errors import DeviceError, PowerRequiredError
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.errors import PowerSettingsError
from megatron_ntp.integration import context
from megatron_ntp.integration.power_seats import (
    RankGpu,
    Seat,
    is_behind,
    node_gpus,
    own_gpu,
    seats,
    unused_gpus,
    wanted_domains,
)
from megatron_ntp.integration.power_waits import (
    STEPS_LATE,
    CpuClock,
    GpuClock,
    Report,
    StepWaits,
    lag,
)
from megatron_ntp.plan.topology import Topology

JOB_VARIABLE = "SLURM_JOB_ID"


@dataclass(frozen=True)
class Outcome:
    """What came of one seat's session at start-up."""

    domain: int
    rack: str = ""
    state: str = BoostState.OFF.value
    nominal_mw: int = 0
    ceiling_mw: int = 0
    bound_by: str = ""
    gap: float = 0.0
    message: str = ""
    fault: str = ""
    refusal: str = ""  # why --ntp-power require stops the job


@dataclass(frozen=True)
class Verdict:
    """Rank 0's word for all ranks. `slowness` by DP rank, as plan.batch takes it."""

    slowness: tuple[float, ...] = ()
    boosted: tuple[int, ...] = ()  # domains whose limits will move
    closed: tuple[int, ...] = ()  # domains whose sessions have to close again
    refusal: str = ""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Verdict:
        """The inverse of `asdict`, behind JSON."""
        lists = {key: tuple(found[key]) for key in ("slowness", "boosted", "closed")}
        return cls(**{**found, **lists})


# --- start-up -----------------------------------------------------------------------------------


def checked_settings(args: argparse.Namespace) -> PowerSettings:
    """The power flags, with their site file read once.

    Raises:
        PowerSettingsError: a value or the site file is wrong; the same on every rank.
    """
    settings = PowerSettings.from_namespace(args)
    try:
        PowerSession.from_settings(settings)
    except ValueError as error:
        raise PowerSettingsError(f"--ntp-power-site: {error}") from error
    return settings


def start(ntp: context.NTPContext, args: argparse.Namespace, board: Board) -> PowerBoost | None:
    """Sets and boosts limits as the flags say. Every rank of the job calls it, before training.

    Returns:
        this rank's part in the boost; None where the job sets no limit at all.

    Raises:
        PowerRequiredError: `--ntp-power require` cannot be met; the same on every rank.
    """
    settings, topology = ntp.power, ntp.topology
    if not settings.is_on:
        return None
    session = PowerSession.from_settings(
        settings,
        os.environ.get(JOB_VARIABLE, ""),
        ControlSettings(settle_steps=ControlSettings.settle_steps + STEPS_LATE),
    )
    wanted = wanted_domains(topology, settings, session.site)
    if not wanted:
        return None
    gpu = own_gpu(os.environ, args.local_rank or 0, settings.ntp_power_deadline)
    board.hand_in("gpu", asdict(gpu))
    if board.rank == 0:
        board.tell_all("gpus", board.collect("gpu", "word of its GPU for the power boost"))
    _, told = board.hear("gpus", what="which GPUs the ranks have")
    job = _Job(ntp, session, tuple(RankGpu(**entry) for entry in told))
    own = job.seat_of(ntp.global_rank)
    outcome = None
    if own.holder == ntp.global_rank and own.domain in wanted:
        outcome = asdict(job.open(own))
    verdict = _agree(job, board, outcome)
    if verdict.refusal or own.domain in verdict.closed:
        session.close()
    if verdict.refusal:
        raise PowerRequiredError(verdict.refusal)
    holds = outcome is not None and own.domain not in verdict.closed
    return PowerBoost(job, verdict, own if holds else None)


def _agree(job: _Job, board: Board, outcome: dict[str, Any] | None) -> Verdict:
    """Rank 0's verdict on all outcomes, as every rank hears it."""
    board.hand_in("outcome", outcome)
    if board.rank == 0:
        extra_s = 2 * ANSWER_TIMEOUT_S
        found = board.collect("outcome", "word of its power limits", extra_s)
        outcomes = [Outcome(**entry) for entry in found if entry is not None]
        verdict = judge(outcomes, job)
        board.tell_all("verdict", asdict(verdict))
        if not verdict.refusal:
            _tell(outcomes, verdict, job)
    _, told = board.hear("verdict", what="what came of the power limits", extra_s=200.0)
    return Verdict.from_json(told)


@dataclass
class _Job:
    """What a rank knows of the job's power at start-up."""

    ntp: context.NTPContext
    session: PowerSession
    gpus: tuple[RankGpu, ...]

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        return seats(self.topology, self.gpus)

    @cached_property
    def shapes(self) -> dict[int, DomainShape]:
        """Of every domain as a whole, whatever nodes it is on."""
        alive = Counter(info.domain for info in self.topology.ranks)
        hosts: dict[int, str] = {}
        for info, gpu in zip(self.topology.ranks, self.gpus, strict=True):
            hosts.setdefault(info.domain, gpu.host)
        full = self.topology.nominal_tp
        return {
            domain: DomainShape(f"domain-{domain}", full, alive[domain], self.session.rack_of(host))
            for domain, host in hosts.items()
        }

    @property
    def topology(self) -> Topology:
        return self.ntp.topology

    def seat_of(self, rank: int) -> Seat:
        return next(seat for seat in self.seats if rank in seat.ranks)

    def replica(self, domain: int) -> int:
        return domain // self.topology.num_groups

    def name(self, domain: int) -> str:
        """For people."""
        shape = self.shapes[domain]
        return f"replica {self.replica(domain)} ({shape.num_alive} of {shape.num_gpus} GPUs)"

    def rivals(self, own: DomainShape) -> tuple[DomainShape, ...]:
        """The domains among which a rack's spare power is shared: its own, and reduced ones.

        Others of the job run at nominal, as a keeper takes GPUs to do that it is not told of.
        """
        reduced = [shape for shape in self.shapes.values() if shape.num_dead]
        return (own, *(each for each in reduced if each != own and each.rack == own.rack))

    def slowness(self, replica: int) -> float:
        assert self.ntp.plan is not None
        return self.ntp.plan.slowness(self.topology.degrees[replica])

    @cached_property
    def best_slowness(self) -> float:
        """That of the replicas which wait: those of the highest degree."""
        assert self.ntp.plan is not None
        return self.ntp.plan.slowness(max(self.topology.degrees))

    def expected_gap(self, domain: int) -> float:
        """Share of a step that the fastest replicas would wait for this one, without power."""
        replica = self.replica(domain)
        if not is_behind(self.topology, replica):
            return 0.0
        return 1 - self.best_slowness / self.slowness(replica)

    def open(self, seat: Seat) -> Outcome:
        """Starts the session of this rank's seat."""
        shape, gap = self.shapes[seat.domain], self.expected_gap(seat.domain)
        rack = shape.rack
        blind = next((gpu for rank in seat.ranks if not (gpu := self.gpus[rank]).uuid), None)
        if blind is not None:
            required = self.session.settings.ntp_power == "require"
            refusal = f"--ntp-power require: {blind.why}" if required else ""
            return Outcome(seat.domain, rack, message=blind.why, fault=blind.fault, refusal=refusal)
        try:
            status = self.session.start(
                [self.gpus[rank].uuid or "" for rank in seat.ranks],
                shape,
                self.rivals(shape),
                self._dead_uuids(seat, shape),
                expected_gap=gap,
                say=False,
            )
        except PowerRequiredError as error:
            return Outcome(seat.domain, rack, refusal=str(error))
        return Outcome(
            domain=seat.domain,
            rack=rack,
            state=status.state.value,
            nominal_mw=status.nominal_mw,
            ceiling_mw=status.ceiling_mw,
            bound_by=status.bound_by,
            gap=self.session.remaining_gap(),
            message=status.message,
            fault=status.fault.value if status.fault else "",
        )

    def _dead_uuids(self, seat: Seat, shape: DomainShape) -> tuple[str, ...]:
        """For a helper, which wants to see that they are idle; nobody else asks."""
        whole = [other for other in self.seats if other.domain == seat.domain] == [seat]
        if not (shape.num_dead and whole and self.session.may_use_helper):
            return ()
        try:
            node = node_gpus(self.session.settings.ntp_power_deadline)
        except DeviceError:
            return ()  # the helper will say so in its own words
        used = [gpu.uuid for gpu in self.gpus if gpu.host == seat.host]
        return unused_gpus([gpu.uuid for gpu in node if gpu.uuid], used, shape.num_dead)


def judge(outcomes: Sequence[Outcome], job: _Job) -> Verdict:
    """What follows from all outcomes.

    A domain that spans nodes is boosted on all of them or on none: its budget counts on each GPU to
    be at nominal. The same holds for the domains behind one feed, where the site budgets racks.
    """
    refusal = next((outcome.refusal for outcome in outcomes if outcome.refusal), "")
    if refusal:
        return Verdict(refusal=refusal)
    failed = [outcome for outcome in outcomes if outcome.state == BoostState.OFF]
    closed = {outcome.domain for outcome in failed}
    if job.session.site.rack.budget_w is not None:
        racks = {outcome.rack for outcome in failed}
        closed |= {
            outcome.domain
            for outcome in outcomes
            if outcome.rack in racks and outcome.state == BoostState.RAISING
        }
    boosted = {
        outcome.domain
        for outcome in outcomes
        if outcome.state == BoostState.RAISING and outcome.domain not in closed
    }
    slowness = [job.slowness(replica) for replica in range(job.topology.num_replicas)]
    for domain in boosted:
        gap = max(outcome.gap for outcome in outcomes if outcome.domain == domain)
        replica = job.replica(domain)
        slowness[replica] = min(slowness[replica], job.best_slowness / (1 - gap))
    return Verdict(
        slowness=tuple(slowness[replica] for replica in job.topology.dp_order),
        boosted=tuple(sorted(boosted)),
        closed=tuple(sorted(closed)),
    )


def _tell(outcomes: Sequence[Outcome], verdict: Verdict, job: _Job) -> None:
    """Rank 0 speaks for all: a line per lagging replica, one warning per kind of failure."""
    for outcome in {outcome.domain: outcome for outcome in outcomes}.values():
        gap, name = job.expected_gap(outcome.domain), job.name(outcome.domain)
        nominal_w, ceiling_w = outcome.nominal_mw / 1000, outcome.ceiling_mw / 1000
        if outcome.domain in verdict.boosted:
            print(
                f"power: {name} has a gap of {100 * gap:.1f} % to close: nominal {nominal_w:g} W, "
                f"ceiling {ceiling_w:g} W by {outcome.bound_by}, {100 * outcome.gap:.1f} % of a "
                "step expected to stay",
                flush=True,
            )
        elif outcome.state == BoostState.NO_HEADROOM:
            _warn(
                f"{name}: no headroom: {nominal_w:g} W is nominal and, by {outcome.bound_by}, also "
                f"the ceiling; the batch policy has to cover a gap of {100 * gap:.1f} %"
            )
    failed: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.state == BoostState.OFF:
            failed.setdefault(outcome.fault, []).append(outcome)
    for same in failed.values():
        replicas = sorted({job.replica(outcome.domain) for outcome in same})
        named = ", ".join(map(str, replicas))
        _warn(f"no boost for replica {named}, training goes on: {same[0].message}")
    others = set(verdict.closed) - {outcome.domain for outcome in outcomes if outcome.message}
    if others:
        replicas = sorted({job.replica(domain) for domain in others})
        named = ", ".join(map(str, replicas))
        _warn(f"no boost for replica {named} either, which shares a rack with them")


def _warn(text: str) -> None:
    print(f"nonuniform TP WARNING (power): {text}", flush=True)


# --- during training ----------------------------------------------------------------------------


class PowerBoost:
    """One rank's part in the boost while the job trains."""

    def __init__(self, job: _Job, verdict: Verdict, seat: Seat | None) -> None:
        topology = job.topology
        self._session = job.session
        self._seat = seat
        self._rank = job.ntp.global_rank
        self.slowness = verdict.slowness
        self.waits: StepWaits | None = None
        self._said: BoostState | None = None
        self._first_ranks = [
            next(info.global_rank for info in topology.ranks if info.replica == replica)
            for replica in range(topology.num_replicas)
        ]
        holders = [each.holder for each in job.seats if each.domain in verdict.boosted]
        self.members = tuple(sorted({*self._first_ranks, *holders})) if holders else ()
        self._replica = topology.rank(self._rank).replica
        self._references = [
            replica for replica in range(topology.num_replicas) if not is_behind(topology, replica)
        ]
        self._observes = seat is not None and seat.domain in verdict.boosted
        self._name = job.name(topology.rank(self._rank).domain)

    def connect(self, timeout: timedelta) -> None:
        """Makes the group of those who share waits. Every rank of the job calls it."""
        if not self.members:
            return
        group = dist.new_group(list(self.members), timeout=timeout, backend="gloo")
        if self._rank in self.members:
            clock = GpuClock() if dist.get_backend() == "nccl" else CpuClock()
            self.waits = StepWaits(group, clock, self._take)

    def close(self, regular: bool) -> None:
        """Restores the limits of this rank's seat. `regular`: all ranks ended the same step."""
        if self.waits is not None and regular:
            self.waits.join()
        if self._observes:
            self._say()
        self._session.close()

    def _take(self, reports: list[Report]) -> None:
        """Reports of one step of all replicas, by member."""
        if not self._observes:
            return
        place = {rank: index for index, rank in enumerate(self.members)}
        index = [place[rank] for rank in self._first_ranks]
        behind = lag(reports, index[self._replica], [index[other] for other in self._references])
        if behind is not None:
            self._session.observe(behind.step, behind.wait_s, behind.step_s)
        if self._session.status().state is not self._said:
            self._say()

    def _say(self) -> None:
        status = self._session.status()
        self._said = status.state
        if status.measured_gap is not None:
            print(
                f"power: {self._name}: {status.state.value} at {status.limit_mw / 1000:g} W of "
                f"{status.ceiling_mw / 1000:g} W, gap {100 * status.measured_gap:.1f} %",
                flush=True,
            )


def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.training.train`: limits are restored however it ends.

    Megatron leaves it by return, or by sys.exit at --exit-interval, --exit-duration-in-mins and
    after a signal that --exit-signal-handler has caught.
    """
    ntp = context.current()
    boost = ntp.boost if ntp is not None else None
    if boost is None:
        return original(*args, **kwargs)
    regular = False
    try:
        result = original(*args, **kwargs)
        regular = True
        return result
    except SystemExit as exit_request:
        regular = not exit_request.code
        raise
    finally:
        boost.close(regular)
