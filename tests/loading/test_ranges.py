"""How much of a file is asked for where a tensor takes some columns of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.loading.entry import Entry
from bigmodel.loading.ranges import plan_reads
from bigmodel.loading.reader import Reader
from bigmodel.loading.transfer import Piece, Transfer

ROWS = 24


def columns(folder: Path, run_bytes: int, parts: int) -> tuple[Transfer, torch.Tensor]:
    """The second of `parts` parts of the columns of a matrix in a file, and its values."""
    width = run_bytes // 2
    whole = torch.randn(ROWS, width * parts).bfloat16()
    file = folder / "matrix.bin"
    file.write_bytes(whole.view(torch.uint8).numpy().tobytes())
    entry = Entry("matrix", file, 0, whole.nbytes, whole.dtype, tuple(whole.shape))
    transfer = Transfer("matrix", entry.shape, entry.dtype, (Piece(entry, (0, 0), entry.shape, 0, entry.element_strides),))
    return transfer.box((0, width), (ROWS, width)), whole[:, width : 2 * width]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    ("run_bytes", "dtype", "past_cache", "is_apart"),
    [
        (32 << 10, torch.bfloat16, False, True),
        (96 << 10, torch.bfloat16, True, True),
        (64 << 10, torch.float32, False, True),
        (4 << 10, torch.bfloat16, False, False),
        (32 << 10, torch.bfloat16, True, False),
        (32 << 10, torch.float32, False, False),
    ],
)
def test_long_runs_are_read_alone_and_short_ones_with_what_is_between(
    run_bytes: int, dtype: torch.dtype, past_cache: bool, is_apart: bool, parts: int, tmp_path: Path
) -> None:
    transfer, expected = columns(tmp_path, run_bytes, parts)
    plan = plan_reads([(transfer, dtype, True)], past_cache=past_cache)
    asked = sum(batch.nbytes for batch in plan.batches)
    assert asked == ROWS * run_bytes if is_apart else asked > 0.8 * ROWS * run_bytes * parts
    assert plan.filled_bytes == ROWS * run_bytes
    found = torch.empty(transfer.shape, dtype=dtype)
    assert Reader(reading="direct" if past_cache else "buffered").read([(transfer, found)]) == ROWS * run_bytes
    assert torch.equal(found, expected.to(dtype))


def test_runs_that_leave_little_out_are_read_in_one_go(tmp_path: Path) -> None:
    transfer, _ = columns(tmp_path, 32 << 10, 2)
    piece = transfer.pieces[0]
    entry = piece.origin
    whole = Transfer("matrix", entry.shape, entry.dtype, (Piece(entry, (0, 0), entry.shape, 0, entry.element_strides),))
    wide = whole.box((0, 0), (ROWS, 24 << 10))
    assert len(plan_reads([(wide, torch.bfloat16, True)]).batches) <= 2
