"""bitsandbytes' packed linear layers, with every companion of the weight registered beside it.

bitsandbytes keeps the companions (absmax, nested statistics, SCB) as attributes of the parameter or of the layer, where nothing that moves,
offloads or counts tensors finds them. Here each is a frozen parameter of the layer: what brings the weight brings them. State dicts have
bitsandbytes' names. Importing this imports bitsandbytes.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState
from torch import nn

from .four_bit import BLOCK, FourBit
from .kernels import KERNEL_DTYPES, state_4bit, unpack_8bit
from .multiply import multiply
from .packed_format import PackedFormat
from .packed_linear import PackedLinear

__all__ = ["Linear4bit", "Linear8bitLt"]


class _Once(logging.Filter):
    """Lets one kind of message through once: bitsandbytes says in each forward of each layer that it casts inputs to float16."""

    said = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is written."""
        if not str(record.msg).startswith("MatMul8bitLt: inputs will be cast"):
            return True
        first, self.said = not self.said, True
        return first


logging.getLogger(bitsandbytes.autograd._functions.__name__).addFilter(_Once())


class LinkedState(QuantState):
    """The companions of a layer as bitsandbytes wants them: whoever asks the weight for its state gets what the layer holds now."""

    def __init__(self, layer: Linear4bit | None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)

    def __getattr__(self, name: str) -> Any:
        layer = None if self.__dict__.get("_layer") is None else self._layer()  # type: ignore[misc]
        if layer is None:
            raise AttributeError(f"{name!r}: the layer that this weight belongs to is gone.")
        return getattr(layer.quant_state, name)

    def to(self, device: Any) -> None:
        """The companions are parameters of the layer: they move with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LinkedState:
        return self  # the copied layer makes one of its own

    def __reduce__(self) -> Any:
        return LinkedState, (None,)


class Linear4bit(PackedLinear, bitsandbytes.nn.Linear4bit):
    """bitsandbytes' 4-bit layer. On the CPU it computes in any shape and dtype, with the values that were packed.

    (bitsandbytes' own layer rounds its scales to bfloat16 in the first forward on a CPU that has instructions for that, and fails there
    for weights whose sides do not divide by 32 and 64.)
    """

    packing: FourBit
    bias: nn.Parameter | None
    compute_dtype: torch.dtype | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        packing: FourBit,
        compute_dtype: torch.dtype | None = None,
        original_dtype: torch.dtype = torch.float32,
    ) -> None:
        bitsandbytes.nn.Linear4bit.__init__(
            self, in_features, out_features, False, compute_dtype, packing.double_quant, packing.quant_type, packing.storage, "meta"
        )
        self.packing = packing
        self.original_dtype = original_dtype
        self._fill_with_meta()

    @property
    def quant_state(self) -> QuantState | None:
        """The companions as bitsandbytes wants them, as they are now."""
        if "absmax" not in self._parameters:
            return None
        return state_4bit(self.packing, self.shape, self.original_dtype, self.packed_tensors())

    @quant_state.setter
    def quant_state(self, state: QuantState | None) -> None:
        """bitsandbytes assigns one; it is made of the companions instead."""

    def _parameter(self, name: str, tensor: torch.Tensor) -> nn.Parameter:
        if name != "weight":
            return super()._parameter(name, tensor)
        weight: nn.Parameter = bitsandbytes.nn.Params4bit(
            tensor,
            requires_grad=False,
            quant_state=LinkedState(self),
            compress_statistics=self.packing.double_quant,
            quant_type=self.packing.quant_type,
            quant_storage=self.packing.storage,
            bnb_quantized=True,
        )
        return weight

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weight = self._parameters["weight"]
        if weight is not None:
            weight.__dict__["quant_state"] = LinkedState(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features), of the same dtype; computed in `compute_dtype`, or in that of x, or in float32 where
        bitsandbytes' kernels do not know it (they give garbage for float64).
        """
        given = x.dtype
        dtype = self.compute_dtype or given
        if dtype not in KERNEL_DTYPES:
            dtype = torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        tensors = self.packed_tensors()
        packing, shape, original = self.packing, self.shape, self.original_dtype

        def product(x: torch.Tensor, bias: torch.Tensor | None, packed: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if x.device.type == "cpu" and shape[-1] % BLOCK:  # where bitsandbytes takes blocks to begin anew with each row
                return nn.functional.linear(x, unpack(packed).to(x.dtype), bias)
            state = state_4bit(packing, shape, original, packed)
            result: torch.Tensor = bitsandbytes.matmul_4bit(x, packed["weight"], quant_state=state, bias=bias)
            return result

        def unpack(packed: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return packing.unpack({name: tensor.detach() for name, tensor in packed.items()}, shape, original)

        return multiply(x.to(dtype), bias, tensors, product, unpack).to(given)

    def _note_loaded(self, dtype: torch.dtype) -> None:
        self.original_dtype = dtype


class Linear8bitLt(PackedLinear, bitsandbytes.nn.Linear8bitLt):
    """bitsandbytes' 8-bit layer."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        packing: PackedFormat,
        threshold: float = 0.0,
        original_dtype: torch.dtype = torch.float16,
    ) -> None:
        bitsandbytes.nn.Linear8bitLt.__init__(
            self, in_features, out_features, False, has_fp16_weights=False, threshold=threshold, device="meta"
        )
        self.packing = packing
        self.original_dtype = original_dtype
        self._fill_with_meta()

    @property
    def state(self) -> Any:
        """bitsandbytes' state of the product: the options, and the packed tensors as they are now. A new one for each who asks."""
        kept = self.__dict__["_state"]
        if "SCB" not in self._parameters:
            return kept
        state = copy.copy(kept)
        state.CB, state.SCB = self.weight.data, self._parameters["SCB"]
        return state

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["_state"] = state

    def _parameter(self, name: str, tensor: torch.Tensor) -> nn.Parameter:
        if name != "weight":
            return super()._parameter(name, tensor)
        weight: nn.Parameter = bitsandbytes.nn.Int8Params(tensor, requires_grad=False, has_fp16_weights=False)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) → (…, out_features), of the same dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        options = copy.copy(self.__dict__["_state"])
        options.is_training = self.training

        def product(x: torch.Tensor, bias: torch.Tensor | None, packed: Mapping[str, torch.Tensor]) -> torch.Tensor:
            state = copy.copy(options)
            state.CB, state.SCB = packed["weight"], packed["SCB"]
            result: torch.Tensor = bitsandbytes.matmul(x, packed["weight"], bias=bias, state=state)
            return result

        dtype = x.dtype
        # bitsandbytes takes matrices, and stacks of them, and nothing of more dimensions.
        rows = x.flatten(0, -2) if x.dim() > 3 else x
        result = multiply(rows, bias, self.packed_tensors(), product, lambda packed: unpack_8bit(packed["weight"], packed["SCB"]).to(dtype))
        return result.unflatten(0, x.shape[:-1]) if x.dim() > 3 else result
