"""Which precision and which plugins this process trains with, on top of which process it is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ..errors import TrainingError
from ..settings import PREFIXES, read_variable
from .enums import DistributedType, PrecisionType
from .parallelism import ParallelismConfig
from .state import PartialState

__all__ = ["AcceleratorState"]

OWN = (
    "_mixed_precision",
    "dynamo_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "_mesh",
    "_selected",
    "_communication",
)
"""What `AcceleratorState` keeps beside the attributes of `PartialState`."""


class _PrecisionPlugin(Protocol):
    def set_mixed_precision(self, mixed_precision: str) -> None: ...


class _DeepSpeedPlugin(_PrecisionPlugin, Protocol):
    deepspeed_config: dict[str, Any]

    def select(self, _from_accelerator_state: bool = False) -> None: ...

    def _unselect(self) -> None: ...


class AcceleratorState(PartialState):
    """`PartialState` and the settings of training; every instance in a process shares one state, made by the first.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`; None: `BIGMODEL_MIXED_PRECISION`, else `"no"`.
        cpu: compute on the CPU although there is an accelerator.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: one, or several by name, of which the first is selected.
        fsdp_plugin: how models are sharded.
        megatron_lm_plugin: how models are spread by Megatron-LM.
        parallelism_config: a `ParallelismConfig`.
        backend, init_method, timeout: as in `PartialState`.

    Attributes:
        distributed_type: `DEEPSPEED`, `FSDP` or `MEGATRON_LM` where such a plugin is given, else as in `PartialState`.
        deepspeed_plugins: by name; None without.
        dynamo_plugin, fsdp_plugin, megatron_lm_plugin, parallelism_config: as given.

    Raises:
        TrainingError: an unknown precision; plugins that exclude each other; other settings than the state was made with.
    """

    dynamo_plugin: Any
    deepspeed_plugins: dict[str, Any] | None
    fsdp_plugin: Any
    megatron_lm_plugin: Any
    parallelism_config: ParallelismConfig | None
    _mesh: Any
    _mixed_precision: str
    _selected: str | None
    _communication: DistributedType

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        *,
        parallelism_config: ParallelismConfig | None = None,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
    ):
        precision = None if mixed_precision is None else _known_precision(mixed_precision, "mixed_precision")
        deepspeed_plugins = _by_name(deepspeed_plugin)
        super().__init__(cpu, backend=backend, init_method=init_method, timeout=timeout)
        if self.initialized:
            self._refuse_changes(
                precision,
                dynamo_plugin=dynamo_plugin,
                deepspeed_plugins=deepspeed_plugins,
                fsdp_plugin=fsdp_plugin,
                megatron_lm_plugin=megatron_lm_plugin,
                parallelism_config=parallelism_config,
            )
            return
        engines = {
            DistributedType.DEEPSPEED: deepspeed_plugins,
            DistributedType.FSDP: fsdp_plugin,
            DistributedType.MEGATRON_LM: megatron_lm_plugin,
        }
        chosen = [engine for engine, plugin in engines.items() if plugin is not None]
        if len(chosen) > 1:
            raise TrainingError(f"{' and '.join(engine.value for engine in chosen)} cannot train one model together: give one plugin.")
        if parallelism_config is not None:
            engine = chosen[0] if chosen else self.distributed_type
            parallelism_config.refuse_what_is_not_done(self.num_processes, engine, fsdp_plugin)
        if precision is None:
            precision = _known_precision(read_variable("MIXED_PRECISION") or "no", f"{PREFIXES[0]}MIXED_PRECISION")
        for plugin in (*(deepspeed_plugins or {}).values(), megatron_lm_plugin):
            _tell_precision(plugin, precision)
        if precision != "no":  # a policy that the plugin came with stays
            _tell_precision(fsdp_plugin, precision)
        self._shared_state.update(
            _mixed_precision=precision,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            _mesh=None,
            _selected=None,
            _communication=self.distributed_type,
            distributed_type=chosen[0] if chosen else self.distributed_type,
        )
        if deepspeed_plugins:
            self.select_deepspeed_plugin(next(iter(deepspeed_plugins)))

    def _refuse_changes(self, precision: str | None, **plugins: Any) -> None:
        advice = "It is settled where Accelerator or AcceleratorState is made first: give it there, or restart."
        # DeepSpeed's own config says which precision it computes in.
        if precision is not None and precision != self.mixed_precision and self.deepspeed_plugins is None:
            raise TrainingError(f"mixed_precision={precision!r}: this process trains with {self.mixed_precision!r}. {advice}")
        for name, plugin in plugins.items():
            there = getattr(self, name)
            if plugin is None or plugin is there:
                continue
            if name == "megatron_lm_plugin" or (name == "fsdp_plugin" and self.mixed_precision != "no"):
                _tell_precision(plugin, self.mixed_precision)
            if plugin != there:
                raise TrainingError(f"{name}={plugin!r}: this process trains with {there!r}. {advice}")

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"

    @property
    def initialized(self) -> bool:
        """Whether the settings of training are known."""
        return "_mixed_precision" in self._shared_state

    @property
    def mixed_precision(self) -> str:
        """The format that forwards compute in: `"no"`, `"fp16"`, `"bf16"`, `"fp8"`; under DeepSpeed, what the selected config enables."""
        plugin = self.deepspeed_plugin
        if plugin is None or self._mixed_precision == "fp8":
            return self._mixed_precision
        enabled = (name for name in ("fp16", "bf16") if plugin.deepspeed_config.get(name, {}).get("enabled") is True)
        return next(enabled, "no")

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None without."""
        return None if self.deepspeed_plugins is None or self._selected is None else self.deepspeed_plugins[self._selected]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed plugin of that name; `TrainingError` names those there are."""
        if self.deepspeed_plugins is None or name not in self.deepspeed_plugins:
            raise TrainingError(f"There is no DeepSpeed plugin {name!r}; there are {sorted(self.deepspeed_plugins or {})}.")
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """What is prepared from now on uses the DeepSpeed plugin of that name."""
        chosen: _DeepSpeedPlugin = self.get_deepspeed_plugin(name)
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)
        self._selected = name

    @property
    def device_mesh(self) -> Any:
        """The `DeviceMesh` of `parallelism_config`, made when all processes ask for it first; None without a config or a process group."""
        if self._mesh is None and self.parallelism_config is not None and dist.is_initialized():
            self._shared_state["_mesh"] = self.parallelism_config.build_device_mesh(self.device.type)
        return self._mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by `fully_shard`."""
        return self.fsdp_plugin is not None and self.fsdp_plugin.fsdp_version == 2

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Forgets the settings of training, and with `reset_partial_state` which process this is; for tests."""
        shared = cls._shared_state
        if "_communication" in shared:
            shared["distributed_type"] = shared["_communication"]
        for name in OWN:
            shared.pop(name, None)
        if reset_partial_state:
            PartialState._reset_state()


def _known_precision(word: str, where: str) -> str:
    if str(word).lower() not in PrecisionType:
        raise TrainingError(f"{where} is {word!r}; use one of {PrecisionType.list()}.")
    return str(word).lower()


def _by_name(plugin: Any) -> dict[str, Any] | None:
    if plugin is None:
        return None
    return dict(plugin) if isinstance(plugin, Mapping) else {"default": plugin}


def _tell_precision(plugin: _PrecisionPlugin | None, precision: str) -> None:
    if plugin is not None:
        plugin.set_mixed_precision(precision)
