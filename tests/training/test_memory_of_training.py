"""The batch size that fits, found by whatever way memory runs out."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bigmodel.errors import TrainingError
from bigmodel.training.memory import convert_bytes, find_executable_batch_size, release_memory, should_reduce_batch_size

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    MemoryError("std::bad_alloc", 1),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: out of memory", 2),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB)"),
    RuntimeError("NPU out of memory. Tried to allocate"),
    RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1024"),
    RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 2.0G"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("unable to mmap 1024 bytes from file </x>: Cannot allocate memory (12)"),
    RuntimeError("Caught OutOfMemoryError in DataLoader worker process 0.\ntorch.OutOfMemoryError: CUDA out of memory."),
]  # fmt: skip

OTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)"),
    RuntimeError(),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    ValueError("the description mentions out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyError("out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_every_way_to_run_out_of_memory_is_known(error: Exception) -> None:
    assert should_reduce_batch_size(error)


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_other_errors_are_others(error: Exception) -> None:
    assert not should_reduce_batch_size(error)


def test_the_error_that_another_was_raised_from_counts() -> None:
    outer = KeyError("step 3")
    outer.__cause__ = ValueError("wrapped")
    assert not should_reduce_batch_size(outer)
    outer.__cause__.__cause__ = MemoryError()
    assert should_reduce_batch_size(outer)


def test_a_real_allocation_that_fails_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def fails_above(limit: int, error: Exception) -> tuple[Callable[..., Any], list[int]]:
    tried: list[int] = []

    def train(batch_size: int, *words: str) -> tuple[Any, ...]:
        tried.append(batch_size)
        if batch_size > limit:
            raise error
        return (batch_size, *words)

    return train, tried


def test_nine_tenths_until_it_fits_and_the_size_stays() -> None:
    train, tried = fails_above(110, OUT_OF_MEMORY[0])
    decorated = find_executable_batch_size(train)
    assert decorated("a", "b") == (103, "a", "b")
    assert tried == [128, 115, 103]
    assert decorated() == (103,)
    assert tried[3:] == [103]


def test_the_next_size_is_nine_tenths_rounded_down() -> None:
    train, tried = fails_above(0, MemoryError())
    with pytest.raises(TrainingError, match=r"^No executable batch size found, reached zero\.$"):
        find_executable_batch_size(train, starting_batch_size=4)()
    assert tried == [4, 3, 2, 1]
    assert all(size * 9 // 10 == int(size * 0.9) for size in range(1, 100_000))


def test_the_last_failure_is_the_cause() -> None:
    error = RuntimeError("CUDA error: out of memory")
    train, _ = fails_above(0, error)
    with pytest.raises(RuntimeError, match="reached zero") as caught:
        find_executable_batch_size(train, starting_batch_size=2)()
    assert caught.value.__cause__ is error
    with pytest.raises(RuntimeError, match="reached zero") as caught:
        find_executable_batch_size(train, starting_batch_size=0)()
    assert caught.value.__cause__ is None


def test_a_decorator_with_its_own_next_size() -> None:
    sizes = iter([48, 20, 5])
    tried = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int, scale: int = 1) -> int:
        """Trains."""
        tried.append(batch_size)
        if batch_size > 10:
            raise MemoryError
        return batch_size * scale

    assert train.__name__ == "train"
    assert train.__doc__ == "Trains."
    assert train(scale=3) == 15
    assert tried == [64, 48, 20, 5]


def test_a_next_size_that_is_no_smaller_would_never_end() -> None:
    train, tried = fails_above(0, MemoryError())
    with pytest.raises(TrainingError, match="Batch size 8 did not fit, and reduce_batch_size_fn returned 8") as caught:
        find_executable_batch_size(train, starting_batch_size=8, reduce_batch_size_fn=lambda: 8)()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert tried == [8]


def test_other_errors_pass_through() -> None:
    error = ValueError("not about memory")
    train, tried = fails_above(0, error)
    with pytest.raises(ValueError, match="not about memory") as caught:
        find_executable_batch_size(train)()
    assert caught.value is error
    assert tried == [128]


def test_a_batch_size_from_the_caller_is_refused() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str, steps: int = 1) -> int:
        return batch_size

    assert train("model") == 128
    assert train("model", 3) == 128
    with pytest.raises(TypeError, match=r"Batch size was passed into `train` as the first argument.*`train\(model, steps\)`"):
        train(64, "model", 3)
    with pytest.raises(TypeError, match="Batch size was passed into `train`"):
        train(batch_size=64, model="model")
    with pytest.raises(TypeError, match="unexpected keyword argument 'stops'"):
        train("model", stops=3)


def test_what_the_failed_call_held_is_gone_before_the_next(accelerators: Any) -> None:
    (device,) = accelerators(1, memory="64MiB")

    @find_executable_batch_size(starting_batch_size=80, reduce_batch_size_fn=iter([40, 30]).__next__)
    def train(batch_size: int) -> int:
        held = torch.zeros(batch_size // 2, 2**20, dtype=torch.uint8, device=device)
        more = torch.zeros(batch_size, 2**20, dtype=torch.uint8, device=device)
        assert held.device == more.device
        return batch_size

    assert train() == 40


class Held:
    other: object = None


def test_objects_and_garbage_are_released() -> None:
    model, optimizer, garbage = Held(), Held(), Held()
    garbage.other = garbage
    gone = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(garbage)]
    del garbage
    model, optimizer = release_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    assert [reference() for reference in gone] == [None, None, None]
    assert release_memory(Held()) == [None]
    assert release_memory() == []


def test_bytes_in_the_ecosystems_units() -> None:
    sizes = [0, 1023, 1024, 1.5 * 1024**2, 1024**3, 1024**4, 3 * 1024**5, 4096 * 1024**5]
    assert [convert_bytes(size) for size in sizes] == [
        "0 bytes", "1023 bytes", "1.0 KB", "1.5 MB", "1.0 GB", "1.0 TB", "3.0 PB", "4096.0 PB",
    ]  # fmt: skip
