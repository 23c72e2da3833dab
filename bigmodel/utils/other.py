"""The rest: waiting for the other processes, ports, the kernel, bytes for people."""

from __future__ import annotations

from ..training.environment import check_os_kernel, get_free_port, is_port_in_use
from ..training.memory import convert_bytes
from ..training.state import wait_for_everyone

__all__ = ["check_os_kernel", "convert_bytes", "get_free_port", "is_port_in_use", "wait_for_everyone"]
