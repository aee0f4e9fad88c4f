"""The tests' side of the fake NVML: build the library, lay out a node, steer it, read its log.

The structures mirror state.h; `_check_layout` compares their sizes with the library's.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
SONAME = "libnvidia-ml.so.1"
STATE_VARIABLE = "FAKE_NVML_STATE"
MAX_GPUS, MAX_RULES, MAX_PIDS, MAX_LINKS, MAX_XIDS, MAX_MIG = 16, 32, 8, 18, 16, 7
MAGIC = 0x4E54502


class SetPrivilege(enum.IntEnum):
    """Who may change limits."""

    ANYONE = 0
    ROOT = 1
    NOBODY = 2


class Limits(ctypes.Structure):
    _fields_ = [
        ("min_mw", ctypes.c_uint32),
        ("max_mw", ctypes.c_uint32),
        ("default_mw", ctypes.c_uint32),
        ("requested_mw", ctypes.c_uint32),
    ]


class FakeGpu(ctypes.Structure):
    _fields_ = [
        ("_uuid", ctypes.c_char * 96),
        ("_name", ctypes.c_char * 96),
        ("_pci_bus_id", ctypes.c_char * 32),
        ("_mig_uuids", (ctypes.c_char * 96) * MAX_MIG),
        ("load", ctypes.c_double),
        ("exponent", ctypes.c_double),
        ("ambient_c", ctypes.c_double),
        ("c_per_w", ctypes.c_double),
        ("tau_s", ctypes.c_double),
        ("slowdown_c", ctypes.c_double),
        ("temperature_c", ctypes.c_double),
        ("energy_mj", ctypes.c_double),
        ("updated_s", ctypes.c_double),
        ("extra_reasons", ctypes.c_uint64),
        ("xids", ctypes.c_uint64 * MAX_XIDS),
        ("ecc_corrected", ctypes.c_uint64),
        ("ecc_uncorrected", ctypes.c_uint64),
        ("gpu_limit", Limits),
        ("module_limit", Limits),
        ("present", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("external_cap_mw", ctypes.c_uint32),
        ("max_clock_mhz", ctypes.c_uint32),
        ("locked_min_mhz", ctypes.c_uint32),
        ("locked_max_mhz", ctypes.c_uint32),
        ("throttled", ctypes.c_uint32),
        ("supports_limits", ctypes.c_uint32),
        ("supports_module", ctypes.c_uint32),
        ("ignores_sets", ctypes.c_uint32),
        ("remap_corrected", ctypes.c_uint32),
        ("remap_uncorrected", ctypes.c_uint32),
        ("remap_pending", ctypes.c_uint32),
        ("remap_failure", ctypes.c_uint32),
        ("recovery_action", ctypes.c_uint32),
        ("num_links", ctypes.c_uint32),
        ("link_active", ctypes.c_uint32 * MAX_LINKS),
        ("num_pids", ctypes.c_uint32),
        ("pids", ctypes.c_uint32 * MAX_PIDS),
        ("num_xids", ctypes.c_uint32),
        ("num_mig", ctypes.c_uint32),
    ]

    @property
    def uuid(self) -> str:
        return bytes(self._uuid).decode()

    @property
    def requested_w(self) -> float:
        return float(self.gpu_limit.requested_mw / 1000)

    def set_limit_w(self, watts: float) -> None:
        """As an administrator would, behind everyone's back; not in the log."""
        self.gpu_limit.requested_mw = int(watts * 1000)

    def set_processes(self, *pids: int) -> None:
        self.num_pids = len(pids)
        for index, pid in enumerate(pids):
            self.pids[index] = pid

    def raise_xid(self, xid: int) -> None:
        self.xids[self.num_xids % MAX_XIDS] = xid
        self.num_xids += 1

    def add_mig(self, uuid: str) -> None:
        self._mig_uuids[self.num_mig].value = uuid.encode()
        self.num_mig += 1

    def pace(self) -> float:
        """Clock over maximum clock, as the model in model.c has it."""
        demand_mw = self.load * self.gpu_limit.max_mw
        limit_mw = self.gpu_limit.requested_mw
        if self.external_cap_mw:
            limit_mw = min(limit_mw, self.external_cap_mw)
        share = (min(demand_mw, limit_mw) / self.gpu_limit.max_mw) ** self.exponent
        return float(share * (0.8 if self.throttled else 1.0))


class Rule(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_char * 64),
        ("gpu", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("hang_ms", ctypes.c_int32),
        ("remaining", ctypes.c_int32),
    ]


class NodeState(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("num_gpus", ctypes.c_uint32),
        ("set_privilege", ctypes.c_uint32),
        ("trace", ctypes.c_uint32),
        ("virtual_now_s", ctypes.c_double),
        ("rules", Rule * MAX_RULES),
        ("gpus", FakeGpu * MAX_GPUS),
    ]


@dataclass(frozen=True)
class WriteRecord:
    """One set call as the library logged it."""

    time_ns: int
    pid: int
    euid: int
    function: str
    uuid: str
    value: int
    result: int
    sum_requested_mw: int


