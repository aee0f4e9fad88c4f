"""Run unmodified Megatron on CPU with gloo, for rehearsals and tests.

Megatron's training loop asks for CUDA everywhere: tensors are built on ``cuda``, types are compared
with ``torch.cuda.FloatTensor``, the optimizer and the norms come from Apex or Transformer Engine.
``install()`` answers all of that on the CPU, process wide, until ``uninstall()``. It belongs to no
other part of the package: nothing imports it unless a CPU run is asked for, and it refuses to
start where a GPU is visible (``force`` overrides that).

Note [Two ways to redirect]
    A device argument may reach any torch function, so a TorchFunctionMode rewrites them all. What
    is asked of tensors and of ``torch.cuda`` by name is replaced by attribute, which is cheaper and
    also holds in other threads. A mode is per thread: threads that Megatron starts see the
    replaced attributes only, and a process made by ``os.fork`` from the main thread keeps both.

Note [Copies that a GPU would make]
    ``x.cuda()`` of a tensor that is already here returns it, as on a GPU. ``x.cpu()`` and
    ``x.to("cpu")`` copy, as on a GPU: an asynchronous checkpoint would otherwise write weights
    that the next step has changed.

Note [Same bits anywhere]
    torch's fused CPU kernels (``add`` with ``alpha``, ``addcmul``, ``lerp``) round once inside a
    vector and twice in the tail, so an element's result depends on where its shard begins. The
    Adam here uses single multiply, add, divide and square root only, each rounded exactly: equal
    inputs give equal bits on every rank and under every sharding. One thread keeps sums in order.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.overrides

# Flags with their values. What the installed Megatron's parser does not know is left out.
CPU_FLAGS: tuple[tuple[str, ...], ...] = (
    ("--transformer-impl", "local"),
    ("--distributed-backend", "gloo"),
    ("--num-workers", "0"),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
)

# Flags that only make sense on a GPU, with what to say about each.
_GPU_FLAGS: dict[str, str] = {
    "--fp8-format": "fp8 needs Transformer Engine",
    "--fp4-format": "fp4 needs Transformer Engine",
    "--tp-comm-overlap": "userbuffers need Transformer Engine",
    "--use-precision-aware-optimizer": "it needs Transformer Engine's Adam",
    "--optimizer-cpu-offload": "there is no GPU to offload from",
    "--use-torch-fsdp2": "it needs NCCL",
    "--use-megatron-fsdp": "it needs NCCL",
    "--use-nccl-ub": "it needs NCCL",
    "--enable-cuda-graph": "CUDA graphs need a GPU",
    "--external-cuda-graph": "CUDA graphs need a GPU",
    "--optimizer-cuda-graph": "CUDA graphs need a GPU",
    "--te-rng-tracker": "it needs Transformer Engine",
    "--use-te-activation-func": "it needs Transformer Engine",
}

_ENVIRONMENT: dict[str, str] = {
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile would build a kernel per shape on every rank
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asserts it for tensor parallelism
}

_ABSENT = object()
_undo: list[Callable[[], object]] = []
_installed = False


class GpuVisibleError(RuntimeError):
    """The CPU runtime was asked for in a process that can see a GPU."""


# --- arguments ----------------------------------------------------------------------------------


@functools.cache
def _known_flags() -> frozenset[str]:
    """Every option string of the installed Megatron's parser."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return frozenset(option for action in parser._actions for option in action.option_strings)


def cpu_arguments() -> list[str]:
    """The Megatron flags a CPU run needs, for the installed version, to put after a run's own."""
    return [word for flag in CPU_FLAGS if flag[0] in _known_flags() for word in flag]


