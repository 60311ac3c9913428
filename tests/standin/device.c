// Start, errors, devices, contexts and peers.
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

Device devices[MAX_DEVICES];
int device_count;
Arena host_arena;
static Arena machine_arenas[MAX_DEVICES]; // by the machine's number

void open_arenas(void) {
    for (int i = 0; i < config.devices; i++) {
        size_t size = 2 * config.memory; // twice the memory, so that gaps do not matter
        arena_open(&machine_arenas[i], labelled_memfd(&(Label){.kind = 'a', .device = i, .size = size}, size), size,
                true);
    }
    size_t size = (size_t)1 << 40;
    arena_open(&host_arena, labelled_memfd(&(Label){.kind = 'a', .device = -1, .size = size}, size), size, false);
}

/* ---- start ---- */

static void name_device(CUuuid *uuid, int number) { // the same in every process of the machine
    memcpy(uuid->bytes, "vram-standin-gp", 15);
    uuid->bytes[15] = (char)number;
}

static void uuid_text(char text[48], int number) {
    CUuuid uuid;
    name_device(&uuid, number);
    const unsigned char *b = (const unsigned char *)uuid.bytes;
    snprintf(text, 48, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
            b[3], b[4],
             b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

// An ordinal, or a UUID or enough of one; -1 for anything else.
static int number_named(const char *name) {
    char *end;
    long ordinal = strtol(name, &end, 10);
    if (*name && !*end) return ordinal >= 0 && ordinal < config.devices ? (int)ordinal : -1;
    int found = -1;
    if (strncasecmp(name, "GPU-", 4) || !name[4]) return -1;
    for (int i = 0; i < config.devices; i++) {
        char text[48];
        uuid_text(text, i);
        if (strncasecmp(text, name, strlen(name))) continue;
        if (found >= 0) return -1; // a prefix of several
        found = i;
    }
    return found;
}

// CUDA_VISIBLE_DEVICES: an invalid entry hides itself and all that follow it.
static int visible_numbers(int numbers[MAX_DEVICES]) {
    int count = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (; count < config.devices; count++) numbers[count] = count;
        return count;
    }
    char *copy = strdup(visible), *rest = copy, *name;
    while ((name = strsep(&rest, ",")) && count < MAX_DEVICES) {
        while (*name == ' ') name++;
        int number = number_named(name);
        for (int i = 0; i < count; i++)
            if (numbers[i] == number) number = -1;
        if (number < 0) break;
        numbers[count++] = number;
    }
    free(copy);
    return count;
}

CUresult set_up_devices(void) {
    int numbers[MAX_DEVICES], count = visible_numbers(numbers);
    if (!count) return CUDA_ERROR_NO_DEVICE;
    for (int d = 0; d < count; d++) {
        Device *device = &devices[d];
        *device = (Device){.number = numbers[d], .limit = config.memory, .arena = &machine_arenas[numbers[d]]};
        if (!device->arena->base) return CUDA_ERROR_OUT_OF_MEMORY;
        name_device(&device->uuid, numbers[d]);
        device->primary = (Context){.device = d, .primary = true};
        device->primary.handle = handle_new(CONTEXT, &device->primary);
    }
    device_count = count;
    for (int d = 0; d < count; d++) devices[d].pool = devices[d].default_pool = default_pool(d);
    return CUDA_SUCCESS;
}

static CUresult f_cuInit(unsigned flags) {
    ENTER_ANY(false);
    NEED(!flags, CUDA_ERROR_INVALID_VALUE);
    NEED(!forked, CUDA_ERROR_NOT_INITIALIZED);
    if (initialized) return CUDA_SUCCESS;
    TRY(set_up_devices());
    open_table(); // again in a process that was forked since it was loaded
    initialized = true;
    return CUDA_SUCCESS;
}

static CUresult f_cuDriverGetVersion(int *version) {
    ENTER_ANY(false);
    NEED(version, CUDA_ERROR_INVALID_VALUE);
    *version = config.driver_version;
    return CUDA_SUCCESS;
}

/* ---- errors ---- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define X(code, text) {code, #code, text},
    X(CUDA_SUCCESS, "no error")
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument")
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")
    X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")
    X(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")
    X(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable")
    X(CUDA_ERROR_MULTICAST_RESOURCE_FULL, "multicast resources are full")
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")
    X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")
    X(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")
    X(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed")
    X(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")
    X(CUDA_ERROR_NOT_MAPPED, "resource not mapped")
    X(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")
    X(CUDA_ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture")
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices")
    X(CUDA_ERROR_NVLINK_UNCORRECTABLE, "uncorrectable NVLink error detected during the execution")
    X(CUDA_ERROR_CONTAINED, "Invalid access of peer GPU memory over nvlink or a hardware error")
    X(CUDA_ERROR_FILE_NOT_FOUND, "file not found")
    X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")
    X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found")
    X(CUDA_ERROR_NOT_READY, "device not ready")
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")
    X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled")
    X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled")
    X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process")
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")
    X(CUDA_ERROR_ASSERT, "device-side assert triggered")
    X(CUDA_ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted")
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error")
    X(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered")
    X(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address")
    X(CUDA_ERROR_INVALID_ADDRESS_SPACE, "operation not supported on global/shared address space")
    X(CUDA_ERROR_INVALID_PC, "invalid program counter")
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")
    X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")
    X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination")
    X(CUDA_ERROR_MPS_CONNECTION_FAILED, "MPS client failed to connect to the MPS control daemon or the MPS server")
    X(CUDA_ERROR_MPS_CLIENT_TERMINATED, "the MPS client has been terminated because of a fatal error")
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")
    X(CUDA_ERROR_TIMEOUT, "wait operation timed out")
    X(CUDA_ERROR_EXTERNAL_DEVICE, "an async error has occurred in external entity outside of CUDA")
    X(CUDA_ERROR_UNKNOWN, "unknown error")
#undef X
};

static CUresult error_text(CUresult code, const char **out, bool name) {
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *out = name ? errors[i].name : errors[i].text;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Neither counted nor made to fail: whoever reports a fault must be able to name it.
static CUresult f_cuGetErrorName(CUresult code, const char **out) { return error_text(code, out, true); }
static CUresult f_cuGetErrorString(CUresult code, const char **out) { return error_text(code, out, false); }

/* ---- devices ---- */

bool valid_device(int device) { return device >= 0 && device < device_count; }

int device_of_number(int number) {
    for (int d = 0; d < device_count; d++)
        if (devices[d].number == number) return d;
    return -1;
}

bool valid_node(int node) { return node >= 0 && node < config.numa_nodes; }

bool can_access_peer(int from, int to) { return from != to && !config.no_peer; }

bool charge(int device, size_t size) {
    if (device < 0) return true;
    Device *on = &devices[device];
    if (on->used + pinned_bytes(device) + size > on->limit) return false;
    on->used += size;
    return true;
}

void uncharge(int device, size_t size) {
    if (device >= 0) devices[device].used -= size;
}

static CUresult f_cuDeviceGetCount(int *count) {
    ENTER;
    NEED(count, CUDA_ERROR_INVALID_VALUE);
    *count = device_count;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER;
    NEED(device, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetName(char *name, int room, CUdevice device) {
    ENTER;
    NEED(name && room > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)room, "vram stand-in %d", devices[device].number);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER;
    NEED(uuid, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    *uuid = devices[device].uuid;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER;
    NEED(bytes, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    *bytes = config.memory;
    return CUDA_SUCCESS;
}

static int attribute(CUdevice_attribute which, int device) {
    int version = config.driver_version;
    switch ((int)which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return devices[device].number + 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return !config.no_vmm;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: return !config.no_vmm && config.has.rdma;
    case CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED: return !config.no_vmm && config.has.compression;
    case CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED: return !config.no_vmm && config.has.tile_pool;
    case CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK: return version >= 12080 && config.has.decompression ? 7 : 0;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return version >= 11020;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        return version >= 11030 ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | (version >= 12030 ? CU_MEM_HANDLE_TYPE_FABRIC : 0) : 0;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return version >= 12000;
    // As measured: the attribute says yes, and the create that follows is not permitted. Attributes lie.
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: return version >= 12030 && !config.no_vmm;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: return version >= 12010 && !config.no_vmm;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return devices[device].number % config.numa_nodes;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return version >= 12020 && !config.no_vmm;
    case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return version >= 13000 && !config.no_vmm;
    default: return 0;
    }
}

static CUresult f_cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    ENTER;
    NEED(value && (int)which > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    // An older driver refuses the number of an attribute that it has not heard of.
    NEED((int)which < 132 || config.driver_version >= 12010, CUDA_ERROR_INVALID_VALUE);
    *value = attribute(which, device);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    ENTER;
    NEED(major && minor, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    *major = 9;
    *minor = 0;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER;
    NEED(can, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device) && valid_device(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = can_access_peer(device, peer);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice from, CUdevice to) {
    ENTER;
    NEED(value && which > 0, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(from) && valid_device(to) && from != to, CUDA_ERROR_INVALID_DEVICE);
    *value = which != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && can_access_peer(from, to);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetPCIBusId(char *text, int room, CUdevice device) {
    ENTER;
    NEED(text && room >= 13, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(text, (size_t)room, "0000:%02X:00.0", devices[device].number + 1);
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    ENTER;
    unsigned domain, bus;
    NEED(device && text, CUDA_ERROR_INVALID_VALUE);
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 && sscanf(text, "%x:", &bus) != 1) return CUDA_ERROR_INVALID_VALUE;
    int found = device_of_number((int)bus - 1);
    NEED(found >= 0, CUDA_ERROR_INVALID_DEVICE);
    *device = found;
    return CUDA_SUCCESS;
}

/* ---- contexts: a stack for each thread ---- */

static __thread struct {
    uint64_t *handles;
    size_t depth, room;
} stack;

CUresult current_context(Context **out) {
    if (!stack.depth) return CUDA_ERROR_INVALID_CONTEXT;
    Context *context = handle_find(CONTEXT, stack.handles[stack.depth - 1]);
    if (!context || !context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *out = context;
    return context->sticky;
}

Context *find_context(CUcontext handle) {
    Context *context = handle_find(CONTEXT, (uint64_t)handle);
    return context && context->alive ? context : NULL;
}

static void push(uint64_t handle) {
    if (stack.depth == stack.room) {
        stack.room = stack.room ? 2 * stack.room : 8;
        stack.handles = realloc(stack.handles, stack.room * sizeof *stack.handles);
        if (!stack.handles) abort();
    }
    stack.handles[stack.depth++] = handle;
}

static void destroy_context(Context *context) { // what was made under it goes with it, VMM memory does not
    drain_context(context);
    drop_spans_of(context);
    drop_streams_of(context);
    context->alive = false;
    context->sticky = CUDA_SUCCESS;
    context->peers = 0;
    context->flags = 0;
}

static CUresult f_cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    ENTER;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    Context *primary = &devices[device].primary;
    primary->refs++;
    primary->alive = true;
    *out = (CUcontext)primary->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER;
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    Context *primary = &devices[device].primary;
    NEED(primary->refs, CUDA_ERROR_INVALID_CONTEXT);
    if (!--primary->refs) destroy_context(primary);
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxReset(CUdevice device) {
    ENTER;
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    Context *primary = &devices[device].primary;
    if (!primary->alive) return CUDA_SUCCESS;
    destroy_context(primary);
    primary->alive = primary->refs > 0;
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER;
    NEED(flags && active, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    *flags = devices[device].primary.flags;
    *active = devices[device].primary.alive;
    return CUDA_SUCCESS;
}

static CUresult f_cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
    ENTER;
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    devices[device].primary.flags = flags;
    return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *out, unsigned flags, CUdevice device) {
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    Context *context = make(sizeof *context);
    *context = (Context){.device = device, .refs = 1, .alive = true, .flags = flags};
    context->handle = handle_new(CONTEXT, context);
    push(context->handle);
    *out = (CUcontext)context->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device) {
    ENTER;
    return create_context(out, flags, device);
}

static CUresult f_cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *affinity, int count, unsigned flags,
        CUdevice device) {
    ENTER;
    NEED(!affinity || !count, CUDA_ERROR_NOT_SUPPORTED);
    return create_context(out, flags, device);
}

static CUresult f_cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned flags, CUdevice device) {
    ENTER;
    NEED(!params || (!params->execAffinityParams && !params->cigParams), CUDA_ERROR_NOT_SUPPORTED);
    return create_context(out, flags, device);
}

static CUresult f_cuCtxDestroy(CUcontext handle) {
    ENTER;
    Context *context = find_context(handle);
    NEED(context && !context->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (stack.depth && stack.handles[stack.depth - 1] == context->handle) stack.depth--;
    destroy_context(context);
    handle_drop(CONTEXT, context->handle); // the struct stays: events and spans may point to it
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxPushCurrent(CUcontext handle) {
    ENTER;
    NEED(find_context(handle), CUDA_ERROR_INVALID_CONTEXT);
    push((uint64_t)handle);
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxPopCurrent(CUcontext *out) {
    ENTER;
    NEED(stack.depth, CUDA_ERROR_INVALID_CONTEXT);
    stack.depth--;
    if (out) *out = (CUcontext)stack.handles[stack.depth];
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxSetCurrent(CUcontext handle) {
    ENTER;
    NEED(!handle || find_context(handle), CUDA_ERROR_INVALID_CONTEXT);
    if (stack.depth) stack.depth--;
    if (handle) push((uint64_t)handle);
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetCurrent(CUcontext *out) {
    ENTER;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = stack.depth ? (CUcontext)stack.handles[stack.depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetDevice(CUdevice *out) {
    ENTER_CONTEXT;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = context->device;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetDevice_v2(CUdevice *out, CUcontext handle) {
    ENTER;
    Context *context = NULL;
    if (handle) context = find_context(handle);
    else TRY(current_context(&context));
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = context->device;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetFlags(unsigned *out) {
    ENTER_CONTEXT;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = context->flags;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetId(CUcontext handle, unsigned long long *out) {
    ENTER;
    Context *context = NULL;
    if (handle) context = find_context(handle);
    else TRY(current_context(&context));
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = context->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxGetApiVersion(CUcontext handle, unsigned *out) {
    ENTER;
    NEED(!handle || find_context(handle), CUDA_ERROR_INVALID_CONTEXT);
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = 3020;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxSynchronize(void) {
    ENTER_CONTEXT;
    NEED(!capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    drain_context(context);
    return context->sticky;
}

static CUresult f_cuCtxSynchronize_v2(CUcontext handle) {
    ENTER;
    Context *context = NULL;
    if (handle) context = find_context(handle);
    else TRY(current_context(&context));
    NEED(context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(!capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    drain_context(context);
    return context->sticky;
}

static CUresult f_cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_CONTEXT;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

/* ---- peers ---- */

static CUresult f_cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
    ENTER_CONTEXT;
    Context *peer = find_context(handle);
    NEED(peer, CUDA_ERROR_INVALID_CONTEXT);
    NEED(!flags, CUDA_ERROR_INVALID_VALUE);
    NEED(peer->device != context->device, CUDA_ERROR_INVALID_DEVICE);
    NEED(can_access_peer(context->device, peer->device), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    NEED(!(context->peers & 1u << peer->device), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    context->peers |= 1u << peer->device;
    return CUDA_SUCCESS;
}

static CUresult f_cuCtxDisablePeerAccess(CUcontext handle) {
    ENTER_CONTEXT;
    Context *peer = find_context(handle);
    NEED(peer, CUDA_ERROR_INVALID_CONTEXT);
    NEED(context->peers & 1u << peer->device, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    context->peers &= ~(1u << peer->device);
    return CUDA_SUCCESS;
}

const Entry device_entries[] = {
    E(cuInit, 2000), E(cuDriverGetVersion, 2020), E(cuGetErrorName, 6000), E(cuGetErrorString, 6000),
    E(cuDeviceGetCount, 2000), E(cuDeviceGet, 2000), E(cuDeviceGetName, 2000), E(cuDeviceGetUuid, 9020),
    E(cuDeviceTotalMem, 3020), E(cuDeviceGetAttribute, 2000),
    E(cuDeviceComputeCapability, 2000), E(cuDeviceCanAccessPeer, 4000), E(cuDeviceGetP2PAttribute, 8000),
    E(cuDeviceGetPCIBusId, 4010), E(cuDeviceGetByPCIBusId, 4010), E(cuDevicePrimaryCtxRetain, 7000),
    E(cuDevicePrimaryCtxRelease, 7000), E(cuDevicePrimaryCtxReset, 7000), E(cuDevicePrimaryCtxGetState, 7000),
    E(cuDevicePrimaryCtxSetFlags, 7000), E_AS(cuCtxCreate, 3020, _v2), E_AS(cuCtxCreate, 11040, _v3),
    E_AS(cuCtxCreate, 12050, _v4), E(cuCtxDestroy, 4000), E(cuCtxPushCurrent, 4000), E(cuCtxPopCurrent, 4000),
    E(cuCtxSetCurrent, 4000), E(cuCtxGetCurrent, 4000), E(cuCtxGetDevice, 2000), E_AS(cuCtxGetDevice, 13000, _v2),
    E(cuCtxGetFlags, 7000), E(cuCtxGetId, 12000), E(cuCtxGetApiVersion, 3020), E(cuCtxSynchronize, 2000),
    E_AS(cuCtxSynchronize, 13000, _v2), E(cuCtxGetStreamPriorityRange, 5050), E(cuCtxEnablePeerAccess, 4000),
    E(cuCtxDisablePeerAccess, 4000), {0},
};
