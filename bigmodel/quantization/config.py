"""What the user asks for: `BnbQuantizationConfig`, transformers' `BitsAndBytesConfig`, and the scheme that both come down to."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Final

import torch

from ..errors import QuantizationError
from ..planning import CustomDtype
from .formats import FORMAT_NAMES, weight_format
from .four_bit import FourBit
from .int8 import Int8
from .packed_format import PackedFormat

__all__ = ["BnbQuantizationConfig", "Scheme", "scheme_of", "transformers_config"]

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DEFAULT_THRESHOLD: Final = 6.0


@dataclass
class BnbQuantizationConfig:
    """4- or 8-bit packing with bitsandbytes. Using it never changes it.

    Raises `QuantizationError` (a ValueError) when it is made with what cannot be.
    """

    load_in_8bit: bool = False
    """LLM.int8(): one scale a row, activations quantized as they come."""
    llm_int8_threshold: float = DEFAULT_THRESHOLD
    """8-bit: columns of activations with a value above this are multiplied in floating point; 0 multiplies all in int8."""
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    """`"fp4"` or `"nf4"`."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of the blocks are packed as well, to 8 bits."""
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    """`"fp32"`, `"fp16"`, `"bf16"` or a torch dtype; a torch dtype once the config is made."""
    torch_dtype: str | torch.dtype | None = None
    """Of what is not packed; float16 for 8 bits, the compute dtype for 4 bits if not given."""
    skip_modules: list[str] | None = None
    """Names of modules that are left as they are: whole names, or runs of a name's components. None: the output head and tied weights."""
    keep_in_fp32_modules: list[str] | None = None
    """Names of modules that are left as they are, in float32."""
    pack_embeddings: bool = field(default=False, kw_only=True)
    """Whether embedding tables are packed as well. A lookup unpacks its rows and no others. A table that is tied to another module (the
    output head) is refused by name."""
    target_dtype: torch.dtype | CustomDtype = field(init=False)
    """What the packed elements count as in a plan."""

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant", "pack_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise QuantizationError(f"{name} must be a bool; it is {getattr(self, name)!r}.")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both True" if self.load_in_4bit else "both False"
            raise QuantizationError(f"load_in_4bit and load_in_8bit can't be {both}: choose one.")
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, int | float):
            raise QuantizationError(f"llm_int8_threshold must be a float or an int; it is {self.llm_int8_threshold!r}.")
        if not self.llm_int8_threshold >= 0:
            raise QuantizationError(f"llm_int8_threshold must be 0 (none) or more; it is {self.llm_int8_threshold!r}.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise QuantizationError(f"bnb_4bit_quant_type must be 'fp4' or 'nf4'; it is {self.bnb_4bit_quant_type!r}.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            names = getattr(self, name)
            if names is not None and not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
                raise QuantizationError(f"{name} must be a list of strings; it is {names!r}.")
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.load_in_4bit and self.llm_int8_threshold != DEFAULT_THRESHOLD:
            warnings.warn("llm_int8_threshold has no effect with load_in_4bit: it belongs to 8 bits.", UserWarning, stacklevel=3)
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)


