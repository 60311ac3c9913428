"""Ray on vram: a tensor transport of Ray's direct transport, ``@ray.method(tensor_transport="VRAM")``.

Call :func:`register` before the class body of the first actor whose methods name the transport; Ray passes it on to the
actors that this process makes. The transport itself is in :mod:`.ray_transport`, which Ray imports in each of them::

    from vram.engines.ray import register

    register()

    @ray.remote
    class Loader:
        @ray.method(tensor_transport="VRAM")
        def load(self):
            return {"weights": vram.zeros((1 << 20,), device="host"), "ids": np.arange(10)}

Written against Ray 2.60.0, whose direct transport is of its alpha API.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import vram

from ..errors import NotFoundError, UnsupportedError
from .ray_sources import SOURCE, TRANSPORT, Process, prefix

if TYPE_CHECKING:
    from ..keeper.private import Keeper

__all__ = ["register", "sweep"]

_WRITTEN_FOR = "2.60"


def register() -> None:
    """Tell Ray of the transport, in the process that makes the actors. May be called again.

    Raises
    ------
    UnsupportedError
        If there is no Ray here, or one without the interface that the transport was written for.
    """
    try:
        import ray
        from ray.experimental import register_tensor_transport
        from ray.experimental.rdt.util import transport_manager_info
    except ImportError as error:
        raise UnsupportedError(
            f'the tensor transport "{TRANSPORT}"',
            f"Ray {_WRITTEN_FOR} with its direct transport",
            f"an import that failed: {error}",
            'pip install ".[ray]" in a clone of vram',
        ) from error

    from . import ray_transport

    if not ray_transport.can_collect():
        raise UnsupportedError(
            f'the tensor transport "{TRANSPORT}"',
            f"the interface of Ray {_WRITTEN_FOR}",
            f"Ray {ray.__version__}, whose serialization is another",
            'pip install ".[ray]" in a clone of vram',
        )
    ray_transport.collect_left()
    if TRANSPORT not in transport_manager_info:
        register_tensor_transport(TRANSPORT, ["cpu", "cuda"], ray_transport.VramTransport, vram.Array)


def sweep(*, keeper: Keeper | str | os.PathLike[str] | None = None) -> list[str]:
    """Remove the objects of this user whose source has ended: actors that died, drivers that were killed.

    Ray frees an object by a task of the actor that made it. When that actor has died, the object can still be passed
    on, until a driver on its node that called :func:`register` lets go of its last reference, and removes it. The
    objects that are left are those of drivers that ended before, or are on another node, and those that actors got from
    other actors that died. For example::

        python -m vram.engines.ray

    Call it where no job of Ray's is to pass on what an actor made that has died since: that is removed, too.
    Receivers keep their objects.

    Parameters
    ----------
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Returns
    -------
    list of str
        The names that were removed.

    Raises
    ------
    PeerGoneError
        If there is no keeper.
    """
    removed = []
    for entry in vram.list_entries(prefix(), keeper=keeper):
        source = Process.parse(entry.meta.get(SOURCE, ""))
        if entry.owner == os.geteuid() and source is not None and source.has_ended:
            try:
                vram.remove(entry.name, keeper=keeper)
            except NotFoundError:  # by another who sweeps, or its time was over
                continue
            removed.append(entry.name)
    return removed


if __name__ == "__main__":
    for swept in sweep():
        print(swept)
