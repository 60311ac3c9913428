"""Every public name as a user of it writes it, and what mypy --strict says of that, run as that user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .house import ROOT

__all__ = ["USES", "mypy_as_a_user", "program"]

PUBLIC = ROOT / "src/vram/__init__.py"

# One or more statements for each name, typed where a user would be helped by the type. Names with a dot are of modules.
USES = {
    "Array": "def rows(array: vram.Array) -> int:\n    return array.shape[0]",
    "ArrayChannel": "ours, theirs = vram.ArrayChannel.pair()\nours.send(array, timeout=1.0)\nours.close()",
    "Keeper": "def at(keeper: vram.Keeper) -> str:\n    return keeper.path",
    "private_keeper": "with vram.private_keeper(max_bytes=1 << 30) as kept:\n    assert_type(kept, vram.Keeper)",
    "list_entries": "for entry in vram.list_entries('models/'):\n    assert_type(entry, vram.info.EntryInfo)",
    "holders": "for holder in vram.holders('models/'):\n    assert_type(holder, vram.info.HolderInfo)",
    "remove": "vram.remove('name', version=1)",
    "revoke": "assert_type(vram.revoke('name').nbytes, int)",
    "memory_map": "vram.memory_map('name').save('map.svg')\nassert_type(vram.memory_map(array).html(), str)",
    "entry": "assert_type(vram.entry('name'), vram.info.EntryInfo)",
    "statistics": "assert_type(vram.statistics(), vram.info.StatisticsInfo)",
    "empty": "array = vram.empty((0, 3), 'float32', device='host', capacity=10)\narray.resize(4)",
    "zeros": "assert_type(vram.zeros(4, device='host'), vram.Array)",
    "asarray": "assert_type(vram.asarray([1.0, 2.0], device='host'), vram.Array)",
    "pack": "assert_type(vram.pack({'a': array, 'b': [1.0]}, device='host'), dict[str, vram.Array])",
    "copy": "assert_type(vram.copy(array), vram.Array)",
    "share": "assert_type(vram.share(array), vram.Array)",
    "explain": "assert_type(vram.explain(array), vram.typing.ShareRoute)",
    "publish": "assert_type(vram.publish('name', {'a': array}, meta={'k': 'v'}).version, int)",
    "publish_file": "assert_type(vram.publish_file('name', 'model.safetensors', device='host'), vram.typing.Published)",
    "save": "files: tuple[str, ...] = vram.save('name', '/models/name', shard='2GiB')",
    "attach": "with vram.attach('name', timeout=1.0) as lease:\n    assert_type(lease['a'], vram.Array)",
    "attach_or_publish": "with vram.attach_or_publish('name', lambda: {'a': array}) as a:\n    names = sorted(a)",
    "Lease": "def views(lease: vram.Lease) -> int:\n    return lease.sleep(release=True) + lease.wake(timeout=5.0)",
    "follow": "with vram.follow('name', same_arrays=True) as model:\n    assert_type(model['a'], vram.Array)",
    "aio": "async def first() -> vram.Lease:\n    return await vram.aio.attach('name', timeout=1.0)",
    "lend": "with vram.lend({'a': array}, at='/run/x.sock') as lending:\n    assert_type(lending, vram.typing.Lending)",
    "borrow": "with vram.borrow('/run/x.sock') as lease:\n    assert_type(lease.array, vram.Array)",
    "Group": "with vram.Group(rank=0, size=1, timeout=5.0) as group:\n    group.all_reduce(array, 'max')",
    "resize": "vram.resize({array: 7})",
    "show_progress": "with vram.show_progress():\n    vram.publish_file('name', 'model.safetensors', device='host')",
    "prepare": "ready = vram.prepare('cuda:0', '2GiB', chunk='64MiB')\nassert_type(ready.wait(1.0), bool)",
    "sleep": "assert_type(vram.sleep([array], to='/tmp').freed, int)",
    "park": "assert_type(vram.park('name', timeout=5.0).freed, int)\nvram.attach('name', wake=True).close()",
    "detach_all": "assert_type(vram.detach_all(), int)",
    "reattach_all": "assert_type(vram.reattach_all(timeout=5.0), int)",
    "wake": "assert_type(vram.wake([array]).discarded, int)",
    "TorchPool": "pool = vram.TorchPool('cuda:0')\nassert_type(pool.sleep(['weights']).freed, int)",
    "update": "with vram.update('name', timeout=5.0) as arrays:\n    assert_type(arrays['a'], vram.Array)",
    "replicate": "assert_type(vram.replicate('10.0.0.7:7070', 'name', timeout=5.0), vram.typing.Replicated)\n"
    "assert_type(vram.replicate('10.0.0.7:7070', 'name', if_missing=True), vram.Lease)",
    "Ring": "with vram.Ring.attach('name', timeout=5.0) as frames:\n    sums = [each.array.sum() for each in frames]",
    "transports": "found = vram.transports.select('host', 'host', nbytes='1MiB')",
    "errors": "caught(vram.errors.NotFoundError)\nwarnings.simplefilter('error', vram.errors.LeakWarning)",
    "info": "who: list[vram.info.HolderInfo] = vram.holders()\nleft: vram.info.RevokeInfo = vram.revoke('name')",
    "memory": "def size(made: vram.memory.PhysicalAllocation, of: vram.memory.Event) -> int:\n    return made.nbytes",
    "memory.AllocationSpec": "spec = vram.memory.AllocationSpec(1 << 20, vram.memory.Location.parse('cuda:0'))",
    "memory.trim": "vram.memory.on_remap(lambda change: print(change.spans))()\nassert_type(vram.memory.trim(), int)",
    "sharing": "def take(handle: vram.sharing.IpcMemHandle) -> bytes:\n    return handle.to_bytes()",
    "typing": "def read(frames: vram.typing.Frames, one: vram.typing.Frame | vram.typing.NewFrame) -> None: ...\n"
    "def write(update: vram.typing.Update, section: vram.typing.Section) -> None: ...",
    "typing.ArrayLike": "def again(one: vram.typing.ArrayLike) -> vram.Array:\n    return vram.share(one)",
    "typing.Follower": "def newest(model: vram.typing.Follower) -> int:\n    return model.current().version",
    "typing.Lending": "def lent(lending: vram.typing.Lending) -> int:\n    return lending.nbytes",
    "typing.Published": "def copies(published: vram.typing.Published) -> dict[str, str]:\n    return published.copied",
    "typing.Replicated": "def speed(done: vram.typing.Replicated) -> float:\n    return done.nbytes / done.seconds",
    "typing.StreamLike": "def on(stream: vram.typing.StreamLike) -> None:\n    vram.borrow('x', stream=stream).close()",
    "typing.SymmetricBuffer": "def peers(one: vram.typing.SymmetricBuffer) -> int:\n    return len(one.peers)",
}

_HEAD = """
import warnings
from typing import assert_type

import vram

array: vram.Array = vram.empty(3, device="host")


def caught(kind: type[vram.errors.VramError]) -> bool:
    try:
        vram.statistics()
    except kind as error:
        return bool(str(error))
    return False
"""


def program() -> str:
    """Return a module that uses every public name, each in a function of its own."""
    parts = [_HEAD]
    for name, use in USES.items():
        body = "\n".join(f"    {line}" for line in use.splitlines())
        head = "    array = vram.zeros(3, device='host')\n" if "array" in use.replace("vram.Array", "") else ""
        parts.append(f"def use_{name.replace('.', '_')}() -> None:\n{head}{body}\n")
    return "\n\n".join(parts)


def mypy_as_a_user(place: Path, package: str | None = None) -> list[str]:
    """Return what mypy --strict has to say about the program, in a directory that knows nothing of this one.

    Parameters
    ----------
    place : Path
        A directory to write to.
    package : str, optional
        What is read in place of the package's ``__init__.py``.
    """
    (place / "user.py").write_text(program())
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={ROOT / '.cache/mypy-user'}"]
    if package is not None:
        (place / "planted.py").write_text(package)
        command += ["--shadow-file", str(PUBLIC), str(place / "planted.py")]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src"), "MYPY_FORCE_COLOR": "0"}
    done = subprocess.run(
        [*command, "user.py"], cwd=place, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode not in (0, 1):
        raise AssertionError(f"mypy did not run: {done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if ": error:" in line]
