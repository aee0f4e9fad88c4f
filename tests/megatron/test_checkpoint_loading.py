"""Real jobs that start from folders as failures leave them.

Checkpoints are made by plain Megatron at TP 2. With a healthy TP degree of 2, degrees 1,1 are the
smallest job that has lost GPUs in every replica, and 2,1 the smallest with an extra rank.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
from checkpoints import content_of, truncate
from ranks import Training, run_training
from versions import CORES

from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.examine import contents, examine
from megatron_ntp.checkpoint.folder import TRACKER, Candidate, list_folder
from megatron_ntp.checkpoint.saved_job import OptimizerFormat

OURS = "nonuniform TP checkpoint: "
ERROR = "megatron-ntp: error: "
_LEARNING_RATE = re.compile(r"iteration\s+(\d+)/.*?learning rate: (\S+)")


def run(
    world_size: int, *flags: object, tp: int = 2, fully: bool = True, **options: Any
) -> Training:
    """A job of a small model that stops at iteration 4 unless told otherwise."""
    argv = [*jobs.LLAMA.argv(tp), *jobs.DISTRIBUTED, "--global-batch-size", "4"]
    argv += ["--train-iters", "22", "--save-interval", "2", *map(str, flags)]
    if not fully:  # Megatron cannot load its default format into fp32 weights
        argv.remove("--dist-ckpt-optim-fully-reshardable")
        argv.append("--bf16")
    return run_training(argv, world_size, timeout_s=240, **options)


def ours(degrees: str, *flags: object, **options: Any) -> Training:
    world_size = sum(map(int, degrees.split(",")))
    return run(world_size, "--ntp", "--ntp-degrees", degrees, *flags, **options)


def learning_rates(training: Training) -> dict[int, float]:
    return {int(step): float(rate) for step, rate in _LEARNING_RATE.findall(training.stdout[-1])}


def notes(training: Training) -> list[str]:
    """What the job said about its checkpoint, on all ranks together."""
    lines = "\n".join(training.stdout).splitlines()
    return [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]


def single_error(training: Training) -> str:
    """The one message that a job ends with; there is no traceback on any rank."""
    text = "\n".join(training.stderr)
    assert text.count(ERROR) == 1, text[-3000:]
    # The harness itself writes how each rank ended.
    tracebacks = text.count("Traceback (most recent call last)")
    assert tracebacks == text.count("SystemExit: 2"), text[-3000:]
    assert not any(status == 0 for status in training.statuses)
    return text.partition(ERROR)[2]


@pytest.fixture(scope="module", params=CORES)
def core(request: pytest.FixtureRequest) -> Path | None:
    return request.param


@pytest.fixture(scope="module")
def saved(core: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 2 and 4 of plain Megatron, TP 2."""
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    run(2, "--save", path, "--exit-interval", "4", core=core)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def newest_shard(path: Path) -> Path:
    return next((path / "iter_0000004").glob("__1_*.distcp"))


def test_a_torn_checkpoint_is_skipped_by_a_reduced_job(core: Path | None, folder: Path) -> None:
    truncate(newest_shard(folder), 1)
    (folder / TRACKER).unlink()
    before = content_of(folder)
    found = ours("2,1", "--load", folder, "--exit-interval", "3", core=core)
    skipped, taken = notes(found)
    assert skipped.startswith("skipped iter_0000004: __1_")
    assert taken == f"loading {folder / 'iter_0000002'}"
    assert list(found.losses) == [3]
    assert content_of(folder) == before


def test_what_plain_megatron_would_have_done(core: Path | None, folder: Path) -> None:
    """Or the test above shows nothing: without a tracker it starts from random weights."""
    (folder / TRACKER).unlink()
    found = run(2, "--load", folder, "--exit-interval", "1", core=core)
    assert list(found.losses) == [1]


def test_a_checkpoint_is_what_the_command_says_it_is(saved: Path, core: Path | None) -> None:
    for iteration in (2, 4):
        checkpoint = examine(Candidate(saved / f"iter_{iteration:07d}", iteration))
        assert checkpoint.is_whole
        assert contents(checkpoint) == []
        job = checkpoint.job
        assert job is not None
        assert job.optimizer_format is OptimizerFormat.FULLY_RESHARDABLE
        assert (job.tp, job.pp, job.dp, job.world_size) == (2, 1, 1, 2)
        assert (job.iteration, job.consumed_samples) == (iteration, 4 * iteration)
        assert job.model["hidden_size"] == jobs.LLAMA.hidden


