"""Programs, run in forks of the server of children: less a start of Python and its imports for each."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.deadlines import SOON

from .children import CHILDREN, Inherited

if TYPE_CHECKING:
    from typing import Self


def vram(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``vram`` with these arguments; return its exit status and what it printed."""
    return _in_a_fork(_vram, ["vram", *map(str, arguments)], cwd, environment)


def python(
    program: str | Path, *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program, or its text, as by ``python -W error``; return its exit status and what it printed."""
    return _in_a_fork(
        _file if isinstance(program, Path) else _text, [str(program), *map(str, arguments)], cwd, environment
    )


class Running:
    """A program in a fork, with pipes to its standard input and from its standard output. Its block kills it.

    Parameters
    ----------
    arguments : object
        Each is passed as its string. An :class:`Inherited` descriptor becomes its number in the fork.
    """

    def __init__(self, program: Path, *arguments: object) -> None:
        theirs, ours = os.pipe()
        self.stdin = os.fdopen(ours, "w")
        ours, theirs_too = os.pipe()
        self.stdout = os.fdopen(ours)
        files = {0: Inherited(theirs), 1: Inherited(theirs_too)}
        self._process = CHILDREN.Process(target=_run, args=(_file, [program, *arguments], None, {}, files))
        self._process.start()
        os.close(theirs)
        os.close(theirs_too)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """Return the next line of its output, or an empty string at the end."""
        return self.stdout.readline().strip()

    def tell(self) -> None:
        """Write an empty line to its input; do nothing if the program has ended."""
        with contextlib.suppress(BrokenPipeError):
            print(file=self.stdin, flush=True)

    def kill(self) -> float:
        """Kill the program, wait until it is gone, and return the monotonic time of the signal. Idempotent."""
        when = time.monotonic()
        if self.stdout.closed:
            return when
        self._process.kill()
        self._process.join(SOON)
        self._process.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        return when


def _vram(arguments: list[str]) -> None:
    from vram.cli import main

    sys.argv[:] = arguments
    main()


def _text(arguments: list[str]) -> None:
    sys.argv[:] = ["-c", *arguments[1:]]
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    warnings.simplefilter("error")
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update({"__name__": "__main__", "__spec__": None, "__builtins__": __builtins__})
    exec(compile(arguments[0], "<string>", "exec"), main)


def _file(arguments: list[str]) -> None:
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    warnings.simplefilter("error")
    runpy.run_path(arguments[0], run_name="__main__")


def _run(
    work: Callable[[list[str]], None],
    arguments: list[object],
    cwd: Path | None,
    environment: Mapping[str, str],
    files: Mapping[int, int],
) -> None:
    for number, fd in files.items():
        os.dup2(fd, number)
        os.close(fd)
    if 0 in files:
        sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing opened /dev/null in its place
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    try:
        work([*map(str, arguments)])
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def _in_a_fork(
    work: Callable[[list[str]], None], arguments: list[str], cwd: Path | None, environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    with open(os.memfd_create("stdout"), "w+") as stdout, open(os.memfd_create("stderr"), "w+") as stderr:
        files = {1: Inherited(stdout.fileno()), 2: Inherited(stderr.fileno())}
        process = CHILDREN.Process(target=_run, args=(work, arguments, cwd, environment or {}, files))
        process.start()
        process.join(SOON)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{' '.join(arguments)} did not end within {SOON:g} s")
        for file in (stdout, stderr):
            file.seek(0)
        done = subprocess.CompletedProcess(arguments, process.exitcode, stdout.read(), stderr.read())
        process.close()
        return done
