"""SGLang on vram: the ``vmm_fd`` transport of its weight cache, and a weight loader for updates in place.

SGLang finds this by its entry point ``sglang.srt.plugins``. Its memory saver is torch_memory_saver: see
:mod:`.torch_memory_saver`.

Written against SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import vram

from ..entries.lease import Lease
from ..errors import UsageError

__all__ = ["register", "update"]

_log = logging.getLogger(__name__)
_TIMEOUT = 60.0  # seconds for a trainer to finish what it has announced
_leases: dict[str, Lease] = {}  # by the entry's name; as long as the process


def register() -> None:
    """Put the transport in the place that SGLang keeps for it. May be called again.

    SGLang calls this wherever vram is installed, wanted or not: one that lacks what this needs runs on without it.
    """
    try:
        _register()
    except (ImportError, AttributeError) as error:
        _log.warning("vram registered nothing: its adapter was written for SGLang 0.5.23, and not for this: %s", error)


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sglang_transport import VramTransportBackend

    target = "sglang.srt.weight_cache.transport.VmmFdTransportBackend"
    if not any(hook is VramTransportBackend for _, hook, _ in HookRegistry._hooks.get(target, ())):
        HookRegistry.register(target, VramTransportBackend, HookType.REPLACE)


def update(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Load what a trainer has written into an entry: ``--custom-weight-loader vram.engines.sglang.update``.

    The trainer publishes with ``updatable=True``, writes with :func:`vram.update`, and calls SGLang's
    ``update_weights_from_tensor`` with ``load_format="vram.engines.sglang.update"`` and one pair in place of weights:
    the name of the entry, and a tensor with 1 more than how often it was updated.

    Parameters
    ----------
    model : torch.nn.Module
        What loads, by its ``load_weights``.
    named_tensors : iterable of (str, torch.Tensor)
        Entries, and the update of each that is waited for.

    Raises
    ------
    UsageError
        If an entry was published without ``updatable=True``.
    WaitTimeoutError
        If the update was not complete within a minute.
    """
    import torch

    for name, version in named_tensors:
        lease = _lease(name)
        lease.wait(newer_than=int(version.item()) - 1, timeout=_TIMEOUT)
        with lease.reading(timeout=_TIMEOUT):
            model.load_weights(list(lease.torch().items()))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # it may still be copying out of there


def _lease(name: str) -> Lease:
    """Return the lease on the current version of an entry."""
    lease = _leases.get(name)
    if lease is not None and lease.is_stale():
        lease.close()
        lease = None
    if lease is None:
        lease = vram.attach(name, owner=os.getuid())  # anybody may publish under a name that is free
        if not lease.updatable:
            lease.close()
            raise UsageError(f"{name!r} was published without updatable=True: attach it, or publish it with that")
        _leases[name] = lease
    return lease
