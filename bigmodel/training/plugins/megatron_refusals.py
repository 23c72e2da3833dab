"""What a `MegatronLMPlugin` asks for that the training step of `Accelerator` does not do: each refused by name, with what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ...errors import TrainingError
from ..enums import DynamoBackend

if TYPE_CHECKING:
    from ..accelerator import Accelerator

__all__ = ["refuse_what_is_not_done"]

FSDP: Final = "A FullyShardedDataParallelPlugin"

CUDA: Final[dict[str, tuple[Any, str]]] = {
    "pp_degree": (1, f"megatron-core's pipelines send between CUDA devices. Share layers with tp_degree. {FSDP} shards parameters too."),
    "sequence_parallelism": (False, "the norms that take parts of sequences are Transformer Engine's, for CUDA devices. Leave it off."),
    "use_distributed_optimizer": (
        False,
        f"megatron-core's optimizer keeps its parts on CUDA devices. {FSDP} shards the optimizer's state anywhere.",
    ),
    "use_precision_aware_optimizer": (False, "it is one of Transformer Engine's optimizers, for CUDA devices. Use one of torch's."),
    "optimizer_cpu_offload": (False, f"megatron-core copies it in CUDA streams. {FSDP} with cpu_offload=True keeps it on the host."),
    "overlap_cpu_optimizer_d2h_h2d": (False, "megatron-core copies in CUDA streams. Leave it off."),
    "use_custom_fsdp": (False, f"megatron-core's FSDP works with CUDA streams. {FSDP} shards with torch's."),
    "context_parallel_size": (1, "attention over parts of sequences is Transformer Engine's, for CUDA devices. Use shorter sequences."),
}
"""Fields, the value that is done, and why another is not."""

OTHERS: Final[dict[str, tuple[Any, str]]] = {
    "expert_model_parallel_size": (1, "models with experts are not built. Leave it at 1."),
    "expert_tensor_parallel_size": (1, "models with experts are not built. Leave it at 1."),
    "decoder_last_pipeline_num_layers": (None, "there is one pipeline stage. Leave it out."),
    "pipeline_model_parallel_split_rank": (None, "there is one pipeline stage. Leave it out."),
    "num_layers_per_virtual_pipeline_stage": (None, "there is one pipeline stage. Leave it out."),
    "encoder_seq_length": (None, "models with an encoder are not built. Use seq_length."),
    "decoder_seq_length": (None, "models with an encoder are not built. Use seq_length."),
    "train_samples": (None, "schedules count steps. Use train_iters."),
    "lr_decay_samples": (None, "schedules count steps. Use lr_decay_iters."),
    "lr_warmup_samples": (None, "schedules count steps. Use lr_warmup_iters or lr_warmup_fraction."),
    "consumed_samples": (None, "load_state and accelerator.skip_first_batches go on in the middle of the data."),
    "no_wd_decay_cond": (None, "give the optimizer groups of parameters, with a weight_decay each."),
    "scale_lr_cond": (None, "give the optimizer groups of parameters, with an lr each."),
    "megatron_dataset_flag": (False, "data comes from torch's loaders. Prepare one."),
    "tensorboard_dir": (None, "use Accelerator(log_with='tensorboard', project_dir=…)."),
    "set_all_logging_options": (False, "use Accelerator(log_with=…) and accelerator.log."),
    "custom_train_step_class": (None, "the script's own loop is the training step."),
    "custom_train_step_kwargs": (None, "the script's own loop is the training step."),
    "custom_model_provider_function": (None, "prepare the GPTModel that it would give."),
    "custom_prepare_model_function": (None, "call it before accelerator.prepare."),
    "custom_megatron_datasets_provider_function": (None, "prepare torch loaders over its data sets."),
    "custom_get_batch_function": (None, "the script's own loop gives batches to the model."),
    "custom_loss_function": (None, "compute a loss from the logits (without labels), and give it to accelerator.backward."),
}


def refuse_what_is_not_done(accelerator: Accelerator, plugin: Any) -> None:
    """Raises `TrainingError` for the first thing asked for that is not done."""
    for name, (done, why) in (CUDA | OTHERS).items():
        value = getattr(plugin, name)
        if value != done and not (name == "consumed_samples" and not any(value)):
            raise TrainingError(f"megatron_lm_plugin with {name}={value!r}: {why}")
    if plugin.other_megatron_args:
        raise TrainingError(
            f"megatron_lm_plugin with other_megatron_args {sorted(plugin.other_megatron_args)}: a transformers model says its sizes; for "
            "others build a GPTModel with plugin.transformer_config(…), and leave them out here."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise TrainingError(
            f"megatron_lm_plugin with mixed_precision={accelerator.mixed_precision!r}: megatron-core's scaler of losses, which processes "
            "agree on, is on CUDA devices. Use 'bf16', which needs none."
        )
    if plugin.recompute_activations and plugin.recompute_method == "uniform" and plugin.recompute_num_layers != 1:
        raise TrainingError(
            f"megatron_lm_plugin with recompute_num_layers={plugin.recompute_num_layers}: layers are computed again one by one. Use 1, or "
            "recompute_method='block', whose number is that of the layers that are."
        )
    if plugin.tp_degree > 1 and (plugin.attention_dropout or plugin.hidden_dropout):
        raise TrainingError(
            f"megatron_lm_plugin with attention_dropout={plugin.attention_dropout}, hidden_dropout={plugin.hidden_dropout} and "
            f"tp_degree={plugin.tp_degree}: megatron-core keeps the random states of processes that share a layer on CUDA devices. "
            "Set both to 0, or tp_degree to 1."
        )
    compiler = accelerator.state.dynamo_plugin
    if compiler is not None and compiler.backend != DynamoBackend.NO:
        raise TrainingError(
            f"megatron_lm_plugin with backend {str(compiler.backend)!r}: megatron-core's layers are not compiled. Use 'no'."
        )
