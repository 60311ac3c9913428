// Stream-ordered pools. A pool that may be shared is one memfd, which an importer maps as a whole.
#include "standin.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define OPENED_AT_MOST ((size_t)5 << 30) // measured: 5 GiB works, 8 GiB ends the process that opens it with SIGSEGV
#define FD CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

typedef struct Pool {
    uint64_t handle; // 0 once destroyed: it lives on until its last allocation is freed
    int device;
    unsigned handle_types;
    bool is_default, imported, exported;
    int imports;          // how often it was imported: it is one pool, and as often destroyed
    ino_t inode;          // of an imported one
    struct Pool *next;    // of those that are imported
    Arena own, *arena;
    long live;
    size_t used, used_high, reserved_high;
    uint64_t threshold;
    int reuse[3];
    unsigned char access[MAX_DEVICES];
} Pool;

static Pool *imported_pools;

uint64_t pool_handle(const Pool *pool) { return pool->handle; }
unsigned pool_handle_types(const Pool *pool) { return pool->imported ? 0 : pool->handle_types; } // measured

static Pool *new_pool(int device) {
    Pool *pool = make(sizeof *pool);
    *pool = (Pool){.device = device, .reuse = {1, 1, 1}, .own = {.fd = -1}};
    pool->arena = devices[device].arena;
    pool->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return pool;
}

Pool *default_pool(int device) {
    Pool *pool = new_pool(device);
    pool->is_default = true;
    pool->handle = handle_new(POOL, pool);
    return pool;
}

static Pool *find_pool(CUmemoryPool handle) { return handle_find(POOL, (uint64_t)handle); }

static void forget_if_unused(Pool *pool) {
    if (pool->handle || pool->live) return;
    arena_close(&pool->own);
    free(pool);
}

static size_t reserved(const Pool *pool) { return (pool->used + GRANULE - 1) / GRANULE * GRANULE; }

/* ---- pools ---- */

