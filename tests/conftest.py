"""What every test gets: the ledger, bounded random inputs, and a summary of what could not run here."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the stand-in driver, which several suites and their children load
import standin
import vram
import watchdog
from support.children import serve
from support.deadlines import AT_ONCE
from support.keepers import EXECUTED, fork_keepers
from support.ledger import Ledger
from support.samples import Parts, seed
from support.times import Times
from vram.keeper.private import KeeperProcess

pytest.register_assert_rewrite("tests.contracts")

# No deadline per example: the machine may be busy, and what can hang has a deadline of its own.
_bounded = hypothesis.settings(deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("default", _bounded, max_examples=50)
hypothesis.settings.register_profile("ci", _bounded, max_examples=50, derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", _bounded, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))

# Tests marked gpu run on the real driver, in a run of their own; all others never touch one: they get the stand-in, and
# so do their children. Before anything can have looked for a driver.
WITHOUT_STANDIN = "a run of its own on real GPUs" if os.environ.get("VRAM_TEST_GPU") else standin.missing()
if WITHOUT_STANDIN is None:
    os.environ.update({"LD_LIBRARY_PATH": standin.child_environment()["LD_LIBRARY_PATH"]})
    standin.preload()

_left_out: Counter[str] = Counter()


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Note which tests failed, for the ledger."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


_last: list[Ledger] = []  # the ledger at the end of the last test, if no fixture of a wider scope ran since


class _WiderFixtures:
    """Discards the last ledger: fixtures of a wider scope make things between two tests.

    A plugin of its own, since pytest leaves out the hook of a conftest.py below the root for fixtures of the session.
    """

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            _last.clear()


@pytest.fixture(autouse=True)
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Fail a test that leaves handles, fds, mappings, children, threads or objects of the driver behind."""
    if WITHOUT_STANDIN is None:
        standin.Standin().defer(False)  # whatever the last test had it do with work
    objects = _driver_objects()
    before = _last.pop() if _last else Ledger.take()
    yield before
    if "vram.arrays.upload" in sys.modules:
        sys.modules["vram.arrays.upload"].close_rings()  # pinned once and kept, by design
    # The driver first: the stand-in watches over exported memory with descriptors of its own until it is asked, and
    # another process, such as a keeper, may be late to close its own.
    # What failed is kept by its own traceback, so there is nothing to wait for.
    grace = 1.0 if request.node.stash.get(_FAILED, False) else AT_ONCE
    deadline = time.monotonic() + grace
    if _driver_objects() - objects:
        _look_at_all()
    while (more := _driver_objects() - objects) and time.monotonic() < deadline:
        time.sleep(0.01)
    # NVIDIA's libraries open devices, pipes and mappings as they please; on the stand-in nothing is left out.
    kinds = ("handles", "stuck", "objects", "children") if os.environ.get("VRAM_TEST_GPU") else None
    now = Ledger.take()
    if not (extra := now.more_than(before, kinds=kinds)):
        _last.append(now)
    elif extra := before.left_behind(grace=min(grace, 0.5), kinds=kinds):
        _look_at_all()  # what was frozen may be garbage by now
        extra = before.left_behind(grace=grace, kinds=kinds)
    extra += [f"stand-in: {count} {kind}" for kind, count in sorted(more.items())]
    if WITHOUT_STANDIN is None and (crashes := standin.Standin().would_crash()):
        standin.Standin().clear()
        extra.append(f"stand-in: {crashes} calls that end the process on hardware")
    if extra:
        pytest.fail("left behind:\n  " + "\n  ".join(extra), pytrace=False)
    gc.freeze()  # else each test would look through what all before it have left in reports


def _look_at_all() -> None:
    """Collect garbage also among what was frozen, such as the objects of a fixture that has ended."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what this user's processes make for themselves, such as a key, where nobody's own is; fork keepers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        fork_keepers(patch)
        yield


@pytest.fixture
def executed_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers are started as users start them, by executing Python: for tests of that."""
    monkeypatch.setattr(KeeperProcess, "_started", staticmethod(EXECUTED))


@pytest.fixture
def two_gpus() -> None:
    """Skip where there is one GPU, with the one line that all such tests have in common."""
    from vram import driver
    from vram.spec import Location

    if driver.get(Location("cuda")).device_count() < 2:
        pytest.skip("it takes two GPUs")


