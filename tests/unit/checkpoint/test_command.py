"""`megatron-ntp checkpoint`: what it prints, how it ends, and that it changes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SHARD, Maker, content_of, flip_bit, truncate, write_hashes

from megatron_ntp.checkpoint.stored import read_stored
from megatron_ntp.cli import main


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    made = Maker(tmp_path / "ckpt")
    made.path.mkdir()
    made.save(5, layout="0.17")
    made.save(10)
    return made


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main(["checkpoint", *map(str, words)])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def listed(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, list[dict[str, Any]]]:
    status, text = run(capsys, "list", path, "--json")
    return status, json.loads(text)["checkpoints"]


def test_list(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "list", maker.path)
    assert status == 0
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["iteration", "complete", "format", "optimizer", "TP/PP/DP", "ranks",
                        "reshardable", "size"]  # fmt: skip
    assert lines[1][:8] == ["*", "10", "yes", "torch_dist", "fully_reshardable", "2/1/2", "4",
                            "yes"]  # fmt: skip
    assert lines[2][:2] == ["5", "yes"]


def test_list_json(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    status, (newest, older) = listed(capsys, maker.path)
    assert status == 0
    assert (newest["iteration"], newest["complete"], newest["would_be_loaded"]) == (10, True, True)
    assert (newest["tp"], newest["pp"], newest["dp"], newest["world_size"]) == (2, 1, 2, 4)
    assert newest["reshardable"] and newest["usable_after_failure"]
    path = Path(newest["path"])
    assert newest["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert not older["would_be_loaded"]


def test_list_of_a_torn_newest(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    truncate(maker.path / "iter_0000010" / SHARD, 8)
    status, text = run(capsys, "list", maker.path)
    assert status == 1
    lines = text.splitlines()
    assert lines[1].split()[:2] == ["10", "no"]
    assert lines[2].split()[:3] == ["*", "5", "yes"]
    assert any(line.startswith(f"iter_0000010: {SHARD} has ") for line in lines)


@pytest.mark.parametrize("optimizer", ["dp_reshardable", "fully_sharded_model_space"])
def test_list_of_a_newest_that_cannot_be_resharded(
    maker: Maker, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    maker.save(20, optimizer)
    status, rows = listed(capsys, maker.path)
    assert status == 1
    assert rows[0]["complete"]
    assert rows[0]["optimizer_format"] == optimizer
    assert rows[0]["reshardable"] is False


def test_list_of_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A restart needs moments; a release is loaded for its weights."""
    made = Maker(tmp_path)
    made.save(None, None)
    assert listed(capsys, tmp_path)[0] == 0
    made.save(20, None)
    assert listed(capsys, tmp_path)[0] == 1


def test_list_of_one_that_was_set_back(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.track("5")
    status, text = run(capsys, "list", maker.path)
    assert status == 0, "the newest that counts is whole"
    assert "iter_0000010: the tracker was set back to iter_0000005" in text
    assert text.splitlines()[2].split()[:2] == ["*", "5"]


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, text = run(capsys, command, tmp_path / "nowhere")
    assert status == (1 if command == "list" else 2)
    assert "nowhere" in text


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "list", tmp_path)
    assert status == 1
    assert "holds no checkpoint" in text


def test_inspect(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "inspect", maker.path / "iter_0000005")
    assert status == 0
    assert "optimizer.state.exp_avg.decoder.weight" in text
    assert "hidden_size" in text
    status, text = run(capsys, "inspect", maker.path, "--json")
    facts = json.loads(text)
    assert facts["iteration"] == 10
    assert facts["tensors"]["decoder.weight"] == [12, 8]
    assert set(facts["files"]) == {SHARD}


def test_verify(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "verify", maker.path)
    assert (status, "CRC-32 of all data" in text) == (0, True)
    write_hashes(maker.path / "iter_0000010")
    status, text = run(capsys, "verify", maker.path / "iter_0000010")
    assert (status, "SHA-256 of every file" in text) == (0, True)


def test_verify_finds_a_flipped_bit_that_list_does_not(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    path = maker.path / "iter_0000010"
    (item,) = [item for item in read_stored(path).items if item.key == "decoder.weight"]
    flip_bit(path / SHARD, item.offset + item.nbytes // 2)
    assert run(capsys, "list", maker.path)[0] == 0
    status, text = run(capsys, "verify", maker.path)
    assert status == 1
    assert "iter_0000010 is damaged" in text
    assert "decoder.weight" in text
    status, text = run(capsys, "verify", maker.path, "--json")
    assert status == 1
    assert json.loads(text)["complete"] is False


def test_nothing_is_changed(maker: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    truncate(maker.path / "iter_0000010" / SHARD, 8)
    before = content_of(maker.path)
    for command in ("list", "inspect", "verify"):
        run(capsys, command, maker.path)
    assert content_of(maker.path) == before
