"""Checkpoints that lie elsewhere: on the hub, on web servers, in object stores. Read by ranges; nothing is downloaded first."""

from __future__ import annotations

from .headers import read_header
from .hub import explained, repository_parts
from .source import Source, source_of
from .stand_in import header_file
from .url import beside, url_parts

__all__ = ["Source", "beside", "explained", "header_file", "read_header", "repository_parts", "source_of", "url_parts"]
