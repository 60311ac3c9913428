"""The cost of the first use of each verb in a fresh process: the modules that it imports, and their time."""

from __future__ import annotations

import json
from typing import Any

import vram
from vram.bench.children import workplace
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess

from .start import python_says

_VERBS = ("attach", "publish", "lend", "borrow", "share", "ArrayChannel", "empty")
_AT_MOST = 60  # ms, on a machine of two cores
# The clock starts when the interpreter is up. The modules that it has loaded by then are not counted.
_CODE = """
import json, os, sys, time
before = set(sys.modules)
begin = time.perf_counter()
{statement}
took = time.perf_counter() - begin
loaded = set(sys.modules) - before
ours = [sys.modules[name] for name in loaded if name.split(".")[0] == "vram"]
compiled = all(os.path.exists(module.__spec__.cached) for module in ours if hasattr(module, "__spec__"))
print(json.dumps([took, len(loaded), len(ours), "numpy" in loaded, compiled]))
"""


def on_host(quick: bool) -> Result:
    """Measure imports in fresh interpreters, in turns; and one whole first use, up to the first byte read."""
    rounds = 2 if quick else 15
    said: dict[str, list[list[Any]]] = {}
    notes = ["from `import vram` to the verb imported, in an interpreter that has loaded nothing else"]

    def run(statement: str) -> float:
        answer = json.loads(python_says(_CODE.format(statement=statement)))
        said.setdefault(statement, []).append(answer)
        return float(answer[0])

    numpy = "import numpy"
    verbs = {verb: f"import vram; vram.{verb}" for verb in _VERBS}
    with workplace() as directory:
        keeper = KeeperProcess(f"{directory}/keeper.sock")
        try:
            with vram.zeros(1 << 20, "uint8", device="host") as array:
                vram.publish("first", {"x": array}, keeper=keeper.path)
            use = f"import vram; vram.attach('first', keeper={keeper.path!r})['x'].numpy()[0]"
            statements = [numpy, *verbs.values(), use]
            values = in_turns({one: lambda one=one: run(one) for one in statements}, rounds, warm=1)  # type: ignore[misc]
        finally:
            close_client(keeper.path)
            keeper.stop()
    rows = [Row("import numpy, which arrays of the host need", Figure.of(values[numpy], "ms", scale=1e3))]
    for verb, statement in verbs.items():
        _, modules, ours, with_numpy, compiled = said[statement][-1]
        rows.append(Row.limited(f"vram.{verb}", Figure.of(values[statement], "ms", scale=1e3), at_most=_AT_MOST))
        rows.append(Row(f"vram.{verb}: modules loaded", Figure.of([modules], "modules")))
        rows.append(Row(f"vram.{verb}: of vram among them", Figure.of([ours], "modules")))
        if with_numpy:
            notes.append(f"vram.{verb} loads numpy")
        if not compiled:
            notes.append(f"vram.{verb}: not all files are compiled, which is what most of the time went into")
    rows.append(
        Row("vram.attach called, and the first byte read through numpy", Figure.of(values[use], "ms", scale=1e3))
    )
    return Result("first-use", "The first use of a verb in a fresh process", rows, notes)
