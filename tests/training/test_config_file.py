"""The file that says how a job is launched, and what the processes find of it in their environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigmodel.commands.config import default_config_file, load_config_from_file
from bigmodel.errors import TrainingError
from bigmodel.training import config_file
from bigmodel.training.config_file import LaunchSettings, launch_environment, read_launch_settings, write_basic_config
from bigmodel.training.launchers import torchrun_arguments


@pytest.fixture(autouse=True)
def no_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEFAULT_CONFIG_FILE", "ECOSYSTEM_CONFIG_FILE"):
        monkeypatch.setattr(config_file, name, str(tmp_path / "home" / f"{name}.yaml"))


@pytest.mark.parametrize(("name", "parse"), [("folder/config.yaml", yaml.safe_load), ("config.json", json.loads)])
def test_a_basic_file_is_for_this_machine(name: str, parse: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    assert write_basic_config("BF16", str(file)) == file
    assert parse(file.read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 1,
        "use_cpu": True,
    }
    assert read_launch_settings(file) == LaunchSettings(mixed_precision="bf16", use_cpu=True)
    before = file.read_bytes()
    assert write_basic_config("fp16", str(file)) is False
    assert f"{file} is there already" in capsys.readouterr().out
    assert file.read_bytes() == before
    with pytest.raises(TrainingError, match="mixed_precision is 'fp17'"):
        write_basic_config("fp17", str(tmp_path / "other.yaml"))


def test_with_accelerators_there_is_a_process_for_each(accelerators: Any, tmp_path: Path) -> None:
    accelerators(4)
    settings = read_launch_settings(_basic(tmp_path / "four.yaml", "MULTI_GPU"))
    assert (settings.num_processes, settings.use_cpu, settings.distributed_type) == (4, False, "MULTI_GPU")
    accelerators(1)
    settings = read_launch_settings(_basic(tmp_path / "one.yaml", "NO"))
    assert (settings.num_processes, settings.use_cpu, settings.distributed_type) == (1, False, "NO")


def _basic(file: Path, expected: str) -> Path:
    """The simulated accelerator's kind is none of the ecosystem's words: it stands for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_file, "collective_name", lambda device: "GPU")
        write_basic_config(save_location=str(file))
    assert yaml.safe_load(file.read_text())["distributed_type"] == expected
    return file


