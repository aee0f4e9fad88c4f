"""What one node has to offer: its slots, each with a device or with the reason why not.

Run on every node in the environment of the training itself (same container, same Slurm step
options), so that device names mean the same in both. Four sources, each may exclude:

- what is visible: CUDA_VISIBLE_DEVICES where it is set (by Slurm or a container), else NVML, else
  the number Slurm says, else all slots;
- NVML: a GPU that does not answer within a deadline;
- the fault file of the site: lines `HOST DEVICE reason`, `*` for all devices of a host;
- the health command of the site: it prints lines `DEVICE reason`.

A device is an index or a UUID as visible here; the beginning of a UUID is enough.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.atomic import write_atomically
from megatron_ntp.device.spawn import run_bounded
from megatron_ntp.launchers.nodes import Node, Slot, silent_node

ALL_DEVICES = "*"
NVML_DEADLINE_S = 10.0
COMMAND_DEADLINE_S = 120.0
_DRIVER = Path("/sys/module/nvidia/version")


class CheckError(ValueError):
    """A fault file or a health command that cannot be understood."""


@dataclass
class Device:
    """A visible device: its names, and why it is not to be used.

    `entry` is what CUDA_VISIBLE_DEVICES will say, `index` another name for it.
    """

    entry: str
    uuid: str = ""
    reason: str = ""
    index: str = ""

    def is_named(self, name: str) -> bool:
        if name in (ALL_DEVICES, self.entry, self.index):
            return True
        return name.startswith("GPU-") and self.uuid.startswith(name)


def this_host(environ: Mapping[str, str]) -> str:
    """The node's name as Slurm has it, else the host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def check_node(
    num_slots: int,
    environ: Mapping[str, str],
    faults: Path | None = None,
    command: str | None = None,
    devices: Sequence[Device] | None = None,
) -> Node:
    """The report of this node, of `devices` where the caller has found them. Raises CheckError."""
    host = this_host(environ)
    devices = _visible(num_slots, environ) if devices is None else devices
    for name, reason in [*read_faults(faults, host), *_from_command(command)]:
        hit = [device for device in devices if device.is_named(name)]
        for device in hit:
            device.reason = device.reason or reason
        if not hit:  # gone already, or not of this job: no error, but not silent either
            print(f"{host}: no visible device {name!r} ({reason})", flush=True)
    slots = [Slot(None if d.reason else d.entry, d.reason) for d in devices[:num_slots]]
    gone = f"not visible: {len(devices)} of {num_slots} GPUs are"
    slots += [Slot(None, gone)] * (num_slots - len(slots))
    return Node(host, tuple(slots), _block(environ))


def _block(environ: Mapping[str, str]) -> str:
    """Everything above this node in Slurm's topology, e.g. the block of an NVL rack."""
    return environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def _visible(num_slots: int, environ: Mapping[str, str]) -> list[Device]:
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in mask.split(",") if entry.strip()] if mask else None
    if _DRIVER.exists():
        return _ask_driver(entries)
    if entries is None:
        count = environ.get("SLURM_GPUS_ON_NODE", "")
        entries = [str(i) for i in range(int(count) if count.isdecimal() else num_slots)]
    return [Device(entry, entry if entry.startswith("GPU-") else "") for entry in entries]


def _ask_driver(entries: list[str] | None) -> list[Device]:
    from megatron_ntp.device.errors import DeviceError
    from megatron_ntp.device.naming import list_gpus
    from megatron_ntp.device.nvml_process import NvmlProcess

    layer = NvmlProcess(NVML_DEADLINE_S)
    try:
        gpus = list_gpus(layer)
    except DeviceError as error:
        if entries is None:
            raise CheckError(f"the GPUs of this node cannot be asked: {error}") from error
        return [Device(entry, reason=str(error)) for entry in entries]
    finally:
        layer.close()
    if entries is None:
        entries = [str(gpu.index) for gpu in gpus]
    devices = []
    for entry in entries:
        match = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid == entry)
        ]
        device = Device(entry, entry if entry.startswith("GPU-") else "")
        if match:
            device.uuid = match[0].uuid or ""
            device.reason = f"does not answer: {match[0].fault}" if match[0].uuid is None else ""
        elif not entry.startswith("MIG-"):
            device.reason = "the driver knows no such GPU"
        devices.append(device)
    return devices


def read_faults(path: Path | None, host: str) -> Iterator[tuple[str, str]]:
    """(device, reason) of the lines for this host, by its full or its short name.

    No file is no faults. A line that makes no sense costs the node that it names, and no other.

    Raises:
        CheckError: a line for this host names no device.
    """
    if path is None or not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip().split(maxsplit=2)
        if not words or not _is_same_host(words[0], host):
            continue
        if len(words) < 2:
            raise CheckError(f"{path}, line {number}: {line!r} is not HOST DEVICE [reason]")
        yield words[1], words[2] if len(words) > 2 else f"in {path.name}"


def _is_same_host(one: str, other: str) -> bool:
    """Whether two names mean one host, of which one may leave out the domain."""
    short = {name.partition(".")[0] for name in (one, other)}
    return one == other or (len(short) == 1 and ("." in one) != ("." in other))


def _from_command(command: str | None) -> Iterator[tuple[str, str]]:
    """(device, reason) as the site's command prints them; if it fails, all of the node."""
    if not command:
        return
    try:
        done = run_bounded(command, COMMAND_DEADLINE_S)
    except subprocess.TimeoutExpired:
        yield ALL_DEVICES, f"the health command did not end within {COMMAND_DEADLINE_S:g} s"
        return
    if done.returncode:
        yield ALL_DEVICES, f"the health command ended with status {done.returncode}"
        return
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        words = line.split(maxsplit=1)
        if words:
            yield words[0], words[1] if len(words) > 1 else "health command"


def write_report(node: Node, folder: Path) -> Path:
    """Leaves the report where `place` looks for it: whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{node.host}.json"
    write_atomically(path, node.to_json())
    return path


def read_reports(folder: Path, hosts: list[str], num_slots: int) -> list[Node]:
    """Reports of these nodes in their order; a node without one counts as dead."""
    nodes = []
    for host in hosts:
        try:
            nodes.append(Node.from_json((folder / f"{host}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            nodes.append(silent_node(host, num_slots))
    return nodes