static CUresult check_props(const CUmemPoolProps *props) {
    NEED(props && props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    NEED(props->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    NEED(valid_device(props->location.id), CUDA_ERROR_INVALID_DEVICE);
    unsigned types = (unsigned)props->handleTypes;
    NEED(!(types & ~(unsigned)(FD | CU_MEM_HANDLE_TYPE_FABRIC)), CUDA_ERROR_INVALID_VALUE); // our guess for WIN32: as
    NEED(!(types & CU_MEM_HANDLE_TYPE_FABRIC), CUDA_ERROR_NOT_PERMITTED); // measured for cuMemCreate
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
    ENTER_CONTEXT;
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    TRY(check_props(props));
    Pool *pool = new_pool(props->location.id);
    pool->handle_types = (unsigned)props->handleTypes;
    if (pool->handle_types) {
        size_t size = 2 * config.memory;
        Label label = {.kind = 'p', .device = devices[pool->device].number, .handle_types = pool->handle_types,
                .size = size};
        if (!arena_open(&pool->own, labelled_memfd(&label, size), size, true)) {
            arena_close(&pool->own);
            free(pool);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pool->arena = &pool->own;
    }
    pool->handle = handle_new(POOL, pool);
    *out = (CUmemoryPool)pool->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolDestroy(CUmemoryPool handle) {
    ENTER_CONTEXT;
    Pool *pool = find_pool(handle);
    NEED(pool && !pool->is_default, CUDA_ERROR_INVALID_VALUE);
    if (pool->imports > 1) {
        pool->imports--;
        return CUDA_SUCCESS;
    }
    NEED(!pool->imported || !pool->live, CUDA_ERROR_INVALID_VALUE); // measured: pointers imported from it are out
    for (Pool **at = &imported_pools; *at; at = &(*at)->next) {
        if (*at != pool) continue;
        *at = pool->next;
        break;
    }
    if (devices[pool->device].pool == pool) devices[pool->device].pool = devices[pool->device].default_pool;
    handle_drop(POOL, pool->handle);
    pool->handle = 0;
    forget_if_unused(pool);
    return CUDA_SUCCESS;
}

static CUresult give_pool(CUmemoryPool *out, CUdevice device, bool the_default) {
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    *out = (CUmemoryPool)(the_default ? devices[device].default_pool : devices[device].pool)->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER;
    return give_pool(out, device, true);
}

static CUresult f_cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER;
    return give_pool(out, device, false);
}

static CUresult f_cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
    ENTER;
    Pool *pool = find_pool(handle);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    NEED(pool && pool->device == device && !pool->imported, CUDA_ERROR_INVALID_VALUE);
    devices[device].pool = pool;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER;
    NEED(location && type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    NEED(location->type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    return give_pool(out, location->id, true);
}

static CUresult f_cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
    ENTER;
    NEED(location && type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    NEED(location->type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
    return give_pool(out, location->id, false);
}

static CUresult f_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
    ENTER;
    const Pool *pool = find_pool(handle);
    NEED(pool && value, CUDA_ERROR_INVALID_VALUE);
    switch ((int)which) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)value = pool->reuse[which - 1]; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *(cuuint64_t *)value = pool->threshold; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *(cuuint64_t *)value = reserved(pool); return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *(cuuint64_t *)value = pool->reserved_high; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *(cuuint64_t *)value = pool->used; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *(cuuint64_t *)value = pool->used_high; return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult f_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
    ENTER;
    Pool *pool = find_pool(handle);
    NEED(pool && value, CUDA_ERROR_INVALID_VALUE);
    switch ((int)which) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->reuse[which - 1] = *(int *)value; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: pool->threshold = *(cuuint64_t *)value; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        NEED(!*(cuuint64_t *)value, CUDA_ERROR_INVALID_VALUE);
        pool->reserved_high = reserved(pool);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        NEED(!*(cuuint64_t *)value, CUDA_ERROR_INVALID_VALUE);
        pool->used_high = pool->used;
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult f_cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    ENTER;
    (void)keep; // nothing unused is ever kept
    NEED(find_pool(handle), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *descs, size_t count) {
    ENTER;
    Pool *pool = find_pool(handle);
    NEED(pool && descs && count, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        NEED(descs[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
        int device = descs[i].location.id;
        NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
        NEED(device == pool->device || can_access_peer(device, pool->device), CUDA_ERROR_INVALID_DEVICE);
        NEED(device != pool->device || descs[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_DEVICE);
    }
    for (size_t i = 0; i < count; i++) pool->access[descs[i].location.id] = (unsigned char)descs[i].flags;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolGetAccess(CUmemAccess_flags *out, CUmemoryPool handle, CUmemLocation *location) {
    ENTER;
    const Pool *pool = find_pool(handle);
    NEED(out && pool && location && location->type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(location->id), CUDA_ERROR_INVALID_DEVICE);
    *out = (CUmemAccess_flags)pool->access[location->id];
    return CUDA_SUCCESS;
}

/* ---- allocations ---- */

static CUresult allocate(CUdeviceptr *out, size_t size, Pool *pool, CUstream stream, Context *context) {
    NEED(out && size && pool, CUDA_ERROR_INVALID_VALUE);
    NEED(!pool->imported, CUDA_ERROR_INVALID_VALUE); // an imported pool does not allocate
    TRY(check_stream(context, stream));
    size_t offset, whole = (size + PAGE - 1) & ~(PAGE - 1);
    NEED(whole >= size && charge(pool->device, whole), CUDA_ERROR_OUT_OF_MEMORY);
    if (!arena_take(pool->arena, whole, PAGE, &offset)) {
        uncharge(pool->device, whole);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Span *span = make(sizeof *span);
    *span = (Span){.range = {(uint64_t)pool->arena->base + offset, size}, .kind = POOL_ALLOCATION,
            .device = pool->device,
                   .id = next_id(), .pool = pool, .offset = offset, .charged = whole};
    ranges_insert(&spans, &span->range);
    pool->live++;
    pool->used += whole;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    if (reserved(pool) > pool->reserved_high) pool->reserved_high = reserved(pool);
    *out = span->range.base;
    return CUDA_SUCCESS;
}

void pool_free(Span *span) {
    Pool *pool = span->pool;
    if (span->kind == POOL_ALLOCATION) {
        arena_give(pool->arena, span->offset);
        uncharge(pool->device, span->charged);
        pool->used -= span->charged;
    }
    pool->live--;
    forget_if_unused(pool);
}

static CUresult f_cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream stream) {
    ENTER_CONTEXT;
    return allocate(out, size, devices[context->device].pool, stream, context);
}

static CUresult f_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream stream) {
    ENTER_CONTEXT;
    return allocate(out, size, find_pool(pool), stream, context);
}

static CUresult f_cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    ENTER_CONTEXT;
    Span *span = (Span *)ranges_at(&spans, address);
    NEED(span && span->range.base == address && (span->kind == POOL_ALLOCATION || span->kind == POOL_IMPORTED ||
            span->kind == LEGACY),
         CUDA_ERROR_INVALID_VALUE);
    return enqueue_free(context, stream, span);
}

/* ---- sharing: the pool by descriptor, each allocation by 64 bytes ---- */

static CUresult f_cuMemPoolExportToShareableHandle(void *out, CUmemoryPool handle, CUmemAllocationHandleType type,
        unsigned long long flags) {
    ENTER_CONTEXT;
    Pool *pool = find_pool(handle);
    NEED(out && pool && !pool->imported && !flags && type == FD && pool->handle_types & FD, CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(pool->own.fd, F_DUPFD_CLOEXEC, 0);
    NEED(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    pool->exported = true;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, CUmemAllocationHandleType type,
        unsigned long long flags) {
    ENTER_CONTEXT;
    Label label;
    int fd = (int)(intptr_t)handle;
    NEED(out && !flags && type == FD && read_label(fd, &label), CUDA_ERROR_INVALID_VALUE);
    NEED(label.kind != 'm' && label.kind != 'x', CUDA_ERROR_NOT_SUPPORTED); // measured, for memory
    NEED(label.kind == 'p', CUDA_ERROR_INVALID_VALUE);
    int device = device_of_number(label.device);
    NEED(device >= 0, CUDA_ERROR_INVALID_DEVICE);
    struct stat about;
    NEED(!fstat(fd, &about), CUDA_ERROR_INVALID_VALUE);
    for (Pool *known = imported_pools; known; known = known->next) {
        if (known->inode != about.st_ino) continue;
        known->imports++; // measured: imported again it is the same pool
        *out = (CUmemoryPool)known->handle;
        return CUDA_SUCCESS;
    }
    Pool *pool = new_pool(device);
    pool->imported = true;
    pool->imports = 1;
    pool->inode = about.st_ino;
    pool->handle_types = label.handle_types;
    if (!arena_open(&pool->own, fcntl(fd, F_DUPFD_CLOEXEC, 0), label.size, true)) {
        arena_close(&pool->own);
        free(pool);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->arena = &pool->own;
    pool->handle = handle_new(POOL, pool);
    pool->next = imported_pools;
    imported_pools = pool;
    *out = (CUmemoryPool)pool->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr address) {
    ENTER_CONTEXT;
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(out && span && span->kind == POOL_ALLOCATION && span->pool->handle_types, CUDA_ERROR_INVALID_VALUE);
    // Measured: no interior pointers, and none before the pool itself was exported.
    NEED(span->range.base == address && span->pool->exported, CUDA_ERROR_INVALID_VALUE);
    Token token;
    token_make(&token, 'q', span->pool->own.fd, span->offset, span->range.size, devices[span->device].number);
    token.serial = ~token.size; // it is opaque: one whose bytes were changed names no larger allocation, but none
    memset(out, 0, sizeof *out);
    memcpy(out, &token, sizeof token);
    return CUDA_SUCCESS;
}

// Imported twice, one pointer is two in name only: the first free takes it away from both.
static CUresult f_cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool handle, CUmemPoolPtrExportData *data) {
    ENTER_CONTEXT;
    Pool *pool = find_pool(handle);
    NEED(out && data && pool && pool->imported, CUDA_ERROR_INVALID_VALUE);
    Token token;
    struct stat about;
    memcpy(&token, data, sizeof token);
    NEED(token_valid(&token, 'q') && !fstat(pool->own.fd, &about) && about.st_ino == token.inode,
            CUDA_ERROR_INVALID_VALUE);
    NEED(token.serial == ~token.size, CUDA_ERROR_INVALID_VALUE);
    NEED(token.size && token.offset < pool->own.size && token.size <= pool->own.size - token.offset,
            CUDA_ERROR_INVALID_VALUE);
    if (token.size > OPENED_AT_MOST) {
        would_crash++;
        return CUDA_ERROR_UNKNOWN;
    }
    uint64_t address = (uint64_t)pool->own.base + token.offset;
    *out = address;
    const Range *before = ranges_at(&spans, address);
    if (before && before->base == address && before->size == token.size) return CUDA_SUCCESS;
    NEED(!ranges_overlap(&spans, address, token.size), CUDA_ERROR_INVALID_VALUE);
    Span *span = make(sizeof *span);
    *span = (Span){.range = {address, token.size}, .kind = POOL_IMPORTED, .device = pool->device, .id = next_id(),
            .pool = pool};
    ranges_insert(&spans, &span->range);
    pool->live++;
    return CUDA_SUCCESS;
}

const Entry pool_entries[] = {
    E(cuMemPoolCreate, 11020), E(cuMemPoolDestroy, 11020), E(cuDeviceGetDefaultMemPool, 11020), E(cuDeviceGetMemPool,
            11020),
    E(cuDeviceSetMemPool, 11020), E(cuMemGetDefaultMemPool, 13000), E(cuMemGetMemPool, 13000),
            E(cuMemPoolGetAttribute, 11020),
    E(cuMemPoolSetAttribute, 11020), E(cuMemPoolTrimTo, 11020), E(cuMemPoolSetAccess, 11020), E(cuMemPoolGetAccess,
            11020),
    E(cuMemAllocAsync, 11020), E(cuMemAllocFromPoolAsync, 11020), E(cuMemFreeAsync, 11020),
    E(cuMemPoolExportToShareableHandle, 11020), E(cuMemPoolImportFromShareableHandle, 11020),
            E(cuMemPoolExportPointer, 11020),
    E(cuMemPoolImportPointer, 11020), {0},
};
