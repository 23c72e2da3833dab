"""`bigmodel launch` with the options that ecosystem scripts are launched with: what reaches the launcher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bigmodel.cli import launch as launching
from bigmodel.cli.main import app
from bigmodel.training import config_file
from bigmodel.training.config_file import LaunchSettings, launch_environment


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(launching, "launch_script", lambda settings, command, **more: calls.append((settings, command, more)))
    for name in ("DEFAULT_CONFIG_FILE", "ECOSYSTEM_CONFIG_FILE"):
        monkeypatch.setattr(config_file, name, str(tmp_path / f"{name}.yaml"))
    return calls


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["launch", *words])
    return "" if result.exit_code == 0 else f"{result.output} {result.exception}"


def test_keys_of_sections_are_options(launched: list[Any]) -> None:
    assert not run(
        "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--fsdp-reshard-after-forward=false", "train.py", "--fsdp_version", "1"
    )
    settings, command, more = launched.pop()
    assert command == ["train.py", "--fsdp_version", "1"]
    assert more == {"module": False, "threads": None}
    assert settings.distributed_type == "FSDP"
    assert settings.num_processes == 2
    assert settings.fsdp_config == {"fsdp_version": "2", "fsdp_reshard_after_forward": "false"}
    found = launch_environment(settings)
    assert found["FSDP_VERSION"] == "2"
    assert found["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert found["ACCELERATE_USE_FSDP"] == "true"

    assert not run("--use_deepspeed", "--zero_stage", "2", "--gradient_accumulation_steps", "4", "--mixed-precision=bf16", "train.py")
    settings, *_ = launched.pop()
    found = launch_environment(settings)
    assert found["BIGMODEL_DEEPSPEED_ZERO_STAGE"] == "2"
    assert found["BIGMODEL_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert settings.mixed_precision == "bf16"

    assert not run("--use_megatron_lm", "--megatron_lm_tp_degree", "2", "train.py")
    assert launch_environment(launched.pop()[0])["MEGATRON_LM_TP_DEGREE"] == "2"

    assert not run("--dynamo_backend", "inductor", "--dynamo_use_fullgraph", "-m", "package.train", "--cpu")
    settings, command, more = launched.pop()
    found = launch_environment(settings)
    assert found["BIGMODEL_DYNAMO_BACKEND"] == "inductor"
    assert found["BIGMODEL_DYNAMO_USE_FULLGRAPH"] == "true"
    assert command == ["package.train", "--cpu"]
    assert more["module"]
    assert not settings.use_cpu


def test_options_come_before_keys_of_the_file_one_by_one(launched: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 1, fsdp_offload_params: true}")
    assert not run("--config_file", str(file), "--fsdp_version", "2", "train.py")
    assert launched.pop()[0].fsdp_config == {"fsdp_version": "2", "fsdp_offload_params": True}
    assert not run("--config-file", str(file), "--multi_gpu", "train.py")
    assert launched.pop()[0].distributed_type == "MULTI_GPU"


@pytest.mark.parametrize(("words", "message"), [
    (["--fsdp_version", "2", "train.py"], "--fsdp_version: settings of FSDP, which this job does not train with: add --use_fsdp"),
    (["--zero_stage", "2", "--use_fsdp", "train.py"], "--zero_stage: settings of DEEPSPEED, .*: add --use_deepspeed"),
    (["--multi_gpu", "--use_fsdp", "train.py"], "MULTI_GPU and FSDP cannot train one model together"),
    (["--fsdp_versoin", "2", "train.py"], "No such option: --fsdp_versoin"),
    (["--zero_stage"], "Option '--zero_stage' requires an argument"),
    (["--num_processes"], "--num_processes"),
])  # fmt: skip
def test_options_that_nothing_reads_are_refused(words: list[str], message: str, launched: list[Any]) -> None:
    told = re.sub(r"[\s│]+", " ", run(*words))
    assert re.search(message, told), told
    assert not launched


def test_without_a_number_there_is_a_process_for_each_accelerator(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    there = [torch.device("cuda", index) for index in range(4)]
    monkeypatch.setattr(config_file, "accelerators", lambda: there)
    for words, count in (([], 4), (["--gpu_ids", "0,2"], 2), (["--gpu_ids", "all"], 4), (["--cpu"], 1), (["--num_processes", "3"], 3)):
        assert not run(*words, "train.py")
        assert launched.pop()[0].num_processes == count, words
    assert not run("--num_machines", "2", "--main_process_ip", "here", "train.py")
    assert launched.pop()[0].num_processes == 8
    there.clear()
    assert not run("train.py")
    assert launched.pop()[0] == LaunchSettings()
