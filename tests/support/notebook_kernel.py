"""Runs a notebook in a kernel of its own, as a person does: each cell twice, one interrupted, the kernel restarted.

``python notebook_kernel.py NOTEBOOK`` prints what the cells showed, as JSON: a list of runs, each a dictionary of MIME
bundles by the id of the cell. A process of its own, since what drives kernels leaves threads and descriptors behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SECONDS = 240  # of one cell
WAITS = 'print("begun", flush=True)\nvram.attach("notebook/never", timeout=None)'


async def run(path: str) -> list[dict[str, Any]]:
    """Run it twice, interrupt a cell that waits, run it again, kill the kernel, and run it once more."""
    client = NotebookClient(nbformat.read(path, as_version=4), timeout=SECONDS, kernel_name="python3")
    found = []
    async with client.async_setup_kernel():
        found += [await all_cells(client), await all_cells(client)]
        found += [await interrupted(client), await all_cells(client)]
        await restarted(client)
        found.append(await all_cells(client))
    return found


async def all_cells(client: NotebookClient) -> dict[str, Any]:
    """Run every cell twice, one after the other, and return what each showed."""
    for number, cell in enumerate(client.nb.cells):
        for _ in range(2):
            await client.async_execute_cell(cell, number)
    cells = [cell for cell in client.nb.cells if cell.cell_type == "code"]
    return {cell.id: [shown(output) for output in cell.outputs] for cell in cells}


def shown(output: Any) -> Any:
    """Return what an output shows, by MIME type; of a stream its text, of an error its name."""
    return output.get("data") or {output.output_type: output.get("text") or output.get("ename")}


async def interrupted(client: NotebookClient) -> dict[str, Any]:
    """Interrupt a cell that waits for an entry which never comes."""
    cell = nbformat.v4.new_code_cell(WAITS)
    client.nb.cells.append(cell)
    task = asyncio.ensure_future(client.async_execute_cell(cell, len(client.nb.cells) - 1))
    while not any("begun" in output.get("text", "") for output in cell.outputs):
        if task.done():
            break
        await asyncio.sleep(0.01)
    await client.km.interrupt_kernel()
    with contextlib.suppress(CellExecutionError):
        await task
    client.nb.cells.remove(cell)
    return {"interrupted": [shown(output) for output in cell.outputs]}


async def restarted(client: NotebookClient) -> None:
    """Kill the kernel and start it again, as the button does."""
    client.kc.stop_channels()
    await client.km.restart_kernel(now=True)
    await client.async_start_new_kernel_client()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1]))))
