"""The file that says how a job is launched, in the ecosystem's words, and the environment variables that follow from it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.constants import HF_HOME

from ..devices import accelerators, collective_name
from ..errors import TrainingError
from ..settings import PREFIXES, environment_flag
from .enums import ComputeEnvironment, DistributedType, PrecisionType
from .environment import LAST_PORT
from .older_config_files import todays_words

__all__ = ["DEFAULT_CONFIG_FILE", "LaunchSettings", "find_config_file", "launch_environment", "read_launch_settings", "write_basic_config"]

DEFAULT_CONFIG_FILE = str(Path(HF_HOME) / "bigmodel" / "default_config.yaml")
"""Read by `bigmodel launch` where no other file is named."""

ECOSYSTEM_CONFIG_FILE = str(Path(HF_HOME) / "accelerate" / "default_config.yaml")
"""Read where ours is not there."""

WITHOUT_EFFECT = ("downcast_bf16", "main_training_function", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo")
"""Keys of TPU jobs, which such files have whatever the machine."""

RENAMED = {
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch_policy": "FSDP_BACKWARD_PREFETCH",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Variables that are not named as their keys."""

OTHER_LAUNCHERS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_multinode_launcher")
"""Settings of DeepSpeed's own launcher; torchrun starts the processes here."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How a job is launched. The names are the file's keys."""

    compute_environment: str = ComputeEnvironment.LOCAL_MACHINE.value
    distributed_type: str = DistributedType.NO.value
    """`NO`, `MULTI_` and a kind of device, `FSDP`, `DEEPSPEED` or `MEGATRON_LM`."""
    mixed_precision: str | None = None
    """As in `AcceleratorState`; None: the script's."""
    use_cpu: bool = False
    """Compute on the CPU although there is an accelerator."""
    debug: bool = False
    """Check shapes before collectives."""
    num_processes: int = 1
    """On all machines together."""
    num_machines: int = 1
    machine_rank: int = 0
    """Of this machine, from 0."""
    gpu_ids: str | None = None
    """Accelerators to use, `"0,2"`; None or `"all"`: those there are."""
    main_process_ip: str | None = None
    """Address of machine 0."""
    main_process_port: int | None = None
    """On which machine 0 waits for the others; None: 29500, or any free port for one machine alone, which 0 asks for."""
    rdzv_backend: str = "static"
    """How machines meet: `"static"`, or one of torchrun's."""
    enable_cpu_affinity: bool = False
    """Processes run near their accelerators, see `set_numa_affinity`."""
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    megatron_lm_config: Mapping[str, Any] = field(default_factory=dict)
    dynamo_config: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The settings by the file's keys, those included that the file leaves out."""
        return asdict(self)

    def __post_init__(self) -> None:
        if self.compute_environment not in (ComputeEnvironment.LOCAL_MACHINE, None):
            raise TrainingError(f"compute_environment is {self.compute_environment!r}: bigmodel launches on LOCAL_MACHINE only.")
        if self.distributed_type not in DistributedType or self.distributed_type == DistributedType.XLA:
            choices = [word for word in DistributedType.list() if word != DistributedType.XLA]
            raise TrainingError(f"distributed_type is {self.distributed_type!r}; use one of {choices}.")
        if self.mixed_precision is not None and self.mixed_precision not in PrecisionType:
            raise TrainingError(f"mixed_precision is {self.mixed_precision!r}; use one of {PrecisionType.list()}.")
        if self.num_processes < 1 or self.num_machines < 1 or self.num_processes % self.num_machines:
            raise TrainingError(
                f"{self.num_processes} processes cannot be shared by {self.num_machines} machines: num_processes counts those of all "
                "machines together, and each has as many as the others."
            )
        if not 0 <= self.machine_rank < self.num_machines:
            raise TrainingError(f"machine_rank is {self.machine_rank} of {self.num_machines} machines, counted from 0.")
        if not 0 <= (self.main_process_port or 0) <= LAST_PORT:
            raise TrainingError(f"main_process_port is {self.main_process_port}: ports are 0 to {LAST_PORT}.")
        if self.num_machines > 1 and self.main_process_port == 0:
            raise TrainingError(f"main_process_port is 0, any free port, which {self.num_machines} machines could not know: choose one.")
        if self.num_machines > 1 and self.main_process_ip is None:
            raise TrainingError(f"{self.num_machines} machines need main_process_ip, the address of machine 0.")


