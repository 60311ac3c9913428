"""Bad input and bad days: each a typed error that says what to do, with nothing lost or leaked (I4, I10, I11)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.other_users import OTHER, as_user, keeper_of
from tests.support.samples import some

import vram
from vram.errors import (
    AccessDeniedError,
    MissingFileError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    QuotaError,
    UnreadableFileError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from vram.keeper import rpc_connection
from vram.keeper.private import KeeperProcess
from vram.sharing.channel import Channel

X = {"x": np.arange(3)}
DEEP = np.zeros((1,) * 40)


class Listed(list[Any]):
    """Looks like a mapping, and is none."""

    def items(self) -> Any:
        return enumerate(self)


def structured() -> Any:
    return np.zeros(3, [("a", "i4"), ("b", "f8")])


def closed() -> vram.Array:
    array = vram.zeros(3, device="host")
    array.close()
    return array


# What was asked for, how it is refused, and a word of the remedy.
PUBLISHED: list[tuple[Callable[[], Any], type[VramError], str]] = [
    *(
        (lambda name=name: vram.publish(name, X), UsageError, "a name")
        for name in ["", "..", "a/../b", "/a", "a/", "a//b", "a b", "ä", "n" * 201, "a\n", "a\0", None, 5, b"n"]
    ),
    (lambda: vram.publish("n", [np.arange(3)]), UsageError, r'{"name": array}'),
    (lambda: vram.publish("n", np.arange(3)), UsageError, r'{"name": array}'),
    (lambda: vram.publish("n", Listed()), UsageError, r'{"name": array}'),
    (lambda: vram.publish("n", {}), UsageError, "nothing to publish"),
    (lambda: vram.publish("n", {"": np.arange(3)}), UsageError, "array names"),
    (lambda: vram.publish("n", {5: np.arange(3)}), UsageError, "array names"),
    (lambda: vram.publish("n", {"x" * 1025: np.arange(3)}), UsageError, "at most 1024"),
    (lambda: vram.publish("n", {"\udc80": np.arange(3)}), UsageError, "UTF-8"),
    (lambda: vram.publish("n", {"x": None}), UsageError, "^array 'x': .* is no array"),
    (lambda: vram.publish("n", {"x": [1, 2, 3]}), UsageError, "^array 'x': .*numpy.asarray"),
    (lambda: vram.publish("n", {"a": np.arange(3), "x": "text"}), UsageError, "^array 'x': .* is no array"),
    (lambda: vram.publish("n", {"x": np.array([{}])}), UsageError, "^array 'x': .*Python objects"),
    (lambda: vram.publish("n", {"x": structured()}), UsageError, "^array 'x': .*fields as arrays of their own"),
    (lambda: vram.publish("n", {"x": np.arange(3, dtype=">i8")}), UsageError, "^array 'x': .*astype"),
    (lambda: vram.publish("n", {"x": np.ma.masked_array([1], [True])}), UsageError, "^array 'x': .*mask"),
    (lambda: vram.publish("n", {"x": DEEP}), UsageError, "^array 'x': .*at most 32"),
    (lambda: vram.publish("n", {"x": np.arange(3), "y": closed()}), VramError, "^array 'y': .*was closed"),
    *(
        (lambda ttl=ttl: vram.publish("n", X, ttl=ttl), UsageError, "seconds above 0")
        for ttl in [0, -1, float("nan"), float("inf"), 1e12, "5", True]
    ),
    (lambda: vram.publish("n", X, meta={"k": "v" * 4096}), UsageError, "4096 is the most"),
    (lambda: vram.publish("n", X, meta={"k": 5}), UsageError, "convert it"),
    (lambda: vram.publish("n", X, meta={5: "v"}), UsageError, "str to str"),
    (lambda: vram.publish("n", X, meta={"k": "\ud800"}), UsageError, "UTF-8"),
    (lambda: vram.publish("n", X, meta=["k"]), UsageError, "a mapping such as"),
    (lambda: vram.publish("n", X, keeper=5), UsageError, "socket path"),
    (lambda: vram.publish("n", X, keeper="/tmp/" + "x" * 200), UsageError, "107"),
    (lambda: vram.publish("n", tuple(X.items()), consume=True), UsageError, r'{"name": array}'),
    (lambda: vram.attach("n"), NotFoundError, "n"),
    (lambda: vram.attach(".."), UsageError, "a name"),
    (lambda: vram.attach(None), UsageError, "a name"),
    (lambda: vram.attach("there", access="write"), UsageError, '"cow"'),
    (lambda: vram.attach("there", access=["r"]), UsageError, '"cow"'),
    *(
        (lambda version=version: vram.attach("there", version=version), UsageError, "count from 1")
        for version in [0, -1, "1", 1.5, True, 2**53 + 1, 10**5000]
    ),
    (lambda: vram.attach("there", version=9), NotFoundError, "9"),
    (lambda: vram.attach("there", expect=["k"]), UsageError, "a mapping such as"),
    (lambda: vram.attach("there", expect={"k": 1}), UsageError, "convert it"),
    *(
        (lambda timeout=timeout: vram.attach("there", timeout=timeout), UsageError, "None for ever")
        for timeout in [-1, "5", float("nan"), [], True, 10**400, 10**5000]
    ),
    (lambda: vram.attach("there", access="rw"), AccessDeniedError, "cow"),
    (lambda: vram.entry("n"), NotFoundError, "n"),
    (lambda: vram.entry(".."), UsageError, "a name"),
    (lambda: vram.remove("n"), NotFoundError, "n"),
    (lambda: vram.remove("there", version=7), NotFoundError, "7"),
    (lambda: vram.list_entries("a b"), UsageError, "begins no name"),
    (lambda: vram.attach_or_publish("..", dict), UsageError, "a name"),
    (lambda: vram.attach_or_publish("n", dict, expect=5), UsageError, "a mapping such as"),
    (lambda: vram.attach_or_publish("n", dict, timeout="x"), UsageError, "None for ever"),
    (lambda: vram.attach_or_publish("n", lambda: X, ttl=-1), UsageError, "seconds above 0"),
]


def refuses(act: Callable[[], Any], kind: type[VramError], remedy: str) -> None:
    with pytest.raises(kind, match=remedy) as caught:
        act()
    assert isinstance(caught.value, VramError)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_i4_bad_input_to_a_keeper(kept: vram.Keeper) -> None:
    vram.publish("there", X)
    before = vram.statistics()
    for number, (act, kind, remedy) in enumerate(PUBLISHED):
        print(f"case {number}")  # shown where it fails
        refuses(act, kind, remedy)
        after = vram.statistics()
        assert (after.entries, after.versions, after.nbytes, after.leases) == (1, 1, before.nbytes, 0)


# -- files ----------------------------------------------------------------------------------------------------------
def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES: dict[str, bytes] = {
    "is empty": b"",
    "is a pickle": b"\x80\x02}q\x00.",
    "is cut off": safetensors({"a": ENTRY}, b"1234"),
    "names an unknown type": safetensors({"a": ENTRY | {"dtype": "F33"}}, b"12345678"),
}


def test_i4_a_bad_file_publishes_nothing(kept: vram.Keeper, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for what, contents in FILES.items():
        print(what)
        path.write_bytes(contents)
        refuses(lambda: vram.publish_file("model", path, device="host"), UsageError, "model.safetensors")
        assert vram.list_entries() == []


def test_i4_a_file_that_cannot_be_read_publishes_nothing(kept: vram.Keeper, tmp_path: Path) -> None:
    refuses(lambda: vram.publish_file("model", tmp_path / "none", device="host"), MissingFileError, "no file")
    refuses(lambda: vram.publish_file("model", tmp_path, device="host"), MissingFileError, "no .safetensors")
    refuses(lambda: vram.publish_file("model", 5, device="host"), UsageError, "path")  # type: ignore[arg-type]
    secret = tmp_path / "secret"
    save_file({"a": np.arange(3)}, secret)
    secret.chmod(0)
    if not os.geteuid():
        kind, _ = as_user(OTHER, lambda: vram.publish_file("model", secret, device="host", keeper="/nowhere"))
        assert kind is UnreadableFileError


def test_a_file_is_read_only_if_it_will_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No keeper, a bad name or too small a quota are said before minutes of reading."""
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(1_000_000)}, path)
    monkeypatch.setattr("vram.arrays.weights.load", lambda *_: pytest.fail("the file was read"))
    refuses(
        lambda: vram.publish_file("model", path, device="host", keeper=tmp_path / "none"), PeerGoneError, "vram keep"
    )
    with vram.private_keeper(max_bytes=4 << 20):
        refuses(lambda: vram.publish_file("..", path, device="host"), UsageError, "a name")
        refuses(lambda: vram.publish_file("model", path, device="host", ttl=-1), UsageError, "seconds above 0")
        refuses(lambda: vram.publish_file("model", path, device="host", meta=[]), UsageError, "mapping")  # type: ignore[arg-type]
        refuses(lambda: vram.publish_file("model", path, device="host"), QuotaError, "room")


