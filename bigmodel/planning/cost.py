"""The cost model: seconds per step and per load, from the rates of devices and links.

A step is one forward of the model. Its stages run one after the other, on whichever device each of them runs. A stage takes the longer of
reading its weights and multiplying with them, and what activations, attention and the calls themselves take; while it computes, the weights
of the next offloaded stage travel, if the ring has room for two. With `C` the arithmetic up to the next offloaded stage and `T` the
transfer of that stage's weights, a step takes the sum of max(C, T) then, and of C + T otherwise. Where groups travel in parts, transfer and
arithmetic overlap part by part, which comes to the same. Where the CPU both computes and copies, its cores are shared: no pair is shorter
than the work of all its cores together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from ..devices import DeviceKey
from ..errors import MachineError
from ..machine import DeviceRates, Machine, Rate, Source
from .table import device_text

__all__ = ["DEFAULT_CONTEXT", "Forward", "Moving", "Prediction", "Run", "Stage", "forward", "load_seconds", "predict"]

DEFAULT_CONTEXT: Final = 512
"""Tokens per sequence that a prediction is for where none are named."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to take, in seconds."""

    load_seconds: float
    """From opening the checkpoint until every weight is at its place, the files not being in the page cache."""
    prefill_seconds: float
    """One forward of the whole context of all sequences of the batch. Files are read from the disk, as they are the first time."""
    decode_seconds: float
    """One step: one more token for each sequence of the batch, with the whole context behind it."""
    binds: str
    """The link or device that the decoding waits for: `"link to device 0"`, `"memory of cpu"`, `"disk"`, `"page cache"`, …"""
    batch: int = 1
    """Sequences per step."""
    context: int = DEFAULT_CONTEXT
    """Tokens per sequence."""
    source: str = "measured"
    """The least reliable of the rates that went into it: `"measured"`, `"table"` or `"guess"`."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded per second, over the batch."""
        return self.batch / self.decode_seconds if self.decode_seconds else float("inf")

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of prompts read per second, over the batch."""
        return self.batch * self.context / self.prefill_seconds if self.prefill_seconds else float("inf")


@dataclass(frozen=True, slots=True)
class Stage:
    """Weights that are brought and used together, as a step sees them."""

    name: str
    runs_on: DeviceKey
    rests_on: DeviceKey
    """The same device, or the store that the weights come from: "cpu", "disk"."""
    weights: int = 0
    """Weights that every token is multiplied with."""
    weight_bytes: int = 0
    """What these take on the device: less than the dtype's size where they are packed."""
    expert_weights: int = 0
    """Weights of routed experts, all of them."""
    expert_bytes: int = 0
    moved_bytes: int = 0
    """Bytes that travel for it in a step."""
    row_bytes: int = 0
    """Bytes of a row table that a token looks up, where the table does not lie on the device."""
    activation_width: int = 0
    """Elements that a token brings into and out of its matrices."""
    attention_width: int = 0
    """Heads × width of a head: what a token's attention to another one costs twice two operations for each of."""
    cache_bytes: int = 0
    """KV cache of the whole context and batch, which a decoding step reads."""
    calls: int = 0
    """Modules that run."""
    file_bytes: int = 0
    """Bytes of its tensors in the checkpoint."""
    loaded_bytes: int = 0
    """Bytes of its tensors where they rest."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a step computes."""

    dtype: str
    """Of the arithmetic: `"bfloat16"`."""
    itemsize: int
    """Bytes of an activation."""
    batch: int = 1
    experts: int = 0
    """Routed experts of a layer; 0: it has none."""
    experts_per_token: int = 0
    hidden_width: int = 0
    """Elements of a token that go from stage to stage."""


@dataclass(frozen=True, slots=True)
class Moving:
    """How weights move: what decides which times overlap. What has a default is as the dispatch does it."""

    ring_slots: int = 2
    """Whole groups that the ring has room for; 0: groups travel in parts."""
    overlaps: bool = True
    """Whether the next group, or part of one, travels while one computes; otherwise they take turns."""
    maps_files: bool = True
    """Whether arithmetic on the CPU reads weights on disk where the page cache has them, without a copy, if nothing converts them."""
    locks_ram: bool = False
    """Whether weights resting in RAM are page-locked there: they cross the link without being copied into staging memory first."""
    cached_bytes: int | None = None
    """Bytes of files that the page cache can hold; None: all."""


@dataclass(slots=True)
class Forward:
    """The time of one forward, and what it goes to."""

    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds by the device or link that was waited for."""

    def add(self, seconds: float, cause: str) -> None:
        """Time that passes because of `cause`."""
        self.seconds += seconds
        self.waits[cause] = self.waits.get(cause, 0.0) + seconds

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        return max(self.waits, key=lambda cause: self.waits[cause], default="")


@dataclass(slots=True)
class _Work:
    """Arithmetic of stages that run one after the other."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by cause."""
    core_seconds: float = 0.0
    """What it takes of the host's cores."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def add(self, seconds: float, cause: str) -> None:
        self.parts[cause] = self.parts.get(cause, 0.0) + seconds

    def join(self, other: _Work) -> None:
        for cause, seconds in other.parts.items():
            self.add(seconds, cause)
        self.core_seconds += other.core_seconds


@dataclass(frozen=True, slots=True)
class _Transfer:
    seconds: float
    core_seconds: float
    """What it takes of the host's cores: copies of the CPU are its work."""
    cause: str
    is_ahead: bool
    """Whether it is under way while the stages before compute."""


