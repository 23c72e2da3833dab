"""A plan as people see it: the table's columns, the sentences, HTML for notebooks, the picture."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from planning_models import Decoder

from bigmodel.errors import MissingPackageError
from bigmodel.planning import Advice, Plan, Prediction, plan
from bigmodel.text import bytes_text

BLOCK = 8 * 16 * 16  # bytes of a Decoder's block at width 16


def offloading() -> Plan:
    return plan(Decoder(), {0: 8 * BLOCK, "cpu": 5 * BLOCK})


def with_run(made: Plan) -> Plan:
    """The plan as though a run had been asked for."""
    first, *others = made.devices
    changed = replace(first, resident_bytes=first.resident_bytes - 1900, state_bytes=1000, workspace_bytes=800, buffer_bytes=300)
    return replace(
        made,
        devices=(changed, *others),
        batch=2,
        context=4096,
        weight_format="nf4",
        advice=(Advice("4-bit weights (nf4)", 0, 0, 0, fits=True), Advice("64.0 GiB more RAM", 0, made.moved_bytes, 0, False, 0.2)),
        prediction=Prediction(90.0, 2.5, 0.125, "link to device 0", 2, 4096),
    )


def test_kinds_add_up_to_what_is_used() -> None:
    for use in (*offloading().devices, *with_run(offloading()).devices):
        assert sum(use.bytes_by_kind.values()) == use.used_bytes
    first = with_run(offloading()).devices[0]
    assert first.bytes_by_kind == {
        "weights": first.resident_bytes - 300,
        "buffers": 300,
        "offloaded": 0,
        "KV cache and logits": 1000,
        "activations": 800,
        "reserve": first.reserve_bytes,
    }


def test_columns_of_a_run_are_there_when_there_is_one() -> None:
    plain, run = str(offloading()), str(with_run(offloading()))
    assert plain.splitlines()[1].split() == ["device", "offers", "weights", "offloaded", "reserve", "left", "used"]
    assert run.splitlines()[1].split() == [
        *("device", "offers", "weights", "buffers", "offloaded", "cache", "workspace", "reserve", "left", "used")
    ]
    row = next(line for line in run.splitlines() if line.startswith("device 0"))
    assert row.split("  ")[0] == "device 0"
    for figure in ("16.0 KiB", "12.0 KiB", "300 B", "1000 B", "800 B", "1.88 KiB"):
        assert figure in row


def test_what_is_short_is_said_by_device_and_kind() -> None:
    made = with_run(offloading())
    text = " ".join(str(made).split())
    assert made.short_bytes_by_device == {0: made.short_bytes, "cpu": made.bytes_on_disk}
    assert "What binds: the memory of device 0 (16.00 KiB: " in text
    assert "300 B buffers, 1000 B KV cache and logits, 800 B activations, 1.88 KiB reserve). With 12.12 KiB more there" in text
    assert f"{bytes_text(made.bytes_on_disk)} rest on disk: cpu is that much short." in text
    assert plan(Decoder(), {0: 10**6}).short_bytes_by_device == {}
    on_cpu = plan(Decoder(), {"cpu": 8 * BLOCK})
    assert on_cpu.short_bytes_by_device == {"cpu": on_cpu.short_bytes}


def test_prediction_and_advice_are_said() -> None:
    text = str(with_run(offloading()))
    assert "Decoder: 28.12 KiB as nf4, runs on device 0, 2 sequences of 4096 tokens" in text
    flowing = " ".join(text.split())
    assert (
        "Expected (measured rates): 125 ms per step (16 tokens per second), 2.5 s for a prompt of 4096 tokens, 1.5 min to load" in flowing
    )
    assert "decoding waits for the link to device 0" in flowing
    after = [line.split() for line in text.split("What would help:\n")[1].splitlines()]
    assert after[0] == ["-", "4-bit", "weights", "(nf4)", "nothing", "has", "to", "move"]
    assert after[1] == ["-", "64.0", "GiB", "more", "RAM", "nothing", "on", "disk;", "200", "ms", "per", "token"]
    assert "What would help" not in str(offloading().__class__.__str__(replace(offloading(), advice=())))


def test_printing_in_a_notebook_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(with_run(offloading()))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(with_run(offloading())) == expected


@pytest.mark.parametrize("devices", [1, 4, 16])
def test_no_line_is_longer_than_100_columns(devices: int) -> None:
    budgets = {**{index: 10**12 + index for index in range(devices)}, "cpu": 5 * 10**12, "disk": 10**13}
    for made in (plan(Decoder(), budgets), with_run(plan(Decoder(), {**dict.fromkeys(range(devices), 5 * BLOCK), "cpu": 10**12}))):
        assert max(map(len, str(made).splitlines())) <= 100
        assert "…" not in str(made)


class Checked(HTMLParser):
    """Collects tags and text, and sees that every tag is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def test_html_says_what_the_table_says_and_is_self_contained() -> None:
    made = with_run(offloading())
    source = made._repr_html_()
    seen = Checked(source)
    assert seen.open == []
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert "http" not in source
    assert seen.tags.count("tr") == 1 + len(made.devices)
    for said in (
        "Decoder: 28.12 KiB as nf4",
        "workspace",
        "device 0",
        "What binds",
        "4-bit weights (nf4): nothing has to move",
        "Expected",
    ):
        assert said in seen.text
    widths = [int(width) for width in re.findall(r'<span title="[^"]+" style="[^"]*width:(\d+)px', source)]
    assert sum(widths[:5]) <= 240


