"""One progress bar in bytes, on the main process, with a callback and a quiet switch."""

import re
import threading

import pytest
import torch
import torch.distributed
import tqdm.std
from safetensors.torch import save_file
from torch import nn

import bigmodel
from bigmodel.loading import Checkpoint, load
from bigmodel.progress import Progress


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BIGMODEL_QUIET", "ACCELERATE_QUIET", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_the_bar_counts_bytes(capsys):
    with Progress(4096, "Loading", show=True) as bar:
        bar.advance(1024)
        bar.advance(3072)
    error = capsys.readouterr().err
    assert "Loading" in error
    assert "4.00k/4.00k" in error


def test_no_bar_without_a_terminal_nor_on_other_ranks(capsys, monkeypatch):
    with Progress(10, "Loading") as bar:
        bar.advance(10)
    monkeypatch.setenv("RANK", "1")
    with Progress(10, "Loading", show=True) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


def test_the_quiet_switch_holds_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("BIGMODEL_QUIET", "1")
    with Progress(10, "Loading") as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


def test_the_callback_hears_of_every_step_from_any_thread():
    heard = []
    with Progress(100, "Loading", show=False, callback=lambda done, total: heard.append((done, total))) as bar:
        threads = [threading.Thread(target=bar.advance, args=(10,)) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard == [(10 * step, 100) for step in range(1, 11)]


def test_the_bar_says_bytes_rate_and_what_is_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    with Progress(8 << 20, "Loading", show=True) as bar:
        now[0] += 2
        bar.advance(2 << 20)
        first = capsys.readouterr().err.split("\r")[-1]
        now[0] += 6
        bar.advance(6 << 20)
    assert re.search(r"Loading: +25%.* 2\.00M/8\.00M \[00:02<00:06, 1\.0[05]MB/s\]", first), first
    assert "8.00M/8.00M [00:08<00:00" in capsys.readouterr().err


def test_other_processes_of_a_group_show_none(capsys, monkeypatch):
    """Also where nobody has set RANK, as with torch.multiprocessing."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, shown in ((0, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with Progress(10, "Loading", show=True) as bar:
            bar.advance(10)
        assert ("Loading" in capsys.readouterr().err) == shown


@pytest.fixture
def shards(tmp_path):
    """Three shards of a model, 12 KiB."""
    for number in range(3):
        name = f"model-0000{number + 1}-of-00003.safetensors"
        save_file({f"{number}.weight": torch.full((32, 32), float(number))}, tmp_path / name)
    return tmp_path


def model():
    return nn.Sequential(*(nn.Linear(32, 32, bias=False, device="meta") for _ in range(3)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_load_has_one_bar_of_all_its_bytes(shards, capsys, dtype):
    bigmodel.load_and_dispatch(model(), Checkpoint.open(shards), device_map={"": "cpu"}, dtype=dtype, progress=True)
    error = capsys.readouterr().err
    assert error.count("Loading: 100%") == 1
    assert "12.0k/12.0k" in error


def test_a_load_is_quiet_when_asked(shards, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load(model(), Checkpoint.open(shards), progress=False)
    monkeypatch.setenv("BIGMODEL_QUIET", "1")
    load(model(), Checkpoint.open(shards))
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("BIGMODEL_QUIET")
    load(model(), Checkpoint.open(shards))
    assert "12.0k/12.0k" in capsys.readouterr().err


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_every_way_of_loading_tells_its_progress(shards, capsys, device_map):
    heard = []
    told = {"progress": True, "progress_callback": lambda done, total: heard.append((done, total))}
    bigmodel.load_checkpoint_in_model(model(), shards, device_map, **told)
    bigmodel.load_checkpoint_and_dispatch(model(), shards, device_map, **told)
    bigmodel.load_and_dispatch(model(), Checkpoint.open(shards), device_map=device_map, **told)
    assert heard.count((12 << 10, 12 << 10)) == 3
    assert capsys.readouterr().err.count("12.0k/12.0k") == 3


def test_the_callback_of_a_load_ends_at_all_bytes(shards):
    heard = []
    report = load(model(), Checkpoint.open(shards), progress_callback=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (12 << 10, 12 << 10)
    assert report.bytes_read == 12 << 10
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
