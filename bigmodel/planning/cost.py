"""The cost model: seconds per token and per load, from the rates of devices and links."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prediction"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to take, in seconds."""

    load_seconds: float
    """From opening the checkpoint until every weight is at its place."""
    prefill_seconds: float
    """One forward of the whole context of all sequences of the batch."""
    decode_seconds: float
    """One step: one more token for each sequence of the batch."""
    binds: str
    """The link or device that the decoding waits for."""
    batch: int = 1
    """Sequences per step."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded per second, over the batch."""
        return self.batch / self.decode_seconds if self.decode_seconds else float("inf")
