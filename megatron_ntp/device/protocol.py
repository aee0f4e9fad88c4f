"""What a client and a keeper say to each other: JSON objects, one per message.

A keeper with privileges reads messages of users it does not trust, so every field is checked for
type and size here, and nothing else in the package looks at raw messages.

    {"id": 1, "op": "open", ...OpenRequest}     -> {"id": 1, "ok": OpenReply}
    {"id": 2, "op": "set", "limits_mw": {UUID: MILLIWATTS}} -> {"id": 2, "ok": {UUID: SetResult}}
    {"id": 3, "op": "read"}                     -> {"id": 3, "ok": {UUID: reading or null}}
    {"id": 4, "op": "close"}                    -> {"id": 4, "ok": [Settled]}
    anything that fails                         -> {"id": N, "fault": ..., "what": ..., "uuid": ...}
    the keeper's last words                     -> {"id": null, "closing": REASON}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.naming import is_gpu_uuid
from megatron_ntp.device.nvml import PowerLimits

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 16
MAX_GPUS, MAX_DOMAINS, MAX_TEXT = 64, 512, 128
MAX_LIMIT_MW = 100_000_000


def bad_message(what: str) -> DeviceError:
    """The error for whoever sends what this module does not know."""
    return DeviceError(Fault.REFUSED, f"bad message: {what}")


@dataclass(frozen=True)
class OpenRequest:
    """A job's node introduces its GPUs. Nothing is written by this."""

    job_id: str
    gpu_uuids: tuple[str, ...]
    domain: str  # the one of `domains` that these GPUs are in
    domains: tuple[DomainShape, ...]  # all of the job, since they may share racks
    dead_uuids: tuple[str, ...] = ()  # GPUs of this node and domain that do not train any more
    nominal_mw: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> OpenRequest:
        if found.get("version") != VERSION:
            raise bad_message(f"protocol version {found.get('version')!r}, not {VERSION}")
        domains = tuple(_domain(entry) for entry in _list(found, "domains", MAX_DOMAINS))
        request = cls(
            job_id=_text(found, "job_id"),
            gpu_uuids=_uuids(found, "gpu_uuids"),
            domain=_text(found, "domain"),
            domains=domains,
            dead_uuids=_uuids(found, "dead_uuids"),
            nominal_mw=None if found.get("nominal_mw") is None else _whole(found, "nominal_mw"),
        )
        if request.domain not in [domain.name for domain in domains]:
            raise bad_message(f"domain {request.domain!r} is not among the domains")
        if not request.gpu_uuids or set(request.gpu_uuids) & set(request.dead_uuids):
            raise bad_message("needs GPUs, and none of them may be among the dead ones")
        return request

    @property
    def shape(self) -> DomainShape:
        return next(domain for domain in self.domains if domain.name == self.domain)


@dataclass(frozen=True)
class OpenReply:
    """What the keeper found, and the bounds that it will keep."""

    board: str
    found_mw: dict[str, int]
    min_mw: int
    nominal_mw: int
    ceiling_mw: int
    bound_by: str
    settled: tuple[str, ...] = ()  # what was done about records of earlier jobs

    @property
    def has_headroom(self) -> bool:
        return self.ceiling_mw > self.nominal_mw


@dataclass(frozen=True)
class SetResult:
    """One GPU's answer to a set: what it obeys now, or why it does not."""

    limits: PowerLimits | None
    fault: Fault | None = None
    message: str = ""


def parse(data: bytes) -> dict[str, Any]:
    """One message from the other side."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise bad_message(f"not JSON ({error})") from error
    except RecursionError as error:
        raise bad_message("nested too deeply") from error
    if not isinstance(found, dict):
        raise bad_message("not an object")
    return found


def parse_limits(found: dict[str, Any]) -> dict[str, int]:
    """The limits of a set request, in milliwatts by UUID."""
    limits = found.get("limits_mw")
    if not isinstance(limits, dict) or not 0 < len(limits) <= MAX_GPUS:
        raise bad_message("limits_mw must map UUIDs to milliwatts")
    for uuid in limits:
        if not is_gpu_uuid(uuid):
            raise bad_message(f"{uuid[:MAX_TEXT]!r} is not the UUID of a whole GPU")
        _whole(limits, uuid)
    return dict(limits)


def _list(found: dict[str, Any], key: str, most: int) -> list[Any]:
    value = found.get(key)
    if not isinstance(value, list) or len(value) > most:
        raise bad_message(f"{key} must be a list of at most {most}")
    return value


def _text(found: dict[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise bad_message(f"{key} must be a line of at most {MAX_TEXT} characters")
    return value


def _whole(found: dict[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value <= MAX_LIMIT_MW:
        raise bad_message(f"{key} must be a whole number from 0 to {MAX_LIMIT_MW}")
    return value


def _uuids(found: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _list(found, key, MAX_GPUS)
    if not all(isinstance(value, str) and is_gpu_uuid(value) for value in values):
        raise bad_message(f"{key} must hold UUIDs of whole GPUs; MIG slices share a board's limit")
    if len(set(values)) < len(values):
        raise bad_message(f"{key} names a GPU twice")
    return tuple(values)


def _domain(found: Any) -> DomainShape:
    if not isinstance(found, dict):
        raise bad_message("a domain must be an object")
    try:
        return DomainShape(
            name=_text(found, "name"),
            num_gpus=_whole(found, "num_gpus"),
            num_alive=_whole(found, "num_alive"),
            rack=_text(found, "rack"),
        )
    except ValueError as error:
        raise bad_message(str(error)) from error
