"""The names people type: all there, all documented, and the same whatever was imported before."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import subprocess
import sys

import pytest

import vram
from vram.entries.keepers import TIMEOUT

from .house import ROOT

PUBLIC = [name for name in vram.__all__ if not name.startswith("_")]


def test_dir_shows_the_public_names_and_no_others() -> None:
    assert sorted(name for name in dir(vram) if not name.startswith("_")) == sorted(PUBLIC)
    assert len(set(vram.__all__)) == len(vram.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert (getattr(vram, name).__doc__ or "").strip(), f"vram.{name} has no docstring"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        vram.no_such_name


MOST = 47
MODULES = {"aio", "errors", "info", "memory", "sharing", "transports", "typing"}


def test_there_are_few_public_names() -> None:
    assert len(PUBLIC) <= MOST


def test_no_public_name_is_also_a_room_or_a_built_in() -> None:
    rooms = {path.stem for path in (ROOT / "src/vram").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(PUBLIC) & rooms == MODULES
    assert {name for name in MODULES if not inspect.ismodule(getattr(vram, name))} == set()
    assert set(PUBLIC) & set(dir(builtins)) == set()


@pytest.mark.parametrize("room", sorted(MODULES))
def test_what_a_public_module_calls_public_is_there_and_documented(room: str) -> None:
    module = getattr(vram, room)
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        said = vram.arrays.hints if name.endswith("Like") else getattr(module, name)  # type: ignore[attr-defined]
        assert (said.__doc__ or "").strip(), f"vram.{room}.{name} has no docstring"


def test_type_checkers_see_the_names_that_are_loaded_late() -> None:
    tree = ast.parse((ROOT / "src/vram/__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    seen |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    seen |= {
        target.id
        for block in (node for node in tree.body if isinstance(node, ast.If))
        for node in block.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert set(vram.__all__) <= seen


def calls() -> list[tuple[str, inspect.Signature]]:
    """Return the public functions and methods, by name."""
    found = {name: getattr(vram, name) for name in PUBLIC}
    found |= {name: getattr(vram.typing, name) for name in vram.typing.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {f"{name}.{called}": one for called, one in vars(value).items() if not called.startswith("_")}
    return [(name, inspect.signature(one)) for name, one in found.items() if inspect.isfunction(one)]


def test_a_keeper_is_named_in_one_way() -> None:
    hints = {name: found.parameters["keeper"].annotation for name, found in calls() if "keeper" in found.parameters}
    assert len(hints) > 8
    assert set(hints.values()) == {"Keeper | str | os.PathLike[str] | None"}


# What looks a name up does not wait, and what waits for work waits for ever; everything else has one time.
NOT_THE_USUAL_TIME = {
    "attach": 0.0,
    "Lease.upgrade": 0.0,
    "Lease.wait": None,
    "Frames.wait": None,
    "Frames.next": None,
    "attach_or_publish": None,
    "ArrayChannel.send": None,
    "ArrayChannel.recv": None,
    # That of the group, which is for all of its calls.
    "Group.symmetric": None,
    "Group.barrier": None,
    "Group.all_reduce": None,
    "Group.all_reduce_norm": None,
    "Group.hand_over": None,
    "Group.register_captured": None,
    "Group.all_gather": None,
    "Group.all_to_all": None,
    "Group.broadcast": None,
    "Group.reduce_scatter": None,
}


def test_times_are_seconds_that_are_called_timeout_with_one_default() -> None:
    usual = {}
    for name, found in calls():
        assert not {"patience", "wait_seconds", "seconds", "deadline"} & set(found.parameters), name
        for one in found.parameters.values():
            if one.name.endswith("timeout"):
                assert one.annotation == "float | None", name
                assert one.kind is inspect.Parameter.KEYWORD_ONLY, name
                usual[name] = one.default
    assert {name: usual.pop(name) for name in NOT_THE_USUAL_TIME} == NOT_THE_USUAL_TIME
    assert usual
    assert set(usual.values()) == {TIMEOUT}, usual


# What derives from classes of an engine, or makes operators of torch, is imported by who has that.
EVERY_MODULE = """
import importlib, json, pkgutil, vram
NEED_MORE = (
    "vram.testing", "vram.arrays.torch",
    "vram.engines.ray_t", "vram.engines.sglang_", "vram.engines.torch_c", "vram.engines.transformers",
    "vram.engines.trl", "vram.engines.vllm_", "vram.engines.weight_sender",
)
def import_everything():
    for module in pkgutil.walk_packages(vram.__path__, "vram."):
        if not module.name.startswith(NEED_MORE) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def answer(code: str) -> object:
    """Run code in an interpreter of its own and return what it prints as JSON."""
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_name_means_the_same_after_every_module_was_imported() -> None:
    """A package gets its submodules as attributes: a room must not hide a name."""
    code = """
before = {name: getattr(vram, name) for name in vram.__all__}
import_everything()
print(json.dumps([name for name, value in before.items() if getattr(vram, name) is not value]))
"""
    assert answer(code) == []


def test_a_name_means_the_same_when_its_room_was_imported_first() -> None:
    code = """
import_everything()
print(json.dumps([name for name in vram.__all__ if not name.startswith("_") and not callable(getattr(vram, name))]))
"""
    constants = [name for name in PUBLIC if not callable(getattr(vram, name))]
    assert answer(code) == constants


def test_python_says_which_name_was_meant() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import vram; vram.publsh"], capture_output=True, text=True, timeout=300
    )
    assert done.stderr.splitlines()[-1].endswith("has no attribute 'publsh'. Did you mean: 'publish'?")