def check_arguments(argv: Sequence[str]) -> None:
    """Refuse flags that contradict a CPU run, instead of overriding them silently."""
    wanted = {flag[0]: flag[1] for flag in CPU_FLAGS if len(flag) == 2}
    for index, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in _GPU_FLAGS:
            raise ValueError(f"{flag} cannot run on CPU: {_GPU_FLAGS[flag]}. Drop the flag.")
        if flag in ("--transformer-impl", "--distributed-backend"):
            value = value or "".join(argv[index + 1 : index + 2])
            if value != wanted[flag]:
                raise ValueError(
                    f"{flag} {value} asks for a GPU run, but the CPU runtime runs with "
                    f"{flag} {wanted[flag]}. Drop the flag, or run without the CPU runtime."
                )


# --- device arguments ---------------------------------------------------------------------------


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _is_cpu(device: object) -> bool:
    return device == "cpu" or (isinstance(device, torch.device) and device.type == "cpu")


class _CpuMode(torch.overrides.TorchFunctionMode):
    """Rewrites every device argument to the CPU (Note [Two ways to redirect])."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs) if kwargs else {}
        if func is torch.Tensor.to:
            return _tensor_to(func, args, options)
        if options:
            if _is_cuda(options.get("device")):
                options["device"] = "cpu"
            if options.get("pin_memory"):
                options["pin_memory"] = False
        return func(*args, **options)


def _with_mode(original: Callable[..., Any], mode: _CpuMode) -> Callable[..., Any]:
    """The autograd engine's start. torch takes the mode off before; hooks and backwards need it."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    return run_backward


def _tensor_to(func: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """``Tensor.to`` takes its device by position or by name."""
    target = args[1] if len(args) > 1 else options.get("device")
    if _is_cpu(target):
        result = func(*args, **options)  # Note [Copies that a GPU would make]
        return result.clone() if result is args[0] else result
    if _is_cuda(target):
        if len(args) > 1:
            args = (args[0], "cpu", *args[2:])
        else:
            options["device"] = "cpu"
    return func(*args, **options)


# --- stand-ins for torch.cuda -------------------------------------------------------------------


class Stream:
    """A CUDA stream that has always finished."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as CUDA reports them."""
        return 0, -1

    def wait_stream(self, stream: object) -> None:
        """Nothing is pending."""

    def wait_event(self, event: object) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether all work has finished."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """The event, recorded now."""
        event = event or Event()
        event.record()
        return event


class Event:
    """A CUDA event that is reached as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: object = None) -> None:
        """Remember the time, for ``elapsed_time``."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether the event has been reached."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._recorded_s - self._recorded_s) * 1e3


_STREAM = Stream()


@contextlib.contextmanager
def _no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _host_memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_properties(*args: Any, **kwargs: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=_host_memory_nbytes(), multi_processor_count=1
    )


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _cuda_functions() -> dict[str, Any]:
    """``torch.cuda`` by attribute name. Random numbers come from the one CPU generator."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": _zero,
        "default_generators": (torch.default_generator,),
        "get_device_properties": _device_properties,
        "get_device_capability": lambda *args: (8, 0),
        "get_device_name": lambda *args: "cpu",
        "mem_get_info": lambda *args: (_host_memory_nbytes(), _host_memory_nbytes()),
        "memory_stats": lambda *args: defaultdict(int),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *args: _STREAM,
        "default_stream": lambda *args: _STREAM,
        "device": _no_context,
        "stream": _no_context,
        "is_current_stream_capturing": lambda: False,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        answers[name] = _zero
    for name in ("max_memory_reserved", "device_memory_used", "utilization"):
        answers[name] = _zero
    for name in ("init", "_lazy_init", "set_device", "set_stream", "synchronize", "empty_cache"):
        answers[name] = _nothing
    for name in ("ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated"):
        answers[name] = _nothing
    return answers


# --- stand-ins on tensors and modules -----------------------------------------------------------


