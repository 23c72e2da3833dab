"""Real processes: scripts under torchrun, on one host and as two, and functions forked from this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from bigmodel.errors import TrainingError
from bigmodel.training import launchers
from bigmodel.training.config_file import LaunchSettings
from bigmodel.training.environment import get_free_port
from bigmodel.training.launchers import debug_launcher, launch_script, notebook_launcher
from bigmodel.training.state import PartialState

pytestmark = pytest.mark.xdist_group("processes")

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from bigmodel.state import AcceleratorState

state = AcceleratorState()
with state.split_between_processes(list(range(5)), apply_padding=True) as share:
    pass
total = torch.tensor([state.process_index + 1])
if state.use_distributed:
    dist.all_reduce(total)
with state.main_process_first():
    seen = os.path.exists(sys.argv[1] + "/made")
    open(sys.argv[1] + "/made", "w").close()
facts = [state.num_processes, state.process_index, state.local_num_processes, state.local_process_index, state.distributed_type.value,
         state.backend, str(state.device), state.mixed_precision, state.debug, share, total.item(), seen, sys.argv[2:]]
with open(f"{sys.argv[1]}/{state.process_index}.json", "w") as file:
    json.dump(facts, file)
state.wait_for_everyone()
state.destroy_process_group()
sys.exit(int(os.environ.get("FAIL_RANK", "-1")) == state.process_index and 7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HOME": str(arguments[-1]), "GLOO_SOCKET_IFNAME": "lo", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(launchers.__file__).parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bigmodel", "launch", *map(str, arguments[:-1])]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output


def facts(folder: Path, rank: int) -> list[Any]:
    return json.loads((folder / f"{rank}.json").read_text())


def test_a_script_in_two_processes_of_one_host_and_how_one_of_them_ended(script: Path, tmp_path: Path) -> None:
    options = ["--num_processes", 2, "--mixed_precision", "bf16", "--cpu", "--debug"]
    code, output = finished(start(*options, script, tmp_path, "--lr", "1", tmp_path, FAIL_RANK="1"))
    common = ["MULTI_CPU", "gloo", "cpu", "bf16", True]
    assert facts(tmp_path, 0) == [2, 0, 2, 0, *common, [0, 1, 2], 3, False, ["--lr", "1"]], output
    assert facts(tmp_path, 1) == [2, 1, 2, 1, *common, [3, 4, 4], 3, True, ["--lr", "1"]]
    assert code == 1
    assert "The process of rank 1 ended with exit code 7" in output


def test_two_hosts_are_one_job(script: Path, tmp_path: Path) -> None:
    shared = ["--num_processes", 2, "--num_machines", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", get_free_port(), "--cpu"]
    hosts = [start(*shared, "--machine_rank", rank, script, tmp_path, tmp_path) for rank in (0, 1)]
    ends = [finished(host) for host in hosts]
    assert [code for code, _ in ends] == [0, 0], ends
    common = ["MULTI_CPU", "gloo", "cpu", "no", False]
    assert facts(tmp_path, 0) == [2, 0, 1, 0, *common, [0, 1, 2], 3, False, []]
    assert facts(tmp_path, 1) == [2, 1, 1, 0, *common, [3, 4, 4], 3, True, []]


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text("import json, os, sys\njson.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))")
    launch_script(LaunchSettings(use_cpu=True, mixed_precision="fp16"), [str(script), str(found), "--lr", "1"], threads=3)
    arguments, variables = json.loads(found.read_text())
    assert arguments == ["--lr", "1"]
    assert (variables["BIGMODEL_USE_CPU"], variables["ACCELERATE_MIXED_PRECISION"], variables["OMP_NUM_THREADS"]) == ("true", "fp16", "3")
    assert not {"RANK", "MASTER_ADDR", "WORLD_SIZE"} & set(variables)
    assert "BIGMODEL_USE_CPU" not in os.environ
    script.write_text("raise SystemExit(3)")
    with pytest.raises(TrainingError, match=r"train\.py ended with exit code 3"):
        launch_script(LaunchSettings(), [str(script)])


@pytest.mark.parametrize(
    ("variable", "threads", "expected"), [("7", None, "7"), ("7", 3, "3"), (None, None, str(launchers.host_cores())), (None, 3, "3")]
)
def test_threads_are_the_users_where_he_says_so(
    variable: str | None, threads: int | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    script = tmp_path / "threads.py"
    script.write_text("import os, sys; open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])")
    launch_script(LaunchSettings(use_cpu=True), [str(script), str(tmp_path / "found")], threads=threads)
    assert (tmp_path / "found").read_text() == expected


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("4,2", 4), ("", 1), ("many", 1), ("0", 1), (None, 1)])
def test_a_forked_process_computes_with_as_many_threads(variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert launchers._threads_of_forked_processes() == threads


def test_accelerators_are_chosen_by_their_drivers_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="gpu_ids='0,1': no accelerators that could be chosen"):
        launch_script(LaunchSettings(gpu_ids="0,1"), ["train.py"])
    monkeypatch.setattr(launchers, "visibility_variable", lambda: "SIM_VISIBLE_DEVICES")
    assert launchers._chosen_devices(LaunchSettings(gpu_ids="0,1")) == {"SIM_VISIBLE_DEVICES": "0,1"}
    assert launchers._chosen_devices(LaunchSettings(gpu_ids="all")) == {}


def test_on_the_cpu_there_are_no_accelerators_to_choose() -> None:
    assert launchers._chosen_devices(LaunchSettings(gpu_ids="0", use_cpu=True)) == {}


def test_processes_that_fail_are_started_again_and_their_output_goes_to_files(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "file = f'{sys.argv[1]}/{os.environ[\"RANK\"]}.tries'\n"
        "tries = len(open(file).read()) if os.path.exists(file) else 0\n"
        "open(file, 'a').write('x')\n"
        "print('try', tries)\n"
        "sys.exit(tries == 0)\n"
    )
    options = ["--cpu", "--max_restarts", 1, "--monitor_interval", 0.05, "--tee", 3, "--log_dir", tmp_path / "logs"]
    for count in (2, 1):
        for file in tmp_path.glob("*.tries"):
            file.unlink()
        code, output = finished(start("--num_processes", count, *options, script, tmp_path, tmp_path))
        assert code == 0, output
        assert {file.name: file.read_text() for file in tmp_path.glob("*.tries")} == {f"{rank}.tries": "xx" for rank in range(count)}
        assert f"[default{count - 1}]:try 1" in output
    assert sorted(file.read_text() for file in (tmp_path / "logs").rglob("stdout.log")) == ["try 0\n"] * 3 + ["try 1\n"] * 3


def test_a_program_that_is_not_pythons_runs_and_torchrun_is_quiet_when_told(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text('#!/bin/sh\necho "$1 of ${RANK:-none}" > "$2/${RANK:-none}.txt"\nexit ${FAIL:-0}\n')
    program.chmod(0o755)
    code, output = finished(start("--num_processes", 2, "--cpu", "--no_python", program, "word", tmp_path, tmp_path))
    assert code == 0, output
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["word of 0\n", "word of 1\n"]
    launch_script(LaunchSettings(use_cpu=True), [str(program), "word", str(tmp_path)], no_python=True)
    assert (tmp_path / "none.txt").read_text() == "word of none\n"
    code, output = finished(start("--num_processes", 2, "--cpu", "-q", "--no_python", program, "word", tmp_path, tmp_path, FAIL="5"))
    assert code == 1
    assert re.fullmatch(r"Error: The process of rank \d ended with exit code 5; its own output says why\.\n", output), output
    with pytest.raises(TrainingError, match=r"nowhere\.sh: there is no such program"):
        launch_script(LaunchSettings(num_processes=2), ["nowhere.sh"], no_python=True)


NOTEBOOK = """
import os, sys, threading
import torch, torch.distributed as dist
import bigmodel
from bigmodel.state import AcceleratorState, PartialState
from bigmodel.training.environment import get_free_port