def test_arguments_from_a_checkpoint_that_is_whole(core: Path | None, folder: Path) -> None:
    truncate(newest_shard(folder), 1)
    found = ours(
        "1,1", "--load", folder, "--exit-interval", "3", "--use-checkpoint-args", core=core
    )
    assert list(found.losses) == [3]


# --- formats ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(core: Path | None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """A healthy job with --ntp that saves Megatron's default optimizer format at iteration 2."""
    path = tmp_path_factory.mktemp("healthy") / "ckpt"
    argv = ("--save", path, "--load", path, "--exit-interval", "2")
    return path, run(2, "--ntp", *argv, core=core, fully=False)


def test_a_healthy_job_is_warned_about_what_it_saves(healthy: tuple[Path, Training]) -> None:
    path, training = healthy
    assert notes(training) == [
        f"WARNING: {path} (--load) does not exist; starting from new weights"
    ]
    text = "\n".join(training.stdout)
    for when in ("start", "checkpoint of iteration 2"):
        assert text.count(f"WARNING ({when}): the optimizer state that is saved cannot be") == 1
    (checkpoint,) = [examine(candidate) for candidate in list_folder(path).candidates]
    assert checkpoint.is_whole
    assert checkpoint.job is not None
    assert checkpoint.job.optimizer_format is OptimizerFormat.DP_RESHARDABLE


def test_a_healthy_job_resumes_from_the_default_format(
    core: Path | None, healthy: tuple[Path, Training]
) -> None:
    path, _ = healthy
    flags = ("--load", path, "--exit-interval", "3")
    found = run(2, "--ntp", *flags, core=core, fully=False)
    plain = run(2, *flags, core=core, fully=False)
    assert list(found.losses) == [3]
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


def test_a_reduced_job_refuses_the_default_format(
    core: Path | None, healthy: tuple[Path, Training]
) -> None:
    path, _ = healthy
    before = content_of(path)
    found = ours("2,1", "--load", path, core=core, fully=False, check=False)
    error = single_error(found)
    assert "'dp_reshardable', saved at TP 2, PP 1" in error
    assert "--ntp-load model-only" in error
    assert content_of(path) == before


def test_model_only_goes_on_without_moments(
    core: Path | None, healthy: tuple[Path, Training], saved: Path
) -> None:
    path, before = healthy
    flags = ("--load", path, "--exit-interval", "3", "--ntp-load", "model-only")
    found = ours("1,1", *flags, core=core, fully=False)
    assert "without the optimizer's moments" in notes(found)[-1]
    # The model is that of the healthy job, the schedule goes on, and there are no moments.
    plain = run(2, "--load", path, "--exit-interval", "3", core=core, fully=False)
    assert found.losses[3] == pytest.approx(plain.losses[3], rel=1e-3)
    assert before.losses[1] > 1.05 * plain.losses[3], "new weights would pass, too"
    assert learning_rates(found)[3] == learning_rates(plain)[3]
    assert learning_rates(found)[3] != learning_rates(before)[1]


# --- nothing that can be loaded -----------------------------------------------------------------


def test_a_wrong_load_and_other_models_stop_before_training(saved: Path, core: Path | None) -> None:
    before = content_of(saved)
    nowhere = ours("2,1", "--load", saved / "nowhere", core=core, check=False)
    assert "Not starting from new weights" in single_error(nowhere)
    inside = ours("1,1", "--load", saved / "iter_0000004", core=core, check=False)
    assert "is one checkpoint, not a folder" in single_error(inside)
    other = ours("1,1", "--load", saved, "--num-layers", "3", core=core, check=False)
    assert "num_layers is 2 in the checkpoint, 3 in the flags" in single_error(other)
    assert content_of(saved) == before


def test_a_pretrained_release_is_loaded_without_its_tracker(
    core: Path | None, folder: Path, tmp_path: Path
) -> None:
    """Megatron looks for the tracker, and starts from new weights where there is none."""
    own = tmp_path / "own"
    (folder / "iter_0000004").rename(folder / "release")
    shutil.rmtree(folder / "iter_0000002")
    (folder / TRACKER).unlink()
    flags = ("--load", own, "--save", own, "--pretrained-checkpoint", folder)
    found = ours("2,1", *flags, "--exit-interval", "1", core=core)
    assert notes(found) == [f"loading {folder / 'release'}"]
    assert f"loading release distributed checkpoint from {folder}" in found.stdout[0]
    assert list(found.losses) == [1]


def test_new_weights_where_they_are_asked_for(tmp_path: Path, core: Path | None) -> None:
    flags = ("--load", tmp_path, "--exit-interval", "1", "--ntp-load", "or-scratch")
    assert list(ours("1,1", *flags, core=core).losses) == [1]


