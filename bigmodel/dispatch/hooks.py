"""Hooks: objects that act before and after the forward of one module, and the wrapper that calls them."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import DispatchError

__all__ = [
    "DISPATCHED",
    "ModelHook",
    "ModuleReference",
    "SequentialHook",
    "add_hook_to_module",
    "drop_shown_hooks",
    "find_hook",
    "hooks_of",
    "outside_compilation",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound="ModelHook")

DISPATCHED = "_bigmodel_dispatched"
"""The attribute under which a dispatched model carries what belongs to its dispatch. Its `end` is called when the last hook is gone."""

_MOVING_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron", "hpu")
"""Methods that a dispatch puts on the instance of the root module."""


def outside_compilation(function: F) -> F:
    """The same function, never traced by torch.compile. Importing torch's compiler takes seconds, so it is not imported for this."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        # Kept in a dict, not in this closure: where the compiler looks into this frame after all, it loses what is set in closures.
        if function not in _disabled:
            _disabled[function] = torch.compiler.disable(function)
        return _disabled[function](*args, **kwargs)

    _skip(call)
    return call  # type: ignore[return-value]


_WHY_SKIPPED = (
    "bigmodel brings the weights of this module for its forward, which is no part of a graph. Compile the modules whose weights move one "
    "by one (block.compile(fullgraph=True)), or the model without fullgraph=True"
)
"""What torch.compile says where it was asked for one graph."""


def _skip(function: Any) -> None:
    """Lets torch.compile neither trace nor inline `function`, but what it calls. (`torch.compiler.disable` would import the compiler.)"""
    frames: Any = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _WHY_SKIPPED


_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}


