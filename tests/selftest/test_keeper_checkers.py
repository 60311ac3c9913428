"""Bugs planted in channels and the keeper, each in a process of its own: machine, contract, kills and fuzz see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.selftest import reasons

ROOT = Path(__file__).resolve().parents[2]

# Run with the bug in place: exit with 0 if nothing was noticed and with 1 if a check failed.
MACHINE = """
import os, runpy, sys
sys.path.insert(0, "tests/selftest")
import reasons
found = runpy.run_path(os.path.abspath("tests/stateful/test_catalogue_machine.py"))
reasons.run_machine(found["CatalogueMachine"], 300, 50)
"""
CONTRACT = """
import os, pytest
os.environ["VRAM_TEST_SECONDS"] = "3"
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "reasons",
                              "tests/conformance/test_channel.py", "-k", "TestPair and not gives_up"]))
"""
# The keeper under test is another process: it gets the bug through a module that its interpreter loads first.
SUITE = """
import os, pathlib, pytest, tempfile
with tempfile.TemporaryDirectory() as place:
    pathlib.Path(place, "sitecustomize.py").write_text(HEAD + BUG)
    os.environ["PYTHONPATH"] = place
    os.environ["VRAM_TEST_SECONDS"] = "2"
    raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "reasons", {0!r}, "-k", {1!r}]))
"""
IN_LINE = """
import pytest
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "reasons", "tests/unit/test_catalogue.py",
                              "-k", "served_in_their_order"]))
"""
MOVED = IN_LINE.replace("served_in_their_order", "tallies_move_with_a_takeover")
HOSTILE, KILLS, TAKEOVER = (
    "tests/hostile/test_keeper_hostile.py",
    "tests/processes/test_keeper_kills.py",
    "tests/processes/test_keeper_takeover.py",
)

HEAD = """
from vram.keeper import admission, catalogue, connection, server, service, snapshot
from vram.keeper.catalogue import Catalogue
from vram.sharing import channel
from vram.sharing.channel import Channel
"""
NONE = ""
LEASE_FORGOTTEN = """
right = Catalogue._end
Catalogue._end = lambda self, lease: (right(self, lease), [])[1]  # memory is not freed with its last lease
"""
FREED_TOO_EARLY = """
right = Catalogue.commit
def commit(self, *args, **options):
    version, effects = right(self, *args, **options)
    for older in self._names[version.name].older.values():
        effects.insert(0, catalogue.Free(older.token))
    return version, effects
Catalogue.commit = commit
"""
NUMBERS_AGAIN = """
right = Catalogue._tidy
def tidy(self, name, known):
    right(self, name, known)
    self._numbers.clear()
Catalogue._tidy = tidy
"""
CLAIM_LOST = """
Catalogue.drop_claim = lambda self, session, claim, now: []
"""
LAST_COME_FIRST_SERVED = """
right = Catalogue._serve
def serve(self, name, now, *before, **options):
    line = self._waiters[name]._due if name in self._waiters else {}
    for order in sorted(line, reverse=True):
        line[order] = line.pop(order)
    return right(self, name, now, *before, **options)
Catalogue._serve = serve
"""
ANYBODY_REMOVES = """
right = Catalogue.remove
def remove(self, session, name, version=0, **options):
    class Somebody:
        id, uid = session.id, self.accounts.keeper_uid
    return right(self, session if options.get("force") else Somebody, name, version, **options)
Catalogue.remove = remove
"""
RETIRED_IS_FREE = """
right = Catalogue._free
def free(self, version, *whose):
    before = self.accounts.total.nbytes
    effect = right(self, version, *whose)
    self.accounts.total.nbytes = before
    return effect
Catalogue._free = free
"""
WATCH_LOST = """
right = snapshot._restore_version
snapshot._restore_version = lambda made, row, *others: right(made, type(row)(*[
    [] if field == "watchers" else getattr(row, field) for field in row.__struct_fields__]), *others)
"""
NOT_CLOSE_ON_EXEC = """
channel._CLOEXEC = 0
"""
TRUNCATION_IGNORED = """
right = channel._receive
def receive(sock, flags, left, *more):
    payload, fds, _ = right(sock, flags, left, *more)
    return payload[:1000], fds, 0
channel._receive = receive
"""
FD_LEAKED = """
right = channel.transmit
def transmit(sock, payload, fds=(), flags=0):
    import os
    right(sock, payload, [os.dup(fd) for fd in fds], flags)
