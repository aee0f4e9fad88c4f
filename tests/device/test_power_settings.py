"""Flags of the power boost, what they refuse, and how they reach a keeper."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from power_kit import site_file

from megatron_ntp.device.client import KeeperOptions
from megatron_ntp.device.session import PowerSession
from megatron_ntp.device.settings import PowerSettings

ROOT = Path(__file__).parents[2]
RACKS = """
domain: {num_gpus: 8}
rack: {num_domains: 4, budget_w: 99000, host_pattern: "(r[0-9]+)-.*"}
"""


def test_flags_come_from_the_fields() -> None:
    parser = argparse.ArgumentParser()
    for setting in fields(PowerSettings):
        assert len(setting.metadata["help"]) > 20
        parser.add_argument(
            "--" + setting.name.replace("_", "-"),
            default=setting.default,
            help=setting.metadata["help"],
            **setting.metadata["argument"],
        )
    words = ["--ntp-power", "boost", "--ntp-power-nominal", "525", "--ntp-power-site", "f.yaml"]
    found = PowerSettings.from_namespace(parser.parse_args(words))
    assert found == PowerSettings("boost", 525.0, "f.yaml")
    assert PowerSettings.from_namespace(argparse.Namespace()) == PowerSettings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ntp_power": "on"}, "off, boost, require"),
        ({"ntp_power_target_gap": 0.0}, "target-gap"),
        ({"ntp_power_deadline": 0.0}, "deadline"),
        ({"ntp_power_socket": "a", "ntp_power_command": "b"}, "exclude each other"),
    ],
)
def test_wrong_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSettings(**values)


def test_site_file_with_an_error_stops_before_training(tmp_path: Path) -> None:
    settings = PowerSettings(ntp_power="boost", ntp_power_site=str(site_file(tmp_path, "gpu: 3")))
    with pytest.raises(ValueError, match="must map names to values"):
        PowerSession.from_settings(settings)
    PowerSession.from_settings(replace(settings, ntp_power="off"))


def test_rack_of_a_host(tmp_path: Path) -> None:
    settings = PowerSettings("boost", ntp_power_site=str(site_file(tmp_path, RACKS)))
    assert PowerSession.from_settings(settings).rack_of("r7-n3") == "r7"
    assert PowerSession.from_settings(PowerSettings()).rack_of("r7-n3") == ""


def test_device_layer_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_ntp.device.session, megatron_ntp.device.cli\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_keeper_options_reach_the_command_line(tmp_path: Path) -> None:
    options = KeeperOptions(site=tmp_path / "s", state_dir=tmp_path / "d", deadline_s=3)
    words = options.arguments()
    assert words[words.index("--site") + 1] == str(tmp_path / "s")
    assert words[words.index("--state-dir") + 1] == str(tmp_path / "d")
    assert words[words.index("--deadline") + 1] == "3"
