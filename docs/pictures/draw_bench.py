"""Draws what ``python -m benchmarks --json`` printed: ``python docs/pictures/draw_bench.py docs/pictures/bench-16-cores.json``.

Beside FILE.json comes FILE-NAME.svg for each benchmark in it: a bar for each median, a line over it from the 10th to
the 90th percentile, and a mark where the target is. It needs
no library but this one, and draws the same figures alike wherever it runs: a test compares.

bench-16-cores.json was made of the tables that were printed there, in the form of ``--json``: so its figures are
rounded as those are, and its rounds are null, since tables do not say them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from vram.bench import NAMES
from vram.bench.measure import Figure, Row

# Pixels: all of it, where bars begin, the longest one, from row to row, and from a row's name to its bar. It is as wide as
# a page of the site, so that its text is as large as the page's.
WIDTH, LEFT, BAR, STEP, BELOW = 780, 24, 400, 46, 20
MOST = 94  # letters in a line
APART = 50.0  # times between the largest and the smallest, from which on a scale is logarithmic
OURS, RIVAL, MISSED = "#1565c0", "#9e9e9e", "#d84315"


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return the rows of a benchmark."""
    return [Row(**{**row, "figure": Figure(**row["figure"])}) for row in result["rows"]]


def goal(row: Row, rows: list[Row]) -> float | None:
    """Return the figure that a row was to reach: what its target says, or so many times what it is held against."""
    found = re.fullmatch(r"at (?:most|least) ([0-9.]+)(x| \S+)", row.target)
    if found is None:
        return None
    if found[2] != "x":
        return float(found[1])
    rival = next(other for other in rows if other.case == row.against and other.figure.unit == row.figure.unit)
    return float(found[1]) * rival.figure.median


def draw(result: dict[str, Any]) -> str:
    """Return a benchmark as a picture: for each unit a part of its own, each with its own scale."""
    rows = rows_of(result)
    units = dict.fromkeys(row.figure.unit for row in rows)
    body: list[str] = []
    y = 104
    for unit in units:
        bars: dict[tuple[str, Figure], list[Row]] = {}
        for row in rows:  # what is held against several is one bar
            if row.figure.unit == unit:
                bars.setdefault((row.case, row.figure), []).append(row)
        goals = {row: goal(row, rows) for several in bars.values() for row in several}
        values = [figure.high for _, figure in bars] + [wanted for wanted in goals.values() if wanted is not None]
        least = min([figure.low for _, figure in bars] + [wanted for wanted in goals.values() if wanted is not None])
        is_log = least > 0 and max(values) / least > APART
        begin = 10.0 ** math.floor(math.log10(least)) if is_log else 0.0

        def place(value: float, is_log: bool = is_log, begin: float = begin, most: float = max(values)) -> float:
            share = math.log(value / begin) / math.log(most / begin) if is_log else value / (most or 1.0)
            return LEFT + BAR * min(1.0, max(0.0, share))

        scale = f"{unit}, from {begin:g} on a logarithmic scale" if is_log else unit
        body.append(f'<text class="unit" x="{LEFT}" y="{y}">{escape(scale)}</text>')
        y += 10
        for (name, figure), several in bars.items():
            middle = y + BELOW + (STEP - BELOW) / 2 - 2
            colour = RIVAL if any(row.against == name and row.figure.unit == unit for row in rows) else OURS
            body.append(
                f'<rect x="{LEFT}" y="{middle - 8:.1f}" width="{place(figure.median) - LEFT:.1f}" height="16" '
                f'fill="{colour}" data-median="{figure.median:g}"/>'
            )
            if figure.low != figure.high:
                low, high = place(figure.low), place(figure.high)
                body.append(f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#212121" stroke-width="1.5"/>')
            verdicts: list[str] = []
            for row in several:
                wanted = goals[row]
                if wanted is not None:
                    at = place(wanted)
                    body.append(
                        f'<path d="M{at:.1f} {middle - 12:.1f}V{middle + 12:.1f}" stroke="{MISSED}" stroke-width="2.5"/>'
                    )
                if row.reached is not None:
                    verdicts.append(f"{row.target}: {'reached' if row.reached else 'missed'}")
            style = f' fill="{MISSED}"' if any(row.reached is False for row in several) else ""
            said = "; ".join(verdicts)
            room = MOST - len(said)
            case = name if len(name) <= room else f"{name[: room // 2 - 3]} ... {name[3 - room // 2 :]}"
            body.append(f'<text x="{LEFT}" y="{y + 14}">{escape(case)}</text>')
            if said:
                body.append(f'<text x="{WIDTH - LEFT}" y="{y + 14}" text-anchor="end"{style}>{escape(said)}</text>')
            body.append(f'<text x="{LEFT + BAR + 12}" y="{middle + 5:.1f}">{escape(str(figure))}</text>')
            y += STEP
        y += 28
    command = f"{'vram bench' if result['name'] in NAMES else 'python -m benchmarks'} {result['name']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif" font-size="14">\n'
        f'<style>.unit {{ fill: #616161 }}</style>\n<rect width="{WIDTH}" height="{y}" rx="8" fill="#ffffff"/>\n'
        f'<text x="20" y="30" font-size="17" font-weight="bold">{escape(result["title"])}</text>\n'
        f'<text class="unit" x="20" y="52">{escape(command)}: {escape(result["machine"])}</text>\n'
        f'<text class="unit" x="20" y="72">Grey: what others are compared with. Red lines: targets.</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def pictures(file: Path) -> dict[Path, str]:
    """Return what is drawn of a file, by where it goes."""
    return {
        file.with_name(f"{file.stem}-{result['name']}.svg"): draw(result) for result in json.loads(file.read_text())
    }


def main() -> None:
    """Draw the file's benchmarks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    for path, text in pictures(given.file).items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
