"""The examples of docs/guide.md and docs/builders.md, each run with what it supposes, on the host or the stand-in."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support import commands
from tests.support.samples import some

import standin
import vram

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / "docs" / page).read_text() for page in ("guide.md", "builders.md")]
EXAMPLES = [one for page in PAGES for one in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
MAKES_EMB = 'a = array = vram.zeros((4, 384), "float32", device="host")\n'
KEPT = "kept = vram.private_keeper()\n"


class Around(NamedTuple):
    """What an example supposes, what is left to do after it, and whether it takes a GPU, or other packages."""

    before: str = ""
    after: str = ""
    gpu: bool = False
    fabric: bool = False
    needs: tuple[str, ...] = ()


# What a framework has is what these examples say of it: the bytes. Its own tests have the rest.
FRAMEWORK = """
import types
def _seen(self, *, full=False):
    return self.to_host() if full is False else None
vram.Array.torch = _seen
vram.Lease.torch = lambda self, writable=None: {name: array.to_host() for name, array in self.items()}
torch = types.SimpleNamespace(zeros=lambda n, device: vram.zeros(n, device=device))
"""
A_FILE = """
import numpy, safetensors.numpy
safetensors.numpy.save_file({"w": numpy.ones((4, 4), "float32")}, "model.safetensors")
"""
WORKER = """
def work(channel):
    with channel:
        channel.send(channel.recv(timeout=100.0))
        assert channel.recv(timeout=100.0)[0] == 3
        channel.send("done")
