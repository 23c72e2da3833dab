"""torch.func's transforms: weights are plain tensors, whatever level of `grad`, `jvp` or `vmap` the forward that brings them runs in."""

from __future__ import annotations

import contextlib

import torch

from ..errors import DispatchError

__all__ = ["check_not_transformed", "in_transform", "outside_transforms"]

_peek = torch._C._functorch.peek_interpreter_stack
_NOTHING = contextlib.nullcontext()


def in_transform() -> bool:
    """Whether a transform is running."""
    return _peek() is not None


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Within the context tensors are made, read and written as if no transform ran: one that is made inside a level is wrapped by it, has
    no memory to read into, and could serve no other forward."""
    return _NOTHING if _peek() is None else torch._C._DisableFuncTorch()


def check_not_transformed(label: str, value: torch.Tensor) -> None:
    """Raises `DispatchError` if `value`, to be written to the weight `label`, belongs to a transform that is running."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise DispatchError(
            f"{label} is offloaded and cannot be given a tensor of a running torch.func transform, which has no values of its own: "
            "return the tensor from the transformed function, and write it then."
        )
