"""Training jobs that tests compare: plain uniform Megatron, and the same model with --ntp.

    start = jobs.start(jobs.LLAMA)                    # a checkpoint of plain Megatron
    plain = jobs.uniform(jobs.LLAMA, tp=4, load=start)
    ours = jobs.nonuniform(jobs.LLAMA, (4, 3), load=start)

A job with the same arguments runs once in a test session; whoever asks again gets the same result.
All jobs of a model see the same samples in the same order. Step 0 of a loaded job is the first
optimizer step after the checkpoint.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import recording
from logical import Logical, Tensors
from ranks import Training, run_training
from recording import RankRecord

COMMON = """
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --seed 7
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --dist-ckpt-optim-fully-reshardable
"""
DISTRIBUTED = ("--use-distributed-optimizer",)
OVERLAP_GRADS = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")
OVERLAP = ("--overlap-param-gather", *OVERLAP_GRADS)
NUM_BUCKETS = ("--overlap-grad-reduce", "--ddp-num-buckets", "4")
ALL_TIMERS = ("--timing-log-level", "2", "--timing-log-option", "all")
MANY_GROUPS = ("--ntp-bucket-size", "100")
TRAIN_ITERS = 22
GLOBAL_BATCH = 6


@dataclass(frozen=True)
class Model:
    """A small GPT, and the numbers of units that TP may cut.

    `vocab` is padded: every job is told to pad to it, whatever its TP degree.
    """

    name: str
    flags: str
    heads: int
    groups: int
    ffn: int
    kv_channels: int = 4
    hidden: int = 32
    layers: int = 2
    vocab: int = 56
    vocab_flag: int = 50

    @property
    def gated(self) -> bool:
        return "--swiglu" in self.flags

    @property
    def logical(self) -> Logical:
        units = {"kv_group": self.groups, "ffn": self.ffn, "vocab": self.vocab}
        return Logical(units, self.gated)

    def argv(self, nominal_tp: int) -> list[str]:
        grouped = "" if self.groups == self.heads else "--group-query-attention"
        return f"""
            {COMMON} {self.flags} {grouped} --num-query-groups {self.groups}
            --num-layers {self.layers} --hidden-size {self.hidden}
            --num-attention-heads {self.heads} --kv-channels {self.kv_channels}
            --ffn-hidden-size {self.ffn} --vocab-size {self.vocab_flag}
            --make-vocab-size-divisible-by {self.vocab // nominal_tp}
            --tensor-model-parallel-size {nominal_tp}
        """.split()


_LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
"""
_QK_NORM = """
    --swiglu --qk-layernorm --add-qkv-bias --position-embedding-type rope
    --untie-embeddings-and-output-weights
"""
_GPT2 = "--position-embedding-type learned_absolute"

LLAMA = Model("llama", _LLAMA, heads=16, groups=8, ffn=40)
"""GQA, gated MLP, RMSNorm, rope, no biases, untied."""
GPT2 = Model("gpt2", _GPT2, heads=8, groups=8, ffn=44, layers=1)
"""MHA, plain MLP, LayerNorm, learned positions, biases, tied."""
QK_NORM = Model("qk-norm", _QK_NORM, heads=8, groups=8, ffn=40, layers=1)
"""MHA, gated MLP with biases, LayerNorm, QK norm, rope, untied."""
ODD = Model("odd", _QK_NORM, heads=20, groups=10, ffn=40, vocab=55, layers=1)
"""GQA; 5 ranks have 2 groups each, 3 ranks 4, 3 and 3: extra ranks own scattered units."""
BIG_VOCABULARY = Model("50257-words", _GPT2, 8, 8, 44, layers=1, vocab=50260, vocab_flag=50256)
"""50257 rows (one is the end of a document), padded for TP 4; 3 ranks cannot share them evenly."""
EVEN = Model("even", _LLAMA, heads=12, groups=12, ffn=48, hidden=48, layers=1, vocab=60)
"""All units are divided by 3 and by 4."""
WIDE_LLAMA = Model("llama-32-heads", _LLAMA + "--qk-layernorm", 32, 32, 80, 2, hidden=64, layers=1)
"""32 heads, each its own KV group: 5,5,5,5,4,4,4 over 7 ranks."""
WIDE_GPT2 = Model("gpt2-32-heads", _GPT2, 32, 32, 88, 2, hidden=64, layers=1)


BF16_LLAMA = replace(LLAMA, name="llama-bf16", flags=_LLAMA + "--bf16", layers=1)
BF16_GPT2 = replace(GPT2, name="gpt2-bf16", flags=_GPT2 + " --bf16")


@dataclass(frozen=True)
class Job:
    """A finished job: what was logged, what each rank recorded, and where it saved."""

    model: Model
    training: Training
    saved: Path | None

    @property
    def ranks(self) -> list[RankRecord]:
        return self.training.results

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0].steps)

    @property
    def losses(self) -> list[float]:
        """As Megatron printed them, by step."""
        return list(self.training.losses.values())

    @property
    def grad_norms(self) -> list[float]:
        """Before clipping, by step; on every rank the same, or this raises."""
        answers = [[step.answers[1] for step in rank.steps] for rank in self.ranks]
        assert all(answer == answers[0] for answer in answers), "ranks disagree on the norm"
        return [float(norm) for norm in answers[0] if norm is not None]

    @property
    def dp_size(self) -> int:
        return 1 + max(rank.dp_rank for rank in self.ranks)

    def weights(self, step: int, dp_rank: int = 0) -> Tensors:
        return self.model.logical.weights(self.ranks, step, dp_rank)

    def grads(self, step: int = 0) -> Tensors:
        return self.model.logical.grads(self.ranks, step)

    def state(self, step: int = 0) -> dict[str, Tensors]:
        return self.model.logical.state(self.ranks, step)


