"""Where a loop jumps back, an interrupt must find the block that is to be left (I12).

Python 3.12 and 3.13 compile a backward jump that depends on a condition into one that no exception table covers
(python/cpython#130279): the test of a ``while``, an ``if`` at the end of a loop, the filter of a comprehension. An
interrupt there skips the ``with`` or ``finally`` around the loop, and a lock stays taken for ever. So a loop within
such a block ends in a step that is always taken; this looks at what the compiler made of it.
"""

from __future__ import annotations

import ast
import dis
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.samples import in_turns

import vram

SOURCES = Path(vram.__file__).parent
ELSEWHERE = {"bench", "testing"}  # where an interrupt ends the program, or the test
HAS_HOLES = (3, 12) <= sys.version_info < (3, 14)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def holes(source: str) -> list[int]:
    """Return the lines of loops in whose jump back an interrupt would skip a block that holds something."""
    blocks = list(_blocks(ast.parse(source)))
    return sorted({line for code in _codes(compile(source, "", "exec")) for line in _uncovered(code, blocks)})


def _blocks(tree: ast.AST) -> Iterator[tuple[range, int]]:
    """Yield the lines of each block that is left in some way of its own, and the line of the function it is in."""

    def visit(node: ast.AST, function: int) -> Iterator[tuple[range, int]]:
        if isinstance(node, Function):
            function = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        if isinstance(node, ast.With | ast.Try) and _holds(node):
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1), function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, 1)


def _holds(node: ast.With | ast.Try) -> bool:
    if isinstance(node, ast.With):  # suppress() lets an interrupt through as it is
        return not all("suppress(" in ast.unparse(item) for item in node.items)
    interrupts = ("BaseException", "KeyboardInterrupt")
    caught = any(one.type is None or any(name in ast.unparse(one.type) for name in interrupts) for one in node.handlers)
    return caught or bool(node.finalbody)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _uncovered(code: types.CodeType, blocks: list[tuple[range, int]]) -> Iterator[int]:
    compiled = dis.Bytecode(code)
    steps = list(compiled)
    at = {step.offset: step for step in steps}

    def handlers(offset: int) -> set[int]:
        return {entry.target for entry in compiled.exception_entries if entry.start <= offset < entry.end}

    for before, last, jump in zip([None, None, None, *steps], [None, *steps], steps, strict=False):
        if before is not None and before.opname == "POP_EXCEPT":
            continue  # the way out of a ``with`` whose manager swallowed an error
        if last is not None and last.opname == "CLEANUP_THROW":
            continue  # the way out of an ``await`` into which an error was thrown, by a loop that handles SIGINT itself
        if jump.opname == "JUMP_BACKWARD" and handlers(jump.argval) - handlers(jump.offset):
            line = at[jump.argval].positions.lineno or 0
            if any(line in lines and function == code.co_firstlineno for lines, function in blocks):
                yield line


PLANTED = [
    """
def wait(lock, queue):
    with lock:
        while queue:
            queue.pop()
""",
    """
def find(lock, queue):
    try:
        for one in queue:
            if one:
                one()
    finally:
        lock()
""",
    """
def pick(lock, queue):
    with lock:
        return [one for one in queue if one]
""",
]
SOUND = [
    """
def wait(lock, queue):
    with lock:
        while True:
            if not queue:
                break
            queue.pop()
""",
    """
def find(lock, queue):
    try:
        for one in queue:
            if not one:
                continue
            one()
    finally:
        lock()
""",
    """
def pick(lock, queue):
    with lock:
        return list(filter(None, queue))
""",
    """
def suppressed(queue):
    with contextlib.suppress(OSError):
        while queue:
            queue.pop()
""",
    """
def another(lock, queue):
    with lock:
        return any(one for one in queue if one)
""",
]


@pytest.mark.parametrize("source", PLANTED)
def test_a_loop_with_such_a_jump_is_found(source: str) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("what this Python compiles was not looked at")
    assert bool(holes(source)) == HAS_HOLES


@pytest.mark.parametrize("source", SOUND)
def test_a_loop_without_one_is_not(source: str) -> None:
    assert not holes(source)


@in_turns(5)
def test_no_interrupt_skips_the_end_of_a_block_i12() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.relative_to(SOURCES).parts[0] not in ELSEWHERE
        for line in holes(path.read_text())
    ]
    assert not found, "end these loops in a step that is always taken: " + ", ".join(found)
