"""One address for the memory of all ranks: a multicast object, set up only where every rank has ``VRAM_MULTICAST=on``.

Each stage is a vote, since the driver waits for ever for a GPU that is not in the team yet: rank 0 makes the object;
all add their GPU; all bind and map their memory. If a rank fails, no rank has the address, and the buffer goes without.
Nothing here has run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from ..driver.protocol import DeviceMemory
from ..errors import PeerGoneError, ProtocolError, UnsupportedError, VramError, WaitTimeoutError
from ..lifetime import Owned, own, unwinding
from ..memory import AddressReservation, Region
from ..open_files import close_fds
from ..spec import HOST, HandleKind, round_up

if TYPE_CHECKING:
    from ..memory import MulticastObject

WHAT = "one address for the memory of all ranks (multicast)"
REMEDY = "Write to each of peers"
_KIND = HandleKind.POSIX_FD

# Votes about what is said, with descriptors, and what went wrong here; returns what came of each rank's, by rank.
Agree = Callable[[str, VramError | None, Sequence[int]], Sequence[list[int]]]


class OneAddress(Owned):
    """A mapping of the object in this process, at `address`, and what this rank has bound to it: the first `nbytes`
    bytes of each rank's memory."""

    __slots__ = ("address", "nbytes")

    def __init__(self, team: MulticastObject, region: Region, least: int) -> None:
        self.nbytes = region.nbytes
        reservation = AddressReservation.reserve(region.driver, team.nbytes, alignment=_power(least))
        try:
            offset = 0
            for memory in region.segments(0, region.nbytes)[0]:
                team.bind(memory, offset)
                offset += memory.nbytes
            mapping = team.map(reservation)
            self.address = mapping.address
            self._claim = own(WHAT, partial(_close, [mapping, team, reservation]))
        except BaseException as error:
            with unwinding(error):
                team.close()
                reservation.close()
            raise


def refusal(region: Region, size: int) -> UnsupportedError | None:
    """Say why this rank can have none for its memory in a group of that size; None if it could. Makes nothing."""
    driver: Any = region.driver
    if region.location == HOST or not _has_multicast(driver):
        return _none("NVIDIA GPUs joined by NVSwitch", f"memory on {region.location}")
    try:
        driver.multicast_check(region.location)
        least = driver.multicast_granularity(size, region.nbytes, _KIND).minimum
    except UnsupportedError as error:
        return _none(error.needs, error.have, error.remedy)
    if size == 1:
        return _none("a group of several ranks", "a group of one")
    odd = next((memory.nbytes for memory in region.segments(0, region.nbytes)[0] if memory.nbytes % least), 0)
    if odd:
        return _none(f"memory in pieces of multiples of {least} bytes", f"one of {odd}: give another chunk=")
    return None


@lru_cache(maxsize=16)  # the question takes microseconds, and there are few drivers
def _has_multicast(driver: Any) -> bool:
    return isinstance(driver, DeviceMemory)


def refused_by(rank: int, why: str) -> UnsupportedError:
    """Return the error of a rank that could have it, for the reason of one that could not."""
    return _none("all ranks to be able to", f"rank {rank}, which is not: {why}")


def set_up(region: Region, rank: int, size: int, agree: Agree) -> OneAddress | UnsupportedError:
    """Set it up with all ranks, each of which calls this; return it, or why there is none, the same on all ranks.
    Raises WaitTimeoutError or PeerGoneError if ranks do not come in time, or are gone."""
    made: list[Any] = []
    try:
        try:
            _set_up(region, rank, size, agree, made)
        except (PeerGoneError, WaitTimeoutError):
            raise
        except VramError as error:  # of this rank, or of another one that says so: all have heard of it in one vote
            for one in reversed(made):
                one.close()
            return _none("every rank to make it", f"one that could not ({error})")
        found: OneAddress = made[-1]
        return found
    except BaseException as error:
        with unwinding(error):
            for one in reversed(made):
                one.close()
        raise


def _set_up(region: Region, rank: int, size: int, agree: Agree, made: list[Any]) -> None:
    from ..memory.multicast import MulticastObject  # seldom needed

    driver: Any = region.driver
    least = driver.multicast_granularity(size, region.nbytes, _KIND).minimum
    nbytes = round_up(region.nbytes, least)

    def create() -> list[int]:
        made.append(MulticastObject.create(driver, size, nbytes, handle_kinds=_KIND))
        return [made[0].export(_KIND)]

    def join(fds: Sequence[int]) -> list[int]:
        if rank:
            if len(fds) != 1:
                raise ProtocolError(f"rank 0 sent {len(fds)} descriptors for one multicast object")
            made.append(MulticastObject.import_(driver, fds[0], nbytes, size))
        made[0].add_device(region.location)
        return []

    def bind() -> list[int]:
        made[0].added_elsewhere(size - 1)
        made.append(OneAddress(made[0], region, least))
        return []

    failure, fds = _tried(create if rank == 0 else list)
    said = agree("a multicast object", failure, fds)
    try:
        failure, _ = _tried(partial(join, said[0]))
    finally:
        _close_fds(said)
    _close_fds(agree("a GPU in it", failure, ()))
    failure, _ = _tried(bind)
    _close_fds(agree("memory bound to it", failure, ()))


def _tried(act: Callable[[], list[int]]) -> tuple[VramError | None, list[int]]:
    try:
        return None, act()
    except VramError as error:
        return error, []


def _close_fds(said: Sequence[list[int]]) -> None:
    for one in said:
        close_fds(one)  # the lists themselves, which else would close them once more


def _none(needs: str, have: str, remedy: str = "") -> UnsupportedError:
    return UnsupportedError(WHAT, needs, have, REMEDY + (f". {remedy}" if remedy else ""))


def _power(least: int) -> int:
    """Return the power of two that is not below a number."""
    return 1 << (least - 1).bit_length()


def _close(parts: list[Any]) -> None:
    """Close the mapping, what is bound with its object, and the addresses."""
    while parts:
        parts.pop(0).close()
