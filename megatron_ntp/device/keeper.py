"""The only writer of power limits: one client's GPUs, inside bounds, given back at the end.

A keeper serves one client (a node of a job) and treats it alike whether it trusts it or not. It
claims the client's GPUs, settles what earlier jobs left, records found limits, and from then on
keeps three rules at every single write:

    1. no GPU above its ceiling (budget.py), below its board's minimum, or not the client's
    2. a raise only if the sum over the client's GPUs stays within survivors x ceiling, counting
       those that have not come down yet; so all that must come down come down first
    3. no write over a value that is neither found nor ours: an administrator's choice stays

Where it serves strangers it also checks what they say of dead GPUs, whose share they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ntp.device.budget import BoardPower, DomainBudget, DomainShape, plan_budgets, to_mw
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.grants import Access
from megatron_ntp.device.nvml import DeviceLayer, GpuReading, PowerLimits
from megatron_ntp.device.nvml_process import wait_until_settled
from megatron_ntp.device.protocol import OpenReply, OpenRequest, SetResult
from megatron_ntp.device.site import SitePower
from megatron_ntp.device.state import (
    Claim,
    HostIdentity,
    LimitRecord,
    LimitStore,
    Settled,
    driver_is_new,
    settle,
)

SETTLE_TIMEOUT_S = 2.0
CLAIM_TIMEOUT_S = 20.0  # the keeper of the last attempt may still be restoring


@dataclass
class _Kept:
    """One GPU in this keeper's hands."""

    claim: Claim
    record: LimitRecord | None = None  # on disk as well, from before the first write
    found_mw: int = 0
    now_mw: int = 0  # as last read
    most_mw: int = 0  # the most it can be, should a call that failed still take effect

    @property
    def uuid(self) -> str:
        return self.claim.uuid


