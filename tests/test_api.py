"""The ways into the house, as scripts use them: load, dispatch, offload; on CPU with disk and on the simulated accelerator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_for_test import ModelForTest
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.errors import CheckpointError, MatchError, PlanError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, width: int = 16, vocabulary: int = 50, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def checkpoint_of(model: nn.Module, folder: Path, shards: int = 1) -> Path:
    """Safetensors, sharded with an index when asked; a tied tensor is written once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    with bigmodel.init_empty_weights():
        return make().eval()


@pytest.fixture
def plain() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("shards", [1, 3])
def test_everything_on_disk_gives_the_plain_models_bits(plain: Tied, tmp_path: Path, shards: int) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint", shards)
    before = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map={"": "disk"})
    assert torch.equal(model(IDS), plain(IDS))
    assert torch.equal(model(IDS), plain(IDS))
    assert model.embedding.weight.device.type == "meta"
    assert model.head.weight is model.embedding.weight
    assert {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == before
    assert sorted(tmp_path.iterdir()) == [checkpoint]  # nothing was written anywhere


@pytest.mark.parametrize("seed", range(10))
def test_random_maps_over_two_devices_cpu_and_disk(
    plain: Tied, tmp_path: Path, accelerators: Callable[..., list[torch.device]], seed: int
) -> None:
    accelerators(2, memory="16MiB")
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint", shards=2)
    choose = random.Random(seed)
    units = ["embedding", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    device_map = {unit: choose.choice([0, 1, "cpu", "disk"]) for unit in units}
    main_device = next((device for device in device_map.values() if device in (0, 1)), "cpu")
    # The root multiplies the head's output by its own buffer: a map that puts them apart is the caller's mistake.
    device_map["scale"] = device_map["head"] if device_map["head"] in (0, 1) else main_device
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map=device_map)
    for _ in range(3):
        assert torch.equal(model(IDS).cpu(), plain(IDS)), device_map


def test_a_planned_map_keeps_its_budget(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map="auto", max_memory={"cpu": "16KiB"})
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(IDS), plain(IDS))


def test_one_device_means_no_hooks(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map="auto", max_memory={"cpu": "1GiB"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(model(IDS), plain(IDS))


def test_without_a_map_an_empty_model_is_loaded_to_cpu(plain: Tied, tmp_path: Path) -> None:
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint_of(plain, tmp_path / "checkpoint"))
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(IDS), plain(IDS))


def test_dtype_is_converted_on_the_way(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    model = bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map={"": "cpu", "blocks.1": "disk"}, dtype=torch.bfloat16)
    reference = Tied().eval()
    reference.load_state_dict(plain.state_dict())
    reference.to(torch.bfloat16)
    reference.scale = plain.scale
    assert model.blocks[1].up.weight.dtype == torch.bfloat16
    assert torch.equal(model(IDS), reference(IDS))


def test_an_unknown_strategy_is_refused(plain: Tied, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="balanced_low_0"):
        bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint_of(plain, tmp_path / "c"), device_map="best")


def test_a_device_that_is_not_there_is_refused_before_reading(plain: Tied, tmp_path: Path) -> None:
    model = empty(Tied)
    with pytest.raises(PlanError, match="no accelerator"):
        bigmodel.load_checkpoint_and_dispatch(model, checkpoint_of(plain, tmp_path / "c"), device_map={"": 0})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_missing_tensor_is_named_and_nothing_is_loaded(plain: Tied, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in plain.state_dict().items() if name not in ("blocks.2.up.bias", "head.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    model = empty(Tied)
    with pytest.raises(MatchError, match=r"blocks\.2\.up\.bias"):
        bigmodel.load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "cpu", "blocks.0": "disk"})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, "auto"])
def test_what_may_stay_unfilled_needs_values_all_the_same(plain: Tied, tmp_path: Path, device_map: object) -> None:
    state = {name: value for name, value in plain.state_dict().items() if not name.startswith("blocks.1.")}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "model.safetensors")
    opened = bigmodel.Checkpoint.open(tmp_path)
    with bigmodel.init_empty_weights():
        model = Tied().eval()
    with pytest.raises(bigmodel.MatchError, match=r"Nothing fills blocks\.1\..*ignore_missing allows that, but they are on meta"):
        bigmodel.load_and_dispatch(model, opened, device_map=device_map, ignore_missing=[r"^blocks\.1\."])
    assert all(parameter.is_meta for parameter in model.parameters())

    filled = Tied().eval()
    filled.blocks[1].load_state_dict(plain.blocks[1].state_dict())
    bigmodel.load_and_dispatch(filled, opened, device_map={"": "cpu"}, ignore_missing=[r"^blocks\.1\."])
    assert all(torch.equal(value, filled.state_dict()[name]) for name, value in plain.state_dict().items())