def fail_to_list() -> None:
    """In a rank: the disk of --load fails when the folder is listed."""
    import os

    def fail(path: Any = ".") -> Any:
        if Path(path).name == "ckpt":
            raise OSError(5, "Input/output error")
        return real(path)

    real, os.scandir = os.scandir, fail


def fail_to_read() -> None:
    """In a rank: the disk fails when rank 1 reads a shard file."""
    import os

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if os.environ["RANK"] == "1":
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    real, os.preadv = os.preadv, fail


def test_a_disk_that_cannot_be_read(saved: Path, core: Path | None) -> None:
    before = content_of(saved)
    listing = ours("2,1", "--load", saved, core=core, check=False, before=fail_to_list)
    assert f"{saved} cannot be read: Input/output error (errno 5)" in single_error(listing)
    reading = ours("2,1", "--load", saved, core=core, check=False, before=fail_to_read)
    error = single_error(reading)
    assert "cannot be read as its metadata says: [Errno 5] Input/output error" in error
    assert content_of(saved) == before


# --- saving -------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, saved: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    path = tmp_path / "small"
    path.mkdir()
    nbytes = examine(Candidate(saved / "iter_0000004", 4)).nbytes
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(nbytes * 1.5)}", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def save_anew(saved: Path, path: Path, *flags: object, **options: Any) -> Training:
    """A job with an extra rank that goes on from iteration 2 and saves to another folder."""
    return ours("2,1", "--load", saved, "--ckpt-step", "2", "--save", path, *flags, **options)


def test_a_full_disk_is_one_error_and_costs_no_earlier_checkpoint(
    small_disk: Path, saved: Path, core: Path | None
) -> None:
    path = small_disk / "ckpt"
    first = save_anew(saved, path, core=core, check=False)
    error = single_error(first)
    assert f"{path / 'iter_0000006'} could not be saved: no space is left on the disk" in error
    assert "the newest whole one is iter_0000004" in error
    kept = content_of(path / "iter_0000004")
    choice = choose(list_folder(path))
    assert choice.chosen is not None
    assert choice.chosen.name == "iter_0000004"
    assert contents(choice.chosen) == []
    assert (path / TRACKER).read_text() == "4"
    resumed = ours("2,1", "--load", path, "--exit-interval", "5", core=core)
    assert list(resumed.losses) == [5]
    assert any(note.startswith("skipped iter_0000006") for note in notes(resumed))
    assert content_of(path / "iter_0000004") == kept


def fork_workers() -> None:
    """In a rank: Megatron's checkpoint worker is forked, or it would have no CPU runtime."""
    import torch.multiprocessing

    fork = torch.multiprocessing.get_context("fork")
    torch.multiprocessing.get_context = lambda *unused: fork


