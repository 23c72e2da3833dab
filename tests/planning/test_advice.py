"""What a plan says would help: single changes with their effects, checked by planning anew with each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from planning_models import Decoder
from torch import nn

from bigmodel.planning import Plan, Prediction, plan
from bigmodel.planning import advice as advice_module
from bigmodel.planning import needs as needs_module
from bigmodel.planning.memory import parse_budgets
from bigmodel.planning.request import Request
from bigmodel.protocols import TensorSpec

BLOCK = 8 * 16 * 16  # bytes of a Decoder's block at width 16
EMBEDDING = 64 * 16 * 4
NORM = 2 * 16 * 4
TOTAL = 10 * BLOCK + 2 * EMBEDDING + NORM


@dataclass(frozen=True)
class Packed:
    """A packed format of the blocks' weights without companions."""

    name: str
    bits: int

    def packed_bytes(self, spec: TensorSpec) -> int:
        return math.prod(spec.shape) * self.bits // 8

    def packed_sizes(self, model: nn.Module) -> Mapping[str, int]:
        specs = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters() if name.startswith("layers")}
        return {name: self.packed_bytes(spec) for name, spec in specs.items()}


INT8, NF4 = Packed("int8", 8), Packed("nf4", 4)


def changes(made: Plan) -> dict[str, tuple[int, int, bool]]:
    return {each.change: (each.moved_bytes, each.disk_bytes, each.fits) for each in made.advice}


def effect(made: Plan) -> tuple[int, int, bool]:
    return made.moved_bytes, made.bytes_on_disk, made.moved_bytes == 0


def test_nothing_is_said_where_nothing_travels() -> None:
    assert plan(Decoder(), {0: TOTAL}, formats=[NF4]).advice == ()
    rows_only = plan(Decoder(), {0: TOTAL - EMBEDDING, "cpu": TOTAL}, formats=[NF4])  # the embedding is read by rows
    assert rows_only.moved_bytes == 0
    assert rows_only.advice == ()
    assert plan(Decoder(), {0: 8 * BLOCK, "cpu": TOTAL}, formats=[NF4], advice=False).advice == ()


def test_every_effect_is_that_of_the_plan_with_the_change() -> None:
    budgets = {0: 6 * BLOCK, "cpu": 2 * BLOCK}
    made = plan(Decoder(), budgets, formats=[NF4, INT8])
    said = changes(made)
    short = made.short_bytes
    assert said == {
        "half precision (bfloat16)": effect(plan(Decoder(), budgets, dtype=torch.bfloat16)),
        "8-bit weights (int8)": effect(plan(Decoder(), budgets, weight_format=INT8)),
        "4-bit weights (nf4)": effect(plan(Decoder(), budgets, weight_format=NF4)),
        "one more card of 12.00 KiB": effect(plan(Decoder(), {0: 6 * BLOCK, 1: 6 * BLOCK, "cpu": 2 * BLOCK})),
        f"{short / 1024:.2f} KiB more on device 0": effect(plan(Decoder(), {**budgets, 0: 6 * BLOCK + short})),
        f"{made.bytes_on_disk / 1024:.2f} KiB more RAM": effect(plan(Decoder(), {**budgets, "cpu": 2 * BLOCK + made.bytes_on_disk})),
    }
    assert said["4-bit weights (nf4)"] == (0, 0, True)
    assert said[f"{made.bytes_on_disk / 1024:.2f} KiB more RAM"][:2] == (made.moved_bytes, 0)


def test_the_best_come_first_and_there_are_few() -> None:
    made = plan(Decoder(30), {0: 6 * BLOCK, 1: 6 * BLOCK, "cpu": 2 * BLOCK}, formats=[NF4, INT8])
    assert len(made.advice) <= 6
    ranks = [(not each.fits, each.moved_bytes, each.disk_bytes) for each in made.advice]
    assert ranks == sorted(ranks)
    for each in made.advice:
        assert each.moved_bytes < made.moved_bytes or each.disk_bytes < made.bytes_on_disk


def test_of_those_that_let_everything_stay_the_mildest_comes_first() -> None:
    made = plan(Decoder(), {0: 12 * BLOCK, "cpu": TOTAL}, formats=[NF4, INT8])
    assert [each.change for each in made.advice[:3]] == ["half precision (bfloat16)", "8-bit weights (int8)", "4-bit weights (nf4)"]
    assert all(each.fits for each in made.advice)


