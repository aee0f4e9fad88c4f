"""What is rehearsed: the options, the small model, and the flags that a rank is started with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_ntp.errors import PlanError
from megatron_ntp.plan import ModelDims, Plan, Topology, build_plan, format_degrees

TOKENIZER_VOCAB_SIZE = 250
VOCAB_DIVISOR = 13  # odd, so that reduced degrees do not divide the padded vocabulary
HIDDEN_SIZE = 64
KV_CHANNELS = 8
NUM_LAYERS = 2
SEQ_LENGTH = 32
MIN_FFN_SIZE = 168
LEARNING_RATE = 5e-3


class RehearsalError(PlanError):
    """The options do not make a rehearsal."""


@dataclass(frozen=True)
class Options:
    """One rehearsal. Steps count from 1; a checkpoint is written every `save_interval` steps.

    Attributes:
        degrees: TP degree of each replica after the failure; the highest is the healthy degree.
        failed: failed slots as (replica, slot), or None for the last slots of reduced replicas.
        fail_at: the step in which the ranks of the failed slots are killed.
        num_microbatches: per replica and step, in the healthy job; a microbatch is one sample.
    """

    degrees: tuple[int, ...] = (4, 3)
    failed: tuple[tuple[int, int], ...] | None = None
    num_heads: int = 16
    num_steps: int = 24
    save_interval: int = 8
    fail_at: int = 12
    num_microbatches: int = 4
    batch_policy: str = "keep"

    def __post_init__(self) -> None:
        if self.topology.is_uniform:
            raise RehearsalError(
                f"degrees {format_degrees(self.degrees)} are all equal: there is no failure to "
                "rehearse. Give at least one replica a lower degree, such as 4,3"
            )
        self._check_heads()
        self._check_steps()
        _ = self.plan.batch(self.num_microbatches)

    def _check_heads(self) -> None:
        tp = self.nominal_tp
        if self.num_heads < 1 or self.num_heads % tp:
            raise RehearsalError(
                f"{self.num_heads} heads cannot be cut for the uniform job beside the rehearsal: "
                f"plain Megatron needs a multiple of the healthy TP degree {tp}, such as {4 * tp}"
            )

    def _check_steps(self) -> None:
        if self.save_interval < 1:
            raise RehearsalError(f"the save interval must be at least 1, got {self.save_interval}")
        if self.fail_at <= self.save_interval:
            raise RehearsalError(
                f"a rank killed in step {self.fail_at} would leave no checkpoint to go on from: "
                f"the first one is written after step {self.save_interval}. Fail later, or save "
                "earlier"
            )
        if self.num_steps <= self.repaired_after or self.fail_at > self.num_steps:
            raise RehearsalError(
                f"{self.num_steps} steps are too few: the failure in step {self.fail_at} sends the "
                f"job back to step {self.resumed_after}, the reduced job runs to step "
                f"{self.repaired_after}, and the repaired one needs a step of its own. Give at "
                f"least {max(self.repaired_after + 1, self.fail_at)} steps"
            )

    @property
    def resumed_after(self) -> int:
        """The checkpoint that is there when the failure strikes."""
        return (self.fail_at - 1) // self.save_interval * self.save_interval

    @property
    def repaired_after(self) -> int:
        """The reduced job's checkpoint, from which the repaired job goes on."""
        return self.resumed_after + self.save_interval

    @property
    def global_batch(self) -> int:
        """Samples of a step of the healthy job."""
        return self.num_microbatches * self.num_replicas

    @property
    def reduced_batch(self) -> int:
        """Samples of a step of the reduced job."""
        return self.plan.batch(self.num_microbatches).total

    @property
    def num_replicas(self) -> int:
        return len(self.degrees)

    @property
    def nominal_tp(self) -> int:
        return self.topology.nominal_tp

    @cached_property
    def topology(self) -> Topology:
        """The job after the failure."""
        return Topology.from_degrees(self.degrees, None, self.failed)

    @cached_property
    def healthy(self) -> Topology:
        return Topology.from_failed(self.num_replicas, self.nominal_tp)

    @cached_property
    def plan(self) -> Plan:
        return build_plan(
            self.dims,
            degrees=self.degrees,
            failed=self.topology.failed,
            nominal_tp=self.nominal_tp,
            batch_policy=self.batch_policy,
        )

    @cached_property
    def dims(self) -> ModelDims:
        tp = self.nominal_tp
        groups = self.num_heads // 2
        return ModelDims(
            num_attention_heads=self.num_heads,
            num_query_groups=groups if groups and groups % tp == 0 else self.num_heads,
            kv_channels=KV_CHANNELS,
            hidden_size=HIDDEN_SIZE,
            ffn_hidden_size=_round_up(
                MIN_FFN_SIZE, 2 * tp
            ),  # plain Megatron halves each rank's part
            padded_vocab_size=_round_up(TOKENIZER_VOCAB_SIZE, VOCAB_DIVISOR * tp),
            num_layers=NUM_LAYERS,
            mlp_matrices=3,
        )

    def killed_ranks(self) -> tuple[int, ...]:
        """Global ranks of the healthy job on the slots that fail."""
        failed = set(self.topology.failed)
        return tuple(
            info.global_rank for info in self.healthy.ranks if (info.replica, info.slot) in failed
        )


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def megatron_flags(options: Options) -> list[str]:
    """The flags that all phases share: the whole job except what it loads, saves and loses."""
    dims = options.dims
    flags = {
        "tensor-model-parallel-size": options.nominal_tp,
        "num-layers": dims.num_layers,
        "hidden-size": dims.hidden_size,
        "num-attention-heads": dims.num_attention_heads,
        "num-query-groups": dims.num_query_groups,
        "kv-channels": dims.kv_channels,
        "ffn-hidden-size": dims.ffn_hidden_size,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "seq-length": SEQ_LENGTH,
        "max-position-embeddings": SEQ_LENGTH,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": TOKENIZER_VOCAB_SIZE,
        "make-vocab-size-divisible-by": VOCAB_DIVISOR,
        "micro-batch-size": 1,
        "global-batch-size": options.global_batch,
        "train-iters": options.num_steps,
        "lr": LEARNING_RATE,
        "min-lr": LEARNING_RATE / 10,
        **_schedule(options),
        "clip-grad": 1.0,
        "weight-decay": 0.1,
        "seed": 1234,
        "log-interval": 1,
        "eval-iters": 0,
        "eval-interval": 1_000_000,
        "ckpt-format": "torch_dist",
    }
    switches = [
        "group-query-attention",
        "swiglu",
        "disable-bias-linear",
        "untie-embeddings-and-output-weights",
        "mock-data",
        "use-distributed-optimizer",
        "dist-ckpt-optim-fully-reshardable",
    ]
    if options.reduced_batch != options.global_batch:
        switches.append("override-opt-param-scheduler")
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*words, *(f"--{name}" for name in switches)]


def _schedule(options: Options) -> dict[str, object]:
    """Megatron's learning rate depends on samples: it stays constant where batches differ."""
    if options.reduced_batch != options.global_batch:
        return {"lr-decay-style": "constant", "lr-warmup-iters": 0}
    return {"lr-decay-style": "cosine", "lr-warmup-iters": 2}


def training_script() -> Path:
    """`scripts/pretrain_gpt.py`: of the checkout, or the copy that an installed package brings."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "scripts" / "pretrain_gpt.py", package.parent / "scripts/pretrain_gpt.py"]
    for place in places:
        if place.is_file():
            return place
    raise RehearsalError(
        f"the training script pretrain_gpt.py is missing (looked for {places[0]} and {places[1]}). "
        "Install megatron-ntp again"
    )
