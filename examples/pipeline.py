"""A pipeline of processes that pass large arrays on without a copy: read, transform, reduce.

An array travels as a reference to its memory: through an ArrayChannel here, and as well through the queues, pipes and
pools of multiprocessing. What comes back is the very object that was sent, so buffers are used again.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
FRAMES, SHAPE = 60, (1080, 1920, 3)


def transform(frames: vram.ArrayChannel) -> None:
    """Invert each frame where it is, and send it back."""
    with frames:
        while (frame := frames.recv()) is not None:
            if DEVICE == "host":
                pixels = frame.numpy()
                pixels ^= 255
            else:
                pixels = frame.torch()
                pixels.bitwise_not_()
            frames.send(frame)


def main() -> None:
    """Send frames round, two at a time."""
    ours, theirs = vram.ArrayChannel.pair()
    process = multiprocessing.get_context("spawn").Process(target=transform, args=(theirs,))
    process.start()
    theirs.close()  # the child has it
    with ours:
        free = [vram.zeros(SHAPE, "uint8", device=DEVICE) for _ in range(2)]
        ours.send(free[0], timeout=60.0)
        assert ours.recv(timeout=60.0) is free[0]  # both have met: the clock starts
        start = time.perf_counter()
        for number in range(FRAMES):
            frame = free[number % 2]
            frame.fill(number)
            ours.send(frame, timeout=60.0)
            if number:
                done = ours.recv(timeout=60.0)
                assert int(done.to_host()[0, 0, 0]) == (number - 1) ^ 255
        ours.recv(timeout=60.0)
        took = time.perf_counter() - start
        ours.send(None)
    process.join()
    print(
        f"{FRAMES} frames of {free[0].nbytes / 1e6:.1f} MB there and back in {took:.2f} s: {FRAMES / took:.0f} a second"
    )


if __name__ == "__main__":
    main()
