"""Memory stays flat: what a load holds beside what stays is at most the ring, whatever the dtype and the number of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.constants import RING_BYTES, MiB

LAYERS = 16
FORMS = ("one", "sharded", "torch")
PAGES = ("said to be cheap", "huge")
"""What destinations are made of: what the system says is cheap, or huge pages as far as it has any."""
DTYPES = (("float32", "float32"), ("float32", "float16"), ("bfloat16", "float32"))

# A process of its own, so that nothing else moves its memory.
SCRIPT = """
import json, sys, threading, time
import torch
from torch import nn
from bigmodel.devices import private_bytes
from bigmodel.loading import Checkpoint, fresh_memory, init_empty_weights, load

if sys.argv[2] == "huge":
    fresh_memory._cheap_block_bytes = lambda: fresh_memory._number(fresh_memory.BLOCK_SIZE) or 0

def extra_bytes(folder, dtype):
    with init_empty_weights():
        model = nn.ModuleList(nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(16))
    peak, done = 0, threading.Event()
    def sample():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, private_bytes())
    thread = threading.Thread(target=sample)
    before = private_bytes()
    thread.start()
    load(model, Checkpoint.open(folder))
    done.set()
    thread.join()
    return max(peak, private_bytes()) - before - sum(p.nbytes for p in model.parameters())

cases = json.loads(sys.argv[1])
extra_bytes(cases[0][0], getattr(torch, cases[0][1]))  # threads, imports and caches are not what is measured
print(json.dumps([extra_bytes(folder, getattr(torch, dtype)) for folder, dtype in cases]))
"""


@pytest.fixture(scope="module", params=PAGES)
def extra_bytes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], int]:
    """Peak private memory beyond what stays, for every form of a checkpoint of 32 or 64 MiB and every pair of dtypes."""
    root = tmp_path_factory.mktemp("memory")
    cases = [(form, stored, wanted) for form in FORMS for stored, wanted in DTYPES]
    for form, stored, _ in cases:
        folder = root / f"{form}-{stored}"
        folder.mkdir(exist_ok=True)
        state = {f"{number}.weight": torch.full((1024, 1024), number, dtype=getattr(torch, stored)) for number in range(LAYERS)}
        if form == "torch":
            torch.save(state, folder / "pytorch_model.bin")
        elif form == "one":
            save_file(state, folder / "model.safetensors")
        else:
            for number, (name, value) in enumerate(state.items()):
                save_file({name: value}, folder / f"model-{number + 1:05d}-of-{LAYERS:05d}.safetensors")
    asked = [(str(root / f"{form}-{stored}"), wanted) for form, stored, wanted in cases]
    return dict(zip(cases, run(asked, request.param), strict=True))


def run(asked: list[tuple[str, str]], pages: str) -> list[int]:
    """What the script prints of folders and the dtypes that their layers become."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked), pages]
    # glibc keeps some of what the loads before have freed, and not always the same; above this size it gives all of it back.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    found: list[int] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(("stored", "wanted"), DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_peak_private_memory_is_what_stays_plus_the_ring(
    extra_bytes: dict[tuple[str, str, str], int], form: str, stored: str, wanted: str
) -> None:
    # The files hold 32 to 64 MiB: a bound below that shows that no second copy of them is held.
    assert extra_bytes[form, stored, wanted] <= min(RING_BYTES, 12 * MiB)


def integers(form: str, name: str) -> dict[str, torch.Tensor]:
    """A layer of 1024 × 1024 in 4-bit integers."""
    if form == "compressed":
        packed = {"weight_packed": (1024, 128), "weight_scale": (1024, 8), "weight_shape": (2,)}
    else:
        packed = {"qweight": (128, 1024), "qzeros": (8, 128), "scales": (8, 1024), "g_idx": (1024,)}
    if form == "awq":
        packed = {"qweight": (1024, 128), "qzeros": (8, 128), "scales": (8, 1024)}
    made = {each: torch.full(shape, 0x77777777, dtype=torch.int32) for each, shape in packed.items()}
    made |= {each: torch.ones(packed[each], dtype=torch.bfloat16) for each in packed if "scale" in each}
    if "g_idx" in made:
        made["g_idx"] = (torch.arange(1024) // 128).to(torch.int32)
    if "weight_shape" in made:
        made["weight_shape"] = torch.tensor([1024, 1024])
    return {f"{name}.{each}": value for each, value in made.items()}


def test_integers_become_floats_without_more_than_the_ring(tmp_path: Path) -> None:
    asked = []
    for form in ("compressed", "gptq", "awq"):
        (tmp_path / form).mkdir()
        state = {name: value for number in range(LAYERS) for name, value in integers(form, str(number)).items()}
        save_file(state, tmp_path / form / "model.safetensors")
        asked += [(str(tmp_path / form), dtype) for dtype in ("float32", "bfloat16")]
    # The floats of one layer are 2 or 4 MiB, those of all of them 32 or 64.
    assert max(run(asked, PAGES[0])) <= min(RING_BYTES, 24 * MiB)
