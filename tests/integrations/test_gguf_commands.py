"""GGUF files on the command line: they have the model's configuration and tokenizer, here and on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from hub_server import Hub
from huggingface_hub import constants
from test_transformers_gguf import ARCHITECTURES, VOCABULARY, tensors_of, write

from bigmodel import from_pretrained
from bigmodel.cli.main import main
from bigmodel.errors import CheckpointError
from bigmodel.integrations.transformers import TransformersKeys
from bigmodel.loading import Checkpoint, load
from bigmodel.sources import Wanted, find_tree

LLAMA = ARCHITECTURES["llama"]
TOKENS = [chr(33 + index) for index in range(VOCABULARY - 3)] + ["Ġ", '!"', "<end>"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write(folder / "tiny.gguf", LLAMA, tensors_of(LLAMA, folder), TOKENS)


@pytest.fixture
def hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    tensors = [*tensors_of(LLAMA, tmp_path).items()]
    halves = [write(tmp_path / f"tiny-0000{1 + half}-of-00002.gguf", LLAMA, dict(tensors[half::2])) for half in (0, 1)]
    parts = {half.name: half.read_bytes() for half in halves}
    with Hub({"owner/gguf": {"README.md": b"", file.name: file.read_bytes()}, "owner/several": parts}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield running


def answer(file: Path) -> str:
    """What transformers' own tokenizer and the loaded model make of a prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer("ab!").input_ids == [TOKENS.index("a"), TOKENS.index("b"), TOKENS.index("!")]
    model = from_pretrained(file, device_map="cpu")
    inputs = tokenizer("ab!", return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0], skip_special_tokens=True)


def test_generate_takes_the_tokenizer_of_the_file(file: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    expected = answer(file)
    capsys.readouterr()
    for model in (file, file.parent, "owner/gguf", f"hf://owner/gguf/{file.name}"):
        code, out, error = run(capsys, "generate", model, "--prompt", "ab!", "--max-new-tokens", 5)
        assert (code, out.splitlines()[-1].strip()) == (0, expected.strip()), error


def test_generate_says_what_a_file_without_a_tokenizer_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = write(tmp_path / "bare.gguf", LLAMA, tensors_of(LLAMA, tmp_path))
    monkeypatch.setattr("bigmodel.cli.generate.from_pretrained", lambda *_, **__: pytest.fail("the weights were loaded"))
    code, _, error = run(capsys, "generate", bare, "--prompt", "ab!")
    assert code == 1
    assert error.startswith(f"Error: {bare}: no tokenizer that works.")
    assert "tokenizer.ggml.tokens" in error


def test_load_checks_a_repository_with_a_gguf_file_by_its_header(
    file: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "load", "owner/gguf", "--check", "--json")
    facts = json.loads(out)
    assert (code, facts["fits"], facts["model"], facts["missing"], facts["unexpected"]) == (0, True, "LlamaForCausalLM", [], [])
    local = json.loads(run(capsys, "load", file, "--check", "--json")[1])
    assert (facts["filled"], facts["model_bytes"]) == (local["filled"], local["model_bytes"])
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_load_streams_such_a_repository_into_the_model(file: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "load", "owner/gguf", "--json")
    assert code == 0, error
    local = json.loads(run(capsys, "load", file, "--json")[1])
    assert json.loads(out)["bytes_read"] == local["bytes_read"] > 0


def test_values_of_a_file_behind_a_url_are_those_of_the_file(file: Path, hub: Hub) -> None:
    model = find_tree("owner/gguf", Wanted()).model
    load(model, Checkpoint.open("owner/gguf"), rules=TransformersKeys(model))
    expected = from_pretrained(file, device_map="cpu").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_model_in_several_files_is_told_of_by_its_headers(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "load", "owner/several", "--check", "--json")
    facts = json.loads(out)
    assert (code, facts["model"], len(facts["files"])) == (0, None, 2)


def test_generate_says_of_a_damaged_or_missing_file_that_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, link = tmp_path / "damaged.gguf", tmp_path / "link.gguf"
    damaged.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    link.symlink_to(tmp_path / "nowhere")
    for file, story in ((damaged, "damaged"), (link, "the link points to nothing"), (tmp_path / "missing.gguf", "there is no such file")):
        code, _, error = run(capsys, "generate", file, "--prompt", "ab!")
        assert code == 1
        assert f"{file.name}: {story}" in error
        assert "tokenizer" not in error


@pytest.mark.parametrize("absent", ["llama.block_count", "llama.embedding_length"])
def test_a_file_that_does_not_say_how_large_its_model_is_is_refused_and_planned_from_its_headers(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(LLAMA, tmp_path)
    whole = gguf.GGUFWriter.add_key_value

    def leave_out(self: gguf.GGUFWriter, key: str, *value: object, **how: object) -> None:
        if key != absent:
            whole(self, key, *value, **how)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", leave_out)
    file = write(tmp_path / "tiny.gguf", LLAMA, tensors, TOKENS)
    with pytest.raises(CheckpointError, match=f"{file.name}: its metadata do not say {absent}: the model's sizes cannot be known"):
        from_pretrained(file, device_map="cpu")
    tree = find_tree(file, Wanted())
    assert f"do not say {absent}" in tree.notes[0]
    assert sum(parameter.numel() for parameter in tree.model.parameters()) == sum(array.size for array in tensors.values())
