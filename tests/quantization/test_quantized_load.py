"""Quantized loading through the public calls: values, places, bytes, what is refused."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace

import bitsandbytes
import pytest
import torch
from quantized_models import TOKENS, Block, empty_net, return_free_memory, saved_net, with_bitsandbytes
from safetensors.torch import load_file, save_file
from torch import nn

from bigmodel import (
    Checkpoint,
    CheckpointError,
    MatchError,
    PlanError,
    QuantizationError,
    cpu_offload,
    dispatch_model,
    load_and_dispatch,
    load_checkpoint_and_dispatch,
    placement,
    save_model,
    undispatch,
)
from bigmodel.loading import Whole
from bigmodel.measure import PeakPrivateMemory
from bigmodel.planning import plan
from bigmodel.quantization import BnbQuantizationConfig, packed_layers, scheme_of, weight_format

CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"},
    "nf4-dq": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bf16",
        "torch_dtype": "fp32",
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
    "int8": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "int8 in bfloat16": {"load_in_8bit": True, "torch_dtype": "bf16", "llm_int8_threshold": 2.0},
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return BnbQuantizationConfig(**CONFIGS[request.param])


NF4 = BnbQuantizationConfig(**CONFIGS["nf4"])


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


MAPS = {
    "cpu": {"": "cpu"},
    "none": None,
    "blocks on disk": {"": "cpu", "layers.0": "disk", "layers.2": "disk"},
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_outputs_are_those_of_bitsandbytes_own_layers_wherever_weights_rest(tmp_path, config, device_map):
    net = saved_net(tmp_path)
    before = copy.deepcopy(config)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
    assert config == before
    assert torch.equal(output(model), output(with_bitsandbytes(net, config)))
    assert torch.equal(output(model), output(with_bitsandbytes(net, config)))  # nothing was used up by the first forward
    assert sorted(packed_layers(model)) == sorted(f"layers.{n}.{name}" for n in range(4) for name in ("up", "down"))
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (config.load_in_4bit, config.load_in_8bit)


def test_packed_weights_travel_with_their_companions(tmp_path, accelerators, config):
    accelerators(1, check_leaks=False)  # bitsandbytes keeps small tables on each device
    net = saved_net(tmp_path)
    device_map = {"embed": 0, "layers.0": 0, "layers.1": "cpu", "layers.2": "disk", "layers.3": "disk", "head": 0}
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
    expected = output(with_bitsandbytes(net, config))
    for _ in range(2):
        assert torch.equal(output(model).cpu(), expected)
    rests = {row.name: row.rests for row in placement(model).rows if row.counters is not None}
    assert rests == {"layers.1": "cpu", "layers.2": "disk", "layers.3": "disk"}
    assert not placement(model).outside_reads


def test_planned_bytes_are_the_loaded_ones(tmp_path, config):
    saved_net(tmp_path)
    packing = scheme_of(config).format
    planned = plan(empty_net(), {"cpu": "1GB"}, dtype=config.torch_dtype, weight_format=packing)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map="auto", max_memory={"cpu": "1GB"}, quantization=config)
    assert planned.total_bytes == sum(tensor.untyped_storage().nbytes() for tensor in model.parameters())
    again = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=planned, quantization=config)
    assert torch.equal(output(again), output(model))
    with pytest.raises(PlanError, match=f"packed as {packing.name}"):
        load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=planned)


def test_a_model_that_fits_only_packed_stays_where_it_computes(tmp_path):
    saved_net(tmp_path)
    with torch.device("meta"):
        total = plan(empty_net(), {"cpu": "1GB"}, weight_format=weight_format("nf4")).total_bytes
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map="auto", max_memory={"cpu": total, "disk": 0}, quantization=NF4)
    assert set(model.hf_device_map.values()) == {"cpu"}


def test_modules_are_skipped_and_kept_in_float32_by_name(tmp_path):
    saved_net(tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["layers.1", "head"], keep_in_fp32_modules=["layers.2.up", "norm"])
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config)
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters() if name.endswith("weight")}
    assert dtypes["layers.0.up.weight"] == torch.int8
    assert dtypes["layers.1.up.weight"] == torch.float16
    assert dtypes["layers.2.up.weight"] == torch.float32
    assert dtypes["layers.2.down.weight"] == torch.int8
    assert dtypes["layers.0.norm.weight"] == torch.float32
    assert dtypes["head.weight"] == torch.float16


def test_packed_models_are_saved_and_loaded_without_packing_again(tmp_path, config):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu", "layers.1": "disk"}, quantization=config)
    save_model(model, tmp_path / "packed")
    theirs = with_bitsandbytes(saved_net(tmp_path), config).state_dict()
    saved = load_file(tmp_path / "packed" / "model.safetensors")
    assert sorted(saved) == sorted(theirs)
    assert all(torch.equal(saved[name], value) for name, value in theirs.items())
    for device_map in ({"": "cpu"}, {"": "cpu", "layers.2": "disk"}):
        for asked in (config, None):
            again = load_checkpoint_and_dispatch(
                empty_net(config.torch_dtype), tmp_path / "packed", device_map=device_map, quantization=asked
            )
            if asked is not None:
                assert torch.equal(output(again), output(model))
            assert sorted(packed_layers(again)) == sorted(packed_layers(model))


def test_state_dicts_of_bitsandbytes_own_layers_load(tmp_path, config):
    theirs = with_bitsandbytes(saved_net(tmp_path), config)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config)
    assert torch.equal(output(model), output(theirs))


def test_a_second_load_reads_the_kept_packed_weights(tmp_path, config):
    saved_net(tmp_path)
    first = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config, packed_cache=True)
    (file,) = (tmp_path / ".bigmodel-packed").iterdir()
    before = file.stat().st_mtime_ns
    second = load_checkpoint_and_dispatch(
        empty_net(), tmp_path, device_map={"": "cpu", "layers.0": "disk"}, quantization=config, packed_cache=True
    )
    assert torch.equal(output(first), output(second))
    assert file.stat().st_mtime_ns == before
    saved_net(tmp_path)  # written anew: another checkpoint, as far as anybody can tell
    load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config, packed_cache=True)
    assert len(list((tmp_path / ".bigmodel-packed").iterdir())) == 2


def test_kept_packed_weights_are_those_of_the_same_dtype_layers_and_rules(tmp_path):
    saved_net(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    swap = {"layers.0.up": "layers.1.up", "layers.1.up": "layers.0.up"}

    class Swapped:
        def sources(self, entries, targets):
            found = {}
            for name in targets:
                module, _, last = name.rpartition(".")
                found[name] = Whole(f"{swap.get(module, module)}.{last}")
            return found, []

    loads = [
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"dtype": "float16", "rules": Swapped()},
        {"dtype_of": lambda name, spec, in_file: torch.bfloat16},
        {"net": torch.bfloat16},
        {"net": torch.float16},
        {"dtype": torch.float32, "quantization": replace(NF4, skip_modules=["layers.1"])},
        {"dtype": torch.float32, "quantization": replace(NF4, skip_modules=[], pack_embeddings=True)},
    ]

    def packed_bytes(cache, net=torch.float32, quantization="nf4", **arguments):
        model = load_and_dispatch(
            empty_net(net), checkpoint, device_map={"": "cpu"}, quantization=quantization, packed_cache=cache, **arguments
        )
        return {name: tensor.clone() for name, tensor in model.named_parameters()}

    expected = [packed_bytes(None, **each) for each in loads]
    for number in [*range(len(loads)), *reversed(range(len(loads)))]:
        found = packed_bytes(tmp_path / "kept", **loads[number])
        assert found.keys() == expected[number].keys(), number
        assert all(torch.equal(found[name], expected[number][name]) for name in found), number


def test_a_folder_that_cannot_keep_packed_weights_is_named_before_anything_is_packed(tmp_path, monkeypatch):
    saved_net(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(QuantizationError, match=r"kept.*Give another folder as `packed_cache`, or none"):
        load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=NF4, packed_cache=tmp_path / "kept")


def test_packed_weights_of_other_bits_or_shapes_are_refused_and_the_model_stays(tmp_path):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=NF4)
    save_model(model, tmp_path / "packed")
    net = empty_net()
    with pytest.raises(QuantizationError, match=r"packed as nf4, and the config asks for int8"):
        load_checkpoint_and_dispatch(
            net, tmp_path / "packed", device_map={"": "cpu"}, quantization=BnbQuantizationConfig(load_in_8bit=True)
        )
    net.layers[3].up = nn.Linear(8, 8, device="meta")
    with pytest.raises(MatchError, match=r"layers.3.up.weight was packed from shape \[192, 64\]; the model has \[8, 8\]"):
        load_checkpoint_and_dispatch(net, tmp_path / "packed", device_map={"": "cpu"})
    assert not packed_layers(net)


def test_a_missing_weight_is_named_and_leaves_the_model(tmp_path):
    state = saved_net(tmp_path).state_dict()
    del state["layers.1.up.weight"]
    save_file(state, tmp_path / "model.safetensors")
    net = empty_net()
    with pytest.raises(MatchError, match=r"layers\.1\.up\.weight"):
        load_checkpoint_and_dispatch(net, tmp_path, device_map={"": "cpu"}, quantization=NF4)
    assert not packed_layers(net)
    assert all(tensor.is_meta for tensor in net.parameters())


def test_a_shared_layer_is_packed_once_and_stays_shared(tmp_path):
    net = empty_net()
    net.layers[3] = net.layers[1]
    saved = saved_net(tmp_path)
    saved.layers[3] = saved.layers[1]
    save_file({name: value for name, value in saved.state_dict().items() if "layers.3" not in name}, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(net, tmp_path, device_map={"": "cpu"}, quantization=NF4)
    assert model.layers[3].up is model.layers[1].up
    assert isinstance(model.layers[3], Block)
    reference = with_bitsandbytes(saved, NF4)
    reference.layers[3] = reference.layers[1]
    assert torch.equal(output(model), output(reference))


@pytest.mark.parametrize("config", [NF4, BnbQuantizationConfig(**CONFIGS["int8"]), "fp8"], ids=["nf4", "int8", "fp8"])
def test_gradients_reach_adapters_over_packed_layers_wherever_these_rest(tmp_path, config):
    saved_net(tmp_path)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.full((8, base.in_features), 0.01))
            self.b = nn.Parameter(torch.full((base.out_features, 8), 0.02))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    found = []
    for device_map in ({"": "cpu"}, {"": "cpu", "layers.0": "disk", "layers.1": "disk", "layers.2": "disk"}):
        model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
        model.requires_grad_(False)
        for block in model.layers:
            block.up = Adapted(block.up)
        model.train()
        model(TOKENS).float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        assert len(gradients) == 8
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
        found.append(gradients)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_training_packed_weights_is_refused(tmp_path, config):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=config)
    assert not any(tensor.requires_grad for layer in packed_layers(model).values() for tensor in layer.parameters())
    model.train()  # the rest of the model may be
    scales = next(iter(packed_layers(model).values()))
    next(tensor for tensor in scales.packed_tensors().values() if tensor.is_floating_point()).requires_grad = True
    with pytest.raises(QuantizationError, match=r"Packed weights cannot be trained\. Attach adapters"):
        model.train()
    model.eval()


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"": "cpu", "layers.0": "disk"}], ids=["cpu", "disk", "both"])
def test_asking_packed_weights_for_gradients_is_refused_wherever_they_rest(tmp_path, config, device_map):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=config)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(QuantizationError, match=r"layers\.\d\.\w+ is packed\. Packed weights cannot be trained\. Attach adapters"):
            each.requires_grad_(True)
    packed = {id(tensor) for layer in packed_layers(model).values() for tensor in layer.packed_tensors().values()}
    assert not any(parameter.requires_grad for parameter in model.parameters() if id(parameter) in packed)
    model.requires_grad_(False)
    model.train()  # the refused attempt has left nothing behind


def test_dispatched_packed_models_are_copied_and_taken_apart_again(tmp_path, config):
    net = saved_net(tmp_path)
    expected = output(with_bitsandbytes(net, config))
    model = load_checkpoint_and_dispatch(
        empty_net(), tmp_path, device_map={"": "cpu", "layers.0": "disk", "layers.1": "disk"}, quantization=config
    )
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin), expected)
    undispatch(model)
    kinds = {type(layer.weight) for layer in packed_layers(model).values()}
    assert kinds == {bitsandbytes.nn.Params4bit if config.load_in_4bit else bitsandbytes.nn.Int8Params}
    assert torch.equal(output(model), expected)
    assert torch.equal(output(twin), expected)
    dispatched = dispatch_model(model, {"": "cpu", "layers.2": "disk"}, offload_dir=tmp_path / "offload")
    assert torch.equal(output(dispatched), expected)
    assert torch.equal(output(cpu_offload(undispatch(dispatched))), expected)


def test_packed_blocks_travel_in_parts_through_little_memory(tmp_path, accelerators):
    net = saved_net(tmp_path)
    accelerators(1, check_leaks=False)  # bitsandbytes keeps small tables on each device
    budgets = {0: 30_000, "cpu": "1GB"}
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map="auto", max_memory=budgets, quantization=NF4)
    assert torch.equal(output(model).cpu(), output(with_bitsandbytes(net, NF4)))
    assert "cpu" in model.hf_device_map.values()


def test_no_unpacked_weight_is_ever_in_memory(tmp_path):
    def wide() -> nn.Module:
        layers = [nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(4096, 8, dtype=torch.bfloat16))

    save_file(wide().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = wide()
    largest = model[0].weight.nbytes
    load_checkpoint_and_dispatch(empty_net(), saved_folder(tmp_path), device_map={"": "cpu"}, quantization=NF4)  # imports, threads
    return_free_memory()
    with PeakPrivateMemory() as memory:
        load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", device_map={"": "cpu"}, quantization=NF4)
    packed = sum(tensor.nbytes for tensor in model.parameters())
    assert memory.peak_bytes >= packed // 2  # what is measured is not memory that was free before
    assert memory.peak_bytes <= packed + largest + (32 << 20)  # less than a second weight's worth beyond what stays


def saved_folder(folder):
    inner = folder / "small"
    inner.mkdir()
    saved_net(inner)
    return inner


def test_a_load_that_packs_nothing_says_so_and_why(tmp_path, caplog):
    saved_net(tmp_path)
    arguments = {"device_map": {"": "cpu"}, "quantization": replace(NF4, skip_modules=["layers", "head"])}
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, **arguments)
    assert not packed_layers(model)
    assert "Nothing of Net is packed as nf4: it is the output head, tied, or was asked to be left." in caplog.text


@pytest.mark.parametrize(
    ("config_text", "warned"),
    [(None, False), ("{}", True), ("[]", True), ("{", True), ('{"quantization_config": {"quant_method": "bitsandbytes"}}', False)],
)
def test_packed_weights_beside_a_config_that_does_not_say_so_are_warned_about(tmp_path, caplog, config_text, warned):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, quantization=NF4)
    folder = tmp_path / "packed"
    folder.mkdir()
    if config_text is not None:
        (folder / "config.json").write_text(config_text)
    save_model(model, folder)
    assert ("has no quantization_config" in caplog.text) == warned
    caplog.clear()
    save_model(undispatch(nn.Linear(2, 2)), folder)
    assert not caplog.text


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, "says load_in_8bit True, but '{name}' .* load_in_8bit False"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "says bnb_4bit_quant_type 'fp4', but '{name}' .* 'nf4'"),
        ({"quant_method": "gptq", "bits": 4}, "says quant_method 'gptq', but '{name}' .* as 'bitsandbytes' packs"),
    ],
)
def test_a_config_that_says_another_packing_than_the_weights_have_is_refused(tmp_path, said, says):
    saved_net(tmp_path)
    save_model(load_checkpoint_and_dispatch(empty_net(), tmp_path, quantization=NF4), tmp_path / "packed")
    described = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps({"quantization_config": described}))
    load_checkpoint_and_dispatch(empty_net(), tmp_path / "packed", device_map={"": "cpu"})
    (tmp_path / "packed" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"} | said}))
    model = empty_net()
    with pytest.raises(CheckpointError, match=says.format(name=r"[a-z0-9.]+\.weight")):
        load_checkpoint_and_dispatch(model, tmp_path / "packed", device_map={"": "cpu"})
    assert not packed_layers(model)
