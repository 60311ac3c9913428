"""For runs of other people's tests: each process that a test started with multiprocessing must have ended with 0.

Some of them take a child's word for its success; a child that crashes at its very end has given it by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import SpawnProcess

import pytest

_started: list[SpawnProcess] = []
_start = SpawnProcess.start


def _noted(self: SpawnProcess) -> None:
    _started.append(self)
    _start(self)


SpawnProcess.start = _noted  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that passed if one of its processes did not."""
    _started.clear()
    yield
    for process in _started:
        process.join(60)
    codes = [process.exitcode for process in _started]
    assert not any(code != 0 for code in codes), f"processes of {item.nodeid} ended with {codes}"