def test_html_escapes_every_text() -> None:
    made = replace(offloading(), model="<script>alert('x')</script>", notes=("a < b & c",), advice=(Advice("<b>", 0, 0, 0, fits=True),))
    named = replace(made.devices[0], contents=('layers."<i>"',))
    source = replace(made, devices=(named, *made.devices[1:]))._repr_html_()
    assert "<script>" not in source
    assert "&lt;script&gt;" in source
    assert "a &lt; b &amp; c" in source
    assert "<i>" not in source
    assert "<li>&lt;b&gt;" in source


@pytest.fixture
def axes():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot.subplots()[1]
    pyplot.close("all")


def test_the_picture_stacks_kinds_and_draws_budgets(axes) -> None:
    made = with_run(offloading())
    drawn = made.plot(ax=axes)
    assert drawn is axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["device 0\n16.0 KiB", "cpu\n10.0 KiB", f"disk\n{made.bytes_on_disk / 1024:.2f} KiB used"]
    heights = [0.0] * 3
    for container in axes.containers:
        for position, bar in enumerate(container):
            heights[position] += bar.get_height()
    first = made.devices[0]
    assert heights == pytest.approx([100 * first.used_bytes / first.budget_bytes, 100, 100])
    weights = next(container for container in axes.containers if container.get_label() == "weights")
    assert weights[0].get_height() == pytest.approx(100 * first.bytes_by_kind["weights"] / first.budget_bytes)
    budgets = [segment[0][1] for line in axes.collections for segment in line.get_segments()]
    assert budgets == [100, 100]  # the disk has none
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(labels) == sorted(["weights", "buffers", "offloaded", "KV cache and logits", "activations", "reserve", "budget"])


def test_what_cannot_be_seen_is_left_out_of_the_picture(axes) -> None:
    made = offloading()
    first = replace(made.devices[0], budget_bytes=10**12, buffer_bytes=8)
    replace(made, devices=(first,)).plot(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["budget"]


def test_the_picture_makes_its_own_axes(axes) -> None:
    drawn = offloading().plot()
    assert drawn is not axes
    assert "Decoder" in drawn.get_title(loc="left")


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r'pip install "bigmodel\[plot\]"'):
        offloading().plot()


def test_all_accelerators_bind_together() -> None:
    made = plan(Decoder(20), {0: 5 * BLOCK, 1: 5 * BLOCK, 2: 0, 3: 5 * BLOCK, "cpu": 40 * BLOCK})
    assert made.binding == "memory of devices 0–1, 3"
    uses = [use for use in made.devices if use.device in (0, 1, 3)]
    weights = sum(use.resident_bytes for use in uses) / 1024
    assert f"What binds: the memory of devices 0–1, 3 (30.00 KiB: {weights:.2f} KiB weights, " in " ".join(str(made).split())
    assert f"more on device {made.main_device}, everything would stay." in " ".join(str(made).split())
    assert "Everything stays on devices 0–1: nothing" in str(plan(Decoder(), {0: 6 * BLOCK, 1: 10 * BLOCK}))
