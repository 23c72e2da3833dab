"""Which processes see the same samples, by a device mesh."""

from __future__ import annotations

from typing import Any

__all__ = ["data_shares"]

SHARED_DIMENSIONS = ("tp", "cp", "sp")
"""Dimensions of a mesh along which processes work on the same samples: tensor, context and sequence parallelism."""


def data_shares(mesh: Any) -> list[int]:
    """Of every process, by rank, the number of its share of the samples, from 0; along tensor- and context-parallel dimensions shares are
    one.

    Args:
        mesh: a `torch.distributed.DeviceMesh` over all processes, with names of dimensions.
    """
    shares = [0] * mesh.mesh.numel()
    for place, rank in enumerate(mesh.mesh.flatten().tolist()):
        share, left = 0, place
        sizes = list(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        coordinates = []
        for _, size in reversed(sizes):
            left, coordinate = divmod(left, size)
            coordinates.append(coordinate)
        for (name, size), coordinate in zip(sizes, reversed(coordinates), strict=True):
            if name not in SHARED_DIMENSIONS:
                share = share * size + coordinate
        shares[rank] = share
    return shares
