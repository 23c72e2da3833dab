"""`infer_auto_device_map`: what scripts expect in plain cases, and better where the walk wastes room."""

from __future__ import annotations

import logging
from collections import OrderedDict

import pytest
import torch
from model_for_test import ModelForTest
from planning_models import Block, Decoder, bytes_on
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.planning import check_device_map, compute_module_sizes, fallback_allocate, infer_auto_device_map

pytestmark = pytest.mark.filterwarnings("ignore:Current model requires")


def three() -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"layer{number}", ModelForTest()) for number in (1, 2, 3)))


@pytest.mark.parametrize(
    ("max_memory", "expected"),
    [
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 200, 1: 172, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 200, 1: 150, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 2}),
        ({0: 236}, {"": 0}),
        ({0: 235}, {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}),
        ({0: 200, "cpu": 1000}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
        ({0: 10}, {"": "disk"}),
        ({0: 10, "cpu": 1000}, {"": "cpu"}),
        ({"cpu": 1000}, {"": "cpu"}),
        ({0: 0, 1: 236}, {"": 1}),
    ],
)
def test_the_plain_model_goes_where_scripts_expect(max_memory, expected):
    found = infer_auto_device_map(ModelForTest(), max_memory=max_memory)
    assert found == expected
    assert isinstance(found, OrderedDict)


@pytest.mark.parametrize("no_split", [["ModelForTest"], "ModelForTest", {"ModelForTest"}])
def test_classes_that_must_not_be_split_are_not(no_split):
    found = infer_auto_device_map(three(), {0: 500, 1: 500}, no_split_module_classes=no_split)
    assert found == {"layer1": 0, "layer2": 1, "layer3": 1}
    found = infer_auto_device_map(three(), {0: 600}, no_split_module_classes=no_split)
    assert found == {"layer1": 0, "layer2": 0, "layer3": "disk"}  # whose largest part, of 100 bytes, has room to pass through
    found = infer_auto_device_map(three(), {0: 571}, no_split_module_classes=no_split)
    assert found == {"layer1": 0, "layer2": "disk", "layer3": "disk"}


def test_without_such_classes_a_module_is_split_into_its_children():
    found = infer_auto_device_map(three(), {0: 500, 1: 500})
    assert found == {"layer1": 0, "layer2.linear1": 0, "layer2.batchnorm": 0, "layer2.linear2": 1, "layer3": 1}
    full = infer_auto_device_map(three(), {0: 500, 1: 500}, clean_result=False)
    assert full["layer1.linear1"] == 0
    assert len(full) == 9


def test_a_tied_layer_goes_where_its_partner_is():
    model = three()
    model.layer3.linear2.weight = model.layer1.linear2.weight
    found = infer_auto_device_map(model, {0: 400, 1: 500})
    assert found == {"layer1": 0, "layer3.linear2": 0, "layer2": 1, "layer3.linear1": 1, "layer3.batchnorm": 1}
    model.layer2.linear2.weight = model.layer1.linear2.weight
    found = infer_auto_device_map(model, {0: 400, 1: 500})
    assert {name for name, device in found.items() if device == 0} == {"layer1", "layer2.linear2", "layer3.linear2"}


def test_several_groups_of_ties():
    model = nn.Sequential(OrderedDict(linear1=nn.Linear(4, 4), linear2=nn.Linear(6, 6), linear3=nn.Linear(4, 4), linear4=nn.Linear(6, 6)))
    model.linear3.weight, model.linear3.bias = model.linear1.weight, model.linear1.bias
    assert infer_auto_device_map(model, {0: 250, 1: 400}) == {"linear1": 0, "linear2": 1, "linear3": 0, "linear4": 1}


def test_ties_are_told_from_names_that_merely_begin_alike():
    model = nn.Module()
    model.compute = nn.Linear(4, 4)
    model.compute_more = nn.Linear(4, 4)
    model.last = nn.Linear(4, 4)
    model.last.weight = model.compute.weight
    found = infer_auto_device_map(model, {0: 100, 1: 100})
    assert found["compute"] == found["last"] != found["compute_more"]


