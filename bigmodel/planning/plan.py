"""A plan: where every weight shall live, and why. `planner.plan` makes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..devices import DeviceKey, computing_key
from ..errors import PlanError
from ..json_reading import JsonError, parse_json
from .advice import Advice
from .cost import Prediction
from .html import html
from .kinds import Kind
from .plot import plot
from .strict_json import StrictJsonError, decode
from .table import render

__all__ = ["DeviceUse", "Plan"]

JSON_VERSION: Final = 1
"""Of the text that `to_json` writes: changes with the fields."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device holds under a plan. All figures are bytes."""

    device: DeviceKey
    budget_bytes: int | None
    """What the device offers; None: none was given, which is no limit for "disk", and nothing for "cpu" (it may have to compute)."""
    resident_bytes: int = 0
    """Weights and buffers that live here and compute here."""
    offloaded_bytes: int = 0
    """Weights and buffers that rest here and compute on the main device."""
    staying_bytes: int = 0
    """Buffers of offloaded modules that do not travel: they stay on the main device."""
    reserve_bytes: int = 0
    """Kept free for offloaded groups that pass through."""
    state_bytes: int = 0
    """Kept free for the run, as long as it lasts: KV cache, logits."""
    workspace_bytes: int = 0
    """Kept free for activations and temporary memory."""
    buffer_bytes: int = 0
    """Of `resident_bytes`, what is buffers."""
    contents: tuple[str, ...] = ()
    """The entries of the device map that lead here."""

    @property
    def used_bytes(self) -> int:
        """Everything that the plan puts on the device, and all that it keeps free there."""
        kept_bytes = self.resident_bytes + self.offloaded_bytes + self.staying_bytes
        return kept_bytes + self.reserve_bytes + self.state_bytes + self.workspace_bytes

    @property
    def bytes_by_kind(self) -> dict[Kind, int]:
        """`used_bytes` by what they are for, in the order of `kinds.COLOURS`."""
        return {
            "weights": self.resident_bytes - self.buffer_bytes,
            "buffers": self.buffer_bytes + self.staying_bytes,
            "offloaded": self.offloaded_bytes,
            "KV cache and logits": self.state_bytes,
            "activations": self.workspace_bytes,
            "reserve": self.reserve_bytes,
        }

    @property
    def left_bytes(self) -> int | None:
        """What is left of the budget; None without a limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A device map with its reasons. `print(plan)` shows it as a table."""

    model: str
    """Class name of the model, or the name of the checkpoint where only its headers were known."""
    device_map: dict[str, DeviceKey]
    main_device: DeviceKey
    """Where offloaded modules run."""
    devices: tuple[DeviceUse, ...]
    total_bytes: int
    """The model, every tensor once, in the planned dtypes."""
    moved_bytes: int
    """Bytes that travel to the main device in every step (one forward of the model)."""
    ring_slots: int
    """Groups that the reserve has room for: 2 (the next one travels while one computes), 1 (they wait for each other), 0 (none travels)."""
    binding: str
    """The limit that keeps weights from staying on the compute devices; empty if everything stays."""
    short_bytes: int
    """Bytes more on the main device, and everything would stay."""
    offload_buffers: bool
    """Whether the buffers of offloaded modules travel with them; to be passed on to the dispatch."""
    blocks: tuple[str, ...]
    """Modules that were not to be split."""
    is_optimal: bool
    """Whether it is proven that no map within these budgets, and with this reserve, moves fewer bytes."""
    weight_format: str = ""
    """Packed format of the weights; empty: none."""
    batch: int = 1
    """Sequences that the plan has room for."""
    context: int | None = None
    """Tokens per sequence that the plan has room for; None: nothing is kept for the run."""
    prediction: Prediction | None = None
    """Seconds that loading and running are expected to take, where the rates of the machine are known."""
    advice: tuple[Advice, ...] = ()
    """What would help, where something travels."""
    notes: tuple[str, ...] = ()
    """What else the reader should know."""

    @property
    def reserve_bytes(self) -> int:
        """Room kept free on the main device for offloaded groups to pass through: what the dispatch may use there."""
        return sum(use.reserve_bytes for use in self.devices)

    @property
    def bytes_on_disk(self) -> int:
        """Weights that rest on disk."""
        return sum(use.offloaded_bytes for use in self.devices if use.device == "disk")

    @property
    def short_bytes_by_device(self) -> dict[DeviceKey, int]:
        """Bytes more that keep weights from travelling (on the main device), or from travelling from disk (on "cpu"); only those short."""
        short = {self.main_device: self.short_bytes}
        if self.main_device != "cpu":
            short["cpu"] = self.bytes_on_disk
        return {device: nbytes for device, nbytes in short.items() if nbytes}

    def to_json(self) -> str:
        """The plan as JSON text, for `from_json`."""
        return json.dumps({"bigmodel_plan": JSON_VERSION} | asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises `PlanError` for text that is no plan, is one of another version, or contradicts itself.
        """
        try:
            return _checked(decode(cls, _fields(parse_json(text))))
        except JsonError as error:
            raise PlanError(f"This text is not a plan that this version of bigmodel wrote with Plan.to_json: {error}.") from error

    def plot(self, ax: Any = None) -> Any:
        """Draws a stacked bar for each device, by kind, in percent of its budget, which is a line at 100. Returns the matplotlib axes.

        `ax` are the axes to draw on; new ones without it. Raises `MissingPackageError` where matplotlib is not installed.
        """
        return plot(self, ax)

    def _repr_html_(self) -> str:
        return html(self)

    def __str__(self) -> str:
        return render(self)


def _fields(found: Any) -> dict[str, Any]:
    """The fields of a plan, its version checked and taken off."""
    if not isinstance(found, dict) or "bigmodel_plan" not in found:
        raise StrictJsonError("it is JSON of something else, or of a version before plans said theirs ('bigmodel_plan' is missing)")
    version = found.pop("bigmodel_plan")
    if version != JSON_VERSION:
        raise StrictJsonError(f"its version is {str(version)[:20]}, this bigmodel reads and writes {JSON_VERSION}; make the plan anew")
    return found


def _checked(plan: Plan) -> Plan:
    """The plan, if its figures can be and its parts speak of the same devices."""
    figures = [(f"{each.device!r} in 'devices'", asdict(each)) for each in plan.devices] + [("the plan", asdict(plan))]
    for where, fields in figures:
        for name, figure in fields.items():
            if isinstance(figure, int) and not isinstance(figure, bool) and figure < 0:
                raise StrictJsonError(f"{name} of {where} is negative")
    devices = [use.device for use in plan.devices]
    if len(set(devices)) < len(devices):
        raise StrictJsonError("a device comes twice in 'devices'")
    for device in (plan.main_device, *plan.device_map.values()):
        if computing_key(device) not in devices:
            raise StrictJsonError(f"device {device!r} is not among 'devices'")
    return plan
