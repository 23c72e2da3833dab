"""`load_and_quantize_model` and the calls around it, under the names that scripts know."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from quantized_models import TOKENS, empty_net, saved_net, with_bitsandbytes
from torch import nn

import bigmodel
from bigmodel import DispatchError, MatchError, PlanError, QuantizationError
from bigmodel.quantization import Int8, pack, packed_layers
from bigmodel.utils import (
    BnbQuantizationConfig,
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    has_4bit_bnb_layers,
    load_and_quantize_model,
    load_offloaded_weight,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)

FOUR = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32")
EIGHT = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("config", [FOUR, EIGHT])
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu", "layers.1": "disk"}])
def test_a_model_on_meta_is_packed_from_its_checkpoint(tmp_path, config, device_map):
    net = saved_net(tmp_path)
    before = copy.deepcopy(config)
    model = load_and_quantize_model(
        empty_net(), config, weights_location=tmp_path, device_map=device_map, max_memory={"cpu": "1GB"}, offload_folder=tmp_path / "kept"
    )
    assert config == before
    assert torch.equal(output(model), output(with_bitsandbytes(net, config)))
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (config.load_in_4bit, config.load_in_8bit)
    assert has_4bit_bnb_layers(model) == config.load_in_4bit
    assert not packed_layers(model)["layers.0.up"].weight.requires_grad
    assert not model.layers[0].up.bias.requires_grad


@pytest.mark.parametrize("config", [FOUR, EIGHT])
def test_a_loaded_model_is_packed_where_it_is_with_a_warning(tmp_path, config, caplog):
    net = saved_net(tmp_path)
    expected = output(with_bitsandbytes(net, config))
    with caplog.at_level(logging.WARNING):
        model = load_and_quantize_model(net, config)
    assert "not recommended to quantize a loaded model" in caplog.text
    assert model is net
    assert torch.equal(output(model), expected)
    assert model.hf_device_map == {"": "cpu"}


def test_a_loaded_model_is_cast_and_what_is_kept_in_float32_is_not(tmp_path):
    config = BnbQuantizationConfig(load_in_4bit=True, torch_dtype="bf16", keep_in_fp32_modules=["norm", "layers.1"])
    model = load_and_quantize_model(saved_net(tmp_path), config)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.layers[0].norm.weight.dtype == torch.float32
    assert model.layers[1].up.weight.dtype == torch.float32
    assert model.layers[0].up.absmax.dtype == torch.float32
    assert model.layers[0].up.bias.dtype == torch.bfloat16


def test_a_model_on_meta_needs_a_checkpoint():
    with pytest.raises(MatchError, match="is on meta, so it has no weights to pack: give `weights_location`") as caught:
        load_and_quantize_model(empty_net(), FOUR)
    assert isinstance(caught.value, RuntimeError)


def test_maps_are_planned_with_packed_sizes():
    packed = bigmodel.planning.plan(empty_net(), {"cpu": "1GB"}, weight_format=bigmodel.quantization.scheme_of(FOUR).format).total_bytes
    budgets = {"cpu": packed, "disk": "1GB"}
    assert set(get_quantized_model_device_map(empty_net(), FOUR, "auto", max_memory=budgets).values()) == {"cpu"}
    assert "disk" in bigmodel.infer_auto_device_map(empty_net(), max_memory=budgets).values()
    assert get_quantized_model_device_map(empty_net(), FOUR) == {"": "cpu"}
    given = {"": "cpu", "layers.2": "disk"}
    assert get_quantized_model_device_map(empty_net(), FOUR, given) == given
    with pytest.raises(PlanError):
        get_quantized_model_device_map(empty_net(), FOUR, {"layers": "cpu"})


def test_replacing_keeps_the_head_names_are_exact_and_nothing_to_replace_is_told(tmp_path, caplog):
    net = saved_net(tmp_path)
    bias = net.layers[0].up.bias
    assert get_keys_to_not_convert(net) == ["head"]
    assert replace_with_bnb_layers(net, FOUR) is net
    assert type(net.head) is nn.Linear
    assert len(packed_layers(net)) == 8
    assert net.layers[0].up.bias is bias
    net = saved_net(tmp_path)
    replace_with_bnb_layers(net, EIGHT, modules_to_not_convert=["layers.1", "head"])
    assert sorted(packed_layers(net)) == [f"layers.{n}.{name}" for n in (0, 2, 3) for name in ("down", "up")]
    with caplog.at_level(logging.WARNING):
        replace_with_bnb_layers(nn.Sequential(nn.ReLU()), FOUR)
    assert "No linear layer of Sequential was replaced" in caplog.text


@pytest.mark.parametrize(("config", "error"), [(FOUR, ValueError), (EIGHT, ImportError)])
def test_an_old_bitsandbytes_is_refused_with_both_releases(monkeypatch, config, error):
    monkeypatch.setattr("bigmodel.quantize.version", lambda _: "0.43.1")
    with pytest.raises(error, match=r"bitsandbytes 0.43.1 is installed; .* needs 0.50 or newer"):
        load_and_quantize_model(empty_net(), config)


def test_what_is_no_config_is_refused():
    for wrong, message in ((4, "int is no config"), ({"bits": 4}, "dict is no config"), ("4bit", "'4bit' is no packed format")):
        with pytest.raises(QuantizationError, match=message):
            load_and_quantize_model(empty_net(), wrong)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_weight_is_offloaded_in_8_bits_with_its_scales(tmp_path, is_packed):
    model = nn.Sequential(nn.Linear(8, 4))
    expected = pack(model[0].weight.to(torch.float16), Int8())
    index = {}
    value, scales = (expected["weight"], expected["SCB"]) if is_packed else (model[0].weight, None)
    quantize_and_offload_8bit(model, value, "0.weight", torch.float16, tmp_path, index, scales)
    assert sorted(index) == ["0.SCB", "0.weight"]
    assert torch.equal(load_offloaded_weight(tmp_path / "0.weight.dat", index["0.weight"]), expected["weight"])
    assert torch.equal(load_offloaded_weight(tmp_path / "0.SCB.dat", index["0.SCB"]), expected["SCB"])
    assert model[0].weight.is_meta


def test_the_device_of_a_module_is_that_of_its_first_tensor_or_where_it_runs(tmp_path, accelerators):
    accelerators(1, check_leaks=False)
    assert get_parameter_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert get_parameter_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert get_parameter_device(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")
    holder = nn.Module()
    holder.table = torch.zeros(2)
    assert get_parameter_device(nn.Sequential(holder)) == torch.device("cpu")
    with pytest.raises(DispatchError, match="ReLU holds no tensor"):
        get_parameter_device(nn.ReLU())
    saved_net(tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True)
    device_map = {"embed": 0, "layers": "disk", "head": 0}
    model = load_and_quantize_model(empty_net(), config, weights_location=tmp_path, device_map=device_map)
    main = get_parameter_device(model)
    assert main.type != "cpu"
    assert get_parameter_device(model.layers) == main


def test_a_model_that_is_packed_or_dispatched_already_is_refused(tmp_path):
    net = saved_net(tmp_path)
    packed = load_and_quantize_model(copy.deepcopy(net), FOUR, device_map={"": "cpu"})
    before = packed.state_dict()
    for config in (FOUR, BnbQuantizationConfig(load_in_8bit=True)):
        with pytest.raises(QuantizationError, match=r"Net is packed already \(.*\): load it anew"):
            load_and_quantize_model(packed, config, device_map={"": "cpu"})
    assert packed.state_dict().keys() == before.keys()
    away = bigmodel.load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu", "layers.1": "disk"})
    for call in (load_and_quantize_model, replace_with_bnb_layers):
        with pytest.raises(QuantizationError, match=r"Net is dispatched.*undispatch"):
            call(away, FOUR)
    with torch.no_grad():
        assert torch.equal(away(TOKENS), net(TOKENS))


def test_names_that_are_left_and_name_nothing_are_told(tmp_path, caplog):
    saved_net(tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["head", "layers.1", "layer.2"], keep_in_fp32_modules=["norm", "nrom"])
    load_and_quantize_model(empty_net(), config, weights_location=tmp_path, device_map={"": "cpu"})
    assert "Net has nothing of the names that were to be left unpacked: layer.2, nrom." in caplog.text


def test_a_cast_of_inputs_is_told_once(tmp_path, caplog):
    saved_net(tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    model = load_and_quantize_model(empty_net(), config, weights_location=tmp_path, device_map={"": "cpu"})
    for _ in range(3):
        model(TOKENS)
    assert caplog.text.count("inputs will be cast") <= 1
