"""What a site allows GPUs to draw: one small YAML file, written by whoever owns the power.

    gpu:    {nominal_w: 525, max_w: 700}        # the cap jobs run under, the most a GPU may get
    domain: {num_gpus: 8, budget_w: 5600}       # one scale-up domain
    rack:   {num_domains: 4, budget_w: 18000}   # all domains behind one feed

Every key may be missing: what NVML says of the board, and n x nominal per domain, take its place.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron_ntp.device.nvml import PowerScope


@dataclass(frozen=True)
class GpuPower:
    """Limits of one GPU."""

    nominal_w: float | None = None
    """The limit under which healthy GPUs of a job run."""
    min_w: float | None = None
    """No limit below this."""
    max_w: float | None = None
    """No limit above this, whatever the board would allow."""
    dead_w: float = 0.0
    """What a dead GPU may still draw; taken from what it frees."""


@dataclass(frozen=True)
class DomainPower:
    """What the GPUs of one scale-up domain share."""

    num_gpus: int | None = None
    """GPUs of one scale-up domain. A job that has fewer of them gets its share of the budget."""
    budget_w: float | None = None
    """For the GPUs of one domain together; default num_gpus x nominal."""


@dataclass(frozen=True)
class RackPower:
    """What the domains behind one feed share."""

    num_domains: int | None = None
    """Domains behind one feed. Those that are not the job's are counted at num_gpus x nominal."""
    budget_w: float | None = None
    """For the GPUs of one rack together; default: no limit of its own."""
    host_pattern: str | None = None
    """Regular expression whose first group is the rack in a host name, as in '(r[0-9]+)-.*'.
    Without it all domains of a job are taken to be in one rack, which is never too generous."""

    def name_of(self, host: str) -> str:
        """The rack that a host is in."""
        match = re.fullmatch(self.host_pattern, host) if self.host_pattern else None
        return match.group(1) if match else ""


@dataclass(frozen=True)
class SitePower:
    """All that a site states, checked for contradictions."""

    gpu: GpuPower = GpuPower()
    domain: DomainPower = DomainPower()
    rack: RackPower = RackPower()
    scope: PowerScope = PowerScope.GPU


def load_site(path: Path, must_be_roots: bool = False) -> SitePower:
    """Reads and checks a site file.

    `must_be_roots`: a helper with privileges must not take its bounds from a file that others
    can write.
    """
    if must_be_roots:
        _check_owner(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"power site file {path} cannot be read: {error}") from error
    return parse_site(found, str(path))


def parse_site(found: Any, where: str) -> SitePower:
    """Checks what a YAML parser made of a site file."""
    parts = _mapping(found, where, ("gpu", "domain", "rack", "scope"))
    scope = parts.get("scope", PowerScope.GPU.value)
    if scope not in [entry.value for entry in PowerScope]:
        raise ValueError(f"{where}: scope is {scope!r}; it must be 'gpu' or 'module'")
    site = SitePower(
        gpu=_numbers(GpuPower, parts.get("gpu", {}), f"{where}: gpu"),
        domain=_numbers(DomainPower, parts.get("domain", {}), f"{where}: domain"),
        rack=_numbers(RackPower, parts.get("rack", {}), f"{where}: rack"),
        scope=PowerScope(scope),
    )
    _check_consistent(site, where)
    return site


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _mapping(found: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: must map names to values, not {found!r}")
    unknown = sorted(str(key) for key in found if key not in known)
    if unknown:
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return found


def _numbers[T](kind: type[T], found: Any, where: str) -> T:
    values = _mapping(found, where, _names(kind))
    for name, value in values.items():
        if name == "host_pattern":
            _check_pattern(value, where)
            continue
        whole = name.startswith("num_")
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < (1 if whole else 0):
            raise ValueError(
                f"{where}.{name} is {value!r}; it must be a "
                + ("count of at least 1" if whole else "number of watts")
            )
    return kind(**values)


def _check_pattern(value: Any, where: str) -> None:
    try:
        groups = re.compile(value).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}.host_pattern {value!r} is no regular expression: {error}") from (
            error
        )
    if groups < 1:
        raise ValueError(f"{where}.host_pattern {value!r} needs a group for the rack's name")


def _check_consistent(site: SitePower, where: str) -> None:
    gpu, domain, rack = site.gpu, site.domain, site.rack
    order = [(name, getattr(gpu, name)) for name in ("min_w", "nominal_w", "max_w")]
    stated = [(name, value) for name, value in order if value is not None]
    for (low_name, low), (high_name, high) in itertools.pairwise(stated):
        if low > high:
            raise ValueError(f"{where}: gpu.{low_name} {low:g} is above gpu.{high_name} {high:g}")
    if gpu.nominal_w is not None and gpu.dead_w > gpu.nominal_w:
        raise ValueError(f"{where}: gpu.dead_w {gpu.dead_w:g} is above nominal_w {gpu.nominal_w:g}")
    if domain.budget_w is not None and domain.num_gpus is None:
        raise ValueError(f"{where}: domain.budget_w needs domain.num_gpus")
    if rack.budget_w is not None and (rack.num_domains is None or domain.num_gpus is None):
        raise ValueError(f"{where}: rack.budget_w needs rack.num_domains and domain.num_gpus")
    if gpu.nominal_w is None or domain.num_gpus is None:
        return
    domain_w = domain.num_gpus * gpu.nominal_w
    if domain.budget_w is not None and domain.budget_w < domain_w:
        raise ValueError(
            f"{where}: domain.budget_w {domain.budget_w:g} is less than num_gpus x nominal_w = "
            f"{domain_w:g}, so a healthy domain would be over budget"
        )
    rack_w = (rack.num_domains or 0) * domain_w
    if rack.budget_w is not None and rack.budget_w < rack_w:
        raise ValueError(
            f"{where}: rack.budget_w {rack.budget_w:g} is less than num_domains x num_gpus x "
            f"nominal_w = {rack_w:g}, so a healthy rack would be over budget"
        )


def _check_owner(path: Path) -> None:
    try:
        found = os.lstat(path)
    except OSError as error:
        raise ValueError(f"power site file {path} cannot be read: {error}") from error
    regular = stat.S_ISREG(found.st_mode)
    if not regular or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise ValueError(
            f"power site file {path} must be a regular file that only root can write (owner uid "
            f"{found.st_uid}, mode {stat.filemode(found.st_mode)}); chown root and chmod 644 it"
        )
