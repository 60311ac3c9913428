// Multicast objects: one address whose writes go to memory on several devices. What processes share of one (devices
// that were added, what is bound) lies in its memfd.
#include "standin.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define FD CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define MOST_BINDINGS 4096

typedef struct Binding {
    Token token; // whose memory; magic[0] == 0: free
    uint64_t offset, size;
} Binding;

typedef struct Shared {
    uint32_t devices, added; // how many are wanted; bits of the machine's numbers
    Binding bindings[MOST_BINDINGS];
} Shared;
#define SHARED_SIZE ((sizeof(Shared) + PAGE - 1) & ~(PAGE - 1))

typedef struct Bound { // keeps memory of this process alive
    Memory *memory;
    int slot;
    struct Bound *next;
} Bound;

typedef struct Multicast {
    int fd; // its Memory's
    size_t size;
    unsigned handle_types;
    Shared *shared;
    Bound *bound;
} Multicast;

static long bindings;
long multicast_bindings(void) { return bindings; }

// A record lock, which a killed process loses; threads are kept apart by the mutex.
static void lock(const Multicast *multicast, short how) {
    struct flock region = {.l_type = how, .l_whence = SEEK_SET, .l_len = 1};
    while (fcntl(multicast->fd, F_SETLKW, &region) && how != F_UNLCK) {}
}

static bool all_added(const Multicast *multicast) {
    return __builtin_popcount(multicast->shared->added) == (int)multicast->shared->devices;
}

// The real driver blocks until all devices were added: here that is an error and a count, not a hang.
CUresult multicast_may_map(const Multicast *multicast) {
    if (all_added(multicast)) return CUDA_SUCCESS;
    would_hang++;
    return CUDA_ERROR_LAUNCH_TIMEOUT;
}

static Multicast *open_multicast(int fd, size_t size, unsigned handle_types) {
    void *page = mmap(NULL, SHARED_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) return NULL;
    Multicast *multicast = make(sizeof *multicast);
    *multicast = (Multicast){.fd = fd, .size = size, .handle_types = handle_types, .shared = page};
    return multicast;
}

Multicast *multicast_import(int fd) {
    Label label;
    return read_label(fd, &label) ? open_multicast(fd, label.size, label.handle_types) : NULL;
}

static void unbind(Multicast *multicast, Bound **link) {
    Bound *bound = *link;
    *link = bound->next;
    lock(multicast, F_WRLCK);
    memset(&multicast->shared->bindings[bound->slot], 0, sizeof(Binding));
    lock(multicast, F_UNLCK);
    bound->memory->uses--;
    memory_forget(bound->memory);
    free(bound);
    bindings--;
}

void multicast_forget(Multicast *multicast) {
    while (multicast->bound) unbind(multicast, &multicast->bound);
    munmap(multicast->shared, SHARED_SIZE);
    free(multicast);
}

static void write_all(int fd, const char *bytes, size_t size, off_t offset) {
    while (size) {
        ssize_t done = pwrite(fd, bytes, size, offset);
        if (done <= 0) return;
        bytes += done, offset += done, size -= (size_t)done;
    }
}

// A write reaches all that is bound there, in whichever process it lives; one that has died has no memory any more.
void multicast_write(Memory *memory, size_t offset, const void *bytes, size_t size) {
    const Shared *shared = memory->multicast->shared;
    for (int i = 0; i < MOST_BINDINGS; i++) {
        const Binding *binding = &shared->bindings[i];
        uint64_t start = offset > binding->offset ? offset : binding->offset;
        uint64_t end = offset + size < binding->offset + binding->size ? offset + size : binding->offset + binding->size;
        if (!binding->token.magic[0] || start >= end) continue;
        bool own = token_is_own(&binding->token);
        int fd = own ? binding->token.fd : token_open(&binding->token);
        if (fd < 0) continue;
        write_all(fd, (const char *)bytes + (start - offset), end - start,
                (off_t)(binding->token.offset + start - binding->offset));
        if (!own) close(fd);
    }
}

/* ---- calls ---- */

