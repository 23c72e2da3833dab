"""`FullyShardedDataParallelPlugin`: how a model is sharded over processes, in the words of either version of FSDP."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...errors import TrainingError
from ...settings import word_as_bool
from ...text import kind_text
from ..argument_types import refuse_wrong_fields

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, StateDictType

__all__ = ["FullyShardedDataParallelPlugin"]

logger = logging.getLogger(__name__)

COMPUTE_DTYPES: Final = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""What parameters are cast to. Under fp8 the layers that can compute in it do so themselves, all others in bf16."""

WRAP_POLICIES: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
SHARDING_STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
POLICY_KEYS: Final = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")


@dataclass
class FullyShardedDataParallelPlugin:
    """Parameters, gradients and optimizer states are cut into as many parts as there are processes, each of which keeps one.

    Everything runs on `torch.distributed.fsdp.fully_shard` (version 2), whichever version's words are used: those of version 1 are
    translated, or refused where version 2 has nothing like them. What is None is read from the environment (`FSDP_` and the name in
    capitals, as `bigmodel launch` sets it), else it is the default.

    Raises:
        TrainingError: what cannot be translated, words that mean nothing, settings that exclude each other.
    """

    fsdp_version: int | None = None
    """Whose words and defaults are meant, 1 (the default) or 2. Afterwards 2, which is what runs."""
    sharding_strategy: str | int | ShardingStrategy | None = None
    """`"FULL_SHARD"` (the default), `"SHARD_GRAD_OP"`, `"NO_SHARD"`, `"HYBRID_SHARD"`, `"HYBRID_SHARD_ZERO2"`; torch's enum or numbers.

    `HYBRID_SHARD` shards within each host and copies between hosts, `NO_SHARD` only copies.
    """
    reshard_after_forward: str | bool | ShardingStrategy | None = None
    """Whether whole parameters are freed between forward and backward (the default). A word of `sharding_strategy` is taken as that."""
    backward_prefetch: Any = None
    """`"BACKWARD_PRE"` is how version 2 works; `"NO_PREFETCH"` leaves it to that, `"BACKWARD_POST"` is refused."""
    mixed_precision_policy: Any = None
    """What parameters are cast to for computing (`param_dtype`) and gradients for their sum over processes (`reduce_dtype`).

    A word of `"fp32"`, `"bf16"`, `"fp16"`, `"fp8"` for both; a dict of these keys and `output_dtype`, `cast_forward_inputs`,
    `buffer_dtype`; either version's object. Buffers keep their dtype. None: what `Accelerator(mixed_precision=…)` says.
    """
    auto_wrap_policy: str | Callable[..., Any] | None = None
    """Which modules are gathered and freed by themselves: `"transformer_based_wrap"`, `"size_based_wrap"`, `"no_wrap"` (the default: the
    whole model at once), or a function like those of `torch.distributed.fsdp.wrap`."""
    cpu_offload: Any = None
    """Whether parts of parameters, gradients and optimizer states rest in host memory; a bool or either version's object."""
    ignored_modules: Iterable[nn.Module] | str | None = None
    """Modules that are not sharded, or a regular expression that matches their whole names. Their gradients are averaged."""
    state_dict_type: str | int | StateDictType | None = None
    """What `save_state` writes: `"FULL_STATE_DICT"` (version 1's default), the files of a job that is not sharded, or
    `"SHARDED_STATE_DICT"` (version 2's), folders of `torch.distributed.checkpoint` to which every process writes its part."""
    state_dict_config: Any = None
    """torch's config for the type. Of a full one, `rank0_only` and `offload_to_cpu` say where whole state dicts are."""
    optim_state_dict_config: Any = None
    """torch's config for the type."""
    limit_all_gathers: bool = True
    """Accepted: version 2 limits them on the device, without holding up the host."""
    use_orig_params: bool | None = None
    """Accepted: version 2 always shows the original parameters."""
    param_init_fn: Callable[[nn.Module], None] | None = None
    """Gives values to a module on meta, when the model is prepared; not needed with `sync_module_states`."""
    sync_module_states: bool | None = None
    """Whether all processes take the main process's values when the model is prepared; the others' may be on meta."""
    forward_prefetch: bool | None = None
    """Whether a unit's parameters are gathered while the unit before computes; for models whose order never changes."""
    activation_checkpointing: bool | None = None
    """Whether the backward recomputes what is inside of the wrapped modules instead of keeping it."""
    activation_checkpointing_offload: bool | None = None
    """Whether what wrapped modules are given rests in host memory until their backward."""
    cpu_ram_efficient_loading: bool | None = None
    """Whether only the main process loads a pretrained model; as `sync_module_states`, and transformers' `from_pretrained` follows it."""
    transformer_cls_names_to_wrap: list[str] | str | None = None
    """With `"transformer_based_wrap"`: classes of modules; None: the model's `_no_split_modules`."""
    min_num_params: int | None = None
    """With `"size_based_wrap"`: numbers in the parameters of a module that is wrapped."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        asked = self.fsdp_version if self.fsdp_version is not None else _number("VERSION", 1)
        if asked not in (1, 2):
            raise TrainingError(f"fsdp_version is {asked}; there are 1 and 2.")
        self._settle_strategy(asked)
        self.fsdp_version = 2
        self._settle_prefetch()
        self._settle_offload()
        self.set_state_dict_type(
            self.state_dict_type or _word("STATE_DICT_TYPE") or ("FULL_STATE_DICT" if asked == 1 else "SHARDED_STATE_DICT")
        )
        self._settle_wrapping()
        for name in ("activation_checkpointing", "activation_checkpointing_offload", "forward_prefetch", "sync_module_states"):
            setattr(self, name, _flag(name.upper()) if getattr(self, name) is None else bool(getattr(self, name)))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise TrainingError("activation_checkpointing_offload needs activation_checkpointing=True.")
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = _flag("CPU_RAM_EFFICIENT_LOADING")
        else:  # transformers looks there
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(self.cpu_ram_efficient_loading).lower()
        self.sync_module_states = self.sync_module_states or self.cpu_ram_efficient_loading
        ignored = _word("IGNORED_MODULES") if self.ignored_modules is None else self.ignored_modules
        self.ignored_modules = ignored if ignored is None or isinstance(ignored, str) else list(ignored)
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = _translated_policy(self.mixed_precision_policy)
            self.validate_mixed_precision_policy()

    def _settle_strategy(self, asked: int) -> None:
        from torch.distributed.fsdp import ShardingStrategy

        strategy, reshard = self.sharding_strategy, self.reshard_after_forward
        if strategy is None and reshard is None:
            # Launchers set both variables; each version reads its own first.
            names = ("SHARDING_STRATEGY", "RESHARD_AFTER_FORWARD")
            found = {name: _word(name) for name in (names if asked == 1 else names[::-1])}
            name, word = next(((name, word) for name, word in found.items() if word), ("", None))
            strategy, reshard = (word, None) if name == "SHARDING_STRATEGY" else (None, word)
        if isinstance(reshard, str) and reshard.lower() in ("true", "false"):
            reshard = reshard.lower() == "true"
        if reshard is not None and not isinstance(reshard, bool):
            if strategy is not None and _member(ShardingStrategy, "sharding_strategy", strategy) != _member(
                ShardingStrategy, "reshard_after_forward", reshard
            ):
                raise TrainingError(f"sharding_strategy={strategy} and reshard_after_forward={reshard} say different things; give one.")
            strategy, reshard = reshard, None
        default = ShardingStrategy.SHARD_GRAD_OP if reshard is False else ShardingStrategy.FULL_SHARD
        self.sharding_strategy = default if strategy is None else _member(ShardingStrategy, "sharding_strategy", strategy)
        reshards = self.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        if reshard is not None and reshard != reshards:
            raise TrainingError(
                f"sharding_strategy={self.sharding_strategy.name} means reshard_after_forward={reshards}, not {reshard}; give one of them."
            )
        self.reshard_after_forward = reshards

    def _settle_prefetch(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch

        prefetch = self.backward_prefetch if self.backward_prefetch is not None else _word("BACKWARD_PREFETCH")
        if isinstance(prefetch, str) and prefetch.upper() in ("NO_PREFETCH", ""):
            prefetch = None
        if prefetch is not None:
            prefetch = _member(BackwardPrefetch, "backward_prefetch", prefetch)
            if prefetch != BackwardPrefetch.BACKWARD_PRE:
                raise TrainingError(
                    "backward_prefetch=BACKWARD_POST: FSDP2 gathers the next parameters before the gradients of these, as BACKWARD_PRE "
                    "says. Leave it out."
                )
        self.backward_prefetch = prefetch

    def _settle_offload(self) -> None:
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        offload = _flag("OFFLOAD_PARAMS") if self.cpu_offload is None else self.cpu_offload
        if isinstance(offload, CPUOffload):
            offload = offload.offload_params
        if isinstance(offload, bool):
            offload = CPUOffloadPolicy() if offload else OffloadPolicy()
        if not isinstance(offload, OffloadPolicy):
            raise TrainingError(f"cpu_offload takes a bool, CPUOffload or CPUOffloadPolicy, not {kind_text(offload)}.")
        self.cpu_offload = offload

    def _settle_wrapping(self) -> None:
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        policy: Any = _word("AUTO_WRAP_POLICY") or "NO_WRAP" if self.auto_wrap_policy is None else self.auto_wrap_policy
        if isinstance(policy, str):
            if policy.upper() not in WRAP_POLICIES:
                raise TrainingError(f"auto_wrap_policy is {policy!r}; use one of {', '.join(WRAP_POLICIES).lower()}, or a function.")
            policy = {"TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy, "SIZE_BASED_WRAP": size_based_auto_wrap_policy}.get(
                policy.upper()
            )
        self.auto_wrap_policy = policy
        names = self.transformer_cls_names_to_wrap
        if names is None and policy is transformer_auto_wrap_policy:
            names = _word("TRANSFORMER_CLS_TO_WRAP") or None
        self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        if policy is size_based_auto_wrap_policy and self.min_num_params is None:
            self.min_num_params = _number("MIN_NUM_PARAMS", 0)

    def set_state_dict_type(self, state_dict_type: str | int | StateDictType | None = None) -> None:
        """Chooses what `save_state` writes, with the configs that belong to it; None: as it is.

        A job that saves its parts while it runs may choose `"FULL_STATE_DICT"` for the last time.
        """
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        before = self.state_dict_type
        self.state_dict_type = chosen = _member(StateDictType, "state_dict_type", state_dict_type or before)
        if chosen == StateDictType.LOCAL_STATE_DICT:
            raise TrainingError(
                "state_dict_type=LOCAL_STATE_DICT: FSDP2 has none. Use SHARDED_STATE_DICT, of which each process writes its part."
            )
        if before not in (None, state_dict_type, chosen):
            self.state_dict_config = self.optim_state_dict_config = None
        full = chosen == StateDictType.FULL_STATE_DICT
        kinds: tuple[Any, Any] = (
            (FullStateDictConfig, FullOptimStateDictConfig) if full else (ShardedStateDictConfig, ShardedOptimStateDictConfig)
        )
        for name, kind in zip(("state_dict_config", "optim_state_dict_config"), kinds, strict=True):
            config = getattr(self, name)
            if config is None:
                setattr(self, name, kind(offload_to_cpu=True, rank0_only=True) if full else kind(offload_to_cpu=True))
            elif not isinstance(config, kind):
                raise TrainingError(f"{name} is {kind_text(config)}; {chosen.name} takes {kind_text(kind)}.")

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Makes a named policy one for this model: with its classes of `transformer_cls_names_to_wrap`, or with `min_num_params`.

        Raises `TrainingError` for classes that the model does not have.
        """
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            there = {type(module).__name__: type(module) for module in model.modules()}
            own = list(getattr(model, "_no_split_modules", None) or ())
            names = own if self.transformer_cls_names_to_wrap is None else list(self.transformer_cls_names_to_wrap)
            missing = [name for name in names if name not in there]
            # What a model names itself may be parts that this one was made without.
            if not names or (missing and (names is not own or len(missing) == len(names))):
                raise TrainingError(
                    f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} has no module of a class "
                    f"{' or '.join(missing) or 'that transformer_cls_names_to_wrap would name'}; it has {', '.join(sorted(there))}."
                )
            classes = {there[name] for name in names if name in there}
            self.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            smallest = self.min_num_params or 0
            self.auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=smallest) if smallest else None

    def set_mixed_precision(self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False) -> None:
        """Computes and adds up gradients in that precision, unless there is a policy already.

        Args:
            mixed_precision: `"fp32"`, `"bf16"`, `"fp16"`, `"fp8"`, or the dtype.
            buffer_autocast: accepted: buffers keep their dtype.
            override: also where there is a policy.
        """
        policy = _translated_policy(mixed_precision)
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = policy

    def validate_mixed_precision_policy(self) -> None:
        """Raises `TrainingError` where the policy is no `MixedPrecisionPolicy`."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(self.mixed_precision_policy, MixedPrecisionPolicy):
            raise TrainingError(
                f"mixed_precision_policy is {self.mixed_precision_policy!r}, not a torch.distributed.fsdp.MixedPrecisionPolicy."
            )


def _number(name: str, usual: int) -> int:
    word = _word(name)
    try:
        return int(word or usual)
    except ValueError:
        raise TrainingError(f"The environment variable FSDP_{name} is {word!r}, not a whole number.") from None


def _word(name: str) -> str | None:
    return os.environ.get(f"FSDP_{name}")


def _flag(name: str) -> bool:
    try:
        return word_as_bool(_word(name) or "no")
    except ValueError as error:
        raise TrainingError(f"Environment variable FSDP_{name}: {error}") from None


def _member(kind: Any, name: str, value: Any) -> Any:
    """The member of an enum by its name, its number, or itself."""
    if isinstance(value, kind):
        return value
    members = {word.lstrip("_"): member for word, member in kind.__members__.items()}
    word = str(value).upper()
    if word in members:
        return members[word]
    if word.isdigit() and int(word) in {member.value for member in kind}:
        return kind(int(word))
    raise TrainingError(f"{name} is {value!r}; use one of {', '.join(members)}.")


def _dtype(value: Any) -> torch.dtype | None:
    dtype = COMPUTE_DTYPES.get(value) if isinstance(value, str) else value
    if (dtype is None and value is not None) or (dtype is not None and dtype not in COMPUTE_DTYPES.values()):
        raise TrainingError(f"mixed_precision_policy: {value!r} is no precision; use one of {', '.join(COMPUTE_DTYPES)}, or their dtypes.")
    return dtype


def _translated_policy(given: Any) -> MixedPrecisionPolicy:
    """The policy of version 2 that means the same."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, (str, torch.dtype)):
        return MixedPrecisionPolicy(param_dtype=_dtype(given), reduce_dtype=_dtype(given))
    if isinstance(given, MixedPrecision):
        if given.keep_low_precision_grads:
            raise TrainingError(
                "mixed_precision_policy: keep_low_precision_grads has no counterpart in FSDP2, whose gradients have the dtype "
                "of the parameters."
            )
        given = {
            "param_dtype": given.param_dtype,
            "reduce_dtype": given.reduce_dtype,
            "buffer_dtype": given.buffer_dtype,
            "cast_forward_inputs": given.cast_forward_inputs or given.cast_root_forward_inputs,
        }
    if not isinstance(given, dict) or not set(given) <= set(POLICY_KEYS):
        raise TrainingError(
            f"mixed_precision_policy is {given!r}; give a word, a MixedPrecisionPolicy, or a dict with {', '.join(POLICY_KEYS)}."
        )
    if _dtype(given.get("buffer_dtype")) not in (None, torch.float32):
        logger.warning("mixed_precision_policy: buffer_dtype=%s is not used; FSDP2 leaves buffers in their dtype.", given["buffer_dtype"])
    return MixedPrecisionPolicy(
        **{key: _dtype(given.get(key)) for key in ("param_dtype", "reduce_dtype", "output_dtype")},
        cast_forward_inputs=given.get("cast_forward_inputs", True),
    )
