"""Plans as text: versioned JSON, its canonical form, and files that are never half written.

Reading trusts nothing: each kind of defect (not JSON, another version, an unknown or missing key, a
wrong type, degrees that contradict the failed slots) has its own error, which names the key.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_ntp.atomic import write_atomically
from megatron_ntp.errors import (
    PlanError,
    PlanFileError,
    PlanFormatError,
    PlanKeyError,
    PlanTypeError,
    PlanVersionError,
)
from megatron_ntp.plan._checks import require_int
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.plan.topology import FailedSlot, Topology, format_degrees, format_failed

if TYPE_CHECKING:
    from megatron_ntp.plan.plan import Plan

PLAN_VERSION = 1
"""The one format that this version writes and reads."""

PLAN_KEYS = ("version", "topology", "model", "batch_policy")
TOPOLOGY_KEYS = ("num_replicas", "nominal_tp", "pp", "cp", "degrees", "failed")
MODEL_KEYS = tuple(item.name for item in fields(ModelDims))


class PlanParts(NamedTuple):
    """What `parse` found: the arguments of a Plan."""

    version: int
    topology: Topology
    model: ModelDims
    batch_policy: str


# Writing


def to_dict(plan: Plan) -> dict[str, object]:
    """The plan as JSON values. Degrees follow from `failed` and are written for the reader."""
    topology = plan.topology
    return {
        "version": plan.version,
        "topology": {
            "num_replicas": topology.num_replicas,
            "nominal_tp": topology.nominal_tp,
            "pp": topology.pp,
            "cp": topology.cp,
            "degrees": list(topology.degrees),
            "failed": [list(pair) for pair in topology.failed],
        },
        "model": dict(plan.model.sizes()),
        "batch_policy": plan.batch_policy,
    }


def canonical_json(plan: Plan) -> str:
    """One text per plan, for the digest."""
    return json.dumps(to_dict(plan), sort_keys=True, separators=(",", ":"))


def to_json(plan: Plan) -> str:
    """JSON with one line per value, so that lists of replicas stay on a line."""
    lines: list[str] = []
    for key, value in to_dict(plan).items():
        if isinstance(value, dict):
            inner = ",\n".join(f'    "{name}": {json.dumps(item)}' for name, item in value.items())
            lines.append(f'  "{key}": {{\n{inner}\n  }}')
        else:
            lines.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def flat_entries(plan: Plan) -> tuple[tuple[str, str], ...]:
    """(name, short value) of everything in the plan, in a fixed order."""
    topology = plan.topology
    sizes = {name: str(getattr(topology, name)) for name in ("num_replicas", "nominal_tp")}
    sizes |= {"pp": str(topology.pp), "cp": str(topology.cp)}
    sizes |= {"degrees": format_degrees(topology.degrees), "failed": format_failed(topology.failed)}
    return (
        ("version", str(plan.version)),
        *((f"topology.{name}", value) for name, value in sizes.items()),
        *((f"model.{name}", str(value)) for name, value in plan.model.sizes()),
        ("batch_policy", plan.batch_policy),
    )


def write_plan_file(path: str | os.PathLike[str], text: str) -> None:
    """Write the text of a plan file, or PlanFileError with what the system said."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise PlanFileError(
            f"{os.fspath(path)}: cannot write the plan: {error.strerror}. Check that the folder "
            "exists and that this user may write to it; an older plan at this path is unchanged"
        ) from error


# Reading


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the path in front of every plan error raised inside."""
    try:
        yield
    except PlanError as error:
        error.args = (f"{os.fspath(path)}: {error}",)
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan file, or PlanFileError with what the system said."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan: {error.strerror}. Every node needs the plan at this path"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanFormatError(f"the plan is not UTF-8 text: {error}") from error


def parse(text: str) -> PlanParts:
    """Read a plan's JSON. Sizes and degrees are checked by the objects made from them."""
    try:
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise PlanFormatError(
            f"the plan is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise PlanFormatError(f"a plan is one JSON object, got {kind}: {_shorten(document)}")
    # The version comes first: the keys of another version mean nothing here.
    if "version" not in document:
        raise PlanKeyError(
            f"the plan has no key 'version' (this version reads {PLAN_VERSION}); is it a plan?"
        )
    version = require_int("version", document["version"])
    if version != PLAN_VERSION:
        raise PlanVersionError(wrong_version(version))
    _check_keys(document, PLAN_KEYS, "")
    policy = document["batch_policy"]
    if not isinstance(policy, str):
        raise PlanTypeError(f"batch_policy must be a string, got {_shorten(policy)}")
    topology = _topology(_object(document["topology"], "topology", TOPOLOGY_KEYS))
    model = _object(document["model"], "model", MODEL_KEYS)
    sizes = {name: require_int(f"model.{name}", model[name]) for name in MODEL_KEYS}
    return PlanParts(version, topology, ModelDims(**sizes), policy)


def wrong_version(version: int) -> str:
    """What to tell about a plan of another version."""
    if version > PLAN_VERSION:
        return (
            f"plan version {version} is newer than this megatron-ntp, which reads version "
            f"{PLAN_VERSION}. Upgrade megatron-ntp on every node, or make the plan again with this "
            "version"
        )
    return (
        f"plan version {version} is not one that this megatron-ntp reads (version {PLAN_VERSION}). "
        "Make the plan again"
    )


def _topology(values: Mapping[str, object]) -> Topology:
    counts = {
        name: require_int(f"topology.{name}", values[name])
        for name in ("num_replicas", "nominal_tp", "pp", "cp")
    }
    degrees = [
        require_int(f"topology.degrees[{index}]", degree)
        for index, degree in enumerate(_list(values["degrees"], "topology.degrees"))
    ]
    if len(degrees) != counts["num_replicas"]:
        raise PlanTypeError(
            f"topology.degrees has {len(degrees)} entries, topology.num_replicas is "
            f"{counts['num_replicas']}: there is one degree per replica"
        )
    failed = [
        _pair(pair, f"topology.failed[{index}]")
        for index, pair in enumerate(_list(values["failed"], "topology.failed"))
    ]
    return Topology.from_degrees(
        degrees, counts["nominal_tp"], failed, pp=counts["pp"], cp=counts["cp"]
    )


def _pair(value: object, name: str) -> FailedSlot:
    items = _list(value, name)
    if len(items) != 2:
        raise PlanTypeError(f"{name} must be [replica, slot], got {_shorten(value)}")
    return (require_int(f"{name}[0]", items[0]), require_int(f"{name}[1]", items[1]))


def _object(value: object, name: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise PlanTypeError(f"{name} must be an object, got {_shorten(value)}")
    _check_keys(value, known, f"{name}.")
    return value


def _list(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise PlanTypeError(f"{name} must be a list, got {_shorten(value)}")
    return value


def _check_keys(values: Mapping[str, object], known: Sequence[str], prefix: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            guess = f"did you mean '{prefix}{near[0]}'? " if near else ""
            raise PlanKeyError(
                f"unknown key '{prefix}{key}' in the plan; {guess}Known keys: {', '.join(known)}"
            )
    missing = [f"'{prefix}{key}'" for key in known if key not in values]
    if missing:
        raise PlanKeyError(f"the plan lacks {', '.join(missing)}; make it again or add them")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise PlanFormatError(
                f"key '{key}' appears twice in one object, with {_shorten(values[key])} and "
                f"{_shorten(value)}"
            )
        values[key] = value
    return values


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
