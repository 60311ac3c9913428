// What lies at an address: cuMemAlloc memory, host memory, pointer attributes.
#include "standin.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SMALL_ALIGNMENT ((size_t)512) // measured: 8192 bytes after 1000 lie 1024 further on

Ranges spans, reservations;

uint64_t next_id(void) {
    static uint64_t last;
    return ++last;
}

static bool is_host(const Span *span) { return span->kind == HOST_ALLOCATED || span->kind == HOST_REGISTERED; }

/* ---- blocks: small cuMemAlloc allocations share them (measured), larger ones have their own ---- */

typedef struct Block {
    Arena within; // no descriptor: only tells what is taken
    size_t offset; // in the device's arena
    int device;
    struct Block *next;
} Block;
static Block *blocks;

static bool take_in_block(Span *span, size_t size) {
    for (Block *block = blocks; block; block = block->next) {
        if (block->device != span->device || !arena_take(&block->within, size, SMALL_ALIGNMENT, &span->offset)) continue;
        span->offset += block->offset;
        span->block = block->offset;
        span->block_size = GRANULE;
        return true;
    }
    return false;
}

static bool take_legacy(Span *span, size_t size) {
    Arena *arena = devices[span->device].arena;
    if (size > GRANULE / 2) {
        span->block_size = (size + GRANULE - 1) & ~(GRANULE - 1);
        if (!arena_take(arena, span->block_size, GRANULE, &span->offset)) return false;
        span->block = span->offset;
        return true;
    }
    size = (size + SMALL_ALIGNMENT - 1) & ~(SMALL_ALIGNMENT - 1);
    if (take_in_block(span, size)) return true;
    size_t offset;
    if (!arena_take(arena, GRANULE, GRANULE, &offset)) return false;
    Block *block = make(sizeof *block);
    *block = (Block){.within = {.fd = -1, .size = GRANULE}, .offset = offset, .device = span->device, .next = blocks};
    blocks = block;
    return take_in_block(span, size);
}

static void give_legacy(const Span *span) {
    Arena *arena = devices[span->device].arena;
    Block **link = &blocks;
    while (*link && ((*link)->device != span->device || (*link)->offset != span->block)) link = &(*link)->next;
    Block *block = *link;
    if (!block) {
        arena_give(arena, span->offset);
        return;
    }
    memset(arena->base + span->offset, 0, span->range.size); // who takes these bytes next finds zeros
    arena_give(&block->within, span->offset - block->offset);
    if (block->within.used.count) return;
    *link = block->next;
    arena_close(&block->within);
    arena_give(arena, block->offset);
    free(block);
}

/* ---- spans ---- */

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
        legacy_forget(span->shared_id);
        give_legacy(span);
        uncharge(span->device, span->charged);
        break;
    case POOL_ALLOCATION:
    case POOL_IMPORTED: pool_free(span); break;
    case IPC_OPENED: munmap((void *)span->view, span->view_size); break;
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
        if (span->kind == IPC_OPENED && end > span->view + span->block_size) return REFUSED; // nothing behind it
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
    size_t whole = (size + PAGE - 1) & ~(PAGE - 1);
    NEED(whole >= size && charge(context->device, whole), CUDA_ERROR_OUT_OF_MEMORY);
    Span *span = make(sizeof *span);
    *span = (Span){.kind = LEGACY, .device = context->device, .id = next_id(), .context = context, .charged = whole};
    if (!take_legacy(span, size)) {
        uncharge(context->device, whole);
        free(span);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    span->range = (Range){(uint64_t)devices[span->device].arena->base + span->offset, size};
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

static bool without_access(const Span *span) { // a VMM mapping that no place has access to yet
    if (span->kind != VMM_MAPPING) return false;
    int access = span->host_access;
    for (int d = 0; d < device_count; d++) access |= span->access[d];
    return !access;
}

static bool without_gpu(const Span *span) { // a VMM mapping that no GPU has access to
    if (span->kind != VMM_MAPPING) return false;
    int access = 0;
    for (int d = 0; d < device_count; d++) access |= span->access[d];
    return !access;
}

// Measured: the allocation, or for VMM memory the mapping, that an address lies in, once a GPU may access it; and it
// wants a current context, which the attributes do not.
static CUresult f_cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER_CONTEXT;
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(span && !without_gpu(span), CUDA_ERROR_NOT_FOUND);
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

/* ---- pointer attributes ---- */

static CUresult access_flags(unsigned *out, const Span *span) {
    Context *context;
    TRY(current_context(&context));
    *out = span->kind == VMM_MAPPING ? span->access[context->device] : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
}

// What an address in a reservation answers, mapped or not. Measured for what is mapped: the whole reservation, which for
// PyTorch's expandable segments is nearly all addresses and no memory.
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

static unsigned handle_types(const Span *span) {
    if (span->pool) return pool_handle_types(span->pool);
    if (span->kind != VMM_MAPPING || span->memory->imported) return 0;
    return (unsigned)span->memory->prop.requestedHandleTypes;
}

// Measured, as (legacy capable, handle types, pool): cuMemAlloc 1, 0, none; opened from a legacy handle 0, 0, none; VMM
// with fd 0, 1, none, imported 0, 0, none; cuMemAllocAsync 0, 0, pool, of a pool with fd 0, 1, pool, imported 0, 0, pool.
static CUresult attribute(void *out, CUpointer_attribute which, const Span *span, uint64_t address) {
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPED: return range_attribute(out, which, span, address);
    default: NEED(span, CUDA_ERROR_INVALID_VALUE);
    }
    bool host = span->device < 0 && !(span->memory && span->memory->elsewhere);
    switch ((int)which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = span->context ? (CUcontext)span->context->handle : NULL; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = host &&
            !multicast_span(address) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        NEED(!without_access(span), CUDA_ERROR_INVALID_VALUE); // measured
        *(CUdeviceptr *)out = address;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        NEED(host, CUDA_ERROR_INVALID_VALUE);
        *(void **)out = (void *)address;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = span->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = host &&
            span->context ? span->context->device : span->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)out = span->kind == LEGACY; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: *(unsigned long long *)out = handle_types(span); break;
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

// Symbols of the library as they are of the real one: who does not believe the bindings looks them up by name.
EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr address) {
    return f_cuPointerGetAttribute(out, which, address);
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

EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *which, void **out, CUdeviceptr address) {
    return f_cuPointerGetAttributes(count, which, out, address);
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
    E(cuMemHostGetDevicePointer, 3020), E(cuMemHostGetFlags, 2030), E(cuPointerGetAttribute, 4000), E(cuPointerGetAttributes, 7000),
            E(cuPointerSetAttribute, 6000), {0},
};