class Keeper:
    """The bounds, the writes and the way back. It does not know how requests reach it."""

    def __init__(
        self,
        layer: DeviceLayer,
        store: LimitStore,
        site: SitePower,
        access: Access,
        claim_timeout_s: float = CLAIM_TIMEOUT_S,
    ) -> None:
        self._claim_timeout_s = claim_timeout_s
        self._hung: set[str] = set()  # dead GPUs that are not asked a second time
        self._layer, self._store, self._site, self._access = layer, store, site, access
        self._kept: dict[str, _Kept] = {}
        self._request: OpenRequest | None = None
        self._budget: DomainBudget | None = None
        self._job_id = ""
        self._min_mw = 0

    # ---- open ----

    def open(self, request: OpenRequest) -> OpenReply:
        """Takes the client's GPUs.

        Writes nothing but, where a limit is to change later, the found limit itself, which shows
        whether writing is allowed.
        """
        if self._request is not None:
            raise DeviceError(Fault.REFUSED, "this connection is open already; use one per job")
        everything = request.gpu_uuids + request.dead_uuids
        self._job_id = self._access.job_of(request.job_id, everything)
        try:
            reply = self._open(request)
        except DeviceError:
            self.restore()
            raise
        self._request = request
        return reply

    def _open(self, request: OpenRequest) -> OpenReply:
        settled = self._claim_all(request.gpu_uuids)
        limits = {uuid: self._limits(uuid) for uuid in request.gpu_uuids}
        for uuid, found in limits.items():
            kept = self._kept[uuid]
            kept.found_mw = kept.now_mw = kept.most_mw = found.requested_mw
        board = BoardPower(
            min_mw=max(found.min_mw for found in limits.values()),
            max_mw=min(found.max_mw for found in limits.values()),
        )
        nominal_mw = self._nominal_mw(request)
        self._check_dead(request)
        budget = plan_budgets(self._site, board, request.domains, nominal_mw)[request.domain]
        self._budget, self._min_mw = budget, max(board.min_mw, to_mw(self._site.gpu.min_w or 0))
        if budget.has_headroom or any(kept.found_mw != nominal_mw for kept in self._kept.values()):
            for kept in self._kept.values():
                self._write(kept, kept.found_mw)
        return OpenReply(
            board=self._layer.reading(request.gpu_uuids[0]).name,
            found_mw={uuid: kept.found_mw for uuid, kept in self._kept.items()},
            min_mw=self._min_mw,
            nominal_mw=nominal_mw,
            ceiling_mw=budget.ceiling_mw,
            bound_by=budget.bound_by,
            settled=tuple(f"{entry.uuid}: {entry.outcome.value}" for entry in settled),
        )

    def _claim_all(self, uuids: Sequence[str]) -> list[Settled]:
        """Claims GPUs and settles what is recorded of them: a limit is only ever "found" once."""
        results = []
        for uuid in uuids:
            claim = self._store.claim(self._layer, uuid, self._job_id, self._claim_timeout_s)
            self._kept[uuid] = _Kept(claim)
            record = self._store.read(uuid)
            if record is None:
                continue
            settled = settle(self._layer, self._store, record)
            if not settled.is_over:
                raise DeviceError(
                    Fault.BUSY,
                    f"job {record.job_id} left a changed limit that cannot be restored yet: "
                    f"{settled.detail}",
                    uuid,
                )
            results.append(settled)
        return results

    def _limits(self, uuid: str) -> PowerLimits:
        return self._layer.limits(uuid, self._site.scope)

    def _nominal_mw(self, request: OpenRequest) -> int:
        found = {kept.found_mw for kept in self._kept.values()}
        stated_w = self._site.gpu.nominal_w
        site_mw = None if stated_w is None else to_mw(stated_w)
        nominal_mw = request.nominal_mw or site_mw
        if nominal_mw is None and len(found) > 1:
            raise DeviceError(
                Fault.OUT_OF_RANGE,
                f"found limits differ, {min(found) / 1000:g} W to {max(found) / 1000:g} W, so none "
                "of them is nominal; state it (--ntp-power-nominal, or gpu.nominal_w)",
            )
        most_mw = min(found) if site_mw is None else site_mw
        if nominal_mw is not None and nominal_mw > most_mw and self._site.domain.budget_w is None:
            raise DeviceError(
                Fault.OUT_OF_RANGE,
                f"nominal {nominal_mw / 1000:g} W is above the {most_mw / 1000:g} W that the node "
                "runs under, and no site file states a domain budget that would allow it",
            )
        return nominal_mw or min(found)

    # ---- what strangers say of dead GPUs ----

    def _check_dead(self, request: OpenRequest) -> None:
        if self._access.is_trusted:
            return
        shape = request.shape
        granted = self._access.num_gpus()
        if self._spans_nodes(shape):
            return  # its other nodes cannot be seen from here: gpu.max_w is the bound
        if shape.num_gpus > (granted or 0):
            raise DeviceError(
                Fault.REFUSED,
                f"domain of {shape.num_gpus} GPUs, but {granted} of this node are granted",
            )
        if shape.num_alive != len(request.gpu_uuids) or shape.num_dead > len(request.dead_uuids):
            raise DeviceError(
                Fault.REFUSED,
                f"domain {shape.name!r} says {shape.num_alive} of {shape.num_gpus} GPUs are alive, "
                f"but {len(request.gpu_uuids)} GPUs and {len(request.dead_uuids)} dead ones are "
                "named",
            )
        self._check_idle(request.dead_uuids)

    def _spans_nodes(self, shape: DomainShape) -> bool:
        # The site's word, not the client's, since it decides what is checked.
        return (self._site.domain.num_gpus or shape.num_gpus) > self._layer.count()

    def _check_idle(self, uuids: Sequence[str]) -> None:
        """A GPU that still computes is not dead, and keeps its share."""
        for uuid in set(uuids) - self._hung:
            try:
                pids = self._layer.pids(uuid)
            except DeviceError as error:
                if error.fault is Fault.TIMEOUT:
                    self._hung.add(uuid)
                elif error.fault not in (Fault.LOST, Fault.NOT_FOUND):
                    raise
                continue
            if pids:
                raise DeviceError(
                    Fault.REFUSED, f"declared dead, but processes {pids} use it", uuid
                )

    def check_rights(self) -> None:
        """To be called now and then: raises once the client has lost the right to its limits."""
        if self._request is None or self._access.is_trusted:
            return
        request = self._request
        self._access.job_of(request.job_id, request.gpu_uuids + request.dead_uuids)
        if not self._spans_nodes(request.shape):
            self._check_idle(request.dead_uuids)

    # ---- writes ----

    def set_limits(self, wanted_mw: Mapping[str, int]) -> dict[str, SetResult]:
        """Sets limits, those that come down first. What fails on one GPU is that GPU's answer."""
        for uuid in wanted_mw:
            if uuid not in self._kept:
                raise DeviceError(Fault.REFUSED, "not among the GPUs of this job", uuid)
        results: dict[str, SetResult] = {}
        hanging = self._look_at_all()
        order = sorted(wanted_mw, key=lambda uuid: wanted_mw[uuid] - self._kept[uuid].now_mw)
        for uuid in order:
            if hanging is not None:
                what = f"not tried: {hanging} hangs" if uuid != hanging else "its driver hangs"
                results[uuid] = SetResult(None, Fault.TIMEOUT, what)
                continue
            try:
                results[uuid] = SetResult(self._set(self._kept[uuid], wanted_mw[uuid]))
            except DeviceError as error:
                results[uuid] = SetResult(None, error.fault, str(error))
                hanging = uuid if error.fault is Fault.TIMEOUT else None
        return results

    def _look_at_all(self) -> str | None:
        """Reads all limits, since drivers and administrators move them too.

        Returns the GPU that hangs, if one does. One that does not answer counts as before.
        """
        for kept in self._kept.values():
            try:
                kept.now_mw = self._limits(kept.uuid).requested_mw
            except DeviceError as error:
                if error.fault is Fault.TIMEOUT:
                    return kept.uuid
                continue
            kept.most_mw = max(kept.now_mw, 0 if self._layer.writes_settled() else kept.most_mw)
        return None

    def _set(self, kept: _Kept, limit_mw: int) -> PowerLimits:
        self._check_bounds(kept, limit_mw)
        ours_mw = kept.record.ours_mw if kept.record else ()
        if kept.now_mw not in (kept.found_mw, *ours_mw):
            raise DeviceError(
                Fault.REFUSED,
                f"somebody else set {kept.now_mw / 1000:g} W, where {kept.found_mw / 1000:g} W was "
                "found; it stays theirs",
                kept.uuid,
            )
        return self._write(kept, limit_mw)

    def _check_bounds(self, kept: _Kept, limit_mw: int) -> None:
        assert self._budget is not None
        ceiling_mw = self._budget.ceiling_mw
        if not self._min_mw <= limit_mw <= ceiling_mw:
            raise DeviceError(
                Fault.OUT_OF_RANGE,
                f"{limit_mw / 1000:g} W is not within {self._min_mw / 1000:g} W to "
                f"{ceiling_mw / 1000:g} W, the ceiling by {self._budget.bound_by}",
                kept.uuid,
            )
        others_mw = sum(entry.most_mw for entry in self._kept.values()) - kept.most_mw
        most_mw = ceiling_mw * len(self._kept)
        if limit_mw > kept.now_mw and others_mw + limit_mw > most_mw:
            raise DeviceError(
                Fault.OUT_OF_RANGE,
                f"{limit_mw / 1000:g} W would bring {len(self._kept)} GPUs to "
                f"{(others_mw + limit_mw) / 1000:g} W, over their {most_mw / 1000:g} W; lower the "
                "others first",
                kept.uuid,
            )

    def _write(self, kept: _Kept, limit_mw: int) -> PowerLimits:
        """Record, write, read back; in this order, so that no value of ours is ever unknown."""
        energy_mj, host = self._layer.reading(kept.uuid).energy_mj, self._store.read_host()
        if kept.record is not None and driver_is_new(kept.record, host, energy_mj):
            raise DeviceError(
                Fault.REFUSED, "the GPU was reset under us; its limit is the driver's", kept.uuid
            )
        record = kept.record or self._new_record(kept, host)
        kept.record = record.about_to_write(limit_mw, energy_mj)
        self._store.write(kept.record)
        kept.most_mw = max(kept.now_mw, limit_mw)  # should the call fail, it may still take effect
        limits = self._layer.set_limit(kept.uuid, limit_mw, self._site.scope)
        kept.now_mw = kept.most_mw = limits.requested_mw
        kept.record = kept.record.landed(limits.requested_mw)
        if limits.requested_mw != limit_mw:
            self._store.write(kept.record)
        return limits

    def _new_record(self, kept: _Kept, host: HostIdentity) -> LimitRecord:
        return LimitRecord(
            uuid=kept.uuid,
            job_id=self._job_id,
            scope=self._site.scope,
            found_mw=kept.found_mw,
            ours_mw=(),
            boot_id=host.boot_id,
            driver_id=host.driver_id,
            energy_mj=None,
        )

    # ---- reading, and the way back ----

    def readings(self) -> dict[str, GpuReading | None]:
        """All GPUs; None for one that does not answer."""
        found: dict[str, GpuReading | None] = {}
        for uuid in self._kept:
            try:
                found[uuid] = self._layer.reading(uuid)
            except DeviceError:
                found[uuid] = None
        return found

    def restore(self) -> list[Settled]:
        """Gives every GPU back as found, as far as it answers.

        A record that cannot be settled now stays on disk for `megatron-ntp power restore` or the
        next job.
        """
        wait_until_settled(self._layer, SETTLE_TIMEOUT_S)
        results = []
        for kept in self._kept.values():
            if kept.record is None:
                continue
            settled = settle(self._layer, self._store, kept.record)
            if settled.fault in (Fault.LOST, Fault.FAILED):
                self._layer.close()  # a GPU that was reset answers only a new process
                settled = settle(self._layer, self._store, kept.record)
            results.append(settled)
        for kept in self._kept.values():
            kept.claim.release()
        self._kept.clear()
        self._request = self._budget = None
        return results
