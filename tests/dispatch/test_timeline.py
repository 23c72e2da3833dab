"""`timeline(model)`: what was read, copied and computed, when, and how much of it."""

from __future__ import annotations

import copy

import pytest
import torch
from dispatch_models import FileStore, tiny
from safetensors.torch import save_file

import bigmodel
from bigmodel.dispatch import dispatch
from bigmodel.errors import DispatchError

BLOCKS = [f"layers.{index}" for index in range(4)]


def dispatched_tiny(tmp_path, device):
    model, ids, expected = tiny(width=256)
    store = FileStore(tmp_path, model.state_dict())
    return dispatch(model, {"": "disk"}, main_device=device, store=store, no_split_module_classes="Block"), ids, expected


def test_every_block_is_read_and_computes(tmp_path, execution_device):
    model, ids, expected = dispatched_tiny(tmp_path, execution_device)
    moved_before = bigmodel.placement(model).bytes_moved
    with bigmodel.timeline(model) as recorded, torch.no_grad():
        assert torch.equal(model(ids).cpu(), expected)
    activities = recorded.activities
    assert [each.group for each in activities if each.kind == "compute" and each.group in BLOCKS] == BLOCKS
    for block in BLOCKS:
        (computed,) = [each for each in activities if (each.kind, each.group) == ("compute", block)]
        read = next(each for each in activities if (each.kind, each.group) == ("read", block))
        assert 0 <= read.start_seconds <= read.end_seconds <= computed.end_seconds
        assert computed.start_seconds <= computed.end_seconds
        assert computed.device == str(execution_device)
    arrived = "read" if execution_device.type == "cpu" else "copy"
    moved = sum(each.nbytes for each in activities if each.kind == arrived)
    assert moved >= bigmodel.placement(model).bytes_moved - moved_before > 0  # one more may have been fetched ahead
    assert activities == sorted(activities, key=lambda each: each.start_seconds)


def test_copies_are_timed_where_they_run(tmp_path, accelerators):
    """A link of 10 MB a second: what the host sees of a queued copy takes no time, the copy itself does."""
    (device,) = accelerators(1, h2d_gbps=0.01)
    model, ids, _ = dispatched_tiny(tmp_path, device)
    with torch.no_grad():
        model(ids)
        with bigmodel.timeline(model) as recorded:
            model(ids)
    copies = [each for each in recorded.activities if each.kind == "copy" and each.group in BLOCKS]
    assert len(copies) >= 3
    for each in copies:
        assert each.end_seconds - each.start_seconds >= 0.9 * each.nbytes / 0.01e9
    for block in BLOCKS[2:]:  # the first ones came before, and come again for the next forward
        computed = next(each for each in recorded.activities if (each.kind, each.group) == ("compute", block))
        arrived = next(each for each in copies if each.group == block)
        assert arrived.end_seconds <= computed.start_seconds + 1e-3


def test_pages_that_are_read_ahead_are_told(tmp_path, monkeypatch):
    model, ids, expected = tiny(width=256, tie=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    model = bigmodel.load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", device_map={"": "cpu", "layers": "disk"})
    monkeypatch.setattr("bigmodel.loading.pages._is_in_memory", lambda descriptor, offset: False)
    with bigmodel.timeline(model) as recorded, torch.no_grad():
        assert torch.equal(model(ids), expected)
    read = {each.group: each.nbytes for each in recorded.activities if each.kind == "read"}
    assert read["layers.0"] == sum(parameter.nbytes for parameter in model.layers[0].parameters())


def test_nothing_is_recorded_before_and_after(tmp_path, execution_device):
    model, ids, _ = dispatched_tiny(tmp_path, execution_device)
    with torch.no_grad():
        model(ids)
        with bigmodel.timeline(model) as recorded:
            pass
        model(ids)
    assert not any(each.kind == "compute" for each in recorded.activities)


def test_a_failing_forward_ends_its_recording(tmp_path, execution_device):
    model, ids, expected = dispatched_tiny(tmp_path, execution_device)
    model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), bigmodel.timeline(model) as recorded:
        model(ids)
    assert [each.group for each in recorded.activities if each.kind == "compute"][-1] == "layers.2"
    model.layers[2]._forward_hooks.clear()
    with bigmodel.timeline(model) as recorded, torch.no_grad():
        assert torch.equal(model(ids).cpu(), expected)


def test_what_cannot_be_recorded_is_refused(tmp_path, execution_device):
    with pytest.raises(DispatchError, match="not dispatched"):
        bigmodel.timeline(tiny()[0]).__enter__()
    model, ids, _ = dispatched_tiny(tmp_path, execution_device)
    with bigmodel.timeline(model):
        with pytest.raises(DispatchError, match="recorded already"):
            bigmodel.timeline(model).__enter__()
        other = copy.deepcopy(model)
    with bigmodel.timeline(other) as recorded, torch.no_grad():
        other(ids)
    assert recorded.activities
