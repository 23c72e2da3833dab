"""Maps without a plan around them, run on an accelerator that has the budget that they were made for, and not a byte more for weights."""

from __future__ import annotations

import copy
import gc
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.dispatch import dispatch, dispatched, placement
from bigmodel.errors import DispatchError, PlanError

WIDTH = 64
ALIGNMENT = 512
"""What the device rounds an allocation up to, and the ring each of its tensors."""


class Block(nn.Module):
    def __init__(self, inner: int, *, deep: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.more = Block(inner) if deep else None
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain
        return x if self.more is None else self.more(x)


class Decoder(nn.Module):
    """Embedding, blocks (of several sizes, if asked), norm, and a head that may be tied to the embedding."""

    def __init__(self, inner: list[int], *, tie: bool = False, deep: bool = False, vocabulary: int = 300) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([Block(each, deep=deep) for each in inner])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.register_buffer("scale", torch.rand(WIDTH))
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS = {
    "equal blocks": lambda: Decoder([256] * 6),
    "few large blocks": lambda: Decoder([1024] * 2),
    "one block": lambda: Decoder([512]),
    "blocks of several sizes": lambda: Decoder([64, 512, 128, 512, 64]),
    "tied": lambda: Decoder([256] * 4, tie=True, vocabulary=1000),
    "deep blocks": lambda: Decoder([200] * 3, deep=True),
}
IDS = torch.arange(3).view(1, 3)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def nbytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def activation_bytes(model: nn.Module, device: torch.device) -> int:
    """What a forward takes beside the weights, and what rounding adds to these."""
    there = copy.deepcopy(model).to(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    there(IDS.to(device))
    rounding = ALIGNMENT * sum(1 for _ in (*model.parameters(), *model.buffers()))
    return torch.accelerator.max_memory_allocated(device) - before + rounding


@pytest.mark.parametrize("load", [True, False], ids=["load_checkpoint_and_dispatch", "dispatch_model"])
@pytest.mark.parametrize("handed_on", ["infer_auto_device_map", "plan.device_map"])
def test_no_map_needs_more_than_its_budget(model: Decoder, load: bool, handed_on: str, tmp_path: Path, accelerators) -> None:
    is_tied = model.head.weight is model.embed.weight
    kept = {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and name == "head.weight")}
    save_file(kept, tmp_path / "model.safetensors")
    (device,) = accelerators(1)
    extra = activation_bytes(model, device)
    with torch.no_grad():
        expected = model(IDS)
    offloaded = 0
    for percent in range(10, 106, 12):
        budget = nbytes_of(model) * percent // 100
        max_memory = {0: budget, "cpu": "1GB"}
        try:
            if handed_on == "plan.device_map":
                device_map = bigmodel.plan(model, max_memory).device_map
            else:
                device_map = bigmodel.infer_auto_device_map(model, max_memory)
        except PlanError:
            continue
        if "cpu" not in device_map.values() or 0 not in device_map.values():
            continue
        offloaded += 1
        (device,) = accelerators(1, memory=budget + extra)
        if load:
            with bigmodel.init_empty_weights():
                own = copy.deepcopy(model).to("meta")
            if is_tied:
                own.head.weight = own.embed.weight
            own = bigmodel.load_checkpoint_and_dispatch(own, tmp_path, device_map=device_map)
        else:
            own = bigmodel.dispatch_model(copy.deepcopy(model), device_map)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(own(IDS).cpu(), expected), (percent, device_map)
        assert placement(own).outside_reads == {}
        state = dispatched(own)
        assert state is not None
        assert state.schedule.pool(device).overflows == 0
        del own, state
        deadline = time.monotonic() + 5
        while torch.accelerator.memory_allocated(device) and time.monotonic() < deadline:
            gc.collect()  # a reader thread may be about to let go of the last buffer
    assert offloaded >= 3


def test_where_memory_abounds_two_whole_groups_pass(accelerators) -> None:
    accelerators(1)
    model = bigmodel.dispatch_model(Decoder([256] * 4).eval(), {"": "cpu", "norm": 0})
    with torch.no_grad():
        for _ in range(2):
            model(IDS)
    names = [row.name for row in placement(model).rows if row.name.startswith("layers")]
    assert names == [f"layers.{index}" for index in range(4)]


def test_less_than_the_largest_leaf_is_refused_with_numbers(accelerators) -> None:
    leaf = 4 * (1024 * WIDTH + 1024)
    (device,) = accelerators(1, memory=leaf)
    model = Decoder([1024] * 2).eval()
    before = dict(model.named_parameters())
    with pytest.raises(DispatchError) as raised:
        dispatch(model, {"": "cpu", "norm": 0}, main_device=device)
    text = str(raised.value)
    free, taken, needed = map(int, re.findall(r"(\d+) bytes (?:free beside|on sim:0|there)", text))
    assert free == leaf - 2 * 4 * WIDTH - 4 * WIDTH  # the norm and the buffer stay
    assert "layers.0.up" in text
    assert taken == leaf
    assert needed == taken + 4 * WIDTH  # beside the gain of its block
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_memory_that_other_tensors_take_is_not_the_rings(accelerators) -> None:
    block = 4 * (2 * 1024 * WIDTH + 1024 + 4 * WIDTH)
    (device,) = accelerators(1, memory=4 * block)
    taken = torch.empty(2 * block, dtype=torch.uint8, device=device)
    torch.manual_seed(0)
    plain = Decoder([1024] * 3).eval()
    model = bigmodel.dispatch_model(copy.deepcopy(plain), {"": "cpu", "norm": 0})
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS).cpu(), plain(IDS))
    assert placement(model).pool_bytes[str(device)] <= block
    del taken
