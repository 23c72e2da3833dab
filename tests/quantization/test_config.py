"""Configs: what is refused, what becomes what, and that use never changes them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import BitsAndBytesConfig

from bigmodel.errors import QuantizationError
from bigmodel.planning import CustomDtype
from bigmodel.quantization import BnbQuantizationConfig, FourBit, Int8, scheme_of, transformers_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "can't be both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "can't be both True"),
        ({"load_in_8bit": 1}, "load_in_8bit must be a bool"),
        ({"load_in_8bit": True, "load_in_4bit": None}, "load_in_4bit must be a bool"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type must be 'fp4' or 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": 4}, "bnb_4bit_quant_type"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant must be a bool"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}, "bnb_4bit_compute_dtype must be one of 'fp32', 'fp16', 'bf16'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": 16}, "bnb_4bit_compute_dtype"),
        ({"load_in_8bit": True, "torch_dtype": "half"}, "torch_dtype must be one of"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold"),
        ({"load_in_8bit": True, "skip_modules": "lm_head"}, "skip_modules must be a list"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": ("norm",)}, "keep_in_fp32_modules must be a list"),
        ({"load_in_8bit": True, "skip_modules": [1]}, "skip_modules must be a list of strings"),
        ({"load_in_8bit": True, "llm_int8_threshold": -1}, "llm_int8_threshold must be 0"),
        ({"load_in_8bit": True, "llm_int8_threshold": float("nan")}, "llm_int8_threshold must be 0"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.int8}, "bnb_4bit_compute_dtype must be a floating dtype"),
        ({"load_in_4bit": True, "torch_dtype": torch.int8}, "torch_dtype must be a floating dtype"),
    ],
)
def test_mistakes_are_value_errors_that_name_the_argument(arguments, message):
    with pytest.raises(QuantizationError, match=message) as caught:
        BnbQuantizationConfig(**arguments)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_dtype_names_become_torch_dtypes(name, dtype):
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=name)
    assert config.bnb_4bit_compute_dtype == dtype
    assert config.torch_dtype == dtype  # 4-bit: the compute dtype
    assert BnbQuantizationConfig(load_in_8bit=True, torch_dtype=name).torch_dtype == dtype


def test_defaults():
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.torch_dtype, eight.target_dtype, eight.llm_int8_threshold) == (torch.float16, torch.int8, 6.0)
    four = BnbQuantizationConfig(load_in_4bit=True)
    assert (four.torch_dtype, four.target_dtype, four.bnb_4bit_quant_type) == (torch.float16, CustomDtype.INT4, "fp4")


def test_configs_may_be_mappings_with_the_names_of_either_class():
    assert scheme_of({"load_in_8bit": True}).format == Int8()
    assert scheme_of({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}).dtype is None
    ours = scheme_of({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "skip_modules": ["head"], "pack_embeddings": True})
    assert ours.format == FourBit("nf4", skip_modules=("head",), embeddings=True)
    assert ours.dtype == torch.float16
    with pytest.raises(QuantizationError, match="'bnb_4bit_quant_tpye' is no name of a config; did you mean 'bnb_4bit_quant_type'"):
        scheme_of({"load_in_4bit": True, "bnb_4bit_quant_tpye": "nf4"})
    with pytest.raises(QuantizationError, match="dict is no config"):
        scheme_of({"bits": 4})


def test_a_threshold_that_has_no_effect_is_told():
    with pytest.warns(UserWarning, match="llm_int8_threshold has no effect with load_in_4bit"):
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=4.0)


def test_the_scheme_of_a_config_leaves_it_alone():
    config = BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bf16",
        skip_modules=["head"],
        keep_in_fp32_modules=["norm"],
    )
    before = copy.deepcopy(config)
    scheme = scheme_of(config)
    assert config == before
    assert scheme.format == FourBit("nf4", True, skip_modules=("head",), kept=("norm",))
    assert (scheme.compute_dtype, scheme.dtype, scheme.keep_in_fp32) == (torch.bfloat16, torch.bfloat16, ("norm",))


def test_a_config_of_transformers_is_taken_by_its_attributes():
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage="float16",
        llm_int8_skip_modules=["score"],
    )
    before = config.to_dict()
    scheme = scheme_of(config)
    assert config.to_dict() == before
    assert scheme.format == FourBit("nf4", storage=torch.float16, skip_modules=("score",))
    assert scheme.dtype is None  # loading decides
    eight = scheme_of(BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=5.0))
    assert eight.format == Int8()
    assert eight.threshold == 5.0


@pytest.mark.parametrize(
    "config",
    [
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=5.0),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
    ],
)
def test_a_scheme_goes_through_config_json_and_transformers(config):
    scheme = scheme_of(config)
    written = transformers_config(scheme, ["lm_head"])
    read = scheme_of(BitsAndBytesConfig.from_dict({key: value for key, value in written.items() if key != "quant_method"}))
    assert read.format == dataclasses.replace(scheme.format, skip_modules=("lm_head",))
    assert scheme_of(written) == read
    assert (read.compute_dtype, read.threshold) == (scheme.compute_dtype, scheme.threshold)


def test_what_is_no_config_or_keeps_weights_unpacked_is_refused():
    with pytest.raises(QuantizationError, match="dict is no config of bitsandbytes"):
        scheme_of({"quant_method": "gptq", "bits": 4})
    with pytest.raises(QuantizationError, match="llm_int8_has_fp16_weight=True keeps the weights unpacked"):
        scheme_of(BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True))
