"""Which GPUs of a node can train: a verdict for each, with reasons.

    ok       nothing speaks against it
    suspect  it works, and something asks for a look before it is trusted
    dead     do not start a rank on it

Every call has a deadline, since one dead GPU can hang any call on its node; what hangs is dead.
GPUs are named by UUID. One that cannot even be asked its name has an index only, and if the caller
says which UUIDs to expect, the missing ones are reported under their names.
"""

from __future__ import annotations

import enum
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ntp.device import spawn, xids
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.naming import list_gpus
from megatron_ntp.device.nvml import SLOWDOWNS, DeviceLayer, GpuIdentity, HealthFacts, XidEvent

HOOK_TIMEOUT_S = 30.0


class Verdict(enum.StrEnum):
    """In the order of badness."""

    OK = "ok"
    SUSPECT = "suspect"
    DEAD = "dead"

    @property
    def rank(self) -> int:
        return list(Verdict).index(self)


# What each reason means unless a caller overrides it. "xid-N" and "site" bring their own verdict.
VERDICTS = {
    "not-present": Verdict.DEAD,
    "lost": Verdict.DEAD,
    "hangs": Verdict.DEAD,
    "needs-reset": Verdict.DEAD,
    "row-remap-failure": Verdict.DEAD,
    "row-remap-pending": Verdict.SUSPECT,
    "ecc-uncorrectable": Verdict.SUSPECT,
    "nvlink-down": Verdict.SUSPECT,
    "slowed": Verdict.SUSPECT,
    "process-left": Verdict.SUSPECT,
    "unreadable": Verdict.SUSPECT,
    "driver": Verdict.DEAD,
    "kernel-log": Verdict.OK,
    "hook": Verdict.SUSPECT,
}
_RECOVERY = {0: "none", 1: "GPU reset", 2: "node reboot", 3: "drain P2P", 4: "drain and reset"}
_RECOVERY_DRAIN = 3


@dataclass(frozen=True)
class Finding:
    """One reason, and what it means."""

    reason: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True)
class GpuHealth:
    """One GPU. `uuid` is None for one that does not tell its name."""

    index: int | None
    uuid: str | None
    name: str = ""
    pci_bus_id: str = ""
    findings: tuple[Finding, ...] = ()
    pids: tuple[int, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)


@dataclass(frozen=True)
class NodeHealth:
    """All GPUs of a node, and what is wrong with the node as a whole."""

    gpus: tuple[GpuHealth, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return max((worst(self.findings), *(gpu.verdict for gpu in self.gpus)), key=_rank)

    def uuids(self, *verdicts: Verdict) -> tuple[str, ...]:
        """GPUs with one of these verdicts, in order of index."""
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid and gpu.verdict in verdicts)


