"""A plan as text: what `to_json` writes comes back equal, and nothing else is taken for a plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planning_models import Decoder

from bigmodel.errors import PlanError
from bigmodel.planning import Advice, Plan, Prediction, plan

BLOCK = 8 * 16 * 16  # bytes of a Decoder's block at width 16


@pytest.fixture(scope="module")
def made() -> Plan:
    found = plan(Decoder(), {0: 8 * BLOCK, "cpu": 5 * BLOCK}, batch=2)
    return replace(
        found,
        advice=(Advice("one more card", 0, 100, 20, fits=False, token_seconds=0.25), Advice("4-bit weights (nf4)", 0, 0, 0, fits=True)),
        prediction=Prediction(1.0, 2.5, 0.125, "disk → cpu", 2),
        notes=("A note.",),
    )


def test_a_plan_survives_json(made: Plan) -> None:
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.device_map == made.device_map
    assert list(again.device_map) == list(made.device_map)
    assert again.advice[0].token_seconds == 0.25
    assert again.prediction is not None
    assert again.prediction.tokens_per_second == 16.0
    assert str(again) == str(made)
    fits = plan(Decoder(), {0: 10**6})
    assert Plan.from_json(fits.to_json()) == fits


def test_programs_read_the_figures(made: Plan) -> None:
    fields = json.loads(made.to_json())
    assert fields["moved_bytes"] == made.moved_bytes
    assert fields["device_map"]["embed"] == "disk"
    assert fields["devices"][0]["device"] == 0


@pytest.mark.parametrize("text", ["", "no json", "[]", "3", "{}", '{"device_map": {}}', "[" * 100_000, "NaN", '{"a": 1, "a": 2}'])
def test_text_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan that this version of bigmodel wrote"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bigmodel_plan": 0}, "its version is 0, this bigmodel reads and writes 1"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"main_device": 7}, "device 7 is not among 'devices'"),
        ({"main_device": 0.5}, "main_device is '0.5'"),
        ({"moved_bytes": "12"}, "moved_bytes is '12', which is no int"),
        ({"moved_bytes": True}, "moved_bytes is 'True', which is no int"),
        ({"is_optimal": 1}, "is_optimal is '1', which is no bool"),
        ({"device_map": {"embed": 3}}, "device 3 is not among 'devices'"),
        ({"device_map": {"embed": None}}, r"device_map\['embed'\] is 'None'"),
        ({"device_map": []}, "device_map is"),
        ({"blocks": ["a", 1]}, r"blocks\[1\] is '1', which is no str"),
        ({"advice": [{"change": "x"}]}, r"'main_device' in advice\[0\] is missing"),
        ({"prediction": {"load_seconds": 1.0}}, "'prefill_seconds' in prediction is missing"),
        ({"context": "8192"}, "context is '8192'"),
        ({"moved_bytes": -1}, "moved_bytes of the plan is negative"),
        ({"context": -8}, "context of the plan is negative"),
    ],
)
def test_every_field_is_checked(made: Plan, change: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan.from_json(json.dumps(json.loads(made.to_json()) | change))


def test_missing_and_doubled_parts_are_named(made: Plan) -> None:
    fields = json.loads(made.to_json())
    with pytest.raises(PlanError, match="'moved_bytes' is missing"):
        Plan.from_json(json.dumps({name: value for name, value in fields.items() if name != "moved_bytes"}))
    with pytest.raises(PlanError, match="a device comes twice"):
        Plan.from_json(json.dumps(fields | {"devices": [*fields["devices"], fields["devices"][0]]}))
    fields["devices"][0]["used"] = 3
    with pytest.raises(PlanError, match=r"'used' in devices\[0\] is unknown"):
        Plan.from_json(json.dumps(fields))
    with pytest.raises(PlanError, match="Infinity is no number"):
        Plan.from_json(made.to_json().replace("0.125", "Infinity"))


def test_no_device_holds_less_than_nothing(made: Plan) -> None:
    fields = json.loads(made.to_json())
    fields["devices"][0]["budget_bytes"] = -5
    with pytest.raises(PlanError, match="budget_bytes of 0 in 'devices' is negative"):
        Plan.from_json(json.dumps(fields))
