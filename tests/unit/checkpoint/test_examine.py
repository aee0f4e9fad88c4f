"""A whole checkpoint is told from a torn one, and the torn file is named."""

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import MODEL, SHARD, Maker, flip_bit, truncate, write_hashes

from megatron_ntp.checkpoint.examine import Checkpoint, Format, contents, examine
from megatron_ntp.checkpoint.folder import Candidate
from megatron_ntp.checkpoint.saved_job import OptimizerFormat
from megatron_ntp.checkpoint.stored import read_stored

LAYOUTS = ("0.17", "0.19")


def look(path: Path) -> Checkpoint:
    return examine(Candidate(path, 10))


@pytest.fixture(params=LAYOUTS)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Maker(tmp_path).save(10, layout=request.param)


def test_a_whole_checkpoint(path: Path) -> None:
    found = look(path)
    assert found.is_whole
    assert found.format is Format.TORCH_DIST
    assert found.nbytes == sum(file.stat().st_size for file in path.iterdir())
    assert contents(found) == []


def test_metadata_is_read_without_the_garbage_collector(path: Path) -> None:
    """Which would take most of the time where there are many chunks."""
    rounds: list[str] = []
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: rounds.append(phase))
    gc.set_threshold(1)
    try:
        rounds.clear()
        read_stored(path)
        num_rounds = len(rounds)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
    assert num_rounds < 50  # around it, and not with every object of it
    assert gc.isenabled()


def test_a_look_that_asks_for_no_sizes(path: Path) -> None:
    """For all ranks at once: as many questions per rank as there are ranks would be too many."""
    truncate(path / SHARD, 1)
    found = examine(Candidate(path, 10), look_at_sizes=False)
    assert found.is_whole
    assert found.job is not None
    assert found.job.tp == 2
    assert not look(path).is_whole
    (path / SHARD).unlink()
    assert not examine(Candidate(path, 10), look_at_sizes=False).is_whole


def test_what_it_says_about_its_job(path: Path) -> None:
    job = look(path).job
    assert job is not None
    assert (job.tp, job.pp, job.cp, job.dp, job.world_size) == (2, 1, 1, 2, 4)
    assert (job.iteration, job.consumed_samples, job.degrees) == (10, 80, None)
    assert job.optimizer_format is OptimizerFormat.FULLY_RESHARDABLE
    assert job.model == MODEL


def test_degrees_of_a_nonuniform_job(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1, ntp_degrees="2,1", world_size=3)
    job = look(path).job
    assert job is not None
    assert (job.tp, job.degrees, job.world_size) == (2, "2,1", 3)


def test_shapes_and_needed_bytes(path: Path) -> None:
    stored = read_stored(path)
    assert stored.tensors["decoder.weight"] == (12, 8)
    assert stored.dtypes["decoder.weight"] == "float32"
    assert stored.file_nbytes == {SHARD: (path / SHARD).stat().st_size}


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    return lambda path: truncate(path / name, num_bytes)


TORN = [
    (remove("metadata.json"), "metadata.json is missing: the save was not completed"),
    (cut("metadata.json", 5), "metadata.json is torn"),
    (remove(".metadata"), ".metadata is missing"),
    (cut(".metadata", 1), ".metadata is not a whole pickle"),
    (remove(SHARD), f"{SHARD} is missing"),
    (cut(SHARD, 1), f"{SHARD} has"),
]


@pytest.mark.parametrize("tear, problem", TORN, ids=[problem for _, problem in TORN])
def test_a_torn_checkpoint(path: Path, tear: Callable[[Path], None], problem: str) -> None:
    tear(path)
    found = look(path)
    assert not found.is_whole
    assert any(problem in each for each in found.problems), found.problems


@pytest.mark.parametrize("tear, problem", [
    (remove("common.pt"), "common.pt is missing"),
    (cut("common.pt", 1), "common.pt is not a whole torch archive"),
])  # fmt: skip
def test_torn_common_state(tmp_path: Path, tear: Callable[[Path], None], problem: str) -> None:
    path = Maker(tmp_path).save(1, layout="0.17")
    tear(path)
    assert any(problem in each for each in look(path).problems)


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    assert look(tmp_path / "iter_0000001").problems == ("the folder is empty",)


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1)
    (path / ".metadata").unlink()
    (path / ".metadata").mkdir()
    (problem,) = look(path).problems
    assert problem == ".metadata cannot be read: Is a directory"


def test_a_flipped_bit_in_any_tensor_is_found_by_its_content(path: Path) -> None:
    whole = (path / SHARD).read_bytes()
    tensor = torch.arange(96.0).numpy().tobytes()
    flip_bit(path / SHARD, whole.index(tensor) + 17)
    found = look(path)
    assert found.is_whole, "names and sizes are right"
    (problem,) = contents(found)
    assert "decoder.weight" in problem
    assert "CRC-32" in problem


