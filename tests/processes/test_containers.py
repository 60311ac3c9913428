"""Tuples, lists and dicts with arrays in them: they arrive as they were sent, or nothing is sent at all."""

from __future__ import annotations

import contextlib
import datetime
import enum
import gc
import socket
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.deadlines import SOON
from tests.support.raw_cuda import CudaStranger

import vram
from vram.errors import ClosedError, ProtocolError, UnsupportedError, UsageError, WaitTimeoutError
from vram.handover.array_channel import ArrayChannel
from vram.handover.containers import MAX_DEPTH, Packed, unpack
from vram.handover.messages import (
    MAX_ARRAYS,
    Mixed,
    Reference,
    Returned,
    Shared,
    Value,
    decode_message,
    decode_value,
    encode,
)

Point = namedtuple("Point", "x y")


class Word(str, enum.Enum):  # noqa: UP042  (a StrEnum prints its value)
    ONE = "one"


class Shouted(str):
    def __str__(self) -> str:
        return self.upper()


class Endless(str):
    def __str__(self) -> str:
        return self


class Kind(enum.IntEnum):
    ONE = 1


def rows(number: int = 0) -> vram.Array:
    array = vram.empty(4, "int64", device="host")
    array.numpy()[:] = number
    return array


def looks(value: Any) -> Any:
    """Return a value with lists of numbers, marked, in place of its arrays."""
    if isinstance(value, vram.Array):
        return ("array", *value.to_host().tolist())
    if isinstance(value, dict):
        return {key: looks(item) for key, item in value.items()}
    return type(value)(map(looks, value)) if type(value) in (list, tuple) else value


