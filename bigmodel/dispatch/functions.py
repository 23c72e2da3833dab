"""The functions that a placeholder answers without fetching its whole value: metadata, casts, copies into it, embeddings by rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..errors import DispatchError
from ..protocols import UNTRAINABLE
from .lazy import HANDLERS, METADATA, VIEWERS, LazyTensor
from .origin import CPU, Origin
from .views import View, alike, iterate, view_by_strides, view_of

__all__ = ["execution_devices", "fill_tables", "shows_execution_devices"]


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return _alias_of(args[0])


def _alias_of(lazy: LazyTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        stand_in = torch.empty_strided(lazy.size(), lazy.stride(), dtype=lazy.dtype, device="meta")
    return LazyTensor.of(lazy.origin, stand_in=stand_in)


def _set_data_of(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, value = args[:2]
    if not isinstance(lazy, LazyTensor):  # a real tensor takes a placeholder's values
        return NotImplemented
    if not isinstance(value, LazyTensor):
        lazy.adopt(Origin.of_value(value, lazy.origin))
    elif value.origin is not lazy.origin:
        lazy.adopt(value.origin)
    return None


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    """`tensor.set_(source)`: like assigning `.data`."""
    lazy, *rest = args
    if not isinstance(lazy, LazyTensor):
        return NotImplemented
    source = rest[0] if rest else kwargs.get("source")
    if len(rest) + len(kwargs) != 1 or not isinstance(source, torch.Tensor):
        raise DispatchError(f"{lazy.origin.label} is offloaded and has no storage that could be set: assign its .data, or copy_ into it.")
    if source.dtype != lazy.dtype:
        raise RuntimeError(f"set_() cannot change {lazy.origin.label} from {lazy.dtype} to {source.dtype}.")
    _set_data_of(func, (lazy, source), {})
    return lazy


def _ask_gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """`tensor.requires_grad_(…)`, `tensor.requires_grad = …`. Raises the parameter's own error where it cannot be trained."""
    lazy = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted and UNTRAINABLE in lazy.__dict__:
        raise lazy.__dict__[UNTRAINABLE]()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _cast(lazy: LazyTensor, dtype: torch.dtype | None, copy_asked: bool = False) -> Any:
    if dtype is None or dtype == lazy.dtype:
        return LazyTensor.of(lazy.origin.copy()) if copy_asked else lazy
    return LazyTensor.of(lazy.origin.copy((dtype,)))


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    lazy, *rest = args
    other = kwargs.get("other", rest[0] if rest else None)
    if not isinstance(lazy, LazyTensor):  # a real tensor goes where a lazy one is used, and takes its dtype
        return lazy.to(other.origin.device, other.dtype) if isinstance(other, LazyTensor) and not kwargs else NotImplemented
    copy_asked = bool(kwargs.get("copy", False))
    device: torch.device | None
    dtype: torch.dtype | None
    if isinstance(other, torch.Tensor):
        device, dtype = other.device, other.dtype
    else:
        known = {key: value for key, value in kwargs.items() if key != "copy"}
        parsed = torch._C._nn._parse_to(*rest[:3], **known)
        device, dtype = cast(tuple[torch.device | None, torch.dtype | None], parsed[:2])
        copy_asked = copy_asked or (len(rest) > 3 and bool(rest[3]))
    if device is None or device.type == "meta":  # where it says that it is: `tensor.to(weight.device)` loses no values
        return _cast(lazy, dtype, copy_asked)
    value = lazy.origin.fetch(device)
    return value if dtype is None else value.to(dtype)


def _to_dtype(dtype: torch.dtype) -> Callable[[Any, Any, Any], Any]:
    return lambda func, args, kwargs: _cast(args[0], dtype)


def _on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], LazyTensor):
        return NotImplemented
    value = args[0].origin.fetch(CPU)
    return func(value, *args[1:], **kwargs)


def _on_numpy(func: Any, args: Any, kwargs: Any) -> Any:
    """A numpy array of the values. It is a copy, so writing to it raises instead of being lost."""
    array = _on_cpu(func, args, kwargs)
    if array is not NotImplemented:
        array.flags.writeable = False
    return array