def build_library() -> Path:
    """The folder with libnvidia-ml.so.1, compiled once per content of the sources."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fake-nvml-{os.getuid()}-{digest}"
    if (folder / SONAME).exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / SONAME
        subprocess.run(
            ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
            + [f"-Wl,-soname,{SONAME}", "-o", str(built)]
            + [str(path) for path in sources if path.suffix == ".c"]
            + ["-lm", "-lpthread"],
            check=True,
        )
        folder.mkdir(mode=0o755, exist_ok=True)
        copy = folder / f"{SONAME}.{os.getpid()}"
        shutil.copy(built, copy)
        copy.chmod(0o755)
        os.replace(copy, folder / SONAME)
    return folder


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    sizes = (library.fakeSizeofNode(), library.fakeSizeofGpu())
    mirrored = (ctypes.sizeof(NodeState), ctypes.sizeof(FakeGpu))
    assert sizes == mirrored, f"state.h and node.py differ: {sizes} and {mirrored} bytes"
    return library


class FakeNode:
    """A node's state file, mapped into the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_path = Path(f"{path}.log")
        self.library_folder = build_library()
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), ctypes.sizeof(NodeState))
        self.state = NodeState.from_buffer(self._map)

    @classmethod
    def create(cls, folder: Path, num_gpus: int = 8, **gpu_fields: Any) -> FakeNode:
        """A node of equal boards: 500 W found, 700 W default and maximum, 200 W minimum."""
        path = folder / "fake-nvml-state"
        path.write_bytes(bytes(ctypes.sizeof(NodeState)))
        path.chmod(0o666)
        node = cls(path)
        node.reset(num_gpus, **gpu_fields)
        return node

    def reset(self, num_gpus: int, **gpu_fields: Any) -> None:
        ctypes.memset(ctypes.addressof(self.state), 0, ctypes.sizeof(NodeState))
        self.log_path.write_bytes(b"")
        self.log_path.chmod(0o666)
        self.state.num_gpus = num_gpus
        self.state.virtual_now_s = -1
        for index in range(num_gpus):
            self._lay_out(index, gpu_fields)
        self.state.magic = MAGIC

    def _lay_out(self, index: int, gpu_fields: dict[str, Any]) -> None:
        gpu = self.state.gpus[index]
        gpu._uuid = f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}".encode()
        gpu._name = b"Imagined H100"
        gpu._pci_bus_id = f"00000000:{0x10 + index:02X}:00.0".encode()
        for limits in (gpu.gpu_limit, gpu.module_limit):
            limits.min_mw, limits.max_mw, limits.default_mw = 200_000, 700_000, 700_000
        gpu.gpu_limit.requested_mw = 500_000
        gpu.module_limit.requested_mw = gpu.module_limit.max_mw = 1_000_000
        gpu.load, gpu.exponent, gpu.max_clock_mhz = 1.0, 0.5, 1980
        gpu.ambient_c, gpu.c_per_w, gpu.tau_s, gpu.slowdown_c = 30, 0.05, 5, 87
        gpu.temperature_c, gpu.energy_mj, gpu.updated_s = 50, 1e9, time.monotonic()
        gpu.present, gpu.supports_limits = 1, 1
        gpu.num_links = MAX_LINKS
        gpu.link_active[:] = [1] * MAX_LINKS
        for name, value in gpu_fields.items():
            setattr(gpu, name, value)

    def gpu(self, index: int) -> FakeGpu:
        gpu: FakeGpu = self.state.gpus[index]
        return gpu

    @property
    def uuids(self) -> list[str]:
        return [self.gpu(index).uuid for index in range(self.state.num_gpus)]

    def limits_w(self) -> list[float]:
        return [self.gpu(index).requested_w for index in range(self.state.num_gpus)]

    def set_limits_w(self, watts: float) -> None:
        for index in range(self.state.num_gpus):
            self.gpu(index).set_limit_w(watts)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For changes of several fields that other processes must see as one."""
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def add_rule(
        self, function: str, gpu: int = -1, result: int = 0, hang_ms: int = 0, times: int = -1
    ) -> None:
        """From now on calls of `function` (a trailing * matches any rest) fail or hang."""
        for rule in self.state.rules:
            if not rule.function or rule.remaining == 0:
                rule.gpu, rule.result, rule.hang_ms, rule.remaining = gpu, result, hang_ms, times
                rule.function = function.encode()
                return
        raise AssertionError("no room for another rule")

    def clear_rules(self) -> None:
        for rule in self.state.rules:
            rule.function = b""

    def reload_driver(self) -> None:
        """What an unloaded and loaded driver leaves: default limits, counters at zero."""
        with self.locked():
            for index in range(self.state.num_gpus):
                gpu = self.gpu(index)
                gpu.gpu_limit.requested_mw = gpu.gpu_limit.default_mw
                gpu.locked_min_mhz = gpu.locked_max_mhz = 0
                gpu.lost, gpu.energy_mj = 0, 0

    def advance(self, seconds: float) -> None:
        """Moves the model's clock, which stands still from the first call on."""
        now_s = self.state.virtual_now_s
        self.state.virtual_now_s = (time.monotonic() if now_s < 0 else now_s) + seconds

    def env(self, **extra: str) -> dict[str, str]:
        """Environment of a process that is to see this node."""
        found = dict(os.environ, **{STATE_VARIABLE: str(self.path)})
        old = found.get("LD_LIBRARY_PATH")
        found["LD_LIBRARY_PATH"] = os.pathsep.join(
            [str(self.library_folder)] + ([old] if old else [])
        )
        return found | extra

    def load_here(self) -> None:
        """Makes nvidia-ml-py in this process use the library: a later load of the same SONAME
        answers with the one that is already there."""
        os.environ[STATE_VARIABLE] = str(self.path)
        _load(self.library_folder / SONAME)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def writes(self) -> list[WriteRecord]:
        """Every set call so far, in order."""
        return [
            WriteRecord(**{key: value for key, value in event.items() if key != "event"})
            for event in self.events()
            if event["event"] == "write"
        ]