static CUresult check_prop(const CUmulticastObjectProp *prop) {
    NEED(prop && prop->numDevices && (int)prop->numDevices <= config.devices && !prop->flags, CUDA_ERROR_INVALID_VALUE);
    NEED(!(prop->handleTypes & ~15ull), CUDA_ERROR_INVALID_VALUE);
    NEED(!(prop->handleTypes & (CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT)), CUDA_ERROR_NOT_SUPPORTED);
    return CUDA_SUCCESS;
}

static CUresult f_cuMulticastGetGranularity(size_t *out, const CUmulticastObjectProp *prop,
        CUmulticastGranularity_flags option) {
    ENTER;
    NEED(out && option <= CU_MULTICAST_GRANULARITY_RECOMMENDED, CUDA_ERROR_INVALID_VALUE);
    TRY(check_prop(prop));
    *out = option == CU_MULTICAST_GRANULARITY_RECOMMENDED ? 256 * GRANULE : GRANULE;
    return CUDA_SUCCESS;
}

static CUresult f_cuMulticastCreate(CUmemGenericAllocationHandle *out, const CUmulticastObjectProp *prop) {
    ENTER;
    NEED(out && !config.no_vmm, CUDA_ERROR_INVALID_VALUE);
    TRY(check_prop(prop));
    NEED(prop->size && prop->size % GRANULE == 0, CUDA_ERROR_INVALID_VALUE);
    NEED(!(prop->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC) || config.fabric, CUDA_ERROR_NOT_PERMITTED);
    Label label = {.kind = 'x', .device = -1, .handle_types = (unsigned)prop->handleTypes,
            .devices = prop->numDevices, .size = prop->size};
    int fd = labelled_memfd(&label, SHARED_SIZE);
    Multicast *multicast = fd < 0 ? NULL : open_multicast(fd, prop->size, (unsigned)prop->handleTypes);
    if (!multicast) {
        if (fd >= 0) close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    multicast->shared->devices = prop->numDevices;
    Memory *memory = make(sizeof *memory);
    *memory = (Memory){.fd = fd, .size = prop->size, .device = -1, .id = next_id(), .multicast = multicast};
    memory->prop.requestedHandleTypes = (CUmemAllocationHandleType)prop->handleTypes;
    *out = memory_handle(memory);
    return CUDA_SUCCESS;
}

static Multicast *find_multicast(CUmemGenericAllocationHandle handle) {
    Memory *memory = handle_find(MEMORY, handle);
    return memory ? memory->multicast : NULL;
}

static CUresult f_cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
    ENTER;
    Multicast *multicast = find_multicast(handle);
    NEED(multicast, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    uint32_t bit = 1u << devices[device].number;
    lock(multicast, F_WRLCK);
    bool fits = !(multicast->shared->added & bit) && !all_added(multicast);
    if (fits) multicast->shared->added |= bit;
    lock(multicast, F_UNLCK);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int free_slot(const Shared *shared, int number, size_t offset, size_t size) { // -1: taken, or no more slots
    int slot = -1;
    for (int i = MOST_BINDINGS; i-- > 0;) {
        const Binding *binding = &shared->bindings[i];
        if (!binding->token.magic[0]) slot = i;
        else if (binding->token.device == number && binding->offset < offset + size &&
                offset < binding->offset + binding->size) return -1;
    }
    return slot;
}

static CUresult bind(Multicast *multicast, int device, size_t offset, Memory *memory, size_t memory_offset,
        size_t size) {
    NEED(size && size % GRANULE == 0 && offset % GRANULE == 0 && memory_offset % GRANULE == 0,
            CUDA_ERROR_INVALID_VALUE);
    NEED(offset < multicast->size && size <= multicast->size - offset, CUDA_ERROR_INVALID_VALUE);
    NEED(memory_offset < memory->size && size <= memory->size - memory_offset, CUDA_ERROR_INVALID_VALUE);
    NEED(!memory->multicast && memory->device >= 0 && memory->device == device, CUDA_ERROR_INVALID_VALUE);
    NEED(!multicast->handle_types || memory->prop.requestedHandleTypes, CUDA_ERROR_INVALID_VALUE); // shareable takes shareable only
    int number = devices[device].number;
    TRY(multicast_may_map(multicast));
    NEED(multicast->shared->added & 1u << number, CUDA_ERROR_INVALID_DEVICE);
    lock(multicast, F_WRLCK);
    int slot = free_slot(multicast->shared, number, offset, size);
    if (slot >= 0) {
        Binding *binding = &multicast->shared->bindings[slot];
        binding->offset = offset;
        binding->size = size;
        token_make(&binding->token, 'b', memory->fd, memory->offset + memory_offset, size, number);
    }
    lock(multicast, F_UNLCK);
    NEED(slot >= 0, CUDA_ERROR_INVALID_VALUE);
    Bound *bound = make(sizeof *bound);
    *bound = (Bound){memory, slot, multicast->bound};
    multicast->bound = bound;
    memory->uses++;
    bindings++;
    return CUDA_SUCCESS;
}

static CUresult bind_memory(CUmemGenericAllocationHandle handle, const CUdevice *device, size_t offset,
        CUmemGenericAllocationHandle what,
                            size_t memory_offset, size_t size, unsigned long long flags) {
    Multicast *multicast = find_multicast(handle);
    Memory *memory = handle_find(MEMORY, what);
    NEED(multicast && memory && !flags, CUDA_ERROR_INVALID_VALUE);
    NEED(!device || valid_device(*device), CUDA_ERROR_INVALID_DEVICE);
    return bind(multicast, device ? *device : memory->device, offset, memory, memory_offset, size);
}

static CUresult bind_address(CUmemGenericAllocationHandle handle, const CUdevice *device, size_t offset,
        CUdeviceptr address,
                             size_t size, unsigned long long flags) {
    Multicast *multicast = find_multicast(handle);
    const Span *span = (Span *)ranges_at(&spans, address);
    NEED(multicast && span && span->kind == VMM_MAPPING && !flags, CUDA_ERROR_INVALID_VALUE);
    NEED(!device || valid_device(*device), CUDA_ERROR_INVALID_DEVICE);
    return bind(multicast, device ? *device : span->device, offset, span->memory, address - span->range.base, size);
}

static CUresult f_cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
        CUmemGenericAllocationHandle memory,
                                     size_t memory_offset, size_t size, unsigned long long flags) {
    ENTER;
    return bind_memory(handle, NULL, offset, memory, memory_offset, size, flags);
}

static CUresult f_cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
        CUmemGenericAllocationHandle memory,
                                        size_t memory_offset, size_t size, unsigned long long flags) {
    ENTER;
    return bind_memory(handle, &device, offset, memory, memory_offset, size, flags);
}

