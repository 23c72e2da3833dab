"""Dispatch beside the resident model and beside accelerate: the cost of a layer that moves, forwards from disk, and their memory;
transfers beside arithmetic on the simulated accelerator, and thousands of random cases.

Run: `python benchmarks/dispatch.py` (needs accelerate and transformers beside bigmodel). The model is that of `main_job.py`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import simulated_link
import torch
from main_job import CONFIG, TOKENS, almost_all_on_disk, empty_llama, make_model
from side_by_side import compare, drop_from_page_cache, folder_bytes, run_worker_if_asked, worker

LAYERS = 200
ROUNDS = 9


def chain() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)]).eval()


def seconds_once(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def seconds_of(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of several runs after one to warm up."""
    run()
    return statistics.median(seconds_once(run) for _ in range(rounds))


@torch.no_grad()
def tiny_layers(library: object) -> dict[str, float]:
    x = torch.ones(1, 8)
    plain = chain()
    alone = seconds_of(lambda: plain(x))
    results = {}
    on_cpu = library.cpu_offload(chain(), torch.device("cpu"))
    results["CPU: microseconds more per layer"] = (seconds_of(lambda: on_cpu(x)) - alone) / LAYERS * 1e6
    scratch = Path(tempfile.mkdtemp(prefix="bench-dispatch-"))
    try:
        on_disk = library.disk_offload(chain(), str(scratch), torch.device("cpu"))
        results["disk: microseconds more per layer"] = (seconds_of(lambda: on_disk(x)) - alone) / LAYERS * 1e6
    finally:
        shutil.rmtree(scratch)
    return results


def input_ids() -> torch.Tensor:
    return torch.arange(TOKENS).unsqueeze(0) * 7 % CONFIG["vocab_size"]


def resident_llama(folder: str) -> torch.nn.Module:
    """Every weight in private memory (transformers may leave it on mapped pages)."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def forward(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    ids = input_ids()

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    return run


@worker
def from_disk_beside_resident(folder: str, map_files: str) -> dict[str, float]:
    """Interleaved in one process, so that whatever else the machine does meets both."""
    import bigmodel
    from bigmodel.measure import PeakPrivateMemory

    if map_files:
        os.environ["BIGMODEL_MAP_FILES"] = map_files
    plain = forward(resident_llama(folder))
    model = empty_llama(bigmodel, folder, torch.bfloat16)
    own = forward(bigmodel.load_checkpoint_and_dispatch(model, folder, device_map=almost_all_on_disk()))
    equal = torch.equal(own(), plain())
    resident, offloaded = [], []
    for _ in range(ROUNDS):
        for run, seconds in ((plain, resident), (own, offloaded)):
            seconds.append(seconds_once(run))
    with PeakPrivateMemory() as memory:
        own()
    with PeakPrivateMemory() as memory_of_plain:
        plain()
    ratio = statistics.median(own / plain for own, plain in zip(offloaded, resident, strict=True))
    return {
        "resident seconds": statistics.median(resident), "from disk seconds": statistics.median(offloaded),
        "from disk / resident": ratio, "best from disk / best resident": min(offloaded) / min(resident), "bit-equal": equal,
        "peak private bytes of a forward": memory.peak_bytes, "peak private bytes of the resident one": memory_of_plain.peak_bytes,
    }  # fmt: skip


def read_everything(folder: Path) -> float:
    """Seconds that reading the files alone takes, in large reads by four threads."""
    from concurrent.futures import ThreadPoolExecutor

    chunk = 8 << 20
    jobs = [(file, start) for file in sorted(folder.glob("*.safetensors")) for start in range(0, file.stat().st_size, chunk)]

    def read(job: tuple[Path, int]) -> None:
        descriptor = os.open(job[0], os.O_RDONLY)
        os.preadv(descriptor, [bytearray(chunk)], job[1])
        os.close(descriptor)

    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, jobs))
    return time.perf_counter() - started


def forget_pages(model: torch.nn.Module, folder: Path) -> None:
    """Makes the next use of the folder's files come from the disk; the system keeps pages that a process has mapped."""
    from bigmodel.dispatch import dispatched

    for group in dispatched(model).schedule.groups:
        for paged in group.layout.paged:
            for mapping in paged.store._pages._mappings.values():
                mapping.madvise(mmap.MADV_DONTNEED)
    drop_from_page_cache(folder)


@worker
def cold(folder: str, map_files: str) -> dict[str, float]:
    import bigmodel

    if map_files:
        os.environ["BIGMODEL_MAP_FILES"] = map_files
    model = empty_llama(bigmodel, folder, torch.bfloat16)
    drop_from_page_cache(Path(folder))
    alone = [read_everything(Path(folder))]
    own = forward(bigmodel.load_checkpoint_and_dispatch(model, folder, device_map=almost_all_on_disk()))
    drop_from_page_cache(Path(folder))
    first = seconds_once(own)
    warm = seconds_of(own, 3)
    offloaded = []
    for _ in range(3):
        forget_pages(model, Path(folder))
        alone.append(read_everything(Path(folder)))
        forget_pages(model, Path(folder))
        offloaded.append(seconds_once(own))
    reading = statistics.median(alone)
    return {
        "warm forward seconds": warm, "reading alone seconds": reading, "very first forward seconds": first,
        "cold forward seconds": statistics.median(offloaded),
        "cold / max(warm, reading)": statistics.median(offloaded) / max(warm, reading),
        "cold - warm - reading": statistics.median(offloaded) - warm - reading,
    }  # fmt: skip


@worker
def bigmodel_tiny() -> dict[str, float]:
    import bigmodel

    return tiny_layers(bigmodel)


@worker
def accelerate_tiny() -> dict[str, float]:
    import accelerate

    return tiny_layers(accelerate)


def main() -> None:
    run_worker_if_asked()
    root = Path(os.environ.get("BIGMODEL_BENCH_DIR", Path(tempfile.gettempdir()) / "bigmodel-bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "llama-1.1b-bf16"
    make_model(folder)
    print(f"model: {folder_bytes(folder) / 2**20:,.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    compare(__file__, f"{LAYERS} tiny linear layers, offloaded", ["bigmodel_tiny", "accelerate_tiny"], {})
    for title, map_files in (("mapped pages", ""), ("read into a ring (BIGMODEL_MAP_FILES=0)", "0")):
        arguments = {"folder": str(folder), "map_files": map_files}
        compare(__file__, f"all blocks on disk, page cache warm, {title}", ["from_disk_beside_resident"], arguments, rounds=1)
        compare(__file__, f"all blocks on disk, page cache cold, {title}", ["cold"], arguments, rounds=1)
    simulated_link.main()
    print("\n### Random models, maps, rings, threads and failures\n", flush=True)
    subprocess.run([sys.executable, str(Path(__file__).with_name("stress.py"))], check=False)


if __name__ == "__main__":
    main()
