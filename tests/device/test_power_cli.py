"""`megatron-ntp power status|plan|boost|restore`: tables, JSON, dry runs and exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode, SetPrivilege
from power_kit import site_file

from megatron_ntp.device.cli import power_main

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def power(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in this process; NVML and keepers are processes of their own as ever."""
    for name, value in node.env(PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> int:
        cut = words.index("--") if "--" in words else len(words)
        common = ("--state-dir", str(tmp_path / "state"), "--deadline", "60")
        return power_main([*words[:cut], *common, *words[cut:]])

    return run


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_status(power: Any, node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.gpu(2).extra_reasons = 0x40
    assert power("status") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["index", "uuid", "limit_w", "enforced_w"]
    assert len(lines) == 9 and "sw_power_cap,hw_thermal" in lines[3]
    assert power("status", "--json", "--gpus", "1,GPU-00000003") == 0
    rows = shown(capsys)["rows"]
    assert [row["index"] for row in rows] == [1, 3]
    assert rows[0]["limit_w"] == 500 and rows[0]["max_w"] == 700 and rows[0]["energy_j"] > 0
    node.gpu(4).lost = 1
    node.gpu(5).supports_limits = 0
    assert power("status", "--json") == 1
    faults = {row["index"]: row["fault"] for row in shown(capsys)["rows"]}
    assert faults[4] == "GPU lost" and faults[5] == "not supported" and faults[6] is None
    assert node.writes() == []


def test_plan_of_this_node(
    power: Any, node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert power("plan", "--full-degree", "8", "--nominal", "500", "--json") == 0
    found = shown(capsys)
    assert found["board"] == "Imagined H100"
    assert [row["ceiling_w"] for row in found["rows"]] == [571, 666, 700]
    assert [row["gap_without_%"] for row in found["rows"]] == [12.5, 25, 37.5]
    assert found["rows"][0]["needed_w"] == 653.1 and found["rows"][0]["gap_with_%"] == 6.5
    assert found["healthy_cost_percent"] == pytest.approx(15.5, abs=0.05)
    site = site_file(tmp_path)
    assert power("plan", "--full-degree", "8", "--degree", "7", "--site", str(site)) == 0
    text = capsys.readouterr().out
    assert "7 of 8" in text and "board maximum" in text
    assert "costs healthy GPUs 15.5 % of their pace and saves 28.6 % of their power" in text
    node.set_limits_w(700)
    assert power("plan", "--full-degree", "8") == 0
    assert "no headroom" in capsys.readouterr().out
    assert node.writes() == []


def test_plan_without_a_node(
    power: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_NVML_STATE", "/nonexistent")
    site = str(ROOT / "configs" / "power" / "rack72.yaml")
    assert power("plan", "--full-degree", "72", "--site", site, "--board-max", "1200") == 0
    assert "71 of 72" in capsys.readouterr().out
    assert power("plan", "--full-degree", "72", "--site", site) == 1
    assert "NVML missing" in capsys.readouterr().err


def test_boost_around_a_command(
    power: Any, node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "during"
    words = ("boost", "--gpus", "0,1,2,3,4,5,6", "--full-degree", "8", "--json")
    code = power(*words, "--", "sh", "-c", f"cp $FAKE_NVML_STATE {copy}; exit 7")
    assert code == 7, "the command's own status"
    rows = shown(capsys)["rows"]
    assert {row["enforced_w"] for row in rows} == {571} and {row["found_w"] for row in rows} == {
        500
    }
    assert FakeNode(copy).limits_w() == [571.0] * 7 + [500.0]
    assert node.limits_w() == [500.0] * 8


def test_boost_dry_run_changes_nothing(
    power: Any, node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("boost", "--gpus", "0,1,2,3,4,5,6", "--full-degree", "8", "--dry-run", "--json")
    assert power(*words) == 0
    found = shown(capsys)
    assert [(row["from_w"], row["to_w"]) for row in found["rows"]] == [(500, 571)] * 7
    assert "nothing was written" in found["notes"][0]
    assert power(*words, "--watts", "600") == 1
    assert any("would fail" in note for note in shown(capsys)["notes"])
    assert node.writes() == [] and not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--watts", "600"), 1, "571 W, the ceiling by domain budget"),
        (("--nominal", "600"), 1, "no site file states a domain budget"),
        (("--gpus", "9"), 1, "names no GPU of this node"),
        (("--site", "/no/such.yaml"), 2, "cannot be read"),
    ],
)
def test_boost_refusals(
    power: Any,
    node: FakeNode,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    base = ("boost", "--gpus", "0,1,2,3,4,5,6", "--full-degree", "8")
    assert power(*base, *words, "--", "false") == code
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert node.limits_w() == [500.0] * 8


def test_boost_without_permission(
    power: Any, node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    node.state.set_privilege = SetPrivilege.NOBODY
    assert power("boost", "--gpus", "0,1", "--full-degree", "3", "--", "true") == 1
    assert "no permission" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_boost_by_hand_ends_with_a_signal(
    node: FakeNode, tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", MAIN, "power", "boost", "--gpus", "0,1", "--full-degree", "3"),
            *("--state-dir", str(tmp_path / "state"), "--deadline", "60"),
        ],
        env=node.env(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "boosted" not in process.stderr.readline():
        assert process.poll() is None
    assert node.limits_w()[:2] == [700, 700]
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    give_up_at = time.monotonic() + 60
    while node.limits_w() != [500.0] * 8 and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert node.limits_w() == [500.0] * 8


def test_restore_with_nothing_to_do(
    power: Any, node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert power("restore") == 0
    assert "no records" in capsys.readouterr().out
    (tmp_path / "state").mkdir(mode=0o700)
    assert power("restore", "--json") == 0
    assert shown(capsys)["rows"] == [] and node.writes() == []


def test_state_folder_of_somebody_else_is_said(
    power: Any, node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a folder that is somebody else's")
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, 12345)
    assert power("status") == 0
    assert "found limits are not shown" in capsys.readouterr().out
    assert power("restore") == 1
    assert "belongs to uid 12345" in capsys.readouterr().err


def test_serve_refuses_before_it_listens(
    power: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = site_file(tmp_path)
    (tmp_path / "grants").mkdir(mode=0o700)
    grants = ("--grants", str(tmp_path / "grants"))
    assert power("serve", "--site", str(site), *grants, "--dry-run") == 0
    assert "would serve" in capsys.readouterr().out
    assert power("serve", "--site", str(site), *grants, "--stdio") == 2
    assert "not a socket" in capsys.readouterr().err
