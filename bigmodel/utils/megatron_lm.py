"""Training with Megatron-LM: a stand-in for what it makes."""

from __future__ import annotations

from ..training.plugins.megatron_scheduler import MegatronLMDummyScheduler

__all__ = ["MegatronLMDummyScheduler"]
