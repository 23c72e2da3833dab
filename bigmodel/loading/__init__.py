"""From files to tensors: checkpoints as tables of entries, key rules, one streaming reader, the disk tier, saving."""

from __future__ import annotations

from .checkpoint import Checkpoint, check_open
from .contradiction import refuse_others_said
from .dtypes import as_dtype, dtype_rule
from .entry import Entry, FileIdentity
from .folder_owner import check_owner, fill_folder, write_owner
from .into_model import load, load_checkpoint_in_model, load_offloaded_weights, load_together
from .keys import Computed, Concatenate, KeepsScales, KeyRules, Renamed, SameNames, Slice, Source, Stack, Transpose, Unmade, Whole
from .match import DtypeOf, Match, match
from .materialize import check_covering, materialize, placements
from .meta import init_empty_weights, init_on_device
from .offload_folder import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from .reader import Reader
from .report import LoadReport
from .save import Fetch, NoValuesError, save_model, without_aliases, write_safetensors
from .set_tensor import set_module_tensor_to_device
from .state_dict import load_state_dict, read_tensors
from .store import CheckpointStore
from .transfer import Computation, Piece, Transfer, lower
from .ways import Reading

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Computation",
    "Computed",
    "Concatenate",
    "DtypeOf",
    "Entry",
    "Fetch",
    "FileIdentity",
    "KeepsScales",
    "KeyRules",
    "LoadReport",
    "Match",
    "NoValuesError",
    "OffloadedWeightsLoader",
    "Piece",
    "PrefixedDataset",
    "Reader",
    "Reading",
    "Renamed",
    "SameNames",
    "Slice",
    "Source",
    "Stack",
    "Transfer",
    "Transpose",
    "Unmade",
    "Whole",
    "as_dtype",
    "check_covering",
    "check_open",
    "check_owner",
    "dtype_rule",
    "extract_submodules_state_dict",
    "fill_folder",
    "init_empty_weights",
    "init_on_device",
    "load",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "load_together",
    "lower",
    "match",
    "materialize",
    "offload_state_dict",
    "offload_weight",
    "placements",
    "read_offload_index",
    "read_tensors",
    "refuse_others_said",
    "save_model",
    "save_offload_index",
    "set_module_tensor_to_device",
    "without_aliases",
    "write_owner",
    "write_safetensors",
]
