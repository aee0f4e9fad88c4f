"""Pretrain a GPT with Megatron's own training loop, without a Megatron-LM checkout.

The wheels of megatron-core ship ``megatron.training`` but no training script; this one is all that
is missing, for 0.17, 0.18 and 0.19. It takes Megatron's flags and trains on mock data or on an
indexed dataset. It knows nothing of nonuniform tensor parallelism: that is added from outside, as
to any other script, by ``megatron-ntp run``.

    torchrun --nproc-per-node 8 scripts/pretrain_gpt.py --tensor-model-parallel-size 8 ... \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 50257
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]

BATCH_KEYS = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")

DEFAULTS = {"tokenizer_type": "NullTokenizer"}

# Flags of Megatron that its own script carries out, and this one does not.
NOT_HERE = (
    "--fim-data",
    "--dataloader-inter-document-masking",
    "--sft",
    "--spec",
    "--mtp-num-layers",
    "--experimental-attention-variant",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--logits-save-dir",
    "--logits-load-dir",
)


# --- model --------------------------------------------------------------------------------------


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The part of the model that belongs to this pipeline stage."""
    args = get_args()
    ignored = [flag for flag in NOT_HERE if getattr(args, flag[2:].replace("-", "_"), None)]
    if ignored:
        raise SystemExit(
            f"this script does not know {', '.join(ignored)}: use pretrain_gpt.py of a checkout"
        )
    print_rank_0("building GPT model ...")
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=args.transformer_impl == "transformer_engine",
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


# --- one microbatch -----------------------------------------------------------------------------


def _microbatch(data_iterator: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> Batch:
    """This rank's microbatch: TP rank 0 reads it, its TP group receives it.

    Every rank of a TP group calls this in the same order. A middle pipeline stage needs no data
    and reads none.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    read = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    batch: Batch = {"attention_mask": None}
    broadcast = tensor_parallel.broadcast_data
    batch.update(broadcast(["tokens", "position_ids", "labels"], read, torch.int64))
    batch.update(broadcast(["loss_mask"], read, torch.float32))
    if args.create_attention_mask_in_dataloader:
        batch.update(broadcast(["attention_mask"], read, torch.bool))
    if args.context_parallel_size > 1:
        batch = _context_parallel_slice(batch)
    return batch


def _context_parallel_slice(batch: Batch) -> Batch:
    """This rank's chunks of the sequence; from 0.18 on the hybrid kind must be declined by name."""
    options = {"cp_group": mpu.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        options["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(batch, **options)


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Sum of the token losses, number of tokens, and what Megatron reduces for its log."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * loss_mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for name, rejected in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"{name} in the loss of a microbatch",
                tolerance=0.0,
                fatal=True,
            )
    num_tokens = loss_mask.sum().detach().to(torch.int)
    report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Megatron's forward step: the model's output and the function that turns it into a loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _microbatch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(_loss, batch["loss_mask"])


# --- data ---------------------------------------------------------------------------------------


def _reads_data(vp_stage: int | None) -> bool:
    """Whether this rank reads the dataset: TP rank 0 of the first and last pipeline stage."""
    first_tp_rank = mpu.get_tensor_model_parallel_rank() == 0
    return first_tp_rank and is_first_or_last_pipeline_stage(vp_stage)


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test datasets; None for each on ranks that read no data."""
    args = get_args()
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(_reads_data, vp_stage),
        _dataset_config(args),
    )
    train, validation, test = builder.build()
    return train, validation, test


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron


def _keep_built_helpers() -> None:
    """Keep Megatron from rebuilding the C++ dataset helpers where it cannot.

    It runs ``make`` beside them at every start and exits if that fails. A wheel brings them built,
    and no Makefile.
    """
    folder = os.path.dirname(dataset_utils.__file__)
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not os.path.exists(os.path.join(folder, "Makefile")):
        dataset_utils.compile_helpers = lambda: None


# --- start --------------------------------------------------------------------------------------


def main() -> None:
    """Train with ``megatron.training``, whichever of its signatures is installed.

    Up to 0.17 ``pretrain`` parses the command line itself. From 0.18 on it takes the parsed
    arguments as a configuration.
    """
    options: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    _keep_built_helpers()
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args(args_defaults=DEFAULTS)
        options["cfg_container"] = pretrain_cfg_container_from_args(args)
    else:
        options["args_defaults"] = DEFAULTS
    pretrain(**options)


if __name__ == "__main__":
    main()
