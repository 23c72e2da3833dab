"""`bigmodel.plan` of transformers configurations, of folders with a config.json, and of repositories on the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import Hub
from huggingface_hub import constants
from transformers import AutoConfig

import bigmodel
from bigmodel.errors import BigModelError, CheckpointError, CheckpointNotFoundError, MissingPackageError
from bigmodel.integrations.transformers import empty_model
from bigmodel.loading.remote import retry
from bigmodel.planning import Plan

BUDGETS = {0: "60KB", "cpu": "40KB"}
FAMILIES = ["llama", "llama-tied", "gpt2"]


@pytest.fixture
def folder(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint_folder("llama"), tmp_path / "llama")


def figures(made: Plan) -> tuple[object, ...]:
    return made.device_map, made.total_bytes, made.moved_bytes, made.blocks, made.devices, made.model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_its_configuration_and_the_model_give_the_same_plan(checkpoint_folder: Callable[[str], Path], family: str) -> None:
    where = checkpoint_folder(family)
    expected = bigmodel.plan(empty_model(where), BUDGETS)
    for source in (where, str(where), where / "config.json", AutoConfig.from_pretrained(where)):
        assert figures(bigmodel.plan(source, BUDGETS)) == figures(expected)
    assert expected.moved_bytes


def test_the_asked_dtype_is_that_of_loading(checkpoint_folder: Callable[[str], Path]) -> None:
    where = checkpoint_folder("llama")
    made = bigmodel.plan(where, BUDGETS, dtype="float16")
    assert figures(made) == figures(bigmodel.plan(empty_model(where, dtype="float16"), BUDGETS))
    loaded = bigmodel.from_pretrained(where, dtype="float16", device_map={"": "cpu"})
    assert made.total_bytes == sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_a_configuration_without_architectures_takes_a_model_class(checkpoint_folder: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(checkpoint_folder("llama"))
    config.architectures = None
    assert bigmodel.plan(config, BUDGETS).model == "LlamaModel"
    assert bigmodel.plan(config, BUDGETS, model_class="LlamaForCausalLM").model == "LlamaForCausalLM"


def test_without_transformers_headers_and_configuration_have_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bigmodel.plan(folder, {0: "1GB"})

    def missing(*_: object, **__: object) -> None:
        raise MissingPackageError("transformers is missing.")

    monkeypatch.setattr("bigmodel.sources.load_config", missing)
    made = bigmodel.plan(folder, {0: "1GB"})
    assert made.model == "llama"
    assert "Its config.json was of no use (transformers is missing.)." in made.notes
    buffers = sum(buffer.nbytes for buffer in empty_model(folder).buffers())
    assert made.total_bytes == expected.total_bytes - buffers
    assert made.blocks == expected.blocks
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(MissingPackageError, match="transformers is missing"):
        bigmodel.plan(folder, {0: "1GB"})


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes"])
def test_checkpoints_that_fill_packed_layers_are_counted_as_they_are_stored(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    made = bigmodel.plan(folder, {0: "1GB"})
    assert made.total_bytes == bigmodel.Checkpoint.open(folder).total_bytes
    assert any("quantized" in note for note in made.notes)


def test_an_unknown_architecture_is_planned_by_its_headers(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "never-heard-of", "architectures": ["NeverHeardOf"]}))
    made = bigmodel.plan(folder, BUDGETS)
    assert made.model == "llama"
    assert any("of no use" in note and "never-heard-of" in note for note in made.notes)
    assert max(map(len, str(made).splitlines())) <= 100


def test_a_configuration_of_another_size_beside_a_file_is_not_believed(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    made = bigmodel.plan(shard, {0: "1GB"})
    assert made.model == shard.name
    assert made.total_bytes == bigmodel.Checkpoint.open(shard).total_bytes
    assert any("describes a LlamaForCausalLM of" in note for note in made.notes)


def test_a_broken_configuration_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        bigmodel.plan(folder, BUDGETS)


@pytest.fixture
def hub(checkpoint_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in checkpoint_folder("llama").iterdir()}
    plain = {name: data for name, data in files.items() if name != "config.json"}
    repositories = {
        "owner/llama": files,
        "owner/plain": plain,
        "owner/gated": files,
        "owner/deep": {f"text/{n}": d for n, d in files.items()},
    }
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.001)
    with Hub(repositories, gated=frozenset({"owner/gated"})) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield running


@pytest.mark.parametrize("where", ["owner/llama", "owner/llama@main", "hf://owner/deep/text"])
def test_a_repository_is_planned_by_its_configuration(hub: Hub, where: str, checkpoint_folder: Callable[[str], Path]) -> None:
    assert figures(bigmodel.plan(where, BUDGETS)) == figures(bigmodel.plan(checkpoint_folder("llama"), BUDGETS))
    assert not any(name.endswith(".safetensors") for name in hub.fetched if name not in hub.fetched_bytes)


def test_a_repository_without_configuration_is_planned_by_its_headers(hub: Hub, checkpoint_folder: Callable[[str], Path]) -> None:
    made = bigmodel.plan("owner/plain", {0: "1GB"})
    assert made.model == "owner/plain"
    assert made.total_bytes == bigmodel.Checkpoint.open(checkpoint_folder("llama")).total_bytes
    weights = [name for name in hub.fetched if name.endswith(".safetensors")]
    assert weights
    assert set(weights) <= set(hub.fetched_bytes)  # by ranges


@pytest.mark.parametrize(("where", "said"), [("owner/gated", "gated"), ("owner/absent", "owner/absent"), ("owner/llama@v9", "v9")])
def test_what_the_hub_does_not_give_is_explained(hub: Hub, where: str, said: str) -> None:
    with pytest.raises((CheckpointError, CheckpointNotFoundError), match=said):
        bigmodel.plan(where, BUDGETS)
    assert issubclass(CheckpointError, BigModelError)


def test_packed_formats_of_a_transformers_model(checkpoint_folder: Callable[[str], Path]) -> None:
    made = bigmodel.plan(checkpoint_folder("llama"), {0: "1GB"}, dtype="int8")
    model = empty_model(checkpoint_folder("llama"))
    packed = sum(p.numel() + 4 * p.shape[0] for name, p in model.named_parameters() if "proj" in name)
    rest = sum(p.nbytes for name, p in model.named_parameters() if "proj" not in name) + sum(b.nbytes for b in model.buffers())
    assert made.total_bytes == packed + rest
    assert model.lm_head.weight.dtype == torch.float32