channel.transmit = transmit
"""
NOT_WOKEN = """
from vram.sharing import channel
channel._Socket.shutdown = lambda self, how: None
"""
ANYTHING_ADMITTED = """
admission.admit = lambda fd, size, **options: size
"""
NOTHING_HELD_BACK = """
connection.Held.keep = lambda self: None
right = connection.Held.drop
def drop(self):
    if self._uses > 0:
        right(self)
connection.Held.drop = drop
"""
HELLO_NOT_WAITED_FOR = """
connection.Connection.overdue = lambda self, now, patience: False
"""
PART_LEAKED = """
server.KeeperServer.dispose = lambda self, fds, nbytes, uid: None
"""
LEASES_LOST = """
import vram.keeper.takeover as takeover
right = takeover.restore
def restore(books, *args, **options):
    made, publications = right(books, *args, **options)
    made.leases.clear()
    for session in made.sessions.values():
        session.leases.clear()
    return made, publications
takeover.restore = restore
"""

LATE, LEASES = "did not come about within 2 s", "assert (3, 4, 0, 2) == (3, 4, 2, 2)"
CAUGHT = [
    ("a lease forgotten", LEASE_FORGOTTEN, MACHINE, "assert mine == theirs"),
    ("freed too early", FREED_TOO_EARLY, MACHINE, "assert mine == theirs"),
    ("numbers used again", NUMBERS_AGAIN, MACHINE, "assert version.number == number"),
    ("a claim lost", CLAIM_LOST, MACHINE, "== model.claims"),
    ("last come, first served", LAST_COME_FIRST_SERVED, IN_LINE, "id=2, uid=1002"),
    ("anybody removes", ANYBODY_REMOVES, MACHINE, "DID NOT RAISE VramError"),
    ("retired memory not taken off the books", RETIRED_IS_FREE, MACHINE, "== model.used(None)"),
    ("a watch lost in a takeover", WATCH_LOST, MOVED, "assert (1, 1, 1, 0) == (1, 1, 1, 1)"),
    ("inheritable descriptors", NOT_CLOSE_ON_EXEC, CONTRACT, "FD_CLOEXEC"),
    ("truncation ignored", TRUNCATION_IGNORED, CONTRACT, "assert other.recv(timeout=SOON)[0] == longest"),
    ("a descriptor leaked", FD_LEAKED, CONTRACT, "left behind:"),
    ("closing wakes nobody", NOT_WOKEN, CONTRACT, "assert ended == [ClosedError]"),
    ("anything admitted", ANYTHING_ADMITTED, SUITE.format(HOSTILE, "unfit"), "DID NOT RAISE ProtocolError"),
    ("queued answers not held", NOTHING_HELD_BACK, SUITE.format(HOSTILE, "keep_their_memory"), "assert found == ["),
    (
        "the silent are waited for",
        HELLO_NOT_WAITED_FOR,
        SUITE.format(HOSTILE, "not_say_hello"),
        "assert peer.is_cut_off()",
    ),
    (
        "descriptors of half a publication leaked",
        PART_LEAKED,
        SUITE.format(KILLS, "publisher"),
        LATE,
    ),
    (
        "a lease forgotten by the process",
        LEASE_FORGOTTEN,
        SUITE.format(KILLS, "retired"),
        LATE,
    ),
    (
        "leases lost in a takeover",
        LEASES_LOST,
        SUITE.format(TAKEOVER, "nothing_had_been"),
        LEASES,
    ),
]  # fmt: skip


def run(bug: str, checker: str) -> subprocess.CompletedProcess[str]:
    code = checker if "BUG" in checker else HEAD + bug + checker
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"HEAD, BUG = {HEAD!r}, {bug!r}\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=reasons.environment(),
        check=False,
    )


@pytest.mark.parametrize("checker", [MACHINE, CONTRACT, SUITE.format(KILLS, "retired")])
def test_without_a_bug_nothing_is_noticed(checker: str) -> None:
    ran = run(NONE, checker)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("name", "bug", "checker", "because"), CAUGHT, ids=[f"{name}" for name, *_ in CAUGHT])
def test_a_planted_bug_is_noticed(name: str, bug: str, checker: str, because: str) -> None:
    ran = run(bug, checker)
    assert ran.returncode == 1, f"{name} went unnoticed\n{ran.stdout}\n{ran.stderr}"
    reasons.require(reasons.of(ran.stdout), because)