def test_a_truncated_shard_is_named_and_nothing_is_loaded(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "c", shards=3)
    damaged = checkpoint / "model-00002-of-00003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    model = empty(Tied)
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        bigmodel.load_checkpoint_and_dispatch(model, checkpoint, device_map={"": "cpu"})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_dispatch_model_moves_a_loaded_model_to_disk_and_back(plain: Tied, tmp_path: Path) -> None:
    expected = plain(IDS)
    device_map = {"": "cpu", "blocks.1": "disk", "blocks.3": "disk"}
    model = bigmodel.dispatch_model(plain, device_map, offload_dir=tmp_path / "offload")
    assert model.hf_device_map == device_map
    assert model.blocks[1].up.weight.device.type == "meta"
    assert torch.equal(model(IDS), expected)
    bigmodel.undispatch(model)
    assert not any(parameter.device.type == "meta" for parameter in model.parameters())
    assert torch.equal(model(IDS), expected)


def test_dispatch_model_of_a_whole_model_to_disk(plain: Tied, tmp_path: Path) -> None:
    expected = plain(IDS)
    model = bigmodel.dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path / "offload")
    assert torch.equal(model(IDS), expected)


def test_dispatch_model_without_a_folder_says_so(plain: Tied) -> None:
    with pytest.raises(ValueError, match="We need an `offload_dir`"):
        bigmodel.dispatch_model(plain, {"": "cpu", "blocks.1": "disk"})


def test_a_map_that_leaves_something_out_is_refused(plain: Tied) -> None:
    with pytest.raises(ValueError, match=r"norm\.weight"):
        bigmodel.dispatch_model(plain, {"embedding": "cpu", "blocks": "cpu"})


def test_cpu_offload_keeps_results_and_parameters_on_meta() -> None:
    torch.manual_seed(0)
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    bigmodel.cpu_offload(model)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert not model.batchnorm.running_mean.is_meta
    assert torch.equal(model(x), expected)
    bigmodel.cpu_offload(model)  # twice is once
    assert torch.equal(model(x), expected)


def test_cpu_offload_to_an_accelerator_returns_outputs_where_inputs_are(accelerators: Callable[..., list[torch.device]]) -> None:
    device = accelerators(1)[0]
    torch.manual_seed(0)
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    bigmodel.cpu_offload(model, execution_device=device)
    output = model(x)
    assert output.device.type == "cpu"
    assert torch.equal(output, expected)


def test_disk_offload_writes_the_folder_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = model(x)
    bigmodel.disk_offload(model, tmp_path / "offload")
    assert (tmp_path / "offload" / "index.json").is_file()
    assert torch.equal(model(x), expected)
    assert model.linear1.weight.device.type == "meta"


def test_a_folder_with_other_values_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = ModelForTest().eval(), ModelForTest().eval()
    x = torch.randn(2, 3)
    expected = first(x)
    bigmodel.disk_offload(first, tmp_path / "offload")
    with pytest.raises(CheckpointError, match=r"offload.*linear1\.weight"):
        bigmodel.disk_offload(second, tmp_path / "offload")
    assert torch.equal(first(x), expected)
    assert not hasattr(second, "_hf_hook")


def test_disk_offload_uses_its_own_folder_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ModelForTest().eval()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3)
    expected = model(x)
    bigmodel.disk_offload(model, tmp_path / "offload")
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "offload").iterdir()}
    bigmodel.disk_offload(twin, tmp_path / "offload")
    assert torch.equal(twin(x), expected)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "offload").iterdir()} == written


