// Handles of 64 bytes that name memory and events of another process: cuIpc*, and the table that both are found in.
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- what this process lets others find, in one memfd ---- */

#define EVENTS 4096 // measured: one more interprocess event is OUT_OF_MEMORY
#define LEGACIES 65536

typedef struct Legacy { // an allocation that somebody asked a handle of
    uint32_t id;        // 0: free
    int32_t fd, device; // of the arena; the device by the machine's number
    uint64_t block, block_size, size;
} Legacy;

typedef struct Table {
    SharedEvent events[EVENTS]; // first, so that none of them crosses a page
    uint64_t nonce;
    Legacy legacies[LEGACIES];
} Table;
_Static_assert(PAGE % sizeof(SharedEvent) == 0, "an event crosses a page");

static Table *table;
static int table_fd = -1;

void open_table(void) {
    if (table && table->nonce == own_nonce()) return;
    if (table) munmap(table, sizeof *table); // that of the process this one was forked from
    if (table_fd >= 0) close(table_fd);
    table = NULL;
    table_fd = labelled_memfd(&(Label){.kind = 't', .size = sizeof *table}, sizeof *table);
    if (table_fd < 0) return;
    void *base = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, table_fd, 0);
    if (base == MAP_FAILED) return;
    table = base;
    table->nonce = own_nonce();
}

/* ---- events ---- */

static bool event_taken[EVENTS];

SharedEvent *shared_event_take(void) {
    static size_t next; // a place is taken again as late as can be: others may still look at it
    for (size_t tried = 0; table && tried < EVENTS; tried++) {
        size_t i = next++ % EVENTS;
        if (event_taken[i]) continue;
        event_taken[i] = true;
        SharedEvent *event = &table->events[i];
        event->generation++;
        event->recorded = event->completed = 0;
        event->alive = 1;
        return event;
    }
    return NULL;
}

void shared_event_give(SharedEvent *event) {
    event->alive = 0;
    event_taken[event - table->events] = false;
}

void shared_event_token(Token *token, const SharedEvent *event, int device) {
    token_make(token, 'e', table_fd, (size_t)((const char *)event - (const char *)table), sizeof *event, device);
    token->serial = event->generation;
}

SharedEvent *shared_event_open(const Token *token) {
    if (token->offset % sizeof(SharedEvent) || token->offset >= EVENTS * sizeof(SharedEvent)) return NULL;
    int fd = token_open(token);
    if (fd < 0) return NULL;
    char *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(token->offset & ~(PAGE - 1)));
    close(fd);
    if (page == MAP_FAILED) return NULL;
    SharedEvent *event = (SharedEvent *)(void *)(page + token->offset % PAGE);
    if (event->alive && event->generation == token->serial) return event;
    munmap(page, PAGE);
    return NULL;
}

void shared_event_close(SharedEvent *event) { munmap((void *)((uintptr_t)event & ~(PAGE - 1)), PAGE); }

/* ---- legacy handles ---- */

// Measured: which bytes the driver checks, what it says when one of them is changed, and that nobody checks the offset.
// What finds the memory here lies in those that are checked.
typedef struct Handle {
    uint64_t context, process, size; // not checked, nor is the next byte
    uint8_t spare, check[3];         // check: of nonce, fd and id. INVALID_VALUE
    uint32_t offset;                 // in the block, whatever it is
    uint8_t nonce[3], fd[2];         // of the maker's table. INVALID_VALUE
    uint8_t more[11];                // not checked
    int32_t pid;                     // INVALID_HANDLE
    uint32_t id;                     // INVALID_VALUE
    uint8_t rest[8];                 // not checked
} Handle;
_Static_assert(sizeof(Handle) == 64 && sizeof(Handle) == sizeof(CUipcMemHandle), "a handle has 64 bytes");
_Static_assert(offsetof(Handle, check) == 25 && offsetof(Handle, offset) == 28 && offsetof(Handle, nonce) == 32 &&
        offsetof(Handle, more) == 37 && offsetof(Handle, pid) == 48 && offsetof(Handle, id) == 52, "as measured");

