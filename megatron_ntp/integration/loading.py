"""Which checkpoint a run starts from: found and judged before any process group exists.

Rank 0 looks, since a folder of a large job holds as many files as the job has ranks. The others are
told in the rendezvous store, and compare what they see of it on their own node: a rank with another
disk mounted is named there. Megatron then loads as ever, from the iteration that was chosen; no
file is changed for it.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ntp.checkpoint.choose import Choice, choose
from megatron_ntp.checkpoint.examine import Checkpoint, contents, examine, has_hashes
from megatron_ntp.checkpoint.folder import MARKER, Candidate, list_folder
from megatron_ntp.checkpoint.judge import Wanted, optimizer_problem, require_loadable
from megatron_ntp.checkpoint.modes import CheckpointCheck, LoadMode
from megatron_ntp.checkpoint.saved_job import MODEL_ARGUMENTS
from megatron_ntp.checkpoint.stored import METADATA
from megatron_ntp.comm.board import Board
from megatron_ntp.errors import CheckpointError, NoCheckpointError
from megatron_ntp.integration.context import NTPContext

_SLOWEST_NBYTES_PER_S = 20e6

SCRATCH = f"--ntp-load {LoadMode.OR_SCRATCH.value}"


@dataclass(frozen=True)
class LoadDecision:
    """What rank 0 decided, as all ranks hold it.

    Attributes:
        folder: the folder of checkpoints.
        name: the checkpoint in it; None: start from new weights.
        iteration: its iteration, 0 for a release.
        is_release: whether it is the `release` of the folder.
        without_moments: whether optimizer state is left out though the job goes on (model-only).
        digest: of its metadata, to compare what ranks see.
        notes: what to tell people, once.
    """

    folder: str
    name: str | None
    iteration: int
    is_release: bool
    digest: str
    notes: tuple[str, ...]
    without_moments: bool = False

    @property
    def path(self) -> Path:
        assert self.name is not None
        return Path(self.folder) / self.name


def decide(
    ntp: NTPContext, args: argparse.Namespace, board: Board | None = None
) -> LoadDecision | None:
    """Finds the checkpoint to load; None where no --load was given.

    Called by every rank before process groups are made. Without a board each rank decides for
    itself, which comes to the same.

    Raises:
        CheckpointError: nothing can be loaded, or what can is not for this job; the same on every
            rank.
    """
    if not args.load and not getattr(args, "pretrained_checkpoint", None):
        return None
    decision = _decide(ntp, args, None) if board is None else _agree(ntp, args, board)
    if decision.without_moments:
        args.no_load_optim = True
    return decision


def _agree(ntp: NTPContext, args: argparse.Namespace, board: Board) -> LoadDecision:
    """Rank 0 decides, and all ranks compare what they see."""
    if board.rank == 0:
        try:
            decision = _decide(ntp, args, board)
        except CheckpointError as error:
            board.tell_all("decision", {"error": str(error)})
            raise
        board.tell_all("decision", {"decision": asdict(decision)})
    else:
        decision = _follow(board)
    _compare_sight(board, decision)
    if board.rank == 0:
        for note in decision.notes:
            print(f"nonuniform TP checkpoint: {note}", flush=True)
    return decision


def _decide(ntp: NTPContext, args: argparse.Namespace, board: Board | None) -> LoadDecision:
    """Rank 0's part, or each rank's where ranks cannot talk."""
    check = None
    if ntp.settings.ntp_checkpoint_check == CheckpointCheck.CONTENT or args.verify_integrity:
        check = _content_check(args, board)
    step = getattr(args, "ckpt_step", None) or None
    folder = list_folder(Path(args.load)) if args.load else None
    pretrained = getattr(args, "pretrained_checkpoint", None)
    is_begin = folder is None or bool(pretrained and not folder.was_saved_to)
    if folder is None or is_begin:
        assert pretrained is not None
        folder = list_folder(Path(pretrained))
    choice = choose(folder, step, check)
    notes = [f"skipped {skip}" for skip in choice.skipped]
    if choice.chosen is None and is_begin:
        raise NoCheckpointError(
            f"{_nothing_whole(choice, '--pretrained-checkpoint')}. Give the folder that holds the "
            "weights to begin from, or remove the flag"
        )
    if choice.chosen is None:
        notes.append(_start_anew(ntp, args, choice))
        return LoadDecision(str(choice.folder.path), None, 0, False, "", tuple(notes))
    chosen = choice.chosen
    iteration = chosen.candidate.iteration
    # Of a release, and of weights to begin from, Megatron loads no optimizer state.
    wanted = wanted_of(ntp, args, args.finetune or is_begin or iteration is None)
    without_moments = ntp.settings.ntp_load == LoadMode.MODEL_ONLY and not _has_own_moments(
        chosen, wanted
    )
    if without_moments:
        wanted = replace(wanted, load_optimizer=False)
    require_loadable(chosen, wanted)
    left_out = without_moments or args.no_load_optim
    notes.append(
        f"loading {chosen.path}" + (", without the optimizer's moments" if left_out else "")
    )
    return LoadDecision(
        folder=str(choice.folder.path),
        name=chosen.name,
        iteration=iteration or 0,
        is_release=iteration is None,
        digest=_digest(chosen.path),
        notes=tuple(notes),
        without_moments=without_moments,
    )


def _has_own_moments(chosen: Checkpoint, wanted: Wanted) -> bool:
    """Whether a job that gave up its moments saved this checkpoint, with those it has made since.

    So `model-only` costs them once, and not again at each restart with the same flags.
    """
    job = chosen.job
    return job is not None and job.gave_up_moments and not optimizer_problem(chosen, wanted)


def wanted_of(ntp: NTPContext, args: argparse.Namespace, finetune: bool) -> Wanted:
    """This job, as a checkpoint is judged against it."""
    return Wanted(
        tp=ntp.topology.nominal_tp,
        pp=args.pipeline_model_parallel_size,
        degrees=ntp.topology.degrees,
        load_optimizer=not (finetune or args.no_load_optim),
        model={name: getattr(args, name) for name in MODEL_ARGUMENTS if hasattr(args, name)},
    )


def _start_anew(ntp: NTPContext, args: argparse.Namespace, choice: Choice) -> str:
    """The note for a start from new weights, where that is right.

    A job that has saved before, or has lost a GPU, does not mean to start anew.

    Raises:
        NoCheckpointError: it is not.
    """
    folder, what = choice.folder, _nothing_whole(choice, "--load")
    degrees = ",".join(map(str, ntp.topology.degrees))
    if ntp.settings.ntp_load == LoadMode.OR_SCRATCH:
        return f"{what}; starting from new weights, as {SCRATCH} says"
    if folder.was_saved_to:
        why = "this job has saved before"
    elif ntp.topology.is_reduced:
        why = f"this job has lost GPUs (degrees {degrees})"
    elif args.exit_on_missing_checkpoint:
        why = "--exit-on-missing-checkpoint was given"
    elif not _saves_there(args, folder.path):
        why = "it is not the folder of --save, so it was meant to hold one"
    else:
        return f"WARNING: {what}; starting from new weights"
    separator = "\n" if "\n" in what else ". "
    raise NoCheckpointError(
        f"{what}{separator}Not starting from new weights, since {why}. Give the folder of an "
        f"earlier --save, or {SCRATCH} to start from new weights all the same"
    )


def _nothing_whole(choice: Choice, flag: str) -> str:
    where = f"{choice.folder.path} ({flag})"
    if not choice.folder.exists:
        return f"{where} does not exist"
    if not choice.skipped:
        return f"{where} holds no checkpoint"
    reasons = "".join(f"\n  {skip}" for skip in choice.skipped)
    return f"{where} holds no checkpoint that is whole:{reasons}"


def _saves_there(args: argparse.Namespace, folder: Path) -> bool:
    return bool(args.save) and Path(args.save).resolve() == folder.resolve()


def _digest(path: Path) -> str:
    """Of the metadata, or what is in the way of reading it."""
    try:
        return hashlib.sha256((path / METADATA).read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"


# --- what ranks tell each other -----------------------------------------------------------------


def _content_check(
    args: argparse.Namespace, board: Board | None
) -> Callable[[Checkpoint], Sequence[str]]:
    """Reads a checkpoint's bytes, each rank its share of the files."""
    rounds = 0

    def check(checkpoint: Checkpoint) -> list[str]:
        nonlocal rounds
        if args.verify_integrity and not has_hashes(checkpoint.path):
            return ["it has no content hashes, which --verify-integrity asks for"]
        if board is None:
            return contents(checkpoint)
        extra_s = checkpoint.nbytes / board.world_size / _SLOWEST_NBYTES_PER_S
        board.tell_all(f"round/{rounds}", [str(checkpoint.path), extra_s])
        board.hand_in(f"problems/{rounds}", contents(checkpoint, 0, board.world_size))
        what = "word on the content of a checkpoint"
        found = board.collect(f"problems/{rounds}", what, extra_s)
        rounds += 1
        return [problem for problems in found for problem in problems]

    return check


