"""What a node reports: visible devices, fault file, health command."""

from pathlib import Path

import pytest

from megatron_ntp.launchers import check
from megatron_ntp.launchers.check import CheckError, check_node, read_reports, write_report
from megatron_ntp.launchers.nodes import Node, Slot

HOST = {"SLURMD_NODENAME": "n1"}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "_DRIVER", tmp_path / "no driver")


def devices(node: Node) -> list[str | None]:
    return [slot.device for slot in node.slots]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"SLURM_GPUS_ON_NODE": "3"}, ["0", "1", "2", None]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,7"}, ["4", "5", "7", None]),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c,GPU-d"},
            ["GPU-a", "GPU-b", "GPU-c", "GPU-d"],
        ),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, ["0", "1", None, None]),
    ],
)
def test_what_is_visible(environ: dict[str, str], expected: list[str | None]) -> None:
    node = check_node(4, HOST | environ)
    assert devices(node) == expected and node.host == "n1"
    assert all(slot.reason.startswith("not visible") for slot in node.slots if not slot.device)


def test_fault_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = tmp_path / "faults.txt"
    assert devices(check_node(2, HOST, faults)) == ["0", "1"], "no file, no faults"
    faults.write_text(
        "# a comment\nn2 0 other node\n\nn1 1 XID 79, fell off the bus  # today\nn1 9\n"
    )
    node = check_node(2, HOST, faults)
    assert node.slots == (Slot("0"), Slot(None, "XID 79, fell off the bus"))
    assert "no visible device '9'" in capsys.readouterr().out
    faults.write_text("n1 *\n")
    assert devices(check_node(2, HOST, faults)) == [None, None]
    faults.write_text("n1 GPU-b broken\n")
    masked = HOST | {"CUDA_VISIBLE_DEVICES": "GPU-aa11,GPU-bb22"}
    assert devices(check_node(2, masked, faults)) == ["GPU-aa11", None]
    faults.write_text("n1\n")
    with pytest.raises(CheckError, match=r"line 1.*HOST DEVICE"):
        check_node(2, HOST, faults)


def test_health_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_node(3, HOST, command="echo 1 ecc errors; echo 2")
    assert found.slots == (Slot("0"), Slot(None, "ecc errors"), Slot(None, "health command"))
    found = check_node(2, HOST, command="exit 3")
    assert [slot.reason for slot in found.slots] == ["the health command ended with status 3"] * 2
    monkeypatch.setattr(check, "COMMAND_DEADLINE_S", 0.1)
    assert "did not end within" in check_node(1, HOST, command="exec sleep 9").slots[0].reason


def test_block_is_all_but_the_node() -> None:
    assert check_node(1, HOST | {"SLURM_TOPOLOGY_ADDR": "rack3.block7.n1"}).block == "rack3.block7"
    assert check_node(1, HOST).block == ""


def test_reports_are_whole_or_count_as_dead(tmp_path: Path) -> None:
    node = check_node(2, HOST)
    write_report(node, tmp_path / "checks")
    (tmp_path / "checks" / "n2.json").write_text('{"host": "n2", "slo')
    found = read_reports(tmp_path / "checks", ["n1", "n2", "n3"], 2)
    assert found[0] == node
    assert [one.num_dead for one in found] == [0, 2, 2]
    assert found[1].slots[0].reason == "the node did not report"
    assert sorted(path.name for path in (tmp_path / "checks").iterdir()) == ["n1.json", "n2.json"]
