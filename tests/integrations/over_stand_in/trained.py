"""transformers' `Trainer` over bigmodel, in one process or several, and the same steps by a loop of torch's own. Prints both as JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import tiny_transformers
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

FOLDER, ASKED = Path(sys.argv[1]), sys.argv[2:]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STEPS, RATE, LIMIT = 4, 1e-2, 1.0

SHARDED = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
ZERO = {
    "deepspeed": {
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            "auto",
        ),
    }
}


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int):
        self.rows = torch.randint(3, tiny_transformers.VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


TRAINED, PREDICTED = Sentences(32), Sentences(11)
EVALUATED = PREDICTED if RANKS == 1 else Sentences(16)
"""Over several processes transformers' mean has also the sentences that fill the last batches up, so here nothing is filled up."""


def model() -> LlamaForCausalLM:
    made = tiny_transformers.make("llama", use_cache=False)
    return made.train()


def trainer(name: str, **arguments: Any) -> Trainer:
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // RANKS,
        "per_device_eval_batch_size": 4,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "max_grad_norm": LIMIT,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    options = TrainingArguments(output_dir=str(FOLDER / name), **(defaults | arguments))
    return Trainer(model=model(), args=options, train_dataset=TRAINED, eval_dataset=EVALUATED)


def logged(trained: Trainer, *names: str) -> dict[str, list[float]]:
    history = trained.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in names}


def loop(size: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Losses and norms of gradients by hand, with `size` sentences a step."""
    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=RATE, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        rows = torch.stack([TRAINED.rows[(step * size + number) % len(TRAINED)] for number in range(size)])
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = alone(input_ids=rows, labels=rows).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    alone.eval()
    with torch.no_grad():
        each = [float(alone(input_ids=row[None], labels=row[None]).loss) for row in EVALUATED.rows]
    return {"loss": losses, "grad_norm": norms, "eval_loss": sum(each) / len(each)}


def trained(name: str, **arguments: Any) -> dict[str, Any]:
    made = trainer(name, **arguments)
    made.train()
    return logged(made, "loss", "grad_norm")


def resumed(name: str, **arguments: Any) -> dict[str, Any]:
    """A job and its evaluation, and whether one that goes on from step 2 ends as it did."""
    whole = trainer(name, save_strategy="steps", save_steps=2, **arguments)
    whole.train()
    again = trainer(name, **arguments)
    again.train(resume_from_checkpoint=str(FOLDER / name / "checkpoint-2"))
    pairs = list(zip(whole.model.parameters(), again.model.parameters(), strict=True))
    local = [[getattr(each, "_local_tensor", each) for each in pair] for pair in pairs]
    predictions = whole.predict(PREDICTED)
    return logged(whole, "loss", "grad_norm") | {
        "again": logged(again, "loss")["loss"],
        "same": all(torch.equal(*pair) for pair in local),
        "sharded": sum(hasattr(one, "_local_tensor") for one, _ in pairs),
        "eval_loss": whole.evaluate()["eval_loss"],
        "predictions": list(predictions.predictions.shape),
        "labels": predictions.label_ids.tolist() == PREDICTED.rows.tolist(),
    }


def best(name: str) -> dict[str, Any]:
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    made = trainer(name, **every, load_best_model_at_end=True, save_total_limit=1, metric_for_best_model="eval_loss")
    made.train()
    return {"same": made.evaluate()["eval_loss"] == made.state.best_metric, "left": len(list((FOLDER / name).glob("checkpoint-*")))}


class NarrowLlama(LlamaForCausalLM):
    """Runs out of memory with more than two sentences at once."""

    def forward(self, input_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if input_ids is not None and len(input_ids) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def fitted(name: str) -> dict[str, Any]:
    made = trainer(name, auto_find_batch_size=True)
    narrow = NarrowLlama(made.model.config)
    narrow.load_state_dict(made.model.state_dict())
    made.model = made.model_wrapped = narrow.train()
    made.train()
    return {"batch": made._train_batch_size, "steps": made.state.global_step}


CASES: dict[str, Callable[[], Any]] = {
    "loop": loop,
    "loop of 8": lambda: loop(8),
    "loop in bf16": lambda: loop(dtype=torch.bfloat16),
    "fp32": lambda: resumed("fp32"),
    "bf16": lambda: trained("bf16", bf16=True),
    "accumulated": lambda: trained("accumulated", gradient_accumulation_steps=2),
    "best": lambda: best("best"),
    "fitted": lambda: fitted("fitted"),
    "sharded": lambda: resumed("sharded", **SHARDED),
    "zero": lambda: trained("zero", **ZERO),
    "zero, accumulated": lambda: trained("zero-accumulated", gradient_accumulation_steps=2, **ZERO),
}

found: dict[str, Any] = {"module": accelerate.__name__}
for case in ASKED:
    try:
        found[case] = CASES[case]()
    except Exception:
        found[case] = traceback.format_exc()
        break
if dist.is_initialized():
    dist.destroy_process_group()
print(json.dumps(found, default=str))
