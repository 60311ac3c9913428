// What the parts of the stand-in driver share. Every function here expects the one mutex to be held, which the
// ENTER macros see to; see README.md for what is played and what is not.
#pragma once
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL // turns off cuda.h's renaming of cuFoo to cuFoo_v2: versions are named here
#include <cuda.h>
// The library serves all bindings, whichever header it was built with, from that of 12.9 on: what came later is written
// here, over the header's own word where that has it. A test holds the names that are used to what 12.9 knows.
#define CUDA_ERROR_MULTICAST_RESOURCE_FULL ((CUresult)47)
#define CU_MEM_LOCATION_TYPE_INVISIBLE ((CUmemLocationType)5)
#define CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ((CUdevice_attribute)145)

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_DEVICES 16
#define GRANULE ((size_t)2 << 20) // measured on H100 and H200: minimum and recommended alike
#define PAGE ((size_t)4096)
#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

/* ---- tables (tables.c) ---- */

typedef struct Range { // the head of everything that is found by address
    uint64_t base, size;
} Range;

typedef struct Ranges { // sorted by base, never overlapping
    Range **items;
    size_t count, room;
} Ranges;

size_t ranges_from(const Ranges *ranges, uint64_t address); // index of the first that ends after address
Range *ranges_at(const Ranges *ranges, uint64_t address);
bool ranges_overlap(const Ranges *ranges, uint64_t base, uint64_t size);
void ranges_insert(Ranges *ranges, Range *range);
void ranges_remove(Ranges *ranges, Range *range);

// A handle is a slot, its kind and a generation, so that one that was given back is never mistaken for a new one.
typedef enum Kind { NO_KIND, CONTEXT, STREAM, EVENT, MEMORY, POOL, KINDS } Kind;
uint64_t handle_new(Kind kind, void *object);
void *handle_find(Kind kind, uint64_t handle);
void handle_drop(Kind kind, uint64_t handle);
long handle_count(Kind kind);
void *handle_next(Kind kind, size_t *cursor); // walk: start with 0, ends with NULL

void *make(size_t size); // zeroed; a test tool may abort when the machine has no memory for its tables

// An arena is one memfd that many allocations live in, so that 65,536 of them do not need as many descriptors.
typedef struct Arena {
    int fd;
    char *base; // NULL: not mapped as a whole
    size_t size, next;
    Ranges used; // base is the offset
} Arena;

bool arena_open(Arena *arena, int fd, size_t size, bool map); // takes the descriptor over
void arena_close(Arena *arena);
bool arena_take(Arena *arena, size_t size, size_t alignment, size_t *offset);
void arena_give(Arena *arena, size_t offset); // the bytes are gone: who takes them next finds zeros

// Every memfd carries what an importer must know in its name; the kernel lets nobody change it.
typedef struct Label {
    char kind;              // m memory, x multicast, p pool, a arena, t table of what others may open
    int device;             // number of the machine's device, whatever this process calls it; -1 is the host
    unsigned handle_types;
    int location_type, location_id;
    unsigned flags;         // CUmemAllocationProp's allocFlags, its first four bytes
    unsigned devices;       // of a multicast object
    unsigned long long size;
} Label;
int labelled_memfd(const Label *label, size_t size); // sealed against shrinking and growing; -1 when there is none
bool read_label(int fd, Label *label);               // false: not ours, or not sealed

// A 64-byte handle names a descriptor of another process, found through /proc and checked by inode and nonce.
typedef struct Token {
    char magic[8];
    int32_t pid, fd;
    uint64_t inode, nonce, offset, size;
    int32_t device, kind;
    uint64_t serial; // of an event
} Token;
_Static_assert(sizeof(Token) <= 64, "a handle has 64 bytes");
void token_make(Token *token, char kind, int fd, size_t offset, size_t size, int device);
bool token_valid(const Token *token, char kind);
bool token_is_own(const Token *token);
uint64_t own_nonce(void);
int token_open(const Token *token); // -1: its maker is gone, or the descriptor is another one by now

/* ---- calls, faults, configuration (libcuda.c) ---- */

typedef struct Site Site;
typedef struct Guard {
    CUresult status;
} Guard;
Guard guard_enter(Site **site, const char *function, bool needs_init);
void guard_leave(Guard *guard);

// The first line of every driver function: takes the mutex, counts the call, plays a fault, asks for cuInit.
#define ENTER_ANY(needs_init)                                                                                          \
    static Site *site_;                                                                                                \
    Guard guard_ __attribute__((cleanup(guard_leave))) = guard_enter(&site_, __func__, needs_init);                    \
    if (guard_.status != CUDA_SUCCESS) return guard_.status
#define ENTER ENTER_ANY(true)
// For calls that real hardware refuses without a current context (201).
#define ENTER_CONTEXT                                                                                                  \
    ENTER;                                                                                                             \
    Context *context UNUSED = NULL;                                                                                    \
    {                                                                                                                  \
        CUresult status_ = current_context(&context);                                                                  \
        if (status_ != CUDA_SUCCESS) return status_;                                                                   \
    }
#define NEED(condition, code)                                                                                          \
    if (!(condition)) return (code)
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        CUresult status_ = (call);                                                                                     \
        if (status_ != CUDA_SUCCESS) return status_;                                                                   \
    } while (0)

typedef struct Entry { // cuGetProcAddress finds by (name, newest that is not above the version asked for)
    const char *name;
    int since;
    void *function;
} Entry;
#define E(name, since) {#name, since, (void *)f_##name}
#define E_AS(name, since, suffix) {#name, since, (void *)f_##name##suffix}
extern const Entry device_entries[], vmm_entries[], memory_entries[], ipc_entries[], pool_entries[],
        stream_entries[], multicast_entries[];

