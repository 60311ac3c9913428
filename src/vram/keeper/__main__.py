"""``python -m vram.keeper``: a keeper in the foreground, without anything that a keeper does not need."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UnsupportedError, UsageError, VramError
from ..spec import format_count, format_size
from ..version import __version__
from . import event_log
from .bind import Listener
from .catalogue import CLAIM_TIMEOUT
from .limits import OPTIONS, Quotas, parse_limit, written_limit
from .rules import IDLE, MAX_TTL
from .server import KeeperServer
from .service_manager import ServiceManager, given_listener, is_same_service, leave_to_children

if TYPE_CHECKING:
    from .connection import Connection
    from .guarded import GuardianLink
    from .messages import Takeover
    from .restart import Succession


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper until it is told to stop; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vram.keeper", description="Keep shared memory alive when its maker is gone."
    )
    parser.add_argument("--socket", metavar="PATH", help="where to listen (default: VRAM_KEEPER, or this user's)")
    parser.add_argument(
        "--mode", help="permissions of the socket, octal: who may connect may attach (default: 0600, or kept)"
    )
    parser.add_argument("--group", help="group of the socket")
    for option in OPTIONS:
        metavar = "SIZE" if option.limit.is_size else "N"
        parser.add_argument(option.flag, dest=option.field, metavar=metavar, help=option.help)
    parser.add_argument(
        "--patience", metavar="SECONDS", type=float, default=IDLE, help="disconnect who keeps it waiting for longer"
    )
    parser.add_argument(
        "--claim-timeout",
        metavar="SECONDS",
        help=f"after which the claim to publish a name passes to the next who waits (default: {CLAIM_TIMEOUT:g})",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="take over from the keeper that runs, if one does, with its limits unless others are given",
    )
    survives = parser.add_mutually_exclusive_group()
    survives.add_argument(
        "--ephemeral", action="store_true", help="what is kept dies with it; the default here, and not of `vram keep`"
    )
    survives.add_argument(
        "--survive",
        action="store_true",
        help="under a small process that starts the next keeper when this one dies, with all that it had",
    )
    parser.add_argument("--guardian-fd", metavar="FD", type=int, default=-1, help="connected to that process")
    parser.add_argument(
        "--listener-fd", metavar="FD", type=int, default=-1, help="what a service manager passed to that process"
    )
    parser.add_argument(
        "--ready-fd", metavar="FD", type=int, default=-1, help="say here that it serves, and nothing on stdout"
    )
    parser.add_argument("--metrics", metavar="HOST:PORT", help="who started it serves its numbers there")
    parser.add_argument("--parent-fd", metavar="FD", type=int, default=-1, help="stop when this reads end of file")
    parser.add_argument(
        "--own-directory",
        action="store_true",
        help="the socket's directory was made for this keeper alone: it is removed in the end",
    )
    parser.add_argument("--log", choices=event_log.FORMS, help="a line on stderr for each event")
    parser.add_argument("--log-level", choices=event_log.LEVELS, default="info", help="of those, from this one on")
    given = parser.parse_args(arguments)
    mode = _mode(parser, given.mode)
    options = list(sys.argv[1:] if arguments is None else arguments)
    command = [sys.executable, "-P", "-m", "vram.keeper", *options]
    if given.survive and given.guardian_fd < 0:
        try:
            _hold(given, mode, command)
        except VramError as error:
            print(f"vram keep: {error}", file=sys.stderr)
            return 1
    if given.log is not None:
        event_log.start(given.log, given.log_level)
        event_log.say(
            "vram.keeper.start",
            fields={"process.pid": os.getpid(), "user.id": os.geteuid(), "service.version": __version__},
        )
    try:
        return _keep(given, mode, command)
    finally:
        event_log.stop()


def _mode(parser: argparse.ArgumentParser, given: str | None) -> int | None:
    try:
        mode = None if given is None else int(given, 8)
    except ValueError:
        mode = -1
    if mode is not None and not 0 <= mode <= 0o777:
        parser.error(f"--mode {given!r} is not an octal mode such as 0660")
    return mode


def _keep(given: argparse.Namespace, mode: int | None, command: list[str]) -> int:
    succession: Succession | None = None
    recovered = False
    is_started = given.ready_fd >= 0  # by a program that waits until it serves
    # Not of a program that has a keeper of its own: what is said there is of that program. But a successor in the
    # background is what `systemctl reload` starts.
    is_the_service = not is_started or (given.takeover and given.parent_fd < 0)
    manager = ServiceManager.found() if is_the_service else ServiceManager(None)

    def beat() -> None:
        manager.tell(WATCHDOG=1)
        server.loop.call_later(manager.watchdog_interval, beat)

    def hand_over(server: KeeperServer, connection: Connection, request: Takeover) -> None:
        _hand_over(server, connection, request, manager)

    def ready() -> None:
        if succession is not None:
            event_log.say("vram.keeper.takeover", fields={"process.pid": succession.pid or None})
        if recovered:
            event_log.say("vram.keeper.recovered", fields={"process.pid": os.getpid()})
        event_log.say("vram.keeper.ready", fields={"process.pid": os.getpid(), "vram.keeper.socket": server.path})
        manager.ready(f"serving at {server.path}", main=server.main_pid if succession is not None else None)
        if manager.watchdog_interval:
            beat()
        ends = "`vram stop`" if is_started else "Ctrl-C or SIGTERM"
        lines = [f"serving at {server.path} (pid {os.getpid()}); {ends} ends it"]
        if recovered:
            lines = [f"went on at {server.path} where a keeper died (pid {os.getpid()})"]
        elif succession is not None:
            lines.insert(0, _told(succession, command))
        elif given.takeover:
            lines.insert(0, f"no keeper ran at {server.path}: nothing was taken over")
        if not is_started:
            for line in lines:
                _say(line)
            return
        with contextlib.suppress(OSError):  # the program waits no more, or a keeper that died had told it
            os.write(given.ready_fd, "".join(f"vram keep: {line}\n" for line in lines).encode())
        os.close(given.ready_fd)
        if link is not None and "--ready-fd" in link.command:  # another guardian has no such descriptor
            at = link.command.index("--ready-fd")
            del link.command[at : at + 2]
        if given.log is None and given.parent_fd < 0:
            _write_nowhere()

    def ending() -> None:
        manager.stopping()
        if not is_started:
            _say(f"ended: {_let_go(server)}")

    link: GuardianLink | None = None
    chosen_limits = [option for option in OPTIONS if getattr(given, option.field) is not None]
    try:
        limits = {option.field: parse_limit(getattr(given, option.field), option.flag) for option in chosen_limits}
        chosen = list(limits)
        claim_timeout = CLAIM_TIMEOUT
        if given.claim_timeout is not None:
            claim_timeout = parse_seconds(given.claim_timeout, "--claim-timeout")
            chosen.append("claim_timeout")
        if given.guardian_fd >= 0:
            from .guarded import GuardianLink

            # Without what was passed to the guardian: another one has the listener from this keeper.
            end = command.index("--listener-fd" if given.listener_fd >= 0 else "--guardian-fd")
            link = GuardianLink(socket.socket(fileno=given.guardian_fd), command[:end])
            link.replaced = lambda pid: manager.tell(MAINPID=pid)  # what ends then is not the service
        listener = None if is_started else _passed_listener(given, mode)
        server = _server(
            link,
            given.socket if listener is None else listener.path,
            mode=mode,
            group=given.group,
            quotas=Quotas(**limits),
            patience=given.patience,
            claim_timeout=claim_timeout,
            hand_over=hand_over,
        )
        if link is not None:
            recovered = server.recover()  # type: ignore[attr-defined]
            if server.successor:
                link.end()
                return 0
        if listener is not None:
            server.listen_on(listener)
        elif given.listener_fd >= 0:
            passed = socket.socket(fileno=given.listener_fd)
            os.set_inheritable(given.listener_fd, False)
            if recovered:  # with the same one, which the keeper before had given to the guardian
                passed.close()
            else:
                server.listen_on(Listener.adopt(given.socket, passed, lent=True))
        if given.takeover and not recovered:
            from .restart import take_over

            succession = take_over(server, chosen)
        server.serve(ready, parent_fd=given.parent_fd, ending=ending)
        event_log.say("vram.keeper.shutdown", fields={"process.pid": os.getpid()})
        if link is not None:
            link.end()
    except (VramError, OSError) as error:
        event_log.say("vram.keeper.failed", logging.ERROR, error=error, otherwise=f"vram keep: {error}")
        if link is not None:
            link.end()  # another one would fare no better
        return 1
    finally:
        if given.own_directory:  # whoever made it may be dead. Not if another keeper took over: it is not empty
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(given.socket))
    return 0


def _hold(given: argparse.Namespace, mode: int | None, command: list[str]) -> NoReturn:
    """Replace this process by the guardian, which starts keepers. A service manager's listener is checked only here:
    a keeper that goes on for a dead one must not end because the mode of a path has changed."""
    from .guarded import guardian_command

    listener = None if given.ready_fd >= 0 else _passed_listener(given, mode)
    leave_to_children()
    if listener is not None:
        fd = listener.sock.detach()
        os.set_inheritable(fd, True)
        command = [*command, "--socket", listener.path, "--listener-fd", str(fd)]
    command = [*guardian_command(), *command]
    sys.stdout.flush()
    os.execv(command[0], command)


def _passed_listener(given: argparse.Namespace, mode: int | None) -> Listener | None:
    listener = given_listener(given.socket, mode, given.group)
    if listener is not None and given.takeover:
        listener.sock.close()
        raise UsageError(
            "--takeover with a listener that was passed (LISTEN_FDS): who passes it has no keeper running; leave "
            "--takeover to ExecReload="
        )
    return listener


def _server(link: GuardianLink | None, *arguments: Any, **options: Any) -> KeeperServer:
    if link is None:
        return KeeperServer(*arguments, **options)
    from .guarded import GuardedServer

    return GuardedServer(*arguments, link=link, **options)


def _hand_over(server: KeeperServer, connection: Connection, request: Takeover, manager: ServiceManager) -> None:
    from .restart import hand_over  # only the keeper that is replaced needs it

    if not manager:
        hand_over(server, connection, request)
        return
    pid = connection.credentials.pid
    if server.listener.lent and not is_same_service(pid):
        # It would take this process for dead, and start another keeper on the same listener with the next client.
        raise UnsupportedError(
            "taking over",
            "a successor in the service of the keeper that it replaces",
            f"pid {pid} outside of it",
            "Use `systemctl reload vram-keeper`",
        )
    manager.reloading()
    hand_over(server, connection, request)
    if server.successor:
        # Before this process ends: what ends is not the service. It may have a guardian, which is to be watched then.
        manager.tell(MAINPID=request.main_pid if is_same_service(request.main_pid) else pid)
    else:
        manager.ready(f"serving at {server.path}")


def parse_seconds(text: str, option: str) -> float:
    """Return a number of seconds, above 0 and at most ten years."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TTL:
        raise UsageError(f"{option} {text[:40]!r} is not a number of seconds: above 0 and at most {MAX_TTL:.0f}")
    return seconds