def finish_each_save(disk: str) -> None:
    """In a rank: a save in the background ends before the next step."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    def finish(queue: Any, blocking: bool = False, no_dist: bool = False) -> Any:
        return finalize(queue, True, no_dist)

    fork_workers()
    finalize = AsyncCallsQueue.maybe_finalize_async_calls
    AsyncCallsQueue.maybe_finalize_async_calls = finish


def fall_behind(disk: str) -> None:
    """In a rank: rank 1 writes once the others have all but filled the disk with the next save."""
    import os
    import time

    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write_late(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = os.statvfs(disk)
            if found.f_bavail < found.f_blocks // 4:
                break
            time.sleep(0.01)
        return write(*args, **kwargs)

    fork_workers()
    write = FileSystemWriterAsync.write_preloaded_data
    if os.environ["RANK"] == "1":
        FileSystemWriterAsync.write_preloaded_data = staticmethod(write_late)


BACKGROUND = ("--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker")
THREADS = ("--ckpt-assume-constant-structure", "--dist-ckpt-workers", "3")


@pytest.mark.parametrize(
    ("before", "failed", "kept"),
    [(finish_each_save, "iter_0000006", "iter_0000004"), (fall_behind, "iter_0000004", None)],
)
def test_a_disk_that_fills_in_the_background_is_one_error(
    small_disk: Path,
    saved: Path,
    core: Path | None,
    before: Callable[[str], None],
    failed: str,
    kept: str | None,
) -> None:
    """With two saves open at once, the later one may take the room that the earlier one needs."""
    path = small_disk / "ckpt"
    found = save_anew(
        saved, path, *BACKGROUND, core=core, before=before, disk=str(small_disk), check=False
    )
    error = single_error(found)
    assert f"{path / failed} could not be saved: no space is left on the disk" in error
    told = f"the newest whole one is {kept}" if kept else "there is no whole one yet"
    assert told in error
    chosen = choose(list_folder(path)).chosen
    assert (chosen and chosen.name) == kept
    assert chosen is None or contents(chosen) == []


def kill_writer(when: str) -> None:
    """In a rank: the writer of rank 1 is killed, as for want of memory."""
    import functools
    import os

    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    @functools.wraps(getattr(FileSystemWriterAsync, when))  # it is sent to the writer by its name
    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), 9)

    fork_workers()
    if os.environ["RANK"] == "1":
        setattr(FileSystemWriterAsync, when, staticmethod(die))


@pytest.mark.parametrize("when", ["preload_tensors", "write_preloaded_data"])
def test_a_writer_that_is_killed_is_one_error(
    saved: Path, tmp_path: Path, core: Path | None, when: str
) -> None:
    path = tmp_path / "async"
    found = save_anew(
        saved, path, *BACKGROUND, core=core, before=kill_writer, when=when, check=False
    )
    error = single_error(found)
    assert re.search(rf"{path}/iter_\d+ could not be saved: the process that writes it", error)
    assert choose(list_folder(path)).chosen is None


def kill_idle_writer(at: str) -> None:
    """In a rank: its writer is killed where it waits for the next save, or to be told to end.

    And the rank ends as a process of its own would, after all that waits for an exit.
    """
    import multiprocessing.queues
    import multiprocessing.util
    import os
    import time

    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    def schedule(self: Any, async_req: Any) -> None:
        if async_req.call_idx > 0:  # the save of iteration 6
            self._persistent_queue.join()
            time.sleep(0.5)  # until its word is in the pipe
            self.process.kill()
            self.process.join()
            self._persistent_queue.put("x" * 1_000_000)  # as large as requests of real models
        real_schedule(self, async_req)

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        item = real_get(self, *args, **kwargs)
        if isinstance(item, str) and item == "DONE":
            os.kill(os.getpid(), 9)
        return item

    def end(status: int) -> None:
        if os.getpid() == rank_pid:
            multiprocessing.util._exit_function()
        real_end(status)

    fork_workers()
    rank_pid, real_end = os.getpid(), os._exit
    os._exit = end  # type: ignore[assignment]
    if at == "between saves":
        real_schedule = PersistentAsyncCaller.schedule_async_call
        PersistentAsyncCaller.schedule_async_call = schedule
    else:
        real_get = multiprocessing.queues.JoinableQueue.get
        multiprocessing.queues.JoinableQueue.get = get  # type: ignore[method-assign]


def test_a_writer_that_is_killed_between_saves_is_one_error(
    saved: Path, tmp_path: Path, core: Path | None
) -> None:
    path = tmp_path / "async"
    found = save_anew(
        saved,
        path,
        *BACKGROUND,
        core=core,
        before=kill_idle_writer,
        at="between saves",
        check=False,
    )
    error = single_error(found)
    assert None not in found.statuses
    assert f"{path}/iter_0000006 could not be saved: the process that writes it" in error
    assert "the newest whole one is iter_0000004" in error


def test_a_writer_that_is_killed_at_the_end_holds_nothing_up(
    saved: Path, tmp_path: Path, core: Path | None
) -> None:
    path = tmp_path / "async"
    flags = (*BACKGROUND, "--exit-interval", "5")
    save_anew(saved, path, *flags, core=core, before=kill_idle_writer, at="the end")
    choice = choose(list_folder(path))
    assert choice.skipped == ()
    assert choice.chosen is not None and contents(choice.chosen) == []


def fail_to_write(error: str) -> None:
    """In a rank: every thread that writes for rank 1 fails, and rank 0 is slow to say so."""
    import os
    import time

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_ntp.integration import saving

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error") if error == "disk" else MemoryError("no room")

    def look_slowly(folder: Path) -> str:
        time.sleep(3)
        return look(folder)

    fork_workers()
    if os.environ["RANK"] == "0":
        look, saving._newest = saving._newest, look_slowly
    if os.environ["RANK"] == "1":
        filesystem_async._write_item = fail


@pytest.mark.parametrize(
    ("error", "told", "flags"),
    [
        ("disk", "Input/output error", ()),
        ("disk", "Input/output error", BACKGROUND),
        ("memory", "MemoryError: no room", (*BACKGROUND, *THREADS)),
    ],
    ids=["at once", "in the background", "in threads"],
)
def test_what_fails_while_writing_is_one_error(
    saved: Path, tmp_path: Path, core: Path | None, error: str, told: str, flags: tuple[str, ...]
) -> None:
    path = tmp_path / "failing"
    how = {"before": fail_to_write, "error": error, "grace_s": 10.0}
    found = save_anew(saved, path, *flags, core=core, check=False, **how)
    said = single_error(found)
    assert re.search(rf"{path}/iter_\d+ could not be saved: .*{told}", said), said


def test_an_asynchronous_save_is_whole_and_can_be_loaded(
    saved: Path, tmp_path: Path, core: Path | None
) -> None:
    path = tmp_path / "async"
    argv = ("--load", saved, "--save", path, *BACKGROUND, "--exit-interval", "7",
            "--ckpt-assume-constant-structure")  # fmt: skip
    wrote = ours("2,1", *argv, core=core, before=fork_workers)
    assert "scheduled an async checkpoint save at iteration" in "\n".join(wrote.stdout)
    choice = choose(list_folder(path))
    assert choice.chosen is not None and choice.chosen.candidate.iteration is not None
    assert choice.skipped == ()
    assert contents(choice.chosen) == []
    again = ours("1,1", "--load", path, "--ckpt-step", "6", "--exit-interval", "7", core=core)
    assert again.losses[7] == pytest.approx(wrote.losses[7], rel=1e-5)


# --- bytes --------------------------------------------------------------------------------------

_WIDE = jobs.Model(
    "wide", jobs.LLAMA.flags, heads=6, groups=6, ffn=384, kv_channels=32, hidden=192, layers=1,
    vocab=768, vocab_flag=750,
)  # fmt: skip
_FP32_NBYTES_PER_ELEMENT = 16  # the model's, and main parameter and two moments of the optimizer
_RANDOM_STATE_NBYTES = 40_000
_reads: dict[str, int] = {"nbytes": 0, "metadata_nbytes": 0}


def count_reads() -> None:
    """In a rank: counts what the process reads, by the kernel's count, while it loads tensors."""
    import recording
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    recording.before()
    original = TorchDistLoadShardedStrategy.load

    def read_so_far() -> int:
        text = Path("/proc/self/io").read_text()
        return int(text.split("rchar:")[1].split()[0])

    def load(self: Any, state: Any, checkpoint_dir: Any, *rest: Any, **kwargs: Any) -> Any:
        before = read_so_far()
        result = original(self, state, checkpoint_dir, *rest, **kwargs)
        _reads["nbytes"] = read_so_far() - before
        _reads["metadata_nbytes"] = (Path(checkpoint_dir) / ".metadata").stat().st_size
        return result

    TorchDistLoadShardedStrategy.load = load


