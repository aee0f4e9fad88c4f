"""Unmodified Megatron on the CPU runtime: it trains, saves and resumes, and is put back exactly.

Needs nothing but the installed megatron-core; ``make cores`` adds other versions.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flags import DISTRIBUTED, LLAMA, MODEL, OVERLAP, SHORT, tp
from ranks import ROOT, RanksFailed, run_ranks, run_training, start
from versions import CHECKOUTS, CORES

# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("core", CORES)
def test_resumes_at_other_sizes_as_if_undisturbed(core: Path | None, tmp_path: Path) -> None:
    """One TP2 x DP2 checkpoint, resumed at its own sizes to the digit, and at others."""
    flags = [*MODEL, *LLAMA, *DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"]
    saved = ["--save", str(tmp_path), "--save-interval", "3"]
    whole = run_training([*flags, *tp(2), *saved], 4, core=core)
    assert sorted(whole.losses) == [1, 2, 3, 4, 5, 6]

    loaded = ["--load", str(tmp_path), "--ckpt-step", "3"]
    for degree, num_ranks, tolerance in ((2, 4, 0.0), (1, 1, 1e-6), (4, 4, 1e-6)):
        resumed = run_training([*flags, *tp(degree), *loaded], num_ranks, core=core)
        for step in (4, 6):  # Megatron's second line after a resume is the mean of two steps
            expected = pytest.approx(whole.losses[step], rel=tolerance)
            assert resumed.losses[step] == expected, f"TP{degree} on {num_ranks} ranks"
            assert resumed.grad_norms[step] == pytest.approx(whole.grad_norms[step], abs=2e-3)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        pytest.param([*LLAMA, *tp(1)], 1, id="tp1"),
        pytest.param([*LLAMA, *tp(2), *DISTRIBUTED, "--qk-layernorm"], 2, id="tp2-qk-norm"),
        pytest.param([*tp(2)], 4, id="tp2-dp2-gpt2-no-distributed-optimizer"),
        pytest.param([*LLAMA, *tp(2), "--bf16"], 4, id="tp2-dp2-bf16-no-distributed-optimizer"),
        pytest.param(
            [*tp(2), *DISTRIBUTED, *OVERLAP, "--bf16", "--sequence-parallel"],
            4,
            id="tp2-dp2-layernorm-sequence-parallel-overlap-bf16",
        ),
        pytest.param(
            [*tp(2), *DISTRIBUTED, "--vocab-size", "50257", "--calculate-per-token-loss"],
            4,
            id="tp2-dp2-large-vocabulary-tied",
        ),
        pytest.param(
            [*LLAMA, *tp(1), *DISTRIBUTED, "--pipeline-model-parallel-size", "2"], 4, id="pp2-dp2"
        ),
    ],
)
def test_trains(core: Path | None, flags: list[str], num_ranks: int) -> None:
    training = run_training([*MODEL, *flags, *SHORT], num_ranks, core=core)
    assert sorted(training.losses) == [1, 2, 3]
    assert training.losses[1] == pytest.approx(training.losses[2], rel=0.05)
    assert all(0 < norm < 100 for norm in training.grad_norms.values())


@pytest.mark.parametrize("core", CORES)
def test_a_second_run_changes_no_digit_and_overlap_rounding_only(core: Path | None) -> None:
    flags = [*MODEL, *LLAMA, *tp(2), *SHORT]
    plain = run_training(flags, 4, core=core)
    again = run_training(flags, 4, core=core)
    assert (again.losses, again.grad_norms) == (plain.losses, plain.grad_norms)
    overlapped = run_training([*flags, *DISTRIBUTED, *OVERLAP], 4, core=core)
    assert overlapped.losses == pytest.approx(plain.losses, rel=1e-6)  # norm: other sum order


@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_a_checkouts_own_script_gives_the_same_losses(checkout: Path) -> None:
    flags = [*MODEL, *LLAMA, *tp(2), *DISTRIBUTED, *SHORT]
    theirs = run_training(flags, 4, script=checkout / "pretrain_gpt.py", core=checkout)
    ours = run_training(flags, 4, core=checkout)
    assert theirs.losses == ours.losses
    assert theirs.grad_norms == ours.grad_norms


# --- what it answers ----------------------------------------------------------------------------


def redirected() -> None:
    """In a rank: whatever asks for CUDA gets the CPU."""
    import torch

    for device in ("cuda", "cuda:0", torch.device("cuda"), 0, torch.cuda.current_device()):
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).to(device=device).device.type == "cpu"
    assert torch.empty(2, pin_memory=True).device.type == "cpu"

    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert weight.type() == "torch.cuda.BFloat16Tensor"
    assert weight.type(torch.float32).dtype == torch.float32
    assert weight.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert weight.cuda() is weight and weight.pin_memory() is weight
    for copied in (weight.cpu(), weight.to("cpu"), weight.to(torch.device("cpu"))):
        assert copied.data_ptr() != weight.data_ptr()

    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="cuda"))

    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    torch.cuda.current_stream().record_event(after)
    assert after.query() and before.elapsed_time(after) >= 0
    assert torch.get_num_threads() == 1 and not torch.accelerator.is_available()


def test_devices_streams_and_random_numbers() -> None:
    run_ranks(redirected, 1)


def hooks_see_cuda() -> list[str]:
    """In a rank: devices seen by a hook of ``Tensor.backward``, which torch runs without modes."""
    import torch

    seen = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: seen.append(torch.empty(1, device="cuda").device.type))
    weight.sum().backward()
    return seen


def test_hooks_of_backward_are_redirected() -> None:
    assert run_ranks(hooks_see_cuda, 1) == [["cpu"]]


def norm_marks(sequence_parallel: bool, normalization: str) -> list[bool]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        normalization=normalization,
        persist_layer_norm=False,
    )
    norm = WrappedTorchNorm(config=config, hidden_size=8, eps=1e-5)
    assert config.sequence_parallel == sequence_parallel
    return [param.sequence_parallel for param in norm.parameters()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("normalization", "num_params"), [("RMSNorm", 1), ("LayerNorm", 2)])
def test_norms_carry_the_sequence_parallel_mark(
    sequence_parallel: bool, normalization: str, num_params: int
) -> None:
    marks = run_ranks(
        norm_marks, 1, sequence_parallel=sequence_parallel, normalization=normalization
    )
    assert marks == [[sequence_parallel] * num_params]


# --- Adam ---------------------------------------------------------------------------------------


def adam_steps(offset: int) -> Any:
    """In a rank: 5 steps on 37 weights that begin ``offset`` elements into a larger parameter."""
    import torch

    from megatron_ntp.cpu_runtime import FusedAdam

    torch.manual_seed(3)
    start, grads = torch.randn(37), torch.randn(5, 37)
    weight = torch.zeros(offset + 37 + 5)
    weight[offset : offset + 37] = start
    weight.requires_grad_()
    adam = FusedAdam([{"params": [weight]}, {"params": []}], lr=1e-2, weight_decay=0.1)
    plain = start.clone().requires_grad_()
    torch_adam = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1)
    for grad in grads:
        weight.grad = torch.ones_like(weight)
        weight.grad[offset : offset + 37] = grad
        plain.grad = grad
        adam.step()
        torch_adam.step()
    part = weight.detach()[offset : offset + 37]
    torch.testing.assert_close(part, plain.detach(), rtol=1e-5, atol=1e-6)
    assert adam.param_groups[0]["step"] == 5
    assert "step" not in adam.param_groups[1], "an empty group counts nothing, as in FusedAdam"
    assert set(adam.state[weight]) == {"exp_avg", "exp_avg_sq"}
    return part.numpy().tobytes()


def test_adam_gives_the_same_bits_wherever_a_shard_begins() -> None:
    bits = {run_ranks(adam_steps, 1, offset=offset)[0] for offset in (0, 1, 3, 8, 13)}
    assert len(bits) == 1


# --- leaving no trace ---------------------------------------------------------------------------

UNINSTALL = """
import os, sys
import torch
import megatron.core.optimizer
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
from megatron.core.transformer import torch_norm
from megatron_ntp import cpu_runtime