def test_decoder_that_shares_every_layer_with_the_encoder():
    model = nn.Module()
    model.encoder = nn.ModuleList([Block(4) for _ in range(12)])
    model.decoder = nn.ModuleList([Block(4) for _ in range(12)])
    for first, second in zip(model.encoder, model.decoder, strict=True):
        second.up.weight, second.down.weight = first.up.weight, first.down.weight
    layer = 2 * 4 * 4 * 4
    found = infer_auto_device_map(model, {0: 5 * layer, "cpu": 100 * layer}, clean_result=False)
    for index in range(12):
        assert found[f"encoder.{index}"] == found[f"decoder.{index}"]
    assert bytes_on(model, found, 0) == 4 * layer  # parts of the others pass through
    assert set(infer_auto_device_map(model, {0: 12 * layer}).values()) == {0}


def test_direct_tensors_of_a_split_module_are_in_the_map():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model.register_buffer("mean", torch.zeros(4))
    found = infer_auto_device_map(model, {0: 120, 1: 120}, clean_result=False)
    assert set(found) == {"0", "1", "scale", "mean"}
    check_device_map(model, found)


def test_direct_tensors_of_one_module_stay_together():
    model = nn.Sequential(nn.Linear(4, 4))
    for name in ("first", "second", "third"):
        model.register_parameter(name, nn.Parameter(torch.ones(10)))
    found = infer_auto_device_map(model, {0: 100, 1: 150, 2: 150}, clean_result=False)
    assert found["first"] == found["second"] == found["third"]


def test_nothing_is_offloaded_that_fits():
    model = Decoder(blocks=10, width=16, vocabulary=1)
    block = 8 * 16 * 16
    total = compute_module_sizes(model)[""]
    found = infer_auto_device_map(model, {0: 5 * block + block // 2, 1: 5 * block + block // 2, "cpu": total})
    assert set(found.values()) == {0, 1}
    assert [found[f"layers.{index}"] for index in range(10)] == [0] * 5 + [1] * 5
    assert bytes_on(model, found, 0) + bytes_on(model, found, 1) == total


def test_eight_small_cards_behind_a_large_embedding():
    model = Decoder(blocks=24, width=16, vocabulary=600)
    total = compute_module_sizes(model)[""]
    embedding = 600 * 16 * 4
    budgets = {index: max(int(total * 0.14), embedding) for index in range(8)}
    found = infer_auto_device_map(model, {**budgets, "cpu": total})
    assert "cpu" not in found.values()
    for index, budget in budgets.items():
        assert bytes_on(model, found, index) <= budget


def test_a_residual_block_is_not_cut():
    model = Decoder(blocks=4)
    block = 8 * 16 * 16
    found = infer_auto_device_map(model, {0: int(2.5 * block), 1: int(2.5 * block), 2: 10**6})
    assert not any(name.endswith((".up", ".down")) for name in found)


def test_the_main_device_comes_first_in_the_map():
    model = Decoder(blocks=20, vocabulary=400)
    block = 8 * 16 * 16
    found = infer_auto_device_map(model, {0: 16 * block, 1: 6 * block, "cpu": 10**6})
    assert found["embed"] == found["head"] == "cpu"  # 12.5 blocks each
    assert next(iter(found.values())) == 0
    assert bytes_on(model, found, 1) == 6 * block


def test_up_casts_count_up():
    model = ModelForTest().half()
    assert infer_auto_device_map(model, {0: 235}, dtype=torch.float16) == {"": 0}
    assert infer_auto_device_map(model, {0: 235}, dtype=torch.float32) == {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}


def test_a_disk_budget_is_kept():
    model = ModelForTest()
    assert infer_auto_device_map(model, {"cpu": 164, "disk": 172}) == {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}
    with pytest.raises(PlanError, match=r"no room for 1 of 3 parts .*'batchnorm' with 72"):
        infer_auto_device_map(model, {"cpu": 64, "disk": 100})


def test_an_empty_model_is_refused():
    with pytest.raises(PlanError, match="Sequential has no parameters"):
        infer_auto_device_map(nn.Sequential(nn.ReLU()), {0: 10})


def test_a_model_that_is_one_layer():
    assert infer_auto_device_map(nn.Linear(3, 4), {0: 64}) == {"": 0}
    assert infer_auto_device_map(nn.Linear(3, 4), {0: 63, "cpu": 64}) == {"": "cpu"}


def with_buffers() -> ModelForTest:
    model = ModelForTest()
    for name, rows in (("linear1", 2), ("batchnorm", 3), ("linear2", 3)):
        model.get_submodule(name).register_buffer("test_buffer", torch.rand(10, rows))
    return model  # 144, 192 and 220 bytes, of which 80, 160 and 120 are buffers


def test_buffers_that_stay_and_fit_nowhere_are_told():
    with pytest.warns(UserWarning, match="requires 280 bytes of buffer for offloaded layers"):
        found = infer_auto_device_map(with_buffers(), {0: 400, "cpu": "1GB"})
    assert found == {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}


@pytest.mark.filterwarnings("error")
def test_buffers_that_travel_or_fit_are_no_matter():
    infer_auto_device_map(with_buffers(), {0: 400, "cpu": "1GB"}, offload_buffers=True)
    infer_auto_device_map(with_buffers(), {"cpu": "1GB"})
    assert "cpu" not in infer_auto_device_map(with_buffers(), {0: 400, 1: 400, "cpu": "1GB"}).values()


def test_devices_that_get_nothing_are_reported(caplog):
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(ModelForTest(), {0: 10, "cpu": 1000})
    assert "insufficient memory" in caplog.text
    assert "  - 0: 64 bytes required" in caplog.text


def test_fallback_allocation_is_not_needed_to_fill_a_device():
    inner = nn.Sequential(OrderedDict(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4), linear3=nn.Linear(4, 8)))
    model = nn.Sequential(OrderedDict(module=inner))
    for fallback in (True, False):
        found = infer_auto_device_map(model, {0: 420, "cpu": 1000}, fallback_allocation=fallback)
        assert 0 in found.values()
    assert 0 in infer_auto_device_map(model, {0: 256}, fallback_allocation=True).values()


def test_fallback_finds_the_first_part_that_is_small_enough():
    model = nn.Sequential(OrderedDict(module=nn.Sequential(OrderedDict(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4)))))
    sizes = compute_module_sizes(model)
    modules = list(model.named_children())
    name, module, rest = fallback_allocate(modules, sizes, 100)
    assert (name, module) == ("module.linear2", model.module.linear2)
    assert [left for left, _ in rest] == ["module.linear1"]
    assert fallback_allocate(modules, sizes, -1) == (None, None, modules)
    assert fallback_allocate(modules, sizes, 100, no_split_module_classes=["Sequential"]) == (None, None, modules)
    tied = [["module.linear2.weight", "module.linear1.weight"]]
    assert fallback_allocate(modules, sizes, 1000, tied_parameters=tied)[0] == "module"


