"""One map from what NVML answers to the faults that callers of this package tell apart."""

from __future__ import annotations

import enum

from megatron_ntp.errors import NTPError, StartError


class Fault(enum.StrEnum):
    """Why a device call has no result."""

    NO_PERMISSION = "no permission"
    NOT_SUPPORTED = "not supported"
    LOST = "GPU lost"
    NOT_FOUND = "no such GPU"
    INSUFFICIENT_POWER = "insufficient power"
    LIBRARY_MISSING = "NVML missing"
    OUT_OF_RANGE = "value out of range"
    TIMEOUT = "no answer in time"
    BUSY = "in use by another job"
    REFUSED = "refused"
    FAILED = "failed"


CURES = {
    Fault.NO_PERMISSION: "setting limits needs root or CAP_SYS_ADMIN on the host (uid 0 of a "
    "container is not enough); a site without either runs `megatron-ntp power serve`",
    Fault.NOT_SUPPORTED: "this board or driver cannot do it",
    Fault.LOST: "the GPU fell off the bus or needs a reset; see `megatron-ntp health`",
    Fault.NOT_FOUND: "compare with `nvidia-smi -L`",
    Fault.INSUFFICIENT_POWER: "check the board's power cables",
    Fault.LIBRARY_MISSING: "load the driver, and mount libnvidia-ml.so.1 of the same version into "
    "the container",
    Fault.OUT_OF_RANGE: "choose a value inside the range",
    Fault.TIMEOUT: "the driver hangs, often because of one dead GPU on the node; see "
    "`megatron-ntp health` and the kernel log",
    Fault.BUSY: "wait for that job to end, then `megatron-ntp power status`",
    Fault.REFUSED: "see the rule that is named",
    Fault.FAILED: "see the kernel log for NVRM messages",
}

# NVML's numbers, which nvidia-ml-py repeats as NVML_ERROR_*. Whatever is not here is FAILED.
_BY_NVML_CODE = {
    2: Fault.OUT_OF_RANGE,
    3: Fault.NOT_SUPPORTED,
    4: Fault.NO_PERMISSION,
    6: Fault.NOT_FOUND,
    8: Fault.INSUFFICIENT_POWER,
    9: Fault.LIBRARY_MISSING,  # driver not loaded
    10: Fault.TIMEOUT,
    12: Fault.LIBRARY_MISSING,
    13: Fault.NOT_SUPPORTED,  # the driver is older than the call
    15: Fault.LOST,
    16: Fault.LOST,  # needs a reset
    17: Fault.NO_PERMISSION,  # blocked by the operating system, as a device cgroup does
    18: Fault.LIBRARY_MISSING,  # library and driver are of two versions
    25: Fault.NOT_SUPPORTED,
    28: Fault.NOT_FOUND,
}


class DeviceError(NTPError):
    """A device call without a result. `fault` says which kind, the text says what to do."""

    def __init__(self, fault: Fault, what: str, uuid: str | None = None) -> None:
        self.fault, self.what, self.uuid = fault, what, uuid
        where = f" ({uuid})" if uuid and uuid not in what else ""
        super().__init__(f"{what}{where}: {fault.value}; {CURES[fault]}")

    @classmethod
    def from_nvml(cls, code: int, text: str, call: str, uuid: str | None) -> DeviceError:
        fault = _BY_NVML_CODE.get(code, Fault.FAILED)
        return cls(fault, f"NVML {call} answered {code} ({text})", uuid)


class PowerRequiredError(StartError):
    """--ntp-power require, and power limits cannot be set."""