# -- what arrives -----------------------------------------------------------------------------------------------------
def test_an_array_with_its_number_arrives_as_it_was_sent(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows(7) as array:
        for number in range(3):
            one.send((number, array))
            found = other.recv(timeout=SOON)
            assert looks(found) == (number, ("array", 7, 7, 7, 7))
        array.numpy()[:] = 8
        assert looks(found) == (2, ("array", 8, 8, 8, 8))  # the same memory


def test_everything_in_everything(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows(1) as a, rows(2) as b:
        value = {
            "batch": [a, (b, None, True), {"deep": [[a]], 5: b[1:3]}],
            b"bytes": b"\0\xff",
            1.5: -(2**63),
            None: 2**64 - 1,
            True: "text",
            "": ((), [], {}, (), float("inf")),
        }
        one.send(value)
        found = other.recv(timeout=SOON)
        assert looks(found) == looks(value)
        assert found["batch"][0] is found["batch"][2]["deep"][0][0]  # what is in it twice is one object twice
        other.send(found)  # and home again: the very objects
        home = one.recv(timeout=SOON)
        assert home["batch"][0] is a
        assert home["batch"][1][0] is b
        assert looks(home) == looks(value)


def test_tuples_without_arrays_stay_tuples(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    for value in ((), (1,), [(1, 2)], {"a": (1, ["x", ()])}, [1, [2]], {}, []):
        pair[0].send(value)
        assert looks(pair[1].recv(timeout=SOON)) == value


def test_classes_of_their_own_arrive_as_what_they_are(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows(3) as array:
        one.send((Point(1, array), OrderedDict(k=np.float64(0.5)), Kind.ONE, np.str_("s")))
        point, mapping, number, text = other.recv(timeout=SOON)
        assert [type(one) for one in (point, mapping, mapping["k"], number, text)] == [tuple, dict, float, int, str]
        assert (point[0], mapping, number, text) == (1, {"k": 0.5}, 1, "s")


def test_views_of_ours_are_arrays_in_a_container_too(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    with rows(4) as array:
        pair[0].send([array.numpy()[1:], "x"])
        assert looks(pair[1].recv(timeout=SOON)) == [("array", 4, 4, 4), "x"]


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(_plain)
def test_what_is_packed_is_unpacked_the_same(value: Any) -> None:
    tree = msgspec.msgpack.decode(encode(Packed(value, lambda _: False).tree))
    found = unpack(tree, [])
    assert found == value
    assert repr(found) == repr(value)  # types, down to the last


# -- what is refused --------------------------------------------------------------------------------------------------
def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda a: (a, {"x": {1, 2}}), r"\[1\]\['x'\] is a set$"),
        (lambda a: {"k": [a, object()]}, r"\['k'\]\[1\] is an object$"),
        (lambda a: [a, 2**70], r"\[1\] cannot be encoded: .*ints"),
        (lambda a: [a, {"x": "\ud800"}], r"\[1\]\['x'\] cannot be encoded: .*surrogates"),
        (lambda a: {"ok": a, (1, 2): 3}, r"it has a key that is a tuple$"),
        (lambda a: [{"\ud800": a}], r"\[0\] cannot be encoded: .*surrogates"),
        (lambda a: [a, np.zeros(3)], r"^\[1\]: .*vram.copy"),
        (lambda a: {"w": (a, np.zeros((4, 4))[::2])}, r"^\['w'\]\[1\]: .*vram.copy"),
        (lambda a: nested(a, MAX_DEPTH + 1), rf"\[0\]\[0\] is more than {MAX_DEPTH} containers deep"),
        (lambda a: [a] + [0] * 70_000, r"it has more than 65536 items"),
        (lambda a: [a[:number] for number in range(1, 5)] * 200 + [a, b"x" * 70_000], r"65536. Send its parts one by"),
        (lambda a: (a, b"x" * 65_500), r"a container of 1 arrays and \d+ bytes"),
        (lambda a: [a[:1] for _ in range(MAX_ARRAYS + 1)], rf"it has more than {MAX_ARRAYS} arrays"),
    ],
)
def test_what_cannot_be_sent_is_named_and_nothing_is_sent(
    pair: tuple[ArrayChannel, ArrayChannel], make: Any, says: str
) -> None:
    """I4: the path to it is in the error."""
    one, other = pair
    with rows(1) as array:
        with pytest.raises((UsageError, UnsupportedError), match=says):
            one.send(make(array))
        assert one._talk.exports.by_id == {}
        one.send("and on")
        assert other.recv(timeout=SOON) == "and on"
        one.send(nested(array, MAX_DEPTH))
        found = other.recv(timeout=SOON)
        for _ in range(MAX_DEPTH):
            (found,) = found
        assert looks(found) == ("array", 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((1, {2}), r"\[1\] is a set$"),
        ({"a": [(), datetime.date(2026, 1, 1)]}, r"\['a'\]\[1\] is a date$"),
        (({(1, 2): 3},), r"\[0\] has a key that is a tuple$"),
        (nested((), MAX_DEPTH), rf"is more than {MAX_DEPTH} containers deep"),
        ([0] * 70_000 + [()], r"it has more than 65536 items"),
    ],
)
def test_a_tuple_never_arrives_as_a_list(pair: tuple[ArrayChannel, ArrayChannel], value: Any, says: str) -> None:
    """Also where msgpack has words for all that is in it."""
    with pytest.raises(UsageError, match=says):
        pair[0].send(value)


def test_what_a_class_prints_is_not_what_is_sent(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    for value in ((Word.ONE,), [Word.ONE], {"a": (Word.ONE, 2)}, (Shouted("a"),), (Endless("b"),)):
        pair[0].send(value)
        found = pair[1].recv(timeout=SOON)
        assert found == value
        assert "Word" not in repr(found)


def test_a_container_in_itself_is_refused(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    value: list[Any] = [1]
    value.append(value)
    with pytest.raises(UsageError, match="containers deep") as refused:
        pair[0].send(value)
    assert type(refused.value) is UsageError  # the public name, which a traceback shows
    value.clear()


def test_i4_a_closed_array_among_others_leaves_nothing_lent(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows(1) as known, rows(2) as new:
        one.send(known)
        assert looks(other.recv(timeout=SOON)) == ("array", 1, 1, 1, 1)
        lent = one._talk.exports.by_id.copy()
        closed = rows(3)
        closed.close()
        with pytest.raises(ClosedError, match=r"^\[2\]: "):
            one.send((known, new, closed))
        assert one._talk.exports.by_id == lent
        one.send([new, known])
        assert looks(other.recv(timeout=SOON)) == [("array", 2, 2, 2, 2), ("array", 1, 1, 1, 1)]
        assert len(other._talk.imports.regions) == 2


def test_i4_a_container_that_could_not_be_sent_leaves_nothing_lent(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    """The other end does not read: the memory's descriptors, or the container itself, do not go."""
    one, other = pair
    count = 0
    with contextlib.suppress(WaitTimeoutError):
        while True:
            one.send(0, timeout=0)
            count += 1
    with rows(1) as a, rows(2) as b:
        for room in range(3):  # for none of its messages, for the first, for the second
            for _ in range(room):
                other.recv(timeout=SOON)
            with pytest.raises(WaitTimeoutError):
                one.send((a, b), timeout=0)
            assert one._talk.exports.by_id == {}
            with contextlib.suppress(WaitTimeoutError):
                while True:
                    one.send(0, timeout=0)
        with contextlib.suppress(WaitTimeoutError):
            while True:
                assert other.recv(timeout=0) == 0
        one.send((a, b))
        assert looks(other.recv(timeout=SOON)) == (("array", 1, 1, 1, 1), ("array", 2, 2, 2, 2))
        assert len(other._talk.imports.regions) == 2


# -- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.standin
class TestOnAGpu:
    def test_i4_what_is_kept_for_the_other_end_is_let_go_if_the_container_fails(
        self, pair: tuple[ArrayChannel, ArrayChannel]
    ) -> None:
        one, _ = pair
        with CudaStranger() as stranger:
            base = stranger.legacy(4096)
            with vram.share((base, 4096, "cuda:0")) as array:
                closed = rows()
                closed.close()
                with pytest.raises(ClosedError):
                    one.send([array, array[:8], closed])
                assert len(one._talk.remote_refs) == 0
                assert one._talk.exports.by_id == {}


# -- the wire ---------------------------------------------------------------------------------------------------------
REFERENCE = Reference(1, 1, 0, "int64", (4,))


def test_s9_golden_bytes() -> None:
    message = Mixed([1, 5, [2, 0]], (Shared(REFERENCE, 3), Returned(REFERENCE)))
    golden = "93a1749301059202009294a176950101 00a5696e743634 9104 03 0092a172950101 00a5696e743634 9104"
    assert encode(message).hex() == golden.replace(" ", "")
    came = decode_message(encode(message))
    assert isinstance(came, Mixed)
    assert (decode_value(came.value), came.arrays) == (message.value, message.arrays)


def test_s9_an_array_alone_and_plain_values_are_what_they_were(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    for value in (5, "x", None, [1, {"a": [2]}], {"k": 1}):
        channel.send(value)
        assert sock.recv(65536) == encode(Value(value))
    with rows() as array:
        channel.send(array)
        sock.recvmsg(65536, 0)
        assert decode_message(sock.recv(65536)) == Shared(Reference(1, 1, 0, "int64", (4,)))


LIES: list[object] = [
    [],
    [3],
    [3, 1],
    [-1, 1],
    ["x"],
    [None],
    [True, 1],
    [1.0],
    [2],
    [2, 0],  # no array came with it
    [2, 0, 0],
    [2, -1],
    [2, "x"],
    [1, [2, 0]],
    [0, []],
    {"k": []},
    {(1, 2): 1},
    [1, msgspec.msgpack.Ext(5, b"x")],
]


@pytest.mark.parametrize("tree", [*LIES, nested(1, 40)])
def test_s7_a_tree_that_lies_costs_its_message(tree: object, hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    sock.send(encode(["t", tree, []]))
    with pytest.raises(ProtocolError):
        channel.recv(timeout=SOON)
    sock.send(encode(["x", "and on"]))
    assert channel.recv(timeout=SOON) == "and on"


def test_s7_a_deep_tree_and_too_many_arrays_cost_their_message(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    deep = b"\x93\xa1t" + b"\x92\x00" * 30_000 + b"\x00" + b"\x90"
    many = encode(["t", None, [["r", [1, 0, 0, "i1", []]]] * (MAX_ARRAYS + 1)])
    unknown = encode(["t", [1, [2, 0]], [["v", [9, 1, 0, "int64", [4]], 0, 0]]])
    wrong = encode(["t", [1, [2, 0]], [["x", 1]]])
    for message in (deep, many, unknown, wrong, encode(["t", 1]), encode(["t", 1, 2])):
        sock.send(message)
        with pytest.raises(ProtocolError):
            channel.recv(timeout=SOON)
    assert gc.collect() >= 0
    sock.send(encode(["x", "and on"]))
    assert channel.recv(timeout=SOON) == "and on"
