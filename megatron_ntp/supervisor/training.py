"""What a training command says, as far as a supervisor needs it, and what is added to it.

[Where it goes on] A restart loads from --load. So that must be the folder of --save, or the restart
would go back to where the job began. Checkpoints of another job come in by --pretrained-checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.folder import list_folder
from megatron_ntp.checkpoint.modes import LoadMode
from megatron_ntp.doctor.job import GivenWords, model_dims
from megatron_ntp.errors import PlanError, UnsupportedFlagError
from megatron_ntp.launchers.nodes import Placement, Shape
from megatron_ntp.launchers.start import refuse_rewinding, training_command
from megatron_ntp.plan.batch import BatchPolicy
from megatron_ntp.settings import NTPSettings, add_arguments
from megatron_ntp.supervisor.decide import Terms

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "srun", "mpirun")
OR_SCRATCH = ("--ntp-load", LoadMode.OR_SCRATCH.value)


@dataclass(frozen=True)
class Training:
    """A training command. Make one with `read`.

    Attributes:
        words: the command of a rank, a Python in front where there is none.
        nonuniform: --ntp is among them.
        says_steps: its ranks write beats, so that a hang can be told from work.
        says_load: the user has chosen what to load.
    """

    words: tuple[str, ...]
    nonuniform: bool
    says_steps: bool
    says_load: bool
    shape: Shape
    terms: Terms
    save: Path | None
    load: Path | None

    def newest_checkpoint(self) -> int:
        """Iteration of the newest whole checkpoint of --save, -1 for none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if self.save is None:
            return -1
        chosen = choose(list_folder(self.save)).chosen
        return -1 if chosen is None else chosen.candidate.iteration or 0

    def has_saved(self) -> bool:
        """Whether a save into the folder of --save was ever complete."""
        return self.save is not None and list_folder(self.save).was_saved_to

    def command(self, placement: Placement, may_begin_anew: bool) -> list[str]:
        """What each rank runs.

        Args:
            placement: whose failed slots are added.
            may_begin_anew: the job has no checkpoint yet, and never had one.

        Raises:
            UnsupportedFlagError: slots have failed, and the words do not allow for that.
        """
        words = training_command(self.words, placement)
        fits = self.nonuniform and self.load is not None and not self.says_load
        return [*words, *OR_SCRATCH] if may_begin_anew and fits else words


def read(words: Sequence[str], shape: Shape, keep_replicas: bool, min_degree: int) -> Training:
    """Reads the words after the lone `--`.

    Args:
        words: as typed.
        shape: sizes given to the supervisor; 0 for those that the words say.
        keep_replicas: see `decide.Terms`.
        min_degree: see `decide.Terms`.

    Raises:
        UnsupportedFlagError: the command cannot be restarted.
    """
    if not words:
        raise UnsupportedFlagError("give the training command after a lone --")
    given = GivenWords(words)
    settings = _settings(words)
    _check(words, given, settings)
    micro = _number(given.micro_batch_size)
    return Training(
        words=_rank_words(words, settings.ntp),
        nonuniform=settings.ntp,
        says_steps=settings.ntp or _is_started_by_us(words),
        says_load=settings.ntp_load != LoadMode.FULL.value,
        shape=Shape(
            tp=shape.tp or _number(given.tensor_model_parallel_size) or 1,
            pp=shape.pp or _number(given.pipeline_model_parallel_size) or 1,
            cp=shape.cp or _number(given.context_parallel_size) or 1,
            gpus_per_node=shape.gpus_per_node,
            num_replicas=shape.num_replicas,
        ),
        terms=Terms(
            nonuniform=settings.ntp,
            dims=model_dims(given),
            batch_policy=settings.ntp_batch_policy or BatchPolicy.KEEP.value,
            batches=_batches(words, given) if micro else (),
            micro_batch=micro,
            keep_replicas=keep_replicas,
            min_degree=min_degree,
        ),
        save=Path(str(given.save)) if given.save else None,
        load=Path(str(given.load)) if given.load else None,
    )


def _settings(words: Sequence[str]) -> NTPSettings:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        known, _ = add_arguments(parser, words).parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UnsupportedFlagError(f"the training command: {error}") from error
    return NTPSettings.from_namespace(known)


def _check(words: Sequence[str], given: GivenWords, settings: NTPSettings) -> None:
    for word in itertools.takewhile(lambda word: not word.endswith(".py"), words[:4]):
        if Path(word).name in _LAUNCHERS:
            raise UnsupportedFlagError(
                f"remove {word} and its options from the training command: launch itself starts "
                "one process for each GPU, and tells it its rank"
            )
    for name in ("ntp_failed", "ntp_degrees", "ntp_plan"):
        if getattr(settings, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UnsupportedFlagError(
                f"remove {flag} from the training command: which GPUs have failed is found out "
                "and added here"
            )
    refuse_rewinding(words)
    if given.save and not given.load:
        raise UnsupportedFlagError(
            f"--save {given.save} without --load: a restart would begin from new weights. Add "
            f"--load {given.save}"
        )
    if given.save and Path(str(given.save)).resolve() != Path(str(given.load)).resolve():
        raise UnsupportedFlagError(
            f"--load {given.load} is not the folder of --save {given.save}: a restart would go "
            f"back to it and lose what was trained. Give --load {given.save}, and the other one "
            f"as --pretrained-checkpoint {given.load}"
        )


def _is_started_by_us(words: Sequence[str]) -> bool:
    pairs = list(itertools.pairwise(words))
    return ("megatron_ntp", "run") in pairs or ("megatron-ntp", "run") in pairs


def _rank_words(words: Sequence[str], nonuniform: bool) -> tuple[str, ...]:
    """A script with --ntp is started through the plugin: its checkout need not be patched."""
    if words[0] == "-m":
        return (sys.executable, *words)
    if words[0].endswith(".py") and nonuniform:
        return (sys.executable, "-m", "megatron_ntp", "run", *words)
    return (sys.executable, *words) if words[0].endswith(".py") else tuple(words)


def _number(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedFlagError(f"the training command has a size that is no number: {value!r}")
    return value


def _batches(words: Sequence[str], given: GivenWords) -> tuple[int, ...]:
    """Global batch sizes that the job passes through."""
    last = _number(given.global_batch_size)
    if last is None:
        return ()
    if "--rampup-batch-size" not in words:
        return (last,)
    place = list(words).index("--rampup-batch-size")
    try:
        first, step = (int(word) for word in words[place + 1 : place + 3])
        return (*range(first, last, step), last)
    except ValueError as error:
        raise PlanError(f"--rampup-batch-size takes three numbers: {error}") from error