def test_ties_that_were_lost_are_told(caplog):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with caplog.at_level(logging.WARNING):
        infer_auto_device_map(model, {0: 10**6})
    assert "The model weights are not tied" in caplog.text


def test_placements_are_printed_on_demand(capsys):
    infer_auto_device_map(ModelForTest(), {0: 235, "cpu": 99})
    assert capsys.readouterr().out == ""
    infer_auto_device_map(ModelForTest(), {0: 235, "cpu": 99}, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "Putting linear1 on 0 (size=64)",
        "Putting batchnorm on disk (size=72)",
        "  Not enough space on 0: 71 of 235 bytes are left, 100 are kept for the weights that pass through",
        "  Not on cpu: 99 of 99 bytes are left; devices are filled in the order of the model, with room for the largest layer to come",
        "Putting linear2 on disk (size=100)",
        "  Not enough space on 0: 71 of 235 bytes are left, 100 are kept for the weights that pass through",
        "  Not enough space on cpu: 99 of 99 bytes are left",
    ]


def test_all_that_is_placed_is_printed(capsys):
    device_map = infer_auto_device_map(Decoder(tied=True), {0: 3000, "cpu": 2000}, verbose=True, clean_result=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Putting")]
    printed = {}
    for line in lines:
        names, _, rest = line.removeprefix("Putting ").partition(" on ")
        printed |= {name: rest.partition(" (size=")[0] for name in names.split(" and ")}
    assert printed == {name: str(device) for name, device in device_map.items()}
