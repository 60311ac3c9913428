"""Modules of PyTorch: their tensors by name, and modules over tensors that are there. torch stays optional."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ..errors import MismatchError, UsageError
from .array import Array
from .torch import import_torch

if TYPE_CHECKING:
    import torch

_SHOWN = 3  # names in an error


def is_module(value: object) -> bool:
    """Whether a value is a module of torch. Does not import torch: who has a module did."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


class ModuleTensors(MutableMapping[str, Any]):
    """The parameters and persistent buffers of a module by name, as in its ``state_dict``.

    An array put in place of one becomes the memory of the module's tensor, so that the module is whole at any time.
    """

    def __init__(self, module: torch.nn.Module, *, moves: bool = False) -> None:
        self._module: Any = module
        self._tensors: dict[str, Any] = dict(module.state_dict(keep_vars=True))
        torch = import_torch()
        own = {id(one) for one in (*module.parameters(), *module.buffers())} if moves else set()
        for name, value in self._tensors.items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{name!r:.80} in the state of the {type(module).__name__} is of type {type(value).__name__}, and "
                    f"not a tensor: publish a mapping of what are tensors, without it"
                )
            if type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "__tensor_flatten__"):
                raise UsageError(
                    f"{name!r:.80} of the {type(module).__name__} is a {type(value).__name__}, which has several "
                    f"tensors inside: publish a mapping of those, and put it together from them where it is attached"
                )
            if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
                raise UsageError(f"{name!r:.80} of the {type(module).__name__} has no shape yet: call the module once")
            if value.is_meta:
                raise UsageError(f"{name!r:.80} of the {type(module).__name__} is on meta: load the module first")
            if moves and id(value) not in own:
                raise UsageError(
                    f"{name!r:.80} in the state of the {type(module).__name__} is none of its own tensors, which could "
                    f"be moved: publish it without consume=True"
                )

    def __getitem__(self, name: str) -> Any:
        value = self._tensors[name]
        return value if isinstance(value, Array) else value.detach()

    def __setitem__(self, name: str, array: Any) -> None:
        tensor = self._tensors[name]
        if self._module is not None:  # the first one; nothing may write to what will be read-only, as BatchNorm does
            self._module.eval()
            self._module = None
        tensor.data = array.torch()
        tensor.requires_grad_(False).grad = None  # an optimizer leaves such a tensor alone
        self._tensors[name] = array

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def module_over(make: Callable[[], Any] | torch.nn.Module, tensors: Mapping[str, torch.Tensor], of: str) -> Any:
    """Return a module on tensors, as :meth:`vram.Lease.module` says it; `of` is their name in errors."""
    with _building(None):  # another function may be making a module in this thread, of which this one is a part
        module: Any = make if is_module(make) else _without_parameters(make)
        what = f"a {type(module).__name__} on {of}"
        tied = _tied(module)
        given = _with_tied(dict(tensors), tied, what)
        _check_state(module, given, what)
        module.requires_grad_(False).eval()
        try:
            module.load_state_dict(given, assign=True)
        except RuntimeError as error:  # of a module with rules of its own
            raise MismatchError(f"{what} was made in another way than the published one: {error}") from None
        for names in tied:
            first = module.get_parameter(names[0])
            for name in names[1:]:
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, first)
        devices = {tensor.device for tensor in given.values()}
        _finish(module, devices.pop() if len(devices) == 1 else None, what)
    return module


def _with_tied(given: dict[str, Any], tied: list[list[str]], what: str) -> dict[str, Any]:
    """Return the tensors with each tied parameter under all its names; a checkpoint often has one of them alone."""
    torch = import_torch()
    for names in tied:
        known = [name for name in names if name in given]
        for other in known[1:]:
            one, two = given[known[0]], given[other]
            if one.data_ptr() != two.data_ptr() and not (one.shape == two.shape and torch.equal(one, two)):
                raise MismatchError(f"{what}: {known[0]} and {other} are one parameter in it, and differ here")
        given |= dict.fromkeys(names, given[known[0]]) if known else {}
    return given