def _dtype(name: str, value: object) -> torch.dtype:
    found = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise QuantizationError(f"{name} must be one of {', '.join(map(repr, _DTYPES))} or a torch dtype; it is {value!r}.")
    if name != "bnb_4bit_quant_storage" and not found.is_floating_point:
        raise QuantizationError(f"{name} must be a floating dtype; it is {found}.")
    return found


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model is packed, whatever form of config asked for it."""

    format: PackedFormat
    compute_dtype: torch.dtype | None = None
    """4-bit: what the arithmetic runs in; None for that of the inputs."""
    threshold: float = DEFAULT_THRESHOLD
    """8-bit: activations above it are multiplied in floating point."""
    dtype: torch.dtype | None = None
    """Of what is not packed; None for what loading gives it."""
    keep_in_fp32: tuple[str, ...] = ()
    """Names of modules that are left in float32."""


def scheme_of(config: object) -> Scheme:
    """The scheme of a `BnbQuantizationConfig`, of an object with the attributes of transformers' `BitsAndBytesConfig`, or of such a config
    as a mapping, as `config.json` has it; or of a packed format or its name (`"nf4"`, `"fp8"`).

    Raises `QuantizationError` for what is none of these, and for what only training on top of unpacked 8-bit weights needs.
    """
    if isinstance(config, Scheme):
        return config
    if isinstance(config, str | PackedFormat):
        return Scheme(weight_format(config) if isinstance(config, str) else config)
    given: Any = _from_mapping(config) if isinstance(config, Mapping) else config
    if not hasattr(given, "load_in_4bit") or not hasattr(given, "load_in_8bit"):
        raise QuantizationError(
            f"{type(config).__name__} is no config of bitsandbytes: give a BnbQuantizationConfig, transformers' BitsAndBytesConfig, or the "
            f"name of a packed format ({', '.join(FORMAT_NAMES)})."
        )
    if getattr(given, "llm_int8_has_fp16_weight", False):
        raise QuantizationError("llm_int8_has_fp16_weight=True keeps the weights unpacked: load the model without quantization instead.")
    ours = isinstance(given, BnbQuantizationConfig)
    skipped = given.skip_modules if ours else given.llm_int8_skip_modules
    in_fp32 = tuple(getattr(given, "keep_in_fp32_modules", None) or ())
    checked = BnbQuantizationConfig(
        load_in_8bit=given.load_in_8bit,
        load_in_4bit=given.load_in_4bit,
        bnb_4bit_quant_type=given.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=given.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=_torch_dtype(given.bnb_4bit_compute_dtype),
        skip_modules=None if skipped is None else list(skipped),
    )
    left = None if skipped is None else tuple(skipped)
    tables = bool(getattr(given, "pack_embeddings", False))
    found: PackedFormat
    if checked.load_in_8bit:
        found = Int8(skip_modules=left, kept=in_fp32, embeddings=tables)
    else:
        storage = torch.uint8 if ours else _dtype("bnb_4bit_quant_storage", _torch_dtype(given.bnb_4bit_quant_storage))
        kind, double = checked.bnb_4bit_quant_type, checked.bnb_4bit_use_double_quant
        found = FourBit(kind, double, storage, skip_modules=left, kept=in_fp32, embeddings=tables)
    assert isinstance(checked.bnb_4bit_compute_dtype, torch.dtype)
    return Scheme(found, checked.bnb_4bit_compute_dtype, float(given.llm_int8_threshold), given.torch_dtype if ours else None, in_fp32)


def _from_mapping(config: Mapping[str, Any]) -> Any:
    """A config from the names of either class: ours where one is among them that only ours has, else transformers'."""
    if not {"load_in_4bit", "load_in_8bit"} & set(config):
        return config
    own = [each.name for each in fields(BnbQuantizationConfig) if each.init]
    for key in config:
        near = difflib.get_close_matches(key, [*own, *_DEFAULTS, *_FURTHER], 1, 0.8)
        if near and key not in near:
            raise QuantizationError(f"{key!r} is no name of a config; did you mean {near[0]!r}?")
    if set(config) <= set(own) and not set(config) <= set(_DEFAULTS):
        return BnbQuantizationConfig(**config)
    return SimpleNamespace(**{**_DEFAULTS, **config})


_FURTHER: Final = ("_load_in_4bit", "_load_in_8bit", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "quant_method")
"""What transformers' configs say besides."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "load_in_8bit": False,
    "load_in_4bit": False,
    "llm_int8_threshold": DEFAULT_THRESHOLD,
    "llm_int8_skip_modules": None,
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": torch.float32,
    "bnb_4bit_quant_storage": torch.uint8,
}


def _torch_dtype(value: object) -> Any:
    """The dtype of a name such as `"bfloat16"`; other values as they are."""
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


def transformers_config(scheme: Scheme, left: Collection[str]) -> dict[str, Any] | None:
    """The scheme as a `config.json` has it (`quantization_config`), for transformers to load what was saved. `left`: unpacked layers.

    None for a format that transformers cannot load.
    """
    packing = scheme.format
    if not isinstance(packing, FourBit | Int8):
        return packing.for_transformers(sorted(left))
    four = packing if isinstance(packing, FourBit) else None
    compute = scheme.compute_dtype or torch.float32
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four is not None,
        "load_in_8bit": four is None,
        "llm_int8_threshold": scheme.threshold,
        "llm_int8_skip_modules": sorted(left) or None,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_quant_type": four.quant_type if four else "fp4",
        "bnb_4bit_use_double_quant": four.double_quant if four else False,
        "bnb_4bit_compute_dtype": str(compute).removeprefix("torch."),
        "bnb_4bit_quant_storage": str(four.storage if four else torch.uint8).removeprefix("torch."),
    }
