"""From files to tensors: checkpoints as tables of entries, key rules, one streaming reader, the disk tier, saving."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .dtypes import as_dtype, dtype_rule
from .entry import Entry, FileIdentity
from .keys import Computed, Concatenate, KeyRules, Renamed, SameNames, Slice, Source, Stack, Transpose, Whole
from .match import DtypeOf, Match, match
from .materialize import check_covering, materialize
from .reader import Reader
from .report import LoadReport
from .store import CheckpointStore
from .transfer import Computation, Piece, Transfer

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Computation",
    "Computed",
    "Concatenate",
    "DtypeOf",
    "Entry",
    "FileIdentity",
    "KeyRules",
    "LoadReport",
    "Match",
    "Piece",
    "Reader",
    "Renamed",
    "SameNames",
    "Slice",
    "Source",
    "Stack",
    "Transfer",
    "Transpose",
    "Whole",
    "as_dtype",
    "check_covering",
    "dtype_rule",
    "match",
    "materialize",
]