def test_hashes_find_what_no_archive_covers(path: Path) -> None:
    write_hashes(path)
    assert contents(look(path)) == []
    marker = path / "metadata.json"
    marker.write_text(marker.read_text() + " ")
    assert contents(look(path)) == ["metadata.json does not match its SHA-256 in integrity.json"]


@pytest.mark.parametrize("text, problem", [
    ("{", "integrity.json is torn"),
    ('{"algorithm": "md5", "files": {}}', "'md5', which is not known here"),
    ('{"files": {"../x": "0"}}', "outside its folder"),
    ('{"files": {"gone": "0"}}', "gone is missing"),
])  # fmt: skip
def test_bad_hashes(path: Path, text: str, problem: str) -> None:
    (path / "integrity.json").write_text(text)
    (found,) = contents(look(path))
    assert problem in found


def test_shares_cover_every_file_once(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1, layout="0.17")
    flip_bit(path / SHARD, (path / SHARD).read_bytes().index(torch.ones(96).numpy().tobytes()))
    data = (path / "common.pt").read_bytes()
    flip_bit(path / "common.pt", data.index(b"argparse"))
    found = look(path)
    shares = [contents(found, share, 3) for share in range(3)]
    assert sorted(problem for share in shares for problem in share) == sorted(contents(found))
    assert sorted(map(len, shares)) == [0, 1, 1]


def legacy(path: Path) -> None:
    (path / "mp_rank_00").mkdir(parents=True)


def dcp_only(path: Path) -> None:
    path.mkdir()
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(path), no_dist=True)


def zarr(path: Path) -> None:
    path.mkdir()
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')


@pytest.mark.parametrize(
    "make, format_",
    [(legacy, Format.LEGACY), (dcp_only, Format.TORCH_DCP), (zarr, Format.ZARR)],
)
def test_other_formats_are_named(
    tmp_path: Path, make: Callable[[Path], None], format_: Format
) -> None:
    make(tmp_path / "iter_0000001")
    assert look(tmp_path / "iter_0000001").format is format_


def test_an_unknown_format(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000001"
    path.mkdir()
    (path / "metadata.json").write_text('{"sharded_backend": "new"}')
    assert look(path).problems == ("unknown format 'new'",)


@pytest.mark.parametrize("optimizer, noted, args, expected, reshardable", [
    ("fully_reshardable", True, {}, OptimizerFormat.FULLY_RESHARDABLE, True),
    ("dp_reshardable", True, {}, OptimizerFormat.DP_RESHARDABLE, False),
    ("fully_sharded_model_space", True, {}, OptimizerFormat.FULLY_SHARDED_MODEL_SPACE, False),
    ("dp_zero_gather_scatter", True, {}, OptimizerFormat.DP_ZERO_GATHER_SCATTER, False),
    ("fsdp_dtensor", True, {}, OptimizerFormat.FSDP_DTENSOR, False),
    ("of_tomorrow", True, {}, OptimizerFormat.UNKNOWN, False),
    ("model_space", True, {}, OptimizerFormat.MODEL_SPACE, True),
    (None, True, {}, OptimizerFormat.NONE, True),
    ("x", False, {"ckpt_fully_parallel_save": True}, OptimizerFormat.FULLY_SHARDED_MODEL_SPACE,
     False),
    ("x", False, {"ckpt_fully_parallel_save": False}, OptimizerFormat.DP_ZERO_GATHER_SCATTER,
     False),
    ("model_space", False, {}, OptimizerFormat.MODEL_SPACE, True),
])  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_formats(
    tmp_path: Path,
    layout: str,
    optimizer: str | None,
    noted: bool,
    args: dict[str, Any],
    expected: OptimizerFormat,
    reshardable: bool,
) -> None:
    path = Maker(tmp_path).save(1, optimizer, layout, noted=noted, **args)
    job = look(path).job
    assert job is not None
    assert job.optimizer_format is expected
    assert job.optimizer_format.is_reshardable is reshardable


def test_the_format_is_taken_from_the_optimizer_where_nothing_else_says_it(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1, layout="0.17", noted=False)
    common = {
        "args": argparse.Namespace(use_distributed_optimizer=True),
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
    }
    torch.save(common, path / "common.pt")
    job = look(path).job
    assert job is not None
    assert job.optimizer_format is OptimizerFormat.DP_RESHARDABLE


def test_a_checkpoint_without_arguments(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1, layout="0.17", noted=False)
    torch.save({"iteration": 1}, path / "common.pt")
    job = look(path).job
    assert job is not None
    assert (job.tp, job.iteration, job.model) == (None, 1, {})
    assert job.optimizer_format is OptimizerFormat.UNKNOWN


def test_examining_reads_no_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = os.preadv

    def counting(*args: Any) -> int:
        nonlocal count
        got = real(*args)
        count += got
        return got

    monkeypatch.setattr(os, "preadv", counting)
    look(path)
    item = read_stored(path).item("common_state/")
    assert count <= (0 if item is None else 2 * item.nbytes)