static uint32_t checksum(const Handle *handle) { // FNV-1a: no change of a single byte is missed
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < 5; i++) sum = (sum ^ (i < 3 ? handle->nonce[i] : handle->fd[i - 3])) * 16777619u;
    for (unsigned i = 0; i < 4; i++) sum = (sum ^ (handle->id >> 8 * i & 0xFF)) * 16777619u;
    return sum & 0xFFFFFF;
}

static Legacy *new_legacy(void) {
    static uint32_t last;
    for (size_t tried = 0; table && tried < LEGACIES; tried++) {
        if (!++last) last = 1;
        Legacy *legacy = &table->legacies[last % LEGACIES];
        if (legacy->id) continue;
        legacy->id = last;
        return legacy;
    }
    return NULL;
}

void legacy_forget(uint32_t id) {
    if (id) table->legacies[id % LEGACIES] = (Legacy){0};
}

// Measured: VMM and pool memory are refused. An interior pointer gives the handle of its allocation, without a word.
static CUresult f_cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    ENTER_CONTEXT;
    Span *span = (Span *)ranges_at(&spans, address);
    NEED(out && span && span->kind == LEGACY, CUDA_ERROR_INVALID_VALUE);
    if (!span->shared_id) {
        Legacy *legacy = new_legacy();
        NEED(legacy, CUDA_ERROR_OUT_OF_MEMORY);
        legacy->fd = devices[span->device].arena->fd;
        legacy->device = devices[span->device].number;
        legacy->block = span->block;
        legacy->block_size = span->block_size;
        legacy->size = span->range.size;
        span->shared_id = legacy->id;
    }
    Handle handle = {.context = span->context->handle, .process = (uint64_t)getpid(), .size = span->range.size,
            .offset = (uint32_t)(span->offset - span->block), .pid = getpid(), .id = span->shared_id};
    memcpy(handle.nonce, &table->nonce, sizeof handle.nonce);
    memcpy(handle.fd, &table_fd, sizeof handle.fd);
    uint32_t check = checksum(&handle);
    memcpy(handle.check, &check, sizeof handle.check);
    memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

// The table of the process that made a handle. -1: gone, out of sight, or another process by now.
static int table_of(const Handle *handle) {
    char path[64];
    Label label;
    uint64_t nonce;
    uint16_t number;
    memcpy(&number, handle->fd, sizeof number);
    snprintf(path, sizeof path, "/proc/%d/fd/%u", handle->pid, number);
    struct stat about; // looked at before it is opened: to open a stranger's pipe or terminal would do something
    if (stat(path, &about) || !S_ISREG(about.st_mode) || about.st_size != sizeof(Table)) return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    if (read_label(fd, &label) && label.kind == 't' &&
            pread(fd, &nonce, sizeof nonce, offsetof(Table, nonce)) == sizeof nonce &&
            !memcmp(handle->nonce, &nonce, sizeof handle->nonce)) return fd;
    close(fd);
    return -1;
}

static int arena_of(const Handle *handle, const Legacy *legacy) {
    char path[64];
    Label label;
    struct stat about;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, legacy->fd);
    if (stat(path, &about) || !S_ISREG(about.st_mode)) return -1;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    if (read_label(fd, &label) && label.kind == 'a' && legacy->block + legacy->block_size <= label.size) return fd;
    close(fd);
    return -1;
}

