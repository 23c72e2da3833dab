"""What transformers' own code (generation, pipelines, saving) expects to find on a model that was loaded and dispatched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ...devices import DeviceKey, as_key, computing_key
from ...dispatch import LazyTensor, replace_method
from ...quantization import unknown_to_transformers
from .gguf import single_gguf
from .keys import TransformersKeys
from .package import transformers_module
from .saving import save_pretrained

__all__ = ["finish"]


def finish(model: Any, path_or_id: str | os.PathLike[str], folder: Path, rules: TransformersKeys) -> None:
    """Leaves on the model what transformers' `from_pretrained` leaves there."""
    # Saving undoes these conversions, so that the files look like those that were read.
    model._weight_conversions = rules.used_conversions
    model.config.name_or_path = model.name_or_path = os.fspath(path_or_id)
    for module in model.modules():
        module._is_hf_initialized = True
    if model.can_generate():
        model.generation_config = _generation_config(folder, model)
    if getattr(model, "hf_device_map", None) is not None:
        model.hf_device_map = _map_for_libraries(model, model.hf_device_map)
    if unknown_to_transformers(model) or any(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), *model.buffers())):
        replace_method(model, "save_pretrained", save_pretrained)


def _generation_config(folder: Path, model: Any) -> Any:
    configuration = transformers_module().GenerationConfig
    if single_gguf(folder) is not None:
        return configuration.from_model_config(model.config)
    if (folder / "generation_config.json").is_file():
        return configuration.from_pretrained(folder)
    # Old checkpoints keep the settings of generation in the model's configuration.
    return configuration.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def _map_for_libraries(model: Any, device_map: dict[str, DeviceKey]) -> dict[str, Any]:
    """The same map, so that transformers draws the right conclusions from it.

    It starts with the main device, since pipelines put their inputs on the first device of the map. Where it has no entry for the main
    device, because all weights are on disk, it gets one for the (empty) rest of the model. The CPU alone is a `torch.device`, since "cpu"
    means to transformers that something is offloaded.
    """
    if set(map(computing_key, device_map.values())) == {"cpu"}:
        return dict.fromkeys(device_map, torch.device("cpu"))
    main = as_key(model.device)
    if main not in device_map.values():
        if set(device_map.values()) != {"disk"}:
            return device_map
        expanded: dict[str, DeviceKey] = {name: "disk" for name in device_map if name}
        if "" in device_map:
            names = [name for name, _ in model.named_children()]
            names += [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
            expanded |= dict.fromkeys(names, "disk")
        return {"": main} | expanded
    return dict(sorted(device_map.items(), key=lambda item: item[1] != main))
