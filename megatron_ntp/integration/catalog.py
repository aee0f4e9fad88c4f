"""Every change that nonuniform TP makes to an installed Megatron, as data.

Replacements are named by string, so that the catalog can be printed and checked without importing
Megatron's training code first. Each takes the original as its first argument.
"""

from __future__ import annotations

from megatron_ntp.patching.rows import Expected, Patch

TESTED = ">=0.17,<0.20"

_HERE = "megatron_ntp.integration"


def _row(
    target: str,
    replacement: str,
    reason: str,
    *expected: Expected | tuple[str, ...],
    exact: bool = False,
) -> Patch:
    """One row; `expected` as parameter names, or per version where they differ."""
    return Patch(
        name=target.partition(":")[2],
        target=target,
        replacement=f"{_HERE}.{replacement}",
        reason=reason,
        versions=TESTED,
        signature=tuple(
            item if isinstance(item, Expected) else Expected(item, exact=exact) for item in expected
        ),
    )


ROWS: tuple[Patch, ...] = (
    # Start-up
    _row(
        "megatron.training.arguments:add_megatron_arguments",
        "arguments:add_megatron_arguments",
        "adds the --ntp flags to Megatron's parser",
        ("parser",),
    ),
    _row(
        "megatron.training.arguments:validate_args",
        "arguments:validate_args",
        "validates a job whose world size is a sum over replicas",
        ("args", "defaults"),
    ),
    _row(
        "megatron.training.initialize:_initialize_distributed",
        "startup:initialize_distributed",
        "compares plans and names missing ranks before the first collective",
        ("store",),
    ),
    _row(
        "megatron.core.parallel_state:initialize_model_parallel",
        "parallel_state:initialize_model_parallel",
        "makes process groups for replicas of different TP degree",
        ("create_gloo_process_groups", "distributed_timeout_minutes"),
    ),
    _row(
        "megatron.core.parallel_state:destroy_model_parallel",
        "parallel_state:destroy_model_parallel",
        "resets the DP rank that extra ranks report",
        (),
    ),
    # Model
    _row(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        "model:gpt_model_init",
        "builds each rank's model from its own sizes",
        ("config", "transformer_layer_spec", "vocab_size", "parallel_output"),
    ),
    _row(
        "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
        "model:language_module_init",
        "refuses other models than GPT before they are built",
        ("config",),
    ),
    _row(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
        "tensor_parallel:column_init",
        "splits an output size that TP does not divide",
        ("output_size", "is_expert", "tp_group"),
    ),
    _row(
        "megatron.core.tensor_parallel.layers:RowParallelLinear.__init__",
        "tensor_parallel:row_init",
        "splits an input size that TP does not divide",
        ("input_size", "is_expert", "tp_group"),
    ),
    _row(
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.__init__",
        "tensor_parallel:embedding_init",
        "splits a vocabulary that TP does not divide",
        ("num_embeddings", "tp_group"),
    ),
    _row(
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
        "tensor_parallel:embedding_forward",
        "looks up rows that are scattered over extra ranks",
        ("input_",),
        exact=True,
    ),
    _row(
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
        "tensor_parallel:vocab_parallel_cross_entropy",
        "finds targets in uneven and scattered vocabulary shards",
        Expected(("vocab_parallel_logits", "target", "label_smoothing"), "<0.19", exact=True),
        Expected(("vocab_parallel_logits", "target", "label_smoothing", "tp_group"), exact=True),
    ),
    _row(
        "megatron.core.tensor_parallel.utils:VocabUtility.vocab_range_from_per_partition_vocab_size",
        "tensor_parallel:vocab_range_from_per_partition",
        "gives the cross entropy the range of an uneven shard",
        ("per_partition_vocab_size", "rank", "world_size"),
    ),
    *(
        _row(
            f"megatron.core.tensor_parallel.mappings:_{name}",
            f"tensor_parallel:{name}",
            "accepts parts of different size",
            params,
            exact=True,
        )
        for name, params in (
            ("split_along_last_dim", ("input_", "group")),
            ("split_along_first_dim", ("input_", "group")),
            ("gather_along_last_dim", ("input_", "group")),
            (
                "gather_along_first_dim",
                ("input_", "group", "output_split_sizes", "use_global_buffer"),
            ),
            ("reduce_scatter_along_last_dim", ("input_", "group")),
            (
                "reduce_scatter_along_first_dim",
                ("input_", "group", "input_split_sizes", "use_global_buffer"),
            ),
        )
    ),
    # Gradients, optimizer
    _row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "ddp:ddp_init",
        "builds gradient buffers over sync parameters and reshards around DP sync",
        ("config", "ddp_config", "module"),
    ),
    _row(
        "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        "finalize:allreduce_non_tensor_model_parallel_grads",
        "partial gradients are summed over TP before DP sync instead of after",
        ("model", "config", "tp_group"),
    ),
    _row(
        "megatron.core.optimizer:get_megatron_optimizer",
        "optimizer:get_megatron_optimizer",
        "gives the optimizer sync parameters, and extra ranks none",
        ("config", "model_chunks"),
    ),
    _row(
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "optimizer:optimizer_of_param_groups",
        "makes Megatron's stub optimizer on extra ranks",
        ("config", "model_chunks", "param_groups"),
    ),
    # Data
    _row(
        "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
        "batch:build_pretraining_data_loader",
        "deals a global batch out in unequal shares",
        ("dataset", "consumed_samples"),
    ),
    _row(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "batch:get_forward_backward_func",
        "runs this replica's own number of microbatches",
        (),
    ),
    _row(
        "megatron.training.training:train_step",
        "batch:train_step",
        "counts the samples of a shrunken batch, and times steps for the power boost",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
    ),
    _row(
        "megatron.training.training:train",
        "power:train",
        "restores power limits when training ends",
        ("forward_step_func", "model", "optimizer"),
    ),
    # Checkpoints
    _row(
        "megatron.core.models.gpt.gpt_model:GPTModel.sharded_state_dict",
        "checkpoint:gpt_sharded_state_dict",
        "cuts checkpoints into sync shards with logical offsets",
        ("prefix", "sharded_offsets", "metadata"),
    ),
    _row(
        "megatron.training.checkpointing:save_checkpoint",
        "checkpoint:save_checkpoint",
        "saves RNG state for TP ranks that no replica has any more",
        ("iteration", "model", "optimizer"),
    ),
    _row(
        "megatron.training.async_utils:maybe_finalize_async_save",
        "checkpoint:finalize_async_save",
        "tells a disk that failed under a save in the background as that",
        ("blocking", "terminate"),
    ),
    _row(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "FileSystemWriterAsync.get_save_function_and_args",
        "background_save:get_save_function_and_args",
        "lets a rank hear of everything that fails where it writes a checkpoint",
        (),
    ),
    _row(
        "megatron.core.dist_checkpointing.strategies.async_utils:"
        "PersistentAsyncCaller.schedule_async_call",
        "background_save:schedule_async_call",
        "waits for no checkpoint writer that has ended",
        ("async_req",),
    ),
    _row(
        "megatron.core.dist_checkpointing.strategies.async_utils:"
        "PersistentAsyncCaller.is_current_async_call_done",
        "background_save:is_current_async_call_done",
        "takes a checkpoint writer that has ended for one that is done",
        ("blocking", "no_dist"),
    ),
    _row(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.close",
        "background_save:close",
        "waits for no word of a checkpoint writer that has ended",
        ("abort",),
    ),
    _row(
        "megatron.training.checkpointing:load_checkpoint",
        "checkpoint:load_checkpoint",
        "loads what was chosen at start-up, and gives extra ranks their parameters",
        ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
    ),
    _row(
        "megatron.training.checkpointing:get_checkpoint_tracker_filename",
        "loading:get_checkpoint_tracker_filename",
        "lets Megatron load what was chosen where the tracker is missing",
        ("checkpoints_path",),
    ),
    _row(
        "megatron.training.checkpointing:read_metadata",
        "loading:read_metadata",
        "lets the tracker name the checkpoint that was chosen",
        ("tracker_filename",),
    ),
    _row(
        "megatron.training.checkpointing:load_args_from_checkpoint",
        "loading:load_args_from_checkpoint",
        "takes --use-checkpoint-args from a checkpoint that is whole",
        ("args", "load_arg"),
    ),
    _row(
        "megatron.core.dist_checkpointing.exchange_utils:determine_main_replica_uniform_distribution",
        "checkpoint:determine_main_replica_uniform_distribution",
        "lets extra ranks keep what the others keep from one save to the next",
        ("sharded_state_dict", "parallelization_group", "ignore_groups"),
    ),
    _row(
        "megatron.core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
        "shard_reader:get_filesystem_reader",
        "reads only a rank's part of stored chunks",
        ("checkpoint_dir", "cache_metadata"),
    ),
    _row(
        "megatron.training.checkpointing:get_rng_state",
        "checkpoint:get_rng_state",
        "keys RNG state by nominal TP rank",
        ("ckpt_format",),
    ),
)
