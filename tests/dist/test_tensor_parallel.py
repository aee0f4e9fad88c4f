"""Uneven tensor-parallel layers and mappings, used directly, against plain torch on full tensors.

Each rank runs Megatron's layer on its part and compares values and gradients with its part of what
torch computes from the full tensors. What comes back from a rank is the largest deviation of each
quantity, relative to the largest element; a wrong shape fails in the rank. Ranks are started once
for a TP degree and run all of its cases.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor

from megatron_ntp.plan.partition import balanced_sizes

TOLERANCE = 1e-6

Errors = dict[str, float]

# (TP degree, size that it does not divide)
UNEVEN = [(2, 5), (3, 7), (4, 10), (4, 7), (7, 32)]
VOCABULARIES = [*UNEVEN, (3, 50257)]
SHAPES = [
    (2, (5, 7)),
    (3, (7, 2, 4)),
    (4, (10, 2, 7)),
    (4, (6, 3, 9)),
    (7, (32, 10)),
    (3, (7, 6)),  # even along the last dim only
    (4, (4, 10)),  # even along the first dim only
    (4, (3, 2)),  # parts without elements
]


class Group:
    """In a rank: Megatron with nonuniform TP installed, and a TP group of all ranks."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel

        from megatron_ntp.integration.install import install

        install()
        dist.init_process_group("gloo")
        self.degree, self.rank = dist.get_world_size(), dist.get_rank()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.degree)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.errors: Errors = {}

    def config(self) -> Any:
        from megatron.core.model_parallel_config import ModelParallelConfig

        return ModelParallelConfig(
            tensor_model_parallel_size=self.degree, params_dtype=torch.float32
        )

    def part(self, full: Tensor, dim: int, rank: int | None = None) -> Tensor:
        sizes = list(balanced_sizes(full.size(dim), self.degree))
        return full.split(sizes, dim)[self.rank if rank is None else rank].contiguous()

    def compare(self, name: str, found: Tensor | None, expected: Tensor) -> None:
        assert found is not None, name
        assert found.shape == expected.shape, (name, found.shape, expected.shape)
        assert found.dtype == expected.dtype, name
        largest = expected.abs().max().item() if expected.numel() else 0.0
        deviation = (found - expected).abs().max().item() if expected.numel() else 0.0
        self.errors[name] = deviation / (largest or 1.0)


