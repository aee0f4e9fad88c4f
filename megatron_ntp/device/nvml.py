"""NVML through nvidia-ml-py, in the process that imports this module.

GPUs are named by UUID in every call: indices shift when a GPU falls off the bus. Handles are looked
up anew each time, since a reset makes old ones stale, and the look-up costs microseconds. Anything
that can hang belongs behind nvml_process.NvmlProcess, which offers the same methods.

Power has a scope. GPU is the only one that is written unless a caller asks for MODULE, which on
Grace-Blackwell boards is the budget of the CPU and the GPU together.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pynvml

from megatron_ntp.device.errors import DeviceError, Fault


class PowerScope(enum.StrEnum):
    """What a limit applies to."""

    GPU = "gpu"
    MODULE = "module"


_NVML_SCOPES = {
    PowerScope.GPU: pynvml.NVML_POWER_SCOPE_GPU,
    PowerScope.MODULE: pynvml.NVML_POWER_SCOPE_MODULE,
}

# Bits of the clock-event mask. Those in SLOWDOWNS mean that the board protects itself.
REASONS = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


@dataclass(frozen=True)
class GpuIdentity:
    """A GPU as the driver enumerates it. A lost one has an index and a fault, and no name."""

    index: int
    uuid: str | None
    name: str = ""
    pci_bus_id: str = ""
    mig_uuids: tuple[str, ...] = ()
    fault: Fault | None = None


@dataclass(frozen=True)
class PowerLimits:
    """Requested is what was last set; enforced is what the board obeys, the lowest of its caps."""

    requested_mw: int
    enforced_mw: int
    default_mw: int
    min_mw: int
    max_mw: int


@dataclass(frozen=True)
class GpuReading:
    """One look at a running GPU. None: this board does not say."""

    uuid: str
    name: str
    limits: PowerLimits
    draw_mw: int | None
    clock_mhz: int | None
    max_clock_mhz: int | None
    temperature_c: int | None
    energy_mj: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class HealthFacts:
    """What NVML knows of a GPU's condition. None: this board does not say."""

    uuid: str
    ecc_uncorrected: int | None
    remap_pending: bool | None
    remap_failure: bool | None
    recovery_action: int | None
    links_active: int
    links_total: int
    reasons: tuple[str, ...]
    temperature_c: int | None
    pids: tuple[int, ...]


@dataclass(frozen=True)
class XidEvent:
    """One error that the driver reported for a GPU, under NVIDIA's number for it."""

    uuid: str
    xid: int


class DeviceLayer(Protocol):
    """What the rest of the package needs of a node. Every method may raise DeviceError."""

    def count(self) -> int: ...
    def identity(self, index: int) -> GpuIdentity: ...
    def limits(self, uuid: str, scope: PowerScope = ...) -> PowerLimits: ...
    def reading(self, uuid: str) -> GpuReading: ...
    def set_limit(self, uuid: str, limit_mw: int, scope: PowerScope = ...) -> PowerLimits: ...
    def lock_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None: ...
    def reset_clocks(self, uuid: str) -> None: ...
    def health(self, uuid: str) -> HealthFacts: ...
    def pids(self, uuid: str) -> tuple[int, ...]: ...
    def watch_xids(self, uuids: tuple[str, ...]) -> None: ...
    def xids(self) -> tuple[XidEvent, ...]: ...
    def hold(self, fd: int) -> None: ...
    def let_go(self, fd: int) -> None: ...
    def writes_settled(self) -> bool: ...
    def close(self) -> None: ...


@contextmanager
def _nvml_call(call: str, uuid: str | None = None) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise DeviceError.from_nvml(int(error.value), str(error), call, uuid) from error


