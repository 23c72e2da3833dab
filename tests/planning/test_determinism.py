"""The same question has the same answer: in every process, whatever the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

QUESTION = """
from planning_models import Decoder
from model_for_test import ModelForTest
from bigmodel.planning import infer_auto_device_map, plan
print(plan(Decoder(12, vocabulary=300), {0: 20_000, 1: 9_000, "cpu": 30_000}).to_json())
tied = Decoder(12, vocabulary=300, tied=True)
print(infer_auto_device_map(tied, {0: 30_000, 1: 9_000, "cpu": 30_000}, no_split_module_classes={"Block", "Linear"}))
print(infer_auto_device_map(ModelForTest(), {0: 200, 1: 150, "cpu": 1000}))
"""


def test_the_hash_seed_changes_nothing():
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])
    answers = set()
    for seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", QUESTION], capture_output=True, text=True, check=True, env=environment)
        answers.add(done.stdout)
    assert len(answers) == 1
    assert "device_map" in answers.pop()
