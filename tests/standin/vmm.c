// Virtual memory management: reserve, create, map, access, export, import.
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define FD CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define FABRIC CU_MEM_HANDLE_TYPE_FABRIC

static bool aligned(uint64_t number) { return number % GRANULE == 0; }

/* ---- addresses ---- */

static bool reserve_at(uint64_t address, size_t size) {
    void *got = mmap((void *)address, size, PROT_NONE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED && (uint64_t)got != address) munmap(got, size);
    return (uint64_t)got == address;
}

uint64_t reserve_anywhere(size_t size, size_t alignment) {
    if (size + alignment < size) return 0;
    char *got = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return 0;
    char *start = (char *)(((uintptr_t)got + alignment - 1) & ~(alignment - 1));
    if (start > got) munmap(got, (size_t)(start - got));
    if (got + alignment > start) munmap(start + size, (size_t)(got + alignment - start));
    return (uint64_t)start;
}

static CUresult f_cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint,
        unsigned long long flags) {
    ENTER;
    NEED(!config.no_vmm, CUDA_ERROR_NOT_SUPPORTED);
    // Measured: a size off the granularity is refused. An alignment is a power of two.
    NEED(out && size && aligned(size) && !flags && !(alignment & (alignment - 1)), CUDA_ERROR_INVALID_VALUE);
    if (alignment < GRANULE) alignment = GRANULE;
    Range *made = make(sizeof *made);
    made->size = size;
    // A wish for an address is granted if it is free, otherwise the address is another one.
    if (hint && hint % alignment == 0 && reserve_at(hint, size)) made->base = hint;
    else made->base = reserve_anywhere(size, alignment);
    if (!made->base) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ranges_insert(&reservations, made);
    *out = made->base;
    return CUDA_SUCCESS;
}

// Measured: an address is not freed while anything is mapped there. It must name the reservation exactly.
static CUresult f_cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER;
    Range *range = ranges_at(&reservations, address);
    NEED(range && range->base == address && range->size == size, CUDA_ERROR_INVALID_VALUE);
    NEED(!ranges_overlap(&spans, address, size), CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, size);
    ranges_remove(&reservations, range);
    free(range);
    return CUDA_SUCCESS;
}

/* ---- physical memory ---- */