def _check_state(module: Any, given: Mapping[str, Any], what: str) -> None:
    """Raise MismatchError, with nothing changed, unless the tensors are those of the module."""
    torch = import_torch()
    state = {name: one for name, one in module.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
    lazy = torch.nn.parameter.UninitializedTensorMixin  # its shape is that of what is loaded
    shapes = [
        f"{name} ({tuple(one.shape)} in it, {tuple(given[name].shape)} here)"
        for name, one in state.items()
        if name in given and not isinstance(one, lazy) and one.shape != given[name].shape
    ]
    differing = (
        ("of its tensors are not here", [name for name in state if name not in given]),
        ("have no place in it", [name for name in given if name not in state]),
        ("have another shape", shapes),
    )
    wrong = [
        f"{len(names)} {words}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
        for words, names in differing
        if names
    ]
    if wrong:
        raise MismatchError(f"{what}: {'; '.join(wrong)}. Have it made as the published one was")


_made = threading.local()  # `known`: the parameters of the module that a thread makes, and those on meta instead


@contextlib.contextmanager
def _building(known: Any) -> Iterator[None]:
    """Have the parameters that this thread registers in a block go to meta; or, with None, stay where they are."""
    before = getattr(_made, "known", None)
    _made.known = known
    try:
        yield
    finally:
        _made.known = before


def _on_meta(owner: object, name: str, parameter: Any) -> Any:
    """Return what is registered in place of a parameter; None for itself."""
    known = getattr(_made, "known", None)
    if known is None or parameter is None or parameter.is_meta:
        return None
    torch = import_torch()
    if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):  # torch gives it its shape as it loads
        return None
    made = known.get(parameter)
    if made is None:
        made = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        made.__dict__.update(parameter.__dict__)
        known[parameter] = made
    return made


@functools.cache
def _hook() -> object:
    """Have torch ask :func:`_on_meta`, from the first time on: it goes through its hooks in other threads meanwhile."""
    return import_torch().nn.modules.module.register_module_parameter_registration_hook(_on_meta)


def _without_parameters(make: Any) -> Any:
    """Return the module that a function makes, with parameters on meta, which take no memory, and buffers made."""
    torch: Any = import_torch()
    if not callable(make):
        raise UsageError(f"a module, or a function that makes one, is wanted, and not {make!r:.60}")
    _hook()
    try:
        with _building(torch.utils.weak.WeakTensorKeyDictionary()):  # one parameter under two names stays one
            module = make()
    except RuntimeError as error:  # of torch, which has no class of its own for a tensor without values
        if "meta" not in str(error):
            raise
        raise UsageError(
            f"the function reads its parameters, which have no values while it makes the module ({error}): pass the "
            f"module that it makes"
        ) from error
    if not is_module(module):
        raise UsageError(f"the function returned {module!r:.60}, and not a module of torch")
    return module


def _tied(module: Any) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _finish(module: Any, device: Any, what: str) -> None:
    """Move the buffers that were not published to where the rest is, and see that nothing is left on meta."""
    torch = import_torch()
    left: list[str] = []
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in owner._buffers.items():
            if buffer is not None and device is not None and not buffer.is_meta and buffer.device != device:
                owner._buffers[name] = buffer.to(device)
        for name, one in {**vars(owner), **owner._parameters, **owner._buffers}.items():
            inside = one if isinstance(one, (list, tuple)) else [one]
            if any(isinstance(each, torch.Tensor) and each.is_meta for each in inside):
                left.append(f"{dot}{name}")
    if left:
        raise UsageError(
            f"{what}: {', '.join(left[:_SHOWN])}{', ...' * (len(left) > _SHOWN)} would have no values. They are not "
            f"published, and were made on meta, or from parameters: pass the function that makes the module, without "
            f"torch.device('meta') in it, and set them after that"
        )
