"""`megatron_ntp.install(plan=...)` in a script with a training loop of its own, megatron-core only.

The job at degrees 2+1 is compared with a uniform job that starts from its weights: the replica of
degree 1 holds them whole.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import RanksFailed, run_ranks
from versions import CORES

from megatron_ntp.plan import ModelDims, Plan, Topology

NUM_STEPS = 4
GLOBAL_BATCH = 4
SEQ_LENGTH = 16
VOCAB = 56
DIMS = ModelDims(
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=4,
    hidden_size=32,
    ffn_hidden_size=44,
    padded_vocab_size=VOCAB,
    num_layers=2,
    mlp_matrices=3,
)


def train(plan: str | None, tp: int, start: dict[str, Any] | None) -> dict[str, Any]:
    """What a user's script does; with a plan, its three lines more."""
    import torch
    import torch.distributed as dist

    from megatron_ntp import cpu_runtime

    cpu_runtime.install()
    if plan is not None:
        import megatron_ntp

        megatron_ntp.install(plan=plan, bucket_size=1000)
        megatron_ntp.install(plan=plan, bucket_size=1000)
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(7)
    config = _config(tp)
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ_LENGTH)
    if start is not None:
        model.load_state_dict(start)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True
    )
    ddp = DistributedDataParallel(config, options, model)
    config.no_sync_func = ddp.no_sync
    ddp.broadcast_params()
    first = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True),
        [ddp],
    )
    size = GLOBAL_BATCH // mpu.get_data_parallel_world_size()
    rank = mpu.get_data_parallel_rank()
    losses: list[float] = []
    norms: list[float] = []
    for step in range(NUM_STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        samples = iter(range(step * GLOBAL_BATCH + rank * size, (step + 1) * GLOBAL_BATCH))
        found = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=samples,
            model=[ddp],
            num_microbatches=size,
            seq_length=SEQ_LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        losses += [float(entry["loss"]) for entry in found]
        norms.append(float(optimizer.step()[1]))
    return {"losses": losses, "norms": norms, "first": first, "dp_rank": rank}


def _config(tp: int) -> Any:
    import torch.nn.functional as functional
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=DIMS.num_layers,
        hidden_size=DIMS.hidden_size,
        num_attention_heads=DIMS.num_attention_heads,
        num_query_groups=DIMS.num_query_groups,
        kv_channels=DIMS.kv_channels,
        ffn_hidden_size=DIMS.ffn_hidden_size,
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="LayerNorm",
        tensor_model_parallel_size=tp,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def _forward_step(samples: Any, model: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(100 + next(samples))
    tokens = torch.randint(0, VOCAB, (1, SEQ_LENGTH + 1), generator=generator)
    positions = torch.arange(SEQ_LENGTH).unsqueeze(0)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(_loss)


def _loss(output: Any) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    Plan(Topology.from_degrees((2, 1)), DIMS).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
def test_a_loop_of_its_own_agrees_with_uniform_tp(core: Path | None, plan: Path) -> None:
    ours = run_ranks(train, 3, core=core, plan=str(plan), tp=2, start=None)
    assert [rank["dp_rank"] for rank in ours] == [0, 0, 1]
    (plain,) = run_ranks(train, 1, core=core, plan=None, tp=1, start=ours[2]["first"])
    own = [
        loss
        for step in range(NUM_STEPS)
        for replica in (ours[0], ours[2])
        for loss in replica["losses"][2 * step : 2 * step + 2]
    ]
    assert own == pytest.approx(plain["losses"], rel=1e-5)
    for rank in ours:
        assert rank["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert ours[0]["losses"] == ours[1]["losses"], "ranks of one replica"


def refused(plan: str, what: str) -> str:
    """The message of a call that cannot work."""
    import megatron_ntp
    from megatron_ntp.errors import NTPError, PlanError
    from megatron_ntp.integration import context

    try:
        if what == "option":
            megatron_ntp.install(plan=plan, buket_size=1)
        elif what == "no plan":
            megatron_ntp.install(num_microbatches=4)
        elif what == "other plan":
            megatron_ntp.install(plan=plan)
            megatron_ntp.install(plan=Plan(Topology.from_degrees((1, 2)), DIMS))
        elif what == "wrong tp":
            import torch.distributed as dist
            from megatron.core import parallel_state

            megatron_ntp.install(plan=plan)
            dist.init_process_group("gloo")
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        elif what == "too late":
            import torch.distributed as dist
            from megatron.core import parallel_state

            dist.init_process_group("gloo")
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=3)
            megatron_ntp.install(plan=plan)
        else:
            megatron_ntp.install(plan=plan)
    except (PlanError, NTPError) as error:
        return str(error)
    megatron_ntp.uninstall()
    assert context.current() is None
    return ""


@pytest.mark.parametrize(
    ("what", "world_size", "message"),
    [
        ("nothing", 3, ""),
        ("nothing", 2, "the plan needs 3 processes and 2 were started"),
        ("option", 3, "no option 'buket_size': did you mean bucket_size?"),
        ("no plan", 3, "takes its settings from the command line"),
        ("other plan", 3, "called before with another plan"),
        ("wrong tp", 3, "was given a TP size of 1, but the plan is for a healthy degree of 2"),
        ("too late", 3, "must come before initialize_model_parallel"),
    ],
)
def test_what_cannot_work(plan: Path, what: str, world_size: int, message: str) -> None:
    for found in run_ranks(refused, world_size, plan=str(plan), what=what):
        assert (message in found) if message else not found


def refused_settings(plan: str) -> list[str]:
    """What is said to settings that give wrong gradients, and that no flag shows."""
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from megatron_ntp import cpu_runtime, install
    from megatron_ntp.errors import NTPError, UnsupportedFlagError

    cpu_runtime.install()
    install(plan=plan)
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def answer(function: Any, *args: Any, **kwargs: Any) -> str:
        try:
            function(*args, **kwargs)
        except (NTPError, UnsupportedFlagError) as error:
            return str(error)
        return "accepted"

    dist.init_process_group("gloo")
    config, spec = _config(2), get_gpt_layer_local_spec()
    said = [answer(GPTModel, config, spec, VOCAB, SEQ_LENGTH)]
    said.append(answer(mpu.initialize_model_parallel, 2, expert_model_parallel_size=2))
    mpu.initialize_model_parallel(2)
    wrong = replace(config, sequence_parallel=True, cross_entropy_loss_fusion=True)
    said.append(answer(GPTModel, wrong, spec, VOCAB, SEQ_LENGTH))
    said.append(answer(GPTModel, config, spec, 2 * VOCAB, SEQ_LENGTH))
    said.append(answer(BertModel, config, 0, bert_layer_local_spec, VOCAB, SEQ_LENGTH))
    options = DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    said.append(answer(DistributedDataParallel, config, options, torch.nn.Linear(1, 1)))
    said.append(answer(get_megatron_optimizer, OptimizerConfig(optimizer="muon"), []))
    logits = torch.zeros(1, VOCAB // mpu.get_tensor_model_parallel_world_size())
    target = torch.zeros(1, dtype=torch.int64)
    said.append(answer(tensor_parallel.vocab_parallel_cross_entropy, logits, target, 0.1))
    return said


def test_settings_that_no_flag_shows(plan: Path) -> None:
    named = (
        ("nonuniform TP has no process groups",),
        ("initialize_model_parallel.expert_model_parallel_size = 2: MoE",),
        (
            "TransformerConfig.sequence_parallel = True: ",
            "TransformerConfig.cross_entropy_loss_fusion = True: the fused loss assumes equal",
        ),
        ("a vocabulary of 112 rows, but the plan is for 56",),
        ("supports megatron.core's GPTModel, but the model is a BertModel",),
        ("DistributedDataParallelConfig.num_distributed_optimizer_instances = 2: ",),
        ("OptimizerConfig.optimizer = 'muon': ",),
        ("label smoothing assumes equal vocabulary shards",),
    )
    for said in run_ranks(refused_settings, 3, plan=str(plan)):
        for answer, parts in zip(said, named, strict=True):
            assert all(part in answer for part in parts), answer


def test_ranks_with_different_plans_are_named(plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "plan-2.json"
    Plan(Topology.from_degrees((2, 1)), DIMS, "shrink").save(other)
    with pytest.raises(RanksFailed, match=r"the plan of rank 2 is not that of ranks 0, 1"):
        run_ranks(make_groups, 3, plans=[str(plan), str(plan), str(other)])


def make_groups(plans: list[str]) -> None:
    import os

    import torch.distributed as dist
    from megatron.core import parallel_state

    import megatron_ntp

    megatron_ntp.install(plan=plans[int(os.environ["RANK"])], num_microbatches=4)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
