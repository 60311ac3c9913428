// What lies at an address: cuMemAlloc memory, host memory, legacy IPC, pointer attributes.
#include "standin.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

Ranges spans, reservations;

uint64_t next_id(void) {
    static uint64_t last;
    return ++last;
}

static bool is_host(const Span *span) { return span->kind == HOST_ALLOCATED || span->kind == HOST_REGISTERED; }

void span_drop(Span *span) {
    ranges_remove(&spans, &span->range);
    void *base = (void *)span->range.base;
    switch (span->kind) {
    case VMM_MAPPING: // mapped over, never unmapped: the hole could be taken by another thread
        mmap(base, span->range.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        span->memory->uses--;
        memory_forget(span->memory);
        break;
    case LEGACY:
        arena_give(devices[span->device].arena, span->offset);
        uncharge(span->device, span->charged);
        break;
    case POOL_ALLOCATION:
    case POOL_IMPORTED: pool_free(span); break;
    case IPC_OPENED:
    case HOST_ALLOCATED: munmap(base, (span->range.size + PAGE - 1) & ~(PAGE - 1)); break;
    case HOST_REGISTERED: break;
    }
    free(span);
}

void drop_spans_of(Context *context) {
    for (size_t i = spans.count; i-- > 0;) {
        Span *span = (Span *)spans.items[i];
        if (span->context == context) span_drop(span);
    }
}

static bool in_arena(uint64_t address) {
    for (int d = 0; d < device_count; d++) {
        uint64_t base = (uint64_t)devices[d].arena->base;
        if (address >= base && address < base + devices[d].arena->size) return true;
    }
    return false;
}

// Access is what cuMemSetAccess gave this device: read-only is real, as measured. Memory that was not made by
// cuMemCreate is reached from every device.
Reach reach(uint64_t address, size_t size, bool write, int device) {
    uint64_t end = address + size;
    if (end < address) return REFUSED;
    if (!ranges_at(&spans, address)) {
        bool ours = in_arena(address) || ranges_at(&reservations, address);
        return ours ? REFUSED : NOT_KNOWN;
    }
    while (address < end) {
        const Span *span = (Span *)ranges_at(&spans, address);
        if (!span) return REFUSED;
        if (is_host(span)) return REACHED; // the rest is host memory all the same, or the caller's crash
        uint64_t span_end = span->range.base + span->range.size;
        if (span->kind != VMM_MAPPING) return end <= span_end ? REACHED : REFUSED;
        if (!(span->access[device] & (write ? 2 : 1))) return REFUSED;
        if (span->memory->multicast && (!write || end > span_end)) return REFUSED; // plain reads of it are undefined
        address = span_end;
    }
    return REACHED;
}

Span *multicast_span(uint64_t address) {
    Span *span = (Span *)ranges_at(&spans, address);
    return span && span->kind == VMM_MAPPING && span->memory->multicast ? span : NULL;
}

/* ---- cuMemAlloc ---- */

static CUresult f_cuMemAlloc(CUdeviceptr *out, size_t size) {
    ENTER_CONTEXT;
    NEED(out && size, CUDA_ERROR_INVALID_VALUE);
    size_t offset, whole = (size + PAGE - 1) & ~(PAGE - 1);
    NEED(whole >= size && charge(context->device, whole), CUDA_ERROR_OUT_OF_MEMORY);
    Arena *arena = devices[context->device].arena;
    if (!arena_take(arena, whole, PAGE, &offset)) {
        uncharge(context->device, whole);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Span *span = make(sizeof *span);
    *span = (Span){.range = {(uint64_t)arena->base + offset, size}, .kind = LEGACY, .device = context->device,
            .id = next_id(),
                   .context = context, .offset = offset, .charged = whole};
    ranges_insert(&spans, &span->range);
    *out = span->range.base;
    return CUDA_SUCCESS;
}

static Span *span_starting(uint64_t address) {
    Span *span = (Span *)ranges_at(&spans, address);
    return span && span->range.base == address ? span : NULL;
}

static CUresult f_cuMemFree(CUdeviceptr address) {
    ENTER_CONTEXT;
    if (!address) return CUDA_SUCCESS;
    Span *span = span_starting(address);
    NEED(span && (span->kind == LEGACY || span->kind == POOL_ALLOCATION || span->kind == POOL_IMPORTED),
            CUDA_ERROR_INVALID_VALUE);
    if (span->context) drain_context(span->context); // freeing waits for the work that may use it
    else drain_all();
    span = span_starting(address); // unless one of that work was its own freeing
    NEED(span, CUDA_ERROR_INVALID_VALUE);
    span_drop(span);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetInfo(size_t *available, size_t *total) {
    ENTER_CONTEXT;
    NEED(available && total, CUDA_ERROR_INVALID_VALUE);
    const Device *device = &devices[context->device];
    size_t used = device->used + pinned_bytes(context->device);
    *available = device->limit > used ? device->limit - used : 0;
    *total = config.memory;
    return CUDA_SUCCESS;
}

// The allocation, or for VMM memory the mapping, that an address lies in.
static CUresult f_cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER;
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(span, CUDA_ERROR_NOT_FOUND);
    if (base) *base = span->range.base;
    if (size) *size = span->range.size;
    return CUDA_SUCCESS;
}

/* ---- host memory ---- */

static CUresult allocate_host(void **out, size_t size, unsigned flags, Context *context) {
    NEED(out && size && !(flags & ~7u), CUDA_ERROR_INVALID_VALUE);
    size_t whole = (size + PAGE - 1) & ~(PAGE - 1);
    void *base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(base != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    Span *span = make(sizeof *span);
    *span = (Span){.range = {(uint64_t)base, size}, .kind = HOST_ALLOCATED, .device = -1, .id = next_id(),
            .context = context, .host_flags = flags};
    ranges_insert(&spans, &span->range);
    *out = base;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER_CONTEXT;
    return allocate_host(out, size, flags, context);
}

static CUresult f_cuMemAllocHost(void **out, size_t size) {
    ENTER_CONTEXT;
    return allocate_host(out, size, 0, context);
}

static CUresult f_cuMemFreeHost(void *address) {
    ENTER_CONTEXT;
    Span *span = span_starting((uint64_t)address);
    NEED(span && span->kind == HOST_ALLOCATED, CUDA_ERROR_INVALID_VALUE);
    drain_all();
    span_drop(span);
    return CUDA_SUCCESS;
}

static bool is_mapped(uint64_t address, size_t size) {
    uint64_t start = address & ~(PAGE - 1);
    return !msync((void *)start, address + size - start, MS_ASYNC);
}

static CUresult f_cuMemHostRegister(void *address, size_t size, unsigned flags) {
    ENTER_CONTEXT;
    NEED(address && size && !(flags & ~15u), CUDA_ERROR_INVALID_VALUE);
    NEED(!ranges_overlap(&spans, (uint64_t)address, size), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    NEED(is_mapped((uint64_t)address, size), CUDA_ERROR_INVALID_VALUE);
    NEED(!(flags & CU_MEMHOSTREGISTER_IOMEMORY), CUDA_ERROR_NOT_PERMITTED);
    Span *span = make(sizeof *span);
    *span = (Span){.range = {(uint64_t)address, size}, .kind = HOST_REGISTERED, .device = -1, .id = next_id(),
            .context = context, .host_flags = flags};
    ranges_insert(&spans, &span->range);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemHostUnregister(void *address) {
    ENTER_CONTEXT;
    Span *span = span_starting((uint64_t)address);
    NEED(span && span->kind == HOST_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    drain_all();
    span_drop(span);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemHostGetDevicePointer(CUdeviceptr *out, void *address, unsigned flags) {
    ENTER_CONTEXT;
    const Span *span = (Span *)ranges_at(&spans, (uint64_t)address);
    NEED(out && !flags && span && is_host(span), CUDA_ERROR_INVALID_VALUE);
    *out = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemHostGetFlags(unsigned *out, void *address) {
    ENTER_CONTEXT;
    const Span *span = (Span *)ranges_at(&spans, (uint64_t)address);
    NEED(out && span && span->kind == HOST_ALLOCATED, CUDA_ERROR_INVALID_VALUE);
    *out = span->host_flags;
    return CUDA_SUCCESS;
}

/* ---- legacy IPC ---- */

// Measured: VMM memory is refused. An interior pointer gives the handle of its allocation, with no word about it.
static CUresult f_cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    ENTER_CONTEXT;
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(out && span && span->kind == LEGACY, CUDA_ERROR_INVALID_VALUE);
    Token token;
    token_make(&token, 'l', devices[span->device].arena->fd, span->offset, span->range.size,
            devices[span->device].number);
    memset(out, 0, sizeof *out);
    memcpy(out, &token, sizeof token);
    return CUDA_SUCCESS;
}

static Span *opened_before(const Token *token, const Context *context) {
    for (size_t i = 0; i < spans.count; i++) {
        Span *span = (Span *)spans.items[i];
        if (span->kind == IPC_OPENED && span->context == context && !memcmp(&span->token, token,
                sizeof *token)) return span;
    }
    return NULL;
}

static CUresult f_cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    ENTER_CONTEXT;
    Token token;
    memcpy(&token, &handle, sizeof token);
    NEED(out && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    NEED(token_valid(&token, 'l') && token.size, CUDA_ERROR_INVALID_VALUE);
    NEED(!token_is_own(&token), CUDA_ERROR_INVALID_CONTEXT); // measured: 201 in the process that made it
    int device = device_of_number(token.device);
    NEED(device >= 0, CUDA_ERROR_INVALID_DEVICE);
    NEED(device == context->device || can_access_peer(context->device, device), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    Span *span = opened_before(&token, context); // opened again: the same address, counted
    if (!span) {
        int fd = token_open(&token);
        NEED(fd >= 0, CUDA_ERROR_INVALID_HANDLE);
        void *base = mmap(NULL, token.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)token.offset);
        close(fd);
        NEED(base != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
        span = make(sizeof *span);
        *span = (Span){.range = {(uint64_t)base, token.size}, .kind = IPC_OPENED, .device = device, .id = next_id(),
                .context = context, .token = token};
        ranges_insert(&spans, &span->range);
    }
    span->opens++;
    *out = span->range.base;
    return CUDA_SUCCESS;
}

static CUresult f_cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER_CONTEXT;
    Span *span = span_starting(address);
    NEED(span && span->kind == IPC_OPENED, CUDA_ERROR_INVALID_VALUE);
    drain_all();
    if (!--span->opens) span_drop(span);
    return CUDA_SUCCESS;
}

/* ---- pointer attributes ---- */

static CUresult access_flags(unsigned *out, const Span *span) {
    Context *context;
    TRY(current_context(&context));
    *out = span->kind == VMM_MAPPING ? span->access[context->device] : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}

// What an address in a reservation answers, mapped or not.
static CUresult range_attribute(void *out, CUpointer_attribute which, const Span *span, uint64_t address) {
    const Range *range = ranges_at(&reservations, address);
    if (!range && span) range = &span->range;
    NEED(range, CUDA_ERROR_INVALID_VALUE);
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = range->base; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = range->size; return CUDA_SUCCESS;
    default: *(bool *)out = span != NULL; return CUDA_SUCCESS;
    }
}

static bool legacy_capable(const Span *span) { return span->kind == LEGACY || span->kind == IPC_OPENED; }

// Measured, as (legacy capable, handle types, pool): cuMemAlloc 1, 0, none; VMM with fd 0, 1, none; cuMemAllocAsync 0, 0, pool.
static CUresult attribute(void *out, CUpointer_attribute which, const Span *span, uint64_t address) {
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPED: return range_attribute(out, which, span, address);
    default: NEED(span, CUDA_ERROR_INVALID_VALUE);
    }
    bool host = span->device < 0;
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = span->context ? (CUcontext)span->context->handle : NULL; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = host &&
            !multicast_span(address) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        NEED(host, CUDA_ERROR_INVALID_VALUE);
        *(void **)out = (void *)address;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = span->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = host &&
            span->context ? span->context->device : span->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)out = legacy_capable(span); break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)out = span->kind == VMM_MAPPING ? (unsigned)span->memory->prop.requestedHandleTypes : 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *(bool *)out = !host; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return access_flags(out, span);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(uint64_t *)out = span->pool ? pool_handle(span->pool) : 0; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: *(size_t *)out = span->range.size; break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: *(CUdeviceptr *)out = span->range.base; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: *(unsigned long long *)out = span->memory ? span->memory->id : span->id; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

static size_t attribute_size(CUpointer_attribute which) {
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: return 1;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return 4;
    default: return 8;
    }
}

static CUresult f_cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr address) {
    ENTER;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    return attribute(out, which, (Span *)ranges_at(&spans, address), address);
}

// An attribute that does not apply reads 0, and -2 as the ordinal: an unknown address is no error here.
static CUresult f_cuPointerGetAttributes(unsigned count, CUpointer_attribute *which, void **out, CUdeviceptr address) {
    ENTER;
    NEED(count && which && out, CUDA_ERROR_INVALID_VALUE);
    const Span *span = (Span *)ranges_at(&spans, address);
    for (unsigned i = 0; i < count; i++) {
        CUresult status = attribute(out[i], which[i], span, address);
        if (status == CUDA_SUCCESS) continue;
        NEED(status == CUDA_ERROR_INVALID_VALUE, status);
        memset(out[i], 0, attribute_size(which[i]));
        if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out[i] = -2;
    }
    return CUDA_SUCCESS;
}

static CUresult f_cuPointerSetAttribute(const void *value, CUpointer_attribute which, CUdeviceptr address) {
    ENTER;
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(value && span && which == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUDA_ERROR_INVALID_VALUE);
    return span->kind == LEGACY ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

const Entry memory_entries[] = {
    E(cuMemAlloc, 3020), E(cuMemFree, 3020), E(cuMemGetInfo, 3020), E(cuMemGetAddressRange, 3020), E(cuMemHostAlloc,
            2020),
    E(cuMemAllocHost, 3020), E(cuMemFreeHost, 2000), E(cuMemHostRegister, 6050), E(cuMemHostUnregister, 4000),
    E(cuMemHostGetDevicePointer, 3020), E(cuMemHostGetFlags, 2030), E(cuIpcGetMemHandle, 4010), E(cuIpcOpenMemHandle,
            11000),
    E(cuIpcCloseMemHandle, 4010), E(cuPointerGetAttribute, 4000), E(cuPointerGetAttributes, 7000),
            E(cuPointerSetAttribute, 6000), {0},
};
