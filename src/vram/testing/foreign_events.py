"""The rules of events between processes: a part of :class:`~vram.testing.foreign.ForeignContract`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..driver.foreign import HANDLE_BYTES, InterprocessEvents
from ..errors import ProtocolError, UsageError
from .foreign_scene import ForeignSuite, refused_there
from .other_process import OtherProcess
from .scene import Scene

__all__ = ["EventRules"]

DEFAULT = 1  # the legacy default stream


class EventRules(ForeignSuite):
    """Tests of :class:`~vram.driver.foreign.InterprocessEvents`."""

    def test_an_event_in_another_process(self, scene: Scene, other: OtherProcess) -> None:
        driver = self.capability(scene.driver, InterprocessEvents)
        with _event(scene) as event:
            handle = driver.event_export(event)
            assert isinstance(handle, bytes)
            assert len(handle) == HANDLE_BYTES
            there = other.call("event_import", handle, scene.location)
            assert other.call("event_is_done", there)  # nothing was recorded
            driver.event_record(event, DEFAULT)
            stream = other.call("stream_create", scene.location)
            other.call("stream_wait", stream, there, scene.location)
            other.call("stream_synchronize", stream, scene.location)
            other.call("event_synchronize", there)
            assert other.call("event_is_done", there)
            other.call("event_record", there, stream)  # the other way works as well
            driver.event_synchronize(event)
            assert driver.event_is_done(event)
            other.call("stream_destroy", stream)
            other.call("event_destroy", there)
            with refused_there(other, UsageError):
                other.call("event_destroy", there)

    def test_an_event_opened_twice_is_two(self, scene: Scene, other: OtherProcess) -> None:
        driver = self.capability(scene.driver, InterprocessEvents)
        with _event(scene) as event:
            driver.event_record(event, DEFAULT)
            first, second = (other.call("event_import", driver.event_export(event), scene.location) for _ in range(2))
            assert first != second
            other.call("event_destroy", first)
            other.call("event_synchronize", second)
            other.call("event_destroy", second)

    def test_only_an_event_made_for_it_is_exported(self, scene: Scene, other: OtherProcess) -> None:
        driver = self.capability(scene.driver, InterprocessEvents)
        with _event(scene, interprocess=False) as event, scene.refused(UsageError):
            driver.event_export(event)
        with _event(scene) as event:
            there = other.call("event_import", driver.event_export(event), scene.location)
            with refused_there(other, UsageError):  # only its maker hands it on
                other.call("event_export", there)
            other.call("event_destroy", there)

    def test_bytes_that_are_no_handle_of_an_event(self, scene: Scene, other: OtherProcess) -> None:
        driver = self.capability(scene.driver, InterprocessEvents)
        with _event(scene) as event:
            handle = driver.event_export(event)
            for data in (b"", handle[:-1], handle + b"\0", bytes(HANDLE_BYTES), b"\xa5" * HANDLE_BYTES):
                with refused_there(other, ProtocolError):
                    other.call("event_import", data, scene.location)

    def test_not_in_the_process_that_made_the_event(self, scene: Scene) -> None:
        driver = self.capability(scene.driver, InterprocessEvents)
        with _event(scene) as event, scene.refused(UsageError):
            driver.event_import(driver.event_export(event), scene.location)


@contextmanager
def _event(scene: Scene, *, interprocess: bool = True) -> Iterator[int]:
    driver: Any = scene.driver
    event = driver.event_create(scene.location, interprocess=interprocess)
    try:
        yield event
    finally:
        driver.event_destroy(event)
