"""`from_pretrained(quantization=…)`: bit for bit what transformers and bitsandbytes make, both ways through files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import is_accelerate_available

import bigmodel
from bigmodel import QuantizationError, placement
from bigmodel.quantization import BnbQuantizationConfig, pack, packed_layers, scheme_of

CONFIGS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "fp4 twice": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "int8": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=3.0),
}
with_transformers = pytest.mark.skipif(
    not is_accelerate_available(), reason="transformers loads nothing with bitsandbytes where accelerate is not installed"
)
TOKENS = torch.arange(2, 22).view(2, 10)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape)).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The same model of transformers, whose 4-bit layers compute with the scales that were packed on any CPU."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@with_transformers
def test_logits_equal_those_of_transformers_with_bitsandbytes(folder, config):
    theirs = plain(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"}))
    ours = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"})
    assert torch.equal(logits(ours), logits(theirs))
    assert type(ours.lm_head) is torch.nn.Linear


def test_generation_with_blocks_on_disk_equals_the_resident_model(folder, config):
    resident = bigmodel.from_pretrained(folder, quantization=config, device_map={"": "cpu"})
    device_map = {"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"}
    away = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(resident.generate(TOKENS, **arguments), away.generate(TOKENS, **arguments))
    assert torch.equal(logits(resident), logits(away))
    assert {row.name for row in placement(away).rows if row.rests == "disk"} == {"model.layers.1", "model.layers.3"}


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}])
def test_saved_models_load_again(folder, tmp_path, config, device_map):
    ours = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
    ours.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    state = ours.state_dict()
    assert sorted(saved) == sorted(state)
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    again = bigmodel.from_pretrained(tmp_path / "saved", device_map={"": "cpu", "model.layers.2": "disk"})
    assert torch.equal(logits(again), logits(ours))
    assert sorted(packed_layers(again)) == sorted(packed_layers(ours))


@with_transformers
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "model.layers.1": "disk"}])
def test_saved_models_load_with_transformers(folder, tmp_path, config, device_map):
    ours = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
    ours.save_pretrained(tmp_path / "saved")
    theirs = plain(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map={"": "cpu"}))
    assert torch.equal(logits(theirs), logits(ours))


@with_transformers
def test_models_that_transformers_saved_load_without_packing_again(folder, tmp_path, config):
    theirs = plain(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"}))
    expected = logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    for device_map in ({"": "cpu"}, {"": "cpu", "model.layers.0": "disk"}, "auto"):
        ours = bigmodel.from_pretrained(tmp_path / "theirs", device_map=device_map)
        assert torch.equal(logits(ours), expected)


def test_the_dtype_of_what_is_not_packed_is_the_asked_one(folder):
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
    assert bigmodel.from_pretrained(folder, quantization=config).lm_head.weight.dtype == torch.float32
    assert bigmodel.from_pretrained(folder, quantization=config, dtype="bfloat16").lm_head.weight.dtype == torch.bfloat16
    assert bigmodel.from_pretrained(folder, quantization=CONFIGS["nf4"]).lm_head.weight.dtype == torch.bfloat16


def test_stacked_experts_that_stay_unpacked_are_told_with_their_bytes(tmp_path, caplog):
    text = {"num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1, "pad_token_id": 0, "head_dim": 16}
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    Llama4ForCausalLM(Llama4TextConfig(vocab_size=64, **text, **shape)).save_pretrained(tmp_path)
    model = bigmodel.from_pretrained(tmp_path, quantization=CONFIGS["nf4"], device_map={"": "cpu"})
    names = "model.layers.0.feed_forward.experts, model.layers.1.feed_forward.experts"
    assert f"48.00 KiB of stacked experts stay unpacked ({names})" in caplog.text
    assert "Llama4TextExperts computes with as a whole" in str(bigmodel.quantization_report(model))
    assert logits(model).isfinite().all()


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_layers_that_keep_their_weight_transposed_are_packed(gpt2, tmp_path, config):
    plain_model = bigmodel.from_pretrained(gpt2, device_map={"": "cpu"})
    model = bigmodel.from_pretrained(gpt2, quantization=config, device_map={"": "cpu", "transformer.h.1": "disk"})
    assert sorted(packed_layers(model)) == sorted(
        f"transformer.h.{n}.{name}" for n in range(3) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )
    packing = scheme_of(config).format
    for name, layer in packed_layers(model).items():
        weight = plain_model.get_submodule(name).weight
        assert (layer.out_features, layer.in_features) == tuple(weight.T.shape)
        expected = pack(weight.T.contiguous(), packing)
        if "h.1" not in name:
            assert all(torch.equal(tensor, expected[part]) for part, tensor in layer.packed_tensors().items())
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    planned = bigmodel.planning.plan(plain_model, {"cpu": "1GB"}, weight_format=packing).total_bytes
    assert planned == total + sum(buffer.nbytes for buffer in plain_model.buffers())
    errors = [layer.relative_error for layer in bigmodel.quantization_report(model, gpt2).layers if layer.format]
    assert max(errors) < 0.25
    model.save_pretrained(tmp_path / "saved")
    again = bigmodel.from_pretrained(tmp_path / "saved", device_map={"": "cpu"})
    assert torch.equal(logits(again), logits(model))


@with_transformers
def test_transposed_layers_equal_those_of_transformers(gpt2, config):
    theirs = plain(AutoModelForCausalLM.from_pretrained(gpt2, quantization_config=config, device_map={"": "cpu"}))
    ours = bigmodel.from_pretrained(gpt2, quantization=config, device_map={"": "cpu"})
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("quantization", ["nf4", "int8", "fp8"])
def test_an_encoder_decoder_whose_code_casts_to_the_dtypes_of_its_weights_generates(tmp_path, quantization):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    plain = bigmodel.from_pretrained(tmp_path / "t5", device_map={"": "cpu"})
    model = bigmodel.from_pretrained(tmp_path / "t5", device_map={"": "cpu"}, quantization=quantization)
    with torch.no_grad():
        ours, exact = (each(input_ids=TOKENS, decoder_input_ids=TOKENS).logits for each in (model, plain))
    assert torch.nn.functional.cosine_similarity(ours, exact, dim=-1).min() > 0.9
    model.save_pretrained(tmp_path / "saved")
    again = bigmodel.from_pretrained(
        tmp_path / "saved", device_map={"": "cpu", "encoder.block.1": "disk"}, quantization="fp8" if quantization == "fp8" else None
    )
    arguments = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(again.generate(TOKENS, **arguments), model.generate(TOKENS, **arguments))


def small_llama(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
def test_packed_embeddings_and_heads_refuse_to_be_resized_by_name(tmp_path, device_map):
    folder = small_llama(tmp_path)
    table = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", pack_embeddings=True)
    head = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", skip_modules=[])
    for config, name in ((table, "model.embed_tokens"), (head, "lm_head")):
        model = bigmodel.from_pretrained(folder, quantization=config, device_map=device_map)
        with torch.no_grad():
            before = model(TOKENS).logits
            with pytest.raises(QuantizationError, match=rf"{name}: packed, so no rows can be added"):
                model.resize_token_embeddings(100)
            assert model.resize_token_embeddings() is model.get_input_embeddings()
            assert torch.equal(model(TOKENS).logits, before)
    loaded = bigmodel.load_and_quantize_model(LlamaForCausalLM.from_pretrained(folder), table)
    with pytest.raises(QuantizationError, match=r"model\.embed_tokens: packed"):
        loaded.resize_token_embeddings(100)
    plain = bigmodel.from_pretrained(folder, quantization="nf4", device_map={"": "cpu"})
    assert plain.resize_token_embeddings(100).num_embeddings == 100


def test_transformers_name_of_the_argument_is_understood(tmp_path):
    folder = small_llama(tmp_path)
    config = CONFIGS["int8"]
    model = bigmodel.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    assert model.is_loaded_in_8bit
    with pytest.raises(QuantizationError, match="two names of one argument"):
        bigmodel.from_pretrained(folder, quantization_config=config, quantization="nf4", device_map={"": "cpu"})
