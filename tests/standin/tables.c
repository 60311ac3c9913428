// Address tables, handles, arenas, and the descriptors that carry memory from process to process.
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

void *make(size_t size) {
    void *made = calloc(1, size);
    if (!made) abort();
    return made;
}

/* ---- ranges ---- */

size_t ranges_from(const Ranges *ranges, uint64_t address) {
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const Range *range = ranges->items[middle];
        if (range->base + range->size > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

Range *ranges_at(const Ranges *ranges, uint64_t address) {
    size_t i = ranges_from(ranges, address);
    return i < ranges->count && ranges->items[i]->base <= address ? ranges->items[i] : NULL;
}

bool ranges_overlap(const Ranges *ranges, uint64_t base, uint64_t size) {
    size_t i = ranges_from(ranges, base);
    return i < ranges->count && ranges->items[i]->base < base + size;
}

void ranges_insert(Ranges *ranges, Range *range) {
    if (ranges->count == ranges->room) {
        ranges->room = ranges->room ? 2 * ranges->room : 64;
        ranges->items = realloc(ranges->items, ranges->room * sizeof *ranges->items);
        if (!ranges->items) abort();
    }
    size_t i = ranges_from(ranges, range->base);
    memmove(&ranges->items[i + 1], &ranges->items[i], (ranges->count - i) * sizeof *ranges->items);
    ranges->items[i] = range;
    ranges->count++;
}

void ranges_remove(Ranges *ranges, Range *range) {
    size_t i = ranges_from(ranges, range->base);
    if (i == ranges->count || ranges->items[i] != range) return;
    ranges->count--;
    memmove(&ranges->items[i], &ranges->items[i + 1], (ranges->count - i) * sizeof *ranges->items);
}

/* ---- handles: generation << 32 | kind << 28 | slot, so never 0, 1 or 2, which mean streams ---- */

typedef struct Slot {
    void *object;
    uint32_t generation;
    Kind kind;
    uint32_t next_free;
} Slot;
static Slot *slots;
static uint32_t slot_count, slot_room, first_free; // first_free: index + 1
static long kind_counts[KINDS];

uint64_t handle_new(Kind kind, void *object) {
    uint32_t i;
    if (first_free) {
        i = first_free - 1;
        first_free = slots[i].next_free;
    } else {
        if (slot_count == slot_room) {
            slot_room = slot_room ? 2 * slot_room : 256;
            slots = realloc(slots, slot_room * sizeof *slots);
            if (!slots) abort();
        }
        i = slot_count++;
        slots[i].generation = 0;
    }
    slots[i] = (Slot){.object = object, .generation = slots[i].generation % 0x7FFFFFFE + 1, .kind = kind};
    kind_counts[kind]++;
    return (uint64_t)slots[i].generation << 32 | (uint64_t)kind << 28 | i;
}

static Slot *slot_of(Kind kind, uint64_t handle) {
    uint32_t i = handle & 0x0FFFFFFF;
    if (i >= slot_count || (handle >> 28 & 0xF) != (uint64_t)kind) return NULL;
    Slot *slot = &slots[i];
    return slot->object && slot->kind == kind && slot->generation == handle >> 32 ? slot : NULL;
}

void *handle_find(Kind kind, uint64_t handle) {
    Slot *slot = slot_of(kind, handle);
    return slot ? slot->object : NULL;
}

void handle_drop(Kind kind, uint64_t handle) {
    Slot *slot = slot_of(kind, handle);
    if (!slot) return;
    slot->object = NULL;
    slot->next_free = first_free;
    first_free = (uint32_t)(slot - slots) + 1;
    kind_counts[kind]--;
}

long handle_count(Kind kind) { return kind_counts[kind]; }

void *handle_next(Kind kind, size_t *cursor) {
    while (*cursor < slot_count) {
        Slot *slot = &slots[(*cursor)++];
        if (slot->object && slot->kind == kind) return slot->object;
    }
    return NULL;
}

/* ---- arenas ---- */

bool arena_open(Arena *arena, int fd, size_t size, bool map) {
    *arena = (Arena){.fd = fd, .size = size};
    if (fd < 0) return false;
    if (!map) return true;
    void *base = mmap(NULL, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return false;
    char *start = (char *)(((uintptr_t)base + GRANULE - 1) & ~(GRANULE - 1));
    if (start > (char *)base) munmap(base, (size_t)(start - (char *)base));
    munmap(start + size, GRANULE - (size_t)(start - (char *)base));
    if (mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
            0) == MAP_FAILED) return false;
    madvise(start, size, MADV_DONTDUMP);
    arena->base = start;
    return true;
}

void arena_close(Arena *arena) {
    if (arena->base) munmap(arena->base, arena->size);
    if (arena->fd >= 0) close(arena->fd);
    for (size_t i = 0; i < arena->used.count; i++) free(arena->used.items[i]);
    free(arena->used.items);
    *arena = (Arena){.fd = -1};
}

// The first gap at or after start that is large enough; size when there is none.
static size_t arena_gap(const Arena *arena, size_t start, size_t size, size_t alignment) {
    size_t at = (start + alignment - 1) & ~(alignment - 1);
    for (size_t i = ranges_from(&arena->used, at); i < arena->used.count; i++) {
        const Range *taken = arena->used.items[i];
        if (taken->base >= at + size) break;
        at = (taken->base + taken->size + alignment - 1) & ~(alignment - 1);
    }
    return at + size <= arena->size ? at : arena->size;
}

bool arena_take(Arena *arena, size_t size, size_t alignment, size_t *offset) {
    if (size > arena->size) return false;
    size_t at = arena_gap(arena, arena->next, size, alignment);
    if (at == arena->size) at = arena_gap(arena, 0, size, alignment);
    if (at == arena->size) return false;
    Range *taken = make(sizeof *taken);
    *taken = (Range){at, size};
    ranges_insert(&arena->used, taken);
    arena->next = at + size;
    *offset = at;
    return true;
}

void arena_give(Arena *arena, size_t offset) {
    Range *taken = ranges_at(&arena->used, offset);
    if (!taken) return;
    fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)taken->base, (off_t)taken->size);
    ranges_remove(&arena->used, taken);
    free(taken);
}

