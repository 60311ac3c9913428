"""Diagnosis of this machine, ``vram doctor``: what works, what does not, and why.

Each capability is tried, since an attribute, a version or a file says only what should be. Multicast alone goes by the
attribute, since trying it can put a whole host out of service. A trial leaves nothing behind.

=============  =====================================================================================================
:mod:`.system`    the kernel, and what it lets this process have
:mod:`.keepers`   the socket of this user's keeper, and who answers there
:mod:`.gpus`      NVIDIA's driver, cuda-bindings, each GPU: in a process of their own, which a sick driver may hang
:mod:`.packages`  what is installed beside this library
=============  =====================================================================================================
"""

from __future__ import annotations

import os

from . import gpus, keepers, packages, system
from .finding import Area, Finding, Verdict, unmet

__all__ = ["Area", "Finding", "Verdict", "examine", "unmet"]


def examine(keeper: str | os.PathLike[str] | None = None, *, timeout: float = 60.0) -> tuple[Finding, ...]:
    """Find out what works here. It raises nothing for what does not: that is what it returns.

    Parameters
    ----------
    keeper : str or PathLike, optional
        The keeper's socket; by default ``VRAM_KEEPER``, or the user's own.
    timeout : float
        Seconds that the driver of the GPUs has to answer everything. A keeper has 5 s to greet, and 30 to answer.

    Returns
    -------
    tuple of Finding
        By area: "host", "keeper", "gpu", "packages".
    """
    return (*system.examine(), *keepers.examine(keeper), *gpus.ask(timeout), *packages.examine())
