"""Scripts that catch what goes wrong, by the types that they know."""

import os
import warnings

import torch
from accelerate import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.utils import OffloadedWeightsLoader, check_device_map, convert_file_size_to_int, get_max_memory
from accelerate.utils.modeling import check_tied_parameters_on_same_device
from torch import nn

model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
torch.save(model.state_dict(), "pytorch_model.bin")
os.makedirs("empty")
with init_empty_weights():
    meta = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))

faults = [
    (ValueError, "offload_dir", lambda: dispatch_model(model, {"0": "cpu", "1": "disk"})),
    (ValueError, "1.weight", lambda: dispatch_model(model, {"0": "cpu"})),
    (NotImplementedError, "meta", lambda: dispatch_model(meta, {"": "cpu"})),
    (ValueError, "sequential", lambda: load_checkpoint_and_dispatch(model, "pytorch_model.bin", device_map="automatic")),
    (ValueError, "offload_folder", lambda: load_checkpoint_in_model(model, "pytorch_model.bin", device_map={"": "disk"})),
    (ValueError, "", lambda: load_checkpoint_in_model(model, "nowhere", device_map={"": "cpu"})),
    (ValueError, ".index.json", lambda: load_checkpoint_in_model(model, "empty", device_map={"": "cpu"})),
    (ValueError, "doesn't have any device set", lambda: load_checkpoint_in_model(model, "pytorch_model.bin", device_map={"0": "cpu"})),
    (ValueError, "is not recognized", lambda: get_max_memory({"cuda:0": 1})),
    (ValueError, "5MBB", lambda: convert_file_size_to_int("5MBB")),
    (ValueError, "save_folder", lambda: OffloadedWeightsLoader()),
    (FileNotFoundError, "index.json", lambda: OffloadedWeightsLoader(save_folder="empty")),
    (ValueError, "does not contain the module", lambda: check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0})),
]
for kind, gist, act in faults:
    message = "nothing went wrong"
    try:
        act()
    except kind as error:
        message = str(error)
    assert gist in message, (gist, message)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check_device_map(model, {"": "cpu", "nope": 0})
assert ["do not match any submodules" in str(warning.message) for warning in caught] == [True]
