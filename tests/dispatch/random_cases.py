"""Random models under random maps, ring sizes, modes, threads and failures, compared with the plain model bit for bit."""

from __future__ import annotations

import copy
import random
import re
import threading
from pathlib import Path
from typing import Any

import torch
from dispatch_models import FileStore
from safetensors.torch import save_file
from torch import nn

from bigmodel.dispatch import LazyTensor, dispatch, undispatch
from bigmodel.errors import DispatchError
from bigmodel.loading import Checkpoint, CheckpointStore
from bigmodel.loading.keys import Whole
from bigmodel.loading.transfer import lower
from bigmodel.protocols import Store

WIDTH = 6


class OnPurpose(Exception):
    """What a block that is to fail raises."""


class RandomBlock(nn.Module):
    def __init__(self, choice: random.Random, shared: list[nn.Module]) -> None:
        super().__init__()
        kinds = [choice.choice(["linear", "norm", "attention", "shared", "direct", "batchnorm"]) for _ in range(choice.randint(1, 4))]
        self.parts = nn.ModuleList()
        self.kinds = kinds
        for kind in kinds:
            if kind == "linear":
                self.parts.append(nn.Linear(WIDTH, WIDTH, bias=choice.random() < 0.5))
            elif kind == "norm":
                self.parts.append(nn.LayerNorm(WIDTH))
            elif kind == "attention":
                self.parts.append(nn.MultiheadAttention(WIDTH, 2, batch_first=True))
            elif kind == "shared":
                self.parts.append(choice.choice(shared))
            elif kind == "batchnorm":
                self.parts.append(nn.BatchNorm1d(WIDTH))
            else:
                self.parts.append(nn.Linear(WIDTH, WIDTH))
        if choice.random() < 0.3:
            self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        for kind, part in zip(self.kinds, self.parts, strict=True):
            if kind == "attention":
                y = part(x, x, x)[0]
            elif kind == "direct":
                y = nn.functional.linear(x, part.weight, part.bias)
            elif kind == "batchnorm":
                y = part(x.transpose(1, 2)).transpose(1, 2)
            else:
                y = part(x)
            x = x + y
        if hasattr(self, "gain"):
            x = x * self.gain
        state["count"] = state.get("count", 0) + 1
        if state.get("fail_at") == state["count"]:
            raise OnPurpose
        return torch.tanh(x)


class RandomModel(nn.Module):
    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        shared = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([RandomBlock(choice, shared) for _ in range(choice.randint(1, 5))])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if choice.random() < 0.5:
            self.head.weight = self.embed.weight
        if choice.random() < 0.3:
            self.scale = nn.Parameter(torch.randn(11))
        self.order = [choice.randrange(len(self.layers)) for _ in range(choice.randint(1, 7))] if choice.random() < 0.4 else None

    def forward(self, ids: torch.Tensor, state: dict[str, Any] | None = None) -> torch.Tensor:
        state = {} if state is None else state
        x = self.embed(ids)
        for index in self.order if self.order is not None else range(len(self.layers)):
            x = self.layers[index](x, state)
        x = self.head(x)
        # As models that may be spread over devices do: what blocks put out is on the last block's device.
        return x.to(self.scale.device) * self.scale if hasattr(self, "scale") else x


def random_map(choice: random.Random, model: RandomModel, places: list[Any]) -> dict[str, Any]:
    device_map: dict[str, Any] = {"": choice.choice(places)}
    for name, _ in model.named_modules():
        if not name or choice.random() > (0.15 if name.count(".") > 1 else 0.5):
            continue
        block = model.layers[int(name.split(".")[1])] if name.count(".") > 1 else None
        # A weight that is read without its module cannot be resident on another device than the one where its block runs.
        device_map[name] = choice.choice(["cpu", "disk"] if block is not None and "direct" in block.kinds else places)
    return device_map


def smallest_ring_bytes(model: RandomModel, device_map: dict[str, Any], arguments: dict[str, Any]) -> int:
    """The ring that the error for one that is too small asks for; 0 where nothing passes through. One byte less is refused as well."""
    # A copy in RAM shares its bytes with the model, which then computes on its own copies of them: as long as it lives, both need a ring.
    copied = copy.deepcopy(model)
    try:
        dispatch(copied, device_map, ring_bytes=0, **arguments)
    except DispatchError as error:
        said = str(error)
    else:
        return 0
    found = re.search(r"give at least (\d+) bytes", said)
    assert found is not None, said
    smallest = int(found[1])
    try:
        dispatch(model, device_map, ring_bytes=smallest - 1, **arguments)
    except DispatchError:
        return smallest
    raise AssertionError(f"A ring of {smallest - 1} bytes was taken although {smallest} are the least.")


