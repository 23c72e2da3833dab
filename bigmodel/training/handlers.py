"""What users may change of torch's own machinery: autocast, gradient scaler, DistributedDataParallel, process group, profiler."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ..devices import accelerator_type
from ..errors import TrainingError
from .argument_types import refuse_wrong_fields
from .enums import DDPCommunicationHookType
from .state import PartialState

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile

__all__ = [
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProfileKwargs",
]

POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
WRAPPERS = (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


class KwargsHandler:
    """Base of dataclasses whose fields are arguments of something else."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, copied."""
        return {each.name: copy.deepcopy(getattr(self, each.name)) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose values are not the declared defaults, by name: what has to be passed on."""
        changed = {}
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            if value is not default and value != default:
                changed[each.name] = value
        return changed


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` is made: `torch.autocast(device, dtype, **handler.to_kwargs())`."""

    enabled: bool = True
    """False computes in the dtypes that tensors have."""
    cache_enabled: bool | None = None
    """Whether weights that were cast are kept until the context ends; None: as torch decides."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the scaler of fp16 gradients is made: `get_grad_scaler(distributed_type, **handler.to_kwargs())`. See `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    """What losses are multiplied by at first."""
    growth_factor: float = 2.0
    """The scale grows by it after `growth_interval` steps without an overflow."""
    backoff_factor: float = 0.5
    """The scale shrinks by it at an overflow."""
    growth_interval: int = 2000
    """Steps."""
    enabled: bool = True
    """False scales nothing."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How processes meet: `PartialState(**handler.to_kwargs())`. See `torch.distributed.init_process_group`."""

    backend: str | None = "nccl"
    """None, or left as it is: the one that torch names for the device."""
    init_method: str | None = None
    """A URL of the meeting place; None: the environment's."""
    timeout: timedelta | None = None
    """Of collectives. Where None is given, it becomes torch's own for the backend: 10 minutes with `"nccl"`, else 30."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        if self.timeout is None:
            self.timeout = self._usual_timeout()

    def _usual_timeout(self) -> timedelta:
        return timedelta(minutes=10 if self.backend == "nccl" else 30)

    def to_kwargs(self) -> dict[str, Any]:
        """What was chosen, as arguments of `PartialState`. Where no backend was, the usual timeout is left to the one that is taken."""
        kwargs = super().to_kwargs()
        if "backend" not in kwargs and self.timeout == self._usual_timeout():
            kwargs.pop("timeout", None)
        return kwargs


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped: `model = DistributedDataParallel(model, **handler.to_kwargs())`, then `handler.register_comm_hook(model)`.

    Raises `TrainingError` for an unknown hook, a wrapper that is not `"no"`, `"fp16"` or `"bf16"`, and options without PowerSGD.
    """

    dim: int = 0
    """Dimension along which `DataParallel` of one process splits a batch."""
    broadcast_buffers: bool = True
    """Buffers are made equal before every forward."""
    bucket_cap_mb: int = 25
    """MiB of gradients that travel together."""
    find_unused_parameters: bool = False
    """Parameters that a forward leaves out are looked for."""
    check_reduction: bool = False
    """Has no effect in torch any more."""
    gradient_as_bucket_view: bool = False
    """Gradients lie in the buckets, which saves their memory once."""
    static_graph: bool = False
    """Every step uses the same parameters in the same order."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """How gradients are compressed on their way."""
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """The dtype that the gradients are cast to around the hook: `"no"`, `"fp16"` or `"bf16"`."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of `PowerSGDState`, such as `matrix_approximation_rank`."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)
        self.comm_hook = _hook(self.comm_hook, "comm_hook", tuple(DDPCommunicationHookType))
        self.comm_wrapper = _hook(self.comm_wrapper, "comm_wrapper", WRAPPERS)
        if self.comm_state_option and self.comm_hook not in POWER_SGD:
            raise TrainingError(
                f"comm_state_option={self.comm_state_option!r} is for PowerSGD, but comm_hook is {str(self.comm_hook)!r}. "
                f"Choose comm_hook={str(POWER_SGD[0])!r}, or leave the options out."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, copied, but those of the hook."""
        return {name: value for name, value in super().to_dict().items() if not name.startswith("comm_")}

    def to_kwargs(self) -> dict[str, Any]:
        """What was chosen, as arguments of `DistributedDataParallel`; the hook is registered apart."""
        kwargs = super().to_kwargs()
        return {name: value for name, value in kwargs.items() if not name.startswith("comm_")}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Puts the hook, within its wrapper, on a wrapped model; once for each model. Without hook and wrapper it does nothing."""
        if self.comm_hook == self.comm_wrapper == DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.NO: default_hooks.allreduce_hook,
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: _batched_power_sgd(powerSGD_hook),
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper == DDPCommunicationHookType.FP16:
            hook = default_hooks.fp16_compress_wrapper(hook)
        elif self.comm_wrapper == DDPCommunicationHookType.BF16:
            hook = default_hooks.bf16_compress_wrapper(hook)
        state = powerSGD_hook.PowerSGDState(model.process_group, **self.comm_state_option) if self.comm_hook in POWER_SGD else None

        def communicate(state: Any, bucket: Any) -> Any:
            return hook(state, bucket)

        # torch looks at a hook's annotations; and it knows its bf16 hooks by their names, and refuses them where it has not tried them
        # (gloo), although their collectives work.
        communicate.__annotations__ = {}
        model.register_comm_hook(state, communicate)


def _batched_power_sgd(module: Any) -> Callable[..., Any]:
    """torch's hook, which hands single matrices to a function that asserts that it gets stacks of them (so in torch 2.13)."""

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        module._orthogonalize(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)

    hook = module.batched_powerSGD_hook
    return FunctionType(hook.__code__, {**vars(module), "_orthogonalize": orthogonalize})


def _hook(word: str, argument: str, known: tuple[DDPCommunicationHookType, ...]) -> DDPCommunicationHookType:
    if word not in known:
        raise TrainingError(f"{argument}={word!r}: use one of {[str(each) for each in known]}.")
    return DDPCommunicationHookType(word)


@dataclass
class ProfileKwargs(KwargsHandler):
    """How a run is profiled: `with handler.build() as profiler: …`. See `torch.profiler.profile`."""

    activities: list[str] | None = None
    """What is recorded: `"cpu"`, and kinds of accelerators; None: all that this machine has."""
    schedule_option: dict[str, int] | None = None
    """Steps of the cycle: `skip_first`, `wait`, `warmup`, `active`, `repeat`, see `torch.profiler.schedule`. None: all is one cycle."""
    on_trace_ready: Callable[[Any], Any] | None = None
    """Called with the profiler at the end of each cycle."""
    record_shapes: bool = False
    """Shapes of the operators' inputs."""
    profile_memory: bool = False
    """Bytes that operators allocate and free."""
    with_stack: bool = False
    """Source lines of operators."""
    with_flops: bool = False
    """Floating-point operations of matrix products and convolutions."""
    with_modules: bool = False
    """The modules that operators ran in."""
    output_trace_dir: str | None = None
    """Folder for traces of `chrome://tracing`, one of each process: `profile_{rank}.json`, of the last cycle. None: none are written."""

    def __post_init__(self) -> None:
        refuse_wrong_fields(self)

    def build(self) -> profile:
        """The profiler, not yet running. It writes its traces by itself, into a folder that it makes.

        Raises `TrainingError` for unknown activities and keys of the schedule.
        """
        from torch.profiler import profile, schedule

        return profile(
            activities=_activities(self.activities),
            schedule=None if self.schedule_option is None else schedule(**_schedule_steps(self.schedule_option)),
            on_trace_ready=self._finish_cycle,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _finish_cycle(self, profiler: profile) -> None:
        if self.on_trace_ready is not None:
            self.on_trace_ready(profiler)
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{PartialState().process_index}.json"))


def _activities(words: list[str] | None) -> list[ProfilerActivity]:
    from torch.profiler import ProfilerActivity, supported_activities

    # An accelerator that came with a library of its own is torch's "private use" device, under the name that it gave itself.
    private = torch._C._get_privateuse1_backend_name()
    if words is None:  # such a library may be there without a device, whose profiler fails then
        return [each for each in supported_activities() if each != ProfilerActivity.PrivateUse1 or private == accelerator_type()]
    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    known[private] = ProfilerActivity.PrivateUse1
    for word in words:
        if word.lower() not in known:
            raise TrainingError(f"activities holds {word!r}: use some of {sorted(known)}.")
    return [known[word.lower()] for word in words]


def _schedule_steps(steps: Mapping[str, int]) -> dict[str, int]:
    known = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
    unknown = sorted(set(steps) - set(known))
    if unknown or "active" not in steps:
        problem = f"does not know {', '.join(unknown)}" if unknown else "needs 'active', the steps that are recorded"
        raise TrainingError(f"schedule_option={dict(steps)!r} {problem}; it may hold {', '.join(known)}.")
    # torch asks for two that mostly are nought.
    return {"wait": 0, "warmup": 0} | dict(steps)
