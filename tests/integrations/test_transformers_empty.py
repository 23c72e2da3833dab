"""A transformers model without weights: real buffers, kept ties, the right class and dtypes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import tiny_transformers
import torch
import transformers
from tiny_transformers import FAMILIES
from torch import nn

from bigmodel.errors import CheckpointError, MissingPackageError
from bigmodel.integrations.transformers import empty_model
from bigmodel.modules import find_tied_parameters, get_non_persistent_buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_is_on_meta_but_computed_buffers_which_equal_transformers(name, dtype, checkpoint_folder):
    folder = checkpoint_folder(name)
    model = empty_model(folder, dtype=dtype)
    expected = tiny_transformers.reference(folder, name, dtype=dtype)

    assert type(model) is type(expected)
    assert not model.training
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    own, theirs = model.state_dict(), expected.state_dict()
    assert {key: (tuple(value.shape), value.dtype) for key, value in own.items()} == {
        key: (tuple(value.shape), value.dtype) for key, value in theirs.items()
    }
    computed = get_non_persistent_buffers(expected, recurse=True, fqns=True)
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == computed
    for buffer_name in computed:
        ours, right = model.get_buffer(buffer_name), expected.get_buffer(buffer_name)
        assert ours.device.type == "cpu"
        assert ours.dtype == right.dtype
        assert torch.equal(ours, right), buffer_name


@pytest.mark.parametrize("name", ["llama-tied", "t5", "gpt2", "bert", "whisper"])
def test_ties_are_kept(name, checkpoint_folder):
    folder = checkpoint_folder(name)
    ties = find_tied_parameters(empty_model(folder))
    assert ties
    assert sorted(ties) == sorted(find_tied_parameters(tiny_transformers.reference(folder, name)))


def test_nothing_is_tied_that_the_configuration_does_not_tie(checkpoint_folder):
    assert find_tied_parameters(empty_model(checkpoint_folder("llama"))) == []


def test_a_class_keeps_what_it_needs_in_float32_beside_float16_only(checkpoint_folder):
    folder = checkpoint_folder("t5")
    half = empty_model(folder, dtype=torch.float16)
    assert half.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert half.encoder.block[0].layer[1].DenseReluDense.wi.weight.dtype == torch.float16
    brain = empty_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in brain.parameters()} == {torch.bfloat16}


def test_a_class_can_insist_on_float32_beside_bfloat16(checkpoint_folder):
    model = empty_model(checkpoint_folder("deepseek_v3"), dtype=torch.bfloat16)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("asked", "configured", "stored", "expected"),
    [
        (None, "bfloat16", torch.float32, torch.bfloat16),
        ("auto", "bfloat16", torch.float32, torch.bfloat16),
        (None, None, torch.float16, torch.float16),
        ("auto", None, torch.bfloat16, torch.bfloat16),
        (torch.float64, "bfloat16", torch.float32, torch.float64),
        ("float16", "bfloat16", torch.float32, torch.float16),
        ("torch.float16", None, torch.float32, torch.float16),
    ],
)
def test_the_dtype_is_the_asked_one_or_the_configurations_or_the_checkpoints(asked, configured, stored, expected, tmp_path):
    tiny_transformers.save(tiny_transformers.make("llama", dtype=stored), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype", None)
    if configured is not None:
        config["dtype"] = configured
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = empty_model(tmp_path, dtype=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.config.dtype == expected
    if not str(asked).startswith("torch."):
        assert tiny_transformers.reference(tmp_path, "llama", dtype=asked).dtype == expected
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("dtype", ["float17", "nn", torch.int8, "int8"])
def test_what_is_no_dtype_for_weights_is_refused(dtype, checkpoint_folder):
    with pytest.raises(CheckpointError, match=r"float17|nn|int8"):
        empty_model(checkpoint_folder("llama"), dtype=dtype)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, "LlamaForCausalLM"),
        ("LlamaModel", "LlamaModel"),
        (transformers.LlamaModel, "LlamaModel"),
        ("AutoModel", "LlamaModel"),
        (transformers.AutoModelForCausalLM, "LlamaForCausalLM"),
        ("AutoModelForSequenceClassification", "LlamaForSequenceClassification"),
    ],
)
def test_the_class_is_the_asked_one_or_the_configurations_architecture(asked, expected, checkpoint_folder):
    assert type(empty_model(checkpoint_folder("llama"), model_class=asked)).__name__ == expected


def test_without_an_architecture_it_is_the_base_model(tmp_path, checkpoint_folder):
    config = json.loads((checkpoint_folder("llama") / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(empty_model(tmp_path, dtype="bfloat16")).__name__ == "LlamaModel"


@pytest.mark.parametrize("change", [{"architectures": ["LlamaForTelepathy"]}, {"model_type": "telepathy"}])
def test_what_transformers_does_not_know_is_named(change, tmp_path, checkpoint_folder):
    config = json.loads((checkpoint_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"(LlamaForTelepathy|telepathy)"):
        empty_model(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_a_folder_without_a_readable_configuration_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        empty_model(tmp_path)


def test_an_unknown_class_is_named(checkpoint_folder):
    with pytest.raises(CheckpointError, match="LlamaForTelepathy"):
        empty_model(checkpoint_folder("llama"), model_class="LlamaForTelepathy")


class ComputesInConstructor(transformers.LlamaForCausalLM):
    """Like much code from the hub: the buffer is computed in the constructor and nowhere else."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slopes", torch.arange(5, dtype=torch.float32) ** 2, persistent=False)
        self.post_init()