def _tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type``: the name a CUDA tensor would have, and casts to CUDA types."""
    if dtype is None:
        name = torch._C.TensorBase.type(self)  # comes back here through the mode: replace once
        return name if name.startswith("torch.cuda.") else name.replace("torch", "torch.cuda", 1)
    if isinstance(dtype, type):
        dtype = f"{dtype.__module__}.{dtype.__name__}"
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return torch._C.TensorBase.type(self, dtype, *args, **kwargs)


def _tensor_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self.clone()  # Note [Copies that a GPU would make]


def _return_self(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


# --- stand-ins for torch.distributed ------------------------------------------------------------


def _without_nccl(backend: str | None) -> str | None:
    return "gloo" if backend and "nccl" in backend else backend


def _on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` and ``new_group`` with gloo, and without what only NCCL takes."""

    @functools.wraps(original)
    def start(*args: Any, **kwargs: Any) -> Any:
        if original.__name__ == "init_process_group":
            backend = args[0] if args else kwargs.pop("backend", None)
            args = (_without_nccl(backend or "gloo"), *args[1:])
        else:
            kwargs["backend"] = _without_nccl(kwargs.get("backend"))
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(*args, **kwargs)

    return start


def _without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """``barrier``: gloo refuses the list of devices."""

    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return original(*args[:2], **kwargs)

    return barrier


def _without_random_numbers(original: Callable[..., None]) -> Callable[..., None]:
    """A loader's iterator, on TP rank 0 only: it seeds workers from the generator of dropout here.

    On a GPU dropout has a generator of its own, so that TP ranks stay in step.
    """

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> None:
        state = torch.default_generator.get_state()
        original(*args, **kwargs)
        torch.default_generator.set_state(state)

    return begin


# --- stand-ins for Apex and Transformer Engine --------------------------------------------------


class FusedAdam(torch.optim.Optimizer):
    """Adam with the conduct of Transformer Engine's and Apex's: one step count per group.

    Megatron saves and loads optimizer state with that conduct only: a torch Adam keeps the count
    with each parameter. Settings that change what is stored are refused by the signature.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("the CPU runtime's Adam cannot be captured in a CUDA graph")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a group without parameters counts nothing."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """One parameter's step, in exactly rounded operations (Note [Same bits anywhere])."""
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        scale1 = scale2 = 1.0
        if group["bias_correction"]:
            scale1, scale2 = 1.0 - beta1 ** group["step"], 1.0 - beta2 ** group["step"]
        weight, grad = param.float(), param.grad.float()
        if group["weight_decay"] and not self.adam_w_mode:
            grad = grad + weight * group["weight_decay"]
        state["exp_avg"].mul_(beta1).add_(grad * (1.0 - beta1))
        state["exp_avg_sq"].mul_(beta2).add_((grad * grad).mul_(1.0 - beta2))
        denominator = state["exp_avg_sq"].div(scale2).sqrt_().add_(group["eps"])
        update = state["exp_avg"].div(scale1).div_(denominator)
        if group["weight_decay"] and self.adam_w_mode:
            update.add_(weight * group["weight_decay"])
        param.copy_(weight - update.mul_(group["lr"]))


def _norm_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's wrapper of torch's norms, with sequence parallelism allowed.

    The wrapper refuses it because torch's norms do not mark their parameters. The marks are all
    that is missing: Megatron sums the gradients of marked parameters over the TP group.
    """

    def build(cls: type, config: Any, hidden_size: int, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, hidden_size, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    return build


def _compile_helpers() -> None:
    """Build Megatron's C++ dataset helpers unless they can be imported already.

    Megatron runs ``make`` on every start. A wheel has the built helpers and no Makefile, so that
    fails; and make asks the first python3 and python3-config on the path, which may be another
    Python's, without pybind11.
    """
    from megatron.core import datasets

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return
    folder = datasets.__path__[0]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    built = subprocess.run(
        ["make", "-C", folder, f"LIBEXT={suffix}"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise RuntimeError(
            f"Megatron's dataset helpers in {folder} could not be built (make exited with "
            f"{built.returncode}). They need make, a C++ compiler and pybind11.\n{built.stderr}"
        )
    importlib.invalidate_caches()


# --- installing ---------------------------------------------------------------------------------


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute and remember how to put the old one back, or to remove it."""
    old = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    _undo.append(
        (lambda: delattr(owner, name)) if old is _ABSENT else (lambda: setattr(owner, name, old))
    )