def test_changes_are_joined_only_where_no_single_one_does() -> None:
    made = plan(Decoder(150), {0: 12 * BLOCK, "cpu": 200 * BLOCK}, formats=[NF4])
    both = [each for each in made.advice if " and " in each.change]
    assert both
    assert all(each.change.startswith("4-bit weights (nf4) and ") and each.fits for each in both)
    one = plan(Decoder(150), {0: 12 * BLOCK, 1: 12 * BLOCK, "cpu": 200 * BLOCK}, weight_format=NF4)
    assert next(each for each in both if "one more card" in each.change).moved_bytes == one.moved_bytes == 0
    assert not any(" and " in change for change in changes(plan(Decoder(), {0: 12 * BLOCK, "cpu": TOTAL}, formats=[NF4])))


def test_as_many_cards_as_it_takes_are_counted() -> None:
    made = plan(Decoder(150), {0: 12 * BLOCK, "cpu": 200 * BLOCK}, formats=[NF4])
    cards = next(each.change for each in made.advice if "more cards" in each.change)
    number = int(cards.split()[0])
    assert plan(Decoder(150), {**dict.fromkeys(range(1 + number), 12 * BLOCK), "cpu": 200 * BLOCK}).moved_bytes == 0
    assert plan(Decoder(150), {**dict.fromkeys(range(number), 12 * BLOCK), "cpu": 200 * BLOCK}).moved_bytes > 0


def test_a_packed_model_is_offered_only_smaller_formats() -> None:
    made = plan(Decoder(150), {0: 12 * BLOCK, "cpu": 200 * BLOCK}, formats=[INT8, NF4], weight_format=INT8)
    assert any(change.startswith("4-bit") for change in changes(made))
    assert not any(change.startswith(("8-bit", "half")) for change in changes(made))
    smallest = plan(Decoder(200), {0: 12 * BLOCK, "cpu": 200 * BLOCK}, formats=[INT8, NF4], weight_format=NF4)
    assert not any("bit weights" in change for change in changes(smallest))


def test_half_precision_is_for_wide_weights_only() -> None:
    def halves(made: Plan) -> bool:
        return any(change.startswith("half precision") for change in changes(made))

    assert halves(plan(Decoder(), {0: 8 * BLOCK, "cpu": TOTAL}))
    assert halves(plan(Decoder(), {0: 8 * BLOCK, "cpu": TOTAL}, dtype="float32"))
    assert not halves(plan(Decoder(), {0: 5 * BLOCK, "cpu": TOTAL}, dtype="float16"))
    assert not halves(plan(Decoder().to(torch.bfloat16), {0: 5 * BLOCK, "cpu": TOTAL}))


def test_without_accelerators_ram_is_what_helps() -> None:
    made = plan(Decoder(), {"cpu": 8 * BLOCK})
    said = changes(made)
    assert not any("card" in change or "device" in change for change in said)
    more = f"{made.short_bytes / 1024:.2f} KiB more RAM"
    assert said[more] == effect(plan(Decoder(), {"cpu": 8 * BLOCK + made.short_bytes})) == (0, 0, True)


def test_a_card_of_many_times_the_size_is_no_answer() -> None:
    made = plan(Decoder(100), {0: 6 * BLOCK, "cpu": 200 * BLOCK})
    assert not any("more on device" in change for change in changes(made))


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch):
    """Makes every token of every sequence take `8` bytes beside each block."""

    def needs_of(model: nn.Module, workload: needs_module.Workload, *rest: object, **named: object) -> needs_module.Needs:
        tokens = 0 if workload.context is None else workload.batch * workload.context
        return needs_module.Needs({f"layers.{index}": 8 * tokens for index in range(10)}) if tokens else needs_module.Needs()

    monkeypatch.setattr("bigmodel.planning.shared_work.needs_of", needs_of)