def write_basic_config(mixed_precision: str = "no", save_location: str = DEFAULT_CONFIG_FILE) -> Path | bool:
    """Writes a file for this machine: a process for each accelerator, or one on the CPU. A file that is there already stays.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        save_location: YAML, or JSON where it ends with `.json`; folders are made.

    Returns: the file's path; False where one was there.

    Raises:
        TrainingError: an unknown precision.
    """
    if str(mixed_precision).lower() not in PrecisionType:
        raise TrainingError(f"mixed_precision is {mixed_precision!r}; use one of {PrecisionType.list()}.")
    file = Path(save_location)
    if file.exists():
        print(f"{file} is there already and stays; remove it, or pass another save_location.")
        return False
    there = accelerators()
    config = {
        "compute_environment": ComputeEnvironment.LOCAL_MACHINE.value,
        "debug": False,
        "distributed_type": f"MULTI_{collective_name(there[0])}" if len(there) > 1 else DistributedType.NO.value,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "mixed_precision": str(mixed_precision).lower(),
        "num_machines": 1,
        "num_processes": max(len(there), 1),
        "use_cpu": not there,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n" if file.suffix == ".json" else yaml.safe_dump(config)
    file.write_text(text, encoding="utf-8")
    return file


def find_config_file(config_file: str | os.PathLike[str] | None = None) -> Path | None:
    """The file of that name; without a name the default file, else the ecosystem's, else None.

    Raises `TrainingError` where there is none of that name.
    """
    candidates = [DEFAULT_CONFIG_FILE, ECOSYSTEM_CONFIG_FILE] if config_file is None else [config_file]
    file = next((Path(candidate) for candidate in candidates if Path(candidate).is_file()), None)
    if file is None and config_file is not None:
        raise TrainingError(f"There is no config file {os.fspath(config_file)}. write_basic_config(save_location=…) makes one.")
    return file


def read_launch_settings(config_file: str | os.PathLike[str] | None = None, given: Mapping[str, object] | None = None) -> LaunchSettings:
    """The settings in a YAML or JSON file, with those in `given` (by the file's keys) in place of the file's.

    Without a name the default file is read, else the ecosystem's. Sections are joined key by key. Without any file and a number of
    processes there is one for each accelerator (of `gpu_ids`), or one.

    Raises:
        TrainingError: no such file, not such a file, keys that are unknown or ask for what bigmodel does not launch.
    """
    file = find_config_file(config_file)
    values: dict[str, Any] = {} if file is None else _values(file)
    for key, value in (given or {}).items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
    if file is None and "num_processes" not in values:
        values["num_processes"] = _processes_of_a_machine(values) * values.get("num_machines", 1)
    try:
        return LaunchSettings(**values)
    except TrainingError as error:
        raise error if file is None else TrainingError(f"{file}: {error}") from None
    except TypeError as error:
        raise TrainingError(f"{file}: a word stands where a number belongs: {error}") from error


def _processes_of_a_machine(values: Mapping[str, Any]) -> int:
    if values.get("use_cpu") or environment_flag("USE_CPU"):
        return 1
    chosen = values.get("gpu_ids") or "all"
    return max(len(accelerators()) if chosen == "all" else len(str(chosen).split(",")), 1)


def _values(file: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{file} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise TrainingError(f"{file} holds no keys and values.")
    try:
        content = todays_words(content)
    except TrainingError as error:
        raise TrainingError(f"{file}: {error}") from None
    known = [setting.name for setting in fields(LaunchSettings)]
    for key, value in content.items():
        if key not in known and key not in WITHOUT_EFFECT and value not in (None, {}, [], "", False):
            near = difflib.get_close_matches(str(key), known, 1)
            raise TrainingError(f"{file}: bigmodel knows no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
    return {key: value for key, value in content.items() if key in known and value is not None}


def launch_environment(settings: LaunchSettings) -> dict[str, str]:
    """What the launched processes find in their environment; our variables under both names, since other libraries read the alias.

    Raises:
        TrainingError: a setting of another launcher.
    """
    ours: dict[str, Any] = {"MIXED_PRECISION": settings.mixed_precision}
    for name, wanted in (("USE_CPU", settings.use_cpu), ("DEBUG_MODE", settings.debug), ("CPU_AFFINITY", settings.enable_cpu_affinity)):
        ours[name] = wanted or None
    ours |= {key.upper(): value for key, value in settings.dynamo_config.items()}
    plain: dict[str, Any] = {}
    kind = settings.distributed_type
    if kind == DistributedType.FSDP:
        ours["USE_FSDP"] = True
        plain |= {RENAMED.get(key, key.upper()): value for key, value in settings.fsdp_config.items()}
    if kind == DistributedType.MEGATRON_LM:
        ours["USE_MEGATRON_LM"] = True
        plain |= {key.upper(): value for key, value in settings.megatron_lm_config.items()}
    if kind == DistributedType.DEEPSPEED:
        ours["USE_DEEPSPEED"] = True
        ours["CONFIG_DS_FIELDS"] = list(settings.deepspeed_config)
        for key, value in settings.deepspeed_config.items():
            if key in OTHER_LAUNCHERS:
                if value not in (None, "standard"):
                    raise TrainingError(f"deepspeed_config: {key}={value!r} is for DeepSpeed's own launcher; bigmodel starts torchrun.")
            else:
                ours[RENAMED.get(key, f"DEEPSPEED_{key.upper()}")] = value
    named = {prefix + name: value for name, value in ours.items() for prefix in PREFIXES} | plain
    return {name: _word(value) for name, value in named.items() if value is not None}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