def _let_go(server: KeeperServer) -> str:
    """Say what ends with a keeper, before it does."""
    catalogue = server.catalogue
    if not catalogue.versions:
        return "it kept nothing"
    leases = len(catalogue.leases)
    said = f"let go of {format_count(catalogue.versions, 'version')}, {format_size(catalogue.accounts.total.nbytes)}"
    return f"{said}; what is mapped by {format_count(leases, 'lease')} stays until it is closed" if leases else said


def _write_nowhere() -> None:
    """Let go of stderr, which was for whoever waited until it serves: a file of theirs, which nobody reads any more."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _left_out(command: Sequence[str], before: Sequence[str]) -> list[str]:
    """Return those options of the keeper before that move with no takeover, and were not given to this one."""
    found = []
    for option, takes_value in (("--metrics", True), ("--log", True), ("--survive", False)):
        if option == "--survive" and "--ephemeral" in command:
            continue  # as somebody wanted
        if option in before and option not in command:
            value = before[before.index(option) + 1 :][:1] if takes_value else ()
            found.append(" ".join((option, *value)))
    return found


def _told(succession: Succession, command: Sequence[str]) -> str:
    """Say which limits hold after a takeover, which of them are other ones than before, and what was not taken over."""
    said, left = _told_limits(succession), _left_out(command, succession.command)
    return f"{said}; not taken over, to be given again: {', '.join(left)}" if left else said


def _told_limits(succession: Succession) -> str:
    who = f"took over from pid {succession.pid or 'unknown'}"
    before, now = succession.before, succession.now
    parts = []
    for option in OPTIONS:
        was, limit = (getattr(quotas, option.field) for quotas in (before, now))
        said = f"{option.flag} {written_limit(option, limit)}"
        if was != limit:
            parts.append(f"{said} (was {written_limit(option, was)})")
        elif limit != getattr(Quotas(), option.field):
            parts.append(f"{said} as before")
    was_seconds, seconds = succession.claims_before, succession.claims_now
    if was_seconds != seconds:
        parts.append(f"--claim-timeout {seconds:g} (was {was_seconds:g})")
    elif seconds != CLAIM_TIMEOUT:
        parts.append(f"--claim-timeout {seconds:g} as before")
    return f"{who}; limits: {', '.join(parts) or 'as before'}"


def _say(line: str) -> None:
    """Print a line. A failure to print does not end the keeper, which may hold memory already."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no standard output
        print(f"vram keep: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