FSDP_FILE = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_ignored_modules:
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 1234
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_dynamic: true
"""


def test_a_file_of_the_ecosystem_is_read_and_its_plugin_told(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(FSDP_FILE)
    settings = read_launch_settings(file)
    assert torchrun_arguments(settings) == [
        "--nnodes=2", "--nproc-per-node=4", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234",
    ]  # fmt: skip
    ours = {
        "MIXED_PRECISION": "bf16",
        "DEBUG_MODE": "true",
        "CPU_AFFINITY": "true",
        "USE_FSDP": "true",
        "DYNAMO_BACKEND": "INDUCTOR",
        "DYNAMO_USE_DYNAMIC": "true",
    }
    assert launch_environment(settings) == {
        **{f"BIGMODEL_{name}": value for name, value in ours.items()},
        **{f"ACCELERATE_{name}": value for name, value in ours.items()},
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_OFFLOAD_PARAMS": "false",
    }


def test_deepspeed_and_megatron_are_told_in_their_words() -> None:
    deepspeed = {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "gradient_accumulation_steps": 4,
        "zero3_init_flag": True,
        "deepspeed_multinode_launcher": "standard",
    }
    found = launch_environment(LaunchSettings(distributed_type="DEEPSPEED", deepspeed_config=deepspeed))
    assert {name: value for name, value in found.items() if name.startswith("BIGMODEL_")} == {
        "BIGMODEL_USE_DEEPSPEED": "true",
        "BIGMODEL_CONFIG_DS_FIELDS": ",".join(deepspeed),
        "BIGMODEL_DEEPSPEED_ZERO_STAGE": "3",
        "BIGMODEL_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "BIGMODEL_GRADIENT_ACCUMULATION_STEPS": "4",
        "BIGMODEL_DEEPSPEED_ZERO3_INIT": "true",
    }
    with pytest.raises(TrainingError, match="deepspeed_multinode_launcher='pdsh' is for DeepSpeed's own launcher"):
        launch_environment(LaunchSettings(distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_multinode_launcher": "pdsh"}))
    megatron = LaunchSettings(distributed_type="MEGATRON_LM", megatron_lm_config={"megatron_lm_tp_degree": 2})
    assert launch_environment(megatron) == {
        "BIGMODEL_USE_MEGATRON_LM": "true",
        "ACCELERATE_USE_MEGATRON_LM": "true",
        "MEGATRON_LM_TP_DEGREE": "2",
    }
    assert launch_environment(LaunchSettings(deepspeed_config={"zero_stage": 3})) == {}, "another kind of training"


@pytest.mark.parametrize(("content", "settings"), [
    ("dynamo_backend: 'NO'", LaunchSettings()),
    ("dynamo_backend: NO", LaunchSettings()),
    ("dynamo_backend: INDUCTOR", LaunchSettings(dynamo_config={"dynamo_backend": "INDUCTOR"})),
    ("dynamo_backend: INDUCTOR\ndynamo_config: {dynamo_mode: default}",
     LaunchSettings(dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"})),
    ("dynamo_config: {backend: INDUCTOR}", LaunchSettings(dynamo_config={"dynamo_backend": "INDUCTOR"})),
    ("fp16: true", LaunchSettings(mixed_precision="fp16")),
    ("fp16: false", LaunchSettings()),
    ("fp16: true\nmixed_precision: bf16", LaunchSettings(mixed_precision="bf16")),
    ("mixed_precision: no\ndistributed_type: NO", LaunchSettings(mixed_precision="no")),
    ("deepspeed_config: {}\nfsdp_config: {}\nmegatron_lm_config: {}\nfp8_config: {}\ncommands:\ntpu_vm:", LaunchSettings()),
    ("distributed_type: FSDP\nfsdp_config: {min_num_params: 2000, offload_params: true, fsdp_version: 1}",
     LaunchSettings(distributed_type="FSDP", fsdp_config={
         "fsdp_min_num_params": 2000, "fsdp_offload_params": True, "fsdp_version": 1})),
    ("dynamo_config: {dynamo_use_dynamic: false}", LaunchSettings(dynamo_config={"dynamo_use_dynamic": False})),
    ("ipex_config: {ipex: false}\nmpirun_config: {mpirun_ccl: '1', mpirun_hostfile: ''}", LaunchSettings()),
])  # fmt: skip
def test_words_of_older_files_are_those_of_today(content: str, settings: LaunchSettings, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert read_launch_settings(file) == settings


@pytest.mark.parametrize(("content", "message"), [
    ("num_procs: 2", "bigmodel knows no key 'num_procs'; did you mean 'num_processes'"),
    ("tpu_name: mine", "bigmodel knows no key 'tpu_name'"),
    ("ipex_config: {ipex: true}", "bigmodel knows no key 'ipex_config'"),
    ("mpirun_config: {mpirun_hostfile: hosts}", "bigmodel knows no key 'mpirun_config'"),
    ("fsdp_config: {version: 1, fsdp_version: 2}", "fsdp_config has fsdp_version twice: 1 and 2"),
    ("dynamo_backend: eager\ndynamo_config: {dynamo_backend: inductor}", "dynamo_config has dynamo_backend twice: inductor and eager"),
    ("compute_environment: AMAZON_SAGEMAKER", "compute_environment is 'AMAZON_SAGEMAKER'"),
    ("distributed_type: TWO", r"distributed_type is 'TWO'; use one of \['NO', 'MULTI_CPU'"),
    ("mixed_precision: fp17", "mixed_precision is 'fp17'"),
    ("num_processes: 3\nnum_machines: 2\nmain_process_ip: a", "3 processes cannot be shared by 2 machines"),
    ("num_processes: 2\nnum_machines: 2", "2 machines need main_process_ip"),
    ("machine_rank: 1", "machine_rank is 1 of 1 machines"),
    ("num_processes: two", "a word stands where a number belongs"),
    ("- a\n- b", "holds no keys and values"),
    ("a: [", "neither YAML nor JSON"),
])  # fmt: skip
def test_a_file_that_cannot_be_is_refused_by_name(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(TrainingError, match=message) as caught:
        read_launch_settings(file)
    assert str(file) in str(caught.value)


def test_which_file_is_read(tmp_path: Path) -> None:
    assert read_launch_settings() == LaunchSettings()
    with pytest.raises(TrainingError, match=r"no config file .*missing\.yaml"):
        read_launch_settings(tmp_path / "missing.yaml")
    (tmp_path / "home").mkdir()
    Path(config_file.ECOSYSTEM_CONFIG_FILE).write_text("num_processes: 2")
    assert read_launch_settings().num_processes == 2
    Path(config_file.DEFAULT_CONFIG_FILE).write_text("num_processes: 3")
    assert read_launch_settings().num_processes == 3
    assert read_launch_settings(None, {"num_processes": 4}).num_processes == 4
    with pytest.raises(TrainingError, match="0 processes"):
        read_launch_settings(None, {"num_processes": 0})


def test_settings_are_told_by_the_keys_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_processes: 2\nfsdp_config: {fsdp_version: 2}")
    told = load_config_from_file(str(tmp_path / "config.yaml")).to_dict()
    assert (told["num_processes"], told["fsdp_config"], told["machine_rank"]) == (2, {"fsdp_version": 2}, 0)
    assert default_config_file.endswith("default_config.yaml")


def test_machines_meet_as_they_are_told() -> None:
    assert torchrun_arguments(LaunchSettings(num_processes=2, main_process_port=0)) == torchrun_arguments(LaunchSettings(num_processes=2))
    with pytest.raises(TrainingError, match="main_process_port is 0, any free port, which 2 machines could not know"):
        LaunchSettings(num_processes=2, num_machines=2, main_process_ip="here", main_process_port=0)
    assert torchrun_arguments(LaunchSettings(num_processes=2)) == ["--nnodes=1", "--nproc-per-node=2", "--standalone"]
    assert torchrun_arguments(LaunchSettings(num_processes=2, main_process_port=5))[2:] == [
        "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=5",
    ]  # fmt: skip
    elastic = LaunchSettings(num_processes=2, num_machines=2, main_process_ip="here", rdzv_backend="c10d")
    assert torchrun_arguments(elastic) == ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=here:29500"]
