"""The CUDA driver: one object that has parts. Each part is handed what it needs, and none knows this class."""

from __future__ import annotations

from ..books import Books
from ..protocol import DeviceMemory, Driver, LiveObjects
from .bindings import Bindings, version_text
from .capabilities import Capabilities
from .devices import Devices
from .foreign import Foreign
from .kernels import Kernels
from .memory import Memory
from .multicast import Multicast
from .objects import Table
from .sharing import Sharing
from .work import Work

_CALLS = {call for one in (Driver, DeviceMemory) for call in vars(one) if call[0] != "_"} - {"name", "live"}


class CudaDriver:
    """The :class:`~vram.driver.protocol.Driver` of GPU memory and of host memory for GPUs. Inert after a fork.
    A lost GPU takes the process's other GPUs along: calls raise DeviceLostError, and undo calls do nothing."""

    name = "cuda"
    # A slot for each call: isinstance() of a protocol finds it in the class, and need not look at the object each time.
    __slots__ = (*_CALLS, "__dict__", "__weakref__")

    def __init__(self) -> None:
        self.bindings = bindings = Bindings()
        # Of the driver's CUDA and of cuda-bindings, such as ("13.0", "13.3.1").
        self.versions = version_text(bindings.driver_version), bindings.bindings_version
        self.devices = devices = Devices(bindings)
        self.books = books = Books()
        events = Table(bindings, devices, "cuEventDestroy", "no event of this driver")
        self.memory = memory = Memory(bindings, devices, books)
        self.foreign = foreign = Foreign(bindings, devices, books)
        self.sharing = sharing = Sharing(bindings, devices, memory, foreign, events)
        self.work = work = Work(bindings, devices, books, foreign, events)
        self.kernels = kernels = Kernels(bindings, devices)
        self.multicast = multicast = Multicast(bindings, devices, memory, sharing)
        self.capabilities = capabilities = Capabilities(bindings, devices, memory, sharing, multicast)
        # Bound methods of the parts: a method of this class that passed a call on would cost a frame more.
        self.device_count = devices.device_count
        self.device_info = devices.device_info
        self.canonical = devices.canonical
        self.mem_info = devices.mem_info
        self.peer_refusal = devices.peer_refusal
        self.support = capabilities.support
        self.release = capabilities.release
        self.misread_attributes = capabilities.misread_attributes
        self.compute_mode_refusal = capabilities.compute_mode_refusal
        self.mem_granularity = memory.mem_granularity
        self.address_reserve = memory.address_reserve
        self.address_free = memory.address_free
        self.mem_create = memory.mem_create
        self.mem_release = memory.mem_release
        self.mem_retain = memory.mem_retain
        self.mem_properties = memory.mem_properties
        self.mem_native_handle = memory.mem_native_handle
        self.mem_map = memory.mem_map
        self.mem_map_new = memory.mem_map_new
        self.mem_unmap = memory.mem_unmap
        self.mem_set_access = memory.mem_set_access
        self.mem_get_access = memory.mem_get_access
        self.mem_export = sharing.mem_export
        self.mem_import = sharing.mem_import
        self.mem_map_import = sharing.mem_map_import
        self.mem_export_fabric = sharing.mem_export_fabric
        self.mem_import_fabric = sharing.mem_import_fabric
        self.mem_adopt = sharing.mem_adopt
        self.ipc_export = sharing.ipc_export
        self.ipc_open = sharing.ipc_open
        self.ipc_close = sharing.ipc_close
        self.ipc_create = sharing.ipc_create
        self.ipc_free = sharing.ipc_free
        self.pool_export = sharing.pool_export
        self.pool_import = sharing.pool_import
        self.pool_destroy = sharing.pool_destroy
        self.pool_export_pointer = sharing.pool_export_pointer
        self.pool_open_pointer = sharing.pool_open_pointer
        self.pool_close_pointer = sharing.pool_close_pointer
        self.event_export = sharing.event_export
        self.event_import = sharing.event_import
        self.copy = work.copy
        self.copy_in = work.copy_in
        self.copy_out = work.copy_out
        self.fill = work.fill
        self.synchronize = work.synchronize
        self.copy_async = work.copy_async
        self.fill_async = work.fill_async
        self.stream_create = work.stream_create
        self.stream_destroy = work.stream_destroy
        self.stream_synchronize = work.stream_synchronize
        self.stream_is_capturing = work.stream_is_capturing
        self.stream_wait = work.stream_wait
        self.event_create = work.event_create
        self.event_record = work.event_record
        self.event_is_done = work.event_is_done
        self.event_synchronize = work.event_synchronize
        self.event_destroy = work.event_destroy
        self.host_register = work.host_register
        self.host_unregister = work.host_unregister
        self.capability = kernels.capability
        self.kernels_load = kernels.kernels_load
        self.kernels_unload = kernels.kernels_unload
        self.kernel = kernels.kernel
        self.launch = kernels.launch
        self.launch_copy = kernels.launch_copy
        self.ordinal_of = foreign.ordinal_of
        self.pointer_info = foreign.pointer_info
        self.pointer_identity = foreign.pointer_identity
        self.window_open = foreign.window_open
        self.window_close = foreign.window_close
        self.multicast_check = multicast.multicast_check
        self.multicast_granularity = multicast.multicast_granularity
        self.multicast_create = multicast.multicast_create
        self.multicast_import = multicast.multicast_import
        self.multicast_import_fabric = multicast.multicast_import_fabric
        self.multicast_add_device = multicast.multicast_add_device
        self.multicast_bind_mem = multicast.multicast_bind_mem
        self.multicast_bind_address = multicast.multicast_bind_address
        self.multicast_unbind = multicast.multicast_unbind

    def live(self) -> LiveObjects:
        handles = len(self.sharing.pools.out) + len(self.kernels.libraries.out)
        return self.books.live(handles=handles, mappings=len(self.foreign.windows))