class ModelHook:
    """What may happen around a module's forward; every method does nothing by default."""

    is_traced: bool = True
    """Whether torch.compile may trace what the hook does together with the module. Otherwise the module's own forward is compiled alone."""
    only_shows: bool = False
    """Whether it stands for the hook of a module around, and is put on a module without being added to it: then it is as good as none."""
    is_begun_anew: bool = True
    """Whether it is detached and initialized again when another hook is appended to it. It is not where that would move all weights."""
    no_grad: bool = False
    """Whether the forward runs under `torch.no_grad()`; read at each call."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added, and again when another is appended to it. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before each forward; returns the positional and keyword arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after each forward; returns its output."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called in the place of `post_forward` when the forward, or a hook around it, raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed, and before another is appended to it. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes through them in their order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.is_traced = all(hook.is_traced for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entered: list[ModelHook] = []
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                entered.append(hook)
        except BaseException:
            for hook in reversed(entered):
                hook.forward_failed(module)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        done = 0
        try:
            for hook in self.hooks:
                output = hook.post_forward(module, output)
                done += 1
        except BaseException:
            for hook in self.hooks[done + 1 :]:
                hook.forward_failed(module)
            raise
        return output

    def forward_failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class ModuleReference:
    """What stands for a module in what is registered on it: the last reference from outside frees a model, without the cycle collector.

    Called, it gives the module, or None. Copies and pickles refer to the copy of the module.
    """

    __slots__ = ("weak",)

    def __init__(self, module: nn.Module) -> None:
        self.weak = weakref.ref(module)  # torch.compile follows one of this very class

    def __call__(self) -> nn.Module | None:
        return self.weak()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleReference:
        return ModuleReference(deepcopy(self.weak(), memo))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleReference, (self.weak(),)


class OwnForward:
    """A module's own `forward`, as a method bound to it would be, which does not keep the module alive."""

    __slots__ = ("__dict__", "__func__", "__weakref__", "_module")

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.__func__ = function
        self._module = weakref.ref(module)
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise DispatchError("The module that this forward belongs to is gone: keep the model as long as it is called.")
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "__func__"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        return OwnForward(self.__func__, deepcopy(self.__self__, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self.__func__, self.__self__)


def _hooked_forward(reference: ModuleReference, *args: Any, **kwargs: Any) -> Any:
    """What a hooked module's `forward` calls. The hook is looked up at each call, so that it can be exchanged."""
    module = reference.weak()  # a call of the reference itself would be one more frame for every layer
    if module is None:
        raise DispatchError("The module that this forward belongs to is gone: keep the model as long as it is called.")
    hook: ModelHook = module._hf_hook  # type: ignore[assignment]
    own: Any = module._old_forward
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if type(own) is OwnForward:
        # Without a frame of its own, which the compiler would compile for each module.
        own, args = own.__func__, (module, *args)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = own(*args, **kwargs)
        else:
            output = own(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


# The same with code of its own: traced with a hook that brings weights, it would be compiled anew for every module, up to a limit.
_hooked_outside_compilation = types.FunctionType(_hooked_forward.__code__.replace(), globals(), "_hooked_outside_compilation")
_skip(_hooked_outside_compilation)


def _is_graph_module(module: nn.Module) -> bool:
    # torch.fx builds one class per module, named so, and writes a new `forward` into that class when it recompiles.
    return "GraphModuleImpl" in type(module).__name__ and hasattr(module, "graph")


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Adds `hook` to `module`, whose `forward` keeps its name and signature; returns the module.

    A hook that is there already is replaced without being detached or, with `append`, followed by the new one: it is detached and
    initialized again before that, unless it moves weights (`ModelHook.is_begun_anew`).
    """
    earlier = getattr(module, "_hf_hook", None) if _is_hooked(module) else None
    old_forward = module._old_forward if earlier is not None and hasattr(module, "_old_forward") else module.forward
    if isinstance(old_forward, types.MethodType) and old_forward.__self__ is module:
        old_forward = OwnForward(old_forward.__func__, module)
    is_appended = append and isinstance(earlier, ModelHook)
    if is_appended:
        anew = [each for each in hooks_of(module) if each.is_begun_anew]
        for each in anew:
            module = each.detach_hook(module)
        for each in anew:
            module = each.init_hook(module)
    module = hook.init_hook(module)
    module._hf_hook = SequentialHook(earlier, hook) if is_appended else hook  # type: ignore[assignment, arg-type]
    module._old_forward = old_forward  # type: ignore[assignment]
    hooked = _hooked_forward if getattr(module._hf_hook, "is_traced", True) else _hooked_outside_compilation
    wrapper = functools.update_wrapper(functools.partial(hooked, ModuleReference(module)), old_forward)  # type: ignore[arg-type]
    if _is_graph_module(module):
        type(module).forward = staticmethod(wrapper)
    else:
        module.forward = wrapper
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Detaches the module's hook, if it has one, and gives it its own forward back; with `recurse` below it too. Returns the module."""
    if hasattr(module, "_hf_hook"):
        hook = module._hf_hook
        assert isinstance(hook, ModelHook)
        hook.detach_hook(module)
        delattr(module, "_hf_hook")
    if hasattr(module, "_old_forward"):
        if _is_graph_module(module):
            type(module).forward = module._old_forward.__func__  # type: ignore[union-attr, assignment]
        else:
            old_forward = module._old_forward
            if getattr(old_forward, "__func__", None) is type(module).forward and getattr(old_forward, "__self__", None) is module:
                del module.forward
            elif isinstance(old_forward, OwnForward):
                module.forward = types.MethodType(old_forward.__func__, module)
            else:
                module.forward = old_forward  # type: ignore[assignment]
        delattr(module, "_old_forward")
    for method in _MOVING_METHODS:
        module.__dict__.pop(method, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    dispatched = module.__dict__.get(DISPATCHED)
    if dispatched is not None and not any(_is_hooked(part) for part in module.modules()):
        dispatched.end(module)
    return module


def _is_hooked(module: nn.Module) -> bool:
    """Whether a hook was added to the module, or put in the place of one that was."""
    hook = getattr(module, "_hf_hook", None)
    return hook is not None and not (getattr(hook, "only_shows", False) and not hasattr(module, "_old_forward"))


def drop_shown_hooks(model: nn.Module) -> None:
    """Takes hooks that only show something off all modules."""
    for module in model.modules():
        if "_hf_hook" in module.__dict__ and not _is_hooked(module):
            del module._hf_hook


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes all hooks on `module` and below."""
    remove_hook_from_module(module, recurse=True)


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """The module's hooks in their order, those inside a `SequentialHook` one by one."""
    found: list[ModelHook] = []
    waiting: list[object] = [getattr(module, "_hf_hook", None)]
    while waiting:
        hook = waiting.pop(0)
        if isinstance(hook, SequentialHook):
            waiting = [*hook.hooks, *waiting]
        elif isinstance(hook, ModelHook):
            found.append(hook)
    return found


def find_hook(module: nn.Module, kind: type[H]) -> H | None:
    """The module's first hook of class `kind`, also inside a `SequentialHook`; None without one."""
    return next((hook for hook in hooks_of(module) if isinstance(hook, kind)), None)