/* ---- descriptors ---- */

#define MARK "vram-standin"

int labelled_memfd(const Label *label, size_t size) {
    char name[160];
    snprintf(name, sizeof name, MARK ":%c:%d:%u:%d:%d:%u:%u:%llu:", label->kind, label->device, label->handle_types,
             label->location_type, label->location_id, label->flags, label->devices, label->size);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool read_label(int fd, Label *label) {
    char path[64], name[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, name, sizeof name - 1);
    if (length <= 0) return false;
    name[length] = 0;
    if (sscanf(name, "/memfd:" MARK ":%c:%d:%u:%d:%d:%u:%u:%llu:", &label->kind, &label->device, &label->handle_types,
               &label->location_type, &label->location_id, &label->flags, &label->devices, &label->size) != 8)
        return false;
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) return false;
    if (fstat(fd, &about)) return false;
    return label->kind == 'x' || (unsigned long long)about.st_size == label->size;
}

uint64_t own_nonce(void) {
    static uint64_t nonce;
    static pid_t owner;
    if (owner != getpid()) {
        if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) nonce = (uint64_t)getpid() << 32 ^ (uintptr_t)&nonce;
        owner = getpid();
    }
    return nonce;
}

void token_make(Token *token, char kind, int fd, size_t offset, size_t size, int device) {
    struct stat about = {0};
    fstat(fd, &about);
    *token = (Token){.magic = "vramstd", .pid = getpid(), .fd = fd, .inode = about.st_ino, .nonce = own_nonce(),
                     .offset = offset, .size = size, .device = device, .kind = kind};
}

bool token_valid(const Token *token, char kind) { return !memcmp(token->magic, "vramstd", 8) && token->kind == kind; }

bool token_is_own(const Token *token) { return token->nonce == own_nonce(); }

int token_open(const Token *token) {
    char path[64];
    struct stat about;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", token->pid, token->fd);
    if (stat(path, &about) || about.st_ino != token->inode) return -1;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    Label label;
    if (fstat(fd, &about) || about.st_ino != token->inode || !read_label(fd, &label) ||
        token->offset + token->size > (uint64_t)about.st_size) {
        close(fd);
        return -1;
    }
    return fd;
}
