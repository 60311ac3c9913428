"""Registration of captured arrays: ranks exchange the arrays of their CUDA graphs, which then reach them directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import VramError
from ..lifetime import unwinding
from ..spec import Location
from .captured import AT_ONCE, Captured, Met, SharedArray
from .votes import close_said, use_offers

if TYPE_CHECKING:
    from .on_gpu import OnGpu

Agree = Callable[..., "list[tuple[Any, Any]]"]  # votes.agree, of this rank


def register(on_gpu: OnGpu | None, agree: Agree, deadline: float) -> tuple[str, ...]:
    """Have the arrays of all calls that were captured reached where they are; return why some are not."""
    captured = None if on_gpu is None else on_gpu.captured
    met = [] if captured is None else list(captured.met)
    failure: VramError | None = None
    try:
        if on_gpu is not None:
            on_gpu.settle()
    except VramError as error:
        failure = error
    close_said(agree("register", f"{len(met)} calls of graphs", failure, deadline=deadline))
    if on_gpu is None or captured is None or not met:  # of which all ranks have as many
        return ()
    reached: list[tuple[int, Sequence[int] | None]] = []
    whys: dict[str, None] = {}
    for first in range(0, len(met), AT_ONCE):
        some = met[first : first + AT_ONCE]
        rows, reasons = _exchange(some, captured, cast("Location", on_gpu.gpu), agree, deadline)
        reached += [(one.entry, row) for one, row, why in zip(some, rows, reasons, strict=True) if not why]
        whys |= dict.fromkeys(why for why in reasons if why)
    try:
        try:
            on_gpu.write(reached)
        except VramError as error:
            failure = error
        close_said(agree("registered", "", failure, deadline=deadline))
    except BaseException as error:
        with unwinding(error):
            on_gpu.write([(entry, None) for entry, _ in reached])
        raise
    del captured.met[: len(met)]
    captured.registered += len(reached)
    return tuple(whys)


def _exchange(
    some: Sequence[Met], captured: Captured, gpu: Location, agree: Agree, deadline: float
) -> tuple[list[list[int]], list[str]]:
    """Tell the others of the arrays of some calls, open theirs, and hear which all ranks have opened."""
    arrays, fds, keeps = captured.describe(some)
    try:
        said = agree("arrays", "", None, None, fds, arrays=arrays, deadline=deadline)
    finally:
        keeps.clear()
    rows: list[list[int]] = []
    whys: list[str] = []

    def opened() -> None:
        found = captured.open(some, [offer.arrays for offer, _ in said], [fds for _, fds in said], gpu)
        rows.extend(found[0])
        whys.extend(found[1])

    failure = use_offers(said, opened)
    mine = [SharedArray(None, why=why[:300]) for why in whys]
    said = agree("opened", "", failure, arrays=mine, deadline=deadline)
    close_said(said)
    for offer, _ in said:
        for number, one in enumerate(offer.arrays[: len(some)]):
            whys[number] = whys[number] or one.why
    return rows, whys
