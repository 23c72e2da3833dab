"""Options of `bigmodel launch` that stand for keys in the config file's sections: `--zero_stage 2`, `deepspeed_config: {zero_stage: 2}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand

from ..errors import TrainingError
from ..training.config_file import LaunchSettings
from ..training.enums import DistributedType

__all__ = ["LaunchCommand", "refuse_sections_of_others", "sections_of"]

SECTIONS: Final = {
    "fsdp_config": (
        "fsdp_activation_checkpointing",
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
        "deepspeed_moe_layer_cls_names",
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

SECTION_OF: Final = {key: section for section, keys in SECTIONS.items() for key in keys}
GIVEN: Final = f"{__name__}.given"


class LaunchCommand(TyperCommand):
    """Takes what is of sections out of the arguments before the script, and lets words of options be joined by dashes too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        sections: dict[str, dict[str, str]] = {}
        plain: list[str] = []
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
            option = self._option(name if name.count("-") == 1 else f"--{key}")
            plain.append(word if option is None else f"{option}{equals}{value}")
            if option is not None and option in self._with_values() and not equals:
                plain += [_value(words, name)]
        ctx.meta[GIVEN] = sections
        return super().parse_args(ctx, plain)

    def _option(self, name: str) -> str | None:
        return name if any(name in parameter.opts for parameter in self.params) else None

    def _with_values(self) -> list[str]:
        return [name for one in self.params if not getattr(one, "is_flag", True) for name in one.opts]


def sections_of(context: typer.Context) -> dict[str, dict[str, Any]]:
    """The sections that options were given for, with their keys and words."""
    found: dict[str, dict[str, Any]] = context.meta.get(GIVEN, {})
    return found


def refuse_sections_of_others(settings: LaunchSettings, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `TrainingError` where options were given that nothing in this job reads."""
    for section, (engine, option) in ENGINES.items():
        if section in sections and settings.distributed_type != engine:
            given = ", ".join(f"--{key}" for key in sections[section])
            raise TrainingError(f"{given}: settings of {engine}, which this job does not train with: add {option}.")


def _value(words: Iterator[str], option: str) -> str:
    value = next(words, None)
    if value is None:
        raise typer.BadParameter(f"Option '{option}' requires an argument.")
    return value
