"""Warnings about what is saved, and a disk that fails while saving."""

import argparse
import errno
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Maker, write_hashes
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.errors import CheckpointError, UnsupportedFlagError
from megatron_ntp.integration import saving
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.loading import LoadDecision
from megatron_ntp.plan.topology import Topology
from megatron_ntp.settings import NTPSettings

Usage = namedtuple("Usage", "total used free")


def job(rank: int = 0) -> NTPContext:
    return NTPContext(NTPSettings(ntp=True), Topology.from_degrees((2, 2), 2, None), rank)


def arguments(folder: Path, **values: Any) -> argparse.Namespace:
    defaults = {
        "save": str(folder), "use_distributed_optimizer": True,
        "no_save_optim": False, "dist_ckpt_optim_fully_reshardable": True, "save_interval": 2,
        "save_retain_interval": None,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **values})


@pytest.mark.parametrize("values, warning", [
    ({}, None),
    ({"use_distributed_optimizer": False, "dist_ckpt_optim_fully_reshardable": False}, None),
    ({"dist_ckpt_optim_fully_reshardable": False}, "cannot be read at another TP degree"),
    ({"no_save_optim": True}, "no optimizer state is saved"),
    ({"save": None}, "nothing is saved (no --save)"),
    ({"save_interval": None}, "nothing is saved before the end"),
    ({"save_interval": None, "no_save_optim": True}, "no optimizer state is saved"),
])  # fmt: skip
def test_warnings(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    warning: str | None,
) -> None:
    args = arguments(tmp_path, **values)
    saving.print_warnings(job(), args, "start")
    text = capsys.readouterr().out
    assert ("WARNING (start)" in text) is (warning is not None)
    assert (warning or "") in text
    saving.print_warnings(job(rank=1), args, "start")
    assert capsys.readouterr().out == ""


def test_a_reduced_job_must_save_what_it_can_load(tmp_path: Path) -> None:
    args = arguments(tmp_path, dist_ckpt_optim_fully_reshardable=False)
    saving.refuse_lost_state(args, is_reduced=False)
    with pytest.raises(UnsupportedFlagError, match="--dist-ckpt-optim-fully-reshardable"):
        saving.refuse_lost_state(args, is_reduced=True)


def test_an_overwritten_checkpoint_does_not_count_while_it_is_written(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(7)
    write_hashes(path)
    saving.prepare(job(rank=1), arguments(tmp_path), path)
    assert (path / "metadata.json").exists()
    saving.prepare(job(), arguments(tmp_path), path)
    assert not {"metadata.json", "integrity.json"} & {file.name for file in path.iterdir()}
    saving.prepare(job(), arguments(tmp_path), path)


@pytest.mark.parametrize("text, name, iteration, mended", [
    ("x", "iter_0000005", 5, "5"), ("", None, 0, None), ("release", "release", 0, None),
    ("5", "iter_0000005", 5, "5"),
])  # fmt: skip
@pytest.mark.parametrize("is_retaining", [True, False])
def test_a_tracker_that_megatron_would_die_of_is_mended(
    tmp_path: Path,
    text: str,
    name: str | None,
    iteration: int,
    mended: str | None,
    is_retaining: bool,
) -> None:
    """--save-retain-interval reads it as a number at the end of each save."""
    Maker(tmp_path).track(text)
    ntp = job()
    ntp.load = LoadDecision(str(tmp_path), name, iteration, name == "release", "", ())
    args = arguments(tmp_path, save_retain_interval=100 if is_retaining else None)
    saving.prepare(ntp, args, tmp_path / "iter_0000007")
    found = (tmp_path / TRACKER).read_text() if (tmp_path / TRACKER).exists() else None
    assert found == (mended if is_retaining else text)
    assert [path.name for path in tmp_path.iterdir()] == ([] if found is None else [TRACKER])


def test_of_saves_in_the_background_the_oldest_fails_first(tmp_path: Path) -> None:
    retired, torn, later = (tmp_path / f"iter_{iteration:07d}" for iteration in (1, 4, 6))
    whole = Maker(tmp_path).save(2)
    torn.mkdir()
    later.mkdir()
    assert saving.oldest_unfinished([retired, whole, torn, later]) == torn
    assert saving.oldest_unfinished([retired, whole]) == whole


def wrapped(error: Exception) -> Exception:
    return CheckpointException("write", {0: (error, None)})


def worker(error: Exception) -> Exception:
    return wrapped(RuntimeError(f"Worker failure: An error is caught, error: {error}"))


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped, worker])
@pytest.mark.parametrize("number, words", [
    (errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error"),
    (errno.EDQUOT, "Disk quota exceeded"), (errno.EROFS, "Read-only file system"),
])  # fmt: skip
def test_a_failing_disk_is_told_as_that(tmp_path: Path, wrap: Any, number: int, words: str) -> None:
    Maker(tmp_path).save(5)
    cause = OSError(number, words, "file")
    with (
        pytest.raises(CheckpointError) as caught,
        saving.guarded(tmp_path / "iter_0000010"),
    ):
        raise wrap(cause)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'iter_0000010'} could not be saved: ")
    assert words in message
    assert "the newest whole one is iter_0000005" in message


def test_ranks_that_only_hear_of_it_find_the_full_disk_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    messages = set()
    for error in (CheckpointException("write", {}), wrapped(OSError(errno.ENOSPC, "No space"))):
        with (
            pytest.raises(CheckpointError) as caught,
            saving.guarded(tmp_path / "iter_0000010"),
        ):
            raise error
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "no space is left on the disk" in messages.pop()


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="a bug"),
        saving.guarded(tmp_path / "iter_0000010"),
    ):
        raise KeyError("a bug")


def test_an_error_of_ours_is_found_in_what_torch_wraps_it_in() -> None:
    own = CheckpointError("ours")
    assert saving.own_error(wrapped(own)) is own
    assert saving.own_error(wrapped(ValueError("theirs"))) is None
