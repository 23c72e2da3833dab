"""What megatron-core takes to be trained: whose tokens count, models of its own, and what does not fit, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import TOLERANCE, alone, fresh, gpt2, llama, loop, optimized, prepared, samples
from processes import Processes
from torch import nn
from torch.utils.data import DataLoader

from bigmodel import Accelerator, TrainingError
from bigmodel.training.accelerator_state import AcceleratorState
from bigmodel.utils import MegatronLMPlugin

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'bigmodel[megatron]'")

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.filterwarnings("ignore")]

Sizes = Callable[[int], Processes]


def counted_otherwise() -> list[float]:
    found = []
    for fields in ({"eod_mask_loss": True}, {"calculate_per_token_loss": False}):
        accelerator, (model, _, loader, _) = prepared(1, llama, **fields)
        with torch.no_grad():
            batch = next(iter(loader))
            found.append(float(accelerator.reduce(model(**batch).loss, reduction="mean")))
    with pytest.raises(TrainingError, match=r"eod_mask_loss: the model's config has eos_token_id \[2, 3\]"):
        prepared(1, lambda: llama(eos_token_id=[2, 3]), eod_mask_loss=True)
    return found


def test_the_plugin_says_which_tokens_count(processes: Sizes) -> None:
    model = llama()
    model.config.eos_token_id = 2
    batch = next(iter(DataLoader(samples(), batch_size=4)))
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    counts = batch["labels"][:, 1:] != -100
    ends = counts & (batch["input_ids"][:, :-1] != 2)
    halves = [(losses * counts)[half].sum() / counts[half].sum() for half in (slice(0, 2), slice(2, 4))]
    expected = [float((losses * ends).sum() / ends.sum()), float(sum(halves) / 2)]
    for found in processes(2).run(counted_otherwise, timeout=120):
        assert found == pytest.approx(expected, rel=TOLERANCE)


def own_model(tp_degree: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    fresh()
    plugin = MegatronLMPlugin(tp_degree=tp_degree, gradient_clipping=0.0)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    config = plugin.transformer_config(num_layers=1, hidden_size=32, num_attention_heads=4, gated_linear_unit=True)
    sizes: dict[str, Any] = {"config": config, "vocab_size": 64, "max_sequence_length": 16, "position_embedding_type": "rope"}
    with pytest.raises(TrainingError, match=r"GPTModel: its attention takes buffers from CUDA.*plugin.layer_specification\(\)"):
        accelerator.prepare(GPTModel(transformer_layer_spec=get_gpt_layer_local_spec(), **sizes))
    wrong = {**sizes, "config": plugin.transformer_config(num_layers=1, hidden_size=32, num_attention_heads=4, fp16=True)}
    with pytest.raises(TrainingError, match=r"GPTModel: fp16 is True in its config, and here it has to be False"):
        accelerator.prepare(GPTModel(transformer_layer_spec=plugin.layer_specification(), **wrong))
    torch.manual_seed(accelerator.process_index)  # the first process's values count
    model = GPTModel(transformer_layer_spec=plugin.layer_specification(), **sizes)
    optimizer, scheduler = optimized(model)
    loader = DataLoader(samples(), batch_size=4 * tp_degree // accelerator.num_processes)
    parts = accelerator.prepare(model, optimizer, loader, scheduler)
    assert accelerator.unwrap_model(parts[0]) is model
    state = accelerator.get_state_dict(parts[0])
    seen = []
    for batch in parts[2]:
        loss = parts[0](**batch).loss
        accelerator.backward(loss)
        seen.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        parts[1].step()
        parts[1].zero_grad()
    norms = [float(value.norm()) for value in accelerator.get_state_dict(parts[0]).values()]
    return seen, norms, state


def test_a_model_of_megatron_core_is_trained_as_it_is(processes: Sizes) -> None:
    shared, alone = processes(2).run(own_model, 2, timeout=120)[0], processes(1).run(own_model, 1, timeout=120)[0]
    assert shared[2].keys() == alone[2].keys()
    assert {name: value.shape for name, value in shared[2].items()} == {name: value.shape for name, value in alone[2].items()}
    copied = processes(2).run(own_model, 1, timeout=120)[0]
    assert copied[0] == pytest.approx(alone[0], rel=TOLERANCE)
    assert copied[1] == pytest.approx(alone[1], rel=TOLERANCE)
    assert shared[0][-1] < shared[0][0]


def what_does_not_fit() -> None:
    def accelerator() -> Accelerator:
        fresh()
        return Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))

    for changes, story in (
        ({"vocab_size": 65}, r"tp_degree=2 does not divide the 65 words of the vocabulary \(model.resize_token_embeddings"),
        ({"num_key_value_heads": 1}, r"tp_degree=2 does not divide the 1 key and value heads"),
        ({"intermediate_size": 47}, r"tp_degree=2 does not divide the 47 features of the feed-forward layer"),
        ({"attention_bias": True}, r"attention_bias=True in the config of this llama model"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, r"rope_type='dynamic': its angles change"),
    ):
        with pytest.raises(TrainingError, match=story):
            accelerator().prepare(llama(**changes))
    with pytest.raises(
        TrainingError, match=r"Linear: prepare a megatron-core GPTModel, or a transformers model of type llama, mistral, qwen2, gpt2"
    ):
        accelerator().prepare(nn.Linear(2, 2))
    with pytest.raises(TrainingError, match=r"LlamaModel is no plain causal llama model: it has no prediction of words"):
        accelerator().prepare(llama().model)
    with pytest.raises(TrainingError, match=r"tensors are not in float32.*dtype=torch.float32"):
        accelerator().prepare(llama().bfloat16())
    model = llama()
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    with pytest.raises(TrainingError, match=r"q_proj.weight, .* are one parameter in megatron-core.*freeze all or none"):
        accelerator().prepare(model)
    model = llama()
    queries = model.model.layers[0].self_attn.q_proj.weight
    groups = [{"params": [queries], "lr": 0.1}, {"params": [each for each in model.parameters() if each is not queries]}]
    with pytest.raises(TrainingError, match=r"Groups 0 and 1 of the optimizer have tensors that are one parameter"):
        accelerator().prepare(model, torch.optim.AdamW(groups))
    assert all(torch.equal(here, there) for here, there in zip(model.parameters(), llama().parameters(), strict=True))  # not emptied
    model = llama()
    model.model.adapted = nn.Linear(2, 2)
    with pytest.raises(TrainingError, match=r"no plain causal llama model: of its tensors model.adapted.bias, model"):
        accelerator().prepare(model)
    fresh()
    with pytest.raises(TrainingError, match=r"num_micro_batches=3 in the plugin, and gradient_accumulation_steps=2"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=3))
    ready = accelerator()
    model = ready.prepare(llama())
    with pytest.raises(TrainingError, match=r"sequences of 40 tokens: the model has positions for 32"):
        model(torch.zeros(1, 40, dtype=torch.int64))
    with pytest.raises(TrainingError, match=r"position_ids: .*leave them out"):
        model(torch.zeros(1, 4, dtype=torch.int64), position_ids=torch.arange(4)[None])
    with pytest.raises(TrainingError, match=r"join_uneven_inputs: Megatron-LM needs every process"), ready.join_uneven_inputs([model]):
        pass
    AcceleratorState._reset_state()
    with pytest.raises(TrainingError, match=r"in groups of megatron-core already, with degrees \(2, 1, 1\).*destroy_model_parallel"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())


def test_what_does_not_fit_is_refused_by_name(processes: Sizes) -> None:
    processes(2).run(what_does_not_fit, timeout=120)


def nothing_is_there_twice() -> list[int]:
    accelerator, _ = prepared(2, llama)
    model = llama()
    ready = accelerator.prepare(model)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    counts = [sum(parameter.numel() for parameter in ready.parameters())]
    accelerator.free_memory()
    return counts


def test_each_process_has_its_part_alone(processes: Sizes) -> None:
    model = llama()
    whole = sum(parameter.numel() for parameter in model.parameters())
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    for (count,) in processes(2).run(nothing_is_there_twice, timeout=120):
        assert count == (whole - norms) // 2 + norms


def with_dropout() -> list[float]:
    _, (model, *_) = prepared(1, gpt2, hidden_dropout=0.1, attention_dropout=0.2, seq_length=12)
    batch = next(iter(DataLoader(samples(), batch_size=4)))
    model.train()
    first, second = float(model(**batch).loss), float(model(**batch).loss)
    with pytest.raises(TrainingError, match=r"sequences of 13 tokens: the model has positions for 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    model.eval()
    places = torch.arange(12).flip(0).expand(4, -1)
    return [first, second, float(model(**batch).loss), float(model(**batch, position_ids=places).loss)]


def test_dropout_is_the_plugins_and_positions_may_be_given(processes: Sizes) -> None:
    model = gpt2().eval()
    batch = next(iter(DataLoader(samples(), batch_size=4)))
    with torch.no_grad():
        expected = float(model(**batch).loss), float(model(**batch, position_ids=torch.arange(12).flip(0).expand(4, -1)).loss)
    (found,) = processes(1).run(with_dropout, timeout=120)
    assert len({*found[:3]}) == 3
    assert found[2:] == pytest.approx(expected, rel=TOLERANCE)


def recomputed(tp_degree: int, fields: dict[str, Any]) -> tuple[list[float], int]:
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes if not isinstance(tensor, nn.Parameter) else 0
        return tensor

    accelerator, (model, optimizer, loader, _) = prepared(tp_degree, gpt2, **fields)
    losses = []
    for batch in loader:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        optimizer.step()
        optimizer.zero_grad()
    return losses, kept


def recomputed_in_every_way() -> list[tuple[list[float], int]]:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    found = []
    for tp_degree, always in ((2, {}), (1, dropout)):
        for way in (
            {},
            {"recompute_granularity": "selective"},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
            {"recompute_granularity": "full"},
        ):
            torch.manual_seed(3)
            found.append(recomputed(tp_degree, {**always, **way, "recompute_activations": bool(way)}))
    return found


def test_activations_are_computed_again_with_the_same_numbers(processes: Sizes) -> None:
    for found in processes(2).run(recomputed_in_every_way, timeout=120):
        for four in (found[:4], found[4:]):
            losses, kept = [each[0] for each in four], [each[1] for each in four]
            assert losses[1:] == [losses[0]] * 3  # dropout too
            assert kept[3] < kept[2] < kept[0]


def another(kind: str) -> Any:
    """Llama's kin, with numbers in their vectors that are not ones and zeros, which would hide one in the place of another."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model: Any
    if kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, num_key_value_heads=2, max_position_embeddings=32))
    elif kind == "mistral":
        config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=None, head_dim=12)
        model = transformers.MistralForCausalLM(config)
    elif kind == "tied":
        model = llama(tie_word_embeddings=True, num_key_value_heads=4)
    else:
        scaled = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        model = llama(rope_parameters={**scaled, "original_max_position_embeddings": 16}, max_position_embeddings=128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
            parameter.requires_grad_(kind != "scaled" or "norm" not in name)
    return model


KINDS = ("qwen2", "mistral", "tied", "scaled")


def kin(folder: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    found = []
    for kind in KINDS:
        accelerator, parts = prepared(2, partial(another, kind))
        losses = loop(accelerator, parts, 0.5)
        accelerator.save_model(parts[0], f"{folder}/{kind}")
        found.append((losses, accelerator.get_state_dict(parts[0])))
    return found


def test_llamas_kin_trains_as_in_plain_torch(processes: Sizes, tmp_path: Path) -> None:
    (first, *_) = processes(2).run(kin, str(tmp_path), timeout=120)
    for kind, (losses, state) in zip(KINDS, first, strict=True):
        expected, weights = alone(partial(another, kind), 0.5)
        assert losses == pytest.approx(expected, rel=TOLERANCE), kind
        assert state.keys() == weights.keys(), kind
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=f"{kind} {name}")
        model = another(kind)
        model.config.save_pretrained(tmp_path / kind)
        read = type(model).from_pretrained(tmp_path / kind).state_dict()
        assert all(torch.equal(read[name], state[name]) for name in state), kind


def in_bfloat16(make: Callable[[], Any]) -> list[tuple[list[float], torch.dtype, torch.dtype, torch.dtype]]:
    found = []
    for tp_degree in (2, 1):
        accelerator, parts = prepared(tp_degree, make, "bf16", return_logits=True, recompute_activations=True)
        losses = loop(accelerator, parts)
        seen: list[torch.dtype] = []
        matrix = accelerator.unwrap_model(parts[0]).get_submodule("decoder.layers.0.mlp.linear_fc1")
        hook = matrix.register_forward_hook(lambda module, given, made, seen=seen: seen.append(made[0].dtype))
        logits = parts[0](torch.zeros(1, 4, dtype=torch.int64)).logits
        hook.remove()
        found.append((losses, seen[0], next(parts[0].parameters()).dtype, logits.dtype))
    return found


@pytest.mark.parametrize("make", [llama, gpt2])
def test_bfloat16_is_computed_in_and_weights_stay(processes: Sizes, make: Callable[[], Any]) -> None:
    model = make().train()
    optimizer, scheduler = optimized(model)
    expected = []
    for batch in DataLoader(samples(), batch_size=4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        expected.append(float(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    exact, _ = alone(make, 1.0)
    for found in processes(2).run(in_bfloat16, make, timeout=120):
        for losses, inside, weights, output in found:
            assert losses == pytest.approx(expected, rel=2e-3)
            assert losses != pytest.approx(exact[::2], rel=TOLERANCE)
            assert (inside, weights, output) == (torch.bfloat16, torch.float32, torch.float32)


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
    focus = logits.softmax(-1).pow(2).sum(-1) * batch["attention_mask"][:, 1:]
    return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:]) + focus.mean()


def with_an_own_loss() -> list[float]:
    accelerator, (model, optimizer, loader, _) = prepared(2, llama)
    seen = []
    for batch in loader:
        loss = own_loss(model, batch)
        accelerator.backward(loss)
        seen += [float(loss.detach()), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_loop_may_compute_its_own_loss_of_whole_logits(processes: Sizes) -> None:
    model = llama().train()
    optimizer, _ = optimized(model)
    expected = []
    for batch in DataLoader(samples(), batch_size=4):
        loss = own_loss(model, batch)
        loss.backward()
        expected += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    for seen in processes(2).run(with_an_own_loss, timeout=120):
        assert seen == pytest.approx(expected, rel=TOLERANCE)