def random_store(choice: random.Random, folder: Path, tensors: dict[str, torch.Tensor]) -> Store:
    """Files of single tensors, or a checkpoint, whose pages are mapped or not."""
    if choice.random() < 0.4:
        return FileStore(folder, tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    transfers = {name: lower(Whole(name), checkpoint.entries, name, tensor.dtype) for name, tensor in tensors.items()}
    return CheckpointStore(transfers, checkpoint.identities, map_files=choice.random() < 0.7)


def one_case(seed: int, folder: Path, devices: list[torch.device]) -> None:
    """A random model under one or two random maps: forwards, failures and threads. Everything is chosen by `seed`; `folder` is for files.

    Raises AssertionError, with the choices in it, where an output, a gradient or a restored weight is not the plain model's.
    """
    choice = random.Random(seed)
    torch.manual_seed(seed)
    plain = RandomModel(choice).eval()
    model = copy.deepcopy(plain)
    inputs = [torch.randint(0, 11, (2, 3)) for _ in range(3)]
    with torch.no_grad():
        expected = [plain(ids) for ids in inputs]
    blocks = len(plain.order) if plain.order is not None else len(plain.layers)
    store = random_store(choice, folder, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    main = devices[0] if devices else torch.device("cpu")
    for _ in range(choice.randint(1, 2)):
        device_map = random_map(choice, model, ["cpu", "cpu:resident", "disk", *range(len(devices))])
        arguments = {
            "main_device": main,
            "store": store,
            "offload_buffers": choice.random() < 0.5,
            "no_split_module_classes": "RandomBlock",
            "prefetch": choice.random() < 0.8,
        }
        smallest = smallest_ring_bytes(model, device_map, arguments)
        ring_bytes = choice.choice([None, smallest, smallest + choice.randrange(600), 2 * smallest, 100_000])
        dispatch(model, device_map, ring_bytes=ring_bytes, **arguments)
        context = f"seed {seed}, map {device_map}, ring {ring_bytes}, {arguments}"
        if choice.random() < 0.2:
            model = copy.deepcopy(model)
        for _ in range(choice.randint(1, 4)):
            index = choice.randrange(3)
            mode = choice.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
            # With everything on one device there are no hooks, and nobody moves the inputs.
            ids = inputs[index].to(choice.choice([main, "cpu"]) if hasattr(model, "_hf_hook") else main)
            with mode():
                if mode is torch.enable_grad:
                    _check_gradients(model, plain, ids, context)
                else:
                    assert torch.equal(model(ids).cpu(), expected[index]), context
                if choice.random() < 0.3:
                    _fails(model, ids, choice.randint(1, blocks))
        if choice.random() < 0.3:
            wrong: list[Any] = []
            fail_at = [choice.randint(1, blocks) if choice.random() < 0.3 else None for _ in range(3)]
            threads = [
                threading.Thread(target=_work, args=(model, inputs[i].to(ids.device), expected[i], fail_at[i], wrong)) for i in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == [], context
    undispatch(model)
    assert not any(isinstance(tensor, LazyTensor) for tensor in [*model.parameters(), *model.buffers()])
    model.to("cpu")
    with torch.no_grad():
        assert torch.equal(model(inputs[0]), expected[0])
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def _fails(model: nn.Module, ids: torch.Tensor, fail_at: int) -> None:
    """A forward that raises in the block that comes as number `fail_at`."""
    try:
        model(ids, {"fail_at": fail_at})
    except OnPurpose:
        return
    raise AssertionError("The forward was to fail.")


def _check_gradients(model: nn.Module, plain: nn.Module, ids: torch.Tensor, context: str) -> None:
    """Output and gradients of a training forward: offloaded weights are frozen, so those of the plain model are too."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    same = copy.deepcopy(plain)
    for name, parameter in same.named_parameters():
        parameter.requires_grad_(not isinstance(parameters[name], LazyTensor))
    output, expected = model(ids), same(ids.cpu())
    assert torch.equal(output.cpu(), expected), context
    assert output.requires_grad == expected.requires_grad, context
    if output.requires_grad:
        output.sum().backward()
        expected.sum().backward()
    for name, parameter in same.named_parameters():
        if parameter.grad is not None:
            # Uses on several devices are added up in another order.
            torch.testing.assert_close(parameters[name].grad.cpu(), parameter.grad, msg=lambda text, name=name: f"{name}: {text} {context}")
            parameters[name].grad = None


def _work(model: nn.Module, ids: torch.Tensor, expected: torch.Tensor, fail_at: int | None, wrong: list[Any]) -> None:
    try:
        with torch.no_grad():
            for _ in range(4):
                if not torch.equal(model(ids).cpu(), expected):
                    wrong.append("differs")
                if fail_at is not None:
                    _fails(model, ids, fail_at)
    except BaseException as error:
        wrong.append(error)