"""
FOREIGN = """
import types
from tests.support.raw_cuda import CudaStranger
stranger = CudaStranger()
address = stranger.legacy(2 << 20)
tensor = types.SimpleNamespace(data_ptr=lambda: address, nbytes=1 << 20)
"""
PLACE = "from vram import driver\nfrom vram.memory import Location, Region\nplace = Location.parse('cuda:0')\n"

# By how each begins: a new example of the guide is a line here.
AROUND = {
    "with vram.private_keeper():": Around(after="assert kept.is_closed"),
    'published = vram.publish("vectors"': Around(KEPT + MAKES_EMB, "assert published.version == 1\nkept.close()"),
    "small = vram.pack(": Around(
        KEPT + "import numpy as np",
        "assert vram.entry('norm').nbytes == 2 << 20 and small['scale'].readonly\nkept.close()",
    ),
    "with vram.show_progress():": Around(A_FILE + KEPT, "assert vram.entry('weights').version == 1\nkept.close()"),
    'vram.publish_file("minilm", "model.safetensors", device="host"': Around(
        A_FILE + KEPT, "assert vram.entry('minilm').meta['config'] == 'v1'\nkept.close()"
    ),
    'with vram.attach("vectors", access="r"': Around(
        KEPT + MAKES_EMB + 'vram.publish("vectors", {"emb": a}, meta={"config": "v1"})\na.close()',
        "newer.close()\nkept.close()",
    ),
    'lease = vram.attach("vectors")\ndrawn': Around(
        KEPT + MAKES_EMB + 'vram.publish("vectors", {"emb": a})\n',
        "import pathlib\nassert pathlib.Path('vectors.html').stat().st_size > 1000\nlease.close()\nkept.close()",
    ),
    "import pandas as pd": Around(
        KEPT,
        "assert trades.equals(table) and prices.tolist() == [1.5, 2.5]\ndel trades, prices\nkept.close()",
        needs=("pandas", "pyarrow"),
    ),
    'with vram.follow("policy")': Around(
        KEPT + MAKES_EMB + 'vram.publish("policy", {"w": a}, keeper=kept)\n',
        "assert (names, number, w.shape) == (['w'], 1, (4, 384))\nkept.close()",
    ),
    'model = vram.follow("policy", same': Around(
        KEPT + MAKES_EMB + 'newest = vram.publish("policy", {"w": a}, keeper=kept).version\n',
        "assert model.state == 'closed'\nkept.close()",
    ),
    "import asyncio": Around(
        KEPT + MAKES_EMB + 'for name in ("tokenizer", "policy"):\n    vram.publish(name, {"w": a}, keeper=kept)\n',
        "assert shapes == ((4, 384), (4, 384))\nkept.close()",
    ),
    "lease.on_revoke(": Around(
        KEPT + MAKES_EMB + 'vram.publish("vectors", {"emb": a})\na.close()\nlease = vram.attach("vectors")',
        'assert not vram.revoke("vectors", timeout=100.0).holders\nkept.close()',
    ),
    "def load():": Around(KEPT + 'import numpy\nread_the_checkpoint = lambda: [("w", numpy.ones(4))]', "kept.close()"),
    'vram.publish("policy", {"w": weights}, updatable=True)': Around(
        KEPT + "weights = vram.asarray([1.0, 1.0], device='host')\nread = []\n"
        "def step(w, version):\n    read.append((version, *w))",
        "assert read == [(2, 2.0, 2.0)]\nkept.close()",
    ),
    'vram.publish("actor"': Around(
        KEPT + "weights, biases = (vram.asarray([1.0, 1.0], device='host') for _ in range(2))\nread = []\n"
        "def step(w, b, version):\n    read.append((version, *w, *b))",
        "assert read == [(1, 1.0, 1.0, 1.0, 1.0)]\nwith vram.attach('actor') as lease, lease.reading():\n"
        "    assert [array.tolist() for array in lease.numpy().values()] == [[2.0, 2.0], [1.0, 1.0]]\nkept.close()",
    ),
    'with vram.Group("sums", rank=0, size=1) as group:  # in each process, with its own rank': Around(
        after="assert group.is_closed\nassert buffer.is_closed"
    ),
    'with vram.Ring.create("camera"': Around(
        KEPT + 'import numpy\npicture = numpy.full((1080, 1920, 3), 8, "uint8")\n'
        "seen = []\nuse = lambda array: seen.append((int(array.min()), int(array.max())))",
        "assert seen == [(7, 7), (8, 8)]\nkept.close()",
    ),
    "ours, theirs = vram.ArrayChannel.pair()": Around(
        "import multiprocessing\nfrom worker_of_the_guide import work\nstep = 3\n" + MAKES_EMB,
        "assert ours.recv(timeout=100.0) == 'done'\nprocess.join(100)\nassert process.exitcode == 0\nours.close()",
    ),
    "vram.resize({keys: rows": Around(
        "keys, values = (vram.zeros((0, 4), device='host', capacity=100) for _ in range(2))\nrows = 9",
        "assert keys.shape == values.shape == (9, 4)\nkeys.close()\nvalues.close()",
    ),
    "blocks = vram.zeros((64, 4096)": Around(
        after="assert not blocks.numpy(full=True)[100_000].any()\nassert len(blocks) == 64\nblocks.close()"
    ),
    "vectors = vram.zeros((2, 384)": Around(
        KEPT, 'assert len(lease["x"]) == 900_000\nlease.close()\nvectors.close()\nkept.close()'
    ),
    'ready = vram.prepare("host"': Around(
        after="keys = vram.zeros((9, 4), device='host', capacity=100, chunk='64MiB')\nkeys.close()\n"
        "assert vram.memory.trim() > 0\nassert ready.ready == 0"
    ),
    "vram.sleep([weights, cache]": Around(
        "weights, cache = (vram.asarray([1.0, 2.0], device='host') for _ in range(2))",
        "assert vram.wake(cache).discarded == 16\nassert weights.numpy()[1] == 2.0\nweights.close()\ncache.close()",
    ),
    'report = vram.park("qwen"': Around(
        KEPT + 'vram.publish("qwen", {"a": vram.zeros(4, device="cuda:0")})',
        "assert report.nbytes == 2 << 20\nassert lease['a'].to_host().sum() == 0\nlease.close()\nkept.close()",
        gpu=True,
    ),
    'tensor = torch.zeros(1 << 20, device="cuda:0")': Around(FRAMEWORK, gpu=True),
    'with vram.lend({"weights": tensor}': Around(
        "import subprocess, sys\ntensor = vram.zeros(4, device='host')\n"
        "def serve():\n    subprocess.run([sys.executable, 'borrows.py'], check=True, timeout=200)\n"
    ),
    'with vram.borrow("/run/app/weights.sock"': Around(
        FRAMEWORK + "lending = vram.lend({'weights': vram.zeros(4, device='host')}, at='weights.sock')",
        "lending.close()",
    ),
    "handle = vram.sharing.IpcMemHandle.of(": Around(FOREIGN, "stranger.free(address)", gpu=True),
    'with vram.transports.select("host", "cuda:0")': Around(MAKES_EMB, "there.close()", gpu=True),
    'a = vram.empty((0, 384), "bfloat16", device="cuda:0"': Around(FRAMEWORK, "a.close()\nb.close()", gpu=True),
    'vram.publish_file("minilm", "model.safetensors", device="cuda:0")': Around(
        A_FILE + FRAMEWORK + KEPT + 'a = vram.zeros((4, 384), "float32", device="cuda:0")', "kept.close()", gpu=True
    ),
    "from vram import driver\n": Around(gpu=True),
    "from vram.memory import AllocationFlags": Around(PLACE, "region.close()", gpu=True),
    "memory = PhysicalAllocation.create(": Around(
        PLACE + "from vram.memory import HandleKind, PhysicalAllocation\n"
        "def send(*what):\n    global data, nbytes\n    data, nbytes = what",
        "there.close()\nmemory.close()",
        gpu=True,
        fabric=True,
    ),
    "region = vram.memory.Region.create(": Around("", "array.close()\nregion.close()", gpu=True),
    "import pytest\n": Around("MyDriver = object", "assert issubclass(TestMyDriver, DriverContract)"),
    "import vram\n": Around("from test_registered import MyDriver", "region.close()"),
}


def beginning(example: str) -> str:
    """Return the line of the table that an example has, or how the example begins, if it has none."""
    found = [begin for begin in AROUND if example.startswith(begin)]
    return found[0] if len(found) == 1 else example.splitlines()[0]


def test_every_example_of_the_guide_is_run() -> None:
    assert sorted(map(beginning, EXAMPLES)) == sorted(AROUND)


def script(example: str, around: Around) -> str:
    """Return a program: the example, in what is around it, with paths of its own."""
    parts = ["import vram", around.before, example, around.after]
    return "\n".join(parts).replace("/run/app/weights.sock", "weights.sock")


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(name, marks=[pytest.mark.standin] if around.gpu else [], id=name.split("(")[0].strip()[:40])
        for name, around in some([*AROUND.items()], 18)
    ],
)
def test_an_example_of_the_guide_works(begin: str, tmp_path: Path) -> None:
    (example,) = (one for one in EXAMPLES if beginning(one) == begin)
    (borrows,) = (one for one in EXAMPLES if one.startswith("with vram.borrow("))
    (tmp_path / "worker_of_the_guide.py").write_text(WORKER)
    (tmp_path / "borrows.py").write_text(script(borrows, Around(FRAMEWORK)))
    around = AROUND[begin]
    for package in around.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    settings = {"fabric": True} if around.fabric else {}
    environment = standin.child_environment(**settings) if around.gpu else dict(os.environ)
    # What sends a handle is one process, what opens it is another.
    if "# in the other process" in example:
        example = halves(example, tmp_path)
    path = [str(tmp_path), str(ROOT / "tests"), str(ROOT / "tests/unit"), *filter(None, sys.path)]
    environment["PYTHONPATH"] = os.pathsep.join(path)  # for its children
    done = commands.python(script(example, around), cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]


def halves(example: str, place: Path) -> str:
    """Return an example whose second half, that of another process, is run as one when the first sends."""
    first, second = example.split("\n\n")
    got = "import sys\nimport vram\nuse = print\n"
    got += "data, offset, nbytes = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
    (place / "opens.py").write_text(got + second)
    sends = "import subprocess, sys\ndef send(data, offset, nbytes):\n"
    sends += "    command = [sys.executable, '-W', 'error', 'opens.py', data.hex(), str(offset), str(nbytes)]\n"
    sends += "    subprocess.run(command, check=True, timeout=200)\n"
    return sends + first


# What they say of other versions is not checked: CHANGELOG.md, the decisions.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_names_in_a_document_exist(document: Path) -> None:
    """Each ``vram.x.y`` between backticks, or in an example; events of a keeper's log, and their fields, too."""
    said = "".join(path.read_text() for path in (ROOT / "src/vram/keeper").glob("*.py"))
    missing = []
    for name in sorted(set(re.findall(r"(?<![\w/.])vram((?:\.[A-Za-z]\w*)+)", document.read_text()))):
        try:
            reduce(getattr, name[1:].split("."), vram)
        except AttributeError:
            try:
                importlib.import_module(f"vram{name}")
            except ImportError:
                if not is_a_name_in_a_module(name[1:]) and f'"vram{name}"' not in said:
                    missing.append(f"vram{name}")
    assert missing == []


def is_a_name_in_a_module(name: str) -> bool:
    """Tell whether a dotted name is that of something in a module which is no attribute of the package by itself."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(f"vram.{'.'.join(parts[:cut])}")
            reduce(getattr, parts[cut:], module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ENGINES and is_defined(parts[:cut], parts[cut:]):
                return True
        except (ImportError, AttributeError):
            continue
        else:
            return True
    return False


# The packages that the modules for them import, and that are not installed here.
ENGINES = {"transformers", "trl", "sglang", "torch", "vllm"}


def is_defined(module: list[str], rest: list[str]) -> bool:
    """Tell whether the file of a module that cannot be imported here defines a name."""
    path = (ROOT / "src" / "vram").joinpath(*module).with_suffix(".py")
    tree = ast.parse(path.read_text() if path.exists() else "")
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return path.exists() and (not rest or (len(rest) == 1 and rest[0] in defined))


def test_a_name_in_a_module_that_cannot_be_imported_here_is_looked_for_in_its_file() -> None:
    assert is_defined(["engines", "vllm_sleep"], ["VramWorker"])
    assert is_defined(["engines", "vllm_sleep"], [])
    assert not is_defined(["engines", "vllm_sleep"], ["VramWorkerOfMine"])
