"""Draws vram-top.svg: ``vram top`` of a keeper that is at work. ``python docs/pictures/draw_top.py``, in half a minute.

The screen is what :class:`vram.cli.top.Screen` draws of a real keeper's answers. The load is made up: entries of a few
MiB on the host, which five threads attach, publish and replace.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console

import vram
from vram.cli.top import Screen
from vram.errors import NotFoundError

WIDTH, HEIGHT = 116, 32
LOOKS, INTERVAL = 90, 0.3  # seconds between two looks


def main() -> None:
    """Run a keeper for a while, watch it, and draw what was seen last."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("vram-top.svg"))
    ends = threading.Event()
    with vram.private_keeper(max_bytes="2GiB") as keeper:
        for number in range(24):
            size = (2 + number * 5 % 17) << 20
            vram.publish(f"llama-8b/layers-{number:02}", {"w": np.zeros(size, "uint8")}, keeper=keeper)
        vram.publish("rl/policy", {"w": np.zeros(40 << 20, "uint8")}, keeper=keeper, updatable=True)
        vram.publish("rl/scratch", {"w": np.zeros(6 << 20, "uint8")}, keeper=keeper, writable=True)
        vram.publish("tokenizer", {"w": np.zeros(1 << 20, "uint8")}, keeper=keeper)
        held = [vram.attach(f"llama-8b/layers-{number:02}", keeper=keeper) for number in (*range(24), 3, 3, 7)]
        held += [vram.attach("rl/policy", keeper=keeper) for _ in range(4)]
        threads = [threading.Thread(target=_work, args=(keeper, number, ends)) for number in range(5)]
        for thread in threads:
            thread.start()
        screen = Screen(keeper.path, "size")
        try:
            for _ in range(LOOKS):
                screen.look()
                time.sleep(INTERVAL)
        finally:
            ends.set()
            for thread in threads:
                thread.join()
            for lease in held:
                lease.close()
    console = Console(record=True, width=WIDTH, height=HEIGHT, force_terminal=True, file=io.StringIO(), markup=False)
    screen.path = "/run/user/1000/vram/keeper.sock"
    console.print(screen)
    out.write_text(console.export_svg(title="vram top"))
    print(out)


def _work(keeper: vram.Keeper, number: int, ends: threading.Event) -> None:
    """Publish, miss, or attach, faster and slower."""
    begin = time.monotonic()
    while not ends.is_set():
        load = 1 + math.sin((time.monotonic() - begin) / (2 + number))
        if number == 0:
            name = f"batches/{int(time.monotonic()) % 9}"
            array = np.zeros(int(1 + 9 * load) << 20, "uint8")
            vram.publish(name, {"w": array}, keeper=keeper, ttl=4.0)
            ends.wait(0.05 + 0.2 * load)
        elif number == 1:
            with contextlib.suppress(NotFoundError):
                vram.attach("llama-8b/lora", keeper=keeper)
            ends.wait(0.2 + 2 * load)
        else:
            vram.attach("llama-8b/layers-00", keeper=keeper).close(wait=True)
            ends.wait(0.001 + 0.01 * load)


if __name__ == "__main__":
    main()
