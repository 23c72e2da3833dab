"""Several loads that pack the same weights for one `packed_cache` at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import TOKENS, empty_net, saved_net

from bigmodel import load_checkpoint_and_dispatch
from bigmodel.loading import packed

LOADS = 4


def test_what_the_first_has_written_stays_and_serves_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_net(tmp_path)
    together = threading.Barrier(LOADS)
    real = packed.pack_weights

    def pack(*arguments: Any) -> Any:
        together.wait(60)  # nobody has found a kept file
        return real(*arguments)

    monkeypatch.setattr(packed, "pack_weights", pack)

    def load() -> torch.nn.Module:
        device_map = {"": "cpu", "layers": "disk"}
        return load_checkpoint_and_dispatch(
            empty_net(), tmp_path, device_map=device_map, quantization="fp8", packed_cache=tmp_path / "kept"
        )

    with ThreadPoolExecutor(LOADS) as pool:
        models = [future.result(60) for future in [pool.submit(load) for _ in range(LOADS)]]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    with torch.no_grad():
        outputs = [model(TOKENS) for model in models]
    assert all(torch.equal(outputs[0], other) for other in outputs)
