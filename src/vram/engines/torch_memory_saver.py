"""The interface of torch_memory_saver 0.0.10, on :class:`vram.TorchPool`: one that its users need not notice.

It does what that package does in its mode "torch"; the differences:

- Mistakes that ended the process are errors, and change nothing: pausing what is paused, resuming what is not, memory
  that runs out in the middle of resuming, a tensor that is not of a region.
- Nothing is preloaded. The mode "preload" is accepted, with a warning, and is the mode "torch": what torch allocates
  outside of regions, and what others allocate with cudaMalloc, is not seen. :meth:`TorchMemorySaver.cuda_graph` works.
- Pinned backups are in the memory that :func:`vram.sleep` keeps pinned for the next time (``VRAM_PINNED_LIMIT``).
- A region whose tag is paused cannot be entered: torch might give out a part of it.

:func:`install` has programs that import ``torch_memory_saver`` find this.

References
----------
torch_memory_saver 0.0.10, ``entrypoint.py``, ``csrc/core.cpp``, ``csrc/entrypoint.cpp``.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..arrays.torch_pool import TorchPool
from ..errors import AsleepError, UnsupportedError, UsageError
from ..lifetime import Claim, shielded
from ..memory import Region
from ..memory.backups import Backup, HostBackup, NamedFileBackup, PageableBackup, PinnedBackup
from ..memory.sleep import Asleep, sleep_regions, wake_regions

if TYPE_CHECKING:
    import torch

__all__ = ["SHIMS", "TorchMemorySaver", "configure_subprocess", "install", "torch_memory_saver"]

Backend = Literal["mmap", "pinned"]

SHIMS = Path(__file__).parent / "shims"  # a directory for PYTHONPATH: there this is found as torch_memory_saver
_DEFAULT = "default"
_CHUNK_MB = 32  # of a file, written at once; that package writes 256, which makes no difference to who uses it
_YES, _NO = {"1", "true", "TRUE", "yes", "YES"}, {"0", "false", "FALSE", "no", "NO"}


class _Kind(NamedTuple):
    """A kind of memory: there is one pool for each, as in that package."""

    tag: str
    enable_cpu_backup: bool
    enable_disk_backup: bool
    backend: str  # empty without a backup on the CPU
    device: int


class _Having:
    """The pool of one kind; when nobody has this any more, torch is to give back what it caches there."""

    def __init__(self, pool: TorchPool, unused: deque[TorchPool]) -> None:
        self.pool = pool
        weakref.finalize(self, unused.append, pool).atexit = False  # which waits for nothing (I3)


class _Config(threading.local):
    """The region that a thread allocates for."""

    def __init__(self) -> None:
        self.tag = _DEFAULT
        self.is_active = False
        self.enable_cpu_backup = _flag("TMS_INIT_ENABLE_CPU_BACKUP")
        self.enable_disk_backup = _flag("TMS_INIT_ENABLE_DISK_BACKUP")
        self.backend = _backend(os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or "pinned")
        self.pool: TorchPool | None = None
        self.outside: ExitStack | None = None  # of the pool, since who is in a region switched it off

    def switch(self, on: bool) -> None:
        """Leave the region that this thread is in, until it is switched on again or ends."""
        if not on and self.is_active and self.pool is not None:
            self.outside, self.is_active = ExitStack(), False
            self.outside.enter_context(self.pool.bypass())
        elif on and self.outside is not None:
            left, self.outside, self.is_active = self.outside, None, True
            left.close()


class _Bytes:
    """Bytes of the host, for numpy, which keeps this as long as it shows them."""

    def __init__(self, address: int, nbytes: int, claim: Claim) -> None:
        self.claim = claim
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


class TorchMemorySaver:
    """Memory of PyTorch that is paused and resumed by tag: torch_memory_saver's class, on :class:`vram.TorchPool`.

    Examples
    --------
    >>> from vram.engines.torch_memory_saver import torch_memory_saver
    >>> with torch_memory_saver.region("weights", enable_cpu_backup=True):  # doctest: +SKIP
    ...     model = build()
    >>> torch_memory_saver.pause("weights")  # doctest: +SKIP
    >>> torch_memory_saver.resume("weights")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._impl: _Saver | None = None

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Backend | None = None,
    ) -> Iterator[None]:
        """Have what this thread allocates on the current GPU, in a block, be paused and resumed by tag.

        Parameters
        ----------
        tag : str
            The name for :meth:`pause` and :meth:`resume`.
        enable_cpu_backup, enable_disk_backup : bool
            Whether its bytes are put aside in memory of the host, or in files of :meth:`set_disk_backup_dir`, while it
            is paused. Otherwise they are let go of. Not both.
        cpu_backup_backend : "pinned" or "mmap", optional
            Memory that is pinned and kept for the next time, or memory that the host has back after each resuming.

        Raises
        ------
        ValueError
            If `cpu_backup_backend` is given without `enable_cpu_backup`, or is none of the two.
        AsleepError
            If memory of this tag is paused.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        saver = self._ensure_initialized()
        if enable_cpu_backup and enable_disk_backup:
            raise AssertionError("enable_cpu_backup and enable_disk_backup are mutually exclusive")
        kind = saver.kind(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        pool = saver.pool(kind)
        with pool.use(tag), saver._with_region_config(tag, enable_cpu_backup, cpu_backup_backend, enable_disk_backup):
            saver.config.pool = pool  # which _with_region_config puts back
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: object,
        pool: tuple[int, int] | None = None,
        stream: object = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Backend | None = None,
    ) -> Iterator[None]:
        """Capture a graph as ``torch.cuda.graph`` does, with memory that is paused and resumed by tag.

        Parameters
        ----------
        cuda_graph, pool, stream, capture_error_mode
            As of ``torch.cuda.graph``. Graphs that pass the same `pool`, and are of one kind, share memory; it is not
            that of the `pool`, which would not be paused.
        tag, enable_cpu_backup, cpu_backup_backend
            As of :meth:`region`.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        saver = self._ensure_initialized()
        mine = saver.pool(saver.kind(tag, enable_cpu_backup, False, cpu_backup_backend))
        graph = _torch().cuda.graph
        with (
            mine.capture(tag, pool) as number,
            saver._with_region_config(tag, enable_cpu_backup, cpu_backup_backend),
            graph(cuda_graph, pool=number, stream=stream, capture_error_mode=capture_error_mode),
        ):
            saver.config.pool = mine
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Have torch allocate as ever, in a block inside of a region."""
        saver = self._ensure_initialized()
        pool = saver.config.pool
        if pool is None or not saver.config.is_active:
            raise UsageError("disable() is called inside of a region(), and this thread is in none")
        with pool.bypass():
            saver.config.is_active = False
            try:
                yield
            finally:
                saver.config.is_active = True

    @shielded
    def pause(self, tag: str | None = None) -> None:
        """Give back the memory of one tag, or of all: all of it, or none. Its addresses stay.

        Raises
        ------
        AsleepError
            If some of it is paused already. Nothing has changed then.
        BusyError
            If others hold the memory: it was published or shared. Nothing has changed then.
        OutOfMemoryError, CapacityError, BackupError
            If there is not enough room for the bytes. Nothing has changed then.
        """
        self._ensure_initialized().pause(tag)

    @shielded
    def resume(self, tag: str | None = None) -> None:
        """Have memory behind the addresses of one tag, or of all, again: all of it, or none.

        Raises
        ------
        UsageError
            If some of it is not paused. Nothing has changed then.
        OutOfMemoryError
            If there is not enough memory. All of it is paused still, and whole.
        """
        self._ensure_initialized().resume(tag)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return what was put aside of a tensor, on the CPU; None if nothing was.

        Parameters
        ----------
        x : torch.Tensor
            A contiguous tensor that was allocated in a region.
        zero_copy : bool
            The backup itself and no copy. Its memory stays as long as the tensor that this returns, but its bytes
            change when `x` is paused again with :attr:`retain_cpu_backup`.

        Raises
        ------
        UsageError
            If `x` is not on a GPU, not contiguous, not of a region, or paused without a backup on the CPU.
        """
        return self._ensure_initialized().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        """Have files of backups made in a directory from now on; it is made if it is not there."""
        saver = self._ensure_initialized()
        saver.directory = Path(path)
        saver.directory.mkdir(parents=True, exist_ok=True)

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> str:
        """Write-only, as in that package; set it before the first use."""
        raise AttributeError("hook_mode can only be set")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode not in ("torch", "preload"):
            raise UsageError(f"hook_mode is 'torch' or 'preload', not {mode!r:.40}")
        if self._impl is not None:
            raise UsageError("hook_mode is set before the first use, and this is in use")
        if mode == "preload":
            warnings.warn(
                "hook_mode='preload' is taken for 'torch': vram preloads nothing, so what is allocated outside of "
                "region() and cuda_graph(), or by others than torch, is not paused",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def memory_margin_bytes(self) -> int:
        """Write-only, as in that package; the bytes of each GPU that regions leave free."""
        raise NotImplementedError("memory_margin_bytes can only be set")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, nbytes: int) -> None:
        if type(nbytes) is not int or nbytes < 0:
            raise UsageError(f"memory_margin_bytes is a number of bytes, not {nbytes!r:.40}")
        self._ensure_initialized().set_margin(nbytes)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups on the CPU stay after resuming, to be looked at, and for the next pausing."""
        return self._ensure_initialized().retain_cpu_backup

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized().retain_cpu_backup = bool(value)

    def _ensure_initialized(self) -> _Saver:
        if self._impl is None:
            self._impl = _Saver()
        return self._impl


class _Saver:
    """The state of a saver in use; its private names are those that users of that package are known to reach."""

    def __init__(self) -> None:
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            raise RuntimeError(
                "torch_memory_saver is not for processes with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF: "
                "take it out, or use vram.TorchPool, which does not mind"
            )
        if _flag("TMS_INIT_ENABLE"):
            raise UnsupportedError(
                "TMS_INIT_ENABLE",
                "a library that is preloaded and sees each cudaMalloc",
                "one that torch calls for what is allocated in a region",
                "Unset it, and allocate what is to be paused in region()",
            )
        self._hook_mode = "torch"
        self.config = _Config()
        self.retain_cpu_backup = _flag("TMS_RETAIN_CPU_BACKUP")
        self.directory = Path(os.environ.get("TMS_DISK_BACKUP_DIR") or "/tmp")
        self.piece = _chunk_mb() << 20
        self._margin = 0
        self.pools: dict[_Kind, TorchPool] = {}
        self._unused: deque[TorchPool] = deque()
        self._mem_pools: dict[tuple[object, ...], _Having] = {}
        self._backups: dict[Region, Backup] = {}
        self._lock = threading.RLock()
        self._binary_wrapper = SimpleNamespace(cdll=_Library(self))

    # -- regions ------------------------------------------------------------------------------------------------
    def kind(self, tag: str, cpu: bool, disk: bool, backend: Backend | None) -> _Kind:
        """Return the kind of a region on the current GPU."""
        resolved = (backend or self.config.backend) if cpu else ""
        return _Kind(tag, bool(cpu), bool(disk), resolved, _torch().cuda.current_device())

    def pool(self, kind: _Kind) -> TorchPool:
        """Return the pool of a kind, and make it the first time."""
        self.settle()
        with self._lock:
            having = self._mem_pools.get(kind)
            if having is None:
                pool = self.pools.get(kind)
                if pool is None:
                    pool = self.pools[kind] = TorchPool(f"cuda:{kind.device}")
                    pool.margin = self._margin
                having = self._mem_pools[kind] = _Having(pool, self._unused)
        return having.pool

    def set_margin(self, nbytes: int) -> None:
        """Leave so many bytes of each GPU free."""
        self._margin = nbytes
        for pool in list(self.pools.values()):
            pool.margin = nbytes

    @contextmanager
    def _with_region_config(
        self, tag: str, enable_cpu_backup: bool, cpu_backup_backend: Backend | None, enable_disk_backup: bool = False
    ) -> Iterator[None]:
        config, before = self.config, dict(self.config.__dict__)
        config.tag, config.is_active, config.outside = tag, True, None
        config.enable_cpu_backup, config.enable_disk_backup = enable_cpu_backup, enable_disk_backup
        config.backend = cpu_backup_backend or config.backend
        try:
            yield
        finally:
            config.switch(True)
            config.__dict__.update(before)

    # -- pause and resume ---------------------------------------------------------------------------------------
    def pause(self, tag: str | None) -> None:
        """See :meth:`TorchMemorySaver.pause`."""
        due = self._due(tag)
        if tags := sorted({kind.tag for region, kind in due.items() if region.asleep is not None}):
            raise AsleepError(f"memory of {tags} is paused already: resume it first, or pause the other tags by name")
        sleep_regions({region: self._place(kind, region) for region, kind in due.items()})

    def resume(self, tag: str | None) -> None:
        """See :meth:`TorchMemorySaver.resume`."""
        due = self._due(tag)
        if tags := sorted({kind.tag for region, kind in due.items() if region.asleep is None}):
            raise UsageError(f"memory of {tags} is not paused: resume the other tags by name")
        wake_regions(due, keep=self.retain_cpu_backup)

    def settle(self) -> None:
        """Give back what nobody has any more: pools, what torch has freed, and backups of what is gone."""
        while self._unused:
            self._unused.popleft().close()
        for pool in list(self.pools.values()):
            pool.trim()
        here = self._all()
        for region in [region for region in list(self._backups) if region not in here]:
            self._backups.pop(region, None)

    def _all(self) -> dict[Region, _Kind]:
        return {region: kind for kind, pool in list(self.pools.items()) for region in pool.regions()}

    def _due(self, tag: str | None) -> dict[Region, _Kind]:
        self.settle()
        return {region: kind for region, kind in self._all().items() if not tag or kind.tag == tag}

    def _place(self, kind: _Kind, region: Region) -> Backup | None:
        """Return where the bytes of a region go. A backup in memory is made once, so that it is used again."""
        if kind.enable_disk_backup:
            self.directory.mkdir(parents=True, exist_ok=True)
            return NamedFileBackup(region.chunks, self.directory, self.piece)
        if not kind.enable_cpu_backup:
            return None
        backup = self._backups.get(region)
        if backup is None:
            sizes = region.chunks
            backup = PageableBackup(sizes) if kind.backend == "mmap" else PinnedBackup(sizes, whole=True)
            self._backups[region] = backup
        return backup

    # -- backups ------------------------------------------------------------------------------------------------
    def get_cpu_backup(self, x: Any, zero_copy: bool) -> Any:
        """See :meth:`TorchMemorySaver.get_cpu_backup`."""
        if not x.is_cuda or not x.is_contiguous():
            raise UsageError(f"a backup is asked for with a contiguous tensor on a GPU, not one on {x.device}")
        self.settle()
        region, kind = self._region_of(x)
        mark = region.asleep
        backup = mark.backup if isinstance(mark, Asleep) else self._backups.get(region)
        if mark is not None and not kind.enable_cpu_backup and not kind.enable_disk_backup:
            raise UsageError(f"the tensor is paused, and memory of {kind.tag!r} has no backup: enable_cpu_backup=True")
        if not isinstance(backup, HostBackup) or not backup.is_there:
            return None
        return _tensor(backup, x, x.data_ptr() - region.address, zero_copy)

    def _region_of(self, x: Any) -> tuple[Region, _Kind]:
        address, end = x.data_ptr(), x.data_ptr() + x.nbytes
        for region, kind in self._all().items():
            if region.address <= address and end <= region.address + region.capacity:
                return region, kind
        raise UsageError(f"a tensor of {tuple(x.shape)} on {x.device} was not allocated in a region of this saver")

    def has_backup_at(self, address: int) -> bool:
        """Whether an address is in a backup on the CPU."""
        self.settle()
        backups = [backup for backup in list(self._backups.values()) if isinstance(backup, HostBackup)]
        spans = [span for backup in backups for span in backup.spans(0, sum(backup.sizes))]
        return any(start <= address < start + nbytes for start, nbytes in spans)


class _Library:
    """The functions of its compiled library that users of that package call, in ``_impl._binary_wrapper.cdll``."""

    def __init__(self, saver: _Saver) -> None:
        # A partial can be given argtypes and a restype, as functions of ctypes are. It says whether a backup is there:
        # the memory itself is kept pinned for the next one.
        self.cudaHostGetFlags = partial(_host_get_flags, saver)
        self.cudaGetLastError = partial(int)
        self._saver = saver

    def tms_get_current_tag(self) -> bytes:
        return self._saver.config.tag.encode()

    def tms_get_interesting_region(self) -> bool:
        return self._saver.config.is_active

    def tms_set_interesting_region(self, on: bool) -> None:
        self._saver.config.switch(bool(on))

    def tms_get_enable_cpu_backup(self) -> bool:
        return self._saver.config.enable_cpu_backup

    def tms_get_enable_disk_backup(self) -> bool:
        return self._saver.config.enable_disk_backup

    def tms_get_cpu_backup_backend(self) -> bytes:
        return self._saver.config.backend.encode()

    def tms_get_retain_cpu_backup(self) -> bool:
        return self._saver.retain_cpu_backup


def _host_get_flags(saver: _Saver, flags: object, pointer: Any) -> int:
    return 0 if saver.has_backup_at(pointer.value or 0) else 1


def _tensor(backup: HostBackup, x: Any, offset: int, zero_copy: bool) -> Any:
    """Return bytes of a backup as a tensor like another one."""
    import numpy as np

    spans = backup.spans(offset, offset + x.nbytes)
    parts = [np.asarray(_Bytes(address, nbytes, backup.claim("a tensor"))) for address, nbytes in spans]
    if zero_copy and len(parts) > 1:
        raise UnsupportedError(
            "a backup without a copy",
            "pinned memory in one piece",
            f"{len(parts)} pieces of what was kept pinned",
            "Ask for a copy, use cpu_backup_backend='mmap', or raise VRAM_PINNED_LIMIT",
        )
    found = parts[0] if zero_copy and parts else np.concatenate([np.empty(0, np.uint8), *parts])
    return _torch().from_numpy(found).view(x.dtype).reshape(x.shape)


# -- the environment ----------------------------------------------------------------------------------------------
def _torch() -> Any:
    import torch

    return torch


def is_xpu() -> bool:
    """Whether torch allocates on a GPU of Intel's."""
    torch = _torch()
    return hasattr(torch, "xpu") and bool(torch.xpu.is_available())