def test_a_file_is_published_with_its_name(kept: vram.Keeper, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.safetensors")  # not a name that UTF-8 can say
    save_file({"a": np.arange(3), "none": np.empty((0, 2), "f4")}, path)
    receipt = vram.publish_file("model", path, device="host", meta={"config": "1"})
    assert receipt.zero_copy
    assert receipt.arrays == 2
    with vram.attach("model") as lease:
        assert lease.meta == {"source": "m?.safetensors", "config": "1"}
        assert lease["a"].numpy().tolist() == [0, 1, 2]
        assert lease["none"].shape == (0, 2)


# -- keepers that are none ------------------------------------------------------------------------------------------
def everything(path: str) -> list[Callable[[], Any]]:
    return [
        lambda: vram.publish("n", X, keeper=path),
        lambda: vram.attach("n", keeper=path),
        lambda: vram.attach_or_publish("n", lambda: X, timeout=0, keeper=path),  # else it waits for one
        lambda: vram.list_entries(keeper=path),
        lambda: vram.entry("n", keeper=path),
        lambda: vram.remove("n", keeper=path),
        lambda: vram.statistics(keeper=path),
    ]


def test_where_nobody_listens(place: str) -> None:
    for act in everything(place):
        refuses(act, PeerGoneError, f"start one with `vram keep --socket {place}`")
    Path(place).write_text("a file")
    for act in everything(place):
        refuses(act, UsageError, f"{place} is no socket")
    os.unlink(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(place)
    for act in everything(place):  # the socket of a keeper that was killed
        refuses(act, PeerGoneError, "vram keep")


@pytest.mark.parametrize("answer", some([b"HTTP/1.1 400 Bad Request", b"", b"\x92\xa7welcome\xa1x", None], 1), ids=repr)
def test_s7_what_does_not_speak_the_protocol_is_no_keeper(
    place: str, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = rpc_connection.RpcConnection.connect.__func__.__wrapped__
    seconds = 0.2 if answer is None else SOON
    monkeypatch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, "timeout": seconds})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen()
        acts = everything(place)

        def serve() -> None:
            # Whoever hangs up without a word is asked again: a keeper that was killed may have been.
            for _ in range(len(acts) * (rpc_connection.GREETINGS if answer == b"" else 1)):
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1000)
                    if answer:
                        peer.send(answer)
                    if answer is None:
                        peer.recv(1000)

        server = threading.Thread(target=serve)
        server.start()
        for act in acts:
            refuses(act, WaitTimeoutError if answer is None else (PeerGoneError, ProtocolError), "no keeper")  # type: ignore[arg-type]
        server.join(120)


