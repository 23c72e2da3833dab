"""`bigmodel.plan` of what is not here: checkpoints by their headers, dumps of headers; packed formats as dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bigmodel
from bigmodel.errors import CheckpointError, CheckpointNotFoundError, PlanError
from bigmodel.protocols import TensorSpec
from bigmodel.quantization import weight_format

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 100)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(Model().state_dict(), path)
    return path


def header(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


BUDGETS = {0: "150KB", "cpu": "1GB"}


def test_all_descriptions_of_a_model_give_the_same_map(file: Path) -> None:
    with bigmodel.init_empty_weights():
        model = Model()
    expected = bigmodel.plan(model, BUDGETS)
    (file.parent / "plain.json").write_text(
        json.dumps({name: {"dtype": "float32", "shape": list(tensor.shape)} for name, tensor in model.state_dict().items()})
    )
    (file.parent / "header.json").write_text(json.dumps(header(file)))
    for source in (Model(), file, str(file), file.parent / "plain.json", header(file), str(file.parent / "header.json")):
        made = bigmodel.plan(source, BUDGETS)
        assert made.device_map == expected.device_map
        assert (made.total_bytes, made.moved_bytes, made.blocks) == (expected.total_bytes, expected.moved_bytes, expected.blocks)
    assert bigmodel.plan(file, BUDGETS).model == "model.safetensors"
    assert expected.model == "Model"
    assert "headers of the checkpoint alone" in " ".join(bigmodel.plan(file, BUDGETS).notes)


def test_a_plan_of_headers_loads_the_model(file: Path) -> None:
    made = bigmodel.plan(header(file), {"cpu": "250KB"})
    assert set(made.device_map.values()) == {"cpu", "disk"}
    with bigmodel.init_empty_weights():
        model = Model()
    loaded = bigmodel.load_checkpoint_and_dispatch(model, file, device_map=made)
    assert torch.equal(bigmodel.get_parameter(loaded, "blocks.5.up.weight"), load_file(file)["blocks.5.up.weight"])


@pytest.mark.parametrize("name", ["nf4", "nf4-dq", "fp4", "int8"])
def test_packed_formats_are_dtypes(file: Path, name: str) -> None:
    made = bigmodel.plan(Model(), {0: "1GB"}, dtype=name)
    assert made.weight_format == name
    packed = weight_format(name)
    inside = sum(packed.packed_bytes(TensorSpec(shape, torch.float32)) for shape in ((128, 64), (64, 128))) + 4 * (128 + 64 + 64 + 64)
    assert made.total_bytes == BLOCKS * inside + 4 * (100 * 64 + 100)
    assert bigmodel.plan(Model(), {0: "1GB"}, dtype=packed) == made
    headers = bigmodel.plan(file, {0: "1GB"}, dtype=name)
    assert (headers.total_bytes, headers.weight_format) == (made.total_bytes, name)


def test_dtypes_are_torch_dtypes_and_their_names() -> None:
    half = bigmodel.plan(Model(), {0: "1GB"}, dtype=torch.float16)
    assert bigmodel.plan(Model(), {0: "1GB"}, dtype="float16") == half
    assert half.total_bytes * 2 == bigmodel.plan(Model(), {0: "1GB"}).total_bytes
    assert bigmodel.plan(Model(), {0: "1GB"}, dtype="auto") == bigmodel.plan(Model(), {0: "1GB"})
    with pytest.raises(PlanError, match="'nf5'"):
        bigmodel.plan(Model(), {0: "1GB"}, dtype="nf5")


@pytest.mark.parametrize("dtype", ["float17", "q4", 3])
def test_what_is_no_dtype_is_told_what_there_is(dtype: Any) -> None:
    with pytest.raises(PlanError, match=f"dtype={dtype!r} is neither a dtype, such as 'bfloat16', nor a packed format .*'nf4'"):
        bigmodel.plan(Model(), BUDGETS, dtype=dtype)


def test_a_packed_format_beside_a_dtype() -> None:
    made = bigmodel.plan(Model(), {0: "1GB"}, weight_format="int8")
    assert (
        made == bigmodel.plan(Model(), {0: "1GB"}, dtype="int8") == bigmodel.plan(Model(), {0: "1GB"}, weight_format=weight_format("int8"))
    )
    rest = 4 * (BLOCKS * (128 + 64 + 64 + 64) + 100 * 64 + 100)
    assert bigmodel.plan(Model(), {0: "1GB"}, dtype="float16", weight_format="int8").total_bytes == made.total_bytes - rest // 2
    with pytest.raises(PlanError, match="both packed formats"):
        bigmodel.plan(Model(), {0: "1GB"}, dtype="nf4", weight_format="int8")
    with pytest.raises(ValueError, match="'nf3' is no packed format"):
        bigmodel.plan(Model(), {0: "1GB"}, weight_format="nf3")


def test_packed_formats_are_advised() -> None:
    said = [each.change for each in bigmodel.plan(Model(), BUDGETS).advice]
    assert "8-bit weights (int8)" in said
    assert "4-bit weights (nf4)" in said
    assert bigmodel.plan(Model(), BUDGETS, advice=False).advice == ()


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="A int cannot be planned"):
        bigmodel.plan(3, BUDGETS)
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        bigmodel.plan(tmp_path / "nowhere", BUDGETS)
    with pytest.raises(CheckpointError, match="'a' lacks"):
        bigmodel.plan({"a": 3}, BUDGETS)
    (tmp_path / "notes.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match=r"notes\.json is not one"):
        bigmodel.plan(tmp_path / "notes.json", BUDGETS)


def test_tens_of_thousands_of_experts_are_planned() -> None:
    experts, layers = 64, 8
    dump = {}
    for layer in range(layers):
        for expert in range(experts):
            for name, shape in (("up", [32, 16]), ("gate", [32, 16]), ("down", [16, 32])):
                dump[f"layers.{layer}.experts.{expert}.{name}.weight"] = {"dtype": "BF16", "shape": shape}
        dump[f"layers.{layer}.norm.weight"] = {"dtype": "BF16", "shape": [16]}
    block = 2 * (experts * 3 * 512 + 16)
    made = bigmodel.plan(dump, {0: 4 * block, "cpu": 4 * block})
    assert made.total_bytes == layers * block
    assert made.blocks == tuple(f"layers.{layer}" for layer in range(layers))
    places = [0] * 3 + ["cpu"] * 4 + ["disk"]  # the offloaded ones pass through in parts
    assert made.device_map == {f"layers.{layer}": place for layer, place in enumerate(places)}


def test_what_changed_nothing_is_told() -> None:
    def notes(**options: Any) -> tuple[str, ...]:
        return bigmodel.plan(Model(), {"cpu": "1GiB"}, **options).notes

    assert notes() == ()
    assert notes(batch=3, logits="last") == (
        "batch and logits changed nothing: room for a run is kept where a context (in tokens) is given.",
    )
    first = next(name for name, _ in Model().named_parameters())
    assert notes(special_dtypes={first: "float16"}) == ()
    assert notes(special_dtypes={first: "float16", "hed.weight": "float16"}) == (
        "special_dtypes names tensors that the model does not have: hed.weight.",
    )
    assert notes(no_split_module_classes="Linear") == ()
    assert notes(no_split_module_classes=["Linear", "Blok"]) == (
        "no_split_module_classes names classes that no module in the model has: Blok.",
    )


def test_classes_are_named_not_handed_over() -> None:
    for made in (bigmodel.plan, bigmodel.infer_auto_device_map):
        with pytest.raises(PlanError, match=r"no_split_module_classes holds <class .*Give names"):
            made(Model(), {"cpu": "1GiB"}, no_split_module_classes=[nn.Linear])


def test_the_name_of_a_model_is_not_empty() -> None:
    with pytest.raises(PlanError, match="name of the model is empty"):
        bigmodel.plan("", BUDGETS)


def test_what_a_configuration_leaves_open_is_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    config.save_pretrained(tmp_path)
    headless = "The configuration names no architecture: this is a LlamaModel, without a head. Give model_class"
    undecided = "The configuration names no dtype: its weights are planned in float32. Give the dtype"
    for source in (config, tmp_path):
        notes = bigmodel.plan(source, {"cpu": "1GiB"}).notes
        assert [note[: len(start)] for note, start in zip(notes, (headless, undecided), strict=True)] == [headless, undecided]
        for dtype in ("bfloat16", torch.float8_e4m3fn):
            assert bigmodel.plan(source, {"cpu": "1GiB"}, dtype=dtype, model_class="AutoModelForCausalLM").notes == ()
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    assert bigmodel.plan(config, {"cpu": "1GiB"}).notes == ()


def test_contexts_beyond_the_models_positions_are_told() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=50, architectures=["GPT2LMHeadModel"], dtype="float32")
    assert bigmodel.plan(config, {"cpu": "1GiB"}, context=1024).notes == ()
    assert bigmodel.plan(config, {"cpu": "1GiB"}, context=1025).notes == (
        "The configuration tells of 1,024 positions: a context of 1,025 tokens is beyond them.",
    )


def test_checkpoints_without_tensors_are_named(tmp_path: Path) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(CheckpointError, match=r"empty\.safetensors: holds no tensors"):
        bigmodel.plan(tmp_path / "empty.safetensors", BUDGETS)


def test_names_of_a_strangers_tensors_do_not_steer_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[31m.weight": torch.ones(3), "b.weight": torch.ones(3)}, tmp_path / "strange.safetensors")
    made = bigmodel.plan(tmp_path / "strange.safetensors", {0: 12, "cpu": "1KiB"})
    assert "\x1b" not in str(made)
    assert "a\ufffd[31m" in str(made)
