"""`plan`: the map, its figures, its reasons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_for_test import ModelForTest
from planning_models import Block, Decoder, bytes_on
from torch import nn

from bigmodel.device_map import device_for
from bigmodel.errors import PlanError
from bigmodel.planning import Plan, compute_module_sizes, plan
from bigmodel.text import bytes_text, names_text, printable

BLOCK = 8 * 16 * 16  # bytes of a Decoder's block at width 16
EMBEDDING = 64 * 16 * 4
NORM = 2 * 16 * 4
TOTAL = 10 * BLOCK + 2 * EMBEDDING + NORM


def use(made: Plan, device: int | str):
    return next(each for each in made.devices if each.device == device)


def flowing(made: Plan) -> str:
    """The table's text without line breaks."""
    return " ".join(str(made).split())


def test_a_model_that_fits_stays_and_keeps_no_reserve():
    made = plan(Decoder(), {0: TOTAL, "cpu": TOTAL})
    assert made.device_map == {"": 0}
    assert (made.moved_bytes, made.ring_slots, made.binding, made.short_bytes) == (0, 0, "", 0)
    assert use(made, 0).resident_bytes == TOTAL == made.total_bytes
    assert use(made, 0).left_bytes == 0
    assert made.main_device == 0
    assert made.is_optimal


def test_figures_of_a_model_that_does_not_fit():
    made = plan(Decoder(), {0: 8 * BLOCK, "cpu": 5 * BLOCK, "disk": TOTAL})
    assert made.main_device == 0
    assert made.device_map["embed"] in ("cpu", "disk")  # a step reads rows of it
    # Head, norm and five blocks stay; what is left of the sixth lets a matrix pass through, but not a whole block.
    assert made.ring_slots == 0
    assert use(made, 0).reserve_bytes == made.reserve_bytes == BLOCK - NORM
    assert use(made, 0).resident_bytes == bytes_on(Decoder(), made.device_map, 0)
    assert made.moved_bytes == TOTAL - use(made, 0).resident_bytes - EMBEDDING
    for device in ("cpu", "disk"):
        assert use(made, device).offloaded_bytes == bytes_on(Decoder(), made.device_map, device)
    assert made.binding == "memory of device 0"
    assert plan(Decoder(), {0: 8 * BLOCK + made.short_bytes}).moved_bytes == 0
    assert made.blocks == tuple(f"layers.{index}" for index in range(10))


def test_one_slot_is_said():
    made = plan(Decoder(blocks=30, vocabulary=1), {0: int(1.25 * BLOCK), "cpu": 100 * BLOCK})
    assert (made.ring_slots, made.moved_bytes) == (1, 30 * BLOCK)
    assert BLOCK <= use(made, 0).reserve_bytes < 1.25 * BLOCK
    assert "one group at a time" in str(made)
    assert "take turns" in str(made)


def test_blocks_in_parts_are_said():
    made = plan(Decoder(blocks=30, vocabulary=1), {0: int(1.75 * BLOCK), "cpu": 100 * BLOCK})
    assert (made.ring_slots, made.moved_bytes) == (0, 29 * BLOCK)
    assert BLOCK / 2 <= use(made, 0).reserve_bytes < BLOCK
    assert "Blocks travel in parts" in str(made)


def test_the_reserve_counts_the_padding_of_each_tensor():
    made = plan(nn.Sequential(ModelForTest(), ModelForTest()), {0: 400, "cpu": 1000}, no_split_module_classes="ModelForTest")
    # Tensors of at most 80 bytes: each starts at a multiple of 64, so that the largest layer takes 128 + 64. 40 bytes of buffers stay each.
    assert use(made, 0).reserve_bytes == 400 - 2 * 40
    assert use(made, 0).used_bytes <= 400
    for budget, main in ((271, "cpu"), (272, 0)):
        made = plan(nn.Sequential(ModelForTest(), ModelForTest()), {0: budget, "cpu": 1000}, no_split_module_classes="ModelForTest")
        assert made.main_device == main


def test_tied_embeddings_travel_whole_and_together():
    made = plan(Decoder(tied=True, vocabulary=256), {0: 12 * BLOCK, "cpu": 10**6})
    assert made.device_map["embed"] == made.device_map["head"]
    assert made.total_bytes == 10 * BLOCK + 4 * EMBEDDING + NORM
    squeezed = plan(Decoder(tied=True, vocabulary=256), {0: 17 * BLOCK, "cpu": 10**6})
    assert squeezed.device_map["embed"] == squeezed.device_map["head"] == 0


def test_an_embedding_with_a_norm_limit_travels_whole():
    model = Decoder()
    with torch.device("meta"):
        model.embed = nn.Embedding(64, 16, max_norm=1.0)
    made = plan(model, {0: 8 * BLOCK, "cpu": 10**6})
    stays = use(made, 0).resident_bytes
    assert made.moved_bytes == TOTAL - stays


