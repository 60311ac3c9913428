"""The host driver keeps the contract."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("vram.testing.driver")

from vram.driver.host import HostDriver  # noqa: E402
from vram.spec import HOST, Location  # noqa: E402
from vram.testing.driver import DriverContract  # noqa: E402


class TestHostDriver(DriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "Sealing", "Identity"})

    @pytest.fixture
    def driver(self) -> HostDriver:
        return HostDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST
