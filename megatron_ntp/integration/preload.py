"""What a process does before it is forked into ranks, and a fork before it becomes one.

Only for the warm start of CPU rehearsals. A fork shares what was imported before it, and nothing
that is a thread or a connection.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.managers import SyncManager

from megatron_ntp.integration import catalog, loss_log

MODULES = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "torch.distributed.checkpoint",
)


def import_all() -> None:
    """Imports what a training run, and the patches of nonuniform TP, import late."""
    patched = [row.module for row in (*catalog.ROWS, *loss_log.ROWS)]
    for name in dict.fromkeys([*MODULES, *patched]):
        importlib.import_module(name)


def start_result_queue(initializer: Callable[[], object]) -> None:
    """Fills Megatron's cache of the queue through which checkpoint writers report, in a rank.

    Megatron would start the queue's server when it saves first, as a new Python that runs the
    training script's imports once more: seconds on each rank. A fork is the same server at once.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer)
        filesystem_async._results_queue = manager.Queue()