def _follow(board: Board) -> LoadDecision:
    """The part of ranks other than 0: reads their share of what is checked, until it is decided."""
    rounds, extra_s = 0, 0.0
    while True:
        subjects = (f"round/{rounds}", "decision")
        subject, told = board.hear(*subjects, what="which checkpoint to load", extra_s=extra_s)
        if subject == "decision":
            break
        path, extra_s = told
        checkpoint = examine(Candidate(Path(path), None), look_at_sizes=False)
        board.hand_in(f"problems/{rounds}", contents(checkpoint, board.rank, board.world_size))
        rounds += 1
    if "error" in told:
        raise CheckpointError(told["error"])
    values = told["decision"]
    return LoadDecision(**{**values, "notes": tuple(values["notes"])})


def _compare_sight(board: Board, decision: LoadDecision) -> None:
    """Raises on every rank unless all see the checkpoint that was chosen."""
    own = decision.digest if decision.name is None else _digest(decision.path)
    board.hand_in("sight", own)
    if board.rank == 0:
        seen = board.collect("sight", "word of what it sees of the checkpoint")
        others = [rank for rank, digest in enumerate(seen) if digest != decision.digest]
        verdict = ""
        if others:
            named = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
            verdict = (
                f"rank {named} does not see {decision.path} as rank 0 does: its metadata is "
                f"{seen[others[0]]} there, {decision.digest} on rank 0. --load must be one shared "
                "folder: look at the mounts of that rank's node"
            )
        board.tell_all("verdict", verdict)
    _, verdict = board.hear("verdict", what="whether all ranks see the checkpoint")
    if verdict:
        raise CheckpointError(verdict)