def test_less_context_and_a_smaller_batch_are_the_largest_that_fit(cached: None) -> None:
    budgets = {0: TOTAL + 8 * 10 * 300, "cpu": TOTAL}  # room for 300 tokens beside all weights
    made = plan(Decoder(), budgets, context=512, batch=1)
    assert made.moved_bytes
    assert changes(made)["a context of 256 tokens"] == (0, 0, True)
    four = plan(Decoder(), {0: TOTAL + 8 * 10 * 1000, "cpu": TOTAL}, context=300, batch=4)
    assert four.moved_bytes
    said = changes(four)
    assert said["a batch of 2"] == (0, 0, True)
    assert not any("context" in change for change in said)


def test_a_run_that_no_card_can_hold_is_explained(cached: None) -> None:
    budgets = {0: TOTAL + 8 * 10 * 2100, "cpu": 100 * TOTAL}  # room for 2,100 tokens beside all weights
    made = plan(Decoder(), budgets, context=2048, batch=4)
    assert (made.main_device, made.moved_bytes) == ("cpu", 0)
    said = {each.change: each for each in made.advice}
    assert said["a context of 512 tokens"].fits
    assert said["a batch of 1"].main_device == 0
    bigger = next(each for each in made.advice if "more on device 0" in each.change)
    assert bigger.fits
    assert f"a batch of 1 {' '} runs on device 0, nothing has to move".split() == [
        word for line in str(made).splitlines() if "a batch of 1 " in line for word in line.split()[1:]
    ]


def test_fewer_logits_are_proposed_where_they_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_of(model: nn.Module, workload: needs_module.Workload, *rest: object, **named: object) -> needs_module.Needs:
        return needs_module.Needs({"head": 4000 if workload.logits == "all" else 100})

    monkeypatch.setattr("bigmodel.planning.shared_work.needs_of", needs_of)
    made = plan(Decoder(), {0: TOTAL - EMBEDDING + 1000, "cpu": TOTAL}, context=64)  # the embedding is read by rows
    assert made.moved_bytes
    assert changes(made)["logits of the last token only (logits='last')"] == (0, 0, True)
    assert not any("logits" in change for change in changes(plan(Decoder(), {0: 8 * BLOCK, "cpu": TOTAL})))


def test_a_format_that_packs_little_says_so() -> None:
    wide = Decoder(2, vocabulary=4000)
    made = plan(wide, {0: 10**6}, weight_format=NF4)
    share = 2 * 2 * 256 / sum(parameter.numel() for parameter in wide.parameters())
    assert made.notes[0].startswith(f"nf4 packs {share:.1%} of the weights")
    assert plan(Decoder(), {0: 10**6}, weight_format=NF4).notes == ()


def test_where_no_context_lets_everything_stay_half_of_it_is_said(cached: None) -> None:
    budgets = {0: TOTAL // 2 + 8 * 10 * 2100, "cpu": TOTAL}
    made = plan(Decoder(), budgets, context=2048)
    said = changes(made)
    assert "a context of 1024 tokens" in said
    assert said["a context of 1024 tokens"] == effect(plan(Decoder(), budgets, context=1024))
    assert not any("batch" in change for change in said)


def test_with_times_the_fastest_comes_first() -> None:
    request = Request(Decoder(), parse_budgets({0: 6 * BLOCK, "cpu": TOTAL}))

    def solve(changed: Request) -> Plan:
        made = plan(changed.model, changed.budgets, dtype=changed.dtype, weight_format=changed.weight_format, advice=False)
        return replace(made, prediction=Prediction(1.0, 1.0, 1.0 + made.moved_bytes + made.total_bytes / 1e6, "device 0", 4))

    said = advice_module.advise(request, solve(request), solve, [NF4, INT8])
    assert said[0].change == "4-bit weights (nf4)"
    assert said[0].token_seconds == pytest.approx((1.0 + plan(Decoder(), {0: 6 * BLOCK}, weight_format=NF4).total_bytes / 1e6) / 4)
    times = [each.token_seconds for each in said if each.fits]
    assert times == sorted(times)


def test_advice_never_asks_for_advice_and_asks_few_plans() -> None:
    asked: list[Request] = []
    request = Request(Decoder(400), parse_budgets({0: 6 * BLOCK, "cpu": 500 * BLOCK}))

    def solve(changed: Request) -> Plan:
        asked.append(changed)
        return plan(changed.model, changed.budgets, dtype=changed.dtype, weight_format=changed.weight_format, advice=False)

    advice_module.advise(request, solve(request), solve, [NF4, INT8])
    assert len(asked) <= 20
