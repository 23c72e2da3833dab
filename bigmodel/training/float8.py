"""Linear layers that multiply in 8 bits, by torchao's float8 training: what `mixed_precision="fp8"` makes of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ..dispatch import LazyTensor
from ..errors import MissingPackageError, TrainingError
from .available import is_torchao_available
from .enums import DistributedType

if TYPE_CHECKING:
    from .accelerator import Accelerator

__all__ = ["compute_in_float8", "refuse_without_float8", "refuse_without_torchao"]

MULTIPLE: Final = 16
"""Both sizes of a matrix that kernels for 8 bits multiply are multiples of it."""


def refuse_without_torchao() -> None:
    """Raises `MissingPackageError` where torchao is not installed."""
    if not is_torchao_available():
        raise MissingPackageError(
            "mixed_precision='fp8' multiplies in 8 bits by torchao's float8 training: pip install 'bigmodel[torchao]', or use 'bf16'."
        )


def refuse_without_float8(accelerator: Accelerator) -> None:
    """Raises `TrainingError` where this process's device does not multiply in 8 bits, or an engine with layers of its own trains."""
    kind, device = accelerator.distributed_type, accelerator.device
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise TrainingError(f"mixed_precision='fp8' puts layers of torchao into models, and {kind.value} has its own: use 'bf16' with it.")
    if not _multiplies(device):
        raise TrainingError(f"mixed_precision='fp8': {device} does not multiply matrices in 8 bits (torch._scaled_mm). Use 'bf16'.")


def _multiplies(device: torch.device) -> bool:
    try:
        one = torch.ones((), device=device)
        matrix = torch.ones(MULTIPLE, MULTIPLE, device=device).to(torch.float8_e4m3fn)
        product = torch._scaled_mm(matrix, matrix.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return bool((product == MULTIPLE).all())
    except (RuntimeError, TypeError):
        return False


def compute_in_float8(model: nn.Module) -> None:
    """Puts torchao's layers in the place of linear ones, around the same parameters.

    Stay as they are: the first and the last linear layer, which lose most by 8 bits; sizes that are no multiples of 16; and layers of other
    classes. Raises `TrainingError` where nothing is left.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    if any(isinstance(module, Float8Linear) for module in model.modules()):  # prepared before, or the user's own choice
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    chosen = {id(module) for module in linear[1:-1] if _fits(module)}
    if not chosen:
        raise TrainingError(
            f"mixed_precision='fp8': of the {len(linear)} linear layers of {type(model).__name__} none can multiply in 8 bits: the first "
            f"and the last stay, and sizes have to be multiples of {MULTIPLE}. Use 'bf16'."
        )

    def is_chosen(module: nn.Module, name: str) -> bool:
        return id(module) in chosen

    converted: Any = convert_to_float8_training(model, module_filter_fn=is_chosen)
    assert converted is model, "the model was changed in place"


def _fits(module: nn.Linear) -> bool:
    return not (module.in_features % MULTIPLE or module.out_features % MULTIPLE or isinstance(module.weight, LazyTensor))
