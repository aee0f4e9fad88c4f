"""Megatron flags that nonuniform TP refuses, by name, before anything starts.

A flag is refused while it is not known to be exact. The list names features; what a model is made
of is checked again, parameter by parameter, when it is built (integration.model). A training loop
of its own has no flags: the objects that it configures megatron-core with are held against the same
list, under the names that fields have there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ntp.errors import UnsupportedFlagError


@dataclass(frozen=True)
class Refusal:
    """One argument of Megatron and the values that are refused.

    `hits(value)` decides. An argument that the installed Megatron lacks is skipped. `spelled` is
    the flag that sets it, and `field` the field of megatron-core's configs, where that is not the
    argument's own name.
    """

    argument: str
    hits: Callable[[Any], bool]
    why: str
    spelled: str = ""
    field: str = ""

    @property
    def flag(self) -> str:
        return self.spelled or "--" + self.argument.replace("_", "-")


def _on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _not_in(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


_LATER = "pipeline, context and sequence parallelism are not supported with --ntp yet"
_LAYOUT = "its parameters are not cut by nonuniform TP"
_GROUPS = "it needs process groups that a nonuniform job does not have"
_BUFFERS = "it changes the gradient or parameter buffers that NTP reshards"
_UNTESTED = "it is not known to be exact with --ntp"

MULTIMODAL = "multimodal models are not supported with --ntp yet"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("pipeline_model_parallel_size", _above_one, _LATER),
    Refusal("context_parallel_size", _above_one, _LATER),
    Refusal("sequence_parallel", _on, _LATER),
    Refusal("hybrid_context_parallel", _on, _LATER),
    Refusal(
        "num_experts", _on, "MoE layers are not supported with --ntp yet", field="num_moe_experts"
    ),
    Refusal("expert_model_parallel_size", _above_one, "MoE layers are not supported yet"),
    Refusal("multi_latent_attention", _on, _LAYOUT),
    Refusal("experimental_attention_variant", _on, _LAYOUT),
    Refusal("attention_output_gate", _on, _LAYOUT),
    Refusal("softmax_type", _not_in(None, "vanilla"), _LAYOUT),
    Refusal("mtp_num_layers", _on, _LAYOUT),
    Refusal("hybrid_layer_pattern", _on, "Mamba and hybrid models are not supported yet"),
    Refusal("hybrid_override_pattern", _on, "Mamba and hybrid models are not supported yet"),
    Refusal("is_hybrid_model", _on, "Mamba and hybrid models are not supported yet"),
    Refusal("spec", _on, "a custom layer spec may hold parameters that NTP cannot cut"),
    Refusal("heterogeneous_layers_config_path", _on, _LAYOUT, field="heterogeneous_block_specs"),
    Refusal("heterogeneous_layers_config_encoded_json", _on, _LAYOUT),
    Refusal("optimizer", _not_in("adam", "sgd"), "it is not element-wise or not tested"),
    Refusal("use_precision_aware_optimizer", _on, _BUFFERS),
    Refusal("optimizer_cpu_offload", _on, _BUFFERS),
    Refusal("overlap_param_gather_with_optimizer_step", _on, _BUFFERS),
    Refusal("num_distributed_optimizer_instances", _above_one, _GROUPS),
    Refusal("fp8", _on, "fp8 scales are kept per tensor-parallel rank", "--fp8-format"),
    Refusal("fp4", _on, "fp4 scales are kept per tensor-parallel rank", "--fp4-format"),
    Refusal("te_precision_config_file", _on, "it may turn on fp8 or fp4"),
    Refusal("fp8_param_gather", _on, _BUFFERS),
    Refusal("use_megatron_fsdp", _on, _BUFFERS),
    Refusal("use_torch_fsdp2", _on, _BUFFERS),
    Refusal("nccl_ub", _on, _BUFFERS, "--use-nccl-ub"),
    Refusal(
        "ddp_reduce_scatter_with_fp32_accumulation",
        _on,
        _UNTESTED,
        field="reduce_scatter_with_fp32_accumulation",
    ),
    Refusal(
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        _on,
        _BUFFERS,
        field="param_name_patterns_for_fp32_local_accumulation",
    ),
    Refusal("gtp_weight_remat_size", _above_one, _GROUPS, "--tensor-parallel-num-weight-shards"),
    Refusal("use_sharp", _on, _GROUPS),
    Refusal("nccl_communicator_config_path", _on, _GROUPS),
    Refusal("high_priority_stream_groups", _on, _GROUPS),
    Refusal("create_all_gather_group", _on, _GROUPS),
    Refusal("use_tp_pp_dp_mapping", _on, _GROUPS),
    Refusal("lazy_mpu_init", _on, _GROUPS),
    Refusal("fake_process_group", _on, _GROUPS),
    Refusal("inprocess_restart", _on, "use NTP's own restart instead"),
    Refusal("yaml_cfg", _on, "NTP reads Megatron's command line only"),
    Refusal("cross_entropy_loss_fusion", _on, "the fused loss assumes equal vocabulary shards"),
    Refusal("tp_comm_overlap", _on, "its buffers assume equal shards"),
    Refusal("symmetric_ar_type", _on, _UNTESTED),
    Refusal("distribute_saved_activations", _on, "it cuts activations into equal shards"),
    Refusal("cpu_offloading_num_layers", _on, _UNTESTED),
    Refusal("fine_grained_activation_offloading", _on, _UNTESTED),
    Refusal("use_kitchen_attention", _on, _UNTESTED),
    Refusal("enable_cuda_graph", _on, _UNTESTED),
    Refusal("external_cuda_graph", _on, _UNTESTED),
    Refusal("cuda_graph_impl", _not_in(None, "none"), _UNTESTED),
    Refusal("optimizer_cuda_graph", _on, _UNTESTED),
    Refusal("use_cpu_initialization", _on, "it cuts the initial weights into equal shards"),
    Refusal("init_model_with_meta_device", _on, _UNTESTED),
    Refusal("defer_embedding_wgrad_compute", _on, _UNTESTED),
    Refusal("delay_wgrad_compute", _on, _UNTESTED),
    Refusal("use_mup", _on, _UNTESTED),
    Refusal("qk_clip", _on, _UNTESTED),
    Refusal("log_max_attention_logit", _on, _UNTESTED),
    Refusal("log_params_norm", _on, "it sums over compute shards, which differ per replica"),
    Refusal(
        "check_weight_hash_across_dp_replicas_interval",
        _on,
        "replicas of different degree hold different shards",
    ),
    Refusal("data_parallel_random_init", _on, "replicas start from one set of weights"),
    Refusal("ckpt_format", _not_in(None, "torch_dist"), "only torch_dist can be cut differently"),
    Refusal("ckpt_fully_parallel_load", _on, "extra ranks are alone in their DP group and hang"),
    Refusal(
        "non_persistent_ckpt_type",
        _on,
        "local checkpoints (nvidia-resiliency-ext) lie on nodes that may be lost and cannot be cut "
        "for another TP degree; in place of global ones save more often (--save-interval)",
    ),
    Refusal(
        "dist_ckpt_strictness",
        lambda value: value == "raise_all",
        "it fails where the checkpoint is of a job of another size, as after a failure; "
        "raise_unexpected does not",
    ),
    Refusal("load_main_params_from_ckpt", _on, "it takes them for compute shards"),
    Refusal("ckpt_convert_format", _on, _UNTESTED),
    Refusal("use_mp_args_from_checkpoint_args", _on, "it would change the TP degree of the plan"),
    Refusal("full_validation", _on, _UNTESTED),
    Refusal("freeze_all_layers", _on, _UNTESTED),
    Refusal("sft", _on, _UNTESTED),
    Refusal("logits_load_dir", _on, _UNTESTED),
    Refusal("logits_save_dir", _on, _UNTESTED),
    Refusal("skip_train", _on, "there is nothing to train"),
    Refusal("perform_rl_step", _on, _UNTESTED),
    Refusal("dataloader_type", _not_in(None, "single"), "its order of samples is not covered"),
    Refusal(
        "gpu_sniff_test_interval",
        _on,
        "it compares figures of groups over the whole job, and an extra rank is alone in some",
    ),
    Refusal("save_wgrads_interval", _on, _UNTESTED),
    Refusal("save_dgrads_interval", _on, _UNTESTED),
    Refusal("save_params_interval", _on, _UNTESTED),
    Refusal("save_activations_interval", _on, _UNTESTED),
)


def refuse_unsupported(args: argparse.Namespace, batch_policy: str | None = None) -> None:
    """Raises with every flag of `args` that NTP refuses, its value and the reason.

    Args:
        args: Megatron's arguments.
        batch_policy: that of the plan file, which counts where no flag names one.
    """
    found = [
        f"  {row.flag} {getattr(args, row.argument)}: {row.why}"
        for row in REFUSALS
        if hasattr(args, row.argument) and row.hits(getattr(args, row.argument))
    ]
    found += _scripts(args)
    found += _combinations(args, args.ntp_batch_policy or batch_policy)
    if found:
        raise UnsupportedFlagError(
            "these flags cannot be combined with --ntp; remove them or run without --ntp:\n"
            + "\n".join(found)
        )


def refuse_settings(source: str, settings: Mapping[str, Any]) -> None:
    """Raises with every setting of a config object, or of a call, that NTP refuses.

    Args:
        source: what they are settings of, for the message.
        settings: by name, as megatron-core spells it.
    """
    found = [
        f"  {source}.{name} = {settings[name]!r}: {row.why}"
        for row in REFUSALS
        if (name := row.field or row.argument) in settings and row.hits(settings[name])
    ]
    if found:
        raise UnsupportedFlagError(
            "these settings cannot be combined with nonuniform TP; change them or train without "
            "it:\n" + "\n".join(found)
        )


def refuse_config(config: Any) -> None:
    """`refuse_settings` of one of megatron-core's config objects."""
    refuse_settings(type(config).__name__, vars(config))


def _scripts(args: argparse.Namespace) -> list[str]:
    """Scripts whose models are refused whatever their flags, known by the flags that they add."""
    # None: a command line that was only looked at (megatron-ntp doctor).
    if getattr(args, "freeze_LM", None) is None:
        return []
    return [f"  pretrain_vlm.py (it adds --freeze-LM): {MULTIMODAL}"]


def _combinations(args: argparse.Namespace, batch_policy: str | None) -> list[str]:
    """Flags that are refused only together."""
    found = [
        f"  {flag} {path}: its checkpoints can be examined in a file system only"
        for flag in ("--load", "--save", "--pretrained-checkpoint")
        if (path := str(getattr(args, flag[2:].replace("-", "_"), None))).startswith("msc://")
    ]
    if batch_policy not in (None, "keep"):
        for argument in ("rampup_batch_size", "step_batch_size_schedule", "iterations_to_skip"):
            if getattr(args, argument, None):
                flag = "--" + argument.replace("_", "-")
                found.append(f"  {flag} with --ntp-batch-policy other than keep")
        if batch_policy == "shrink" and args.train_samples:
            found.append("  --train-samples with --ntp-batch-policy shrink: use --train-iters")
    return found
