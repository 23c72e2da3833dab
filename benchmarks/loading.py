"""The loader beside its peers and beside what the disk and the memory can do, on the 2 GB bf16 Llama of `main_job.py`.

Run: `make bench`, or this file alone. At the end stands which of the figures asked for hold. Environment: `BIGMODEL_BENCH_DIR` (where the
checkpoints are kept), `BIGMODEL_BENCH_ROUNDS` (default 3), `BIGMODEL_BENCH_GIB` (sizes of the growth table, default "0.2,1,2,8"; a size
that the disk or the memory has no room for is left out, and the table says so).
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import shutil
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from main_job import empty_llama, forwards, make_model
from side_by_side import compare, drop_from_page_cache, folder_bytes, fresh_process, print_verdicts, run_worker_if_asked, worker
from torch import nn

CHUNK_BYTES = 8 << 20
ROUNDS = int(os.environ.get("BIGMODEL_BENCH_ROUNDS", "3"))
SIZES_GIB = [float(size) for size in os.environ.get("BIGMODEL_BENCH_GIB", "0.2,1,2,8").split(",")]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
OPTIONAL_PEERS = {"runai_streamer_private": "runai_model_streamer", "fastsafetensors_private": "fastsafetensors"}
"""Peers that do not install everywhere: worker → its package."""

Numbers = dict[str, float]


def shards(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def skeleton(folder: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A model on meta with exactly the checkpoint's tensors: what loading costs without the library that the model comes from."""
    root = nn.Module()
    for file in shards(folder):
        with open(file, "rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, info in header.items():
            if name == "__metadata__":
                continue
            *path, leaf = name.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            tensor = torch.empty(info["shape"], dtype=dtype or DTYPES[info["dtype"]], device="meta")
            module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def fresh_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def read_in_parallel(files: Sequence[Path], buffers: Sequence[memoryview], threads: int = 2) -> float:
    """Seconds that plain positioned reads of 8 MiB take, as a `dd` or `fio` job a thread would do them."""
    started = time.perf_counter()
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    work = iter([(n, start) for n, file in enumerate(files) for start in range(0, file.stat().st_size, CHUNK_BYTES)])
    lock = threading.Lock()

    def drain() -> None:
        while True:
            with lock:
                job = next(work, None)
            if job is None:
                return
            number, start = job
            rest = buffers[number][start : start + CHUNK_BYTES]
            while rest:
                count = os.preadv(descriptors[number], [rest], start)
                rest, start = rest[count:], start + count

    workers = [threading.Thread(target=drain) for _ in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for descriptor in descriptors:
        os.close(descriptor)
    return time.perf_counter() - started


def timed(work: Callable[[], Any]) -> Numbers:
    """Seconds and peak private memory of `work`; what it returns is kept until both are known."""
    from bigmodel.measure import PeakPrivateMemory

    with PeakPrivateMemory() as memory:
        started = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - started
    del result
    return {"seconds": seconds, "peak private bytes": memory.peak_bytes}


# Same dtype, into memory of the process's own. Peers that map files are made to copy, so that all deliver the same.


@worker
def bigmodel_private(folder: str) -> Numbers:
    from bigmodel import load_checkpoint_in_model

    model = skeleton(folder)
    return timed(lambda: load_checkpoint_in_model(model, folder, device_map={"": "cpu"}))


@worker
def bare_two_threads(folder: str) -> Numbers:
    files = shards(folder)
    return timed(lambda: read_in_parallel(files, [fresh_memory(file.stat().st_size) for file in files]))


@worker
def safetensors_mapped_and_copied(folder: str) -> Numbers:
    from safetensors.torch import load_file

    return timed(lambda: [{name: value.clone() for name, value in load_file(file).items()} for file in shards(folder)])


@worker
def safetensors_pread(folder: str) -> Numbers:
    from safetensors.torch import load_file

    return timed(lambda: [load_file(file, backend="pread") for file in shards(folder)])


@worker
def transformers_private(folder: str) -> Numbers:
    from transformers import LlamaForCausalLM

    def load() -> nn.Module:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    return timed(load)


@worker
def fastsafetensors_private(folder: str) -> Numbers:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> list[object]:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [str(file) for file in shards(folder)]})
        buffers = loader.copy_files_to_device()
        return [loader, buffers, {name: buffers.get_tensor(name) for name in loader.get_keys()}]

    return timed(load)


@worker
def runai_streamer_private(folder: str) -> Numbers:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> dict[str, torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(file) for file in shards(folder)])
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return timed(load)


# bf16 → fp32, into the same model.


def to_float32(library: Any, folder: str) -> Numbers:
    model = skeleton(folder, torch.float32)
    return timed(lambda: library.load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=torch.float32))


