"""The decision which checkpoint to load: on one rank, and agreed upon by several."""

import argparse
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import MODEL, SHARD, Maker, content_of, flip_bit, truncate, write_hashes

from megatron_ntp.checkpoint import examine
from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.checkpoint.stored import read_stored
from megatron_ntp.comm.board import Board
from megatron_ntp.errors import CheckpointError, NoCheckpointError, StartError
from megatron_ntp.integration import checkpoint, loading
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.loading import LoadDecision, decide
from megatron_ntp.plan.topology import Topology
from megatron_ntp.settings import NTPSettings

REDUCED, HEALTHY = (2, 1), (2, 2)


def job(degrees: tuple[int, ...] = REDUCED, rank: int = 0, **settings: Any) -> NTPContext:
    topology = Topology.from_degrees(degrees, 2, None)
    return NTPContext(NTPSettings(ntp=True, **settings), topology, rank)


def arguments(load: Path | None, **values: Any) -> argparse.Namespace:
    defaults = {
        "load": None if load is None else str(load), "save": None, "pretrained_checkpoint": None,
        "ckpt_step": None, "finetune": False, "no_load_optim": False, "verify_integrity": False,
        "exit_on_missing_checkpoint": False, "pipeline_model_parallel_size": 1, **MODEL,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **values})


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    made = Maker(tmp_path / "ckpt")
    made.path.mkdir()
    made.save(5)
    made.save(10)
    return made


def test_without_load_nothing_is_decided() -> None:
    assert decide(job(), arguments(None)) is None


def test_the_newest_whole_one(maker: Maker) -> None:
    truncate(maker.path / "iter_0000010" / SHARD, 1)
    before = content_of(maker.path)
    found = decide(job(), arguments(maker.path))
    assert found is not None
    assert (found.name, found.iteration, found.is_release) == ("iter_0000005", 5, False)
    skipped, taken = found.notes
    assert skipped.startswith(f"skipped iter_0000010: {SHARD} has")
    assert taken == f"loading {maker.path / 'iter_0000005'}"
    assert content_of(maker.path) == before


def test_a_step_that_was_asked_for(maker: Maker) -> None:
    found = decide(job(), arguments(maker.path, ckpt_step=5))
    assert found is not None
    assert found.iteration == 5


def test_model_only(maker: Maker) -> None:
    maker.save(20, "dp_reshardable")
    with pytest.raises(CheckpointError, match="dp_reshardable"):
        decide(job(), arguments(maker.path))
    args = arguments(maker.path)
    found = decide(job(ntp_load="model-only"), args)
    assert found is not None
    assert found.iteration == 20
    assert "without the optimizer's moments" in found.notes[-1]
    assert args.no_load_optim


def test_model_only_costs_the_moments_once(maker: Maker, tmp_path: Path) -> None:
    """A restart with the same flags goes on with those that were made since."""
    maker.save(20, ntp_load="model-only")
    for num_ranks in (1, 3):
        made = [arguments(maker.path) for _ in range(num_ranks)]
        found = together(tmp_path, made.__getitem__, num_ranks, ntp_load="model-only")
        assert [each.without_moments for each in found] == [False] * num_ranks
        assert not any(args.no_load_optim for args in made)
    maker.save(30, "dp_reshardable", ntp_load="model-only")
    made = [arguments(maker.path) for _ in range(3)]
    found = together(tmp_path, made.__getitem__, ntp_load="model-only")
    assert [(each.iteration, each.without_moments) for each in found] == [(30, True)] * 3
    assert all(args.no_load_optim for args in made)


def test_finetuning_needs_no_optimizer_state(maker: Maker) -> None:
    maker.save(20, None)
    assert decide(job(), arguments(maker.path, finetune=True)) is not None


@pytest.mark.parametrize("optimizer", [None, "dp_reshardable"])
def test_a_release_needs_no_optimizer_state(tmp_path: Path, optimizer: str | None) -> None:
    """Megatron loads the weights of one, as converters write it, and nothing else."""
    Maker(tmp_path).save(None, optimizer)
    found = decide(job(), arguments(tmp_path))
    assert found is not None
    assert (found.name, found.without_moments) == ("release", False)


def make_empty(path: Path) -> None:
    path.mkdir()


def make_torn_first_save(path: Path) -> None:
    """A job that died in its first save: no tracker was ever written."""
    made = Maker(path)
    made.save(1, tracker=False)
    (path / "iter_0000001" / "metadata.json").unlink()


