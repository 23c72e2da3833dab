"""Predicted against measured: a 2 GB bf16 Llama offloaded to disk on this CPU, and behind a throttled link on the simulated accelerator.

Run: `make bench`. The rates of the machine are measured in the same process, before, between and after the forwards, so that a machine that
is busy is predicted as the machine that it is. What was planned and measured goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from main_job import empty_llama, make_model
from side_by_side import drop_from_page_cache, folder_bytes, fresh_process, run_worker_if_asked, worker

LIMIT = 0.2
ROUNDS = 2
PROMPTS = (32, 256)
PAST = 32
"""Tokens behind those that are decoded."""


def forward_seconds(model: torch.nn.Module, device: torch.device, tokens: int, past: int) -> float:
    """One forward of `tokens` tokens after `past` others, which a cache on the device holds."""
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    if past:
        heads = torch.zeros(1, config.num_key_value_heads, past, config.head_dim, dtype=torch.bfloat16, device=device)
        for layer in range(config.num_hidden_layers):
            cache.update(heads, heads, layer)
    ids = torch.arange(tokens).unsqueeze(0) * 7 % config.vocab_size
    started = time.perf_counter()
    with torch.no_grad():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        float(logits[0, -1, 0])  # waits for a device that queues
    return time.perf_counter() - started


def compared(folder: str, budgets: dict[int | str, int], cold: bool) -> dict[str, list[float]]:
    """Predicted and measured seconds of each forward, and what was predicted to bind."""
    import bigmodel
    from bigmodel.devices import as_device
    from bigmodel.measuring import measure_machine
    from bigmodel.planning.predicting import predict_forward

    empty = empty_llama(bigmodel, folder, torch.bfloat16)
    made = bigmodel.plan(empty, budgets)
    print(made, file=sys.stderr)
    model = empty_llama(bigmodel, folder, torch.bfloat16)
    model = bigmodel.load_and_dispatch(model, bigmodel.Checkpoint.open(folder), device_map=made)
    questions = [(tokens, 0) for tokens in PROMPTS] + [(1, PAST)]
    states = [True, False] if cold else [True]
    measured: dict[tuple[int, int, bool], list[float]] = {}
    predicted: dict[tuple[int, int, bool], list] = {}
    device = as_device(made.main_device)
    for _ in range(2):
        forward_seconds(model, device, 1, 0)  # the order of the blocks is learned
    for number in range(ROUNDS + 1):
        machine = measure_machine(Path(folder).parent)
        print(describe(machine), file=sys.stderr)
        for key in ((tokens, past, cached) for tokens, past in questions for cached in states):
            tokens, past, cached = key
            found = predict_forward(empty, made, machine, tokens=tokens, past=past, is_cached=cached)
            predicted.setdefault(key, []).append(found)
        if number == ROUNDS:
            break
        for tokens, past in questions:
            for cached in states:
                for _ in range(3 if cached else 1):
                    (warm if cached else cool)(Path(folder))
                    measured.setdefault((tokens, past, cached), []).append(forward_seconds(model, device, tokens, past))
    return {
        f"{'decode' if past else f'prompt of {tokens}'}, files {'cached' if cached else 'on disk'}|{found[0].binds}": [
            statistics.median(each.seconds for each in found),
            statistics.median(measured[tokens, past, cached]),
        ]
        for (tokens, past, cached), found in predicted.items()
    }


def cool(folder: Path) -> None:
    """Drops the model's files from the page cache, also pages of them that this process has mapped."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors") and str(folder) in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)  # they are in the file still
    drop_from_page_cache(folder)


def warm(folder: Path) -> None:
    """Brings the model's files into the page cache."""
    buffer = bytearray(8 << 20)
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def describe(machine) -> str:
    cpu = machine.devices["cpu"]
    rates = {"disk": machine.disk, "page cache": machine.page_cache, "RAM": machine.ram, "activations": cpu.activation}
    rates |= {f"link to {key}": device.from_host for key, device in machine.devices.items() if device.from_host}
    matmul = ", ".join(f"{sample.rows}: {sample.flops / 1e9:.0f}" for sample in cpu.matmul if sample.dtype == "bfloat16")
    links = ", ".join(f"{name} {rate.per_second / 1e9:.2f}" for name, rate in rates.items())
    return f"GB/s: {links}; 10⁹ operations per second by rows: {matmul}; {1e6 * cpu.call_seconds:.1f} µs a call"


@worker
def on_this_cpu(folder: str) -> dict[str, list[float]]:
    return compared(folder, {"cpu": 700 << 20}, cold=True)


@worker
def on_a_simulated_accelerator(folder: str, rests_on: str) -> dict[str, list[float]]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "simulator"))
    import simdev

    simulator = simdev.register()
    simulator.set_up(1, "1GiB", h2d_gbps=1.0, h2d_latency_us=20, queued_kernels=True, poison=False, sanitize=False)
    try:
        return compared(folder, {0: 700 << 20, "cpu": (8 << 30) if rests_on == "RAM" else 0}, cold=False)
    finally:
        gc.collect()
        simulator.tear_down()


def main() -> None:
    run_worker_if_asked()
    root = Path(os.environ.get("BIGMODEL_BENCH_DIR", Path(tempfile.gettempdir()) / "bigmodel-bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "llama-1.1b-bf16"
    make_model(folder)
    print(f"model: {folder_bytes(folder) / 2**20:,.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("\n| where | forward | waits for | predicted | measured | ratio |\n|---|---|---|---:|---:|---:|")
    ratios = []
    for where, name, arguments in (
        ("this CPU, blocks on disk", "on_this_cpu", {}),
        ("simulated accelerator, link of 1 GB/s, blocks in RAM", "on_a_simulated_accelerator", {"rests_on": "RAM"}),
        ("simulated accelerator, link of 1 GB/s, blocks on disk", "on_a_simulated_accelerator", {"rests_on": "disk"}),
    ):
        for question, (predicted, measured) in fresh_process(__file__, name, {"folder": str(folder), **arguments}).items():
            forward, binds = question.split("|")
            ratios.append(predicted / measured)
            print(f"| {where} | {forward} | {binds} | {predicted:.3f} s | {measured:.3f} s | {ratios[-1]:.2f} |", flush=True)
    within = sum(1 - LIMIT <= ratio <= 1 + LIMIT for ratio in ratios)
    print(f"\n{within} of {len(ratios)} predictions are within {LIMIT:.0%}.")


if __name__ == "__main__":
    main()