@functools.cache
def _folder() -> Path:
    path = tempfile.mkdtemp(prefix="jobs-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def _run(
    model: Model,
    nominal_tp: int,
    world_size: int,
    flags: tuple[str, ...],
    load: Path | None,
    save_at: int | None,
    stop_at: int | None,
    core: Path | None,
    observe: tuple[tuple[str, object], ...],
    global_batch: int,
) -> Job:
    argv = [*model.argv(nominal_tp), *flags, "--global-batch-size", str(global_batch)]
    argv += ["--train-iters", str(TRAIN_ITERS)]
    saved = None
    if load is not None:
        argv += ["--load", str(load)]
    if save_at is not None:
        saved = Path(tempfile.mkdtemp(dir=_folder()))
        argv += ["--save", str(saved), "--save-interval", str(save_at)]
    if stop_at is not None:
        argv += ["--exit-interval", str(stop_at)]
    training = run_training(
        argv,
        world_size,
        core=core,
        timeout_s=240,
        before=recording.before,
        after=recording.after,
        **dict(observe),
    )
    return Job(model, training, saved)


def start(
    model: Model,
    flags: Sequence[str] = (),
    core: Path | None = None,
    global_batch: int = GLOBAL_BATCH,
) -> Path:
    """A checkpoint that plain Megatron at TP 1 saved after one step."""
    job = uniform(model, 1, 1, flags, save_at=1, stop_at=1, core=core, global_batch=global_batch)
    assert job.saved is not None
    return job.saved


def uniform(
    model: Model,
    tp: int,
    dp: int = 1,
    flags: Sequence[str] = (),
    *,
    load: Path | None = None,
    save_at: int | None = None,
    stop_at: int | None = None,
    core: Path | None = None,
    global_batch: int = GLOBAL_BATCH,
    **observe: object,
) -> Job:
    """Plain Megatron. Stops once the iteration count is a multiple of `stop_at`."""
    own = tuple(flags)
    seen = tuple(sorted(observe.items()))
    return _run(model, tp, tp * dp, own, load, save_at, stop_at, core, seen, global_batch)


def nonuniform(
    model: Model,
    degrees: Sequence[int],
    flags: Sequence[str] = (),
    *,
    nominal_tp: int | None = None,
    failed: str | None = None,
    load: Path | None = None,
    save_at: int | None = None,
    stop_at: int | None = None,
    core: Path | None = None,
    global_batch: int = GLOBAL_BATCH,
    **observe: object,
) -> Job:
    """The same with --ntp: one replica for each degree, said by degrees or by failed slots."""
    tp = nominal_tp or max(degrees)
    said = ["--ntp-degrees", ",".join(map(str, degrees))]
    if failed is not None:
        said = ["--ntp-failed", failed]
    own = ("--ntp", *said, *flags)
    seen = tuple(sorted(observe.items()))
    return _run(model, tp, sum(degrees), own, load, save_at, stop_at, core, seen, global_batch)


# --- long runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A nonuniform job of 21 recorded steps, and the plain jobs to hold it against."""

    model: Model
    degrees: tuple[int, ...]
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [flag.removeprefix("--") for flag in self.flags if flag.startswith("--")]
        short = {
            "use-distributed-optimizer": "distributed",
            "overlap-grad-reduce": "overlap-grads",
            "overlap-param-gather": "overlap-params",
            "ntp-bucket-size": "many-groups",
            "ddp-bucket-size": "",
            "timing-log-level": "timers",
            "timing-log-option": "",
        }
        named = [short.get(word, word) for word in words]
        return "-".join([self.model.name, "+".join(map(str, self.degrees)), *filter(None, named)])

    @property
    def start_flags(self) -> tuple[str, ...]:
        """Plain 0.19 reads optimizer state only with the kind of optimizer that wrote it."""
        return tuple(flag for flag in self.flags if flag in DISTRIBUTED)

    def ours(self) -> Job:
        loaded = start(self.model, self.start_flags)
        return nonuniform(self.model, self.degrees, self.flags, load=loaded)

    def plain(self) -> dict[int, Job]:
        """By TP degree: one replica of plain Megatron that runs the same global batches."""
        return {tp: reference(self.model, tp) for tp in (1, 2, 4)}


def reference(model: Model, tp: int) -> Job:
    """All steps in plain Megatron, from the same weights as every `Case` of this model."""
    return uniform(model, tp, load=start(model))


CASES = (
    Case(LLAMA, (2, 1), (*DISTRIBUTED, *ALL_TIMERS)),
    Case(LLAMA, (4, 3), (*DISTRIBUTED, *OVERLAP, *MANY_GROUPS)),
    Case(LLAMA, (4, 3, 2), (*DISTRIBUTED, *OVERLAP_GRADS)),
    Case(GPT2, (2, 1), OVERLAP_GRADS),
    Case(GPT2, (4, 3), ALL_TIMERS),
    Case(QK_NORM, (2, 1), (*DISTRIBUTED, *OVERLAP)),
    Case(QK_NORM, (4, 3), (*OVERLAP_GRADS, *MANY_GROUPS)),
)
BF16_CASES = (
    Case(BF16_LLAMA, (4, 3), (*DISTRIBUTED, *OVERLAP)),
    Case(BF16_GPT2, (4, 3), MANY_GROUPS),
)