@pytest.mark.parametrize("spelling", ["0", 0])
def test_devices_that_are_not_here_can_be_planned_for(spelling):
    made = plan(Decoder(), {spelling: "8KiB", 5: "100KiB", "cpu": "1GB"})
    assert 5 in made.device_map.values() or made.device_map == {"": 5}


def test_accelerators_by_name(accelerators):
    first, second = accelerators(2)
    made = plan(Decoder(), {str(first): TOTAL // 2 + BLOCK, second: TOTAL, "cpu": 0}, mode="sequential")
    assert set(made.device_map.values()) == {0, 1}


def test_the_machine_is_measured(accelerators):
    accelerators(1, memory="1MiB")
    made = plan(Decoder())
    assert made.device_map == {"": 0}
    assert {each.device for each in made.devices} == {0, "cpu"}
    assert plan(Decoder()) == made


def test_without_accelerators_the_cpu_computes():
    made = plan(Decoder(), {"cpu": 8 * BLOCK})
    assert made.main_device == "cpu"
    assert BLOCK / 2 <= use(made, "cpu").reserve_bytes < BLOCK
    assert set(made.device_map.values()) == {"cpu", "disk"}
    assert made.binding == "memory of cpu"
    assert use(made, "disk").budget_bytes is None


def test_modes_spread_what_fits():
    budgets = {0: TOTAL, 1: TOTAL, "cpu": TOTAL}
    assert plan(Decoder(), budgets, mode="sequential").device_map == {"": 0}
    even = plan(Decoder(), budgets)
    assert plan(Decoder(), budgets, mode="balanced") == even
    assert abs(use(even, 0).resident_bytes - use(even, 1).resident_bytes) <= BLOCK
    low = plan(Decoder(), budgets, mode="balanced_low_0")
    assert use(low, 0).resident_bytes == 0
    tight = plan(Decoder(), {0: TOTAL, 1: 4 * BLOCK, 2: 4 * BLOCK}, mode="balanced_low_0")
    assert use(tight, 1).resident_bytes > 3 * BLOCK
    assert use(tight, 2).resident_bytes > 3 * BLOCK
    with pytest.raises(PlanError, match="'fair'"):
        plan(Decoder(), budgets, mode="fair")


def test_planned_dtypes_are_counted():
    assert plan(Decoder(), {0: TOTAL}, dtype="bfloat16").total_bytes == TOTAL // 2
    assert plan(Decoder(), {0: 4 * TOTAL}, dtype=torch.float64).total_bytes == 2 * TOTAL
    special = {"head.weight": torch.float32}
    assert plan(Decoder(), {0: TOTAL}, dtype=torch.float16, special_dtypes=special).total_bytes == TOTAL // 2 + EMBEDDING // 2


class Buffered(nn.Module):
    """Blocks that are nearly all buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList([Block(4) for _ in range(10)])
            for layer in self.layers:
                layer.register_buffer("table", torch.zeros(1000))


def test_buffers_that_stay_are_counted():
    made = plan(Buffered(), {0: 41_000, "cpu": 10**6})
    assert not made.offload_buffers
    staying = sum(4000 for index in range(10) if device_for(f"layers.{index}", made.device_map) == "cpu")
    assert use(made, 0).staying_bytes == staying
    assert use(made, 0).used_bytes <= 41_000


def test_buffers_that_dominate_travel_and_the_plan_says_so():
    made = plan(Buffered(), {0: 20_000, "cpu": 10**6})
    assert made.offload_buffers
    assert made.main_device == 0
    assert "Buffers of offloaded modules travel" in flowing(made)
    assert use(made, 0).used_bytes <= 20_000


def test_errors_name_what_is_wrong():
    with pytest.raises(PlanError, match="Sequential has no parameters"):
        plan(nn.Sequential(), {0: 5})
    with pytest.raises(PlanError, match="'gpu'"):
        plan(Decoder(), {"gpu": 5})
    with pytest.raises(PlanError, match=r"-5"):
        plan(Decoder(), {0: -5})
    with pytest.raises(PlanError, match=r"Budget of device 0: .*'lots'"):
        plan(Decoder(), {0: "lots"})
    with pytest.raises(PlanError, match=r"no room for \d+ of 13 parts .* the largest 'embed'"):
        plan(Decoder(vocabulary=1000), {0: BLOCK, "cpu": BLOCK, "disk": 3 * BLOCK})
    with pytest.raises(PlanError, match=rf"No device can run this model: head needs {64 * 16 * 4:,} bytes"):
        plan(Decoder(), {0: 100, "cpu": 200})


def test_an_accelerator_that_is_too_small_is_explained():
    made = plan(Decoder(), {0: 1000, "cpu": 10**6})
    assert made.main_device == "cpu"
    assert made.device_map == {"": "cpu"}
    assert "no accelerator has room for the largest part to pass through (head, 4.00 KiB; device 0 offers 1000 B)" in flowing(made)


def test_cpu_without_a_budget_is_mentioned():
    made = plan(Decoder(), {"disk": TOTAL})
    assert made.device_map == {"": "disk"}
    assert "max_memory gives nothing for 'cpu'" in flowing(made)
    rows = {line.split()[0]: line for line in str(made).splitlines() if line}
    assert "not given" in rows["cpu"]
    assert "no limit" not in str(made)


def test_embeddings_that_are_read_by_rows_move_nothing():
    made = plan(Decoder(), {0: TOTAL - EMBEDDING, "cpu": TOTAL})
    assert made.moved_bytes == 0
    assert use(made, "cpu").offloaded_bytes == EMBEDDING
    assert "Nothing has to move in a step: of the embeddings" in flowing(made)
    assert "0 B move" not in flowing(made)


def test_names_and_bytes_for_people():
    assert names_text(["embed", "layers.0", "layers.1", "layers.2", "layers.4", "norm"]) == "embed, layers.0–2, layers.4, norm"
    assert printable("a\x1b[31m\nb\r – █") == "a\ufffd[31m\nb\ufffd – █"
    assert bytes_text((1 << 30) - 1) == "1.00 GiB"
    assert names_text(["h.1.b", "h.2.b", ""]) == "h.1.b, h.2.b, everything"
    assert [bytes_text(size) for size in (0, 236, 1536, 3 << 30, 200 << 30, None)] == [
        "0 B",
        "236 B",
        "1.50 KiB",
        "3.00 GiB",
        "200.0 GiB",
        "no limit",
    ]
    assert [bytes_text(size, short=True) for size in (0, 999, 1536, 15 << 29, 80 << 30, 200 << 30, 1900 << 30, None)] == [
        "0 B",
        "999 B",
        "1.50 KiB",
        "7.50 GiB",
        "80.0 GiB",
        "200 GiB",
        "1900 GiB",
        "no limit",
    ]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    blocks=st.integers(1, 24),
    vocabulary=st.integers(1, 300),
    tied=st.booleans(),
    accelerators=st.lists(st.integers(0, 30 * BLOCK), max_size=3),
    host=st.integers(10 * BLOCK, 40 * BLOCK),
    mode=st.sampled_from(["auto", "sequential", "balanced_low_0"]),
)
def test_plans_cover_everything_and_keep_within_budgets(blocks, vocabulary, tied, accelerators, host, mode):
    model = Decoder(blocks, vocabulary=vocabulary, tied=tied)
    budgets = {**dict(enumerate(accelerators)), "cpu": host}
    if max(accelerators, default=0) < 4 * BLOCK + 64 * vocabulary:
        budgets["cpu"] += 64 * vocabulary  # room for the head to pass through, so that something can run the model
    made = plan(model, budgets, mode=mode)
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert device_for(name, made.device_map) is not None
    for index in range(blocks):
        assert not any(key.startswith(f"layers.{index}.") for key in made.device_map)
    if tied:
        assert device_for("embed", made.device_map) == device_for("head", made.device_map)
    for each in made.devices:
        assert each.budget_bytes is None or each.used_bytes <= each.budget_bytes
        assert each.resident_bytes + each.offloaded_bytes == bytes_on(model, made.device_map, each.device)
    assert sum(each.resident_bytes + each.offloaded_bytes for each in made.devices) == made.total_bytes
    assert (use(made, made.main_device).reserve_bytes > 0) == (made.moved_bytes > 0)
    assert plan(model, dict(reversed(budgets.items())), mode=mode) == made


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    blocks=st.integers(4, 30),
    vocabulary=st.integers(1, 300),
    tied=st.booleans(),
    accelerators=st.lists(st.integers(4 * BLOCK, 20 * BLOCK), min_size=1, max_size=3),
    more=st.integers(1, 3 * BLOCK),
    which=st.integers(0, 2),
)
def test_more_budget_never_offloads_more(blocks, vocabulary, tied, accelerators, more, which):
    model = Decoder(blocks, vocabulary=vocabulary, tied=tied)
    before = plan(model, {**dict(enumerate(accelerators)), "cpu": 10**7})
    accelerators[which % len(accelerators)] += more
    after = plan(model, {**dict(enumerate(accelerators)), "cpu": 10**7})
    assert before.main_device == "cpu" or after.moved_bytes <= before.moved_bytes


def test_sizes_of_a_plan_are_those_of_the_model():
    assert plan(Decoder(), {0: 1 << 30}).total_bytes == compute_module_sizes(Decoder())[""]


def test_the_module_that_is_too_large_for_every_device_is_named():
    model = Decoder(vocabulary=1)
    with torch.device("meta"):
        model.layers[3].up = nn.Linear(16, 100, bias=False)
    with pytest.raises(PlanError, match=r"No device can run this model: layers\.3\.up needs 6,400 bytes to pass through.* is 5,000"):
        plan(model, {0: 5000, 1: 4000, "cpu": 5000})
    assert plan(model, {0: 6400, "cpu": 5000}).main_device == 0
