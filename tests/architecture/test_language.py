"""The subject of a sentence is a noun: not a clause such as "What was sent ..." or "Who waits ...".

Sentences of docstrings and comments are counted by room, and those of pages by page. The ceilings are in permille of
sentences; they go down as rooms and pages are finished, and never up.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from .house import ROOT

CEILING = 3  # in a thousand sentences

_CLAUSE = re.compile(r"(Who|Whoever|Whose|Whom|What|Whatever)\b(?!.*\?$)", re.DOTALL)
_PARTS = re.compile(r"(?:^|\n)\s*(?:[-*]|\d+\.) |\n\s*\n")
_ENDS = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z])")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; headings and cells of two words are none."""
    apart = itertools.groupby(text.splitlines(), lambda line: len(line) - len(line.lstrip()))  # a parameter, its text
    for part in _PARTS.split("\n\n".join("\n".join(lines) for _, lines in apart)):
        for sentence in _ENDS.split(" ".join(part.split())):
            if len(sentence.split()) > 2:
                yield sentence


def texts(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, and its comments, those of consecutive lines as one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    block: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] - 1 not in block:
                yield " ".join(block.values())
                block = {}
            block[token.start[0]] = token.string.lstrip("#").strip()
    yield " ".join(block.values())


def share(all_texts: list[str]) -> tuple[int, list[str]]:
    """Return the permille of sentences with a clause as subject, rounded up, and those sentences."""
    counted = Counter[bool]()
    found = []
    for text in all_texts:
        for sentence in sentences(text):
            is_clause = _CLAUSE.match(sentence) is not None
            counted[is_clause] += 1
            if is_clause:
                found.append(sentence[:100])
    return -(-1000 * counted[True] // max(1, counted.total())), found


def test_docstrings_and_comments_have_nouns_as_subjects() -> None:
    by_room: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "src/vram").rglob("*.py")):
        room = file.relative_to(ROOT / "src/vram").parts[0]
        by_room["" if room.endswith(".py") else room] += texts(file.read_text())
    shares = {room: share(found) for room, found in by_room.items()}
    assert {room: found for room, found in shares.items() if found[0] > CEILING} == {}


def test_pages_have_nouns_as_subjects() -> None:
    pages = [file for file in sorted((ROOT / "docs").rglob("*.md")) if file.parent.name != "decisions"]
    for group in (pages, [*(ROOT / "docs/decisions").glob("*.md")], [*ROOT.glob("*.md")]):
        assert share([_prose(file) for file in group])[0] <= CEILING


def _prose(page: Path) -> str:
    """Return a page without code, tables and headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$|^\|.*$|^#.*$", "", text, flags=re.MULTILINE)


def test_the_check_finds_clauses_and_no_questions() -> None:
    found = share(["Who waits is told. The reader waits.", "What is it for?\n\n- What was sent is gone."])
    assert found == (500, ["Who waits is told.", "What was sent is gone."])
    assert share(["Parameters\n----------\nname : str\n    What it is called."])[1] == ["What it is called."]
