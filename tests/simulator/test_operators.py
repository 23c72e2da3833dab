"""Operators on simulated devices: the CPU's results, a GPU's refusal of mixed devices."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIXED: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    lambda a, b, c: a + b,
    lambda a, b, c: a + c,
    lambda a, b, c: c + a,
    lambda a, b, c: F.linear(a, c),
    lambda a, b, c: F.linear(c, a),
    lambda a, b, c: torch.cat([a, c]),
    lambda a, b, c: torch.stack([a, b]),
    lambda a, b, c: a @ b,
    lambda a, b, c: c @ a,
    lambda a, b, c: c.add_(a),
    lambda a, b, c: a.add_(c),
    lambda a, b, c: a.mul_(b),
    lambda a, b, c: torch.where(a > 0, a, b),
    lambda a, b, c: F.layer_norm(a, (4,), c[0], c[0]),
    lambda a, b, c: F.embedding(a.long(), c),
    lambda a, b, c: F.embedding(c.long(), a),
    lambda a, b, c: c[a.long()],
    lambda a, b, c: a[b.long()],
    lambda a, b, c: a.index_select(0, c[0].long()),
    lambda a, b, c: F.scaled_dot_product_attention(a[None, None], a[None, None], c[None, None]),
    lambda a, b, c: torch.addmm(c[0], a, a),
    lambda a, b, c: torch.baddbmm(a[None], b[None], b[None]),
    lambda a, b, c: F.batch_norm(a, c[0], c[0]),
    lambda a, b, c: torch.einsum("ij,jk->ik", a, c),
    lambda a, b, c: a.masked_fill(c > 0, 1.0),
    lambda a, b, c: torch.gather(a, 0, c.long()),
    lambda a, b, c: a.scatter_(0, c.long(), 1.0),
    lambda a, b, c: F.cross_entropy(a, c[:, 0].long()),
    lambda a, b, c: torch.mm(a, a, out=c),
    lambda a, b, c: torch.add(c, c, out=a),
    lambda a, b, c: F.conv1d(a[None], c[:, :, None]),
    lambda a, b, c: F.rms_norm(a, (4,), c[0]),
]


def test_mixed_devices_are_refused(accelerators) -> None:
    accelerators(2)
    for number, operation in enumerate(MIXED):
        a, b, c = torch.zeros(4, 4, device="sim:0"), torch.zeros(4, 4, device="sim:1"), torch.zeros(4, 4)
        try:
            operation(a, b, c)
        except (RuntimeError, IndexError):
            continue
        pytest.fail(f"operation {number} of MIXED ran")


def test_mixes_that_a_gpu_allows(accelerators) -> None:
    accelerators(2)
    a = torch.arange(6.0, device="sim:0").view(2, 3)
    assert (a + torch.tensor(2.0)).device == a.device  # scalars
    assert a[torch.tensor([1])].tolist() == [[3, 4, 5]]  # indices
    a[torch.tensor([0])] = 7.0
    assert a[0, 0].item() == 7
    a.copy_(torch.ones(3, device="sim:1"))
    assert a.sum().item() == 6


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def test_copies(accelerators) -> None:
    accelerators(2)
    for dtype in DTYPES:
        whole = torch.randint(0, 2, (5, 7)).to(dtype)
        for x in (whole, whole.t(), whole[1:4, ::2]):
            there = x.to("sim:0")
            further = there.to("sim:1")
            assert there.dtype == dtype
            assert there.data_ptr() != x.data_ptr()
            assert there.data_ptr() != further.data_ptr()
            assert torch.equal(further.cpu().to(torch.complex64), x.to(torch.complex64))
    x = torch.randn(4, 4)
    assert torch.equal(x.to("sim:0", torch.bfloat16).float().cpu(), x.to(torch.bfloat16).float())
    spread = torch.zeros(4, 8, device="sim:0")
    spread[:, ::2].copy_(x)
    assert torch.equal(spread[:, ::2].cpu(), x)
    host = torch.zeros(4, 8)
    host[:, ::2].copy_(spread[:, ::2])
    assert torch.equal(host[:, ::2], x)
    with pytest.raises(TypeError):
        spread.numpy()


def test_views_and_resizing(accelerators) -> None:
    accelerators(2)
    x = torch.arange(12.0, device="sim:0")
    x.view(3, 4)[1].mul_(2)
    assert x[4].item() == 8
    first, second = x.split(6)
    first.zero_()
    assert (x[0].item(), x[5].item(), second[0].item()) == (0, 0, 12)
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert [part.storage_offset() for part in x.chunk(3)] == [0, 4, 8]
    eye = torch.eye(3, device="sim:0")
    eye.diagonal().fill_(5)
    assert eye.sum().item() == 15

    before = torch.sim.memory_allocated(0)
    x.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated(0) < before
    x.untyped_storage().resize_(48)
    x.fill_(1.0)
    assert x.sum().item() == 12
    out = torch.empty(0, device="sim:0")
    torch.add(x, x, out=out)
    assert out.tolist() == [2] * 12
    assert torch.ones(2, device="sim:0").set_(x.untyped_storage(), 2, (3,), (1,)).shape == (3,)
    x.data = torch.zeros(3, device="sim:1")
    assert x.device == torch.device("sim:1")


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x[0], x[0, :, 0]),
    "layer_norm": lambda x: F.layer_norm(x, (8,), x[0, 0], x[0, 1]),
    "group_norm": lambda x: F.group_norm(x, 2, x[0, :, 0], x[0, :, 1]),
    "rms_norm": lambda x: F.rms_norm(x, (8,), x[0, 0]),
    "batch_norm": lambda x: F.batch_norm(x, x[0, :, 0], x[0, :, 1].abs(), x[0, :, 2], x[0, :, 3]),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "silu": F.silu,
    "matmul": lambda x: x @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("bij,bkj->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "conv1d": lambda x: F.conv1d(x, x[:, :, :3]),
    "conv2d": lambda x: F.conv2d(x[:, None], x[:, None, :4, :4], stride=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[:, None], x[:1, None, :3, :3]),
    "bicubic": lambda x: F.interpolate(x[:, None], size=(5, 11), mode="bicubic"),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "topk": lambda x: torch.cat([x.topk(3).values, x.topk(3).indices.to(x.dtype)], -1),
    "sort": lambda x: x.sort(-1).values,
    "cumsum": lambda x: x.cumsum(-1),
    "index_add_": lambda x: x.clone().index_add_(1, torch.tensor([3, 1, 3], device=x.device), x[:, :3]),
    "one_hot": lambda x: F.one_hot((x[0] > 0).long(), 4).to(x.dtype),
    "where": lambda x: torch.where(x > 0, x, -x),
    "nonzero": lambda x: (x > 0).nonzero().to(x.dtype),
    "unique": lambda x: (x * 2).round().unique(),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "advanced_index": lambda x: x[:, torch.tensor([0, 2], device=x.device)],
    "tril": lambda x: x.tril(),
    "conj": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(2, 8, 4, 2).float()).conj() * 2j).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_are_the_cpus(accelerators, dtype: torch.dtype) -> None:
    (device,) = accelerators(1)
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8).to(dtype)
    different = [name for name, operation in OPERATIONS.items() if not torch.equal(operation(x.to(device)).cpu(), operation(x))]
    assert different == []


def test_integers_are_counted_as_on_a_gpu(accelerators) -> None:
    (device,) = accelerators(1)
    counts = torch.histc(torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize("queued", [False, True])
def test_training_is_the_cpus(accelerators, queued: bool) -> None:
    first, second = accelerators(2, queued_kernels=queued)
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5)]
    on_cpu = nn.Sequential(*layers)
    on_device = copy.deepcopy(on_cpu).to(first)
    x, y = torch.randn(4, 2, 6), torch.randint(0, 5, (4,))
    for model, device in ((on_cpu, torch.device("cpu")), (on_device, first)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for wanted, seen in zip(on_cpu.parameters(), on_device.parameters(), strict=True):
        assert torch.equal(wanted, seen.cpu())

    q, k = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 2, 4, 8, requires_grad=True, device=first)
    for tensor in (q, k):
        F.scaled_dot_product_attention(tensor, tensor, tensor).sum().backward()
    assert k.grad is not None
    assert k.grad.device == first
    a, b = nn.Linear(4, 4).to(first), nn.Linear(4, 1).to(second)
    b(a(torch.ones(2, 4, device=first)).to(second)).sum().backward()
    assert a.weight.grad is not None
    assert a.weight.grad.device == first
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert a(torch.ones(2, 4, device=first)).dtype == torch.bfloat16


def test_parameters_keep_their_identity(accelerators) -> None:
    """Module.to() exchanges the data, as with CUDA, so that ties and optimizers' references survive."""
    first, second = accelerators(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weight = model[0].weight
    for device in (first, second, torch.device("cpu")):
        model.to(device)
        assert model[0].weight is weight
        assert model[1].weight is weight
        assert weight.device == device
    weight.data = torch.zeros(4, 4, device=first)
    assert weight.device == first
    with pytest.raises(RuntimeError):
        weight.data = torch.zeros(4, 4, device="meta")
