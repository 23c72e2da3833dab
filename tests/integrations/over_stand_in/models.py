"""transformers' own code for models on several devices, over bigmodel. Prints what it found as JSON; the test says what is right."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import tiny_transformers
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

FOLDER = Path(sys.argv[1])
FINDINGS: dict[str, Any] = {"module": accelerate.__name__}
IDS = tiny_transformers.FAMILIES["llama"].inputs()["input_ids"]


def finding(name: str) -> Callable[[Callable[[], Any]], None]:
    """Keeps what the function returns, or its traceback."""

    def keep(function: Callable[[], Any]) -> None:
        try:
            FINDINGS[name] = function()
        except Exception:
            FINDINGS[name] = traceback.format_exc()

    return keep


def fresh(name: str) -> str:
    """A folder for offloaded weights that nothing has used."""
    made = FOLDER / f"{name}-{len(list(FOLDER.iterdir()))}"
    made.mkdir()
    return str(made)


def mamba() -> Any:
    sizes = {"vocab_size": tiny_transformers.VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3}
    return transformers.MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)


tiny_transformers.FAMILIES["mamba"] = tiny_transformers.Family("MambaForCausalLM", mamba, tiny_transformers.FAMILIES["llama"].inputs)


def automatic(memory: str) -> dict[str, Any]:
    return {"device_map": "auto", "max_memory": {"cpu": memory}}


MAPPED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"device_map": {"": "cpu", "model.layers.1": "disk", "lm_head": "disk"}}),
    ("llama", automatic("60KB")),
    ("llama-tied", automatic("60KB")),
    ("llama-tied", {"device_map": {"": "disk"}}),
    ("gpt2", automatic("90KB")),
    ("mixtral", {"device_map": {"": "cpu", "model.layers": "disk"}}),  # its fused experts are written to the offload folder
    ("t5", {"device_map": {"": "cpu", "encoder": "disk"}}),
    ("t5", automatic("60KB")),
    ("llava", {"device_map": {"": "cpu", "model.language_model": "disk"}}),
    ("whisper", {"device_map": {"": "disk"}}),
    ("mamba", {"device_map": {"": "cpu", "backbone.layers": "disk"}}),  # `force_accelerate_hooks`
]
"""Models by family, and how transformers is told where they go."""

REFERENCES: dict[str, tuple[Any, Path, torch.Tensor, torch.Tensor]] = {}


def reference(name: str) -> tuple[Any, Path, torch.Tensor, torch.Tensor]:
    """The plain model, its checkpoint, its output, and what it generates."""
    if name not in REFERENCES:
        folder = tiny_transformers.save(tiny_transformers.make(name), FOLDER / name)
        plain = tiny_transformers.reference(folder, name).eval()
        with torch.no_grad():
            output = plain(**tiny_transformers.FAMILIES[name].inputs())[0]
        REFERENCES[name] = plain, folder, output, generated(plain, name)
    return REFERENCES[name]


def generated(model: Any, name: str) -> torch.Tensor:
    inputs = {key: value for key, value in tiny_transformers.FAMILIES[name].inputs().items() if not key.startswith("decoder_")}
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)


def mapped(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    plain, folder, output, tokens = reference(name)
    arguments = json.loads(json.dumps(arguments))  # transformers changes it
    kind = tiny_transformers.FAMILIES[name].model_class
    model = kind.from_pretrained(folder, offload_folder=fresh("offload"), **arguments).eval()
    with torch.no_grad():
        own = model(**tiny_transformers.FAMILIES[name].inputs())[0]
    same = {"output": torch.equal(own, output), "tokens": torch.equal(generated(model, name), tokens)}
    saved = FOLDER / fresh("saved")
    model.save_pretrained(saved)
    again = tiny_transformers.reference(saved, name).state_dict()
    expected = plain.state_dict()
    same["saved"] = again.keys() == expected.keys() and all(torch.equal(again[key], expected[key]) for key in expected)
    return same | {"devices": sorted(set(model.hf_device_map.values()))}


for number, (family, how) in enumerate(MAPPED):
    finding(f"mapped {number} {family}")(lambda family=family, how=how: mapped(family, how))


@finding("pipeline")
def _() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = reference("llama")[1]
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(tiny_transformers.VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2").save_pretrained(folder)
    options = {"task": "text-generation", "model": str(folder), "max_new_tokens": 4, "do_sample": False}
    offloads = {"offload_folder": fresh("offload"), "max_memory": {"cpu": "60KB"}}
    own = transformers.pipeline(**options, device_map="auto", model_kwargs=offloads)
    return {"same": own("w7 w8 w9") == transformers.pipeline(**options)("w7 w8 w9"), "device": str(own.device)}


@finding("resized")
def _() -> Any:
    plain, folder, output, _ = reference("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=fresh("offload"))
    try:
        model.resize_token_embeddings(100, mean_resizing=False)
    except accelerate.BigModelError as error:
        message = str(error)
    with accelerate.execution_devices():
        model.resize_token_embeddings(100, mean_resizing=False)
    with torch.no_grad():
        larger = model(IDS).logits
    return {"message": message, "same": torch.equal(larger[..., : plain.config.vocab_size], output), "shape": list(larger.shape)}


@finding("trained through")
def _() -> Any:
    """Weights on disk are frozen; what is resident learns, also where the backward computes each layer again."""
    plain, folder, *_ = reference("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu", "model.layers": "disk"}, offload_folder=fresh("offload"))
    gradients = []
    for each in (plain, model):
        each.activation_checkpointing_enable()
        each.train()(IDS, labels=IDS).loss.backward()
        gradients.append(each.get_input_embeddings().weight.grad)
    plain.eval()
    return {"same": torch.equal(*gradients), "outside reads": accelerate.placement(model).outside_reads}


@finding("a hook made anew")
def _() -> Any:
    """As a packed layer's is when the layer is unpacked."""
    from transformers.integrations.bitsandbytes import _create_accelerate_new_hook

    model = AutoModelForCausalLM.from_pretrained(
        reference("llama")[1], device_map={"": "cpu", "model.layers": "disk"}, offload_folder=fresh("offload")
    )
    old = model.model.layers[1]._hf_hook
    new = _create_accelerate_new_hook(old)
    return {"same": type(new) is type(old) and repr(new) == repr(old), "weights": sorted(new.weights_map) == sorted(old.weights_map)}


@finding("a module at a time")
def _() -> Any:
    """As Bark offloads its parts."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    inputs = torch.randn(2, 3)
    expected = second(first(inputs))
    first, hook = accelerate.cpu_offload_with_hook(first, torch.device("cpu"))
    second, last = accelerate.cpu_offload_with_hook(second, torch.device("cpu"), prev_module_hook=hook)
    same = torch.equal(second(first(inputs)), expected)
    last.offload()
    return {"same": same}


@finding("told")
def _() -> Any:
    from transformers.cli.system import env

    return {key: value for key, value in env().items() if key.startswith("Accelerate")}


print(json.dumps(FINDINGS, default=str))
