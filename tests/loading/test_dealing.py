"""Who reads what: every element once, the same bytes for each, neighbours together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bigmodel.loading.dealing import UNIT_BYTES, shares
from bigmodel.protocols import TensorSpec

SHARE_BYTES = 8 << 20


def specs_of(model: nn.Module) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}


def bytes_of_readers(specs: dict[str, TensorSpec], readers: int) -> list[int]:
    count = [0] * readers
    for round_ in shares(specs, readers, SHARE_BYTES):
        assert len(round_) == readers
        for reader, share in enumerate(round_):
            assert share.nbytes <= SHARE_BYTES + 2 * UNIT_BYTES
            count[reader] += sum(math.prod(chunk.spec.shape) * chunk.spec.dtype.itemsize for chunk in share.chunks)
    return count


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8), 6, enable_nested_tensor=False)


def vocabulary() -> nn.Module:
    return nn.Sequential(nn.Embedding(30522, 768), *(nn.Linear(768, 768) for _ in range(8)), nn.LayerNorm(768))


def experts() -> nn.Module:
    model = nn.Module()
    model.experts = nn.Parameter(torch.empty(3, 2048, 1024))
    return model


@pytest.mark.parametrize("readers", [2, 3, 4])
@pytest.mark.parametrize("build", [linears, encoder, vocabulary, experts], ids=lambda build: build.__name__)
def test_each_reader_has_the_same_bytes(build: type[nn.Module], readers: int) -> None:
    with torch.device("meta"):
        specs = specs_of(build())
    count = bytes_of_readers(specs, readers)
    total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    assert sum(count) == total
    assert max(count) - min(count) <= 0.02 * total / readers


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_every_element_is_read_once_and_found_in_what_is_sent(readers: int) -> None:
    torch.manual_seed(0)
    state = {
        "scalar": torch.randn(()),
        "none": torch.randn(3, 0),
        "bytes": torch.randint(0, 9, (70001,), dtype=torch.uint8),
        "flags": torch.rand(7, 3) < 0.5,
        "half": torch.randn(301, 257).bfloat16(),
        "cube": torch.randn(5, 300, 129),
        "deep": torch.randn(2, 1, 3, 70000),
        "wide": torch.randn(1, 300001),
    }
    specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in state.items()}
    seen = {name: torch.zeros(value.shape, dtype=torch.int) for name, value in state.items()}
    for round_ in shares(specs, readers, 1 << 20):
        for share in round_:
            sent = torch.zeros(share.nbytes, dtype=torch.uint8)
            for chunk in share.chunks:
                box = tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.spec.shape, strict=True))
                chunk.of(sent).copy_(state[chunk.name][box])
                seen[chunk.name][box] += 1
            for chunk in share.chunks:
                box = tuple(slice(start, start + size) for start, size in zip(chunk.start, chunk.spec.shape, strict=True))
                assert torch.equal(chunk.of(sent), state[chunk.name][box])
    assert all(bool((count == 1).all()) for count in seen.values())


def test_a_reader_has_one_stretch_of_the_files() -> None:
    specs = {f"{number}": TensorSpec((1000, 1000), torch.float32) for number in range(20)}
    first: list[list[int]] = [[] for _ in range(4)]
    for round_ in shares(specs, 4, SHARE_BYTES):
        for reader, share in enumerate(round_):
            first[reader] += [int(chunk.name) * 1000 + chunk.start[0] for chunk in share.chunks]
    assert all(each == sorted(each) for each in first)
    assert [each[0] for each in first] == sorted(each[0] for each in first)


def test_nothing_to_read() -> None:
    assert list(shares({"none": TensorSpec((0, 3), torch.float32)}, 2, SHARE_BYTES)) == []
