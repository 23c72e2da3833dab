"""What bytes on a device are for: the kinds that a plan tells apart, and what they are called and drawn with."""

from __future__ import annotations

from typing import Final

__all__ = ["COLOURS", "HEADINGS", "Kind"]

Kind = str

COLOURS: Final[dict[Kind, str]] = {
    "weights": "#3b6fb6",
    "buffers": "#7fb2e5",
    "offloaded": "#9a9a9a",
    "KV cache and logits": "#e0912f",
    "activations": "#c8553d",
    "reserve": "#6aa84f",
}
"""Every kind, in the order in which it is shown, and its colour."""

HEADINGS: Final[dict[Kind, str]] = {"KV cache and logits": "cache", "activations": "workspace"}
"""Short names for headings of tables, where they differ."""
