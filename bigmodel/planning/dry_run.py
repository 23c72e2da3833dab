"""What a forward needs beside weights, measured by running the model's own code on shapes alone.

A copy of the model on meta, language models cut down to three layers of each kind, runs once; every allocation is recorded with the
module that made it. No weight is read, no memory is taken, and the model itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from .attention import AttentionAs
from .example_inputs import InputsUnknown, inputs_for
from .live_bytes import LiveBytes, TooManyOperations, rounded
from .meta_copy import Kind, layer_kinds, meta_copy
from .skeleton import Recorded

__all__ = ["DryRun", "DryRunError", "dry_run"]

OPERATION_LIMIT = 6_000
"""A forward with more operations runs a loop in Python, over tokens as a rule."""
SHORT_TOKENS = 32
"""Tokens of the forward that stands for one that is too long to be followed."""
SAMPLING_ITEM_BYTES = 28
"""What picking the next token takes for each entry of the vocabulary: float32 logits, sorted ones with their int64 indices, probabilities,
their cumulative sum, and a copy on the way (transformers' `generate` with `do_sample` and `top_p`)."""

COPIES_OF_IDS = 3
"""Of token ids and their mask and positions, that `generate` holds beside those that the forward is given."""


class DryRunError(Exception):
    """The model's code cannot be run on shapes alone; the message says why."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one forward allocates, in bytes."""

    workspace_bytes: int
    """The most that is alive at once beside weights, inputs and what is kept, while blocks run."""
    extra_bytes: Mapping[str, int] = field(default_factory=dict)
    """By name of a module outside the blocks: what it takes at its peak beyond `workspace_bytes`. The head's are the logits."""
    kept_bytes: Mapping[str, int] | None = field(default_factory=dict)
    """By block: what the forward leaves behind for the next one (the KV cache); None: not known."""
    logits_bytes: int = 0
    """The part of the peak that is logits."""
    notes: tuple[str, ...] = ()


def dry_run(
    model: nn.Module,
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    last_logits: bool = False,
    example_inputs: Any = None,
    device: torch.device | None = None,
) -> DryRun:
    """Measures a forward of `batch` sequences of `tokens` tokens.

    `dtype` is that of floating weights and inputs, if they are loaded as another than they have. `last_logits` asks only for those of the
    last token, where the model can. `example_inputs` (a tensor, a sequence of positional arguments or a mapping of keyword arguments; only
    shapes and dtypes matter) replaces tokens for models that take something else. `device` is asked which attention kernel it would use;
    None stands for an accelerator that is not here.

    Raises `DryRunError` where the code does not run on meta tensors.
    """
    if isinstance(model, Recorded) or type(model).forward is nn.Module.forward:
        raise DryRunError("only names and shapes are known")
    kinds = layer_kinds(model)
    few = _layers(kinds, 3)
    whole = _layers(kinds, None)

    def measured(layers: Mapping[str, Sequence[int]], tokens: int) -> DryRun:
        run = _Run(meta_copy(model, dtype, layers), layers, AttentionAs(device))
        arguments, keywords = inputs_for(run.model, batch, tokens, last_logits=last_logits, example=example_inputs)
        return run.measure(arguments, keywords, kinds, batch)

    # Plain models are not known to treat their layers alike, so all are run.
    first, second = (few, whole) if example_inputs is None else (whole, few)
    # The code of a model may fail on meta in any way; what it says is told.
    try:
        return measured(first, tokens)
    except InputsUnknown as error:
        raise DryRunError(str(error)) from error
    except TooManyOperations as error:
        if example_inputs is None and tokens > SHORT_TOKENS:
            return _scaled([lambda: measured(few, SHORT_TOKENS), lambda: measured(whole, SHORT_TOKENS)], -(-tokens // SHORT_TOKENS))
        if first == second:
            raise DryRunError(_reason(error)) from error
    except Exception as error:
        if first == second:
            raise DryRunError(_reason(error)) from error
    try:
        return measured(second, tokens)  # all layers also for code that goes by their number
    except Exception as error:
        raise DryRunError(_reason(error)) from error


def _layers(kinds: Sequence[Kind], most: int | None) -> dict[str, list[int]]:
    """Of every list up to `most` layers of each kind."""
    layers: dict[str, list[int]] = {}
    for kind in kinds:
        layers[kind.path] = sorted([*layers.get(kind.path, []), *kind.indices[:most]])
    return layers


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def _scaled(attempts: Sequence[Callable[[], DryRun]], factor: int) -> DryRun:
    first: Exception | None = None
    for attempt in attempts:
        try:
            short = attempt()
            break
        except Exception as error:
            first = first or error
    else:
        assert first is not None
        raise DryRunError(_reason(first)) from first
    note = f"The model loops over tokens: activations are {factor} × those of a dry run of {SHORT_TOKENS} tokens."
    return DryRun(
        short.workspace_bytes * factor,
        {name: nbytes * factor for name, nbytes in short.extra_bytes.items()},
        None,
        short.logits_bytes * factor,
        (*short.notes, note),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a forward ended with."""

    kept: set[int]
    """Numbers of the storages that caches keep."""
    end: int
    """Events until then."""
    head: str
    """The module that made the output."""
    sampling_bytes: int
    """What picking the next tokens takes beside the output."""
    logits_bytes: int
    inputs_bytes: int


class _Run:
    """One forward of a copy on meta."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Sequence[int]], attention: AttentionAs) -> None:
        self.model = model
        self.attention = attention
        self.blocks = {f"{path}.{position}": f"{path}.{index}" for path, kept in layers.items() for position, index in enumerate(kept)}
        """Names of the layers in the original, by their names in the copy."""
        self.running: list[str] = []
        self.last_leaf = ""
        self.any_block_ran = False

    def measure(self, arguments: Sequence[Any], keywords: Mapping[str, Any], kinds: Sequence[Kind], batch: int) -> DryRun:
        known = [value for value in tree_iter((arguments, keywords)) if isinstance(value, torch.Tensor)]
        weights = [*self.model.parameters(), *self.model.buffers()]
        recorder = LiveBytes([*weights, *known], self._owner, answers=_ANSWERS, limit=OPERATION_LIMIT)
        handles = self._watch(recorder)
        try:
            with recorder, self.attention, torch.no_grad():
                output = self.model(*arguments, **keywords)
                end = len(recorder.events)
                head = self._owner()
                logits = getattr(output, "logits", None)
                caches = _caches(output)
                del output
        finally:
            for handle in handles:
                handle.remove()
        sampled = 0
        logits_bytes = 0
        if isinstance(logits, torch.Tensor) and logits.dim() == 3:
            logits_bytes = logits.untyped_storage().nbytes()
            sampled = batch * logits.shape[-1] * SAMPLING_ITEM_BYTES if caches else 0
        del logits
        kept = {number for number in recorder.alive() if recorder.owners[number] in self.blocks} if caches else set()
        inputs_bytes = sum(rounded(tensor.nbytes) for tensor in known)
        if caches:
            inputs_bytes += COPIES_OF_IDS * max((rounded(tensor.nbytes) for tensor in known if not tensor.is_floating_point()), default=0)
        return self._result(recorder, kinds, _Seen(kept, end, head, sampled, logits_bytes, inputs_bytes))

    def _watch(self, recorder: LiveBytes) -> list[Any]:
        """Hooks on blocks, and outside of them on modules without children, that tell who runs."""
        handles = []

        def entered(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.running.append(name)
                recorder.mark(name)

            return hook

        def left(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self.running.pop()
                if not self.running:
                    self.any_block_ran |= name in self.blocks
                    self.last_leaf = "" if name in self.blocks else name

            return hook

        stack = [("", self.model)]
        while stack:
            name, module = stack.pop()
            if name in self.blocks or not module._modules:
                handles += [module.register_forward_pre_hook(entered(name)), module.register_forward_hook(left(name))]
            else:
                stack += [(f"{name}.{key}" if name else key, child) for key, child in module._modules.items() if child is not None]
        return handles

    def _owner(self) -> str:
        """Who runs. Code between modules belongs to the model, and behind the blocks to the module before it."""
        if self.running:
            return self.running[0]
        return self.last_leaf if self.any_block_ran else ""

    def _result(self, recorder: LiveBytes, kinds: Sequence[Kind], seen: _Seen) -> DryRun:
        peaks: dict[str, int] = {}
        live_at_marks: list[int] = []
        live_at_end = before = seen.inputs_bytes
        for at, live, allocated in recorder.timeline(seen.kept, seen.inputs_bytes):
            while len(live_at_marks) < len(recorder.marks) and recorder.marks[len(live_at_marks)][0] <= at:
                live_at_marks.append(before)
            if allocated is not None:
                owner = recorder.owners[allocated]
                peaks[owner] = max(peaks.get(owner, 0), live)
            if at < seen.end:
                live_at_end = live
            before = live
        peaks[seen.head] = max(peaks.get(seen.head, 0), live_at_end + seen.sampling_bytes)
        inside = [peak for owner, peak in peaks.items() if owner in self.blocks or not owner]
        workspace_bytes = max(inside or peaks.values(), default=0) + self._growth(
            kinds, [name for _, name in recorder.marks], live_at_marks
        )
        extra = {owner: peak - workspace_bytes for owner, peak in peaks.items() if owner and owner not in self.blocks}
        left, padded = dict.fromkeys(self.blocks.values(), 0), dict.fromkeys(self.blocks.values(), 0)
        for number in seen.kept:
            block = self.blocks[recorder.owners[number]]
            left[block] += recorder.sizes[number]
            padded[block] += rounded(recorder.sizes[number])
        by_kind = {name: max(left.get(name, 0) for name in kind.names) for kind in kinds for name in kind.names}
        rounding_bytes = sum(max(padded.get(name, 0) - left.get(name, 0) for name in kind.names) * len(kind.names) for kind in kinds)
        return DryRun(
            workspace_bytes + rounding_bytes,
            {owner: peak for owner, peak in extra.items() if peak > 0},
            {name: nbytes for name, nbytes in by_kind.items() if nbytes},
            seen.logits_bytes,
        )

    def _growth(self, kinds: Sequence[Kind], entered: Sequence[str], live: Sequence[int]) -> int:
        """What the layers that are not in the copy would add to what is alive, if each leaves behind what the second of its kind does.

        `live` is what was alive when each of `entered` was. (Before the second layer, the model may hold its inputs beside them.)
        """
        copies = {original: name for name, original in self.blocks.items()}
        at = {name: position for position, name in reversed(list(enumerate(entered[: len(live)])))}
        total_bytes = 0
        for kind in kinds:
            missing = sum(name not in copies for name in kind.names)
            second, third = (at.get(copies.get(name, "")) for name in kind.names[1:3]) if missing else (None, None)
            if second is not None and third is not None:
                total_bytes += missing * max(0, live[third] - live[second])
        return total_bytes


def _caches(output: Any) -> list[Any]:
    """The objects in a model's output that are no tensors or sequences of them: caches."""
    values = output.values() if isinstance(output, Mapping) else []
    return [value for value in values if value is not None and not isinstance(value, torch.Tensor | tuple | list)]


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """The product of rows sorted by expert (rows, in) with stacked experts (experts, in, out), in any dtype."""
    if input.dim() == 2 and weight.dim() == 3:
        return input.new_empty(input.shape[0], weight.shape[2])
    return torch.ops.aten._grouped_mm.default(input, weight, *arguments, **options)


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """As though all elements were true: the most that there can be."""
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.long)


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """In the steps of its kernel, which are not seen from outside."""
    weights = torch.softmax(scores, dim, dtype)
    masked = scores.eq(float("-inf"))
    return weights.masked_fill_(masked.all(dim, keepdim=True), 0.0)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda tensor: False if tensor.dtype == torch.bool else 0,
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
}
