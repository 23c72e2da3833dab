"""A megatron-core `GPTModel` with the values of a transformers model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import TrainingError
from .megatron_layers import RotaryPositions, layer_specification, takes_any_device
from .megatron_models import Description
from .megatron_names import Rule
from .megatron_parts import is_part, own_part

__all__ = ["build", "check_own", "renewed_parameters"]


def build(plugin: Any, description: Description, model: nn.Module, mesh: Any, device: torch.device) -> nn.Module:
    """The `GPTModel` of a description, filled from process 0's `model`, on the host. All processes call it.

    Each tensor of `model` is empty once it is there: memory holds one tensor twice at most, and nobody takes old weights for new ones.

    Args:
        mesh: the one-dimensional mesh of tensor-parallel processes.
        device: where values travel between processes.

    Raises:
        TrainingError: sizes that this many processes cannot share, weights that are not float32 or have no values.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    _check_sizes(description, mesh.size())
    state = model.state_dict(keep_vars=True)
    strange = [name for name, value in state.items() if value.dtype != torch.float32 or value.is_meta]
    if strange:
        raise TrainingError(
            f"{type(model).__name__}: {len(strange)} tensors are not in float32, or have no values (meta): {', '.join(strange[:3])}. "
            "Load the checkpoint with dtype=torch.float32."
        )
    for rule in description.rules:
        if len({state[name].requires_grad for name in rule.sources}) > 1:
            raise TrainingError(
                f"{', '.join(rule.sources)} are one parameter in megatron-core, {rule.name}, and some of them are frozen: freeze all "
                "or none."
            )
    most = description.arguments["max_sequence_length"]
    if plugin.seq_length is not None and plugin.seq_length > most:
        raise TrainingError(f"seq_length={plugin.seq_length}: the model has positions for {most} tokens.")
    # Not `perform_initialization=False`: parameters would not be told how they are split.
    config = plugin.transformer_config(
        **description.sizes,
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")),  # the layers' own
        bf16=False,  # autocast makes the copies
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        init_method=_as_it_is,
        output_layer_init_method=_as_it_is,
    )
    with torch.device("meta"):
        built: nn.Module = GPTModel(config=config, transformer_layer_spec=layer_specification(plugin), **description.arguments)
    if description.frequencies is not None:
        built.rotary_pos_emb = RotaryPositions(description.frequencies.detach().clone())
    for rule in description.rules:
        whole = rule.joined([_of_first(state[name], device) for name in rule.sources])
        _fill(built, rule.name, whole, state[rule.sources[0]].requires_grad, mesh)
        for name in rule.sources:
            state[name].data = state[name].data.new_empty(0)
    lacking = [name for name, value in built.named_parameters() if value.is_meta]
    assert not lacking, lacking
    return built.train(model.training)


def _fill(model: nn.Module, name: str, whole: torch.Tensor, requires_grad: bool, mesh: Any) -> None:
    """Puts a parameter with this process's part of `whole` in the place of one without values."""
    place, _, last = name.rpartition(".")
    module = model.get_submodule(place)
    before = module.get_parameter(last)
    part = own_part(before, whole, mesh).to("cpu", copy=True, memory_format=torch.contiguous_format)
    parameter = nn.Parameter(part, requires_grad=requires_grad)
    parameter.__dict__.update(before.__dict__)  # where megatron-core notes how it is split
    module.register_parameter(last, parameter)


def check_own(model: nn.Module, plugin: Any, mesh: Any) -> None:
    """Makes a user's `GPTModel` ready, or raises `TrainingError` where it has parts that compute on CUDA devices alone.

    What is whole in several tensor-parallel processes becomes that of the first of them.
    """
    config: Any = getattr(model, "config", None)
    if not takes_any_device(model):
        raise TrainingError(
            f"{type(model).__name__}: its attention takes buffers from CUDA devices. Build it with "
            "transformer_layer_spec=plugin.layer_specification(), whose attention is torch's."
        )
    asked = {
        "fp16": False,
        "bf16": False,
        "params_dtype": torch.float32,
        "sequence_parallel": False,
        "recompute_granularity": None,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": mesh.size(),
    }
    for name, value in asked.items():
        if getattr(config, name) != value:
            raise TrainingError(
                f"{type(model).__name__}: {name} is {getattr(config, name)!r} in its config, and here it has to be {value!r}: build it "
                f"with plugin.transformer_config(num_layers=…, {name}={value!r})."
            )
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and not isinstance(rotary, RotaryPositions):
        if getattr(rotary, "rotary_interleaved", True) or getattr(rotary, "seq_len_interpolation_factor", 1) is not None:
            raise TrainingError(f"{type(rotary).__name__}: build the GPTModel with position_embedding_type='rope', without interpolation.")
        model.rotary_pos_emb = RotaryPositions(rotary.inv_freq)
    if mesh.size() > 1:
        first = dist.get_global_rank(mesh.get_group(), 0)
        with torch.no_grad():
            for parameter in model.parameters():
                if not is_part(parameter):
                    dist.broadcast(parameter, src=first, group=mesh.get_group())


def renewed_parameters(rules: Iterable[Rule], model: nn.Module, built: nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of the transformers model with the one of the `GPTModel` that it lies in."""
    state = model.state_dict(keep_vars=True)
    for rule in rules:
        for source in rule.sources:
            yield state[source], built.get_parameter(rule.name)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The values come from the other model."""
    return tensor


def _of_first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The values of process 0."""
    tensor = tensor.detach()
    if dist.get_world_size() > 1:
        tensor = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(tensor, src=0)
    return tensor


def _check_sizes(description: Description, degree: int) -> None:
    sizes = {
        "attention heads": description.sizes["num_attention_heads"],
        "key and value heads": description.sizes.get("num_query_groups", description.sizes["num_attention_heads"]),
        "features of the feed-forward layer": description.sizes["ffn_hidden_size"],
        "words of the vocabulary": description.arguments["vocab_size"],
    }
    for what, size in sizes.items():
        if size % degree:
            advice = " (model.resize_token_embeddings(…, pad_to_multiple_of=…) adds words)" if what.startswith("words") else ""
            raise TrainingError(f"tp_degree={degree} does not divide the {size} {what}{advice}.")
