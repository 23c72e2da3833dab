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
    assert more == {"module": False, "no_python": False, "torchrun": [], "threads": None}
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
    (["--megatron_lm_tp_degree", "2", "train.py"],
     "--megatron_lm_tp_degree: settings of MEGATRON_LM, which this job does not train with: add --use_megatron_lm"),
    (["--tpu", "train.py"], "--tpu: bigmodel launch starts no jobs on TPUs"),
    (["--deepspeed_multinode_launcher", "pdsh", "--tpu_cluster", "train.py"], "--tpu_cluster: bigmodel launch starts no jobs on TPUs"),
    (["--module", "--no_python", "train"], "--module and --no_python: a program is no module"),
    (["--max_restarts", "often", "train.py"], "Invalid value for '--max_restarts'"),
    (["--multi_gpu", "--use_fsdp", "train.py"], "MULTI_GPU and FSDP cannot train one model together"),
    (["--fsdp_versoin", "2", "train.py"], "No such option: --fsdp_versoin"),
    (["--zero_stage"], "Option '--zero_stage' requires an argument"),
    (["--num_processes"], "--num_processes"),
])  # fmt: skip
def test_options_that_nothing_reads_are_refused(words: list[str], message: str, launched: list[Any]) -> None:
    told = re.sub(r"[\s│]+", " ", run(*words))
    assert re.search(message, told), told
    assert not launched


@pytest.mark.parametrize(("words", "note"), [
    (["--fsdp_version", "2"],
     "--fsdp_version: settings of FSDP, which this job does not train with; they change nothing without --use_fsdp."),
    (["--use_fsdp", "--zero_stage", "2", "--gradient_clipping=1.0"],
     "--zero_stage, --gradient_clipping: settings of DEEPSPEED, which this job does not train with; they change nothing without "
     "--use_deepspeed."),
    (["--downcast_bf16"], "--downcast_bf16: changes nothing here."),
    (["--same-network", "--main_training_function", "main", "--env", "A=1", "--env=B=2"],
     "--same_network, --main_training_function, --env: change nothing here."),
    (["--gpu_ids", "0", "--cpu"], "gpu_ids: changes nothing where the CPU computes."),
    (["--cpu"], ""),
])  # fmt: skip
def test_options_that_change_no_result_are_told_and_the_job_runs(words: list[str], note: str, launched: list[Any]) -> None:
    result = CliRunner().invoke(app, ["launch", *words, "train.py", "--zero_stage", "1"])
    assert result.exit_code == 0, result.output
    assert result.stderr == (f"Note: {note}\n" if note else "")
    assert launched.pop()[1] == ["train.py", "--zero_stage", "1"]


def test_torchruns_options_are_handed_on(launched: list[Any]) -> None:
    words = ["--max_restarts", "3", "--monitor-interval=0.5", "-t", "3", "--log_dir", "logs", "--role=trainer", "--rdzv_conf", "timeout=9"]
    assert not run(*words, "train.py", "--max_restarts", "1")
    _, command, more = launched.pop()
    assert command == ["train.py", "--max_restarts", "1"]
    assert more["torchrun"] == [
        "--max-restarts=3", "--monitor-interval=0.5", "--tee=3", "--log-dir=logs", "--role=trainer", "--rdzv-conf=timeout=9",
    ]  # fmt: skip
    assert not run("--no_python", "--enable_cpu_affinity", "-q", "./train.sh", "-q")
    settings, command, more = launched.pop()
    assert command == ["./train.sh", "-q"]
    assert more["no_python"]
    assert settings.enable_cpu_affinity
    for word in ("-h", "--help"):
        help_of_launch = CliRunner().invoke(app, ["launch", word])
        assert help_of_launch.exit_code == 0
        assert "--num_processes" in help_of_launch.stdout
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
