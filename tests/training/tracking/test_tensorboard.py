"""TensorBoard reads from the files what scripts told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bigmodel import Accelerator
from bigmodel.training.tracking import TensorBoardTracker


def test_scalars_texts_images_and_hyperparameters_are_in_the_files(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    config = {"rate": 0.1, "optimizer": {"name": "sgd", "steps": [1, 2]}, "none": None, "dtype": torch.bfloat16}
    accelerator.init_trackers("run", config=config, init_kwargs={"tensorboard": {"flush_secs": 60}})
    tracker = accelerator.get_tracker("tensorboard")
    assert isinstance(tracker, TensorBoardTracker)
    assert tracker.writer is accelerator.get_tracker("tensorboard", unwrap=True)
    for step in range(3):
        accelerator.log({"loss": torch.tensor(1 / (step + 1)), "word": f"step {step}", "eval": {"a": step, "b": 2.0}}, step=step)
    tracker.log_images({"noise": torch.zeros(2, 3, 4, 4)}, step=1)
    accelerator.end_training()

    found = EventAccumulator(str(tmp_path / "run")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert losses == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert [event.tensor_proto.string_val[0] for event in found.Tensors("word/text_summary")] == [b"step 0", b"step 1", b"step 2"]
    assert [(event.step, event.width) for event in found.Images("noise")] == [(1, 8)]  # both, side by side
    nested = EventAccumulator(str(tmp_path / "run" / "eval_a")).Reload()
    assert [event.value for event in nested.Scalars("eval")] == [0.0, 1.0, 2.0]
    stored = yaml.safe_load((tmp_path / "run" / "hparams.yml").read_text())
    assert stored == {"rate": 0.1, "optimizer": {"name": "sgd", "steps": [1, 2]}, "none": None, "dtype": "torch.bfloat16"}
    of_the_page = EventAccumulator(str(tmp_path / "run" / "hparams")).Reload().SummaryMetadata("_hparams_/session_start_info")
    text = of_the_page.plugin_data.content
    for part in (b"rate", b"optimizer/name", b"sgd", b"optimizer/steps", b"[1, 2]", b"None", b"torch.bfloat16"):
        assert part in text
