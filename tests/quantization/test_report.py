"""The report: bytes packed, bytes left and why, errors on request."""

from __future__ import annotations

import pytest
import torch
from quantized_models import empty_net, saved_net
from torch import nn

from bigmodel import MatchError, load_checkpoint_and_dispatch, placement, quantization_report
from bigmodel.quantization import BnbQuantizationConfig, packed_layers

NF4 = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", torch_dtype="fp32", skip_modules=["layers.1", "head"])


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "layers.2": "disk"}])
def test_bytes_packed_and_left_add_up_and_say_why(tmp_path, device_map):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=device_map, quantization=NF4)
    found = quantization_report(model)
    assert found.packed_bytes + found.left_bytes == sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    assert found.packed_from_bytes == 3 * 4 * (64 * 192 * 2 + 192)
    assert {layer.name for layer in found.layers if layer.format} == set(packed_layers(model))
    assert found.left() == {
        "it is the output head, tied, or was asked to be left": 4 * (64 * 192 * 2 + 192) + 4 * (64 * 100 + 100),
        "it is an embedding": 4 * 100 * 64,
        "it is no linear layer": 4 * 4 * 128,
    }
    assert "6 layers packed" in str(found)
    assert "it is an embedding (embed)" in str(found)
    assert all(layer.relative_error is None for layer in found.layers)


def test_errors_are_those_of_the_unpacked_weights(tmp_path):
    net = saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu", "layers.2": "disk"}, quantization=NF4)
    found = {layer.name: layer for layer in quantization_report(model, tmp_path).layers if layer.format}
    for name, layer in packed_layers(model).items():
        change = layer.unpacked() - net.get_submodule(name).weight
        assert found[name].relative_error == pytest.approx((change.norm() / net.get_submodule(name).weight.norm()).item(), rel=1e-5)
        assert found[name].max_error == pytest.approx(change.abs().max().item())
        assert 0.02 < found[name].relative_error < 0.2
    assert "largest relative errors" in str(quantization_report(model, tmp_path))


def test_a_checkpoint_without_the_weights_is_refused(tmp_path):
    saved_net(tmp_path)
    model = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, quantization=NF4)
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, other)
    with pytest.raises(MatchError, match=r"has no 'layers.0.up.weight' to compare"):
        quantization_report(model, other)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.empty(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.up)


def test_stacked_experts_that_stay_unpacked_are_named():
    (row,) = quantization_report(nn.Sequential(Experts())).layers
    assert row.reason == "it is a stack of matrices that Experts computes with as a whole"
    assert row.nbytes == 4 * 4 * 64


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_measuring_weights_that_rest_on_disk_is_no_reading_past_their_modules(tmp_path, caplog, quantization):
    saved_net(tmp_path)
    device_map = {"": "cpu", "layers.1": "disk"}
    away, resident = (
        load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=each, quantization=quantization)
        for each in (device_map, {"": "cpu"})
    )
    assert quantization_report(away, tmp_path) == quantization_report(resident, tmp_path)
    assert not placement(away).outside_reads
    assert "outside the forward" not in caplog.text
