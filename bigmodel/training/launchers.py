"""Processes started for a job: by torchrun for a script, forked for a function of a notebook or a test."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ..devices import accelerator_count, accelerator_started, accelerator_type, host_cores, machine_text, visibility_variable
from ..errors import TrainingError
from ..settings import PREFIXES
from .accelerator_state import AcceleratorState
from .argument_types import refuse_wrong_arguments
from .config_file import LaunchSettings, launch_environment
from .enums import DistributedType, PrecisionType
from .environment import (
    LOCAL_RANK_VARIABLES,
    LOCAL_WORLD_VARIABLES,
    MAIN_PORT,
    RANK_VARIABLES,
    WORLD_VARIABLES,
    is_port_in_use,
    patch_environment,
)
from .gradient_state import GradientState
from .state import PartialState

__all__ = ["debug_launcher", "launch_script", "notebook_launcher", "torchrun_arguments"]

LEFT_BEHIND = "_left_by_a_launch"
"""Marks the state of a process that a function has made which `notebook_launcher` ran alone: a later launch may start without it."""

ENGINES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""What needs a process group also for one process."""

THREADS: Final = "OMP_NUM_THREADS"
"""How many threads compute in a process: a variable of OpenMP, which torch follows."""

NOTHING_TOLD: Final = "To enable traceback see"
"""How torchrun's message begins where a process left no error."""


def torchrun_arguments(settings: LaunchSettings) -> list[str]:
    """The options of torchrun that start the processes of this machine."""
    arguments = [f"--nnodes={settings.num_machines}", f"--nproc-per-node={settings.num_processes // settings.num_machines}"]
    if settings.num_machines == 1 and not settings.main_process_port:
        return [*arguments, "--standalone"]
    address = settings.main_process_ip or "127.0.0.1"
    port = settings.main_process_port or MAIN_PORT
    if settings.rdzv_backend == "static":
        return [*arguments, f"--node-rank={settings.machine_rank}", f"--master-addr={address}", f"--master-port={port}"]
    return [*arguments, f"--rdzv-backend={settings.rdzv_backend}", f"--rdzv-endpoint={address}:{port}"]