static CUresult check_location(const CUmemLocation *location, unsigned handle_types) {
    switch ((int)location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: return valid_device(location->id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST: // header of 13: not shareable between processes
        return config.driver_version >= 13000 && !handle_types ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA: // measured, for a node that does not exist
        return config.driver_version >= 12020 && valid_node(location->id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_ERROR_INVALID_VALUE; // HOST_NUMA_CURRENT is for other calls
    }
}

static CUresult check_handle_types(unsigned types) {
    NEED(!(types & ~(unsigned)(FD | FABRIC | CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT)),
            CUDA_ERROR_INVALID_VALUE);
    NEED(!(types & (CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT)), CUDA_ERROR_INVALID_VALUE); // measured
    if (types & FABRIC) {
        NEED(config.driver_version >= 12030, CUDA_ERROR_INVALID_VALUE);
        NEED(config.fabric, CUDA_ERROR_NOT_PERMITTED); // measured: no IMEX channel, whatever the attribute says
    }
    return CUDA_SUCCESS;
}

// What the first four bytes of allocFlags are: the type of compression, whether RDMA, the usage mask.
static unsigned alloc_flags(const CUmemAllocationProp *prop) {
    return prop->allocFlags.compressionType | (unsigned)prop->allocFlags.gpuDirectRDMACapable << 8 |
            (unsigned)prop->allocFlags.usage << 16;
}

static void set_alloc_flags(CUmemAllocationProp *prop, unsigned flags) {
    prop->allocFlags.compressionType = (unsigned char)flags;
    prop->allocFlags.gpuDirectRDMACapable = (unsigned char)(flags >> 8);
    prop->allocFlags.usage = (unsigned short)(flags >> 16);
}

// Guesses: numbers that mean nothing are refused, and a usage that the device does not know. The manual calls the other
// two hints: where the device has no such thing they are let go, and properties tell.
static CUresult check_flags(const CUmemAllocationProp *prop) {
    unsigned usage = prop->allocFlags.usage, known = config.has.tile_pool ? CU_MEM_CREATE_USAGE_TILE_POOL : 0;
    if (config.driver_version >= 12080 && config.has.decompression) known |= CU_MEM_CREATE_USAGE_HW_DECOMPRESS;
    NEED(prop->allocFlags.compressionType <= CU_MEM_ALLOCATION_COMP_GENERIC && prop->allocFlags.gpuDirectRDMACapable <= 1,
            CUDA_ERROR_INVALID_VALUE);
    NEED(!(usage & ~known), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

static void grant_hints(CUmemAllocationProp *prop) {
    if (!config.has.compression || config.declines_compression) prop->allocFlags.compressionType = 0;
    if (!config.has.rdma) prop->allocFlags.gpuDirectRDMACapable = 0;
}

static CUresult check_prop(const CUmemAllocationProp *prop) {
    NEED(!config.no_vmm, CUDA_ERROR_NOT_SUPPORTED);
    NEED(prop && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    TRY(check_location(&prop->location, prop->requestedHandleTypes));
    TRY(check_flags(prop));
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop,
        CUmemAllocationGranularity_flags option) {
    ENTER;
    NEED(out && option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, CUDA_ERROR_INVALID_VALUE);
    TRY(check_prop(prop));
    *out = GRANULE; // measured: 2 MiB, minimum and recommended, shareable or not
    return CUDA_SUCCESS;
}

// What may be shared has a memfd of its own, the rest lives in its device's arena.
static bool back_with_memory(Memory *memory) {
    unsigned types = memory->prop.requestedHandleTypes;
    int number = memory->device < 0 ? -1 : devices[memory->device].number;
    if (!types) {
        memory->arena = memory->device < 0 ? &host_arena : devices[memory->device].arena;
        memory->fd = memory->arena->fd;
        return arena_take(memory->arena, memory->size, GRANULE, &memory->offset);
    }
    Label label = {.kind = 'm', .device = number, .handle_types = types, .flags = alloc_flags(&memory->prop),
            .location_type = (int)memory->prop.location.type,
                   .location_id = memory->prop.location.id, .size = memory->size};
    memory->fd = labelled_memfd(&label, memory->size);
    return memory->fd >= 0;
}

uint64_t memory_handle(Memory *memory) {
    if (!memory->refs++) memory->handle = handle_new(MEMORY, memory);
    return memory->handle;
}

static CUresult f_cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop,
        unsigned long long flags) {
    ENTER;
    NEED(out && size && aligned(size) && !flags, CUDA_ERROR_INVALID_VALUE);
    TRY(check_prop(prop));
    TRY(check_handle_types(prop->requestedHandleTypes));
    int device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : -1;
    NEED(charge(device, size), CUDA_ERROR_OUT_OF_MEMORY);
    Memory *memory = make(sizeof *memory);
    *memory = (Memory){.size = size, .prop = *prop, .device = device, .charged = true, .id = next_id()};
    grant_hints(&memory->prop);
    if (!back_with_memory(memory)) {
        uncharge(device, size);
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = memory_handle(memory);
    return CUDA_SUCCESS;
}

/* ---- memory that outlives its handles because an exported descriptor is open somewhere (measured: it stays held) ---- */

typedef struct Pinned {
    int fd, device;
    size_t size;
    struct Pinned *next;
} Pinned;
static Pinned *pinned;

static int reopen(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

// A write lease is granted only to the last opener of a file: so it tells whether another one is left, in any process.
static bool alone(int fd) {
    if (fcntl(fd, F_SETLEASE, F_WRLCK)) return false;
    fcntl(fd, F_SETLEASE, F_UNLCK);
    return true;
}

static void sweep_pinned(void) {
    for (Pinned **link = &pinned, *item; (item = *link);) {
        if (!alone(item->fd)) {
            link = &item->next;
            continue;
        }
        *link = item->next;
        close(item->fd);
        free(item);
    }
}

size_t pinned_bytes(int device) {
    size_t bytes = 0;
    sweep_pinned();
    for (Pinned *item = pinned; item; item = item->next)
        if (item->device == device) bytes += item->size;
    return bytes;
}

long pinned_count(void) {
    long count = 0;
    sweep_pinned();
    for (Pinned *item = pinned; item; item = item->next) count++;
    return count;
}

static void pin(const Memory *memory) {
    int own = reopen(memory->fd); // an opening of our own, so that the others can be told from it
    if (own < 0) return;
    Pinned *item = make(sizeof *item);
    *item = (Pinned){own, memory->device, memory->size, pinned};
    pinned = item;
}

void memory_forget(Memory *memory) {
    if (memory->refs || memory->uses) return;
    if (memory->multicast) multicast_forget(memory->multicast);
    if (memory->exported && memory->charged) pin(memory);
    if (memory->arena) arena_give(memory->arena, memory->offset);
    else close(memory->fd);
    if (memory->charged) uncharge(memory->device, memory->size);
    free(memory);
}

static Memory *find_memory(CUmemGenericAllocationHandle handle) { return handle_find(MEMORY, handle); }

// Measured: releasing what is mapped is fine, it stays readable until the unmap.
static CUresult f_cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER;
    Memory *memory = find_memory(handle);
    NEED(memory, CUDA_ERROR_INVALID_VALUE);
    if (!--memory->refs) {
        handle_drop(MEMORY, memory->handle);
        memory_forget(memory);
    }
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
        CUmemGenericAllocationHandle handle) {
    ENTER;
    Memory *memory = find_memory(handle);
    NEED(prop && memory && !memory->multicast, CUDA_ERROR_INVALID_VALUE);
    *prop = memory->prop;
    if (memory->imported) prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE; // measured
    return CUDA_SUCCESS;
}

static CUresult f_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
    ENTER;
    Span *span = (Span *)ranges_at(&spans, (uint64_t)address);
    NEED(out && span && span->kind == VMM_MAPPING, CUDA_ERROR_INVALID_VALUE);
    *out = memory_handle(span->memory);
    return CUDA_SUCCESS;
}

/* ---- mappings ---- */

static CUresult f_cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
        unsigned long long flags) {
    ENTER;
    Memory *memory = find_memory(handle);
    NEED(memory && size && aligned(address) && aligned(size) && aligned(offset) && !flags, CUDA_ERROR_INVALID_VALUE);
    NEED(offset + size >= size && offset + size <= memory->size, CUDA_ERROR_INVALID_VALUE);
    NEED(!offset && size == memory->size, CUDA_ERROR_NOT_SUPPORTED); // measured: whole allocations only, 801
    Range *range = ranges_at(&reservations, address);
    NEED(range && address + size <= range->base + range->size, CUDA_ERROR_INVALID_VALUE);
    NEED(!ranges_overlap(&spans, address, size), CUDA_ERROR_INVALID_VALUE);
    if (memory->multicast) TRY(multicast_may_map(memory->multicast));
    else NEED(mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, memory->fd,
            (off_t)memory->offset) != MAP_FAILED,
              CUDA_ERROR_OUT_OF_MEMORY);
    Span *span = make(sizeof *span);
    *span = (Span){.range = {address, size}, .kind = VMM_MAPPING, .device = memory->device, .id = next_id(),
            .memory = memory};
    ranges_insert(&spans, &span->range);
    memory->uses++;
    return CUDA_SUCCESS;
}

// The index of the first mapping in the range, if the range cuts none in two; -1 if it does or holds none.
static long whole_mappings(uint64_t address, size_t size, bool gaps) {
    size_t first = ranges_from(&spans, address);
    uint64_t covered = address;
    for (size_t i = first; i < spans.count && spans.items[i]->base < address + size; i++) {
        const Span *span = (Span *)spans.items[i];
        if (span->kind != VMM_MAPPING || span->range.base < address) return -1;
        if (span->range.base + span->range.size > address + size) return -1;
        if (!gaps && span->range.base != covered) return -1;
        covered = span->range.base + span->range.size;
    }
    return covered == address || (!gaps && covered != address + size) ? -1 : (long)first;
}

// Measured: half a mapping is refused; one call may cover several whole mappings and the gaps between them.
static CUresult f_cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER;
    NEED(size && aligned(address) && aligned(size) && address + size > address, CUDA_ERROR_INVALID_VALUE);
    Range *range = ranges_at(&reservations, address);
    NEED(range && address + size <= range->base + range->size, CUDA_ERROR_INVALID_VALUE);
    long first = whole_mappings(address, size, true);
    NEED(first >= 0, CUDA_ERROR_INVALID_VALUE);
    while ((size_t)first < spans.count &&
            spans.items[first]->base < address + size) span_drop((Span *)spans.items[first]);
    return CUDA_SUCCESS;
}

static CUresult check_access(const Span *span, const CUmemAccessDesc *desc) {
    NEED(desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
             desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
         CUDA_ERROR_INVALID_VALUE);
    switch ((int)desc->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        NEED(valid_device(desc->location.id), CUDA_ERROR_INVALID_DEVICE);
        // Our guess at what a device that cannot reach the memory is told.
        NEED(span->device < 0 || span->device == desc->location.id || can_access_peer(desc->location.id, span->device),
             CUDA_ERROR_INVALID_DEVICE);
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        NEED(valid_node(desc->location.id), CUDA_ERROR_INVALID_VALUE);
        // fall through
    case CU_MEM_LOCATION_TYPE_HOST: // the host reads host memory only
        NEED(span->device < 0 && !span->memory->multicast && !span->memory->elsewhere, CUDA_ERROR_INVALID_VALUE);
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static int protection(const Span *span) { // what the most any place may do: pages have one protection
    int access = span->host_access;
    for (int d = 0; d < device_count; d++) access |= span->access[d];
    return access & 2 ? PROT_READ | PROT_WRITE : access ? PROT_READ : PROT_NONE;
}

// A place that is not named keeps what it had. CPU pages follow, unless a seal on the memory forbids writing.
static bool give_access(Span *span, const CUmemAccessDesc *descs, size_t count) {
    Span before = *span;
    for (size_t i = 0; i < count; i++) {
        if (descs[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) span->access[descs[i].location.id] = (unsigned char)descs[i].flags;
        else span->host_access = (unsigned char)descs[i].flags;
    }
    if (span->memory->multicast) return true;
    if (!mprotect((void *)span->range.base, span->range.size, protection(span))) return true;
    memcpy(span->access, before.access, sizeof span->access);
    span->host_access = before.host_access;
    return false;
}

// Measured: a gap in the range is refused; one call may cover several adjacent mappings.
static CUresult f_cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *descs, size_t count) {
    ENTER;
    NEED(size && descs && count && aligned(address) && aligned(size) && address + size > address,
            CUDA_ERROR_INVALID_VALUE);
    long first = whole_mappings(address, size, false);
    NEED(first >= 0, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = (size_t)first; i < spans.count && spans.items[i]->base < address + size; i++)
        for (size_t d = 0; d < count; d++) TRY(check_access((Span *)spans.items[i], &descs[d]));
    for (size_t i = (size_t)first; i < spans.count && spans.items[i]->base < address + size; i++)
        NEED(give_access((Span *)spans.items[i], descs, count), CUDA_ERROR_NOT_PERMITTED);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    ENTER;
    Span *span = (Span *)ranges_at(&spans, address);
    NEED(flags && location && span && span->kind == VMM_MAPPING, CUDA_ERROR_INVALID_VALUE);
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        NEED(valid_device(location->id), CUDA_ERROR_INVALID_DEVICE);
        *flags = span->access[location->id];
        return CUDA_SUCCESS;
    }
    NEED(location->type == CU_MEM_LOCATION_TYPE_HOST ||
            (location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA && valid_node(location->id)), CUDA_ERROR_INVALID_VALUE);
    *flags = span->host_access;
    return CUDA_SUCCESS;
}

/* ---- sharing ---- */

// Measured: what was not created shareable is refused, and what was imported. Each call makes a new descriptor, close-on-exec.
static CUresult f_cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
        CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER;
    Memory *memory = find_memory(handle);
    NEED(out && memory && !flags && (type == FD || type == FABRIC), CUDA_ERROR_INVALID_VALUE);
    NEED(memory->prop.requestedHandleTypes & type && !memory->imported, CUDA_ERROR_INVALID_VALUE);
    if (type == FABRIC) {
        Token token;
        memset(out, 0, sizeof(CUmemFabricHandle));
        token_make(&token, 'f', memory->fd, 0, 0, memory->device);
        memcpy(out, &token, sizeof token);
        memory->exported = true; // what it is opened by holds it, too
        return CUDA_SUCCESS;
    }
    int fd = reopen(memory->fd); // an opening of its own rather than a dup: alone() counts those, and not the memfd's first
    NEED(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    memory->exported = true;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

// Takes the descriptor over if it is one of ours. A pipe, /dev/null, another memfd, an unsealed one, a number that is no
// descriptor: UNKNOWN (measured). A pool: NOT_SUPPORTED (measured).
static CUresult import_fd(CUmemGenericAllocationHandle *out, int fd, bool fabric) {
    Label label;
    NEED(read_label(fd, &label), CUDA_ERROR_UNKNOWN);
    NEED(label.kind != 'p', CUDA_ERROR_NOT_SUPPORTED);
    NEED(label.kind == 'm' || label.kind == 'x', CUDA_ERROR_UNKNOWN);
    int device = label.device < 0 || label.kind == 'x' ? -1 : device_of_number(label.device);
    // Our guess: memory of a device that CUDA_VISIBLE_DEVICES hides cannot be imported; by the fabric, where it plays one
    // of another machine, it is at a location of CUDA 13's own type for that.
    bool elsewhere = label.kind == 'm' && label.device >= 0 && device < 0;
    NEED(!elsewhere || fabric, CUDA_ERROR_INVALID_DEVICE);
    struct Multicast *multicast = label.kind == 'x' ? multicast_import(fd) : NULL;
    NEED(label.kind == 'm' || multicast, CUDA_ERROR_INVALID_VALUE);
    Memory *memory = make(sizeof *memory);
    *memory = (Memory){.fd = fd, .size = label.size, .device = device, .id = next_id(), .multicast = multicast,
            .exported = true, .imported = true, .elsewhere = elsewhere};
    memory->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory->prop.requestedHandleTypes = (CUmemAllocationHandleType)label.handle_types;
    memory->prop.location.type = (CUmemLocationType)label.location_type;
    memory->prop.location.id = device >= 0 ? device : label.location_id;
    if (elsewhere) {
        memory->prop.location.type = CU_MEM_LOCATION_TYPE_INVISIBLE;
        memory->prop.location.id = CU_DEVICE_INVALID;
    }
    set_alloc_flags(&memory->prop, label.flags & ~0x100u); // measured: told of imported memory, too, but for RDMA
    *out = memory_handle(memory);
    return CUDA_SUCCESS;
}

static CUresult f_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle,
        CUmemAllocationHandleType type) {
    ENTER;
    NEED(out && !config.no_vmm, CUDA_ERROR_INVALID_VALUE);
    int fd = -1;
    if (type == FD) {
        fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0); // the caller's stays the caller's
        NEED(fd >= 0, CUDA_ERROR_UNKNOWN);
    } else if (type == FABRIC) {
        Token token;
        NEED(config.driver_version >= 12030, CUDA_ERROR_INVALID_VALUE);
        NEED(config.fabric, CUDA_ERROR_NOT_PERMITTED);
        NEED(handle, CUDA_ERROR_INVALID_VALUE);
        memcpy(&token, handle, sizeof token);
        NEED(token_valid(&token, 'f') && (fd = token_open(&token)) >= 0, CUDA_ERROR_INVALID_VALUE);
    } else {
        return CUDA_ERROR_INVALID_VALUE; // WIN32 among them, as measured for create
    }
    CUresult status = import_fd(out, fd, type == FABRIC);
    if (status != CUDA_SUCCESS) close(fd);
    return status;
}

const Entry vmm_entries[] = {
    E(cuMemAddressReserve, 10020), E(cuMemAddressFree, 10020), E(cuMemGetAllocationGranularity, 10020), E(cuMemCreate,
            10020),
    E(cuMemRelease, 10020), E(cuMemMap, 10020), E(cuMemUnmap, 10020), E(cuMemSetAccess, 10020), E(cuMemGetAccess,
            10020),
    E(cuMemGetAllocationPropertiesFromHandle, 10020), E(cuMemRetainAllocationHandle, 11000),
    E(cuMemExportToShareableHandle, 10020), E(cuMemImportFromShareableHandle, 10020), {0},
};
