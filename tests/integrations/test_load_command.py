"""`bigmodel load --check` of transformers models: in a folder, on the hub, and with a checkpoint that lacks something."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from huggingface_hub import constants

from bigmodel.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as stop:
        main(["load", *map(str, arguments), "--json"])
    return int(stop.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.fixture
def hub(checkpoint_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in checkpoint_folder("llama").iterdir()}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub({"owner/llama": files}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield running


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "t5", "whisper"])
def test_the_model_beside_the_checkpoint_is_filled(
    checkpoint_folder: Callable[[str], Path], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, facts = run(capsys, checkpoint_folder(family), "--check", "--strict")
    assert (code, facts["fits"], facts["missing"], facts["unexpected"]) == (0, True, [], [])
    code, facts = run(capsys, checkpoint_folder(family))
    assert (code, facts["bytes_read"] > 0) == (0, True)


def test_a_missing_expert_is_told_before_anything_is_read(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint_folder("llama"), tmp_path / "llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.self_attn.q_proj.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in folder.glob("model-*.safetensors"):
        if b"model.layers.1.self_attn.q_proj.weight" in file.read_bytes():
            file.write_bytes(file.read_bytes().replace(b"layers.1.self_attn.q_proj.weight", b"layers.1.self_attn.x_proj.weight"))
    code, facts = run(capsys, folder, "--check")
    assert (code, facts["missing"], facts["unexpected"]) == (
        1,
        ["model.layers.1.self_attn.q_proj.weight"],
        ["model.layers.1.self_attn.x_proj.weight"],
    )


def test_a_repository_on_the_hub_is_checked_by_its_headers(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = run(capsys, "owner/llama", "--check")
    assert (code, facts["fits"], facts["model"]) == (0, True, "LlamaForCausalLM")
    assert not any(hub.fetched.count(name) > 1 for name in hub.fetched if name.startswith("model-"))
