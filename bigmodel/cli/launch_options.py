"""Options of `bigmodel launch` that stand for keys in the config file's sections: `--zero_stage 2`, `deepspeed_config: {zero_stage: 2}`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import typer
from typer.core import TyperCommand

from ..errors import TrainingError
from ..training.config_file import LaunchSettings
from ..training.enums import DistributedType

__all__ = ["LaunchCommand", "notes_on_options", "sections_of"]

SECTIONS: Final = {
    "fsdp_config": (
        "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
        "fsdp_auto_wrap_policy",
        "fsdp_backward_prefetch",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_forward_prefetch",
        "fsdp_min_num_params",
        "fsdp_offload_params",
        "fsdp_reshard_after_forward",
        "fsdp_sharding_strategy",
        "fsdp_state_dict_type",
        "fsdp_sync_module_states",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_use_orig_params",
        "fsdp_version",
    ),
    "deepspeed_config": (
        "deepspeed_config_file",
        "deepspeed_exclusion_filter",
        "deepspeed_hostfile",
        "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_optimizer_nvme_path",
        "offload_param_device",
        "offload_param_nvme_path",
        "zero3_init_flag",
        "zero3_save_16bit_model",
        "zero_stage",
    ),
    "dynamo_config": ("dynamo_backend", "dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation"),
}
"""Keys of each section, which are options; those of Megatron-LM all begin with its name."""

FLAGS: Final = ("dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
"""Options without a value."""

ENGINES: Final = {
    "fsdp_config": (DistributedType.FSDP, "--use_fsdp"),
    "deepspeed_config": (DistributedType.DEEPSPEED, "--use_deepspeed"),
    "megatron_lm_config": (DistributedType.MEGATRON_LM, "--use_megatron_lm"),
}
"""Whose settings a section holds, and the option that trains with it."""

REFUSED: Final = ("megatron_lm_config",)
"""Sections without which another batch would be trained: the number of copies of the model follows from them."""

WITHOUT_EFFECT: Final = {"downcast_bf16": False, "env": True, "main_training_function": True, "same_network": False}
"""Options of TPU jobs that scripts pass on any machine, and whether a value follows."""

FOR_TPUS: Final = ("tpu", "tpu_cluster", "tpu_use_sudo", "vm")

SECTION_OF: Final = {key: section for section, keys in SECTIONS.items() for key in keys}
GIVEN: Final = f"{__name__}.given"
UNUSED: Final = f"{__name__}.unused"


class LaunchCommand(TyperCommand):
    """Takes what is of sections out of the arguments before the script, and lets words of options be joined by dashes too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        sections: dict[str, dict[str, str]] = {}
        plain: list[str] = []
        unused: dict[str, None] = {}
        words = iter(args)
        for word in words:
            if not word.startswith("-") or word == "--":  # the script
                plain += [word, *words]
                break
            name, equals, value = word.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            section = "megatron_lm_config" if key.startswith("megatron_lm_") else SECTION_OF.get(key)
            if section is not None:
                sections.setdefault(section, {})[key] = value if equals else "true" if key in FLAGS else _value(words, name)
                continue
            if key in FOR_TPUS:
                raise TrainingError(f"--{key}: bigmodel launch starts no jobs on TPUs.")
            if key in WITHOUT_EFFECT:
                unused[f"--{key}"] = None
                if WITHOUT_EFFECT[key] and not equals:
                    _value(words, name)
                continue
            option = self._option(name if name.count("-") == 1 else f"--{key}")
            plain.append(word if option is None else f"{option}{equals}{value}")
            if option is not None and option in self._with_values() and not equals:
                plain += [_value(words, name)]
        ctx.meta.update({GIVEN: sections, UNUSED: list(unused)})
        return super().parse_args(ctx, plain)

    def _option(self, name: str) -> str | None:
        return name if any(name in parameter.opts for parameter in self.params) else None

    def _with_values(self) -> list[str]:
        return [name for one in self.params if not getattr(one, "is_flag", True) for name in one.opts]


def sections_of(context: typer.Context) -> dict[str, dict[str, Any]]:
    """The sections that options were given for, with their keys and words."""
    found: dict[str, dict[str, Any]] = context.meta.get(GIVEN, {})
    return found


def notes_on_options(context: typer.Context, settings: LaunchSettings) -> list[str]:
    """What to say of options that were given and change nothing in this job.

    Raises `TrainingError` where the job would train something else without them.
    """
    notes: list[str] = []
    if unused := context.meta.get(UNUSED):
        notes.append(f"{', '.join(unused)}: {'changes' if len(unused) == 1 else 'change'} nothing here.")
    for section, (engine, option) in ENGINES.items():
        given = sections_of(context).get(section, {})
        if not given or settings.distributed_type == engine:
            continue
        others = f"{', '.join(f'--{key}' for key in given)}: settings of {engine.value}, which this job does not train with"
        if section in REFUSED:
            raise TrainingError(f"{others}: add {option}.")
        notes.append(f"{others}; they change nothing without {option}.")
    if settings.use_cpu and settings.gpu_ids not in (None, "all"):
        notes.append("gpu_ids: changes nothing where the CPU computes.")
    return notes


def _value(words: Iterator[str], option: str) -> str:
    value = next(words, None)
    if value is None:
        raise typer.BadParameter(f"Option '{option}' requires an argument.")
    return value