def _check_backend(enable_cpu_backup: bool, backend: str | None) -> None:
    if backend is None:
        return
    if not enable_cpu_backup:
        raise UsageError("cpu_backup_backend requires enable_cpu_backup=True")
    if is_xpu():
        raise UsageError("cpu_backup_backend is not supported on XPU")
    if backend == "mmap" and getattr(_torch().version, "hip", None):
        raise UsageError("cpu_backup_backend='mmap' is not supported on ROCm")
    _backend(backend)


def _backend(name: str) -> str:
    if name not in ("mmap", "pinned"):
        raise UsageError(f"a backup on the CPU is 'mmap' or 'pinned', not {name!r:.40}")
    return name


def _flag(name: str) -> bool:
    said = os.environ.get(name)
    if said is not None and said not in _YES | _NO:
        raise UsageError(f"{name} is 1 or 0, not {said!r:.40}")
    return said in _YES


def _chunk_mb() -> int:
    said = os.environ.get("TMS_DISK_BACKUP_CHUNK_MB") or "0"
    if not said.isdecimal():
        raise UsageError(f"TMS_DISK_BACKUP_CHUNK_MB is a number of MiB, not {said!r:.40}")
    return int(said) or _CHUNK_MB


# -- the package --------------------------------------------------------------------------------------------------
@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Do nothing: there is no library for a child to preload. Children find this as their parent does."""
    yield


torch_memory_saver = TorchMemorySaver()


def install() -> None:
    """Have ``import torch_memory_saver`` find this, in this process and in those that it starts.

    Puts modules into ``sys.modules``, and the directory :data:`SHIMS` first into ``sys.path``, which children of
    multiprocessing inherit, and into ``PYTHONPATH``, which others do. Call it before anything imports that package.
    ``python -m vram.engines.torch_memory_saver`` prints the directory, for who would rather set ``PYTHONPATH``.

    Raises
    ------
    UsageError
        If the package itself has been imported.
    """
    name, here, this = "torch_memory_saver", str(SHIMS), sys.modules[__name__]
    found = sys.modules.get(name)
    source = getattr(found, "__file__", None)
    if source is not None and Path(source).parent != SHIMS:
        raise UsageError(f"{name} was imported from {source} before: call install() first")
    if here not in sys.path:
        sys.path.insert(0, here)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *paths])
    if getattr(found, "entrypoint", None) is this:
        return
    package = _module(name, TorchMemorySaver, configure_subprocess, torch_memory_saver=torch_memory_saver)
    package.__path__ = []
    package.__file__ = str(SHIMS / f"{name}.py")
    _module(f"{name}.utils", is_xpu, change_env)
    _module(f"{name}.testing_utils", is_xpu, get_device, empty_cache, get_and_print_gpu_memory)
    _module(f"{name}.hooks").__path__ = []
    _module(f"{name}.hooks.mode_preload", configure_subprocess)
    sys.modules[f"{name}.entrypoint"] = package.entrypoint = this  # type: ignore[attr-defined]


def _module(name: str, *functions: Callable[..., object], **more: object) -> ModuleType:
    """Make a module, put it where imports find it, and into its package."""
    made = ModuleType(name, f"{__name__}, as {name}.")
    made.__dict__.update({function.__name__: function for function in functions}, **more)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, made)
    sys.modules[name] = made
    return made


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Set a variable of the environment in a block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def get_device() -> str:
    """Return what that package's tests allocate on."""
    return "cuda"


def empty_cache() -> None:
    """Have torch give back what it caches."""
    _torch().cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Return, and print, the bytes in use on a GPU, by whomever."""
    free, total = _torch().cuda.mem_get_info(gpu_id)
    print(f"GPU {gpu_id} memory: {(total - free) / 1024**3:.2f} GB ({message})")
    return int(total - free)


if __name__ == "__main__":
    print(SHIMS)