folder = sys.argv[1]
torch.ones(400, 400) @ torch.ones(400, 400)  # threads of this process, which a forked one lacks

def main():
    def cell(word, other):  # as in a notebook: no process could import it
        state = AcceleratorState()
        total = torch.tensor([state.process_index + 1.0])
        dist.all_reduce(total)
        torch.ones(400, 400) @ torch.ones(400, 400)
        path = f"{folder}/{word}-{state.process_index}"
        with open(path, "w") as file:
            file.write(f"{state.num_processes} {total.item()} {state.backend} {state.distributed_type.value} ")
            file.write(f"{state.mixed_precision} {other} {torch.get_num_threads()}")
        return threading.Lock()

    def failing():
        PartialState().wait_for_everyone()  # while others are still being joined, they would tell of the lost one first
        if PartialState().process_index == 1:
            raise KeyError("the cell's own trouble")

    def training(word):  # the same cell, first with one process to see whether it works
        accelerator = bigmodel.Accelerator(gradient_accumulation_steps=3)
        weights = accelerator.prepare(torch.nn.Linear(2, 1)).parameters()
        with open(f"{folder}/{word}-{accelerator.process_index}", "w") as file:
            file.write(f"{accelerator.num_processes} {accelerator.mixed_precision} {len(list(weights))}")
        seen.append(accelerator)

    seen = []
    bigmodel.notebook_launcher(training, ("alone",), num_processes=1)
    bigmodel.notebook_launcher(training, ("both",), num_processes=2, use_port=str(get_free_port()), mixed_precision="bf16")
    bigmodel.notebook_launcher(training, ("again",), num_processes=1)
    assert [accelerator.num_processes for accelerator in seen] == [1, 1] and seen[0].device == torch.device("cpu")
    AcceleratorState._reset_state(True)

    bigmodel.notebook_launcher(cell, ("notebook", 1), num_processes=2, use_port=str(get_free_port()), mixed_precision="bf16")
    bigmodel.debug_launcher(cell, ("debug", 2))
    for launcher in (bigmodel.debug_launcher, lambda f: bigmodel.notebook_launcher(f, num_processes=2, use_port=str(get_free_port()))):
        try:
            launcher(failing)
        except bigmodel.TrainingError as error:
            assert "the cell's own trouble" in str(error) and "rank 1" in str(error), error
        else:
            raise AssertionError("not told")