class Nvml:
    """The node's NVML. Initialised by the first call, so that its failure is that call's error."""

    def __init__(self) -> None:
        self._initialized = False
        self._event_set: Any = None

    def _ready(self) -> None:
        if not self._initialized:
            with _nvml_call("nvmlInit"):
                pynvml.nvmlInit()
            self._initialized = True

    def _handle(self, uuid: str) -> Any:
        self._ready()
        with _nvml_call("nvmlDeviceGetHandleByUUID", uuid):
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def close(self) -> None:
        if self._initialized:
            self._initialized = False
            with _nvml_call("nvmlShutdown"):
                pynvml.nvmlShutdown()

    def hold(self, fd: int) -> None:
        """Nothing to do: this process has the descriptor open (see NvmlProcess)."""

    def let_go(self, fd: int) -> None:
        """Nothing to do either."""

    def writes_settled(self) -> bool:
        """Whether no earlier write can still land. Here every call has returned."""
        return True

    # ---- who is there ----

    def count(self) -> int:
        self._ready()
        with _nvml_call("nvmlDeviceGetCount"):
            return int(pynvml.nvmlDeviceGetCount())

    def identity(self, index: int) -> GpuIdentity:
        self._ready()
        with _nvml_call(f"nvmlDeviceGetHandleByIndex({index})"):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        with _nvml_call(f"identity of GPU index {index}"):
            return GpuIdentity(
                index=index,
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                name=str(pynvml.nvmlDeviceGetName(handle)),
                pci_bus_id=str(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                mig_uuids=self._mig_uuids(handle),
            )

    def _mig_uuids(self, handle: Any) -> tuple[str, ...]:
        mode = _if_supported(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        if mode is None or mode[0] == 0:
            return ()
        found = []
        num_slots = _if_supported(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
        for slot in range(int(num_slots)):
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_NoPermission):
                continue  # no slice there, or one that this container does not see
            found.append(str(pynvml.nvmlDeviceGetUUID(mig)))
        return tuple(found)

    # ---- power and clocks ----

    def limits(self, uuid: str, scope: PowerScope = PowerScope.GPU) -> PowerLimits:
        handle = self._handle(uuid)
        with _nvml_call("power limits", uuid):
            if scope is PowerScope.MODULE:
                return _module_limits(handle)
            low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
            return PowerLimits(
                requested_mw=int(pynvml.nvmlDeviceGetPowerManagementLimit(handle)),
                enforced_mw=int(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
                default_mw=int(pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)),
                min_mw=int(low),
                max_mw=int(high),
            )

    def set_limit(
        self, uuid: str, limit_mw: int, scope: PowerScope = PowerScope.GPU
    ) -> PowerLimits:
        """Sets a limit and reads it back: the enforced value may be lower than the requested."""
        allowed = self.limits(uuid, scope)
        if not allowed.min_mw <= limit_mw <= allowed.max_mw:
            raise DeviceError(
                Fault.OUT_OF_RANGE,
                f"{limit_mw / 1000:g} W is not within this board's {allowed.min_mw / 1000:g} W to "
                f"{allowed.max_mw / 1000:g} W",
                uuid,
            )
        handle = self._handle(uuid)
        with _nvml_call(f"set power limit to {limit_mw / 1000:g} W", uuid):
            if scope is PowerScope.MODULE:
                _set_module_limit(handle, limit_mw)
            else:
                pynvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        return self.limits(uuid, scope)

    def lock_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        """Not used by the power boost, which could not leave locked clocks as found.

        NVML sets and resets locked clocks, and has no call that tells which are locked.
        """
        handle = self._handle(uuid)
        with _nvml_call(f"lock clocks to {min_mhz}-{max_mhz} MHz", uuid):
            pynvml.nvmlDeviceSetGpuLockedClocks(handle, min_mhz, max_mhz)

    def reset_clocks(self, uuid: str) -> None:
        handle = self._handle(uuid)
        with _nvml_call("reset locked clocks", uuid):
            pynvml.nvmlDeviceResetGpuLockedClocks(handle)

    def reading(self, uuid: str) -> GpuReading:
        limits, handle = self.limits(uuid), self._handle(uuid)
        sm = pynvml.NVML_CLOCK_SM
        with _nvml_call("reading", uuid):
            return GpuReading(
                uuid=uuid,
                name=str(pynvml.nvmlDeviceGetName(handle)),
                limits=limits,
                draw_mw=_if_supported(lambda: int(pynvml.nvmlDeviceGetPowerUsage(handle))),
                clock_mhz=_if_supported(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, sm))),
                max_clock_mhz=_if_supported(
                    lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, sm))
                ),
                temperature_c=_temperature_c(handle),
                energy_mj=_if_supported(
                    lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
                ),
                reasons=_reasons(handle),
            )

    # ---- condition ----

    def health(self, uuid: str) -> HealthFacts:
        handle = self._handle(uuid)
        with _nvml_call("health", uuid):
            rows = _if_supported(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
            links = list(_link_states(handle))
            return HealthFacts(
                uuid=uuid,
                ecc_uncorrected=_if_supported(lambda: _uncorrected(handle)),
                remap_pending=None if rows is None else bool(rows[2]),
                remap_failure=None if rows is None else bool(rows[3]),
                recovery_action=_field(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
                links_active=sum(links),
                links_total=len(links),
                reasons=_reasons(handle),
                temperature_c=_temperature_c(handle),
                pids=_if_supported(lambda: _pids(handle)) or (),
            )

    def pids(self, uuid: str) -> tuple[int, ...]:
        handle = self._handle(uuid)
        with _nvml_call("compute processes", uuid):
            return _pids(handle)

    def watch_xids(self, uuids: tuple[str, ...]) -> None:
        """Starts to listen. NVML keeps no history: only XIDs from now on are seen.

        Boards that have no such events are left out.
        """
        self._ready()
        if self._event_set is None:
            with _nvml_call("nvmlEventSetCreate"):
                self._event_set = pynvml.nvmlEventSetCreate()
        wanted = pynvml.nvmlEventTypeXidCriticalError
        for uuid in uuids:
            handle = self._handle(uuid)
            with _nvml_call("nvmlDeviceRegisterEvents", uuid):
                _if_supported(
                    partial(pynvml.nvmlDeviceRegisterEvents, handle, wanted, self._event_set)
                )

    def xids(self) -> tuple[XidEvent, ...]:
        """Those that came in since the last call.

        Raises:
            DeviceError: nobody listens, in this process.
        """
        if self._event_set is None:
            raise DeviceError(Fault.FAILED, "XIDs are not listened to: call watch_xids first")
        found: list[XidEvent] = []
        while True:
            with _nvml_call("XID events"):
                try:
                    event = pynvml.nvmlEventSetWait_v2(self._event_set, 0)
                except pynvml.NVMLError_Timeout:
                    break
                uuid = str(pynvml.nvmlDeviceGetUUID(event.device))
            found.append(XidEvent(uuid, int(event.eventData)))
        return tuple(found)


def _if_supported[T](read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,  # the driver is older
        pynvml.NVMLError_NoPermission,  # as of a board's processes where MIG is on
    ):
        return None


def _temperature_c(handle: Any) -> int | None:
    sensor = pynvml.NVML_TEMPERATURE_GPU
    return _if_supported(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, sensor)))


