"""The process that holds what a keeper must not lose: run as a file, by ``vram keep``.

It has duplicates of the keeper's descriptors, each under a number that the keeper chose: the listener, every client's
connection, everybody's memory, and the journal. It looks at none of them. When the keeper dies it starts the
next one, which asks for all of them. It imports nothing of this library, and little of Python's: it is to take little
memory, and to have nothing to die of.

At a planned restart (:mod:`.guarded`) another guardian asks for all of them in the place of the next keeper, with the
same messages; the keeper that it has started says ``E`` right before it serves. If both of them die before that, or
are told to end, this guardian starts a keeper as before.

The messages of a keeper, over a socket pair, and their answers:

====  ===================================================  ==========================================
 K    a number; with descriptors: keep them as that         nothing
      number and those that follow
 D    numbers: close these                                  nothing
 G    how many were received so far                         so many numbers, with their descriptors;
                                                            none is the end
 R    it serves                                             nothing
 N    with a descriptor: who asks there is to have           nothing
      everything once this keeper is gone
 E    it ends, and is not to be followed by another         nothing
====  ===================================================  ==========================================

Closing is done by up to 8 threads: the last close of memory frees it, a second for 8 GiB. Where there is no room for
more, the guardian says so and ends, and the keeper, which has everything, starts another.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from _thread import allocate_lock, start_new_thread
from collections import deque

_REST = 0.05  # seconds before another try to start a keeper
_NAP = 20  # milliseconds in which it is told more, and is not woken for each: who publishes would pay for that
_PART = 200  # descriptors in one message; the kernel takes 253
_ROOM = 1 << 16  # bytes of one message
_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC of <sys/socket.h>
_MOST = 8  # keepers in a row that die before they serve
_CTRUNC = 8  # MSG_CTRUNC
_CLOSERS = 8  # threads that close
# Numbers that guarded.py knows too: the connection to the guardian that gave everything, and its other end, before.
_BEFORE, _TO_HAND = 2, 3
_WAITS = (0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each of those


class EndError(Exception):
    """This guardian ends, and says why: there is no room for what it is given, say, or nothing to take over."""


class Guardian:
    """Descriptors by number, and the keeper that they are for."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.kept: dict[int, int] = {}
        self.keeper = 0  # its pid
        self.is_child = True
        self.is_told = False  # a signal said that it is to end
        self.served = False
        self.ends = False
        self.next: socket.socket | None = None  # another guardian, which is to have everything
        self.before: socket.socket | None = None  # another guardian, which is to give everything
        self._unclosed: deque[int] = deque()
        self._threads = 0
        self._lock = allocate_lock()
        self._spare = [os.eventfd(0), os.eventfd(0)]  # kept back for start()

    def _close_all(self) -> None:
        """Close one after the other, until nothing is left."""
        while True:
            with self._lock:
                if not self._unclosed:
                    self._threads -= 1
                    return
                fd = self._unclosed.popleft()
            with contextlib.suppress(OSError):
                os.close(fd)

    def start(self) -> socket.socket:
        """Start a keeper; return this side of the connection to it."""
        while self._spare:
            os.close(self._spare.pop())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        command = [*self.command, "--guardian-fd", str(theirs.fileno())]
        while True:
            try:
                self.keeper = os.posix_spawn(command[0], command, os.environ)
                break
            except OSError as error:
                # No process can be made now, or no memory is left for one. This one has to go on, or all is lost.
                if error.errno not in (errno.EAGAIN, errno.ENOMEM) or not self.kept or self.is_told:
                    ours.close()
                    theirs.close()
                    raise
                time.sleep(_REST)
        theirs.close()
        with contextlib.suppress(OSError):
            self._spare += [os.eventfd(0)]
            self._spare += [os.eventfd(0)]
        if self.is_told:  # between the last keeper's end and this
            self.tell(signal.SIGTERM)
        return ours

    def tell(self, number: int, _frame: object = None) -> None:
        """Pass a signal on to the keeper. One that is about to serve in the place of another guardian's is killed."""
        self.is_told = True
        with contextlib.suppress(ProcessLookupError):
            if self.keeper:
                os.kill(self.keeper, signal.SIGKILL if self.is_taking else number)

    @property
    def is_taking(self) -> bool:
        """Whether another guardian goes on if this one and its keeper end now."""
        return self.before is not None or _BEFORE in self.kept

    def hold(self, sock: socket.socket) -> None:
        """Do what a keeper says, until it is gone."""
        self.served = self.ends = False
        end = select.poll()
        end.register(sock, 0)  # POLLHUP comes unasked
        more = select.poll()
        more.register(sock, select.POLLIN)
        naps = False
        while True:
            if naps and not more.poll(0):
                more.poll()
                end.poll(_NAP)
            try:
                payload, fds, cut = _received(sock)
            except ConnectionResetError:  # it left something unread
                continue
            if not payload:
                return
            if cut:
                raise EndError(
                    f"there is no room for more than the {len(self.kept)} descriptors that are kept: this guardian "
                    f"ends, and the keeper starts another"
                )
            naps = payload[:1] in b"KD"
            kind, numbers = payload[:1], struct.unpack_from(f"<{(len(payload) - 1) // 8}Q", payload, 1)
            if kind == b"K":
                for number, fd in enumerate(fds, start=numbers[0]):
                    self._close(number)
                    self.kept[number] = fd
            elif kind == b"D":
                for number in numbers:
                    self._close(number)
            elif kind == b"G":
                self._give(sock, numbers[0])
            elif kind == b"R":
                self.served, self.before = True, None
                if "--ready-fd" in self.command and not {"--log", "--parent-fd"}.intersection(self.command):
                    _write_nowhere()
            elif kind == b"N":
                self.next = socket.socket(fileno=fds[0])
            elif kind == b"E":
                self.ends = True

    def _close(self, number: int) -> None:
        fd = self.kept.pop(number, None)
        if fd is None:
            return
        with self._lock:
            self._unclosed.append(fd)
            starts = len(self._unclosed) > self._threads < _CLOSERS
            self._threads += starts
        if starts:
            try:
                start_new_thread(self._close_all, ())
            except RuntimeError:  # not now; the next one to close tries again
                with self._lock:
                    self._threads -= 1

    def _give(self, sock: socket.socket, start: int) -> None:
        """Give descriptors. The first keeper gets the socket to be handed to the running keeper, which ends then."""
        if self.before is not None and _TO_HAND not in self.kept:
            self._fetch(self.before)
        numbers = list(self.kept)[start : start + _PART]
        fds = array.array("i", [self.kept[number] for number in numbers])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendmsg([struct.pack(f"<{len(numbers)}Q", *numbers) or b"\0"], rights)
        if not numbers:
            self._close(_TO_HAND)

    def _fetch(self, before: socket.socket) -> None:
        """Take everything from another guardian, and that connection too."""
        payload, fds = b"", array.array("i", [0])
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while fds:
                before.sendall(b"G" + struct.pack("<Q", len(self.kept)))
                payload, fds, _ = _received(before)
                if len(payload) != 8 * len(fds):  # the end, or there is no room for more
                    break
                self.kept.update(zip(struct.unpack(f"<{len(fds)}Q", payload), fds, strict=True))
        if len(payload) != 1:
            raise EndError(
                "nothing was taken over: the keeper before, or its guardian, died just then; see what is there "
                "(vram ls), and try again"
            )
        self.kept[_BEFORE], self.before = before.detach(), None

    def gone(self) -> int:
        """Return how a keeper that is gone ended: its exit status, or a signal below zero."""
        if not self.is_child:
            return 0
        _, status = os.waitpid(self.keeper, 0)
        return os.waitstatus_to_exitcode(status)