def what_was_read() -> tuple[Any, int, int]:
    """In a rank, at the end: its record, bytes read, and how many of them are metadata."""
    import recording

    return recording.after(), _reads["nbytes"], _reads["metadata_nbytes"]


def test_a_rank_reads_its_own_shard_and_an_extra_rank_none(
    core: Path | None, tmp_path: Path
) -> None:
    """Saved as one chunk per tensor, so that a reader of whole chunks would read all of them."""
    saved = jobs.start(_WIDE, jobs.DISTRIBUTED, core=core)
    argv = [*_WIDE.argv(3), *jobs.DISTRIBUTED, "--global-batch-size", str(jobs.GLOBAL_BATCH)]
    argv += ["--train-iters", str(jobs.TRAIN_ITERS), "--exit-interval", "2"]
    argv += ["--ntp", "--ntp-degrees", "3,2", "--load", str(saved)]
    argv.append("--ckpt-assume-constant-structure")  # reads as without it, and keeps the metadata
    job = run_training(argv, 5, core=core, timeout_s=240, before=count_reads, after=what_was_read)
    everything = _FP32_NBYTES_PER_ELEMENT * _numel(_WIDE)
    for record, nbytes, metadata_nbytes in job.results:
        tensors_nbytes = nbytes - metadata_nbytes
        if record.is_extra:
            assert 0 <= tensors_nbytes <= _RANDOM_STATE_NBYTES
            continue
        shard = sum(_product(param.sync_shape) for param in record.params.values())
        shard_nbytes = _FP32_NBYTES_PER_ELEMENT * shard
        assert shard_nbytes < 0.6 * everything
        assert shard_nbytes <= tensors_nbytes <= 1.1 * shard_nbytes


def _product(shape: tuple[int, ...] | None) -> int:
    assert shape is not None
    return math.prod(shape)


def _numel(model: jobs.Model) -> int:
    """Elements of the whole model, weights of matrices only."""
    width = model.heads * model.kv_channels
    block = model.hidden * (width * 4 + 3 * model.ffn)
    return model.layers * block + 2 * model.vocab * model.hidden
