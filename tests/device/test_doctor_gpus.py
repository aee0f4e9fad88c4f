"""What the doctor says of GPUs, on the imagined node."""

import pytest
from fake_nvml import FakeNode

from megatron_ntp.doctor import machine
from megatron_ntp.doctor.findings import Verdict


@pytest.fixture(autouse=True)
def on_the_node(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, node.env()[name])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_whole_node() -> None:
    (found,) = machine._gpus()
    assert found.verdict is Verdict.OK
    assert found.what.startswith("8 x ") and found.what.endswith("8 visible here")


def test_what_is_hidden_and_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,9,2")
    ignored, board = machine._gpus()
    assert ignored.verdict is Verdict.FAIL and "CUDA ignores 9,2" in ignored.what
    assert board.what.endswith("2 visible here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    (twice,) = machine._gpus()
    assert twice.verdict is Verdict.FAIL and "a second time" in twice.what


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, node: FakeNode) -> None:
    monkeypatch.setattr(machine, "NVML_DEADLINE_S", 0.3)
    node.add_rule("nvmlInitWithFlags", hang_ms=60_000)
    (found,) = machine._gpus()
    assert found.verdict is Verdict.FAIL and "did not answer within 0.3 s" in found.what
