"""A plan's needs on a simulated accelerator, which counts every byte: what is kept free is taken, and with less the run does not fit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import inputs_for, make

import bigmodel
from bigmodel.planning import Plan, plan

ROOM = 1 << 30


def run_inputs(name: str, batch: int, tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Prompts, of different lengths where there are several."""
    inputs = inputs_for(name, batch, tokens, dtype)
    if batch > 1 and "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :2] = 0
    return {key: value.to(device) for key, value in inputs.items()}


@torch.no_grad()
def run(model: Any, name: str, inputs: dict[str, torch.Tensor], new_tokens: int = 3) -> None:
    """A forward of the whole context with all logits, and an answer that ends where the context does."""
    model(**inputs, use_cache=True)
    if name != "whisper":
        prompt = {key: value[:, : value.shape[1] - new_tokens] for key, value in inputs.items() if not key.startswith("decoder")}
        model.generate(**prompt, max_new_tokens=new_tokens, do_sample=True, top_p=0.9, pad_token_id=0)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 100), (3, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("gpt2", "sdpa"),
        ("falcon", "sdpa"),
        ("mistral", "sdpa"),
        ("gemma3", "eager"),
        ("qwen3_moe", "sdpa"),
        ("gpt_oss", "eager"),
        ("deepseek_v3", "sdpa"),
        ("mamba", "eager"),
        ("qwen3_next", "sdpa"),
        ("lfm2", "sdpa"),
        ("t5", "sdpa"),
        ("t5", "eager"),
        ("whisper", "sdpa"),
    ],
)
def test_a_run_takes_what_is_planned(accelerators, name: str, attention: str, dtype: torch.dtype, batch: int, tokens: int) -> None:
    (device,) = accelerators(1)
    model = make(name, dtype)
    model.set_attn_implementation(attention)
    use = plan(model, {0: ROOM}, batch=batch, context=tokens).devices[0]
    model.to(device)
    inputs = run_inputs(name, batch, tokens, device, dtype)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    run(model, name, inputs)
    peak = torch.accelerator.max_memory_allocated(device)
    assert peak <= use.used_bytes
    assert use.used_bytes - use.resident_bytes <= 1.3 * (peak - use.resident_bytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(name: str, folder: Path) -> Path:
    if not (folder / name).exists():
        make(name).save_pretrained(folder / name)
    return folder / name


def planned(name: str, budget: int, batch: int, context: int | None) -> Plan:
    return plan(make(name, device="meta"), {0: budget, "cpu": ROOM}, batch=batch, context=context, advice=False)


MODELS = ["llama", "gpt2", "gemma3", "qwen3_moe", "deepseek_v3", "t5"]
RUNS = [(1, 100), (3, 60)]


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
@pytest.mark.parametrize(("batch", "tokens"), RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_fits_into_exactly_its_budget(accelerators, folder: Path, name: str, batch: int, tokens: int, share: float) -> None:
    use = planned(name, ROOM, batch, tokens).devices[0]
    budget = int(share * use.resident_bytes) + use.state_bytes + use.workspace_bytes
    (device,) = accelerators(1, memory=budget)
    made = planned(name, budget, batch, tokens)
    assert (made.moved_bytes > 0) == (share < 1)
    assert made.main_device == 0
    model = bigmodel.from_pretrained(saved(name, folder), device_map=made, dtype=torch.float32, progress=False)
    run(model, name, run_inputs(name, batch, tokens, device, torch.float32))
    assert torch.accelerator.max_memory_allocated(device) <= budget


@pytest.mark.parametrize("name", MODELS)
def test_without_what_is_kept_free_the_same_budget_is_too_small(accelerators, folder: Path, name: str) -> None:
    batch, tokens = 1, 100
    use = planned(name, ROOM, batch, tokens).devices[0]
    budget = int(0.75 * use.resident_bytes) + use.state_bytes + use.workspace_bytes
    (device,) = accelerators(1, memory=budget, check_leaks=False)
    made = planned(name, budget, batch, None)
    assert made.moved_bytes == 0
    model = bigmodel.from_pretrained(saved(name, folder), device_map=made, dtype=torch.float32, progress=False)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, name, run_inputs(name, batch, tokens, device, torch.float32))
