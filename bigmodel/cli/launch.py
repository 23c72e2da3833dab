"""`bigmodel launch SCRIPT`: a script in the processes of a job, started by torchrun."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ..errors import TrainingError
from ..training.config_file import read_launch_settings
from ..training.enums import DistributedType
from ..training.launchers import launch_script
from .launch_options import notes_on_options, sections_of
from .output import note

__all__ = ["launch"]


def launch(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script, and its own arguments.")],
    config_file: Annotated[str | None, typer.Option("--config_file", help="YAML or JSON, as write_basic_config writes it.")] = None,
    num_processes: Annotated[int | None, typer.Option("--num_processes", help="Processes on all machines together.")] = None,
    num_machines: Annotated[int | None, typer.Option("--num_machines", help="Machines; run this command on each of them.")] = None,
    machine_rank: Annotated[int | None, typer.Option("--machine_rank", help="This machine's number, from 0.")] = None,
    main_process_ip: Annotated[str | None, typer.Option("--main_process_ip", help="Address of machine 0.")] = None,
    main_process_port: Annotated[int | None, typer.Option("--main_process_port", help="On which machine 0 waits.")] = None,
    rdzv_backend: Annotated[str | None, typer.Option("--rdzv_backend", help="How machines meet: static, c10d, …")] = None,
    gpu_ids: Annotated[str | None, typer.Option("--gpu_ids", help="Accelerators to use: 0,2.")] = None,
    mixed_precision: Annotated[str | None, typer.Option("--mixed_precision", help="no, fp16, bf16 or fp8.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Compute on the CPU.")] = False,
    multi_gpu: Annotated[
        bool, typer.Option("--multi_gpu", help="A copy of the model in each process, whatever the config file says.")
    ] = False,
    use_fsdp: Annotated[bool, typer.Option("--use_fsdp", help="Shard the model.")] = False,
    use_deepspeed: Annotated[bool, typer.Option("--use_deepspeed", help="Train with DeepSpeed.")] = False,
    use_megatron_lm: Annotated[bool, typer.Option("--use_megatron_lm", help="Train with Megatron-LM.")] = False,
    threads: Annotated[int | None, typer.Option("--num_cpu_threads_per_process", help="Threads of torch in each process.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Compare shapes between processes before they are gathered.")] = False,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
    no_python: Annotated[bool, typer.Option("--no_python", help="SCRIPT is a program that is run as it is.")] = False,
    enable_cpu_affinity: Annotated[
        bool, typer.Option("--enable_cpu_affinity", help="Each process runs on cores near its accelerator.")
    ] = False,
    max_restarts: Annotated[int | None, typer.Option("--max_restarts", help="Times that all are started again after a failure.")] = None,
    monitor_interval: Annotated[
        float | None, typer.Option("--monitor_interval", help="Seconds between two looks at the processes.")
    ] = None,
    tee: Annotated[
        str | None, typer.Option("--tee", "-t", help="Output to files, too: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by rank.")
    ] = None,
    log_dir: Annotated[str | None, typer.Option("--log_dir", help="Folder for these files.")] = None,
    role: Annotated[str | None, typer.Option("--role", help="Name of the processes, for torchrun.")] = None,
    rdzv_conf: Annotated[str | None, typer.Option("--rdzv_conf", help="More on how machines meet: timeout=900,…")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out what torchrun says of processes that fail.")] = False,
) -> None:
    """Runs a script in several processes, on one machine or several; without --num_processes and a config file in one for each accelerator.

    Options that are given count before the config file's keys. Keys of its sections are options, too: --fsdp_version 2, --zero_stage 2,
    --dynamo_backend inductor.
    """
    wanted = {
        DistributedType.MULTI_GPU: multi_gpu,
        DistributedType.FSDP: use_fsdp,
        DistributedType.DEEPSPEED: use_deepspeed,
        DistributedType.MEGATRON_LM: use_megatron_lm,
    }
    if module and no_python:
        raise TrainingError("--module and --no_python: a program is no module; give one of them.")
    engines = [engine.value for engine, chosen in wanted.items() if chosen]
    if len(engines) > 1:
        raise TrainingError(f"{' and '.join(engines)} cannot train one model together: choose one.")
    given: dict[str, object] = {
        "distributed_type": engines[0] if engines else None,
        "gpu_ids": gpu_ids,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
        "machine_rank": machine_rank,
        "mixed_precision": mixed_precision,
        "num_machines": num_machines,
        "num_processes": num_processes,
        "rdzv_backend": rdzv_backend,
        "use_cpu": cpu or None,
        "debug": debug or None,
        "enable_cpu_affinity": enable_cpu_affinity or None,
        **sections_of(context),
    }
    settings = read_launch_settings(config_file, {key: value for key, value in given.items() if value is not None})
    for each in notes_on_options(context, settings):
        note(each)
    options = {
        "max-restarts": max_restarts,
        "monitor-interval": monitor_interval,
        "tee": tee,
        "log-dir": log_dir,
        "role": role,
        "rdzv-conf": rdzv_conf,
    }
    torchrun = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if quiet:
        logging.disable()  # in this process, which only starts others
    try:
        launch_script(settings, command, module=module, no_python=no_python, torchrun=torchrun, threads=threads)
    finally:
        logging.disable(logging.NOTSET)
