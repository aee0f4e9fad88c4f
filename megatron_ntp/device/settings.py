"""The flags of the power boost, declared once: parsers, messages and tables follow from the fields.

Metadata has the shape of megatron_ntp.settings: `help`, and `argument` for argparse.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ntp.errors import PowerSettingsError

MODES = ("off", "boost", "require")
DEFAULT_DEADLINE_S = 5.0


def _setting(default: Any, help_text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "argument": argument})


@dataclass(frozen=True)
class PowerSettings:
    """The flags: field `ntp_power_site` is `--ntp-power-site`."""

    ntp_power: str = _setting(
        "off",
        "Give survivors of a reduced replica more power: off, boost (trains on with a warning "
        "where that is impossible) or require (then stops before training).",
        choices=MODES,
    )
    ntp_power_nominal: float | None = _setting(
        None,
        "Power limit of healthy GPUs during the job; what it leaves below the board's maximum is "
        "the room for a boost. Default: the site file's, else the limits that are found.",
        type=float,
        metavar="WATTS",
    )
    ntp_power_site: str | None = _setting(
        None,
        "Site file (YAML) with the budgets of GPUs, domains and racks; see docs/power.md.",
        metavar="FILE",
    )
    ntp_power_socket: str | None = _setting(
        None,
        "Socket of the node's power helper (`megatron-ntp power serve`), where jobs have no right "
        "to set limits themselves.",
        metavar="PATH",
    )
    ntp_power_command: str | None = _setting(
        None,
        "Command that starts the helper for this job alone, e.g. 'sudo -n megatron-ntp power serve "
        "--stdio --site /etc/megatron-ntp/power.yaml'.",
        metavar="COMMAND",
    )
    ntp_power_state_dir: str | None = _setting(
        None,
        "Folder of the node in which found limits are kept until they are restored; in a container "
        "it must be the host's.",
        metavar="DIR",
    )
    ntp_power_model: str | None = _setting(
        None,
        "File with what power buys on each kind of board; read at start, updated at the end.",
        metavar="FILE",
    )
    ntp_power_target_gap: float = _setting(
        0.01,
        "The boost is done when the others wait for the replica less than this share of a step.",
        type=float,
        metavar="SHARE",
    )
    ntp_power_deadline: float = _setting(
        DEFAULT_DEADLINE_S,
        "Seconds that an NVML call may take.",
        type=float,
        metavar="SECONDS",
    )

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> PowerSettings:
        """The settings among a program's parsed arguments."""
        found: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(cls)}
        return cls(**found)

    @property
    def is_on(self) -> bool:
        return self.ntp_power != "off"

    def __post_init__(self) -> None:
        """Raises PowerSettingsError for values that cannot be meant."""
        if self.ntp_power not in MODES:
            raise PowerSettingsError(
                f"--ntp-power {self.ntp_power}: must be one of {', '.join(MODES)}"
            )
        if self.ntp_power_nominal is not None and not _is_positive(self.ntp_power_nominal):
            raise PowerSettingsError(
                f"--ntp-power-nominal {self.ntp_power_nominal}: must be a number of watts above 0"
            )
        if not 0 < self.ntp_power_target_gap < 0.5:
            raise PowerSettingsError(
                f"--ntp-power-target-gap {self.ntp_power_target_gap}: must be within 0 and 0.5"
            )
        if not _is_positive(self.ntp_power_deadline):
            raise PowerSettingsError(
                f"--ntp-power-deadline {self.ntp_power_deadline}: must be a number of seconds "
                "above 0"
            )
        if self.ntp_power_socket and self.ntp_power_command:
            raise PowerSettingsError(
                "--ntp-power-socket and --ntp-power-command exclude each other: give one"
            )


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