# --- Megatron's view of the folder --------------------------------------------------------------

_view: LoadDecision | None = None


@contextmanager
def as_decided(decision: LoadDecision) -> Iterator[None]:
    """Lets Megatron's loading code see the decision in place of the tracker file."""
    global _view
    _view = decision
    try:
        yield
    finally:
        _view = None


def get_checkpoint_tracker_filename(original: Callable[..., str], checkpoints_path: Any) -> str:
    """Wraps `megatron.training.checkpointing.get_checkpoint_tracker_filename`.

    Where there is no such file Megatron starts from new weights, whatever else is in the folder. So
    a file of the chosen checkpoint takes its place; what it says is not read (`read_metadata`).
    """
    path = original(checkpoints_path)
    if _view is None or Path(checkpoints_path) != Path(_view.folder) or Path(path).exists():
        return path
    return str(_view.path / MARKER)


def read_metadata(original: Callable[..., Any], tracker_filename: Any) -> Any:
    """Wraps `megatron.training.checkpointing.read_metadata`: what the tracker says."""
    if _view is None:
        return original(tracker_filename)
    return _view.iteration, _view.is_release


def load_args_from_checkpoint(
    original: Callable[..., Any], args: Any, load_arg: str = "load", **kwargs: Any
) -> Any:
    """Wraps `load_args_from_checkpoint` (--use-checkpoint-args), which runs before validation.

    Ranks cannot talk yet, so each finds the newest complete checkpoint by itself, without a look at
    the sizes of its files; the decision that follows says which one is meant, and whether all see
    it.
    """
    folder = getattr(args, load_arg)
    if not getattr(args, "ntp", False) or not folder:
        return original(args, load_arg, **kwargs)
    choice = choose(
        list_folder(Path(folder)),
        getattr(args, "ckpt_step", None) or None,
        look=partial(examine, look_at_sizes=False),
    )
    if choice.chosen is None and not choice.folder.was_saved_to:
        return original(args, load_arg, **kwargs)  # a first start: Megatron says so and goes on
    if choice.chosen is None:
        reasons = "".join(f"\n  {skip}" for skip in choice.skipped)
        raise NoCheckpointError(
            f"{folder} holds no whole checkpoint to take arguments from (--use-checkpoint-args)"
            + reasons
        )
    iteration = choice.chosen.candidate.iteration
    decision = LoadDecision(folder, choice.chosen.name, iteration or 0, iteration is None, "", ())
    with as_decided(decision):
        return original(args, load_arg, **kwargs)
