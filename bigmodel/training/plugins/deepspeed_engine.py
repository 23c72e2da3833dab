"""DeepSpeed's engine for a model: what it needs is there, it is made, and forwards compute in its precision."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...dispatch import dispatched
from ...errors import MissingPackageError, TrainingError
from ...text import kind_text
from ..environment import patch_environment
from ..nested import convert_to_fp32, recursively_apply
from ..state import PartialState
from .deepspeed import DeepSpeedPlugin
from .deepspeed_stand_ins import DummyOptim, DummyScheduler

__all__ = ["check_parts", "deepspeed_module", "make_engine", "start_group"]


def deepspeed_module() -> Any:
    """The package deepspeed, computing where this process does. Raises `MissingPackageError`."""
    on_cpu = PartialState().device.type == "cpu"
    try:
        with patch_environment(**({"DS_ACCELERATOR": "cpu"} if on_cpu else {})):
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            get_accelerator()
    except ImportError as error:
        raise MissingPackageError(
            f"Training with DeepSpeed needs the package deepspeed ({error}): DS_BUILD_OPS=0 pip install 'bigmodel[deepspeed]'."
        ) from error
    if on_cpu:
        # A kernel for inference, which would be compiled when the first engine is made.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start_group() -> None:
    """One process without a launcher forms a group of its own, so that the same script runs."""
    os.environ.setdefault("LOCAL_RANK", str(PartialState().local_process_index))  # DeepSpeed asks launchers by it
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(PartialState().device)
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def check_parts(plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Raises `TrainingError` where optimizer and scheduler are said twice or not at all, or the model is dispatched."""
    in_config = plugin.get_value("optimizer") is not None, plugin.get_value("scheduler") is not None
    if dispatched(model) is not None or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise TrainingError(f"{type(model).__name__} is dispatched to several devices, and DeepSpeed cannot spread it as well.")
    if isinstance(optimizer, torch.optim.Optimizer) and in_config[0]:
        raise TrainingError(
            f"There are two optimizers, {kind_text(optimizer)} and the DeepSpeed config's: take 'optimizer' out of the config, "
            "or prepare a DummyOptim in the place of yours."
        )
    if isinstance(optimizer, DummyOptim) and not in_config[0]:
        raise TrainingError("A DummyOptim stands for the optimizer of the DeepSpeed config, which has no 'optimizer'.")
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is None and not in_config[1]:
            raise TrainingError("A DummyScheduler stands for the scheduler of the DeepSpeed config, which has no 'scheduler'.")
        if scheduler.lr_scheduler_callable is not None and in_config[1]:
            raise TrainingError("There are two schedulers, that of lr_scheduler_callable and the DeepSpeed config's: take one out.")
    elif scheduler is not None and in_config[1]:
        raise TrainingError(
            f"There are two schedulers, {kind_text(scheduler)} and the DeepSpeed config's: take 'scheduler' out of the config, "
            "or prepare a DummyScheduler in the place of yours."
        )


def _check_machine(plugin: DeepSpeedPlugin) -> None:
    device = PartialState().device
    if plugin.get_value("msamp.enabled") is True:
        raise TrainingError("The DeepSpeed config enables 'msamp': bigmodel does not put MS-AMP's 8-bit layers into a model. Use bf16.")
    from deepspeed.accelerator import get_accelerator

    if plugin.get_value("fp16.enabled") is True and (device.type == "cpu" or not get_accelerator().is_fp16_supported()):
        raise TrainingError(
            f"DeepSpeed does not train in fp16 on {device}, which needs an accelerator: use mixed_precision='bf16' or 'no'."
        )
    if "nvme" in (plugin.offload_optimizer_device, plugin.offload_param_device):
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            raise TrainingError(
                "Offload to 'nvme' needs DeepSpeed's asynchronous reads, which cannot be built on this machine: install libaio's headers "
                "(libaio-dev) and a C++ compiler, or offload to 'cpu'."
            )


def make_engine(plugin: DeepSpeedPlugin, values: dict[str, Any], model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
    """The `deepspeed.DeepSpeedEngine` of the model, with the optimizer (None: for forwards alone, with ZeRO stage 3).

    Raises:
        MissingPackageError: no deepspeed.
        TrainingError: what this machine cannot do, `"auto"` that nothing says, values that differ.
    """
    deepspeed = deepspeed_module()
    _check_machine(plugin)
    config = plugin._completed(values)
    arguments: dict[str, Any] = {}
    if optimizer is None:
        for name in ("optimizer", "scheduler"):
            config.pop(name, None)
    elif isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
        if PartialState().device.type == "cpu" and str(config["optimizer"].get("type", "")).lower() in ("adam", "adamw"):
            # torch's, whose steps are the same; DeepSpeed's own would be compiled first.
            config["optimizer"].setdefault("params", {}).setdefault("torch_adam", True)
    else:
        arguments["optimizer"] = optimizer
        config.setdefault("zero_allow_untested_optimizer", True)
        if plugin.get_value("zero_optimization.offload_optimizer.device") == "cpu":
            config.setdefault("zero_force_ds_cpu_optimizer", False)
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    if plugin.hf_ds_config.is_zero3() and plugin.transformer_moe_cls_names:
        deepspeed.utils.set_z3_leaf_modules(model, _classes(model, plugin.transformer_moe_cls_names))
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(word, {}).get("enabled") is True:
            _compute_in(engine.module, dtype)
    return engine


def _classes(model: nn.Module, names: str) -> list[type]:
    there = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    lacking = [name for name in wanted if name not in there]
    if lacking:
        raise TrainingError(
            f"transformer_moe_cls_names has {', '.join(lacking)}, of which {type(model).__name__} has no module; it has "
            f"{', '.join(sorted(there))}."
        )
    return [there[name] for name in wanted]


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights are in `dtype`: forwards take floats of any precision, and give their outputs in float32."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return recursively_apply(lambda tensor: tensor.to(dtype), (args, kwargs), test_type=_is_float)

    module.register_forward_pre_hook(cast, with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: convert_to_fp32(output))


def _is_float(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.is_floating_point()