owners = [torch.autograd, torch.autograd.graph, torch.cuda, torch.cuda.random,
          torch.cuda.nvtx, torch.accelerator, torch.Tensor,
          torch.nn.Module, torch.distributed, torch.distributed.distributed_c10d,
          megatron.core.optimizer, distrib_optimizer, clip_grads, optimizer, dataset_utils,
          torch_norm.WrappedTorchNorm]

def snapshot():
    return [dict(vars(owner)) for owner in owners], dict(os.environ), torch.get_num_threads()

def differences(old, new):
    return [(owner, name) for owner, a, b in zip(owners, old[0], new[0])
            for name in a.keys() | b.keys() if a.get(name) is not b.get(name)]

before = snapshot()
cpu_runtime.install()
cpu_runtime.install()
assert torch.empty(1, device="cuda").device.type == "cpu"
assert cpu_runtime.is_installed() and differences(before, snapshot())
cpu_runtime.uninstall()
cpu_runtime.uninstall()
assert not cpu_runtime.is_installed()
assert not differences(before, snapshot()), differences(before, snapshot())
assert before[1:] == snapshot()[1:]
assert torch.ones(1).type() == "torch.FloatTensor" and not torch.cuda.is_available()
"""


def test_uninstall_puts_everything_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNINSTALL], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- refusals -----------------------------------------------------------------------------------

VISIBLE_GPU = """
import sys, torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
from megatron_ntp.cli import main
sys.exit(main(["run", "--cpu", {script!r}]))
"""


def test_a_visible_gpu_is_refused() -> None:
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    done = subprocess.run(
        [sys.executable, "-c", VISIBLE_GPU.format(script=script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "2 GPU(s) are visible" in done.stderr and "CUDA_VISIBLE_DEVICES=" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine"),
        (["--transformer-impl=transformer_engine"], "--transformer-impl transformer_engine"),
        (["--distributed-backend", "nccl"], "--distributed-backend nccl"),
        (["--fp8-format", "hybrid"], "--fp8-format"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp"),
    ],
)
def test_flags_of_a_gpu_run_are_refused_by_name(words: list[str], named: str) -> None:
    run = start(train_refused, 1, arguments={"words": words})
    assert run.statuses == [2]
    assert f"error: {named}" in run.stderr[0]


def train_refused(words: list[str]) -> None:
    from megatron_ntp.launch import run

    run(["--cpu", str(ROOT / "scripts" / "pretrain_gpt.py"), *MODEL, *words])


def test_flags_of_a_cpu_run_pass() -> None:
    run_ranks(check_cpu_arguments, 1)


def check_cpu_arguments() -> None:
    from megatron_ntp import cpu_runtime

    cpu_runtime.check_arguments([*MODEL, *cpu_runtime.cpu_arguments()])


# --- the harness itself -------------------------------------------------------------------------


def fail_or_hang(failing_rank: int) -> None:
    import os
    import time

    if int(os.environ["RANK"]) == failing_rank:
        raise ValueError("this rank fails")
    time.sleep(60)


def test_a_failing_rank_ends_the_others_and_is_named() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail_or_hang, 3, failing_rank=1, grace_s=0.1)
    assert failure.value.run.statuses == [None, 1, None]
    assert "this rank fails" in str(failure.value)
    assert "in fail_or_hang" in failure.value.run.stderr[0], "a killed rank says where it hung"


def test_time_runs_out() -> None:
    with pytest.raises(RanksFailed, match="killed by the harness"):
        run_ranks(fail_or_hang, 1, failing_rank=-1, timeout_s=0.5)
