"""A model of usual size on a card of usual size: what the run needs is planned, and a plan that falls short says why and what would do."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

import bigmodel
from bigmodel.constants import GiB
from bigmodel.planning import Plan

LAYERS, CACHE_HEADS, HEAD_WIDTH = 32, 8, 128


@pytest.fixture(scope="module")
def llama() -> LlamaConfig:
    """8 billion parameters in bfloat16: 15 GiB."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=CACHE_HEADS,
        max_position_embeddings=131072,
    )


def card(made: Plan):
    return next(use for use in made.devices if use.device == 0)


def test_weights_fit_and_the_long_prompt_does_not(llama: LlamaConfig) -> None:
    budgets = {0: "16GiB", "cpu": "64GiB"}
    assert bigmodel.plan(llama, budgets).device_map == {"": 0}
    context = 32768
    made = bigmodel.plan(llama, budgets, context=context, logits="last")
    use = card(made)
    assert made.moved_bytes > 0
    assert use.used_bytes <= 16 * GiB
    cache_bytes = context * LAYERS * 2 * CACHE_HEADS * HEAD_WIDTH * 2
    assert use.state_bytes >= cache_bytes
    assert use.workspace_bytes > 0
    doubled = card(bigmodel.plan(llama, {0: "48GiB", "cpu": "64GiB"}, context=context, batch=2, logits="last"))
    assert doubled.state_bytes >= 2 * cache_bytes


def test_what_binds_by_how_much_and_what_would_help(llama: LlamaConfig) -> None:
    made = bigmodel.plan(llama, {0: "16GiB", "cpu": "64GiB"}, context=32768, logits="last")
    use = card(made)
    assert made.binding == "memory of device 0"
    assert made.short_bytes > 0
    fits = bigmodel.plan(llama, {0: 16 * GiB + made.short_bytes, "cpu": "64GiB"}, context=32768, logits="last")
    assert fits.moved_bytes == 0
    text = " ".join(str(made).split())
    for kind in ("weights", "KV cache and logits", "activations"):
        assert kind in text
    assert f"{use.state_bytes / GiB:.2f} GiB KV cache and logits" in text
    said = {each.change: each for each in made.advice}
    assert said["8-bit weights (int8)"].fits
    assert said["4-bit weights (nf4)"].fits
    shorter = next(change for change in said if change.startswith("a context of"))
    assert (
        bigmodel.plan(llama, {0: "16GiB", "cpu": "64GiB"}, context=int(shorter.split()[3]), logits="last").moved_bytes
        == said[shorter].moved_bytes
    )
    assert next(each for change, each in said.items() if "more" in change).fits


def test_more_ram_is_said_where_the_disk_is_used(llama: LlamaConfig) -> None:
    made = bigmodel.plan(llama, {0: "4GiB", "cpu": "4GiB", "disk": "100GiB"})
    assert made.bytes_on_disk > 0
    more = next(each for each in made.advice if "more RAM" in each.change)
    assert (more.moved_bytes, more.disk_bytes) == (made.moved_bytes, 0)
    assert "rest on disk: cpu is that much short." in str(made)
