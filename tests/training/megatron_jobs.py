"""Small causal language models, and loops that train them with and without megatron-core, for tests of several files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from bigmodel import Accelerator
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.utils import MegatronLMPlugin

TOLERANCE = 2e-5
"""Of losses and norms in float32: matrices are multiplied in parts, and gradients summed in another order."""

LENGTHS = (9, 4, 12, 7, 12, 12, 5, 10, 3, 11, 8, 6, 12, 12, 9, 4)
"""Of sequences, so that processes have different numbers of tokens."""


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 32, "rope_theta": 100.0, **changes})
    return LlamaForCausalLM(config)


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2, **dropouts},
        **changes,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # they begin as ones and zeros, which would hide one in the place of another
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, 64, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)})
    return made


def fresh() -> None:
    from megatron.core import parallel_state

    # It forgets some fifty groups, which would keep their threads: thousands by the end of the tests.
    groups = [each for held in vars(parallel_state).values() for each in (held if isinstance(held, list) else [held])]
    parallel_state.destroy_model_parallel()
    for group in {id(each): each for each in groups if isinstance(each, dist.ProcessGroup)}.values():
        if group is not dist.group.WORLD and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    AcceleratorState._reset_state()
    GradientState._reset_state()


def optimized(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def alone(make: Callable[[], Any], clipping: float, epochs: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of plain torch, and the weights after it."""
    model = make().train()
    optimizer, scheduler = optimized(model)
    seen = []
    for _ in range(epochs):
        for batch in DataLoader(samples(), batch_size=4):
            loss = model(**batch).loss
            loss.backward()
            seen += [float(loss), float(nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf")))]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen, {name: value.detach().clone() for name, value in model.state_dict().items()}


def prepared(tp_degree: int, make: Callable[[], Any], precision: str = "no", **fields: Any) -> tuple[Accelerator, tuple[Any, ...]]:
    fresh()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp_degree, **fields))
    copies = accelerator.num_processes // tp_degree
    model = make()
    optimizer, scheduler = optimized(model)
    scheduler.gamma = 0.9 ** (1 / copies)  # a schedule steps once for each process with samples of its own
    loader = DataLoader(samples(), batch_size=4 // copies)
    return accelerator, accelerator.prepare(model, optimizer, loader, scheduler)


def loop(accelerator: Accelerator, parts: tuple[Any, ...], clipping: float | None = None) -> list[float]:
    model, optimizer, loader, scheduler = parts
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            seen.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
            if clipping is not None:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), clipping)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen
