"""A keeper of before there were rings: it does not know the request by which their producers ask for the consumers.

In the place of ``python -m vram.keeper``: ``python older_keeper.py ... vram.keeper OPTIONS``.
"""

from __future__ import annotations

import functools
import operator
import sys
import typing

import msgspec

from vram.keeper import messages as m
from vram.keeper.__main__ import main

known = [kind for kind in typing.get_args(m.Request) if kind is not m.Cursors]
decoder = msgspec.msgpack.Decoder(functools.reduce(operator.or_, known))
m._requests = lambda: decoder
m._TAGS = frozenset(kind.__struct_config__.tag for kind in known)

if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("vram.keeper") + 1 :]))
