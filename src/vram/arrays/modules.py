"""Modules of PyTorch: their tensors by name, and modules over tensors that are there. torch stays optional."""

from __future__ import annotations

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

    def __init__(self, module: torch.nn.Module) -> None:
        self._module: Any = module
        self._tensors: dict[str, Any] = dict(module.state_dict(keep_vars=True))
        torch = import_torch()
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
            if value.is_meta:
                raise UsageError(f"{name!r:.80} of the {type(module).__name__} is on meta: load the module first")

    def __getitem__(self, name: str) -> Any:
        value = self._tensors[name]
        return value if isinstance(value, Array) else value.detach()

    def __setitem__(self, name: str, array: Any) -> None:
        tensor = self._tensors[name]
        if self._module is not None:  # the first one; nothing may write to what will be read-only, as BatchNorm does
            self._module.eval()
            self._module = None
        tensor.data = array.torch()
        tensor.requires_grad_(False)
        self._tensors[name] = array

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def module_over(make: Callable[[], Any] | torch.nn.Module, tensors: Mapping[str, torch.Tensor], of: str) -> Any:
    """Return a module whose parameters and persistent buffers are the tensors; `of` is their name in errors.
    See :meth:`vram.Lease.module`."""
    module: Any = make if is_module(make) else _without_parameters(make)
    what = f"a {type(module).__name__} on {of}"
    module.requires_grad_(False).eval()
    tied = _tied(module)
    given = dict(tensors)
    for names in tied:  # a checkpoint often has one of them alone
        known = next((name for name in names if name in given), None)
        if known is not None:
            given |= dict.fromkeys(names, given[known])
    try:
        found = module.load_state_dict(given, strict=False, assign=True)
    except RuntimeError as error:  # of other shapes: torch names them
        raise MismatchError(f"{what} was made in another way than the published one: {error}") from None
    differing = (("of its tensors are not here", found.missing_keys), ("have no place in it", found.unexpected_keys))
    wrong = [
        f"{len(names)} {words}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
        for words, names in differing
        if names
    ]
    if wrong:
        raise MismatchError(f"{what}: {'; '.join(wrong)}. Have it made as the published one was")
    for names in tied:
        first = module.get_parameter(names[0])
        for name in names[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first)
    devices = {tensor.device for tensor in given.values()}
    _finish(module, devices.pop() if len(devices) == 1 else None, what)
    return module


def _without_parameters(make: Any) -> Any:
    """Call a function that makes a module, whose parameters take no memory: they are on meta. Buffers are made as ever,
    since those that are not published have their values from nowhere else."""
    torch: Any = import_torch()
    if not callable(make):
        raise UsageError(f"a module, or a function that makes one, is wanted, and not {make!r:.60}")
    thread = threading.get_ident()  # torch calls the hook for the modules of all threads
    known = torch.utils.weak.WeakTensorKeyDictionary()  # one parameter under two names stays one

    def on_meta(owner: object, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):  # torch gives it its shape as it loads
            return None
        made = known.get(parameter)
        if made is None:
            made = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            made.__dict__.update(parameter.__dict__)
            known[parameter] = made
        return made

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(on_meta)
    try:
        module = make()
    finally:
        hook.remove()
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
        of_its_own = {**vars(owner), **owner._parameters, **owner._buffers}
        left += [f"{dot}{name}" for name, one in of_its_own.items() if isinstance(one, torch.Tensor) and one.is_meta]
    if left:
        raise UsageError(
            f"{what}: {', '.join(left[:_SHOWN])}{', ...' * (len(left) > _SHOWN)} would have no values. They are not "
            f"published, and were made on meta, or from parameters: pass the function that makes the module, without "
            f"torch.device('meta') in it, and set them after that"
        )
