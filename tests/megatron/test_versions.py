"""Training at uneven degrees on the other supported versions of Megatron.

In short on every version that `make cores` has fetched; at length with `make test-versions`.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from jobs import DISTRIBUTED, GPT2, LLAMA, OVERLAP, Model
from logical import distances, unequal
from versions import OTHER_CORES, only_with_all_cores


@pytest.mark.parametrize("core", OTHER_CORES)
def test_two_and_one_train_as_plain_megatron(core: Path) -> None:
    start = jobs.start(LLAMA, DISTRIBUTED, core=core)
    plain = jobs.uniform(LLAMA, 1, 1, DISTRIBUTED, load=start, stop_at=3, core=core)
    flags = (*DISTRIBUTED, *OVERLAP)
    ours = jobs.nonuniform(LLAMA, (2, 1), flags, load=start, stop_at=3, core=core)
    assert max(distances(ours.grads(), plain.grads()).values()) <= 2e-6
    assert len(ours.losses) == 2
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


@only_with_all_cores
@pytest.mark.parametrize("core", OTHER_CORES)
@pytest.mark.parametrize(
    ("model", "kind", "flags"),
    [(LLAMA, DISTRIBUTED, OVERLAP), (GPT2, (), ())],
    ids=["llama-distributed-overlap", "gpt2"],
)
def test_gradients_and_checkpoints(
    model: Model, kind: tuple[str, ...], flags: tuple[str, ...], core: Path
) -> None:
    start = jobs.start(model, kind, core=core)
    plain = jobs.uniform(model, 1, 1, kind, load=start, stop_at=3, core=core)
    ours = jobs.nonuniform(
        model,
        (4, 3),
        (*kind, *flags),
        load=start,
        save_at=2,
        stop_at=3,
        state_at=(1,),
        core=core,
    )
    found = distances(ours.grads(), plain.grads())
    print(f"gradients: {max(found.values()):.1e}")
    assert max(found.values()) <= 2e-6
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)

    loaded = jobs.uniform(
        model,
        4,
        1,
        (*kind, "--ckpt-step", "2"),
        load=ours.saved,
        stop_at=3,
        state_at=(0,),
        core=core,
    )
    assert unequal(loaded.weights(0), ours.weights(1)) == []
    wanted, read = ours.state(1), loaded.state(0)
    assert list(wanted) == list(read) == ["exp_avg", "exp_avg_sq"]
    for name, tensors in wanted.items():
        assert unequal(read[name], tensors) == []
    assert loaded.ranks[0].steps[0].consumed == 2 * jobs.GLOBAL_BATCH
    assert loaded.grad_norms[0] == pytest.approx(ours.grad_norms[1], rel=1e-5)