def test_a_keeper_of_a_user_whom_nobody_trusts_is_not_spoken_to(place: str) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    directory = os.path.dirname(place)
    os.chown(directory, OTHER, -1)
    with keeper_of(OTHER, place):
        os.chmod(directory, 0o777)  # others may have put the socket there since
        for act in everything(place):
            refuses(act, AccessDeniedError, f"uid {OTHER}")


# -- the keeper goes ------------------------------------------------------------------------------------------------
def test_s5_readers_read_on_when_the_keeper_is_killed(place: str) -> None:
    keeper = KeeperProcess(place)
    successor = None
    try:
        with vram.zeros(8, "int64", device="host") as a, contextlib.ExitStack() as leases:
            vram.publish("n", {"a": a, "x": np.arange(5)}, keeper=place)
            lease = leases.enter_context(vram.attach("n", keeper=place))
            other = vram.attach("n", keeper=place)
            view = lease["x"].numpy()
            assert lease.fileno() > 0
            keeper.kill()
            assert select.select([lease], [], [], AT_ONCE)[0] == [lease]
            for act in everything(place):
                refuses(act, PeerGoneError, "vram keep")
            for use in (lambda: lease.is_stale(), lease.upgrade):
                refuses(use, PeerGoneError, "vram keep")
            assert view.tolist() == lease["x"].numpy().tolist() == [0, 1, 2, 3, 4]
            other.close()

            # Another one comes to the same place: who asks now, asks that one.
            os.unlink(place)
            successor = KeeperProcess(place)
            assert vram.list_entries(keeper=place) == []
            assert lease.is_stale()
            assert not lease.is_revoked()
            refuses(lease.upgrade, NotFoundError, "n")
            vram.publish("n", {"x": np.arange(7)}, keeper=place)
            assert lease.is_stale()
            with lease.upgrade() as newer:
                assert newer["x"].shape == (7,)
            vram.publish("n", lease, keeper=place)
            with vram.attach("n", keeper=place) as saved:
                assert saved["x"].numpy().tolist() == [0, 1, 2, 3, 4]
            assert view.tolist() == [0, 1, 2, 3, 4]
            del view
        assert vram.statistics(keeper=place).leases == 0
    finally:
        keeper.stop()
        if successor is not None:
            successor.stop()