def _repr(func: Any, args: Any, kwargs: Any) -> Any:
    text = _on_cpu(func, args, kwargs)
    return f"Parameter containing:\n{text}" if args[0]._is_param else text


def _dlpack(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = args[0]
    if not kwargs.get("copy"):
        raise DispatchError(f"{lazy.origin.label} is offloaded and has no memory to share by DLPack: pass a copy on, such as weight.cpu().")
    return func(lazy.origin.fetch(), *args[1:], **kwargs)


def _dlpack_device(func: Any, args: Any, kwargs: Any) -> Any:
    return func(torch.empty(0, device=args[0].origin.device))


def _contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    memory_format = kwargs.get("memory_format", args[1] if len(args) > 1 else torch.contiguous_format)
    is_so = args[0].is_contiguous() and memory_format in (torch.contiguous_format, torch.preserve_format)
    return args[0] if is_so else NotImplemented


def _copy_(func: Any, args: Any, kwargs: Any) -> Any:
    lazy = args[0]
    source = args[1] if len(args) > 1 else kwargs["src"]
    if not isinstance(lazy, LazyTensor):
        return NotImplemented
    if isinstance(source, LazyTensor):
        if source.origin is lazy.origin:
            return lazy
        source = source.origin.fetch(CPU)
    if not isinstance(source, torch.Tensor):
        source = torch.as_tensor(source)
    lazy.origin.write(source.detach().expand(lazy.shape).to(lazy.dtype))
    return lazy


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """`zeros_like` and its kin need shape and dtype alone; what they make lives where the values would be read."""
    lazy = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(lazy, LazyTensor):
        return NotImplemented
    device = kwargs.get("device")
    kwargs = {**kwargs, "device": lazy.origin.device if device is None else device}
    stand_in = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
    return func(stand_in, *args[1:], **{key: value for key, value in kwargs.items() if key not in ("input", "self")})


def _embedding(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """`F.embedding` of an offloaded table: only the rows that occur are read."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, table = given["input"], given["weight"]
    if isinstance(ids, LazyTensor) or given.get("max_norm") is not None or given.get("sparse") or table.dim() != 2:
        return NotImplemented
    if ids.dtype not in (torch.int64, torch.int32):  # torch says so
        return NotImplemented
    group = table.origin.group() if table.origin.group is not None else None
    if group is not None and group.in_use:
        return NotImplemented
    store, casts = table.origin.source
    if isinstance(table.origin, View) or (casts and not store.spec(table.origin.name).dtype.is_floating_point):
        return NotImplemented
    rows, inverse = torch.unique(ids, return_inverse=True)
    rows = rows.to(CPU, torch.int64)
    if rows.numel() and not (int(rows[0]) >= 0 and int(rows[-1]) < table.shape[0]):
        raise IndexError(
            f"index out of range in self: {table.origin.label} has {table.shape[0]} rows, "
            f"the ids go from {int(rows[0])} to {int(rows[-1])}."
        )
    if table.requires_grad and torch.is_grad_enabled():
        table.origin.tally.no_gradient(table.origin.label)
    return F.embedding(inverse.to(table.origin.device), table.origin.fetch_rows(rows))


def _is_meta(func: Any, args: Any, kwargs: Any) -> bool:
    # `is_meta` asks whether there is no data; here there is, and `load_state_dict` would warn that copying is a no-op.
    return False


_shows_execution_devices: ContextVar[bool] = ContextVar("shows_execution_devices", default=False)


def shows_execution_devices() -> bool:
    """Whether this is inside of `execution_devices`."""
    return _shows_execution_devices.get()


@contextlib.contextmanager
def execution_devices() -> Iterator[None]:
    """Within the context, in this thread, offloaded weights answer `.device` with the device that they run on, instead of `meta`.

    For code that puts something of its own beside a weight, where the weight says that it is: adapters, for instance.
    """
    token = _shows_execution_devices.set(True)
    try:
        yield
    finally:
        _shows_execution_devices.reset(token)


def _device(func: Any, args: Any, kwargs: Any) -> Any:
    """Meta between forwards; the device that it runs on in the forward of an embedding that rests, which puts there what it makes, and
    within `execution_devices`."""
    if shows_execution_devices():
        return args[0].origin.device
    group = args[0].origin.group() if args[0].origin.group is not None else None
    return args[0].origin.device if group is not None and group.is_looked_up else torch.device("meta")


_T: Any = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names if hasattr(_T, name)}


def _methods(owner: Any, *names: str) -> set[Any]:
    return {getattr(owner, name) for name in names if hasattr(owner, name)}


_METADATA_FUNCTIONS: set[Any] = (
    _getters(
        "shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names", "_version", "nbytes",
        "itemsize", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_mkldnn",
        "output_nr", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_is_view", "is_ipu", "is_maia",
        "is_vulkan", "is_xla", "is_mtia", "is_hpu", "_has_symbolic_sizes_strides", "grad_dtype",
    )
    | {_T.grad.__set__, _T.grad.__delete__}
    | _methods(
        _T,
        "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
        "is_signed", "__len__", "data_ptr", "untyped_storage", "get_device", "register_hook", "is_pinned", "is_inference",
        "register_post_accumulate_grad_hook", "retain_grad", "is_shared", "has_names", "is_conj", "is_neg", "ndimension", "dim_order",
        "_is_view", "is_same_size", "dense_dim", "sparse_dim",
    )
    | _methods(
        torch,
        "is_floating_point", "is_complex", "is_signed", "numel", "result_type", "is_same_size", "is_inference", "is_conj", "is_neg",
        "_has_compatible_shallow_copy_type",
    )
)  # fmt: skip

_HANDLED: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _T.detach: _alias,
    torch.detach: _alias,
    _T.data.__get__: _alias,
    _T.data.__set__: _set_data_of,
    _T.to: _to,
    _T.half: _to_dtype(torch.float16),
    _T.bfloat16: _to_dtype(torch.bfloat16),
    _T.float: _to_dtype(torch.float32),
    _T.double: _to_dtype(torch.float64),
    _T.cpu: lambda func, args, kwargs: args[0].origin.fetch(CPU),
    _T.numpy: _on_numpy,
    _T.tolist: _on_cpu,
    _T.__array__: _on_numpy,
    _T.__repr__: _repr,
    _T.__dlpack__: _dlpack,
    _T.__dlpack_device__: _dlpack_device,
    _T.set_: _set,
    _T.requires_grad.__set__: _ask_gradients,
    _T.requires_grad_: _ask_gradients,
    _T.__iter__: iterate,
    _T.view_as: alike(_T.view),
    _T.reshape_as: alike(_T.reshape),
    _T.expand_as: alike(_T.expand),
    _T.__format__: _on_cpu,
    _T.contiguous: _contiguous,
    _T.copy_: _copy_,
    _T.device.__get__: _device,
    _T.is_meta.__get__: _is_meta,
    F.embedding: _embedding,
    **dict.fromkeys(
        _methods(torch, "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
        | _methods(_T, "new_empty", "new_zeros", "new_ones", "new_full"),
        _like,
    ),
}

_VIEWS = (
    _methods(
        _T,
        "view", "t", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "narrow", "select", "reshape", "expand",
        "movedim", "swapaxes", "diagonal", "__getitem__", "ravel", "moveaxis", "swapdims", "unfold", "as_strided",
        "chunk", "split", "split_with_sizes", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit",
    )
    | _methods(
        torch,
        "t", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "narrow", "select", "reshape", "movedim", "swapaxes", "ravel",
        "unflatten", "moveaxis", "swapdims", "diagonal", "as_strided", "chunk", "split", "split_with_sizes", "unbind", "tensor_split",
        "hsplit", "vsplit", "dsplit", "view_as_real", "view_as_complex",
    )
    | _getters("T", "mT", "H", "mH", "real", "imag")
)  # fmt: skip


def fill_tables() -> None:
    """Makes lazy tensors know these functions."""
    METADATA.update(_METADATA_FUNCTIONS)
    HANDLERS.update(dict.fromkeys(_VIEWS, view_of))
    HANDLERS.update(_HANDLED)
    VIEWERS.append(view_by_strides)