class KeepsAPlainTensor(transformers.LlamaForCausalLM):
    """A tensor that is an attribute without being registered."""

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.arange(5)
        self.post_init()


@pytest.mark.parametrize("model_class", [ComputesInConstructor, KeepsAPlainTensor])
def test_buffers_that_only_the_constructor_computes_are_real_too(model_class, checkpoint_folder):
    model = empty_model(checkpoint_folder("llama-tied"), model_class=model_class, dtype=torch.bfloat16)
    if model_class is ComputesInConstructor:
        assert torch.equal(model.slopes, torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0]))
    else:
        assert torch.equal(model.table, torch.arange(5))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert find_tied_parameters(model) == [["lm_head.weight", "model.embed_tokens.weight"]]
    right = tiny_transformers.reference(checkpoint_folder("llama-tied"), "llama-tied")
    assert torch.equal(model.model.rotary_emb.inv_freq, right.model.rotary_emb.inv_freq)


class NeverComputes(transformers.LlamaForCausalLM):
    """A buffer that is empty on purpose: nobody fills it."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("nothing", torch.empty(5, device="meta"), persistent=False)
        self.post_init()


def test_a_buffer_that_nobody_computes_is_named(checkpoint_folder):
    with pytest.raises(CheckpointError, match="nothing"):
        empty_model(checkpoint_folder("llama"), model_class=NeverComputes)


def test_no_memory_is_taken_for_the_weights(tmp_path):
    # 400 GB of weights: building this for real would fail at once.
    transformers.LlamaConfig(
        hidden_size=16384, intermediate_size=65536, num_hidden_layers=30, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    model = empty_model(tmp_path, dtype=torch.float32)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 400e9


def test_a_model_built_meanwhile_in_another_thread_is_an_ordinary_one(checkpoint_folder):
    folder = checkpoint_folder("llama")
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            empty_model(folder)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        layers = [nn.Linear(2, 2) for _ in range(200)]
    finally:
        stop.set()
        thread.join()
    assert all(layer.weight.device.type == "cpu" for layer in layers)


def test_without_transformers_the_module_imports_and_calls_say_what_to_install(monkeypatch, checkpoint_folder):
    folder = checkpoint_folder("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r'pip install "bigmodel\[transformers\]"'):
        empty_model(folder)


def test_bigmodel_imports_where_transformers_is_not_installed():
    program = """
import sys
sys.modules["transformers"] = None
import bigmodel
try:
    bigmodel.from_pretrained("anything")
except bigmodel.MissingPackageError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert 'pip install "bigmodel[transformers]"' in run.stdout
