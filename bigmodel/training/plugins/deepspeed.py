"""`DeepSpeedPlugin`: what DeepSpeed is told, from arguments, its configuration file and the environment."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ...errors import TrainingError
from ...integrations.transformers import announce_deepspeed
from ...settings import PREFIXES, environment_flag, read_variable
from ..argument_types import refuse_wrong_fields
from .deepspeed_config import AUTO, HfDeepSpeedConfig, leaves

__all__ = ["DeepSpeedPlugin"]

NONE: Final = "none"
"""No device, path or file."""

KEYS: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Where the config says what an argument says."""


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains. What is None is read from the config, else from the environment, else has the value named at the field.

    Attributes:
        deepspeed_config: the dictionaries that DeepSpeed is given, `"auto"` where a value is found out when objects are prepared.
        selected: whether models are prepared with this plugin (`AcceleratorState.select_deepspeed_plugin`).

    Raises:
        TrainingError: a config that cannot be read or names no ZeRO stage, an argument or variable that says other than the config, or
            values that do not exist.
    """

    hf_ds_config: Any = None
    """The config: a dict, a file's path, or an `HfDeepSpeedConfig`. `BIGMODEL_DEEPSPEED_CONFIG_FILE`, else made of the other fields."""
    gradient_accumulation_steps: int | str | None = None
    """Batches to a step. `BIGMODEL_GRADIENT_ACCUMULATION_STEPS`, else `"auto"`: the accelerator's."""
    gradient_clipping: float | str | None = None
    """Largest norm of all gradients together. `BIGMODEL_GRADIENT_CLIPPING`, else `"auto"`: what `clip_grad_norm_` is called with."""
    zero_stage: int | None = None
    """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. `BIGMODEL_DEEPSPEED_ZERO_STAGE`, else 2."""
    is_train_batch_min: bool = True
    """Of several loaders prepared together the smallest batch size counts; False: the largest."""
    offload_optimizer_device: str | None = None
    """Where optimizer state rests, with stages 2 and 3: `"none"`, `"cpu"`, `"nvme"`. `BIGMODEL_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE`."""
    offload_param_device: str | None = None
    """Where parameters rest, with stage 3: `"none"`, `"cpu"`, `"nvme"`. `BIGMODEL_DEEPSPEED_OFFLOAD_PARAM_DEVICE`."""
    offload_optimizer_nvme_path: str | None = None
    """The folder for `"nvme"`. `BIGMODEL_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH`."""
    offload_param_nvme_path: str | None = None
    """The folder for `"nvme"`. `BIGMODEL_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH`."""
    zero3_init_flag: bool | None = None
    """transformers builds models sharded from the start, with stage 3. `BIGMODEL_DEEPSPEED_ZERO3_INIT`, else whether the stage is 3."""
    zero3_save_16bit_model: bool | None = None
    """Stage 3 can gather a model's weights, to save them or for a state dict. `BIGMODEL_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL`, else False."""
    transformer_moe_cls_names: str | None = None
    """Classes of mixture-of-experts layers, separated by commas: stage 3 gathers such a layer whole, since which of its parts run
    differs between processes. `BIGMODEL_DEEPSPEED_MOE_LAYER_CLS_NAMES`."""
    enable_msamp: bool | None = None
    """MS-AMP's 8-bit formats, with stages 0 to 2. Whether `BIGMODEL_FP8_BACKEND` is `MSAMP`."""
    msamp_opt_level: str | None = None
    """`"O1"` or `"O2"`. `BIGMODEL_FP8_OPT_LEVEL`, else `"O1"`."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        given = {name for name in KEYS if getattr(self, name) is not None}
        told = given | self._read_environment()
        file = self.hf_ds_config if self.hf_ds_config is not None else read_variable("DEEPSPEED_CONFIG_FILE")
        if file is None or (isinstance(file, str) and file.lower() in (NONE, "")):
            self.hf_ds_config = HfDeepSpeedConfig(self._made())
        else:
            self.hf_ds_config = file if hasattr(file, "find_config_node") else HfDeepSpeedConfig(file)
            self._join(told, given)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        # Reports on stdout are for those who ask for them.
        self.deepspeed_config.setdefault("steps_per_print", float("inf"))
        self._check()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = environment_flag("DEEPSPEED_ZERO3_INIT", self.hf_ds_config.is_zero3())
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn(f"zero3_init_flag is for ZeRO stage 3, and has no effect with stage {self.zero_stage}.", stacklevel=3)
            self.zero3_init_flag = False
        if self.enable_msamp:
            self.deepspeed_config.setdefault("msamp", {"enabled": True, "opt_level": self.msamp_opt_level})
        self._selected = False
        self._announced: HfDeepSpeedConfig | None = None
        self._filled: dict[str, Any] = {}

    def _read_environment(self) -> set[str]:
        """Fills the fields that are None. Returns those that a variable says something of."""
        told = set()

        def fill(field: str, name: str, usual: Any, kind: Callable[[str], Any] = str) -> None:
            word = read_variable(name)
            if getattr(self, field) is None:
                if word in (None, ""):
                    setattr(self, field, usual)
                    return
                told.add(field)
                try:
                    setattr(self, field, AUTO if word == AUTO else kind(str(word)))
                except ValueError:
                    raise TrainingError(f"The environment variable {PREFIXES[0]}{name} is {word!r}, not a number.") from None

        fill("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS", AUTO, int)
        fill("gradient_clipping", "GRADIENT_CLIPPING", AUTO, float)
        fill("zero_stage", "DEEPSPEED_ZERO_STAGE", 2, int)
        for what in ("optimizer", "param"):
            fill(f"offload_{what}_device", f"DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", NONE)
            fill(f"offload_{what}_nvme_path", f"DEEPSPEED_OFFLOAD_{what.upper()}_NVME_PATH", NONE)
        fill("transformer_moe_cls_names", "DEEPSPEED_MOE_LAYER_CLS_NAMES", None)
        fill("msamp_opt_level", "FP8_OPT_LEVEL", "O1")
        if self.zero3_save_16bit_model is None:
            if read_variable("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"):
                told.add("zero3_save_16bit_model")
            self.zero3_save_16bit_model = environment_flag("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
        if self.enable_msamp is None:
            self.enable_msamp = (read_variable("FP8_BACKEND") or "").upper() == "MSAMP"
        return told

    def _made(self) -> dict[str, Any]:
        """The config that the fields say."""
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for what in ("optimizer", "param"):
            device = getattr(self, f"offload_{what}_device")
            path = getattr(self, f"offload_{what}_nvme_path") if device == "nvme" else None
            zero[f"offload_{what}"] = {"device": device, "nvme_path": path}
        zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        config = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": zero,
        }
        return config | ({"gradient_clipping": self.gradient_clipping} if self.gradient_clipping else {})

    def _join(self, told: set[str], given: set[str]) -> None:
        """What the config leaves to the fields, and the fields that the config decides."""
        config: HfDeepSpeedConfig = self.hf_ds_config
        if not isinstance(config.get_value("zero_optimization"), dict):
            raise TrainingError("The DeepSpeed config has no 'zero_optimization'; give it one, such as {'stage': 2}.")
        differing = []
        for field, key in KEYS.items():
            mine, there = getattr(self, field), config.get_value(key)
            node, _ = config.find_config_node(key)
            if there == AUTO or (there is None and (node is not None or field in given) and field in told):
                config.set_value(key, mine)
            elif there is None:
                if field in ("gradient_accumulation_steps", "zero_stage"):  # the rest of this class reads them there
                    config.set_value(key, mine)
                continue
            elif field in told and mine != there and not (field.startswith("offload") and mine == NONE and field not in given):
                where = field if field in given else f"{field} (environment)"
                differing.append(f"{where}={mine!r}, but {key} is {there!r} in the config")
            setattr(self, field, config.get_value(key))
        if differing:
            raise TrainingError("DeepSpeed is told two things: " + "; ".join(differing) + ". Say it once, or write 'auto' in the config.")

    def _check(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise TrainingError(f"ZeRO stage {self.zero_stage!r}: there are 0, 1, 2 and 3.")
        for what, stages in (("optimizer", (1, 2, 3)), ("param", (3,))):
            device, path = getattr(self, f"offload_{what}_device"), getattr(self, f"offload_{what}_nvme_path")
            if device not in (NONE, "cpu", "nvme", None):
                raise TrainingError(f"offload_{what}_device={device!r}; use 'none', 'cpu' or 'nvme'.")
            if device in ("cpu", "nvme") and self.zero_stage not in stages:
                raise TrainingError(f"offload_{what}_device={device!r} is for ZeRO stage {stages[-1]}, not {self.zero_stage}.")
            if device == "nvme" and path in (NONE, None, ""):
                raise TrainingError(f"offload_{what}_device='nvme' needs offload_{what}_nvme_path, a folder on the drive.")
        if self.enable_msamp and self.zero_stage == 3:
            raise TrainingError("enable_msamp is for ZeRO stages 0 to 2, not 3.")
        if self.enable_msamp and self.msamp_opt_level not in ("O1", "O2"):
            raise TrainingError(f"msamp_opt_level={self.msamp_opt_level!r}; use 'O1' or 'O2'.")

    # Values that are found out later

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the config's value of that dotted name is `"auto"`."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The config's value of that dotted name, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Puts values, named by their dotted keys, in the place of `"auto"`: `process(**{"optimizer.params.lr": 1e-3})`.

        Args:
            prefix: where `config` stands in the whole; `""` for the whole.
            mismatches: a list that is given what differs; None: it is raised at the end.
            config: the dictionaries to fill; None: `deepspeed_config`.
            must_match: values that are in the config already must be those in `kwargs`.
            kwargs: the values.

        Raises:
            TrainingError: names each `"auto"` without a value; and, with `must_match` for the whole, both values of each that differs.
        """
        found: list[str] = [] if mismatches is None else mismatches
        lacking: list[str] = []
        _fill(self.deepspeed_config if config is None else config, prefix, kwargs, found if must_match else [], lacking)
        if lacking:
            raise TrainingError(
                f"The DeepSpeed config has 'auto' for {', '.join(lacking)}, which nothing here says: write values in their place."
            )
        if found and prefix == "":
            raise TrainingError(
                "The DeepSpeed config and the training script differ: " + "; ".join(found) + ". Write 'auto' in the config, or one value."
            )

    def _completed(self, values: dict[str, Any]) -> dict[str, Any]:
        """A copy of the config for an engine. What was `"auto"` is filled in the plugin's own as well, anew at each call."""
        for name, value in self._filled.items():
            if self.get_value(name) == value:
                self.hf_ds_config.set_value(name, AUTO)
        self._filled = {name: values[name] for name in leaves(self.deepspeed_config) if self.is_auto(name) and name in values}
        self.deepspeed_config_process(**values)
        return copy.deepcopy(self.deepspeed_config)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Writes the precision into the config: `"no"`, `"fp16"`, `"bf16"`, `"fp8"` (bf16 beside the 8-bit formats).

        Raises `TrainingError` where the config says another one; `"no"` leaves to the config what it says.
        """
        wanted = {"fp16": mixed_precision == "fp16", "bf16": mixed_precision in ("bf16", "fp8")}
        for word, enabled in wanted.items():
            section = self.deepspeed_config.setdefault(word, {})
            there = section.get("enabled", AUTO)
            if there == AUTO:
                section["enabled"] = enabled
            elif mixed_precision != "no" and there is not enabled:
                raise TrainingError(
                    f"mixed_precision={mixed_precision!r}, but {word}.enabled is {there!r} in the DeepSpeed config: write 'auto' there, "
                    "or one precision in both."
                )

    # Which plugin is in use

    @property
    def selected(self) -> bool:
        """Whether models are prepared with this plugin."""
        return self._selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Models are prepared with this plugin from now on, and transformers knows of it; `AcceleratorState` calls it.

        Raises `TrainingError` when called otherwise, since the plugin selected before must be told.
        """
        if not _from_accelerator_state:
            raise TrainingError("Select a DeepSpeed plugin by its name: accelerator.state.select_deepspeed_plugin(name).")
        self._selected = True
        self._announce(self.zero3_init_flag or not self.hf_ds_config.is_zero3())

    def _unselect(self) -> None:
        self._selected = False
        self._announced = None

    def _announce(self, known: bool = True) -> None:
        """Tells transformers the config, or with `known=False` that there is none; it holds a weak reference only."""
        self._announced = HfDeepSpeedConfig(_settled(self.deepspeed_config)) if known else None
        announce_deepspeed(self._announced)

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers builds models sharded from the start."""
        return bool(self.zero3_init_flag)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Models that transformers builds inside are sharded from the start, or are not."""
        before, announced = self.zero3_init_flag, self._announced
        self.zero3_init_flag = enable
        self._announce(enable or not self.hf_ds_config.is_zero3())
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self._announce(announced is not None)


def _fill(config: dict[str, Any], prefix: str, values: dict[str, Any], differing: list[str], lacking: list[str]) -> None:
    for key, there in config.items():
        name = prefix + key
        if isinstance(there, dict):
            _fill(there, f"{name}.", values, differing, lacking)
        elif there == AUTO:
            if name in values:
                config[key] = values[name]
            else:
                lacking.append(name)
        elif there is not None and name in values and not _same(there, values[name]):
            differing.append(f"{name} is {there!r} in the config and {values[name]!r} in the script")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """A copy that can be built with before anything is prepared: one batch, and DeepSpeed's own values in the place of `"auto"`."""
    settled = HfDeepSpeedConfig(copy.deepcopy(config))
    for name in [name for name in leaves(config) if settled.is_auto(name)]:
        settled.del_config_sub_tree(name)
    for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        settled.config.setdefault(name, 1)
    return settled.config