def launch_script(
    settings: LaunchSettings,
    command: Sequence[str],
    *,
    module: bool = False,
    no_python: bool = False,
    torchrun: Sequence[str] = (),
    threads: int | None = None,
) -> None:
    """Runs a script with its arguments in the processes of this machine, and returns when all have ended well.

    Args:
        settings: how many processes, and what they find in their environment.
        command: the script, or with `module` a module's name, or with `no_python` a program, and its arguments.
        torchrun: further options of torchrun, which then starts one process alone too.
        threads: of torch in each process; None: the environment's `OMP_NUM_THREADS`, else the cores shared evenly where they compute.

    Raises:
        TrainingError: a process failed, the port is taken, no such program, or `gpu_ids` on a machine whose accelerators cannot be chosen.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if settings.machine_rank == 0 and settings.main_process_port:
        _refuse_taken_port(settings.main_process_port)
    if no_python and shutil.which(command[0]) is None:
        raise TrainingError(f"{command[0]}: there is no such program.")
    variables = launch_environment(settings) | _chosen_devices(settings)
    on_cpu = settings.use_cpu or accelerator_type() is None
    if threads is None and on_cpu and not os.environ.get(THREADS):
        threads = max(host_cores() * settings.num_machines // settings.num_processes, 1)
    if threads is not None:
        variables[THREADS] = str(threads)
    with patch_environment(**variables):
        if settings.num_processes == 1 and settings.distributed_type not in ENGINES and not torchrun:
            python = [] if no_python else [sys.executable, "-m"] if module else [sys.executable]
            code = subprocess.run([*python, *command]).returncode
            if code:
                raise TrainingError(f"{command[0]} ended with exit code {code}; its own output says why.")
            return
        try:
            kind = ["--no-python"] if no_python else ["--module"] if module else []
            run(parse_args([*torchrun_arguments(settings), *torchrun, *kind, *command]))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise TrainingError(f"The process of rank {rank} ended with exit code {failure.exitcode}; its own output says why.") from error
        except SignalException as error:  # Ctrl-C, or whoever stops the job; torchrun has passed it on to the processes
            raise SystemExit(128 + int(error.sigval)) from None


def _chosen_devices(settings: LaunchSettings) -> dict[str, str]:
    variable = visibility_variable()
    if settings.gpu_ids in (None, "all") or (settings.use_cpu and variable is None):
        return {}
    if variable is None:
        raise TrainingError(f"gpu_ids={settings.gpu_ids!r}: no accelerators that could be chosen from: {machine_text()}.")
    return {variable: str(settings.gpu_ids)}


def _refuse_taken_port(port: int | str) -> None:
    if is_port_in_use(port):
        raise TrainingError(f"Port {port} of this machine is taken by another process; choose another one.")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = str(MAIN_PORT),
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Calls `function(*args)` in several processes, forked from this one, so that it may be defined in a notebook's cell.

    Neither a process state nor an accelerator may have been used in this process before: make the `Accelerator` inside of `function`.

    Args:
        function: what is run, in each process.
        args: for it.
        num_processes: on this machine; None: one for each accelerator, or one. One alone runs in this process, and on the CPU leaves it
            fit for a later launch of several.
        mixed_precision: as in `AcceleratorState`.
        use_port, master_addr: where the processes meet, on machine 0.
        node_rank, num_nodes: of this machine, and how many there are.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: how machines meet, as in torchrun.
        max_restarts: times that all processes are started again after one has failed.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: what torchrun writes before each line of their output.

    Raises:
        TrainingError: too late in this process, the port is taken, or `function` failed in a process.
    """
    given = {"function": function, "args": args, "num_processes": num_processes}
    refuse_wrong_arguments(notebook_launcher, "notebook_launcher", given)
    _refuse_no_processes("notebook_launcher", num_processes)
    if str(mixed_precision).lower() not in PrecisionType:
        raise TrainingError(f"mixed_precision is {mixed_precision!r}; use one of {PrecisionType.list()}.")
    variables = {f"{prefix}MIXED_PRECISION": str(mixed_precision).lower() for prefix in PREFIXES}
    count = max(accelerator_count(), 1) if num_processes is None else num_processes
    if count == 1 and num_nodes == 1:
        fresh = not PartialState._shared_state
        with patch_environment(**variables):
            try:
                function(*args)
            finally:
                if fresh and PartialState._shared_state:
                    PartialState._shared_state[LEFT_BEHIND] = True
        return
    _refuse_late_launch("notebook_launcher")
    if node_rank == 0:
        _refuse_taken_port(use_port)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    static = rdzv_backend == "static"
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=count,
        run_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{use_port}",
        rdzv_configs={**(rdzv_conf or {}), **({"rank": node_rank} if static else {})},
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        start_method="fork",
        log_line_prefix_template=log_line_prefix_template,
    )
    with patch_environment(**variables):
        try:
            elastic_launch(config, _forked(function, _threads_of_forked_processes()))(*args)
        except ChildFailedError as error:
            raise TrainingError(_stories(error.failures)) from error


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Calls `function(*args)` in several processes on the CPU, forked from this one and joined in a gloo group: for tests.

    Raises:
        TrainingError: too late in this process (see `notebook_launcher`), or `function` failed in a process.
    """
    from torch.multiprocessing.spawn import ProcessException, start_processes

    refuse_wrong_arguments(debug_launcher, "debug_launcher", locals())
    _refuse_no_processes("debug_launcher", num_processes)
    _refuse_late_launch("debug_launcher")
    variables = {f"{prefix}USE_CPU": "1" for prefix in PREFIXES} | {f"{prefix}MIXED_PRECISION": "no" for prefix in PREFIXES}
    with tempfile.TemporaryDirectory(prefix="bigmodel-") as folder, patch_environment(**variables):
        try:
            call = _forked(function, _threads_of_forked_processes())
            start_processes(_joined, (num_processes, Path(folder) / "meeting", call, args), num_processes, start_method="fork")
        except ProcessException as error:
            raise TrainingError(f"The function failed in the process of rank {error.error_index}: {error}") from error


def _joined(rank: int, count: int, meeting: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    variables: dict[str, object] = {
        RANK_VARIABLES[0]: rank,
        LOCAL_RANK_VARIABLES[0]: rank,
        WORLD_VARIABLES[0]: count,
        LOCAL_WORLD_VARIABLES[0]: count,
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name may not resolve
    with patch_environment(**variables):
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        try:
            function(*args)
        finally:
            dist.destroy_process_group()


def _threads_of_forked_processes() -> int:
    """What `OMP_NUM_THREADS` says, else 1. Called right before a fork, by the thread that forks."""
    said = os.environ.get(THREADS, "").split(",")[0].strip()  # further numbers are for loops within loops
    wanted = int(said) if said.isdecimal() else 1
    return wanted if wanted > 1 and _computing_threads_end() else 1


def _computing_threads_end() -> bool:
    """Ends the threads that OpenMP keeps; others start when they are needed. A forked process lacks them, and would wait for them.

    Returns whether the OpenMP of this process can do so (`omp_pause_resource_all`, OpenMP 5.0, section 3.2.44).
    """
    try:
        return int(ctypes.CDLL(None).omp_pause_resource_all(2)) == 0  # omp_pause_hard
    except (AttributeError, OSError):
        return False


def _forked(function: Callable[..., Any], threads: int) -> Callable[..., None]:
    @wraps(function)
    def call(*args: Any) -> None:  # what the function returns need not be something that travels between processes
        torch.set_num_threads(threads)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        function(*args)

    return call


def _stories(failures: Mapping[int, Any]) -> str:
    """What each rank told that failed, in order of time: some may only have lost another. Those that were stopped had nothing to tell."""
    told = [(rank, failure) for rank, failure in failures.items() if failure.exitcode >= 0] or list(failures.items())
    told.sort(key=lambda each: each[1].timestamp)
    return "\n".join(f"The function failed in the process of rank {rank}: {_story(failure)}" for rank, failure in told)


def _story(failure: Any) -> str:
    """What torchrun has recorded of a failure: the traceback in a dictionary where the function raised, else a text."""
    if isinstance(failure.message, dict):
        return str(failure.message["extraInfo"]["py_callstack"])
    if failure.message.startswith(NOTHING_TOLD):
        return f"it ended with exit code {failure.exitcode}, and not by an error of Python's."
    return str(failure.message)


def _refuse_no_processes(launcher: str, num_processes: int | None) -> None:
    if num_processes is not None and num_processes < 1:
        raise TrainingError(f"{launcher}(num_processes={num_processes}): there is at least one process.")


def _refuse_late_launch(launcher: str) -> None:
    if dist.is_initialized():
        raise TrainingError(
            f"{launcher} forks this process, which has a process group: a function that was launched with one process, or the notebook "
            "itself, has made it. Restart the notebook, and launch with as many processes as are needed at once."
        )
    if PartialState._shared_state and LEFT_BEHIND not in PartialState._shared_state:
        raise TrainingError(
            f"{launcher} forks this process, which is already one of a job: make the Accelerator or PartialState inside of the function, "
            "and restart the notebook."
        )
    if accelerator_started():
        raise TrainingError(
            f"{launcher} forks this process, which has used its accelerator ({accelerator_type()}): a forked process could not. "
            "Use it inside of the function only (one process alone runs in the notebook's own), and restart the notebook."
        )
