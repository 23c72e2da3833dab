"""Training with megatron-core on CPUs: losses, norms, weights and files are those of a transformers model in a loop of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from torch import nn
from torch.utils.data import DataLoader

from bigmodel import Accelerator, TrainingError
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.training.gradient_state import GradientState
from bigmodel.utils import MegatronLMPlugin

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'bigmodel[megatron]'")

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.filterwarnings("ignore")]

Sizes = Callable[[int], Processes]

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

    parallel_state.destroy_model_parallel()
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


def prepared(tp_degree: int, make: Callable[[], Any], **fields: Any) -> tuple[Accelerator, tuple[Any, ...]]:
    fresh()
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp_degree, **fields))
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


def with_megatron(tp_degree: int, make: Callable[[], Any], clipping: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator, parts = prepared(tp_degree, make)
    return loop(accelerator, parts, clipping) + loop(accelerator, parts, clipping), accelerator.get_state_dict(parts[0])


@pytest.mark.parametrize(
    ("count", "tp_degree", "make", "clipping"),
    [(1, 1, llama, 1.0), (2, 1, llama, 0.5), (2, 2, llama, 0.5), (4, 2, llama, 0.5), (2, 2, gpt2, 0.5), (2, 1, gpt2, 0.5)],
)
def test_losses_norms_and_weights_are_those_of_plain_torch(
    processes: Sizes, count: int, tp_degree: int, make: Callable[[], Any], clipping: float
) -> None:
    expected, weights = alone(make, clipping, epochs=2)
    found = processes(count).run(with_megatron, tp_degree, make, clipping, timeout=120)
    for seen, _ in found:
        assert seen == pytest.approx(expected, rel=TOLERANCE)
    assert found[0][1].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[0][1][name], value, rtol=0, atol=2e-5, msg=name)
