"""A plan: where every weight shall live, and why. `planner.plan` makes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..devices import DeviceKey
from ..errors import PlanError
from .advice import Advice
from .cost import Prediction
from .table import render

__all__ = ["DeviceUse", "Plan"]


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device holds under a plan. All figures are bytes."""

    device: DeviceKey
    budget_bytes: int | None
    """What the device offers; None: no limit."""
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
    contents: tuple[str, ...] = ()
    """The entries of the device map that lead here."""

    @property
    def used_bytes(self) -> int:
        """Everything that the plan puts on the device, and all that it keeps free there."""
        kept_bytes = self.resident_bytes + self.offloaded_bytes + self.staying_bytes
        return kept_bytes + self.reserve_bytes + self.state_bytes + self.workspace_bytes

    @property
    def left_bytes(self) -> int | None:
        """What is left of the budget; None without a limit."""
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A device map with its reasons. `print(plan)` shows it as a table."""

    model: str
    """Class name of the model."""
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

    def to_json(self) -> str:
        """The plan as JSON text, for `from_json`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `PlanError` for text that is no plan."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["device_map"] = dict(fields["device_map"])
            fields["devices"] = tuple(DeviceUse(**{**use, "contents": tuple(use["contents"])}) for use in fields["devices"])
            fields["blocks"], fields["notes"] = tuple(fields["blocks"]), tuple(fields["notes"])
            fields["advice"] = tuple(Advice(**each) for each in fields["advice"])
            fields["prediction"] = fields["prediction"] and Prediction(**fields["prediction"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"This JSON is not a plan written by Plan.to_json ({type(error).__name__}: {error}).") from error

    def __str__(self) -> str:
        return render(self)