def _received(sock: socket.socket) -> tuple[bytes, array.array[int], bool]:
    """Return a message, its descriptors, and whether there was no room for all of them."""
    payload, ancillary, said, _ = sock.recvmsg(_ROOM, socket.CMSG_SPACE(4 * 253), _CLOEXEC)
    data = b"".join([data for _, _, data in ancillary])
    return payload, array.array("i", data[: len(data) // 4 * 4]), bool(said & _CTRUNC)


def _hear_signals(guardian: Guardian) -> None:
    """Have a thread wait for the signals that end this process, which are blocked in all threads to its very end.
    So none of them can kill it. A keeper starts with them blocked, and has such a thread as well."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def hear() -> None:
        while True:
            guardian.tell(signal.sigwait(numbers))

    try:
        start_new_thread(hear, ())
    except RuntimeError as error:
        raise EndError(f"a guardian needs a thread that hears signals: {error} (ulimit -u)") from None


def _write_nowhere() -> None:
    """Let go of stderr, as the keeper does by then: whoever waited until it serves is told, and reads no more."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def main(arguments: list[str]) -> int:
    """Run keepers, one after the other, as ``COMMAND...``; as ``--of FD PID COMMAND...`` stand by one that runs; as
    ``--from FD OTHER COMMAND...`` get everything over a socket, once its other end was handed to a guardian."""
    guardian = Guardian(arguments)
    sock: socket.socket | None = None  # to a keeper that runs, or another guardian; else a keeper is started
    if arguments[0] == "--of":
        sock, guardian.keeper = socket.socket(fileno=int(arguments[1])), int(arguments[2])
        guardian.command = arguments[3:]
        os.set_inheritable(sock.fileno(), False)
    elif arguments[0] == "--from":
        guardian.before, guardian.kept[_TO_HAND] = socket.socket(fileno=int(arguments[1])), int(arguments[2])
        guardian.command = arguments[3:]
        for end in arguments[1:3]:
            os.set_inheritable(int(end), False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _hear_signals(guardian)
    failures, has_served, gives = 0, sock is not None, False
    while True:
        guardian.is_child = sock is None
        sock = sock or guardian.start()
        guardian.hold(sock)
        sock.close()
        if not (guardian.is_child or guardian.served or guardian.ends or gives):
            raise EndError("a keeper and its guardian died at once: what was kept is lost: publish it again")
        status = guardian.gone()
        guardian.keeper = 0
        if guardian.is_told and guardian.is_taking:
            print("vram keep: told to end before it served: the keeper before goes on", file=sys.stderr)
        has_served = has_served or guardian.served
        if guardian.ends or guardian.is_told or (status >= 0 and not has_served):
            return status if status >= 0 else 128 - status
        failures = 0 if guardian.served else failures + 1
        if failures >= _MOST:
            lost = "what was kept is lost, and has to be published again"
            raise EndError(
                f"{failures} keepers in a row died before they served (the last with {status}): "
                f"{'the keeper before goes on' if guardian.is_taking else lost}"
            )
        time.sleep(_WAITS[failures])
        sock, guardian.next = guardian.next, None
        gives = sock is not None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except EndError as error:
        print(f"vram keep: {error}", file=sys.stderr)
        sys.exit(1)