// Maps the block as far as it goes. An offset that leads out of it, which nobody checks, ends in addresses that nothing
// is behind: given out like the others, refused by copies.
static CUresult map_block(Span *span, const Handle *handle, const Legacy *legacy) {
    size_t end = handle->offset + legacy->size, size = end > legacy->block_size ? end : legacy->block_size;
    int fd = arena_of(handle, legacy);
    NEED(fd >= 0, CUDA_ERROR_INVALID_HANDLE);
    span->view_size = (size + PAGE - 1) & ~(PAGE - 1);
    span->view = reserve_anywhere(span->view_size, GRANULE);
    void *base = !span->view ? MAP_FAILED : mmap((void *)span->view, legacy->block_size, PROT_READ | PROT_WRITE,
            MAP_SHARED | MAP_FIXED, fd, (off_t)legacy->block);
    close(fd);
    if (base == MAP_FAILED && span->view) munmap((void *)span->view, span->view_size);
    return base == MAP_FAILED ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

static CUresult open_legacy(Span **out, const Handle *handle, Context *context) {
    Legacy legacy;
    int fd = table_of(handle);
    NEED(fd >= 0, CUDA_ERROR_INVALID_HANDLE);
    ssize_t got = pread(fd, &legacy, sizeof legacy,
            (off_t)(offsetof(Table, legacies) + handle->id % LEGACIES * sizeof legacy));
    close(fd);
    NEED(got == sizeof legacy && handle->id && legacy.id == handle->id, CUDA_ERROR_INVALID_VALUE); // measured: freed
    int device = device_of_number(legacy.device);
    NEED(device >= 0, CUDA_ERROR_INVALID_DEVICE);
    NEED(device == context->device || can_access_peer(context->device, device), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    Span *span = make(sizeof *span);
    *span = (Span){.kind = IPC_OPENED, .device = device, .id = next_id(), .context = context,
            .block_size = legacy.block_size};
    CUresult status = map_block(span, handle, &legacy);
    if (status != CUDA_SUCCESS) {
        free(span);
        return status;
    }
    span->range = (Range){span->view + handle->offset, legacy.size};
    memcpy(span->opened_from, handle, sizeof *handle);
    ranges_insert(&spans, &span->range);
    *out = span;
    return CUDA_SUCCESS;
}

static Span *opened_before(const Handle *handle, const Context *context) {
    for (size_t i = 0; i < spans.count; i++) {
        Span *span = (Span *)spans.items[i];
        if (span->kind == IPC_OPENED && span->context == context &&
                !memcmp(span->opened_from, handle, sizeof *handle)) return span;
    }
    return NULL;
}

static CUresult f_cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle given, unsigned flags) {
    ENTER_CONTEXT;
    Handle all, handle;
    memcpy(&all, &given, sizeof all);
    NEED(out && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    uint32_t check = checksum(&all);
    NEED(!memcmp(all.check, &check, sizeof all.check), CUDA_ERROR_INVALID_VALUE);
    bool own = all.pid == getpid() && table && !memcmp(all.nonce, &table->nonce, sizeof all.nonce);
    NEED(!own, CUDA_ERROR_INVALID_CONTEXT); // measured: 201 in the process that made it
    memset(&handle, 0, sizeof handle); // the bytes that are not checked make no difference
    memcpy(handle.check, all.check, sizeof handle.check);
    memcpy(handle.nonce, all.nonce, sizeof handle.nonce);
    memcpy(handle.fd, all.fd, sizeof handle.fd);
    handle.offset = all.offset;
    handle.pid = all.pid;
    handle.id = all.id;
    Span *span = opened_before(&handle, context); // opened again: the same address, counted
    if (!span) TRY(open_legacy(&span, &handle, context));
    span->opens++;
    *out = span->range.base;
    return CUDA_SUCCESS;
}

static CUresult f_cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER_CONTEXT;
    Span *span = (Span *)ranges_at(&spans, address);
    NEED(span && span->range.base == address && span->kind == IPC_OPENED, CUDA_ERROR_INVALID_VALUE);
    drain_all();
    if (!--span->opens) span_drop(span);
    return CUDA_SUCCESS;
}

const Entry ipc_entries[] = {
    E(cuIpcGetMemHandle, 4010), E(cuIpcOpenMemHandle, 11000), E(cuIpcCloseMemHandle, 4010), {0},
};
