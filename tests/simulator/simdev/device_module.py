"""`torch.sim`: what PyTorch and libraries expect of `torch.<device type>`, and what only simulated devices have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .settings import MAX_DEVICES, apply

__all__ = ["device_module"]


class _Device:
    """Makes a device the current one within a with block; None and -1 change nothing."""

    extension: ModuleType
    index_of: Callable[[Any], int]

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None or device == -1 else type(self).index_of(device)

    def __enter__(self) -> None:
        self.before = self.extension.current_device()
        if self.index >= 0:
            self.extension.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        self.extension.set_device(self.before)


class _Maker(type):
    """Classes that make and recognise torch's own objects: parts of torch want exactly `torch.Event`, never a subclass."""

    base: type
    device_type: str
    make: Callable[..., Any]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.base) and instance.device.type == cls.device_type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)


def device_module(extension: ModuleType, name: str) -> ModuleType:
    """The module to register as `torch.<name>`."""
    module = ModuleType(f"torch.{name}", "Simulated accelerators.")

    def index_of(device: Any = None) -> int:
        if device is None:
            index = extension.current_device()
        elif isinstance(device, int):
            index = device
        else:
            device = torch.device(device)
            if device.type != name:
                raise ValueError(f"Expected a {name} device, but got {device}.")
            index = extension.current_device() if device.index is None else device.index
        if not 0 <= index < extension.device_count():
            raise RuntimeError(f"invalid device ordinal {index}: there are {extension.device_count()} simulated devices")
        return index

    _add_devices(module, extension, name, index_of)
    _add_streams(module, extension, name, index_of)
    _add_memory(module, extension, index_of)
    _add_random(module, extension, name, index_of)
    _add_simulation(module, extension, index_of)
    return module


def _add_devices(module: ModuleType, extension: ModuleType, name: str, index_of: Callable[..., int]) -> None:
    def properties(device: Any = None) -> SimpleNamespace:
        index = index_of(device)
        return SimpleNamespace(
            name=module.get_device_name(index), total_memory=extension.capacity(index), major=9, minor=0, multi_processor_count=1
        )

    class device(_Device):
        pass

    device.extension, device.index_of = extension, staticmethod(index_of)

    class device_of(device):
        def __init__(self, tensor: Any) -> None:
            super().__init__(tensor.get_device() if tensor.device.type == name else -1)

    module.device, module.device_of = device, device_of
    module.device_count = extension.device_count
    module.is_available = lambda: extension.device_count() > 0
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = extension.forked
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.set_device(index_of(device))
    module.synchronize = lambda device=None: extension.synchronize(index_of(device))
    module.get_device_name = lambda device=None: f"simulated accelerator {index_of(device)}"
    module.get_device_capability = lambda device=None: (9, 0)
    module.get_device_properties = properties
    module.can_device_access_peer = lambda one, other: index_of(one) != index_of(other)
    module.is_bf16_supported = lambda including_emulation=True: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.amp = SimpleNamespace(GradScaler=lambda *args, **kwargs: torch.amp.GradScaler(name, *args, **kwargs))


def _add_streams(module: ModuleType, extension: ModuleType, name: str, index_of: Callable[..., int]) -> None:
    class Stream(metaclass=_Maker):
        base, device_type = torch.Stream, name

        @staticmethod
        def make(device: Any = None, priority: int = 0) -> torch.Stream:
            return torch.Stream(device=torch.device(name, index_of(device)), priority=priority)

    class Event(metaclass=_Maker):
        base, device_type = torch.Event, name

        @staticmethod
        def make(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
            return torch.Event(device=name, enable_timing=enable_timing, blocking=blocking)

    def default_stream(device: Any = None) -> torch.Stream:
        index = index_of(device)
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return torch.Stream(stream_id=extension.default_stream_id(index), device_index=index, device_type=kind)

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    module.Stream, module.Event = Stream, Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    module.default_stream = default_stream
    module.set_stream = set_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream


def _add_memory(module: ModuleType, extension: ModuleType, index_of: Callable[..., int]) -> None:
    accelerator = torch.accelerator

    def statistic(key: str) -> Callable[..., int]:
        return lambda device=None: accelerator.memory_stats(index_of(device)).get(key, 0)

    module.memory_stats = lambda device=None: accelerator.memory_stats(index_of(device))
    module.memory_allocated = statistic("allocated_bytes.all.current")
    module.max_memory_allocated = statistic("allocated_bytes.all.peak")
    module.memory_reserved = statistic("reserved_bytes.all.current")
    module.max_memory_reserved = statistic("reserved_bytes.all.peak")
    module.reset_peak_memory_stats = lambda device=None: accelerator.reset_peak_memory_stats(index_of(device))
    module.reset_max_memory_allocated = module.reset_peak_memory_stats
    module.reset_accumulated_memory_stats = lambda device=None: accelerator.reset_accumulated_memory_stats(index_of(device))
    module.mem_get_info = lambda device=None: accelerator.get_memory_info(index_of(device))
    module.empty_cache = accelerator.empty_cache
    module.ipc_collect = lambda: None


def _add_random(module: ModuleType, extension: ModuleType, name: str, index_of: Callable[..., int]) -> None:
    generators = [extension.default_generator(index) for index in range(MAX_DEVICES)]

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    def set_rng_state(state: torch.Tensor, device: Any = name) -> None:
        generators[index_of(device)].set_state(state)

    def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            generators[index].set_state(state)

    def manual_seed(seed: int) -> None:
        generators[index_of()].manual_seed(int(seed))

    module.default_generators = generators
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    module.seed = lambda: generators[index_of()].seed()
    module.initial_seed = lambda: generators[index_of()].initial_seed()
    module.get_rng_state = lambda device=name: generators[index_of(device)].get_state()
    module.set_rng_state, module.set_rng_state_all = set_rng_state, set_rng_state_all
    module.get_rng_state_all = lambda: [generators[index].get_state() for index in range(extension.device_count())]


def _add_simulation(module: ModuleType, extension: ModuleType, index_of: Callable[..., int]) -> None:
    def set_up(count: int, memory: int | str | Sequence[int | str], **settings: Any) -> list[torch.device]:
        """Gives the process `count` devices; what they are like: `settings.DEFAULTS`."""
        apply(extension, count, memory, **settings)
        return [torch.device("sim", index) for index in range(count)]

    def tear_down() -> None:
        """Ends all work and takes the devices away. What was still allocated on them is forgotten and charged to nobody."""
        extension.reset()
        module.manual_seed_all(torch.default_generator.initial_seed())

    @contextlib.contextmanager
    def configured(**settings: Any) -> Iterator[None]:
        """Other settings (`settings.DEFAULTS`; `memory` as for `set_up`) within a with block."""
        before = extension.settings()
        capacities = [extension.capacity(index) for index in range(before["devices"])]
        memory = settings.pop("memory", capacities)
        kept = {key: value for key, value in before.items() if key != "devices"}
        apply(extension, before["devices"], memory, **{**kept, **settings})
        try:
            yield
        finally:
            apply(extension, before["devices"], capacities, **kept)

    module.set_up, module.tear_down, module.configured = set_up, tear_down, configured
    module.settings = extension.settings
    module.link_stats = lambda device=None: extension.link_stats(index_of(device))
    module.reset_link_stats = extension.reset_link_stats
    module.take_hazards = extension.take_hazards
    module.op_count, module.launch_count = extension.op_count, extension.launch_count