static CUresult f_cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address,
        size_t size, unsigned long long flags) {
    ENTER;
    return bind_address(handle, NULL, offset, address, size, flags);
}

static CUresult f_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
        CUdeviceptr address, size_t size,
                                         unsigned long long flags) {
    ENTER;
    return bind_address(handle, &device, offset, address, size, flags);
}

static CUresult f_cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size) {
    ENTER;
    Multicast *multicast = find_multicast(handle);
    NEED(multicast, CUDA_ERROR_INVALID_VALUE);
    NEED(valid_device(device), CUDA_ERROR_INVALID_DEVICE);
    for (Bound **link = &multicast->bound; *link; link = &(*link)->next) {
        const Binding *binding = &multicast->shared->bindings[(*link)->slot];
        if (binding->token.device != devices[device].number || binding->offset != offset ||
                binding->size != size) continue;
        unbind(multicast, link);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

// The name without a version gives the first to a caller that asks for 12.1, the second, with its device, to one that asks for 13.1.
const Entry multicast_entries[] = {
    E(cuMulticastGetGranularity, 12010), E(cuMulticastCreate, 12010), E(cuMulticastAddDevice, 12010),
            E(cuMulticastBindMem, 12010),
    E_AS(cuMulticastBindMem, 13010, _v2), E(cuMulticastBindAddr, 12010), E_AS(cuMulticastBindAddr, 13010, _v2),
    E(cuMulticastUnbind, 12010), {0},
};
