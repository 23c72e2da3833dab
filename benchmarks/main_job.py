"""The main job beside accelerate, on a 2 GB bf16 Llama that this script makes: set up almost all on disk, load with bf16 → fp32, run.

Run: `make bench`. The folder with the model is kept between runs (`BIGMODEL_BENCH_DIR`, by default under the system's temporary folder).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import compare, drop_from_page_cache, folder_bytes, run_worker_if_asked, worker

CONFIG = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = 32
LATER_FORWARDS = 3


def make_model(folder: Path) -> None:
    """1.1 B parameters in five shards, as transformers saves them."""
    if (folder / "config.json").exists():
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, dtype="bfloat16")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    scratch = folder.with_name(folder.name + ".part")
    model.save_pretrained(scratch, max_shard_size="450MB")
    scratch.rename(folder)


def empty_llama(library: object, folder: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with library.init_empty_weights():
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def almost_all_on_disk() -> dict[str, str]:
    layers = {f"model.layers.{index}": "disk" for index in range(CONFIG["num_hidden_layers"])}
    return {"model.embed_tokens": "cpu", **layers, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}


def forwards(model: torch.nn.Module) -> tuple[float, float, float]:
    """Seconds of the first forward, of a later one (the best), and a number that depends on every output."""
    ids = torch.arange(TOKENS).unsqueeze(0) * 7 % CONFIG["vocab_size"]
    seconds = []
    with torch.no_grad():
        for _ in range(1 + LATER_FORWARDS):
            started = time.perf_counter()
            logits = model(ids, use_cache=False).logits
            seconds.append(time.perf_counter() - started)
    return seconds[0], min(seconds[1:]), float(logits.double().abs().sum())


def disk(library: object, folder: str) -> dict[str, float]:
    from bigmodel.measure import PeakPrivateMemory

    scratch = Path(tempfile.mkdtemp(dir=Path(folder).parent))
    try:
        with PeakPrivateMemory() as memory:
            model = empty_llama(library, folder, torch.bfloat16)
            started = time.perf_counter()
            model = library.load_checkpoint_and_dispatch(model, folder, device_map=almost_all_on_disk(), offload_folder=str(scratch))
            setup = time.perf_counter() - started
            first, later, checksum = forwards(model)
        return {
            "set-up seconds": setup, "written bytes": folder_bytes(scratch), "first forward seconds": first,
            "later forward seconds": later, "peak private bytes": memory.peak_bytes, "checksum": checksum,
        }  # fmt: skip
    finally:
        shutil.rmtree(scratch)


def to_float32(library: object, folder: str) -> dict[str, float]:
    from bigmodel.measure import PeakPrivateMemory

    with PeakPrivateMemory() as memory:
        model = empty_llama(library, folder, torch.float32)
        started = time.perf_counter()
        library.load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=torch.float32)
        load = time.perf_counter() - started
    first, later, checksum = forwards(model)
    return {
        "load seconds": load, "first forward seconds": first, "later forward seconds": later,
        "peak private bytes of loading": memory.peak_bytes, "checksum": checksum,
    }  # fmt: skip


@worker
def bigmodel_disk(folder: str) -> dict[str, float]:
    import bigmodel

    return disk(bigmodel, folder)


@worker
def accelerate_disk(folder: str) -> dict[str, float]:
    import accelerate

    return disk(accelerate, folder)


@worker
def bigmodel_float32(folder: str) -> dict[str, float]:
    import bigmodel

    return to_float32(bigmodel, folder)


@worker
def accelerate_float32(folder: str) -> dict[str, float]:
    import accelerate

    return to_float32(accelerate, folder)


@worker
def resident(folder: str) -> dict[str, float]:
    """What the forward costs when nothing moves: transformers alone, everything in RAM."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    first, later, checksum = forwards(model)
    return {"first forward seconds": first, "later forward seconds": later, "checksum": checksum}


def main() -> None:
    run_worker_if_asked()
    root = Path(os.environ.get("BIGMODEL_BENCH_DIR", Path(tempfile.gettempdir()) / "bigmodel-bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "llama-1.1b-bf16"
    make_model(folder)
    print(f"model: {folder_bytes(folder) / 2**20:,.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    arguments = {"folder": str(folder)}
    for state in ("cold", "warm"):
        before = (lambda: drop_from_page_cache(folder)) if state == "cold" else None
        compare(__file__, f"almost all on disk, page cache {state}", ["bigmodel_disk", "accelerate_disk"], arguments, before_each=before)
        compare(
            __file__, f"bf16 → fp32 on CPU, page cache {state}", ["bigmodel_float32", "accelerate_float32"], arguments, before_each=before
        )
    compare(__file__, "for comparison: everything resident, bf16", ["resident"], arguments, rounds=1)


if __name__ == "__main__":
    main()