def predict(stages: Sequence[Stage], machine: Machine, run: Run, moving: Moving, context: int | None = None) -> Prediction:
    """Seconds of loading, of reading a prompt of `context` tokens a sequence, and of decoding one more token with these behind it.

    Raises `MachineError` where the machine has no rates for a device that computes.
    """
    tokens = context or DEFAULT_CONTEXT
    from_disk = sum(stage.moved_bytes for stage in stages if stage.rests_on == "disk")
    # A cache that drops what was used least recently holds nothing of a cycle that is longer than itself.
    is_cached = moving.cached_bytes is None or from_disk <= moving.cached_bytes
    prefill = forward(stages, machine, run, moving, tokens=tokens, is_cached=False)
    decode = forward(stages, machine, run, moving, tokens=1, past=tokens, is_cached=is_cached)
    source = _least_reliable(stages, machine, run)
    return Prediction(load_seconds(stages, machine), prefill.seconds, decode.seconds, decode.binds, run.batch, tokens, source)


def forward(
    stages: Sequence[Stage], machine: Machine, run: Run, moving: Moving, *, tokens: int, past: int = 0, is_cached: bool = True
) -> Forward:
    """One forward of `tokens` new tokens a sequence with `past` behind them, where others like it came before.

    `is_cached`: whether the page cache holds the files of what is offloaded to disk. Raises `MachineError` for an unknown rate.
    """
    travelling = sum(1 for stage in stages if stage.moved_bytes)
    # As many groups as the ring has room for are still in it when their turn comes again.
    moves = travelling > moving.ring_slots
    leading = _Work()
    segments: list[tuple[_Transfer, _Work]] = []
    """Each offloaded stage's transfer, and the arithmetic from there up to the next one."""
    before: DeviceKey | None = None
    for stage in stages:
        work = _arithmetic(stage, machine, run, tokens, past)
        if before not in (None, stage.runs_on):
            nbytes = run.batch * tokens * run.hidden_width * run.itemsize
            work.add(_crossing_seconds(nbytes, before, stage.runs_on, machine), _link_text(stage.runs_on))
        before = stage.runs_on
        if stage.row_bytes:
            rows = _transfer(stage, stage.row_bytes * run.batch * tokens, machine, Moving(overlaps=False), is_cached=is_cached)
            work.add(rows.seconds, rows.cause)
        if stage.moved_bytes and moves:
            segments.append((_transfer(stage, stage.moved_bytes, machine, moving, is_cached=is_cached), work))
        else:
            (segments[-1][1] if segments else leading).join(work)
    found = Forward()
    if not segments:
        _add_work(found, leading)
        return found
    segments[-1][1].join(leading)  # the first transfer begins before the forward does, while the last stages of the one before compute
    transfers = [transfer for transfer, _ in segments]
    for (_, work), transfer in zip(segments, [*transfers[1:], transfers[0]], strict=True):
        if transfer.is_ahead:
            _add_together(found, work, transfer, machine)
        else:
            _add_work(found, work)
            found.add(transfer.seconds, transfer.cause)
    return found


def load_seconds(stages: Sequence[Stage], machine: Machine) -> float:
    """Reading what does not stay on disk, converting it and bringing it to the accelerators: at the pace of the slowest of the three."""
    loaded = [stage for stage in stages if stage.rests_on != "disk"]
    read_bytes = sum(stage.file_bytes for stage in loaded)
    converted_bytes = sum(stage.file_bytes for stage in loaded if stage.file_bytes != stage.loaded_bytes)
    link_seconds = sum(
        _from_host(stage.rests_on, machine).seconds(stage.loaded_bytes)
        for stage in loaded
        if stage.rests_on != "cpu" and stage.loaded_bytes
    )
    return max(machine.disk.seconds(read_bytes), machine.ram.seconds(converted_bytes), link_seconds)


def _rates(device: DeviceKey, machine: Machine) -> DeviceRates:
    rates = machine.devices.get(device)
    if rates is None:
        known = ", ".join(map(device_text, machine.devices))
        raise MachineError(
            f"The machine has no rates for {device_text(device)}, only for {known}. Name it, or measure it (`bigmodel bench`)."
        )
    return rates


def _from_host(device: DeviceKey, machine: Machine) -> Rate:
    """The link to an accelerator; what shares the host's memory is copied within it."""
    return _rates(device, machine).from_host or machine.ram


def _link_text(device: DeviceKey) -> str:
    return f"link to {device_text(device)}"


def _crossing_seconds(nbytes: int, source: DeviceKey | None, target: DeviceKey, machine: Machine) -> float:
    """Outputs of a stage on their way to a stage on another device."""
    if source == "cpu":
        return _from_host(target, machine).seconds(nbytes)
    if target == "cpu":
        assert source is not None
        return (_rates(source, machine).to_host or machine.ram).seconds(nbytes)
    return machine.between_devices.seconds(nbytes)