def _replace_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        if name not in os.environ:
            os.environ[name] = value
            _undo.append(functools.partial(os.environ.pop, name, None))
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and not dynamo.disable:
        dynamo.disable = True
        _undo.append(functools.partial(setattr, dynamo, "disable", False))


def _replace_torch(mode: _CpuMode) -> None:
    engine = _with_mode(torch.autograd.graph._engine_run_backward, mode)
    _replace(torch.autograd, "_engine_run_backward", engine)
    _replace(torch.autograd.graph, "_engine_run_backward", engine)
    for name, value in _cuda_functions().items():
        _replace(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            _replace(torch.cuda.random, name, value)
    for name in ("range_push", "range_pop", "mark"):
        _replace(torch.cuda.nvtx, name, _nothing)
    _replace(torch.accelerator, "is_available", lambda: False)
    _replace(torch.Tensor, "type", _tensor_type)
    _replace(torch.Tensor, "cpu", _tensor_cpu)
    for name in ("cuda", "pin_memory"):
        _replace(torch.Tensor, name, _return_self)
    _replace(torch.Tensor, "record_stream", _nothing)
    _replace(torch.nn.Module, "cuda", _return_self)
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    _replace(iterator, "__init__", _without_random_numbers(iterator.__init__))


def _replace_distributed() -> None:
    for name, wrap in (
        ("init_process_group", _on_gloo),
        ("new_group", _on_gloo),
        ("barrier", _without_device_ids),
    ):
        wrapper = wrap(getattr(torch.distributed, name))
        _replace(torch.distributed, name, wrapper)
        _replace(torch.distributed.distributed_c10d, name, wrapper)


def _replace_megatron() -> None:
    """Optimizer, norm and the dataset helpers, in every namespace that binds them."""
    from megatron.core import optimizer, utils
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base
    from megatron.core.transformer import torch_norm

    _replace(optimizer, "Adam", FusedAdam)
    _replace(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    _replace(distrib_optimizer, "Adam", FusedAdam)
    _replace(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    _replace(distrib_optimizer, "USING_APEX_OPTIMIZER", True)  # aligns step over empty groups
    for module in (clip_grads, base):
        _replace(module, "multi_tensor_applier", utils.local_multi_tensor_applier)
        _replace(module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    _replace(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    if hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):
        _replace(clip_grads, "multi_tensor_scale_tensor_impl", None)
    _replace(dataset_utils, "compile_helpers", _compile_helpers)
    norm = torch_norm.WrappedTorchNorm
    _replace(norm, "__new__", _norm_builder(norm.__new__))


def is_installed() -> bool:
    """Whether this process runs on the CPU runtime."""
    return _installed


def install(force: bool = False) -> None:
    """Redirect CUDA to the CPU in this process; a second call does nothing.

    Imports megatron.core. Starts no thread and opens no socket, so a process that has installed
    the runtime may be forked into ranks.

    Raises:
        GpuVisibleError: A GPU is visible and ``force`` is false.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available() and not force:
        raise GpuVisibleError(
            f"the CPU runtime was asked for, but {torch.cuda.device_count()} GPU(s) are visible, "
            "and it would redirect a GPU run to the CPU. Run without --cpu, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty)."
        )
    _replace_environment()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Note [Same bits anywhere]
    _undo.append(functools.partial(torch.set_num_threads, num_threads))
    mode = _CpuMode()
    try:
        _replace_megatron()  # first: importing megatron must not see the CUDA answers
        _replace_torch(mode)
        _replace_distributed()
    except BaseException:
        _run_undo()
        raise
    mode.__enter__()
    _undo.append(functools.partial(mode.__exit__, None, None, None))
    _installed = True


def uninstall() -> None:
    """Put everything back, from the thread that installed; does nothing if not installed."""
    global _installed
    _run_undo()
    _installed = False


def _run_undo() -> None:
    while _undo:
        _undo.pop()()
