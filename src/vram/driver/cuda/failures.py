"""Errors for the status codes of the driver: the exception for each, and its remedy.

Codes are those of ``CUresult`` in cuda.h. Whether a device can still be used after an error is from the CUDA driver
API's manual: "This leaves the process in an inconsistent state and any further CUDA work will return the same error.
To continue using CUDA, the process must be terminated and relaunched." So a loss is one of the process, not of one GPU.
"""

from __future__ import annotations

from ...errors import DeviceLostError, DriverError, OutOfMemoryError

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
MAP_FAILED = 205
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_IMPLICIT = 906
UNKNOWN = 999

# After one of these nothing of the driver works any more in this process. Not 46: that device is somebody else's.
_LOST = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
_REMEDIES = {
    3: "the driver was not initialised in this process; after a fork it cannot be: start workers with spawn",
    4: "the driver is shutting down",
    46: "another process uses the device exclusively",
    100: "no GPU is visible; see CUDA_VISIBLE_DEVICES",
    201: "no context of the device is current",
    205: "the memory is already mapped",
    900: "a stream is capturing a graph, whose work nobody can wait for: end the capture first",
    803: "the CUDA library and the kernel's NVIDIA driver are of different releases; reboot or reinstall",
    804: "the CUDA compatibility library does not support this GPU",
}


def failure(call: str, code: int, name: str, text: str = "") -> DriverError:
    """Return the typed error for a status of a call; `name` and `text` are the driver's own words for the code."""
    kind: type[DriverError] = DriverError
    remedy = _REMEDIES.get(code, "")
    if code == OUT_OF_MEMORY:
        kind, remedy = (
            OutOfMemoryError,
            "free some GPU memory (other processes and frameworks hold some) or ask for less",
        )
    elif code in _LOST:
        kind, remedy = DeviceLostError, "the device cannot be used any more in this process; start a new one"
    return kind(call, code, name, ": ".join(part for part in (text, remedy) if part))