@worker
def bigmodel_float32(folder: str) -> Numbers:
    import bigmodel

    return to_float32(bigmodel, folder)


@worker
def accelerate_float32(folder: str) -> Numbers:
    import accelerate

    return to_float32(accelerate, folder)


@worker
def bare_float32_pages(folder: str) -> Numbers:
    """What no load can do without: the system's giving the memory of the float32 model to two threads, which write a byte a page."""
    areas = [fresh_memory(2 * file.stat().st_size) for file in shards(folder)]

    def touch(number: int) -> None:
        for area in areas:
            half = len(area) // 2
            np.frombuffer(area, np.uint8)[number * half : (number + 1) * half : mmap.PAGESIZE] = 1

    def touch_all() -> None:
        threads = [threading.Thread(target=touch, args=(number,)) for number in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    return timed(touch_all)


# What loading costs until the model runs at its pace: whoever maps files pays in the first forward.


def until_it_runs(library: Any, folder: str) -> Numbers:
    model = empty_llama(library, folder, torch.bfloat16)
    started = time.perf_counter()
    model = library.load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    load = time.perf_counter() - started
    first, later, checksum = forwards(model)
    return {
        "load + first forward − a later forward, seconds": load + first - later, "load seconds": load,
        "first forward seconds": first, "later forward seconds": later, "checksum": checksum,
    }  # fmt: skip


@worker
def bigmodel_until_it_runs(folder: str) -> Numbers:
    import bigmodel

    return until_it_runs(bigmodel, folder)


@worker
def accelerate_until_it_runs(folder: str) -> Numbers:
    import accelerate

    return until_it_runs(accelerate, folder)


# The reader alone, against the disk and the memory: destinations that are there already, everything in one process and in turns.


@worker
def line_rate(folder: str) -> Numbers:
    from bigmodel.loading import Checkpoint, Reader, Whole
    from bigmodel.loading.host_memory import empty_host_tensor
    from bigmodel.loading.transfer import lower

    files = shards(folder)
    total = sum(file.stat().st_size for file in files)
    buffers = [fresh_memory(file.stat().st_size) for file in files]
    read_in_parallel(files, buffers)  # touches them
    checkpoint = Checkpoint.open(folder)
    jobs = []
    for name, entry in checkpoint.entries.items():
        tensor = empty_host_tensor(entry.shape, entry.dtype)
        jobs.append((lower(Whole(name), checkpoint.entries, name, entry.dtype), tensor.fill_(0)))
    reader = Reader(checkpoint.identities, "auto")
    source = torch.empty(256 << 20, dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source).fill_(0)
    rates: dict[str, list[float]] = {"reader": [], "plain": [], "reader warm": [], "copy": []}
    for _ in range(3 * ROUNDS):  # the rate of a disk that machines share drifts
        drop_from_page_cache(Path(folder))
        rates["plain"].append(total / read_in_parallel(files, buffers))
        drop_from_page_cache(Path(folder))
        rates["reader"].append(total / _seconds(lambda: reader.read(jobs)))
        for file in files:
            file.read_bytes()
        rates["reader warm"].append(total / _seconds(lambda: reader.read(jobs)))
        rates["copy"].append(4 * source.nbytes / _seconds(lambda: [target.copy_(source) for _ in range(4)]))
    reader.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [ours / plain for ours, plain in zip(rates["reader"], rates["plain"], strict=True)]
    return {
        "cold: the reader, bytes/s": medians["reader"], "cold: plain two-thread reads, bytes/s": medians["plain"],
        "warm: the reader, bytes/s": medians["reader warm"], "warm: memory copy, bytes/s": medians["copy"],
        "cold, reader over plain reads": statistics.median(ratios),
        "warm, reader over memory copy": medians["reader warm"] / medians["copy"],
    }  # fmt: skip


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# Growth with the size, and with the cores.


def make_plain_checkpoint(folder: Path, nbytes: int) -> None:
    """bf16 tensors of 32 MiB in shards of 512 MiB, written without a library: any bytes are numbers enough."""
    per_tensor, per_shard = 32 << 20, 16
    count = max(1, round(nbytes / per_tensor))
    folder.mkdir(parents=True)
    data = os.urandom(1 << 20) * 32
    numbers = [list(range(start, min(start + per_shard, count))) for start in range(0, count, per_shard)]
    for index, own in enumerate(numbers):
        header = {
            f"block.{number}.weight": {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [at * per_tensor, (at + 1) * per_tensor]}
            for at, number in enumerate(own)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"model-{index + 1:05d}-of-{len(numbers):05d}.safetensors", "wb", buffering=0) as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for _ in own:
                stream.write(data)


@worker
def bigmodel_on_cores(folder: str, cores: int) -> Numbers:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    return bigmodel_private(folder)


def growth(root: Path) -> None:
    from bigmodel.devices import available_host_bytes

    available = available_host_bytes()
    cores = len(os.sched_getaffinity(0))
    print("\n### Growth: same dtype, cold page cache\n")
    print("| GiB | 1 core | 2 cores | GiB/s on 2 | peak private over the model's bytes |")
    print("|---:|---:|---:|---:|---:|")
    for gib in SIZES_GIB:
        nbytes = int(gib * 2**30)
        if shutil.disk_usage(root).free < nbytes + (4 << 30) or available < nbytes + (2 << 30) or cores < 2:
            print(f"| {gib:g} | no room on this machine | | | |")
            continue
        folder = Path(tempfile.mkdtemp(dir=root)) / "plain"
        try:
            make_plain_checkpoint(folder, nbytes)
            found: dict[int, list[Numbers]] = {1: [], 2: []}
            for _ in range(2 if gib > 4 else ROUNDS):
                for count in found:
                    drop_from_page_cache(folder)
                    found[count].append(fresh_process(__file__, "bigmodel_on_cores", {"folder": str(folder), "cores": count}))
            one, two = (statistics.median(run["seconds"] for run in found[count]) for count in (1, 2))
            extra = max(run["peak private bytes"] for runs in found.values() for run in runs) - folder_bytes(folder)
            print(f"| {gib:g} | {one:.2f} s | {two:.2f} s | {gib / two:.2f} | {extra / 2**20:+.0f} MiB |", flush=True)
        finally:
            shutil.rmtree(folder.parent)


def main() -> None:
    run_worker_if_asked()
    root = Path(os.environ.get("BIGMODEL_BENCH_DIR", Path(tempfile.gettempdir()) / "bigmodel-bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "llama-1.1b-bf16"
    make_model(folder)
    print(f"model: {folder_bytes(folder) / 2**20:,.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    arguments: dict[str, object] = {"folder": str(folder)}

    def cold() -> None:
        drop_from_page_cache(folder)

    def warm() -> None:
        for file in shards(str(folder)):
            with open(file, "rb", buffering=0) as stream:
                while stream.read(CHUNK_BYTES):
                    pass

    verdicts: list[tuple[str, float, str, float]] = []
    seconds = "seconds"
    for state, prepare in (("cold", cold), ("warm", warm)):
        names = ["bigmodel_float32", "accelerate_float32", "bare_float32_pages"]
        found = compare(__file__, f"bf16 → fp32, {state}", names, arguments, ROUNDS, prepare)
        ours, theirs, _ = (found[name][seconds] for name in names)
        verdicts.append((f"bf16 → fp32 over accelerate, {state}", ours / theirs, "≤", 0.40))

        names = ["bigmodel_until_it_runs", "accelerate_until_it_runs"]
        found = compare(__file__, f"until the model runs at its pace, same dtype, {state}", names, arguments, ROUNDS, prepare)
        ours, theirs = (found[name]["load + first forward − a later forward, seconds"] for name in names)
        verdicts.append((f"until it runs, over accelerate, {state}", ours / theirs, "≤", 1.0))

        names = [
            "bigmodel_private", "bare_two_threads", "runai_streamer_private", "fastsafetensors_private", "safetensors_pread",
            "safetensors_mapped_and_copied", "transformers_private",
        ]  # fmt: skip
        absent = [name for name, package in OPTIONAL_PEERS.items() if importlib.util.find_spec(package) is None]
        names = [name for name in names if name not in absent]
        found = compare(__file__, f"same dtype into private memory, {state}", names, arguments, ROUNDS, prepare)
        if absent:
            print(f"\nnot installed: {', '.join(absent)}")
        if state == "cold":
            ratio = found["bigmodel_private"][seconds] / found["bare_two_threads"][seconds]
            verdicts.append(("same dtype, over bare two-thread reads, cold", ratio, "≤", 1.2))
    rate = fresh_process(__file__, "line_rate", arguments)
    print("\n### The reader against the disk and the memory\n")
    for key, value in rate.items():
        print(f"- {key}: {value / 2**30:.2f} GiB/s" if key.endswith("bytes/s") else f"- {key}: {value:.2f}")
    verdicts.append(("reader over plain reads, cold", rate["cold, reader over plain reads"], "≥", 0.85))
    verdicts.append(("reader over memory copy, warm", rate["warm, reader over memory copy"], "≥", 0.6))
    growth(root)
    print_verdicts(verdicts)


if __name__ == "__main__":
    main()
