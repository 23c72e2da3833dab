"""Memory given back, errors that say that it ran out, and the batch size that fits."""

from __future__ import annotations

import errno
import inspect
import traceback
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch

from ..devices import clear_device_cache
from ..errors import TrainingError
from .argument_types import refuse_wrong_arguments

__all__ = ["convert_bytes", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

OUT_OF_MEMORY_WORDS = (
    "out of memory",  # torch on every accelerator, the drivers (CUDA_ERROR_OUT_OF_MEMORY), NCCL, XLA
    "out of device memory",  # SYCL: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY
    "out of host memory",
    "out of resources",  # SYCL: UR_RESULT_ERROR_OUT_OF_RESOURCES
    "resource exhausted",  # XLA
    "can't allocate memory",  # torch's CPU allocator
    "cannot allocate memory",  # the system: mmap, fork
    "not enough memory",  # torch's CPU allocator on Windows
    "insufficient memory",
    "allocation failed",  # HPU: FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed
    "failed to allocate",
    "status alloc failed",  # cuBLAS, cuDNN, cuSOLVER, cuFFT, cuSPARSE
    "cublas status not initialized",  # a handle for which no memory was left
    "cufft alloc failed",
    "cudnn status not supported",  # no algorithm whose workspace fits
    "rocblas status memory error",
    "miopenstatusallocfailed",
)
"""Parts of messages, in lower case with spaces for underscores."""


def release_memory(*objects: Any) -> list[None]:
    """As many None as there are objects, to assign to the names that hold them; then garbage is collected and cached memory freed.

    `model, optimizer = release_memory(model, optimizer)`: what else refers to them keeps them alive.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def convert_bytes(size: float) -> str:
    """`size` bytes in the largest unit that leaves at least 1, by 1024, with up to two decimals: `"1.5 KB"`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether the error, or one that it was raised from, says that memory ran out: by its type, or a library's message."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(exception, OSError) and exception.errno == errno.ENOMEM:
        return True
    text = " ".join(map(str, exception.args)).lower().replace("_", " ")
    if isinstance(exception, RuntimeError) and any(words in text for words in OUT_OF_MEMORY_WORDS):
        return True
    return exception.__cause__ is not None and should_reduce_batch_size(exception.__cause__)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorates a function whose first argument is a batch size: it is called with smaller ones until it does not run out of memory.

    Callers leave that argument out. The size that fitted stays for the calls that follow.

    Args:
        function: what is tried; None: a decorator is returned.
        starting_batch_size: tried first.
        reduce_batch_size_fn: called after each failure, without arguments, for the next size; None: nine tenths, rounded down.

    Raises:
        TypeError: a caller passed the batch size.
        TrainingError: no size fits, down to 1, from the last failure; or a size from `reduce_batch_size_fn` that is no smaller one.
            Whatever `function` raises for other reasons passes through.
    """
    refuse_wrong_arguments(find_executable_batch_size, "find_executable_batch_size", locals())
    if function is None:
        return partial(find_executable_batch_size, starting_batch_size=starting_batch_size, reduce_batch_size_fn=reduce_batch_size_fn)
    batch_size = starting_batch_size

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _refuse_a_batch_size(function, args, kwargs)
        failure: BaseException | None = None
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                failure = error
            # Outside of the handler, so that nothing but the error's own frames holds the tensors that they made.
            _forget_locals(failure)
            clear_device_cache(garbage_collection=True)
            smaller = batch_size * 9 // 10 if reduce_batch_size_fn is None else int(reduce_batch_size_fn())
            if smaller >= batch_size:
                raise TrainingError(
                    f"Batch size {batch_size} did not fit, and reduce_batch_size_fn returned {smaller}: it has to return a smaller one."
                ) from failure
            batch_size = smaller
        raise TrainingError("No executable batch size found, reached zero.") from failure

    return call


def _refuse_a_batch_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        right = f"`{name}({', '.join(list(signature.parameters)[1:])})`"
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            raise TypeError(
                f"{right} cannot be called so: {error}. The batch size is not among the arguments: the decorator gives it."
            ) from None
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called. Remove this, as the decorator already does so: "
            f"{right}."
        ) from error


def _forget_locals(error: BaseException) -> None:
    for failure in _with_causes(error):
        traceback.clear_frames(failure.__traceback__)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        failure = waiting.pop()
        if failure is not None and id(failure) not in seen:
            seen.add(id(failure))
            yield failure
            waiting += [failure.__cause__, failure.__context__]