main()
assert not PartialState._shared_state and "MASTER_ADDR" not in os.environ
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_functions_of_a_notebook_run_in_forked_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(launchers.__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"notebook-{rank}").read_text() == "2 3.0 gloo MULTI_CPU bf16 1 2"
        assert (tmp_path / f"debug-{rank}").read_text() == "2 3.0 gloo MULTI_CPU no 2 2"
        assert (tmp_path / f"both-{rank}").read_text() == "2 bf16 2"
    assert (tmp_path / "alone-0").read_text() == (tmp_path / "again-0").read_text() == "1 no 2"


def test_a_job_that_is_stopped_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: object) -> None:
        raise SignalException("stopped", signal.SIGINT)

    monkeypatch.setattr("torch.distributed.run.run", stopped)
    with pytest.raises(SystemExit) as ended:
        launch_script(LaunchSettings(num_processes=2, use_cpu=True), ["train.py"])
    assert ended.value.code == 130


def test_every_process_of_a_notebook_that_failed_is_told() -> None:
    failed = SimpleNamespace(exitcode=1, timestamp=2, message={"extraInfo": {"py_callstack": "ValueError: the cause"}})
    lost = SimpleNamespace(exitcode=1, timestamp=1, message="RuntimeError: closed by peer")
    stopped = SimpleNamespace(exitcode=-15, timestamp=3, message="Signal 15")
    told = launchers._stories({0: lost, 1: failed, 2: stopped}).split("\n")
    assert told == [
        "The function failed in the process of rank 0: RuntimeError: closed by peer",
        "The function failed in the process of rank 1: ValueError: the cause",
    ]
    assert launchers._stories({2: stopped}) == "The function failed in the process of rank 2: Signal 15"
    quiet = SimpleNamespace(exitcode=7, timestamp=4, message="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html")
    assert launchers._stories({3: quiet}).endswith("rank 3: it ended with exit code 7, and not by an error of Python's.")


def test_a_function_alone_runs_in_this_process() -> None:
    found: list[Any] = []

    def train(word: str) -> None:
        found.extend([word, os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"], os.environ["BIGMODEL_MIXED_PRECISION"]])

    notebook_launcher(train, ("x",), mixed_precision="BF16")
    assert found == ["x", os.getpid(), "bf16", "bf16"]
    assert "BIGMODEL_MIXED_PRECISION" not in os.environ
    with pytest.raises(TrainingError, match="mixed_precision is 'fp17'"):
        notebook_launcher(train, mixed_precision="fp17")


def test_it_is_too_late_once_this_process_is_one_of_a_job(accelerators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState()
    for launcher in (debug_launcher, lambda function: notebook_launcher(function, num_processes=2)):
        with pytest.raises(TrainingError, match="inside of the function, and restart the notebook"):
            launcher(print)
    PartialState._reset_state()
    (device,) = accelerators(1)
    monkeypatch.setattr(torch.get_device_module(device), "is_initialized", lambda: True, raising=False)
    with pytest.raises(TrainingError, match="has used its accelerator"):
        debug_launcher(print)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(TrainingError, match=f"Port {port} of this machine is taken"):
            notebook_launcher(print, num_processes=2, use_port=str(port))
        with pytest.raises(TrainingError, match=f"Port {port} of this machine is taken"):
            launch_script(LaunchSettings(num_processes=2, main_process_port=port), ["train.py"])
