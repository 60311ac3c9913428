"""``python -m vram.keeper``: a keeper in the foreground, without anything that a keeper does not need."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ..errors import BusyError, PeerGoneError, UnsupportedError, UsageError, VramError
from ..spec import format_count, format_size
from ..version import __version__
from . import event_log
from .bind import group_id
from .limits import OPTIONS, Quotas, parse_limit
from .rules import IDLE
from .server import ENDING, LEAST, KeeperServer, most_handles
from .service_manager import ServiceManager, is_same_service

if TYPE_CHECKING:
    from .disk import Disk
    from .guarded import Guard
    from .rows import OptionsRow


PROGRAM = [sys.executable, "-P", "-m", "vram.keeper"]  # -P: the current directory has no part of the library
# Options that hold from one keeper to the next, unless they are given anew.
_LIMITS = {option.flag: option.field for option in OPTIONS}
_CARRIED = {**_LIMITS, "--patience": "patience", "--persist": "persist", "--persist-prefix": "persist_prefix"}
_CARRIED["--instance"] = "instance"
_DESCRIPTORS = {
    "--guardian-fd": "connected to the process that starts the next keeper",
    "--ready-fd": "say here that it serves, and nothing on stdout",
    "--parent-fd": "stop when this reads end of file",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vram.keeper", description="Keep shared memory alive when its maker is gone."
    )
    add = parser.add_argument
    add("--socket", metavar="PATH", help="where to listen (default: VRAM_KEEPER, or this user's)")
    add(
        "--mode",
        type=_mode,
        help="mode of the socket, octal: who may connect may attach (default: 0600, or kept)",
    )
    add("--group", help="group of the socket")
    for option in OPTIONS:
        metavar = "SIZE" if option.limit.is_size else "N"
        add(option.flag, dest=option.field, metavar=metavar, help=option.help)
    add("--patience", metavar="SECONDS", type=float, help="disconnect who keeps it waiting for longer")
    add("--persist", metavar="FOLDER", help="save your entries there, and publish them at the next start; or none")
    add("--persist-prefix", metavar="NAME", help="only those whose names begin so")
    add("--instance", help=argparse.SUPPRESS)  # of keepers that follow each other, if they save entries
    takes_over = "restart the keeper that runs, if one does: with what it has, and its limits unless others are given"
    add("--takeover", action="store_true", help=takes_over)
    survives = parser.add_mutually_exclusive_group()
    dies = "what is kept dies with it; the default here, and not of `vram keep`"
    survives.add_argument("--ephemeral", action="store_true", help=dies)
    goes_on = "under a small process that starts the next keeper when this one dies, with all that it had"
    survives.add_argument("--survive", action="store_true", help=goes_on)
    for flag, what in _DESCRIPTORS.items():
        add(flag, metavar="FD", type=int, default=-1, help=what)
    own = "the socket's directory was made for this keeper alone: it is removed in the end"
    add("--own-directory", action="store_true", help=own)
    add("--log", choices=event_log.FORMS, help="a line on stderr for each event")
    add("--log-level", choices=event_log.LEVELS, default="info", help="of those, from this one on")
    return parser


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise argparse.ArgumentTypeError(f"{text!r} is not an octal mode such as 0660")
    return mode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper until it is told to stop; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    options = list(sys.argv[1:] if arguments is None else arguments)
    if given.takeover and given.ephemeral:
        parser.error("--takeover with --ephemeral: a keeper can be restarted, and go on, if it survives")
    if (given.survive or given.takeover) and given.guardian_fd < 0:
        try:
            _hold(given, options)
        except VramError as error:
            print(f"vram keep: {error}", file=sys.stderr)
            return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # before there are threads: the server has one that hears them
    if given.log is not None:
        event_log.start(given.log, given.log_level)
        event_log.say(
            "vram.keeper.start",
            fields={"process.pid": os.getpid(), "user.id": os.geteuid(), "service.version": __version__},
        )
    try:
        return _keep(given, options)
    finally:
        event_log.stop()


def _keep(given: argparse.Namespace, options: list[str]) -> int:
    this = {"process.pid": os.getpid()}
    before: OptionsRow | None = None  # of the keeper that this one goes on for
    is_started = given.ready_fd >= 0  # by a program that waits until it serves
    # Not of a program that has a keeper of its own: what is said there is of that program. But a restart in the
    # background is what `systemctl reload` starts.
    is_the_service = not is_started or (given.takeover and given.parent_fd < 0)
    manager = ServiceManager(os.environ.get("NOTIFY_SOCKET") if is_the_service else None)

    def about_to_restart(pid: int) -> None:
        if manager and not is_same_service(pid):  # it would take this process for dead, and start another keeper
            raise UnsupportedError(
                "a planned restart",
                "a process in the service of the keeper",
                f"pid {pid} outside of it",
                "Use `systemctl reload vram-keeper`",
            )
        manager.reloading()
        event_log.say("vram.keeper.handed_over", fields={"process.pid": pid})

    def ready() -> None:
        ends = "`vram stop`" if is_started else "Ctrl-C or SIGTERM"
        lines = [f"serving at {server.path} (pid {os.getpid()}); {ends} ends it"]
        state: dict[str, object] = {"READY": 1, "STATUS": f"serving at {server.path}"}
        if guard is not None and before is not None and guard.is_restart:
            event_log.say("vram.keeper.takeover", fields={"process.pid": before.pid})
            limits = " ".join(_words(given, _LIMITS))
            lines.insert(0, f"took over from pid {before.pid}{', with ' * bool(limits)}{limits}")
            state["MAINPID"] = guard.link.pid  # which is to be watched now
        elif before is not None:
            event_log.say("vram.keeper.recovered", fields=this)
            lines = [f"went on at {server.path} where a keeper died (pid {os.getpid()})"]
        elif given.takeover:
            lines.insert(0, f"no keeper ran at {server.path}: nothing was taken over")
        if server.disk is not None and not server.disk.follows:
            lines.append(str(server.disk))
        event_log.say("vram.keeper.ready", fields={**this, "vram.keeper.socket": server.path})
        manager.tell(**state)
        if is_started:
            _tell_starter(given, lines, None if guard is None else guard.link.command)
        else:
            _say(*lines)

    def ending() -> None:
        manager.tell(STOPPING=1)
        if not is_started:
            _say(f"ended: {_let_go(server)}")

    guard: Guard | None = None
    try:
        if given.guardian_fd >= 0:
            from .guarded import TO_HAND, Guard, GuardianLink

            del options[options.index("--guardian-fd") :]  # another guardian has a socket of its own
            guard = Guard(GuardianLink(socket.socket(fileno=given.guardian_fd), [*PROGRAM, *options]))
            if TO_HAND in guard.kept:
                _take_over(guard, given.socket)
            guard.link.replaced = lambda pid: manager.tell(MAINPID=pid)  # what ends then is not the service
        server = KeeperServer(given.socket, mode=given.mode, group=given.group, guard=guard)
        if guard is not None:
            server.about_to_restart = about_to_restart
            before = guard.recover()
            if before is not None:
                _inherit(before, given)
        if given.persist not in (None, "none"):
            server.disk = _disk(server, given, follows=before is not None)
        server.limit(_limits(given))
        server.patience = IDLE if given.patience is None else given.patience
        server.options = _words(given, _CARRIED)
        server.serve(ready, parent_fd=given.parent_fd, ending=ending)
        event_log.say("vram.keeper.shutdown", fields=this)
        if server.is_followed:  # whoever follows waits for the end of this process, which has much to tear down
            event_log.stop()
            os._exit(0)
    except (VramError, OSError) as error:
        event_log.say("vram.keeper.failed", logging.ERROR, error=error, otherwise=f"vram keep: {error}")
        if guard is not None:
            guard.link.end()  # another one would fare no better
        return 1
    finally:
        if given.own_directory:  # whoever made it may be dead. Not if another keeper took over: it is not empty
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(given.socket))
    return 0


def _disk(server: KeeperServer, given: argparse.Namespace, *, follows: bool) -> Disk | None:
    """Return the folder that entries are saved in. A keeper that goes on for another does not end for lack of it."""
    from .disk import Disk

    if server.lost_rows or not given.instance:  # what is not there any more was not removed
        given.instance = secrets.token_hex(8)
    try:
        return Disk(server, given.persist, given.persist_prefix or "", given.instance, follows=follows)
    except BusyError as error:
        if not follows:
            raise
        event_log.say("vram.disk.not_saved", logging.WARNING, error=error, otherwise=f"vram keep: {error}")
        return None


def _limits(given: argparse.Namespace) -> Quotas:
    texts = {option: getattr(given, option.field) for option in OPTIONS}
    return Quotas(**{one.field: parse_limit(text, one.flag) for one, text in texts.items() if text is not None})


def _hold(given: argparse.Namespace, options: list[str]) -> NoReturn:
    """Replace this process by the guardian, which starts keepers. Mistakes in the options are found here: a keeper that
    goes on must not end because a group is no more."""
    from .guarded import guardian_command

    _limits(given)
    if given.group is not None:
        group_id(given.group)
    giver: list[str] = []
    if given.takeover:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            os.set_inheritable(end.fileno(), True)
        giver = ["--from", *(str(end.detach()) for end in ends)]
    command = [*guardian_command(), *giver, *PROGRAM, *options]
    sys.stdout.flush()
    os.execv(command[0], command)


def _take_over(guard: Guard, path: str | None) -> None:
    """Have the keeper that runs end, if one does, and its guardian give everything to that of this keeper."""
    from .client import KeeperClient
    from .guarded import TO_HAND

    fd = guard.kept.pop(TO_HAND)
    try:
        with KeeperClient.connect(path, label="successor") as running:
            held, most = running.statistics().descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if most != resource.RLIM_INFINITY and (most < LEAST or most_handles(most) < held):
                raise UsageError(
                    f"this process may have {most} descriptors, and the keeper that runs holds {held} of memory: "
                    f"`ulimit -n {2 * held + LEAST}` first, or more"
                )
            running.take_over(fd)
    except PeerGoneError:  # none runs
        return
    finally:
        os.close(fd)
    guard.kept = guard.link.everything()


def _inherit(before: OptionsRow, given: argparse.Namespace) -> None:
    """Have those options hold that the keeper before had and that were not given anew."""
    its, _ = _parser().parse_known_args(before.options)  # of another version, perhaps
    if given.persist not in (None, its.persist):
        its.persist_prefix = its.instance = None
    for field in _CARRIED.values():
        if getattr(given, field) is None:
            setattr(given, field, getattr(its, field))


def _words(given: argparse.Namespace, fields: dict[str, str]) -> list[str]:
    """Return options, by flag and field, as they were given; without those that were not."""
    values = {flag: getattr(given, field) for flag, field in fields.items()}
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _let_go(server: KeeperServer) -> str:
    """Say what ends with a keeper, before it does."""
    catalogue = server.catalogue
    if not catalogue.versions:
        return "it kept nothing"
    versions, leases = format_count(len(catalogue.versions), "version"), len(catalogue.leases)
    said = f"let go of {versions}, {format_size(catalogue.accounts.total.nbytes)}"
    return f"{said}; what is mapped by {format_count(leases, 'lease')} stays until it is closed" if leases else said


def _tell_starter(given: argparse.Namespace, lines: list[str], command: list[str] | None) -> None:
    """Tell the program that waits until this keeper serves, and let go of all that is of that program."""
    with contextlib.suppress(OSError):  # the program waits no more, or a keeper that died had told it
        os.write(given.ready_fd, os.fsencode("".join(f"vram keep: {line}\n" for line in lines)))
    os.close(given.ready_fd)
    if command is not None and "--ready-fd" in command:  # another guardian has no such descriptor
        at = command.index("--ready-fd")
        del command[at : at + 2]
    if given.log is None and given.parent_fd < 0:  # stderr is a file of theirs, which nobody reads any more
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def _say(*lines: str) -> None:
    """Print lines. A failure to print does not end the keeper, which may hold memory already."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no standard output
        for line in lines:
            print(f"vram keep: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
