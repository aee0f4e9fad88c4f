"""What a node has to offer, and what turns bad while its ranks run.

The sources are those of `launchers.check`: NVML, the fault file, the site's command. Here NVML is
asked for verdicts, not only for names, and GPUs are kept by UUID from the first look on: one that
falls off the bus shifts the numbers of those behind it. Every NVML call has a deadline.

On a machine without a driver the slots are what CUDA_VISIBLE_DEVICES says, or numbers; see
`launchers.nodes.distrust_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.health import (
    GpuHealth,
    HealthOptions,
    HealthWatch,
    NodeHealth,
    Verdict,
)
from megatron_ntp.device.naming import ORDER_VARIABLE, PCI_ORDER, list_gpus
from megatron_ntp.device.nvml_process import NvmlProcess
from megatron_ntp.launchers.check import (
    CheckError,
    Device,
    check_node,
    read_faults,
    this_host,
)
from megatron_ntp.launchers.nodes import Node, Slot

_AMBIGUOUS = (
    f"a number, on a node with different boards, which CUDA sorts by speed: set {ORDER_VARIABLE}="
    f"{PCI_ORDER}, or name GPUs by UUID"
)


@dataclass
class NodeWatch:
    """The health of one node. Not for two threads at a time.

    Args:
        num_slots: GPUs of a healthy node.
        environ: of the ranks: CUDA_VISIBLE_DEVICES and Slurm's variables.
        faults: the site's fault file.
        command: the site's health command.
        deadline_s: for one NVML call.
        kernel_log: where past XIDs are read.
    """

    num_slots: int
    environ: Mapping[str, str]
    faults: Path | None = None
    command: str | None = None
    deadline_s: float = 10.0
    kernel_log: Path | None = HealthOptions.kernel_log
    _layer: NvmlProcess | None = None
    _watch: HealthWatch | None = None
    _has_driver: bool | None = None
    _late: set[str] = field(default_factory=set)  # devices that had not answered at the last look
    _uuids: dict[str, str] = field(default_factory=dict)  # by what the node called it at first

    def report(self) -> Node:
        """Looks at everything, with a new NVML: a GPU may have come back since."""
        self.close()
        try:
            devices = self._devices() if self._ask_for_driver() else None
            return check_node(self.num_slots, self.environ, self.faults, self.command, devices)
        except (CheckError, DeviceError, OSError) as error:
            return Node(this_host(self.environ), (Slot(None, str(error)),) * self.num_slots)

    def bad_among(self, devices: Sequence[str]) -> dict[str, str]:
        """Reasons by device, of those among `devices` that must not be used any longer.

        An answer that is late is a reason if it is late twice in a row: a driver that is busy for
        some seconds is none to stop ranks that train.
        """
        found: dict[str, str] = {}
        if self._has_driver:
            health, late = self._poll(), set[str]()
            by_uuid = {gpu.uuid: gpu for gpu in health.gpus if gpu.uuid}
            for entry in devices:
                gpu = by_uuid.get(self._uuids.get(entry, entry))  # a MIG slice goes by its board
                if gpu is not None and gpu.verdict is not Verdict.DEAD:
                    continue
                if _is_late(health, gpu):
                    late.add(entry)
                    if entry not in self._late:
                        continue
                why = "" if gpu is None else _why(gpu)
                found[entry] = why or "the driver does not answer for it any more"
            self._late = late
        names = {uuid: name for name, uuid in self._uuids.items()}
        for name, reason in read_faults(self.faults, this_host(self.environ)):
            for entry in devices:
                if Device(entry, entry, index=names.get(entry, "")).is_named(name):
                    found.setdefault(entry, reason)
        return found

    def close(self) -> None:
        if self._layer is not None:
            self._layer.close()
        self._layer = self._watch = None

    def _ask_for_driver(self) -> bool:
        if self._has_driver is None:
            self._has_driver = _is_there(self._open())
            if not self._has_driver:
                self.close()
        return self._has_driver

    def _open(self) -> NvmlProcess:
        if self._layer is None:
            self._layer = NvmlProcess(self.deadline_s)
        return self._layer

    def _poll(self) -> NodeHealth:
        if self._watch is None:
            known = tuple(uuid for uuid in self._uuids.values() if uuid.startswith("GPU-"))
            options = HealthOptions(expected_uuids=known, kernel_log=self.kernel_log)
            self._watch = HealthWatch(self._open(), options)
        return self._watch.poll()

    def _devices(self) -> list[Device]:
        health = self._poll()
        mask = self.environ.get("CUDA_VISIBLE_DEVICES")
        named = {str(gpu.index): gpu for gpu in health.gpus if gpu.index is not None}
        by_uuid = {gpu.uuid: gpu for gpu in health.gpus if gpu.uuid}
        if mask:
            entries = [entry.strip() for entry in mask.split(",") if entry.strip()]
        else:
            entries = list(dict.fromkeys([*self._uuids, *named]))
        driver = "; ".join(str(f) for f in health.findings if f.verdict is Verdict.DEAD)
        boards = {gpu.name for gpu in health.gpus if gpu.name}  # one that is gone has none
        in_pci_order = self.environ.get(ORDER_VARIABLE) == PCI_ORDER
        found = []
        for entry in entries:
            if mask and entry.isdecimal() and len(boards) > 1 and not in_pci_order:
                found.append(Device(entry, reason=_AMBIGUOUS, index=entry))
                continue
            gpu = self._find(entry, named, by_uuid)
            found.append(self._device(entry, gpu, driver))
        return found if mask else _without_doubles(found)

    def _find(
        self, entry: str, named: Mapping[str, GpuHealth], by_uuid: Mapping[str, GpuHealth]
    ) -> GpuHealth | None:
        """The GPU that an entry meant when it was first seen."""
        known = self._uuids.get(entry)
        if known is None:
            matches = [gpu for uuid, gpu in by_uuid.items() if _begins(uuid, entry)]
            gpu = named.get(entry) or (matches[0] if len(matches) == 1 else None)
            if gpu is None and entry.startswith("MIG-"):
                gpu = by_uuid.get(self._board_of(entry))
            if gpu is not None and gpu.uuid:
                self._uuids[entry] = gpu.uuid
            return gpu
        return by_uuid.get(known)

    def _board_of(self, slice_uuid: str) -> str:
        for gpu in list_gpus(self._open()):
            if gpu.uuid and slice_uuid in gpu.mig_uuids:
                return gpu.uuid
        return ""

    def _device(self, entry: str, gpu: GpuHealth | None, driver: str) -> Device:
        if gpu is None:
            return Device(entry, reason=driver or "the driver knows no such GPU", index=entry)
        reason = _why(gpu) if gpu.verdict is Verdict.DEAD else ""
        shown = entry if entry.startswith("MIG-") or gpu.uuid is None else gpu.uuid
        return Device(shown, gpu.uuid or "", reason, entry)


def _is_there(layer: NvmlProcess) -> bool:
    """Whether there is a driver, though it may not answer, or have lost all GPUs."""
    try:
        layer.count()
    except DeviceError as error:
        return error.fault is not Fault.LIBRARY_MISSING
    return True


def _is_late(health: NodeHealth, gpu: GpuHealth | None) -> bool:
    """Whether nothing speaks against a GPU but that the driver did not answer in time."""
    hangs = {"driver", "hangs"}
    nameless = [f for one in health.gpus if one.uuid is None for f in one.findings]
    is_node_late = any(finding.reason in hangs for finding in (*health.findings, *nameless))
    if gpu is None:
        return is_node_late
    reasons = {finding.reason for finding in gpu.findings if finding.verdict is Verdict.DEAD}
    return reasons <= (hangs | {"not-present"} if is_node_late else hangs)


def _why(gpu: GpuHealth) -> str:
    return "; ".join(str(f) for f in gpu.findings if f.verdict is Verdict.DEAD)


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def _without_doubles(devices: Sequence[Device]) -> list[Device]:
    """A GPU whose number has shifted is met under both numbers."""
    seen: set[str] = set()
    found = []
    for device in devices:
        if not device.uuid or device.uuid not in seen:
            found.append(device)
        seen.add(device.uuid)
    return found
