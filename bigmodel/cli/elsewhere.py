"""Commands that ecosystem scripts call and bigmodel has nothing for: each says what to use."""

from __future__ import annotations

from .output import fail

__all__ = ["to_fsdp2", "tpu_config"]


def tpu_config() -> None:
    """Says that TPU pods are set up elsewhere."""
    fail("bigmodel drives no TPU pods: run commands on one by `gcloud compute tpus tpu-vm ssh NAME --worker=all --command=…`.")


def to_fsdp2() -> None:
    """Says that nothing has to be converted."""
    fail("Nothing has to be converted: files in the words of FSDP 1 are read, and bigmodel launch --fsdp_version 2 trains in those of 2.")
