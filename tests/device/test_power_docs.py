"""Commands and outputs on docs/power.md are what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fake_nvml import FakeNode
from power_kit import all_to, make_keeper, request

from megatron_ntp.cli import main
from megatron_ntp.device import state, xids
from megatron_ntp.device.files import Folder
from megatron_ntp.device.nvml import Nvml
from megatron_ntp.device.state import HostIdentity, LimitStore

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "power.md"
BLOCKS = re.findall(r"^```console\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def blocks() -> list[list[tuple[str, str]]]:
    """Of each block the commands, each with its output."""
    found = []
    for text in BLOCKS:
        parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
        found.append(list(zip(parts[::2], parts[1::2], strict=True)))
    return found


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the node's folder, without touching this machine's."""
    folder = tmp_path / "state"
    monkeypatch.setattr(state, "default_folder", lambda: folder)
    for module in ("commands", "keeper_process"):
        monkeypatch.setattr(f"megatron_ntp.device.{module}.default_folder", lambda: folder)
    return folder


def leave_one_boosted(node: FakeNode, folder: Path, layer: Nvml) -> None:
    """A job of which nothing is left but its record."""
    store = LimitStore(Folder(folder, private=True), HostIdentity.read)
    keeper = make_keeper(layer, store)
    keeper.open(request(node.uuids[:1], num_gpus=2))
    keeper.set_limits(all_to(node.uuids[:1], 700))
    for kept in keeper._kept.values():
        kept.claim.release()


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block[0][0][13:50])
def test_block(
    block: list[tuple[str, str]],
    node: FakeNode,
    layer: Nvml,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(xids, "KERNEL_LOG", tmp_path / "kmsg")
    (tmp_path / "kmsg").write_text("")
    node.state.virtual_now_s = 0
    if "restore" in block[0][0]:
        leave_one_boosted(node, state_dir, layer)
    for command, output in block:
        words = shlex.split(command)
        assert words.pop(0) == "megatron-ntp"
        extra = ["--deadline", "60"]
        if words[0] == "health":
            extra += ["--kernel-log", str(tmp_path / "kmsg")]
        elif words[1] == "boost":
            extra += ["--state-dir", str(state_dir)]
        cut = words.index("--") if "--" in words else len(words)
        assert main([*words[:cut], *extra, *words[cut:]]) == 0
        shown = capfd.readouterr().out.replace(str(state_dir), "/run/megatron-ntp/power")
        assert shown == output, command


def test_tests_that_the_page_names_exist() -> None:
    text = DOCUMENT.read_text()
    code = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    for name in re.findall(r"`(test_[a-z0-9_]+)(?:\.\.\.|\[[^`]*\])?`", text):
        assert f"def {name}" in code, name
    for name in re.findall(r"tests/\w+/\w+\.py", text):
        assert (ROOT / name).exists(), name
