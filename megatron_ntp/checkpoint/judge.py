"""Whether a job can start from a whole checkpoint; if not, why, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ntp.checkpoint.examine import Checkpoint, Format
from megatron_ntp.checkpoint.modes import LoadMode
from megatron_ntp.checkpoint.saved_job import OptimizerFormat, SavedJob
from megatron_ntp.errors import CheckpointError

MODEL_ONLY = f"--ntp-load {LoadMode.MODEL_ONLY.value}"
RESHARDABLE_FLAG = "--dist-ckpt-optim-fully-reshardable"


@dataclass(frozen=True)
class Wanted:
    """The job that wants to load. `tp` is the healthy degree.

    `model` holds Megatron's arguments of `saved_job.MODEL_ARGUMENTS`.
    """

    tp: int
    pp: int
    degrees: tuple[int, ...]
    load_optimizer: bool
    model: Mapping[str, Any]

    @property
    def is_reduced(self) -> bool:
        return any(degree != self.tp for degree in self.degrees)


def require_loadable(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Checks format, model and optimizer state.

    Raises:
        CheckpointError: with the rule that fails and the cure.
    """
    _require_format(checkpoint)
    job = checkpoint.job
    assert job is not None, "a whole torch_dist checkpoint says what job saved it"
    differences = list(_other_model(job, wanted))
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} is of another model than the flags describe:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nGive the model's own flags, or the right --load"
        )
    problem = optimizer_problem(checkpoint, wanted) if wanted.load_optimizer else ""
    if problem:
        raise CheckpointError(problem)


def _require_format(checkpoint: Checkpoint) -> None:
    where = f"{checkpoint.path} is a checkpoint in format '{checkpoint.format.value}'"
    if checkpoint.format is Format.LEGACY:
        raise CheckpointError(
            f"{where}, which cannot be read at another TP degree. Convert it once, at the TP and "
            "PP it was saved with and without --ntp, by adding to that job's flags:\n"
            f"  --load {checkpoint.path.parent} --ckpt-format torch --ckpt-convert-format "
            f"torch_dist --ckpt-convert-save NEW_FOLDER {RESHARDABLE_FLAG}\n"
            "then start with --load NEW_FOLDER/torch_dist --ckpt-format torch_dist"
        )
    if checkpoint.format is not Format.TORCH_DIST:
        raise CheckpointError(
            f"{where}; --ntp loads 'torch_dist' only. Load it once without --ntp and save it with "
            f"--ckpt-format torch_dist {RESHARDABLE_FLAG}"
        )


def optimizer_problem(checkpoint: Checkpoint, wanted: Wanted) -> str:
    """Why a job cannot load the optimizer state of a checkpoint, and the way out; else empty."""
    job = checkpoint.job
    assert job is not None
    found = job.optimizer_format
    if found is OptimizerFormat.NONE:
        return (
            f"{checkpoint.path} holds no optimizer state (--no-save-optim). Load the model alone "
            f"with {MODEL_ONLY}"
        )
    if found.is_reshardable:
        return ""
    same_cut = found is OptimizerFormat.DP_RESHARDABLE and not wanted.is_reduced
    if same_cut and (job.tp, job.pp) == (wanted.tp, wanted.pp):
        return ""
    how = "Resume once, without --ntp, "
    if found is OptimizerFormat.FULLY_SHARDED_MODEL_SPACE:
        how += "with the megatron-core (0.16 or older) that wrote it"
    else:
        how += f"at the TP {job.tp} and PP {job.pp} it was saved with"
    return (
        f"{checkpoint.path} holds optimizer state in the format '{found.value}', saved at TP "
        f"{job.tp}, PP {job.pp}. It cannot be read by this job, whose TP degrees are "
        f"{','.join(map(str, wanted.degrees))}. {how}, and save with {RESHARDABLE_FLAG}; or go on "
        f"without the optimizer's moments with {MODEL_ONLY}"
    )


def _other_model(job: SavedJob, wanted: Wanted) -> Iterator[str]:
    saved, asked = job.model, wanted.model
    # Padding depends on TP, and Megatron loads a vocabulary that was padded otherwise.
    same_padding = job.tp == wanted.tp and saved.get("make_vocab_size_divisible_by") == asked.get(
        "make_vocab_size_divisible_by"
    )
    ignored = {"make_vocab_size_divisible_by"}
    if not same_padding:
        ignored.add("padded_vocab_size")
    if not (saved.get("group_query_attention") or asked.get("group_query_attention")):
        ignored.add("num_query_groups")  # has a default that means nothing
    for name in sorted(set(saved) & set(asked) - ignored):
        if None not in (saved[name], asked[name]) and saved[name] != asked[name]:
            yield f"{name} is {saved[name]} in the checkpoint, {asked[name]} in the flags"