typedef struct Config {
    int driver_version, devices, numa_nodes;
    size_t memory;
    bool no_peer, no_vmm, fabric, declines_compression;
    struct { // what the devices have
        bool compression, rdma, tile_pool, decompression;
    } has;
} Config;
extern Config config;
extern bool initialized, forked, deferring;
extern CUstream capturing; // says that it captures a graph; 0: none
extern long would_hang, would_crash, illegal_accesses;

/* ---- devices and contexts (device.c) ---- */

typedef struct Context {
    uint64_t handle;
    int device, refs; // refs: of a primary context; 1 for one that was created
    bool primary, alive;
    unsigned flags;
    CUresult sticky; // after an illegal access every call under it fails
    uint32_t peers;
    struct Stream *legacy;
} Context;

typedef struct Device {
    int number; // the machine's, the same in every process; the index in devices[] is the ordinal
    CUuuid uuid;
    size_t limit, used;
    Arena *arena;
    Context primary;
    struct Pool *default_pool, *pool;
} Device;
extern Device devices[MAX_DEVICES];
extern int device_count;
extern Arena host_arena;

CUresult current_context(Context **out);
Context *find_context(CUcontext handle);
bool valid_device(int device);
int device_of_number(int number); // ordinal here, -1: hidden from this process
bool can_access_peer(int from, int to);
bool valid_node(int node); // of the host's memory
bool charge(int device, size_t size); // false: the device's memory is exceeded; the host has no limit
void uncharge(int device, size_t size);
void open_arenas(void);
CUresult set_up_devices(void);

/* ---- addresses (memory.c) ---- */

typedef enum SpanKind {
    VMM_MAPPING,
    LEGACY, // cuMemAlloc
    IPC_OPENED,
    POOL_ALLOCATION,
    POOL_IMPORTED,
    HOST_ALLOCATED,
    HOST_REGISTERED
} SpanKind;

typedef struct Memory { // physical memory, or a multicast object
    uint64_t handle;    // 0 while nobody has one
    int refs, uses;     // uses: mappings and bindings, which keep it alive without a handle
    int fd;             // its own memfd if it may be shared, else the arena's
    Arena *arena;
    size_t offset, size;
    CUmemAllocationProp prop;
    int device; // ordinal, -1: host
    bool exported, imported, charged, elsewhere; // elsewhere: on a device that this process does not see
    uint64_t id;
    struct Multicast *multicast;
} Memory;

typedef struct Span { // addresses with memory behind them
    Range range;
    SpanKind kind;
    int device; // -1: host
    uint64_t id;
    Memory *memory;   // VMM_MAPPING
    Context *context; // of legacy and host memory
    struct Pool *pool;
    size_t offset, charged;   // within the arena
    size_t block, block_size; // LEGACY: what of the arena a handle of it gives away
    uint32_t shared_id;       // LEGACY: 0 until somebody asks a handle of it
    uint64_t view, view_size; // IPC_OPENED: all addresses it took; there is memory behind the first block_size
    unsigned char opened_from[64];
    int opens;
    unsigned host_flags;
    unsigned char access[MAX_DEVICES], host_access; // VMM_MAPPING: CUmemAccess_flags
} Span;
extern Ranges spans, reservations;
uint64_t next_id(void);
void span_drop(Span *span); // unmaps, gives the memory back, forgets
void drop_spans_of(Context *context);

// Whether size bytes may be read or written under a device. NOT_KNOWN: nobody's, so a plain host address.
typedef enum Reach { REACHED, NOT_KNOWN, REFUSED } Reach;
Reach reach(uint64_t address, size_t size, bool write, int device);
Span *multicast_span(uint64_t address); // the span if it is a mapping of a multicast object

void memory_forget(Memory *memory);                   // frees it when neither handle nor use is left
uint64_t memory_handle(Memory *memory);               // one more reference
size_t pinned_bytes(int device);                      // released, but held by an exported descriptor
long pinned_count(void);
void multicast_forget(struct Multicast *multicast);
CUresult multicast_may_map(const struct Multicast *multicast);
struct Multicast *multicast_import(int fd);
void multicast_write(Memory *memory, size_t offset, const void *bytes, size_t size);
long multicast_bindings(void);
uint64_t reserve_anywhere(size_t size, size_t alignment); // 0: no addresses are left
void pool_free(Span *span);
struct Pool *default_pool(int device);
uint64_t pool_handle(const struct Pool *pool);
unsigned pool_handle_types(const struct Pool *pool);

/* ---- what other processes find by handles of 64 bytes (ipc.c) ---- */

typedef struct SharedEvent {
    _Atomic uint64_t generation, alive, recorded, completed;
} SharedEvent;
void open_table(void);
SharedEvent *shared_event_take(void); // NULL: there are too many
void shared_event_give(SharedEvent *event);
void shared_event_token(Token *token, const SharedEvent *event, int device);
SharedEvent *shared_event_open(const Token *token); // NULL: its maker is gone, or the event is
void shared_event_close(SharedEvent *event);
void legacy_forget(uint32_t id); // 0: nothing to forget

/* ---- streams (stream.c) ---- */

void drain_context(Context *context);
void drain_all(void);
void drop_streams_of(Context *context);
long pending_work(void);
CUresult enqueue_free(Context *context, CUstream stream, Span *span);
CUresult check_stream(Context *context, CUstream stream);
