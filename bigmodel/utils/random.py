"""Random number generators: seeded, and made equal on all processes."""

from __future__ import annotations

from ..training.random import restore_rng_states, rng_states, set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["restore_rng_states", "rng_states", "set_seed", "synchronize_rng_state", "synchronize_rng_states"]
