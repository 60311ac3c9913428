"""SGLang on vram: the ``vmm_fd`` transport of its weight cache, and a weight loader for updates in place.

SGLang finds this by its entry point ``sglang.srt.plugins``. Its memory saver is torch_memory_saver: see
:mod:`.torch_memory_saver`.

Written against SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from typing import Any

import vram

from ..entries.lease import Lease
from ..errors import PeerError, UsageError

__all__ = ["register", "send_update", "update"]

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


def send_update(engine: Any, name: str, version: int, *, flush_cache: bool = True) -> None:
    """Have an engine load what was written into an entry, in a session of SGLang's: begin, update, end.

    SGLang answers with a pair or a dictionary and raises nothing; here each refusal is an error. The session is ended
    also after an update that failed.

    Parameters
    ----------
    engine : sglang.Engine
        Or SGLang's ``HttpServerEngineAdapter``. It was given ``--custom-weight-loader vram.engines.sglang.update``.
    name : str
        The entry, published by this user with ``updatable=True``.
    version : int
        1 more than how often it was updated.
    flush_cache : bool
        Whether SGLang drops what it has cached of the weights of before. It cannot while it has requests.

    Raises
    ------
    UsageError
        If the entry was published without ``updatable=True``. Nothing was sent.
    NotFoundError
        If there is no such entry. Nothing was sent.
    PeerError
        If SGLang refused one of the calls, with what it said. Unless it says otherwise, the engine's weights are
        those of before where it refused the first one; else send the update again before it serves.
    """
    import torch

    if not vram.entry(name).updatable:  # an engine whose loader raises an error ends
        raise UsageError(f"{name!r} was published without updatable=True: publish it with that")
    _call(engine, "begin_weight_update")
    try:
        # SGLang passes tensors as descriptors, which only processes that share a key of multiprocessing's can take, and
        # ends otherwise. A tensor without elements has none: its shape says the version.
        pairs = [(name, torch.empty(version, 0))]
        _call(engine, "update_weights_from_tensor", pairs, load_format=f"{__name__}.update", flush_cache=flush_cache)
    except BaseException:
        with contextlib.suppress(Exception):
            engine.end_weight_update()
        raise
    _call(engine, "end_weight_update")


def _call(engine: Any, name: str, *arguments: Any, **options: Any) -> None:
    """Call a method of SGLang's, and raise :class:`PeerError` unless it says that it succeeded."""
    try:
        answer = getattr(engine, name)(*arguments, **options)
    except OSError as error:  # of SGLang's client over HTTP, whose refusals have a response
        if (response := getattr(error, "response", None)) is None:
            raise
        raise PeerError(f"SGLang refused {name}: {response.text}") from error
    if isinstance(answer, dict):
        success, message = answer.get("success"), answer.get("message")
    elif isinstance(answer, tuple) and len(answer) >= 2:
        success, message = answer[:2]
    else:
        success, message = None, f"an answer that is neither a pair nor a dictionary: {answer!r:.80}"
    if success is not True:
        raise PeerError(f"SGLang refused {name}: {message}")


def update(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Load what a trainer has written into an entry: ``--custom-weight-loader vram.engines.sglang.update``.

    The trainer publishes with ``updatable=True``, writes with :func:`vram.update`, and calls :func:`send_update`. That
    calls SGLang's ``update_weights_from_tensor`` with ``load_format="vram.engines.sglang.update"`` and one pair in
    place of weights: the name of the entry, and a tensor that holds 1 more than how often it was updated, or has that
    many rows and no columns.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which loads by its ``load_weights``.
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
        number = int(version.item()) if version.numel() else version.shape[0]
        lease.wait(newer_than=number - 1, timeout=_TIMEOUT)
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