def test_cpu_offload_with_hook_moves_whole_models_in_turn(accelerators: Callable[..., list[torch.device]]) -> None:
    device = accelerators(1)[0]
    x = torch.randn(2, 3)
    first, first_hook = bigmodel.cpu_offload_with_hook(ModelForTest().eval(), execution_device=device)
    second, second_hook = bigmodel.cpu_offload_with_hook(ModelForTest().eval(), execution_device=device, prev_module_hook=first_hook)
    assert first.linear1.weight.device.type == "cpu"
    assert first(x).device == device
    assert first.linear1.weight.device == device
    assert first(x).device == device  # the second call moves its inputs too
    second(x)
    assert first.linear1.weight.device.type == "cpu"
    assert second.linear1.weight.device == device
    second_hook.offload()
    assert second.linear1.weight.device.type == "cpu"


def test_scripts_may_patch_the_map_check(plain: Tied, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks it up in `big_modeling` and replaces it while it dispatches models with parameters without a place."""
    import bigmodel.big_modeling

    seen = []
    monkeypatch.setattr(bigmodel.big_modeling, "check_device_map", lambda *arguments: seen.append(arguments))
    bigmodel.dispatch_model(plain, {"": "cpu"})
    assert len(seen) == 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("first", ["cpu", "disk"])
def test_a_map_may_name_the_parts_of_a_module_that_is_never_cut(tmp_path: Path, first: str) -> None:
    torch.manual_seed(0)
    plain = Attention().eval()
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    others = {"cpu": "disk", "disk": "cpu"}
    device_map = {name: first if index % 2 else others[first] for index, name in enumerate(plain.state_dict())}
    model = bigmodel.load_checkpoint_and_dispatch(empty(Attention), checkpoint, device_map=device_map)
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_device_that_is_not_there_is_refused_before_anything_happens(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    for device_map in ("cuda", "cuda:0", {"": "cpu", "head": "xpu:3", "blocks": "disk"}):
        model = empty(Tied)
        with pytest.raises(PlanError, match="asked for, but torch sees no accelerator on this machine"):
            bigmodel.load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map)
        assert model.norm.weight.is_meta
    with pytest.raises(PlanError, match="'xpu:3' asked for"):
        bigmodel.dispatch_model(plain, {"": "cpu", "norm": "xpu:3", "blocks": "disk"}, offload_dir=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()


def test_entries_that_name_nothing_are_one_warning(plain: Tied, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    ids = torch.arange(5).view(1, 5)
    with pytest.warns(UserWarning, match=r"device_map keys do not match any submodules in the model: \['lm_head', 'blocks.9'\]") as caught:
        model = bigmodel.load_checkpoint_and_dispatch(
            empty(Tied), checkpoint, device_map={"": "cpu", "lm_head": "cpu", "blocks.9": "disk", "blocks.1": "disk"}
        )
    assert len(caught) == 1
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))
    with pytest.warns(UserWarning, match="lm_head"), pytest.raises(PlanError, match="does not give any device"):
        bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map={"lm_head": "cpu"})


def test_an_ordinary_load_does_not_alarm(plain: Tied, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = checkpoint_of(plain, tmp_path / "checkpoint")
    bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map={"": "cpu", "blocks": "disk"})
    bigmodel.load_checkpoint_and_dispatch(empty(Tied), checkpoint, device_map="auto", max_memory={"cpu": "8KiB"})
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("kind", [CheckpointError, ValueError, RuntimeError])
def test_a_model_without_values_is_not_saved(tmp_path: Path, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"tensors have no values to save \(they are on meta\): .*Load the model first"):
        bigmodel.save_model(empty(Tied), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_folders_that_cannot_be_written_leave_the_model_as_it_was(plain: Tied, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    folder = tmp_path / where
    for act in (
        lambda: bigmodel.save_model(plain, folder),
        lambda: bigmodel.disk_offload(plain, folder),
        lambda: bigmodel.dispatch_model(plain, {"": "cpu", "blocks": "disk"}, offload_dir=folder),
    ):
        with pytest.raises(CheckpointError) as caught:
            act()
        assert str(caught.value).startswith(f"{folder}: ")
    assert not any(parameter.is_meta for parameter in plain.parameters())
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_one_class_to_preload_may_be_a_string(plain: Tied, tmp_path: Path) -> None:
    for classes in ("Block", ["Block"]):
        model = bigmodel.cpu_offload(copy.deepcopy(plain), preload_module_classes=classes)
        named = {name for name, module in model.named_modules() if getattr(module, "_hf_hook", None) is not None}
        assert "blocks.0" in named
        assert not [name for name in named if name.startswith("blocks.0.")]
