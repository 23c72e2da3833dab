"""`MegatronLMPlugin`: what Megatron-LM is told, from arguments and the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ...errors import TrainingError
from ...settings import word_as_bool
from ..argument_types import refuse_wrong_fields
from .megatron_core import start_model_parallel, transformer_config
from .megatron_layers import layer_specification

__all__ = ["MegatronLMPlugin"]

PREFIX: Final = "MEGATRON_LM_"
"""What the names of this plugin's variables begin with; they are the fields' names in capitals."""

USUAL: Final[dict[str, bool | int | float | str | None]] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "use_custom_fsdp": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_load_optim": False,
    "eod_mask_loss": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_backend": True,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "sequence_parallelism": False,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
}
"""Values where neither an argument nor a variable says one."""

RENAMED: Final = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
"""Fields that Megatron-LM calls otherwise."""

PASSED: Final = (
    *USUAL,
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
)
"""Fields that are arguments of Megatron-LM from the beginning."""

SCHEDULE: Final = (
    "train_iters",
    "train_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
)
"""Fields that are arguments of Megatron-LM's schedules."""

LOGGED: Final = (
    "log_timers_to_tensorboard",
    "log_batch_size_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_world_size_to_tensorboard",
    "log_loss_scale_to_tensorboard",
    "log_learning_rate_to_tensorboard",
    "log_params_norm",
    "log_num_zeros_in_grad",
    "log_throughput",
    "log_progress",
)
"""Megatron-LM's switches of what it logs."""


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM spreads a model. What is None is read from the environment: `MEGATRON_LM_` and the field's name in capitals.

    Attributes:
        megatron_lm_default_args: arguments of Megatron-LM, by its names.
        DDP_impl: who averages gradients: `"local"`, Megatron-LM, or `"torch"`.

    Raises:
        TrainingError: degrees and counts below 1, variables that are no such values, or choices that do not exist.
    """

    tp_degree: int | None = None
    """Processes that share each matrix; 1."""
    pp_degree: int | None = None
    """Processes that layers are dealt out to; 1."""
    use_custom_fsdp: bool | None = None
    """Parameters are sharded by Megatron-LM's FSDP; False."""
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    """Copies of an offloaded optimizer run while it steps; False."""
    no_load_optim: bool | None = None
    """Checkpoints are loaded without the optimizer's state; False."""
    eod_mask_loss: bool | None = None
    """Tokens that end a document do not count in the loss; False."""
    no_save_optim: bool | None = None
    """Checkpoints are saved without the optimizer's state; False."""
    optimizer_cpu_offload: bool | None = None
    """The optimizer's state rests and steps on the host; False."""
    use_precision_aware_optimizer: bool | None = None
    """The optimizer's state may have a narrow dtype; False."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage; None: as many as of the others."""
    recompute_granularity: str | None = None
    """What is computed again in the backward: `"full"` layers, or `"selective"`, the attention; `"full"`."""
    recompute_method: str | None = None
    """`"uniform"` or `"block"`; `"uniform"`."""
    recompute_num_layers: int | None = None
    """Layers computed again together; 1."""
    attention_backend: bool | None = None
    """Megatron-LM chooses the kernels of attention; True."""
    expert_model_parallel_size: int | None = None
    """Processes that experts are dealt out to; 1."""
    context_parallel_size: int | None = None
    """Processes that share each sequence; 1."""
    attention_dropout: float | None = None
    """Of attention's weights; 0."""
    hidden_dropout: float | None = None
    """Of the residual stream; 0."""
    attention_softmax_in_fp32: bool | None = None
    """Attention's softmax is in float32; True."""
    expert_tensor_parallel_size: int | None = None
    """Processes that share each matrix of an expert; 1."""
    calculate_per_token_loss: bool | None = None
    """Losses are averaged over tokens, not over samples; True."""
    use_rotary_position_embeddings: bool | None = None
    """Positions are rotary embeddings; True."""
    num_micro_batches: int | None = None
    """Batches to a step; 1."""
    gradient_clipping: float | None = None
    """Largest norm of all gradients together, 0 for none; 1."""
    sequence_parallelism: bool | None = None
    """Processes that share matrices share sequences between them; False."""
    recompute_activations: bool | None = None
    """Attention is computed again in the backward; False."""
    use_distributed_optimizer: bool | None = None
    """The optimizer's state is sharded; False."""
    pipeline_model_parallel_split_rank: int | None = None
    """The first pipeline stage of the decoder, in models with an encoder."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a virtual pipeline stage; None: stages are not divided."""
    is_train_batch_min: bool = True
    """Of several loaders prepared together the smallest batch size counts; False: the largest."""
    train_iters: int | None = None
    """Steps of the whole training; this or `train_samples`."""
    train_samples: int | None = None
    """Samples of the whole training; this or `train_iters`."""
    weight_decay_incr_style: str = "constant"
    """How weight decay grows: `"constant"`, `"linear"`, `"cosine"`."""
    start_weight_decay: float | None = None
    """Weight decay at the beginning."""
    end_weight_decay: float | None = None
    """Weight decay at the end."""
    lr_decay_style: str = "linear"
    """How the learning rate falls: `"constant"`, `"linear"`, `"cosine"`."""
    lr_decay_iters: int | None = None
    """Steps in which it falls; None: `train_iters`."""
    lr_decay_samples: int | None = None
    """Samples in which it falls; None: `train_samples`."""
    lr_warmup_iters: int | None = None
    """Steps in which it rises first."""
    lr_warmup_samples: int | None = None
    """Samples in which it rises first."""
    lr_warmup_fraction: float | None = None
    """The part of the fall's steps or samples in which it rises first."""
    min_lr: float = 0
    """The learning rate is never below."""
    consumed_samples: list[int] | None = None
    """Samples seen before, in training, validation and test."""
    no_wd_decay_cond: Callable[..., bool] | None = None
    """`(name, parameter)`: whether a parameter does not decay."""
    scale_lr_cond: Callable[..., bool] | None = None
    """`(name, parameter)`: whether a parameter's learning rate is multiplied by `lr_mult`."""
    lr_mult: float = 1.0
    """For the parameters of `scale_lr_cond`."""
    megatron_dataset_flag: bool = False
    """Data sets are in Megatron-LM's indexed format."""
    seq_length: int | None = None
    """Tokens of a sequence."""
    encoder_seq_length: int | None = None
    """Tokens of a sequence of the encoder."""
    decoder_seq_length: int | None = None
    """Tokens of a sequence of the decoder."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard's logs."""
    set_all_logging_options: bool = False
    """All that Megatron-LM can log is logged there."""
    eval_iters: int = 100
    """Steps of an evaluation."""
    eval_interval: int = 1000
    """Training steps between two evaluations."""
    return_logits: bool = False
    """Forwards return logits beside losses."""
    custom_train_step_class: Any = None
    """In place of Megatron-LM's own training step."""
    custom_train_step_kwargs: dict[str, Any] | None = None
    """Arguments of that class."""
    custom_model_provider_function: Callable[..., Any] | None = None
    """Builds the part of the model that a process has."""
    custom_prepare_model_function: Callable[..., Any] | None = None
    """Makes a built model ready."""
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    """Builds data sets in Megatron-LM's format."""
    custom_get_batch_function: Callable[..., Any] | None = None
    """Takes a batch from an iterator."""
    custom_loss_function: Callable[..., Any] | None = None
    """The loss of a forward's output."""
    other_megatron_args: dict[str, Any] | None = None
    """More arguments of Megatron-LM, which count before the fields."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        for name, usual in USUAL.items():
            if getattr(self, name) is None:
                setattr(self, name, _from_environment(name, usual))
        if self.decoder_last_pipeline_num_layers is None:
            self.decoder_last_pipeline_num_layers = _from_environment("decoder_last_pipeline_num_layers", None)
        self._check()
        if self.consumed_samples is not None:
            self.consumed_samples = [*self.consumed_samples, 0, 0, 0][:3]
        self.DDP_impl = "local" if self._degree("pp_degree") > 1 or self.use_distributed_optimizer else "torch"
        arguments: dict[str, Any] = {RENAMED.get(name, name): getattr(self, name) for name in PASSED}
        arguments["DDP_impl"] = self.DDP_impl
        if self.tensorboard_dir is not None:
            arguments["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                arguments |= dict.fromkeys(LOGGED, True)
        self.megatron_lm_default_args: dict[str, Any] = arguments | (self.other_megatron_args or {})

    def _check(self) -> None:
        for name in (
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "recompute_num_layers",
        ):
            if self._degree(name) < 1:
                raise TrainingError(f"{name}={getattr(self, name)}: at least 1.")
        for name, choices in (
            ("recompute_granularity", ("full", "selective")),
            ("recompute_method", ("uniform", "block")),
            ("weight_decay_incr_style", ("constant", "linear", "cosine")),
            ("lr_decay_style", ("constant", "linear", "cosine", "inverse-square-root", "WSD")),
        ):
            if getattr(self, name) not in choices:
                raise TrainingError(f"{name}={getattr(self, name)!r}; use one of {list(choices)}.")

    def _degree(self, name: str) -> int:
        return int(getattr(self, name))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Makes the precision (`"no"`, `"fp16"`, `"bf16"`) an argument; with bf16 Megatron-LM averages gradients itself, in float32."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def initialize_model_parallel(self) -> None:
        """Divides the processes of the default group into megatron-core's groups, by the degrees of this plugin.

        Raises:
            MissingPackageError: no megatron-core.
            TrainingError: no process group, or one that copies of the model do not divide.
        """
        start_model_parallel(self)

    def layer_specification(self) -> Any:
        """megatron-core's local layer specification for a `GPTModel`, with torch's norms and attention, which compute on any device.

        With `recompute_activations` its layers recompute, as `recompute_granularity` and so on say; the model's config is then to have
        `recompute_granularity=None`, since megatron-core would do it with CUDA's random states.

        Raises `MissingPackageError` without megatron-core.
        """
        return layer_specification(self)

    def transformer_config(self, **sizes: Any) -> Any:
        """megatron-core's `TransformerConfig` of this plugin's arguments and `sizes` (`num_layers`, `hidden_size`, …).

        `sizes` count before the plugin's. Weights are made on the host where there is no accelerator.

        Raises:
            MissingPackageError: no megatron-core.
            TrainingError: names that `TransformerConfig` does not have.
        """
        return transformer_config(self, sizes)


def _from_environment(name: str, usual: Any) -> Any:
    variable = PREFIX + name.upper()
    word = os.environ.get(variable)
    if word in (None, ""):
        return usual
    kind: Any = int if usual is None else word_as_bool if isinstance(usual, bool) else type(usual)
    try:
        return kind(word)
    except ValueError:
        raise TrainingError(
            f"The environment variable {variable} is {word!r}, not a {'yes or no' if kind is word_as_bool else 'number'}."
        ) from None
