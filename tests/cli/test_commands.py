"""The command line, as people and programs use it: tables, `--json`, exit codes, one message for an error."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file

import bigmodel
from bigmodel.cli.budgets import parse_max_memory
from bigmodel.cli.main import main
from bigmodel.errors import PlanError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.weight": torch.zeros(64, 64) for i in range(4)}
    file = tmp_path / "model.safetensors"
    save_file({**tensors, "norm.weight": torch.zeros(64, dtype=torch.bfloat16)}, file)
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_inspect_counts_tensors_bytes_dtypes_and_modules(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", checkpoint, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["total_bytes"] == 4 * 64 * 64 * 4 + 64 * 2
    assert facts["bytes_by_dtype"] == {"float32": 4 * 64 * 64 * 4, "bfloat16": 128}
    assert facts["bytes_by_module"]["layers.0"] == 64 * 64 * 4
    assert facts["tensors"]["norm.weight"]["shape"] == [64]


def test_inspect_prints_tables(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", checkpoint, "--tensors")
    assert code == 0
    assert "5 tensors" in out
    assert "bfloat16" in out


def test_inspect_of_a_truncated_file_is_one_message_and_exit_code_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-40])
    code, out, error = run(capsys, "inspect", checkpoint)
    assert code == 1
    assert out == ""
    assert "model.safetensors" in error
    assert "Traceback" not in error


def test_inspect_of_a_missing_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "inspect", tmp_path / "nowhere.safetensors")
    assert code == 1
    assert "nowhere.safetensors" in error.replace("\n", "")


def test_paths_and_messages_are_never_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("[/red]nope", "[bold]x[/].safetensors", "[/]:tada:.safetensors"):
        code, out, error = run(capsys, "inspect", name)
        assert code == 1
        assert out == ""
        assert error.startswith(f"Error: {name}: ")
    file = tmp_path / "[bold]x[b] :tada:.safetensors"
    save_file({"[red]w[/]": torch.zeros(2), "[/b]": torch.zeros(2)}, file)
    code, out, _ = run(capsys, "inspect", file, "--tensors")
    assert code == 0
    assert out.startswith(str(file))
    assert "[red]w[/]" in out
    assert "[/b]" in out


def test_the_first_line_of_inspect_is_one_line_and_counts_in_the_singular(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    _, out, _ = run(capsys, "inspect", folder)
    assert out.splitlines()[0] == f"{folder}: safetensors, 1 file, 1 tensor, 8 B. Headers are sound."


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out == f"bigmodel {bigmodel.__version__}\n"


def test_plan_keeps_the_budgets(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", checkpoint, "--max-memory", "0=40KiB,cpu=1GiB", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found["device_map"].values()) == {0, "cpu"}


def test_plan_prints_a_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", checkpoint, "--max-memory", "cpu=60KiB")
    assert code == 0
    assert "disk" in out


def test_plan_refuses_what_it_cannot_read(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "plan", checkpoint, "--max-memory", "lots")
    assert code == 1
    assert "lots" in error
    assert "DEVICE=SIZE" in error


def test_budgets_are_parsed() -> None:
    assert parse_max_memory("0=2GiB, cpu=8GiB,disk=100") == {0: "2GiB", "cpu": "8GiB", "disk": 100}
    assert parse_max_memory(None) is None
    with pytest.raises(PlanError, match="cpu="):
        parse_max_memory("cpu=")


def test_inspect_tells_how_packed_tensors_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gguf.quantize(torch.ones(4, 64).numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, out, _ = run(capsys, "inspect", tmp_path / "x.gguf", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["bytes_by_dtype"] == {"Q8_0": 4 * 2 * 34}
    assert {key: facts["tensors"]["weight"][key] for key in ("dtype", "stored_as", "shape")} == {
        "dtype": "float32",
        "stored_as": "Q8_0",
        "shape": [4, 64],
    }
    assert "Q8_0" in run(capsys, "inspect", tmp_path / "x.gguf", "--tensors")[1]


def test_load_checks_headers_alone_without_a_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "load", checkpoint, "--check", "--json")
    facts = json.loads(out)
    assert (code, facts["tensors"], facts["model"]) == (0, 5, None)
    code, out, _ = run(capsys, "load", checkpoint, "--check")
    assert code == 0
    assert "No model was named" in out
    code, _, error = run(capsys, "load", checkpoint)
    assert code == 1
    assert "--into" in error


def test_load_checks_a_checkpoint_against_another(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"layers.0.weight": torch.ones(64, 64), "layers.1.weight": torch.ones(64, 60), "more.weight": torch.ones(3)}, other)
    code, out, _ = run(capsys, "load", other, "--into", checkpoint, "--check", "--json")
    facts = json.loads(out)
    assert (code, facts["fits"], facts["filled"]) == (1, False, 1)
    assert facts["missing"] == ["layers.2.weight", "layers.3.weight", "norm.weight"]
    assert facts["unexpected"] == ["more.weight"]
    assert facts["misshapen"] == [{"name": "layers.1.weight", "model": [64, 64], "checkpoint": [64, 60]}]
    assert "nothing fills 3 tensors" in facts["problem"].lower()
    code, out, _ = run(capsys, "load", other, "--into", checkpoint, "--check")
    assert code == 1
    assert "Does not fit." in out
    assert run(capsys, "load", checkpoint, "--into", checkpoint, "--check", "--strict")[0] == 0


def test_load_reads_into_ram_and_tells_the_time(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "load", checkpoint, "--into", checkpoint, "--json")
    facts = json.loads(out)
    assert (code, facts["fits"], facts["bytes_read"]) == (0, True, 4 * 64 * 64 * 4 + 128)
    assert facts["seconds"] > 0
    code, out, _ = run(capsys, "load", checkpoint, "--into", checkpoint)
    assert code == 0
    assert "Loaded into RAM: 64.12 KiB in" in out


def test_verify_without_a_known_hash_is_an_error(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "load"):
        code, _, error = run(capsys, command, checkpoint, "--verify")
        assert code == 1
        assert "no hash of it is known" in error


def test_env_tells_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["accelerators"] == []
    assert run(capsys, "env")[0] == 0


def test_help_tells_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in ("inspect", "load", "plan", "generate", "env"):
        assert name in out


def test_a_wrong_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "inspect")[0] == 2


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny causal language model with a tokenizer of whole words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(63)} | {"hello": 63}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, eos_token_id=None, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def test_generate_streams_what_the_plain_model_says(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    inputs = tokenizer("hello w1", return_tensors="pt")
    expected = AutoModelForCausalLM.from_pretrained(llama).generate(**inputs, max_new_tokens=5, do_sample=False)
    capsys.readouterr()
    arguments = ["generate", llama, "--prompt", "hello w1", "--max-new-tokens", 5, "--max-memory", "cpu=24KiB", "--show-placement"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "disk" in out
    assert tokenizer.decode(expected[0]).split() == out.splitlines()[-1].split()


def test_generate_of_a_model_that_does_not_generate_says_so(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)).save_pretrained(
        llama
    )
    code, _, error = run(capsys, "generate", llama, "--prompt", "hello")
    assert code == 1
    assert "BertModel" in error


@pytest.mark.parametrize("damage", ["missing", "broken", "no words"])
def test_generate_without_a_usable_tokenizer_says_so_before_it_loads(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    for file in llama.glob("tokenizer*"):
        file.unlink()
    if damage == "broken":
        (llama / "tokenizer.json").write_text("{broken")
    if damage == "no words":  # transformers makes a tokenizer without a vocabulary from such a configuration
        from transformers import GPT2Config

        GPT2Config().save_pretrained(llama)
    monkeypatch.setattr("bigmodel.cli.generate.from_pretrained", lambda *_, **__: pytest.fail("the weights were loaded"))
    code, _, error = run(capsys, "generate", llama, "--prompt", "hello")
    assert code == 1
    assert error.startswith(f"Error: {llama}: ")
    assert "tokenizer" in error
    assert "Traceback" not in error
