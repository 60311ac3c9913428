"""systemd's protocol for a service: ``sd_notify`` sends the keeper's state to ``NOTIFY_SOCKET``.

It is a stable interface of a few environment variables and a datagram: no library is needed.
"""

from __future__ import annotations

import socket
import time


class ServiceManager:
    """The service manager that hears how this process is; `address` is ``NOTIFY_SOCKET`` (None: there is none)."""

    def __init__(self, address: str | None) -> None:
        self._address = None
        if address and address[0] in "/@":  # what else it may be (vsock) has no place for a keeper
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def __bool__(self) -> bool:
        return self._address is not None

    def tell(self, **variables: object) -> None:
        """Send assignments, such as ``READY=1``. A manager that does not hear is no reason for a keeper to end."""
        if self._address is None:
            return
        message = "\n".join(f"{name}={value}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(), self._address)
        except OSError:
            pass

    def reloading(self) -> None:
        """Say that a restart begins; ``READY=1`` follows from the next keeper."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def is_same_service(pid: int | None) -> bool:
    """Whether a process is in the control group of this one, which is how systemd knows whose it is."""
    try:
        with open("/proc/self/cgroup", "rb") as ours, open(f"/proc/{pid}/cgroup", "rb") as theirs:
            return ours.read() == theirs.read()
    except OSError:
        return False