def draw(*shape: int, seed: int) -> Tensor:
    """The same random tensor on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def set_weights(layer: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)


# --- layers -------------------------------------------------------------------------------------


def column_linear(group: Group, size: int, gather_output: bool) -> Errors:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = ColumnParallelLinear(
        6,
        size,
        config=group.config(),
        init_method=torch.nn.init.normal_,
        gather_output=gather_output,
    )
    assert layer.output_size == size
    assert layer.output_size_per_partition == balanced_sizes(size, group.degree)[group.rank]
    weight, bias = draw(size, 6, seed=1), draw(size, seed=2)
    full_x, grad = draw(3, 2, 6, seed=3), draw(3, 2, size, seed=4)
    set_weights(layer, group.part(weight, 0), group.part(bias, 0))
    x = full_x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(grad if gather_output else group.part(grad, -1))

    for tensor in (weight, bias, full_x):
        tensor.requires_grad_()
    expected = F.linear(full_x, weight, bias)
    expected.backward(grad)
    group.compare("y", y, expected if gather_output else group.part(expected, -1))
    group.compare("x.grad", x.grad, full_x.grad)
    group.compare("weight.grad", layer.weight.grad, group.part(weight.grad, 0))
    group.compare("bias.grad", layer.bias.grad, group.part(bias.grad, 0))
    return group.errors


def row_linear(group: Group, size: int, input_is_parallel: bool) -> Errors:
    from megatron.core.tensor_parallel import RowParallelLinear

    layer = RowParallelLinear(
        size,
        6,
        config=group.config(),
        init_method=torch.nn.init.normal_,
        bias=True,
        input_is_parallel=input_is_parallel,
        skip_bias_add=False,
    )
    assert layer.input_size == size
    weight, bias = draw(6, size, seed=1), draw(6, seed=2)
    full_x, grad = draw(3, 2, size, seed=3), draw(3, 2, 6, seed=4)
    set_weights(layer, group.part(weight, 1), bias)
    x = (group.part(full_x, -1) if input_is_parallel else full_x.clone()).requires_grad_()
    y, _ = layer(x)
    y.backward(grad)

    for tensor in (weight, bias, full_x):
        tensor.requires_grad_()
    expected = F.linear(full_x, weight, bias)
    expected.backward(grad)
    group.compare("y", y, expected)
    x_grad = group.part(full_x.grad, -1) if input_is_parallel else full_x.grad
    group.compare("x.grad", x.grad, x_grad)
    group.compare("weight.grad", layer.weight.grad, group.part(weight.grad, 1))
    group.compare("bias.grad", layer.bias.grad, bias.grad)
    return group.errors


def embedding(group: Group, size: int) -> Errors:
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    layer = VocabParallelEmbedding(
        size, 4, config=group.config(), init_method=torch.nn.init.normal_
    )
    assert layer.num_embeddings == size
    weight, grad = draw(size, 4, seed=1), draw(3, 50, 4, seed=2)
    ids = torch.randint(size, (3, 50), generator=torch.Generator().manual_seed(3))
    ids[0, :2] = torch.tensor([0, size - 1])
    ids[1, : group.degree] = torch.tensor(  # the last row of each part
        [sum(balanced_sizes(size, group.degree)[: rank + 1]) - 1 for rank in range(group.degree)]
    )
    set_weights(layer, group.part(weight, 0))
    y = layer(ids)
    y.backward(grad)

    weight.requires_grad_()
    expected = F.embedding(ids, weight)
    expected.backward(grad)
    group.compare("y", y, expected)
    group.compare("weight.grad", layer.weight.grad, group.part(weight.grad, 0))
    return group.errors


def cross_entropy(group: Group, size: int) -> Errors:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    full, grad = draw(9, 2, size, seed=1), draw(9, 2, seed=2)
    target = torch.randint(size, (9, 2), generator=torch.Generator().manual_seed(3))
    target[0] = torch.tensor([0, size - 1])
    logits = group.part(full, -1).requires_grad_()
    losses = vocab_parallel_cross_entropy(logits.clone(), target)  # overwrites its input
    losses.backward(grad)

    full.requires_grad_()
    expected = F.cross_entropy(full.flatten(0, 1), target.flatten(), reduction="none").view(9, 2)
    expected.backward(grad)
    group.compare("losses", losses, expected)
    group.compare("logits.grad", logits.grad, group.part(full.grad, -1))
    return group.errors


# --- mappings -----------------------------------------------------------------------------------

Mapping = Callable[[Tensor], Tensor]


def mappings(group: Group, shape: tuple[int, ...], dtype: str = "float32") -> Errors:
    """Every mapping along the first and last dim; the full tensor has `shape`.

    The inputs `xs[r]` and output gradients `gs[r]` of the ranks all differ, so that a missing or
    an unwanted reduction shows. Small integers: sums are exact in any order and dtype.
    """
    from megatron.core.tensor_parallel import mappings as m

    ranks = range(group.degree)

    def draw_all(seed: int) -> list[Tensor]:
        drawn = [
            torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(100 * seed + rank))
            for rank in ranks
        ]
        return [each.to(getattr(torch, dtype)) for each in drawn]

    xs, gs = draw_all(1), draw_all(2)

    def parts(fulls: list[Tensor], dim: int) -> list[Tensor]:
        return [group.part(full, dim, rank) for rank, full in enumerate(fulls)]

    def gathered(fulls: list[Tensor], dim: int) -> Tensor:
        return torch.cat(parts(fulls, dim), dim)

    def reduced(fulls: list[Tensor], dim: int) -> Tensor:
        return group.part(sum(fulls[1:], fulls[0]), dim)

    def run(name: str, mapping: Mapping, x: Tensor, g: Tensor, y: Tensor, x_grad: Tensor) -> None:
        leaf = x.clone().requires_grad_()
        out = mapping(leaf)
        out.backward(g)
        group.compare(name, out, y)
        group.compare(f"{name} backward", leaf.grad, x_grad)

    def whole_to_part(name: str, mapping: Mapping, dim: int, reduces: bool) -> None:
        own = reduced(xs, dim) if reduces else group.part(xs[group.rank], dim)
        g = group.part(gs[group.rank], dim)
        run(name, mapping, xs[group.rank], g, own, gathered(gs, dim))

    def part_to_whole(name: str, mapping: Mapping, dim: int, reduces: bool) -> None:
        x = group.part(xs[group.rank], dim)
        own = reduced(gs, dim) if reduces else group.part(gs[group.rank], dim)
        run(name, mapping, x, gs[group.rank], gathered(xs, dim), own)

    whole_to_part("scatter last", m.scatter_to_tensor_model_parallel_region, -1, False)
    whole_to_part("scatter first", m.scatter_to_sequence_parallel_region, 0, False)
    whole_to_part("reduce first", m.reduce_scatter_to_sequence_parallel_region, 0, True)
    part_to_whole("gather last", m.gather_from_tensor_model_parallel_region, -1, False)
    part_to_whole("gather first", m.gather_from_sequence_parallel_region, 0, True)
    part_to_whole(
        "gather first, whole gradients",
        lambda x: m.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False),
        0,
        False,
    )
    part_to_whole("all-gather last", m.all_gather_last_dim_from_tensor_parallel_region, -1, True)
    whole_to_part("reduce last", m.reduce_scatter_last_dim_to_tensor_parallel_region, -1, True)
    return group.errors


# --- what is refused ----------------------------------------------------------------------------


def refusals(group: Group) -> dict[str, str]:
    """The error of each thing that is refused; every rank meets it before it communicates more."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import mappings as m

    from megatron_ntp.errors import NTPError

    options = {"config": group.config(), "init_method": torch.nn.init.normal_}
    row = {**options, "bias": False, "input_is_parallel": True, "skip_bias_add": True}
    unbalanced = (5, 2, 3)[group.rank]
    logits = group.part(draw(2, 1, 7, seed=1), -1)
    calls: dict[str, Callable[[], object]] = {
        "column": lambda: tensor_parallel.ColumnParallelLinear(4, 2, **options),
        "row": lambda: tensor_parallel.RowParallelLinear(2, 4, **row),
        "embedding": lambda: tensor_parallel.VocabParallelEmbedding(2, 4, **options),
        "gather last": lambda: m.gather_from_tensor_model_parallel_region(
            torch.zeros(2, unbalanced)
        ),
        "gather first": lambda: m.gather_from_sequence_parallel_region(torch.zeros(unbalanced, 2)),
        "label smoothing": lambda: tensor_parallel.vocab_parallel_cross_entropy(
            logits, torch.zeros(2, 1, dtype=torch.int64), 0.1
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except NTPError as error:
            found[name] = str(error)
    return found


# --- even sizes ---------------------------------------------------------------------------------


def even_sizes(group: Group) -> Errors:
    """The mappings where TP divides the sizes, with our uneven code out of reach."""
    from megatron_ntp.integration import tensor_parallel as ours

    def unreachable(*args: Any) -> Any:
        raise AssertionError("even sizes must go Megatron's own way")

    for name in ("_split_uneven", "_gather_uneven", "_reduce_scatter_uneven"):
        setattr(ours, name, unreachable)
    return mappings(group, (8, 4))


# --- one start for each degree ------------------------------------------------------------------


def cases_of(degree: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> function of this file, and its arguments."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for size in (size for d, size in UNEVEN if d == degree):
        for on in (False, True):
            cases[f"column {size} {on}"] = ("column_linear", {"size": size, "gather_output": on})
            cases[f"row {size} {on}"] = ("row_linear", {"size": size, "input_is_parallel": on})
    for size in (size for d, size in VOCABULARIES if d == degree):
        cases[f"embedding {size}"] = ("embedding", {"size": size})
        cases[f"cross entropy {size}"] = ("cross_entropy", {"size": size})
    for shape in (shape for d, shape in SHAPES if d == degree):
        cases[f"mappings {shape}"] = ("mappings", {"shape": shape})
    if degree == 3:
        cases["mappings bf16"] = ("mappings", {"shape": (7, 5), "dtype": "bfloat16"})
        cases["refusals"] = ("refusals", {})
    if degree == 4:
        cases["even"] = ("even_sizes", {})  # last: it takes our code away
    return cases


def run_cases(degree: int) -> dict[str, Any]:
    """In a rank: what each case returned, or the traceback that ended it and all that follow."""
    group, results = Group(), {}
    for name, (function, arguments) in cases_of(degree).items():
        group.errors = {}
        try:
            results[name] = globals()[function](group, **arguments)
        except Exception:
            results[name] = traceback.format_exc()
            break
    return results


@cache
def results_of(degree: int) -> list[dict[str, Any]]:
    return run_ranks(run_cases, degree, degree=degree)


def check(degree: int, name: str, tolerance: float = TOLERANCE) -> None:
    worst: Errors = {}
    for rank, results in enumerate(results_of(degree)):
        assert name in results, f"rank {rank} ended in an earlier case: {list(results.items())[-1]}"
        assert isinstance(results[name], dict), f"rank {rank}: {results[name]}"
        for quantity, error in results[name].items():
            worst[quantity] = max(error, worst.get(quantity, 0.0))
    wrong = {quantity: error for quantity, error in worst.items() if not error <= tolerance}
    assert worst and not wrong, wrong


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize(("degree", "size"), UNEVEN)
def test_column_parallel_linear(degree: int, size: int, gather_output: bool) -> None:
    check(degree, f"column {size} {gather_output}")


@pytest.mark.parametrize("input_is_parallel", [False, True])
@pytest.mark.parametrize(("degree", "size"), UNEVEN)
def test_row_parallel_linear(degree: int, size: int, input_is_parallel: bool) -> None:
    check(degree, f"row {size} {input_is_parallel}")


@pytest.mark.parametrize(("degree", "size"), VOCABULARIES)
def test_vocab_parallel_embedding(degree: int, size: int) -> None:
    check(degree, f"embedding {size}")


@pytest.mark.parametrize(("degree", "size"), VOCABULARIES)
def test_vocab_parallel_cross_entropy(degree: int, size: int) -> None:
    check(degree, f"cross entropy {size}")


@pytest.mark.parametrize(("degree", "shape"), SHAPES)
def test_mappings(degree: int, shape: tuple[int, ...]) -> None:
    check(degree, f"mappings {shape}", tolerance=0.0)


def test_mappings_keep_the_dtype() -> None:
    check(3, "mappings bf16", tolerance=0.0)


def test_even_sizes_go_the_original_way() -> None:
    check(4, "even", tolerance=0.0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("column", "ColumnParallelLinear with output_size 2 cannot be split over 3"),
        ("row", "RowParallelLinear with input_size 2 cannot be split over 3"),
        ("embedding", "VocabParallelEmbedding with num_embeddings 2 cannot be split over 3"),
        ("gather last", "sizes 5, 2, 3 cannot be gathered"),  # backward knows the full size only
        ("gather first", "balanced parts, 4, 3, 3"),
        ("label smoothing", "label smoothing assumes equal vocabulary shards"),
    ],
)
def test_what_cannot_be_exact_is_refused(what: str, message: str) -> None:
    for results in results_of(3):
        assert message in results["refusals"][what]