@dataclass(frozen=True)
class HealthOptions:
    """What a caller knows about its node."""

    expected_uuids: tuple[str, ...] = ()
    expect_idle: bool = False  # between two attempts of a job nothing may run on its GPUs
    allowed_pids: frozenset[int] = frozenset()
    hook: tuple[str, ...] = ()  # a command that prints JSON, see run_hook
    hook_timeout_s: float = HOOK_TIMEOUT_S
    kernel_log: Path | None = xids.KERNEL_LOG
    xids_since_s: float = xids.DEFAULT_SINCE_S
    treat: Mapping[str, Verdict] = field(default_factory=dict)

    def finding(self, reason: str, detail: str = "", verdict: Verdict | None = None) -> Finding:
        usual = verdict if verdict is not None else VERDICTS[reason]
        return Finding(reason, self.treat.get(reason, usual), detail)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict that a list of findings adds up to."""
    return max((finding.verdict for finding in findings), key=_rank, default=Verdict.OK)


def _rank(verdict: Verdict) -> int:
    return verdict.rank


def check_node(
    layer: DeviceLayer, options: HealthOptions | None = None, heard: Sequence[XidEvent] = ()
) -> NodeHealth:
    """Looks at every GPU. `heard` are XIDs that a listener got (see HealthWatch)."""
    options = options or HealthOptions()
    findings: list[Finding] = []
    try:
        identities: tuple[GpuIdentity, ...] = list_gpus(layer)
    except DeviceError as error:
        identities = ()
        findings.append(options.finding("driver", str(error)))
    logged, log_findings = _logged(options)
    findings += log_findings
    said, hook_findings = _ask_hook(options)
    findings += hook_findings
    gpus = [_check_gpu(layer, options, identity, logged, heard, said) for identity in identities]
    present = {gpu.uuid for gpu in gpus}
    for uuid in options.expected_uuids:
        if uuid not in present:
            missing = options.finding("not-present", "expected, and not enumerated by the driver")
            gpus.append(GpuHealth(None, uuid, findings=(missing,)))
    return NodeHealth(tuple(gpus), tuple(findings))


def _check_gpu(
    layer: DeviceLayer,
    options: HealthOptions,
    identity: GpuIdentity,
    logged: Sequence[xids.LoggedXid],
    heard: Sequence[XidEvent],
    said: Mapping[str, Finding],
) -> GpuHealth:
    index, uuid = identity.index, identity.uuid
    if uuid is None:  # whatever the fault: no program can use what cannot be asked its name
        assert identity.fault is not None
        nameless = _of_fault(options, identity.fault, least=Verdict.DEAD)
        return GpuHealth(index, None, findings=(nameless,))
    numbers = {event.xid for event in heard if event.uuid == uuid}
    numbers |= {e.xid for e in logged if xids.same_device(e.pci_bus_id, identity.pci_bus_id)}
    findings = [_of_xid(options, xid) for xid in sorted(numbers) if xid not in xids.APPLICATION]
    findings += [said[key] for key in (uuid, str(index)) if key in said]
    pids: tuple[int, ...] = ()
    try:
        facts = layer.health(uuid)
    except DeviceError as error:
        findings.append(_of_fault(options, error.fault, error.what))
    else:
        pids = facts.pids
        findings += _of_facts(options, facts)
    findings.sort(key=lambda finding: -finding.verdict.rank)
    return GpuHealth(index, uuid, identity.name, identity.pci_bus_id, tuple(findings), pids)


def _of_fault(
    options: HealthOptions, fault: Fault, detail: str = "", least: Verdict | None = None
) -> Finding:
    reasons = {Fault.LOST: "lost", Fault.TIMEOUT: "hangs", Fault.NOT_FOUND: "not-present"}
    return options.finding(reasons.get(fault, "unreadable"), detail or fault.value, least)


def _of_xid(options: HealthOptions, xid: int) -> Finding:
    verdict = Verdict.DEAD if xid in xids.FATAL else Verdict.SUSPECT
    return options.finding(f"xid-{xid}", verdict=verdict)


def _of_facts(options: HealthOptions, facts: HealthFacts) -> list[Finding]:
    found = []
    action = facts.recovery_action or 0
    if action == _RECOVERY_DRAIN:
        found.append(options.finding("needs-reset", _RECOVERY[action], Verdict.SUSPECT))
    elif action:
        found.append(options.finding("needs-reset", _RECOVERY.get(action, f"action {action}")))
    if facts.remap_failure:
        found.append(options.finding("row-remap-failure"))
    if facts.remap_pending:
        found.append(options.finding("row-remap-pending", "a reset completes it"))
    if facts.ecc_uncorrected:
        count = f"{facts.ecc_uncorrected} since the last reset"
        found.append(options.finding("ecc-uncorrectable", count))
    if facts.links_active < facts.links_total:
        links = f"{facts.links_total - facts.links_active} of {facts.links_total} links"
        found.append(options.finding("nvlink-down", links))
    slowed = [reason for reason in facts.reasons if reason in SLOWDOWNS]
    if slowed:
        found.append(options.finding("slowed", f"{','.join(slowed)} at {facts.temperature_c} C"))
    left = [pid for pid in facts.pids if pid not in options.allowed_pids]
    if options.expect_idle and left:
        found.append(options.finding("process-left", f"pid {','.join(map(str, left))}"))
    return found


def _logged(options: HealthOptions) -> tuple[list[xids.LoggedXid], list[Finding]]:
    if options.kernel_log is None:
        return [], []
    try:
        return xids.logged_xids(options.kernel_log, options.xids_since_s), []
    except OSError as error:
        return [], [options.finding("kernel-log", f"past XIDs are not known: {error}")]


# ---- the site's own check ----


def run_hook(command: Sequence[str], timeout_s: float) -> Any:
    """Runs a site's command, which prints one JSON object and nothing else.

    {"gpus": {UUID or index: {"verdict": "ok|suspect|dead", "reason": TEXT}}, "node": {...}}
    """
    done = spawn.run_bounded(command, timeout_s)
    done.check_returncode()
    return json.loads(done.stdout)


def _ask_hook(options: HealthOptions) -> tuple[dict[str, Finding], list[Finding]]:
    if not options.hook:
        return {}, []
    try:
        found = run_hook(options.hook, options.hook_timeout_s)
        unknown = set(found) - {"gpus", "node"}
        if unknown:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        gpus = {key: _said(options, entry) for key, entry in found.get("gpus", {}).items()}
        node = [_said(options, found["node"])] if "node" in found else []
        return gpus, node
    except (
        *(OSError, subprocess.SubprocessError),
        *(ValueError, KeyError, TypeError, AttributeError),  # JSON of another shape
    ) as error:
        return {}, [options.finding("hook", f"{' '.join(options.hook)}: {error}")]


def _said(options: HealthOptions, entry: Mapping[str, Any]) -> Finding:
    return options.finding("site", str(entry.get("reason", "")), Verdict(entry["verdict"]))


# ---- listening ----


class HealthWatch:
    """Checks a node again and again, and keeps what it heard in between."""

    def __init__(self, layer: DeviceLayer, options: HealthOptions | None = None) -> None:
        self._layer, self._options = layer, options or HealthOptions()
        self._heard: list[XidEvent] = []
        self._listening = False

    def poll(self) -> NodeHealth:
        """The node as it is now, with every XID since the watch began."""
        try:
            if not self._listening:
                uuids = [gpu.uuid for gpu in list_gpus(self._layer) if gpu.uuid]
                self._layer.watch_xids(tuple(uuids))
                self._listening = True
            self._heard += self._layer.xids()
        except DeviceError:
            self._listening = False  # check_node meets the same fault and names it
        health = check_node(self._layer, self._options, self._heard)
        findings = [*health.findings, *(f for gpu in health.gpus for f in gpu.findings)]
        if any(finding.reason in ("hangs", "driver") for finding in findings):
            self._listening = False  # the process that listened was given up
        return health
