"""The other end of an array channel: does what it is told over the channel, and answers over it."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

from tests.support.lend_children import Sources

import standin
import vram
from vram import driver as drivers
from vram import lifetime
from vram.spec import Location

GPU = Location("cuda", 0)


def serve(channel: vram.ArrayChannel) -> None:
    """Do what comes over the channel, lists of a word and its arguments, until None or the channel's end comes."""
    held: dict[str, Any] = {}
    stream = 0
    with Sources() as sources, channel, contextlib.suppress(vram.errors.PeerGoneError):
        while (order := channel.recv()) is not None:
            if not isinstance(order, list):
                del order
                continue
            word, *given = order
            if word == "take":
                key, on_stream = given
                if on_stream and not stream:
                    driver: Any = drivers.get(GPU)
                    stream = driver.stream_create(GPU)
                channel.send("go on")
                held[key] = channel.recv(stream=stream if on_stream else None)
                channel.send("taken")
            elif word == "take in vain":
                channel.send("go on")
                try:
                    channel.recv(timeout=given[1])
                except vram.errors.VramError as error:  # the stand-in ends a wait that has no end
                    channel.send(type(error).__name__)
                held[given[0]] = channel.recv()
                channel.send("taken")
            elif word == "take and drop":
                channel.send("go on")
                for _ in range(given[0]):
                    channel.recv()
            elif word == "give back":
                channel.send(held[given[0]])
            elif word == "give part":
                key, start, stop = given
                with held[key][start:stop] as part:
                    channel.send(part)
                del part
            elif word == "make":
                held["made"] = vram.share(sources.make(given[0]))
                channel.send("made")
            elif word == "close":
                channel.send("closing")
                held.clear()
                return
            else:
                channel.send(_do(word, held, given, stream))
            del order
        held.clear()


def _do(word: str, held: dict[str, Any], given: list[Any], stream: int) -> Any:
    driver: Any = drivers.get(GPU)
    if word == "read":
        return held[given[0]].to_host().tolist()
    if word == "fill":
        held[given[0]][...] = given[1]
    elif word == "slice":
        held[given[1]] = held[given[0]][10:20]
    elif word == "drop":
        for key in given or list(held):
            del held[key]
    elif word == "tie":
        cycle: list[Any] = [held.pop(given[0])]
        cycle.append(cycle)
    elif word == "collect":
        return gc.collect()
    elif word == "addresses":
        return [held[key].address for key in given]
    elif word == "defer":
        standin.Standin().defer(given[0])
    elif word == "copy on stream":
        source = held[given[0]]
        with vram.empty(source.shape, source.dtype, device="cuda:0") as target:
            driver.copy_async(target.address, source.address, source.nbytes, stream)
            driver.stream_synchronize(stream, GPU)
            return target.to_host().tolist()
    elif word == "clear calls":
        standin.Standin().clear()
    elif word == "calls":
        return standin.Standin().calls(given[0])
    elif word == "warm up":
        driver.stream_destroy(driver.stream_create(GPU))
    elif word == "books":
        gc.collect()
        live = driver.live()
        return [
            len(os.listdir("/proc/self/fd")), len(lifetime.live()), live.reservations, live.handles, live.mappings,
            standin.Standin().live().get("ipc_opens", 0),
        ]  # fmt: skip
    return word
