"""Sizes, balanced budgets and a map, as notebooks work them out before anything is loaded."""

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import calculate_maximum_sizes, compute_module_sizes, dtype_byte_size, get_balanced_memory, get_max_memory
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Net(nn.Module):
    def __init__(self, width=16, depth=6):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 32)


with init_empty_weights():
    model = Net()
sizes = compute_module_sizes(model)
assert (sizes[""], sizes["layers"], sizes["layers.0.up"]) == (56_064, 51_840, 4352)
assert compute_module_sizes(model, dtype=torch.float16)[""] * 2 == sizes[""]
assert dtype_byte_size(torch.bfloat16) == 2
largest = calculate_maximum_sizes(model)
assert largest[0] == sizes[""]

budgets = get_balanced_memory(model, max_memory={0: 30_000, 1: 30_000, 2: 30_000, "cpu": 100_000}, no_split_module_classes=["Block"])
device_map = infer_auto_device_map(model, max_memory=budgets, no_split_module_classes=["Block"])
assert set(device_map.values()) == {0, 1, 2}
assert device_map["embed"] == 0
assert [device_map[f"layers.{index}"] for index in range(6)] == sorted(device_map[f"layers.{index}"] for index in range(6))

budgets = get_balanced_memory(
    model, {0: 30_000, 1: 30_000, "cpu": 100_000}, no_split_module_classes=["Block"], low_zero=True, dtype=torch.float16
)
assert budgets == {0: 0, 1: 30_000, "cpu": 100_000}
written = {0: "20KB", "cpu": "1GiB"}
assert get_max_memory(written) == written == {0: 20_000, "cpu": 2**30}
