"""Messages that are almost right."""

from __future__ import annotations

import random

import msgspec

from vram.keeper import messages as m

SEGMENT = m.SegmentRow(4096, 1, 0)
VALID: list[msgspec.Struct] = [
    m.Hello(m.PROTOCOL, "me"),
    m.Publish(1, "hostile/a", [SEGMENT], ["host"], b"m", False, False, {"k": "v"}, 5.0, 0),
    m.Publish(2, "hostile/b", [SEGMENT, SEGMENT], ["host"], b"", True),
    m.Publish(3, "hostile/c", [SEGMENT], ["host", "GPU-1"], b"", False, True),
    m.Offer(4, "hostile/a", 4096),
    m.Part(5, 2, 1),
    m.Attach(6, "hostile/a"),
    m.Attach(7, "hostile/a", 1, "rw", {"k": "v"}, 0.01),
    m.Attach(8, "hostile/x", 0, "cow", None, None, True),
    m.More(9, 1, 0),
    m.Release(10, [1, 2, 3]),
    m.Release(11, [1]),
    m.Cancel(12, 8),
    m.State(13, 1),
    m.Watch(14, "hostile/a", 1),
    m.List(15, "h", ""),
    m.Versions(16, "hostile/a"),
    m.Holders(17, "hostile/a", ("hostile/a", 1, 0)),
    m.Remove(18, "hostile/a", 0, True),
    m.Statistics(19),
]
PAYLOADS = [m.encode(message) for message in VALID]
_VALUES = [
    0,
    1,
    -1,
    2**31,
    2**53,
    2**63,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "x" * 5_000,
    b"",
    None,
    True,
]


def mutated(chance: random.Random) -> tuple[bytes, int]:
    """Return a message that was right once, and may be still, and with how many descriptors it should come."""
    message = chance.choice(VALID)
    payload = m.encode(message)
    count = len(message.segments) + message.manifest_fd if isinstance(message, m.Publish) else 0
    count += isinstance(message, m.Part)
    if chance.random() < 0.1:
        count = chance.randint(0, 4)
    kind = chance.random()
    if kind < 0.3:
        return _bytes(payload, chance), count
    items = msgspec.msgpack.decode(payload)
    if kind < 0.5:
        for _ in range(chance.randint(1, 3)):
            _items(items, chance)
    else:
        _similar(items, chance)
    return msgspec.msgpack.encode(items)[:65_536], count


def _similar(items: list[object], chance: random.Random) -> None:
    """Replace values by others of the same kind: what gets through the parser."""
    for at in range(1, len(items)):
        value = items[at]
        if chance.random() < 0.4:
            if isinstance(value, bool):
                items[at] = not value
            elif isinstance(value, int):
                items[at] = chance.choice([0, 1, 2, 3, 7, 2**20, 2**53])
            elif isinstance(value, str):
                items[at] = chance.choice(
                    ["hostile/a", "hostile/b", "hostile/c", "", "r", "rw", "../x", "host", "h" * 200]
                )
            elif isinstance(value, float):
                items[at] = chance.choice([0.0, 0.001, 1e9])
            elif isinstance(value, dict):
                items[at] = chance.choice([{}, {"k": "v"}, {"k": "w"}, {"k": "x" * 4_000}])
            elif isinstance(value, list) and value:
                items[at] = value * chance.randint(1, 3)


def _bytes(payload: bytes, chance: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        what = chance.randrange(6)
        if what == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif what == 1 and data:
            data[at] = chance.randrange(256)
        elif what == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 9))
        elif what == 3:
            del data[at : at + chance.randint(1, 9)]
        elif what == 4:
            del data[at:]
        else:
            data += data[: chance.randint(0, len(data))]
    return bytes(data[:65_536]) or b"\xc1"


def _items(items: list[object], chance: random.Random) -> None:
    if not items:
        items.append(0)
    at = chance.randrange(len(items))
    what = chance.randrange(5)
    if what == 0:
        items[at] = chance.choice(_VALUES)
    elif what == 1:
        del items[at]
    elif what == 2:
        items.insert(at, chance.choice([0, "x", [], {}]))
    elif what == 3:
        items[at] = [items[at]] * chance.randint(0, 50)
    elif isinstance(items[at], list):
        _items(items[at], chance)  # type: ignore[arg-type]
    else:
        items[0] = msgspec.msgpack.decode(chance.choice(PAYLOADS))[0]