def _arithmetic(stage: Stage, machine: Machine, run: Run, tokens: int, past: int) -> _Work:
    device, rates = device_text(stage.runs_on), _rates(stage.runs_on, machine)
    rows = run.batch * tokens
    peak = rates.peak_flops(run.dtype)
    multiplying = rates.matmul_seconds(stage.weights, rows, run.dtype)
    ideal, read_bytes = 2 * stage.weights * rows / peak, float(stage.weight_bytes)
    if stage.expert_weights and run.experts:
        # Tokens choose their experts independently of each other, and no expert before others.
        share = 1 - (1 - run.experts_per_token / run.experts) ** rows
        rows_each = rows * run.experts_per_token / (run.experts * share)
        multiplying += rates.matmul_seconds(stage.expert_weights * share, rows_each, run.dtype)
        ideal += 2 * stage.expert_weights * share * rows_each / peak
        read_bytes += stage.expert_bytes * share
    reading = rates.memory.seconds(read_bytes)
    if stage.weight_bytes < stage.weights * run.itemsize and rows > 1:  # unpacked into memory; single rows have kernels that do without
        reading += rates.memory.seconds(2 * stage.weights * run.itemsize)
        multiplying += reading
    in_memory, in_arithmetic = f"memory of {device}", f"arithmetic of {device}"
    work = _Work()
    work.add(max(multiplying, reading), in_memory if reading > ideal else in_arithmetic)
    attended = past + (tokens + 1) / 2  # causal: on average half of the new tokens
    work.add(4 * stage.attention_width * rows * attended / peak, in_arithmetic)
    if past:
        work.add(rates.memory.seconds(stage.cache_bytes), in_memory)
    work.add(rates.activation.seconds(stage.activation_width * rows * run.itemsize), in_memory)
    calls = stage.calls * rates.call_seconds
    if not rates.queues:
        work.add(calls, f"calls on {device}")
    elif calls > work.seconds:
        work = _Work({f"calls on {device}": calls})
    if stage.runs_on == "cpu":
        work.core_seconds = work.seconds * min(machine.compute_threads, machine.cores)
    return work


def _transfer(stage: Stage, nbytes: int, machine: Machine, moving: Moving, *, is_cached: bool) -> _Transfer:
    """From where the stage rests to where it runs.

    Where calls only queue work, the next group is brought into staging memory while this one crosses the link, if the ring has room for
    both: the longer leg counts. Otherwise one comes after the other.
    """
    legs: list[tuple[float, str]] = []
    core_seconds = 0.0
    on_host = stage.runs_on == "cpu"
    is_mapped = on_host and moving.maps_files and stage.file_bytes == stage.loaded_bytes
    if stage.rests_on == "disk":
        copying = machine.page_cache.seconds(nbytes)
        if not (is_mapped and is_cached):  # filling the page cache takes the cores as long as copying out of it does
            core_seconds += copying * min(machine.reading_threads, machine.cores)
        if not is_cached:
            legs.append((machine.disk.seconds(nbytes), "disk"))
        elif not is_mapped:
            legs.append((copying, "page cache"))
    elif not on_host and not moving.locks_ram:
        copying = machine.ram.seconds(nbytes)
        core_seconds += copying * min(machine.compute_threads, machine.cores)
        legs.append((copying, "RAM"))
    if not on_host:
        legs.append((_from_host(stage.runs_on, machine).seconds(nbytes), _link_text(stage.runs_on)))
    longest, cause = max(legs, default=(0.0, "page cache"))
    at_once = moving.overlaps and _rates(stage.runs_on, machine).queues
    # Pages are read ahead into the page cache, which needs no room in a ring.
    return _Transfer(longest if at_once else sum(seconds for seconds, _ in legs), core_seconds, cause, moving.overlaps or is_mapped)


def _add_work(found: Forward, work: _Work, scale: float = 1.0) -> None:
    for cause, seconds in work.parts.items():
        found.add(scale * seconds, cause)


def _add_together(found: Forward, work: _Work, transfer: _Transfer, machine: Machine) -> None:
    """Arithmetic and a transfer at the same time: as long as the longer one, or as the host's cores take for both."""
    cores = (work.core_seconds + transfer.core_seconds) / machine.cores
    seconds = max(work.seconds, transfer.seconds, cores)
    if seconds == work.seconds:
        _add_work(found, work)
    else:
        found.add(seconds, transfer.cause if seconds == transfer.seconds else "cores of cpu")


def _least_reliable(stages: Sequence[Stage], machine: Machine, run: Run) -> Source:
    used: set[Source] = set()
    for stage in stages:
        rates = _rates(stage.runs_on, machine)
        used |= {rates.memory.source, rates.matmul_source(run.dtype)}
        if stage.rests_on != stage.runs_on:
            used.add(machine.disk.source if stage.rests_on == "disk" else machine.ram.source)
            if stage.runs_on != "cpu":
                used.add(_from_host(stage.runs_on, machine).source)
    return max(used, key=get_args(Source).index, default="measured")
