"""Numbers as the ecosystem's scripts print them."""

from __future__ import annotations

import pytest

from bigmodel.text import convert_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1500, "1.46 KB"),
        (25 * 1024**2, "25.0 MB"),
        (-(3 * 1024**3), "-3.0 GB"),
        (1024**4, "1.0 TB"),
        (5000 * 1024**5, "5000.0 PB"),
    ],
)
def test_sizes_in_their_largest_unit(size: int, text: str) -> None:
    assert convert_bytes(size) == text