def test_s5_a_lease_is_stale_once_another_keeper_serves_whatever_that_has(place: str) -> None:
    """Also where that has the same name and the same number: it is other memory. While none serves, what asks a keeper
    says how to start one, and `is_stale` does what `upgrade` does, again and again: who polls it finds the next.
    """
    keepers = [KeeperProcess(place)]
    try:
        vram.publish("n", {"x": np.arange(5)}, keeper=place)
        with vram.attach("n", keeper=place) as lease:
            assert not lease.is_stale()
            for turn in range(2):
                keepers[-1].kill()
                asks = (lambda: lease.is_stale(), lambda: lease.is_revoked(), lease.upgrade, lease.fileno)
                for use in (*asks, *asks):
                    refuses(use, PeerGoneError, "vram keep")
                os.unlink(place)
                keepers.append(KeeperProcess(place))
                assert vram.publish("n", {"x": np.arange(6 + turn)}, keeper=place).version == lease.version
                for _ in range(2):
                    assert lease.is_stale()
                    assert not lease.is_revoked()
                refuses(lease.fileno, PeerGoneError, "is gone")  # or it would wait for news of other memory
                with lease.upgrade() as newer:
                    assert newer["x"].shape == (6 + turn,)
                    assert not newer.is_stale()
                    assert newer.fileno() > 0
            assert lease["x"].numpy().tolist() == [0, 1, 2, 3, 4]
        assert vram.statistics(keeper=place).leases == 0
    finally:
        for keeper in keepers:
            keeper.stop()


def test_i4_losing_the_keeper_while_publishing_is_said_and_leaves_nothing(place: str) -> None:
    """The arrays are sealed by then, and the error says so."""
    keeper = KeeperProcess(place)
    really = Channel.send

    def send(self: Channel, payload: bytes, fds: Any = (), **options: Any) -> None:
        if fds:
            keeper.kill()
        really(self, payload, fds, **options)

    try:
        with vram.zeros(8, "int64", device="host") as a, pytest.MonkeyPatch.context() as patch:
            assert vram.list_entries(keeper=place) == []
            patch.setattr(Channel, "send", send)
            with pytest.raises(PeerGoneError, match="keeper") as caught:
                vram.publish("n", {"a": a, "x": np.arange(3)}, keeper=place)
            assert "read-only from now on" in caught.value.__notes__[0]
            assert a.readonly
            assert a.numpy().sum() == 0
    finally:
        keeper.stop()