def _driver_objects() -> Counter[str]:
    """Count what the stand-in has given out; primary contexts stay, by design."""
    if WITHOUT_STANDIN is not None:
        return Counter()
    live = standin.Standin().live()
    return Counter({kind: count for kind, count in live.items() if not kind.startswith("context")})


def pytest_configure(config: pytest.Config) -> None:
    """Let nothing keep this run from ending."""
    watchdog.install(config)
    for name in vram.__all__:  # each is imported at its first use: no test depends on those that ran before it
        getattr(vram, name)
    serve()
    config.pluginmanager.register(_WiderFixtures(), "wider fixtures")
    config.pluginmanager.register(Times(), "times")
    config.pluginmanager.register(Parts(), "parts")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The part of the selected tests that is to run, and what all of them may take."""
    parser.addoption("--part", help="run part K of N of the selected tests: K/N")
    parser.addoption("--ceilings", action="store_true", help="fail a run that takes more processor time than it may")


def pytest_report_header() -> str:
    """Say what this run is able to test."""
    torch = "there" if importlib.util.find_spec("torch") else "not there"
    if os.environ.get("VRAM_TEST_GPU"):
        return _hardware()
    driver = f"no stand-in driver: {WITHOUT_STANDIN}" if WITHOUT_STANDIN else "stand-in driver"
    machine = f"kernel {platform.release()}, {os.cpu_count()} cores, uid {os.getuid()}"
    return f"sample {seed()}, {machine}, torch is {torch}, {driver}"


def _hardware() -> list[str]:
    """Say which GPUs, driver and libraries this runs on."""
    from importlib.metadata import PackageNotFoundError, version

    from vram import driver
    from vram.spec import Location

    cuda = driver.get(Location("cuda"))
    lines = [f"driver of CUDA {cuda.versions[0]}, cuda-bindings {cuda.versions[1]}, Python {platform.python_version()}"]
    for number in range(cuda.device_count()):
        info = cuda.device_info(Location("cuda", number))
        lines.append(
            f"cuda:{number} {info.name}, {info.total_bytes >> 20} MiB; {cuda.support(Location('cuda', number))}"
        )
    for name in ("torch", "cupy-cuda13x", "jax", "numba-cuda"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return lines


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the stand-in's own tests, and skip, with the reason, what needs it where there is none."""
    for item in items:
        if item.path.parent.name == "standin":
            item.add_marker(pytest.mark.standin)
        if item.path.name.startswith(("test_cuda", "test_bindings")) and item.get_closest_marker("standin"):
            item.add_marker(pytest.mark.bindings)
    if WITHOUT_STANDIN is not None:
        for item in items:
            if item.get_closest_marker("standin"):
                item.add_marker(pytest.mark.skip(reason=WITHOUT_STANDIN))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what was left out on purpose, by the reason it carries."""
    for item in items:
        marks = [mark for mark in item.iter_markers() if mark.name in ("gpu", "slow")]
        reasons = [mark.kwargs.get("reason", mark.name) for mark in marks]
        _left_out[reasons[0] if reasons else "by selection"] += 1


def pytest_collection_finish() -> None:
    """What is there now stays: the ledger collects twice a test, and need not look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one, where tests run in several, what was left out here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects everything and leaves out the same: once is enough."""
    if not _left_out:
        _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what could not run here and why: one line for each reason."""
    skipped: defaultdict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ").splitlines()[0]].append(report.nodeid.partition("::")[0])
    if not skipped and not _left_out:
        return
    terminalreporter.section("did not run here")
    for reason, files in sorted(skipped.items()):
        places = sorted(set(files))
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more files" if len(places) > 3 else "")
        terminalreporter.line(f"{len(files)} skipped: {reason} ({shown})")
    for reason, count in sorted(_left_out.items()):
        terminalreporter.line(f"{count} left out: {reason}")


@pytest.fixture(scope="session")
def threads_of_polars() -> None:
    """polars' threads, and their descriptors, are for good: have them before the ledger of a test is taken."""
    import polars as pl
    from polars.testing import assert_frame_equal

    one = pl.DataFrame({"s": ["x", "y"], "c": pl.Series(["x", "y"], dtype=pl.Categorical)})
    assert_frame_equal(pl.from_arrow(one.to_arrow()).lazy().sort("s").collect(), one[[0, 1]])  # type: ignore[union-attr]
    one.group_by("c").len()