def _reasons(handle: Any) -> tuple[str, ...]:
    mask = _if_supported(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if mask is None:  # the older name of the same call
        mask = _if_supported(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return tuple(name for bit, name in REASONS.items() if (mask or 0) & bit)


def _uncorrected(handle: Any) -> int:
    return int(
        pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    )


def _pids(handle: Any) -> tuple[int, ...]:
    return tuple(int(p.pid) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _link_states(handle: Any) -> Iterator[bool]:
    for link in range(int(pynvml.NVML_NVLINK_MAX_LINKS)):
        try:
            yield bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_InvalidArgument,  # past the last link of this board
            pynvml.NVMLError_FunctionNotFound,
            pynvml.NVMLError_NoPermission,
        ):
            return


def _field(handle: Any, field: int, scope: int = 0) -> int | None:
    value = _if_supported(lambda: pynvml.nvmlDeviceGetFieldValues(handle, [(field, scope)]))
    if value is None or value[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(value[0].value.uiVal)


def _module_limits(handle: Any) -> PowerLimits:
    scope = _NVML_SCOPES[PowerScope.MODULE]
    names = ("REQUESTED", "CURRENT", "DEFAULT", "MIN", "MAX")
    values = [
        _field(handle, getattr(pynvml, f"NVML_FI_DEV_POWER_{name}_LIMIT"), scope) for name in names
    ]
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return PowerLimits(*found)


def _set_module_limit(handle: Any, limit_mw: int) -> None:
    # nvidia-ml-py's own wrapper of this call drops the return code, so a refusal would go unseen.
    value = pynvml.c_nvmlPowerValue_v2_t()
    value.version = pynvml.nvmlPowerValue_v2
    value.powerScope = _NVML_SCOPES[PowerScope.MODULE]
    value.powerValueMw = limit_mw
    code = pynvml.nvmlLib.nvmlDeviceSetPowerManagementLimit_v2(handle, ctypes.byref(value))
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
