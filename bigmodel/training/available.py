"""Whether a package is installed, and what this machine's accelerators are."""

from __future__ import annotations

import importlib.util

import torch

from ..devices import accelerator_type, accelerators, computes_bf16
from ..errors import TrainingError
from .environment import parse_flag_from_env
from .versions import compare_versions, is_torch_version

__all__ = [
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_bf16_available",
    "is_bnb_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_hpu_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_package_available",
    "is_pandas_available",
    "is_peft_available",
    "is_rich_available",
    "is_rocm_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_xpu_available",
]


def is_package_available(name: str) -> bool:
    """Whether `import name` would find a package; nothing is imported but the packages that it lies in.

    A plain folder of that name beside the script (trackers write some) is no package; a package may lie in one, as megatron-core does.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that cannot be imported; a module put in place by hand, without a spec
        return False
    return spec is not None and spec.origin is not None


def is_aim_available() -> bool:
    """Whether `aim` is installed."""
    return is_package_available("aim")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether `bitsandbytes` is installed, and is `min_version` or later."""
    there = is_package_available("bitsandbytes")
    return there and (min_version is None or compare_versions("bitsandbytes", ">=", min_version))


def is_4bit_bnb_available() -> bool:
    """Whether a `bitsandbytes` is installed that packs in 4 bits."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether a `bitsandbytes` is installed that saves what it has packed in 8 bits."""
    return is_bnb_available("0.37.2")


def is_clearml_available() -> bool:
    """Whether `clearml` is installed."""
    return is_package_available("clearml")


def is_comet_ml_available() -> bool:
    """Whether `comet_ml` is installed."""
    return is_package_available("comet_ml")


def is_datasets_available() -> bool:
    """Whether `datasets` is installed."""
    return is_package_available("datasets")


def is_deepspeed_available() -> bool:
    """Whether `deepspeed` is installed."""
    return is_package_available("deepspeed")


def is_dvclive_available() -> bool:
    """Whether `dvclive` is installed."""
    return is_package_available("dvclive")


def is_lomo_available() -> bool:
    """Whether `lomo_optim` is installed."""
    return is_package_available("lomo_optim")


def is_matplotlib_available() -> bool:
    """Whether `matplotlib` is installed."""
    return is_package_available("matplotlib")


def is_megatron_lm_available() -> bool:
    """Whether `megatron-core` is installed."""
    return is_package_available("megatron.core")


def is_mlflow_available() -> bool:
    """Whether `mlflow` is installed, whole or as `mlflow-skinny`."""
    return is_package_available("mlflow")


def is_pandas_available() -> bool:
    """Whether `pandas` is installed."""
    return is_package_available("pandas")


def is_peft_available() -> bool:
    """Whether `peft` is installed."""
    return is_package_available("peft")


def is_rich_available() -> bool:
    """Whether `rich` is installed."""
    return is_package_available("rich")


def is_schedulefree_available() -> bool:
    """Whether `schedulefree` is installed."""
    return is_package_available("schedulefree")


def is_swanlab_available() -> bool:
    """Whether `swanlab` is installed."""
    return is_package_available("swanlab")


def is_tensorboard_available() -> bool:
    """Whether `tensorboard` or `tensorboardX` is installed."""
    return is_package_available("tensorboard") or is_package_available("tensorboardX")


def is_timm_available() -> bool:
    """Whether `timm` is installed."""
    return is_package_available("timm")


def is_torchao_available() -> bool:
    """Whether `torchao` is installed."""
    return is_package_available("torchao")


def is_torchdata_available() -> bool:
    """Whether `torchdata` is installed."""
    return is_package_available("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether `torchdata` is installed and has `StatefulDataLoader`."""
    return is_package_available("torchdata.stateful_dataloader")


def is_torchvision_available() -> bool:
    """Whether `torchvision` is installed."""
    return is_package_available("torchvision")


def is_trackio_available() -> bool:
    """Whether `trackio` is installed."""
    return is_package_available("trackio")


def is_transformer_engine_available() -> bool:
    """Whether `transformer_engine` is installed."""
    return is_package_available("transformer_engine")


def is_transformers_available() -> bool:
    """Whether `transformers` is installed."""
    return is_package_available("transformers")


def is_triton_available() -> bool:
    """Whether `triton` is installed."""
    return is_package_available("triton")


def is_wandb_available() -> bool:
    """Whether `wandb` is installed."""
    return is_package_available("wandb")


def is_cuda_available() -> bool:
    """Whether the accelerators are of torch's type `cuda`."""
    return accelerator_type() == "cuda"


def is_hpu_available() -> bool:
    """Whether the accelerators are of torch's type `hpu`."""
    return accelerator_type() == "hpu"


def is_mlu_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `mlu`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "mlu"


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether the accelerator is of torch's type `mps`, and torch is `min_version` or later."""
    return is_torch_version(">=", min_version) and accelerator_type() == "mps"


def is_musa_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `musa`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "musa"


def is_neuron_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `neuron`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "neuron"


def is_npu_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `npu`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "npu"


def is_rocm_available() -> bool:
    """Whether the accelerators are of torch's type `cuda`, and torch is built for ROCm."""
    return torch.version.hip is not None and accelerator_type() == "cuda"


def is_sdaa_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `sdaa`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "sdaa"


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether the accelerators are of torch's type `xpu`; a device is there in any case, `check_device` changes nothing."""
    return accelerator_type() == "xpu"


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether `torch_xla` is installed, and with `check_is_tpu` or `check_is_gpu` drives such a device; `USE_TORCH_XLA=0` says no to all.

    Raises `TrainingError` where both kinds of device are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise TrainingError("torch_xla drives one kind of device: ask for `check_is_tpu` or for `check_is_gpu`.")
    if not parse_flag_from_env("USE_TORCH_XLA", True) or not is_package_available("torch_xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    from torch_xla import runtime

    return runtime.device_type() in (("TPU",) if check_is_tpu else ("GPU", "CUDA"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the accelerators (the CPU, where there are none) compute in bfloat16; on a TPU they do unless it is ignored."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return all(computes_bf16(device) for device in accelerators()[:1])


def is_fp16_available() -> bool:
    """Whether models compute in float16: torch does on all kinds of devices, if slowly on CPUs."""
    return True


def is_fp8_available() -> bool:
    """Whether a package is installed that trains in 8 bits; `mixed_precision="fp8"` takes torchao."""
    return is_torchao_available() or is_transformer_engine_available()