def make_all_torn(path: Path) -> None:
    made = Maker(path)
    made.save(1)
    (path / "iter_0000001" / "metadata.json").unlink()


def make_tracker_only(path: Path) -> None:
    path.mkdir()
    Maker(path).track("7")


def make_nothing(path: Path) -> None:
    pass


def make_all_torn_without_tracker(path: Path) -> None:
    made = Maker(path)
    made.save(1, tracker=False)
    truncate(path / "iter_0000001" / SHARD, 1)


NEVER_SAVED = (make_nothing, make_empty, make_torn_first_save)
LOST = (make_all_torn, make_tracker_only, make_all_torn_without_tracker)
Make = Callable[[Path], None]


@pytest.mark.parametrize("make", NEVER_SAVED)
def test_a_healthy_job_may_start_anew_where_it_saves(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "ckpt"
    make(path)
    found = decide(job(HEALTHY), arguments(path, save=str(path)))
    assert found is not None
    assert found.name is None
    assert found.notes[-1].startswith(f"WARNING: {path} (--load)")


@pytest.mark.parametrize("make", NEVER_SAVED)
def test_a_wrong_load_is_refused(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "ckpt")
    args = arguments(tmp_path / "ckpt", save=str(tmp_path / "other"))
    with pytest.raises(NoCheckpointError, match="it is not the folder of --save"):
        decide(job(HEALTHY), args)


@pytest.mark.parametrize("make", [*NEVER_SAVED, *LOST])
def test_a_reduced_job_does_not_start_anew(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "ckpt"
    make(path)
    with pytest.raises(NoCheckpointError, match="Not starting from new weights") as caught:
        decide(job(REDUCED), arguments(path, save=str(path)))
    assert "--ntp-load or-scratch" in str(caught.value)


@pytest.mark.parametrize("make", LOST)
@pytest.mark.parametrize("degrees", [HEALTHY, REDUCED])
def test_a_job_that_has_saved_does_not_start_anew(
    tmp_path: Path, make: Make, degrees: tuple[int, ...]
) -> None:
    path = tmp_path / "ckpt"
    make(path)
    with pytest.raises(NoCheckpointError, match="this job has saved before"):
        decide(job(degrees), arguments(path, save=str(path)))


@pytest.mark.parametrize("make", [*NEVER_SAVED, *LOST])
def test_or_scratch(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "ckpt"
    make(path)
    found = decide(job(ntp_load="or-scratch"), arguments(path))
    assert found is not None
    assert found.name is None
    assert "as --ntp-load or-scratch says" in found.notes[-1]


def test_exit_on_missing_checkpoint(tmp_path: Path) -> None:
    args = arguments(tmp_path, save=str(tmp_path), exit_on_missing_checkpoint=True)
    with pytest.raises(NoCheckpointError, match="--exit-on-missing-checkpoint"):
        decide(job(HEALTHY), args)


def test_a_pretrained_checkpoint_is_taken_where_there_is_nothing_else(
    maker: Maker, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    args = arguments(own, save=str(own), pretrained_checkpoint=str(maker.path))
    found = decide(job(), args)
    assert found is not None
    assert found.folder == str(maker.path)


def test_a_pretrained_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Whatever may be done where --load is empty, which `launch` adds by itself."""
    args = arguments(tmp_path, save=str(tmp_path), pretrained_checkpoint=str(tmp_path / "typo"))
    with pytest.raises(NoCheckpointError, match=r"typo \(--pretrained-checkpoint\) does not exist"):
        decide(job(ntp_load="or-scratch"), args)


def test_a_step_of_a_pretrained_checkpoint(maker: Maker, tmp_path: Path) -> None:
    args = arguments(tmp_path / "own", pretrained_checkpoint=str(maker.path), ckpt_step=5)
    found = decide(job(), args)
    assert found is not None
    assert found.iteration == 5


def test_own_progress_goes_before_a_pretrained_checkpoint(maker: Maker, tmp_path: Path) -> None:
    (maker.path / TRACKER).unlink()
    pretrained = Maker(tmp_path / "pretrained")
    pretrained.save(99)
    args = arguments(maker.path, pretrained_checkpoint=str(pretrained.path))
    found = decide(job(), args)
    assert found is not None
    assert (found.folder, found.iteration) == (str(maker.path), 10)
    with loading.as_decided(found):
        assert Path(tracker_of(maker.path)).exists(), "Megatron would take the pretrained one"


def test_lost_progress_is_not_replaced_by_a_pretrained_checkpoint(tmp_path: Path) -> None:
    make_all_torn(tmp_path / "ckpt")
    pretrained = Maker(tmp_path / "pretrained")
    pretrained.save(99)
    args = arguments(tmp_path / "ckpt", pretrained_checkpoint=str(pretrained.path))
    with pytest.raises(NoCheckpointError, match="this job has saved before"):
        decide(job(), args)


# --- Megatron's view ----------------------------------------------------------------------------


def fail(*unused: object) -> None:
    raise AssertionError("the tracker on disk was read")


def tracker_of(path: Path | str) -> str:
    """The file in which Megatron's loading code looks for a number."""
    return loading.get_checkpoint_tracker_filename(lambda p: f"{p}/{TRACKER}", path)


def test_the_tracker_says_what_was_decided() -> None:
    decision = LoadDecision("/x", "iter_0000005", 5, False, "", ())
    with loading.as_decided(decision):
        assert loading.read_metadata(fail, "/x/tracker") == (5, False)
    with loading.as_decided(LoadDecision("/x", "release", 0, True, "", ())):
        assert loading.read_metadata(fail, "/x/tracker") == (0, True)
    assert loading.read_metadata(lambda name: (name, False), "other") == ("other", False)


@pytest.mark.parametrize("iteration", [0, None, 7])
def test_without_a_tracker_megatron_still_finds_what_was_decided(
    tmp_path: Path, iteration: int | None
) -> None:
    """It looks for the file first, and starts from new weights where there is none."""
    Maker(tmp_path).save(iteration, tracker=False)
    found = decide(job(), arguments(tmp_path))
    assert found is not None
    with loading.as_decided(found):
        assert Path(tracker_of(tmp_path)).is_file()
        assert not Path(tracker_of("/elsewhere")).exists()
    assert not Path(tracker_of(tmp_path)).exists()


def seen_by_megatron(args: Any, load_arg: str = "load") -> int | None:
    """Stands for Megatron's load_args_from_checkpoint."""
    path = tracker_of(getattr(args, load_arg))
    own = lambda name: (int(Path(name).read_text()), False)  # noqa: E731
    return loading.read_metadata(own, path)[0] if Path(path).exists() else None


def test_arguments_come_from_a_whole_checkpoint(maker: Maker) -> None:
    (maker.path / "iter_0000010" / "metadata.json").unlink()
    args = arguments(maker.path, ntp=True)
    assert loading.load_args_from_checkpoint(seen_by_megatron, args) == 5
    (maker.path / TRACKER).unlink()
    assert loading.load_args_from_checkpoint(seen_by_megatron, args) == 5
    args.ntp = False
    assert loading.load_args_from_checkpoint(seen_by_megatron, args) is None


def test_a_first_start_takes_arguments_where_they_are(maker: Maker, tmp_path: Path) -> None:
    """Megatron asks both folders, and --load is still empty."""
    args = arguments(tmp_path / "own", ntp=True, pretrained_checkpoint=str(maker.path))
    found = loading.load_args_from_checkpoint(seen_by_megatron, args, "pretrained_checkpoint")
    assert found == 10
    assert loading.load_args_from_checkpoint(seen_by_megatron, args) is None


def test_arguments_from_a_folder_without_a_whole_checkpoint(tmp_path: Path) -> None:
    make_all_torn(tmp_path / "c")
    with pytest.raises(NoCheckpointError, match="--use-checkpoint-args"):
        loading.load_args_from_checkpoint(fail, arguments(tmp_path / "c", ntp=True))


def test_megatron_does_not_end_a_job_quietly_in_a_load() -> None:
    """It exits with 0 where it cannot load, which a supervisor takes for a finished job."""
    decision = LoadDecision("/x", "iter_0000005", 5, False, "", ())
    with (
        pytest.raises(CheckpointError, match="gave up loading /x/iter_0000005"),
        checkpoint._no_quiet_end(decision),
    ):
        sys.exit()
    with pytest.raises(SystemExit) as caught, checkpoint._no_quiet_end(decision):
        sys.exit(3)
    assert caught.value.code == 3


# --- several ranks ------------------------------------------------------------------------------


_STORES = itertools.count()


def together(
    tmp_path: Path,
    args_of: Callable[[int], argparse.Namespace],
    num_ranks: int = 3,
    timeout_s: float = 20.0,
    absent: tuple[int, ...] = (),
    **settings: Any,
) -> list[Any]:
    """What `decide` gives on every rank, or raises; ranks are threads over one store."""
    results: list[Any] = [None] * num_ranks
    store_path = tmp_path / f"store-{next(_STORES)}"

    def rank_main(rank: int) -> None:
        store = dist.FileStore(str(store_path), num_ranks)
        board = Board(store, "checkpoint", rank, num_ranks, timeout_s)
        try:
            results[rank] = decide(job(rank=rank, **settings), args_of(rank), board)
        except Exception as error:
            results[rank] = error

    ranks = [r for r in range(num_ranks) if r not in absent]
    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_hold_the_same_decision(
    maker: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truncate(maker.path / "iter_0000010" / SHARD, 1)
    found = together(tmp_path, lambda rank: arguments(maker.path))
    assert found[0].iteration == 5
    assert found[1] == found[2] == found[0]
    told = capsys.readouterr().out.splitlines()
    assert len([line for line in told if "skipped iter_0000010" in line]) == 1


def test_only_rank_0_looks_at_the_folder(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    real = loading.list_folder
    monkeypatch.setattr(loading, "list_folder", lambda path: listed.append(path) or real(path))
    together(tmp_path, lambda rank: arguments(maker.path))
    assert len(listed) == 1


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    found = together(tmp_path, lambda rank: arguments(tmp_path / "nowhere"))
    assert all(isinstance(error, CheckpointError) for error in found)
    assert len({str(error) for error in found}) == 1


def test_a_rank_that_sees_another_disk_is_named(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading._digest
    local = threading.local()
    real_compare = loading._compare_sight

    def compare(board: Board, decision: LoadDecision) -> None:
        local.rank = board.rank
        real_compare(board, decision)

    def digest(path: Path) -> str:
        return "unreadable (No such file or directory)" if local.rank == 2 else real(path)

    local.rank = 0
    monkeypatch.setattr(loading, "_compare_sight", compare)
    monkeypatch.setattr(
        loading, "_digest", lambda path: digest(path) if hasattr(local, "rank") else real(path)
    )
    found = together(tmp_path, lambda rank: arguments(maker.path))
    assert all(isinstance(error, CheckpointError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert "rank 2 does not see" in str(found[0])
    assert "No such file" in str(found[0])


@pytest.mark.parametrize("num_flips", [1, 2])
def test_ranks_read_content_together_and_skip_what_is_damaged(
    tmp_path: Path, num_flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Maker(tmp_path / "ckpt")
    for iteration in (5, 10, 20):
        made.save(iteration, layout="0.17")
    for iteration in (20, 10)[:num_flips]:
        path = made.path / f"iter_{iteration:07d}"
        (item,) = [item for item in read_stored(path).items if item.key == "decoder.weight"]
        flip_bit(path / SHARD, item.offset + item.nbytes // 2)
    plain = together(tmp_path, lambda rank: arguments(made.path))
    assert plain[0].iteration == 20, "names and sizes are right"
    looks: list[bool] = []
    real = examine._file_sizes
    monkeypatch.setattr(
        examine, "_file_sizes", lambda path, look: looks.append(look) or real(path, look)
    )
    found = together(tmp_path, lambda rank: arguments(made.path), ntp_checkpoint_check="content")
    assert looks.count(True) == num_flips + 1, "only rank 0 asks for all sizes"
    assert [each.iteration for each in found] == [(10, 5)[num_flips - 1]] * 3
    assert "CRC-32" in found[0].notes[0]


def test_verify_integrity_wants_hashes(maker: Maker, tmp_path: Path) -> None:
    write_hashes(maker.path / "iter_0000005")
    found = together(tmp_path, lambda rank: arguments(maker.path, verify_integrity=True))
    assert [each.iteration for each in found] == [5] * 3
    assert "no content hashes" in found[0].notes[0]


def test_a_rank_that_does_not_come_is_named(maker: Maker, tmp_path: Path) -> None:
    found = together(tmp_path, lambda rank: arguments(maker.path), timeout_s=0.5, absent=(1,))
    assert isinstance(found[0], StartError)
    assert "from rank 1 within" in str(found[0])
