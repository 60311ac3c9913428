// A stand-in for libcuda.so.1: how it is found, configured, counted and made to fail. The driver's functions are in
// the other files, one topic each.
#include "standin.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

EXPORT const char vram_standin[] = "vram stand-in for libcuda.so.1"; // no real driver has this symbol

Config config;
bool initialized, forked, deferring;
long would_hang, would_crash, illegal_accesses;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- configuration ---- */

static bool env_on(const char *name) {
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") && strcmp(value, "off");
}

static long long env_number(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoll(value, NULL, 0) : otherwise;
}

static bool lacks(const char *what) { // VRAM_STANDIN_LACKS: by default what a Hopper lacks
    const char *list = getenv("VRAM_STANDIN_LACKS");
    return strstr(list ? list : "decompression", what);
}

static void read_config(void) {
    config.driver_version = (int)env_number("VRAM_STANDIN_DRIVER_VERSION", 13000);
    config.devices = (int)env_number("VRAM_STANDIN_DEVICES", 2);
    if (config.devices > MAX_DEVICES) config.devices = MAX_DEVICES;
    config.numa_nodes = (int)env_number("VRAM_STANDIN_NUMA_NODES", 2);
    if (config.numa_nodes < 1) config.numa_nodes = 1;
    config.memory = (size_t)env_number("VRAM_STANDIN_MEMORY", 8ll << 30) / GRANULE * GRANULE;
    config.no_peer = env_on("VRAM_STANDIN_NO_PEER");
    config.no_vmm = env_on("VRAM_STANDIN_NO_VMM");
    config.fabric = env_on("VRAM_STANDIN_FABRIC");
    config.has.compression = !lacks("compressible");
    config.has.rdma = !lacks("rdma");
    config.has.tile_pool = !lacks("tile_pool");
    config.has.decompression = !lacks("decompression");
    config.declines_compression = env_on("VRAM_STANDIN_DECLINES_COMPRESSION");
    deferring = env_on("VRAM_STANDIN_DEFER");
}

/* ---- counts of calls, and faults ---- */

struct Site { // one for each function, whatever its version
    char name[64];
    long calls;
    Site *next;
};
typedef struct Fault {
    char name[64]; // "*": any call
    long left;     // 1: the next one
    CUresult code;
    bool forever;
    struct Fault *next;
} Fault;
static Site *sites;
static Fault *faults;
static long faults_played;

static Site *site_named(const char *name) {
    for (Site *site = sites; site; site = site->next)
        if (!strcmp(site->name, name)) return site;
    Site *site = make(sizeof *site);
    snprintf(site->name, sizeof site->name, "%s", name);
    site->next = sites;
    return sites = site;
}

static Site *site_of(const char *function) { // "f_cuMulticastBindMem_v2": a fault names the function, not its version
    char name[64];
    snprintf(name, sizeof name, "%s", function + 2);
    char *version = strstr(name, "_v");
    if (version) *version = 0;
    return site_named(name);
}

// All that match count the call; the first that is due decides.
enum { INTERRUPT = -1 }; // in place of a code

static CUresult play_faults(const Site *site) {
    CUresult code = CUDA_SUCCESS;
    for (Fault **link = &faults, *fault; (fault = *link);) {
        bool due = false;
        if (!strcmp(fault->name, "*") || !strcmp(fault->name, site->name)) {
            if (fault->left > 0) fault->left--;
            due = fault->left == 0;
        }
        if (due && (int)fault->code == INTERRUPT) raise(SIGINT); // and the call does what it does
        else if (due && code == CUDA_SUCCESS) code = fault->code;
        if (due && !fault->forever) {
            *link = fault->next;
            free(fault);
        } else {
            link = &fault->next;
        }
    }
    faults_played += code != CUDA_SUCCESS;
    return code;
}

static void add_fault(const char *name, long nth, int code, bool forever) {
    Fault **last = &faults;
    while (*last) last = &(*last)->next;
    Fault *fault = *last = make(sizeof *fault);
    snprintf(fault->name, sizeof fault->name, "%s", name);
    fault->left = nth < 1 ? 1 : nth;
    fault->code = (CUresult)code;
    fault->forever = forever;
}

// "cuMemMap:3:2:forever,cuMemCreate:1:2": the third cuMemMap and all after it, and the first cuMemCreate, run out of memory.
static void read_faults(void) {
    const char *text = getenv("VRAM_STANDIN_FAIL");
    if (!text) return;
    char *copy = strdup(text), *rest = copy, *item;
    while ((item = strsep(&rest, ","))) {
        char name[64] = "", how[16] = "";
        long nth = 1;
        int code = CUDA_ERROR_UNKNOWN;
        if (sscanf(item, " %63[^:]:%ld:%d:%15s", name, &nth, &code, how) >= 1) add_fault(name, nth, code, !strcmp(how,
                "forever"));
    }
    free(copy);
}

Guard guard_enter(Site **site, const char *function, bool needs_init) {
    pthread_mutex_lock(&mutex);
    if (!*site) *site = site_of(function);
    (*site)->calls++;
    CUresult code = play_faults(*site);
    // A forked child is refused everything, as by the real driver, whose state does not survive a fork.
    if (code == CUDA_SUCCESS && needs_init && (!initialized || forked)) code = CUDA_ERROR_NOT_INITIALIZED;
    return (Guard){code};
}

void guard_leave(Guard *guard) {
    (void)guard;
    pthread_mutex_unlock(&mutex);
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void after_fork(void) { pthread_mutex_unlock(&mutex); }
static void in_child(void) {
    forked = initialized;
    pthread_mutex_init(&mutex, NULL);
}

__attribute__((constructor)) static void load(void) {
    read_config();
    read_faults();
    open_arenas(); // at load, so that a ledger taken after it sees no descriptor appear with the first call
    open_table();
    pthread_atfork(before_fork, after_fork, in_child);
}

/* ---- the control functions, for tests ---- */

static long long live_bytes(void) {
    long long bytes = 0;
    for (int d = 0; d < device_count; d++) bytes += (long long)devices[d].used;
    return bytes;
}

static long spans_of(unsigned kinds) {
    long count = 0;
    for (size_t i = 0; i < spans.count; i++) count += kinds >> ((Span *)spans.items[i])->kind & 1;
    return count;
}

static long memories(bool multicast, bool refs) {
    long count = 0;
    size_t cursor = 0;
    for (Memory *memory; (memory = handle_next(MEMORY, &cursor));)
        if (!!memory->multicast == multicast || refs) count += refs ? memory->refs : 1;
    return count;
}

static long ipc_opens(void) {
    long count = 0;
    for (size_t i = 0; i < spans.count; i++) count += ((Span *)spans.items[i])->opens;
    return count;
}

static long active_contexts(void) {
    long count = handle_count(CONTEXT) - device_count; // those that were created
    for (int d = 0; d < device_count; d++) count += devices[d].primary.alive;
    return count;
}

static long primary_references(void) {
    long count = 0;
    for (int d = 0; d < device_count; d++) count += devices[d].primary.refs;
    return count;
}

static long long live(const char *what) {
    if (!strcmp(what, "reservations")) return (long long)reservations.count;
    if (!strcmp(what, "mappings")) return spans_of(1u << VMM_MAPPING);
    if (!strcmp(what, "allocations")) return memories(false, false); // those with a handle
    if (!strcmp(what, "multicasts")) return memories(true, false);
    if (!strcmp(what, "handles")) return memories(false, true); // references to both
    if (!strcmp(what, "bindings")) return multicast_bindings();
    if (!strcmp(what, "bytes")) return live_bytes();
    if (!strcmp(what, "legacy")) return spans_of(1u << LEGACY);
    if (!strcmp(what, "pool_allocations")) return spans_of(1u << POOL_ALLOCATION | 1u << POOL_IMPORTED);
    if (!strcmp(what, "host")) return spans_of(1u << HOST_ALLOCATED | 1u << HOST_REGISTERED);
    if (!strcmp(what, "ipc_opens")) return ipc_opens();
    if (!strcmp(what, "contexts")) return active_contexts();
    if (!strcmp(what, "context_references")) return primary_references();
    if (!strcmp(what, "streams")) return handle_count(STREAM);
    if (!strcmp(what, "events")) return handle_count(EVENT);
    if (!strcmp(what, "pools")) return handle_count(POOL) - device_count; // each device has a default one
    if (!strcmp(what, "pinned")) return pinned_count(); // released, but an exported descriptor is open somewhere
    if (!strcmp(what, "pending")) return pending_work();
    return -1;
}

#define LOCKED(type, expression)                                                                                       \
    pthread_mutex_lock(&mutex);                                                                                        \
    type answer_ = (expression);                                                                                       \
    pthread_mutex_unlock(&mutex);                                                                                      \
    return answer_

EXPORT long long vram_standin_live(const char *what) { LOCKED(long long,
        initialized ? live(what) : live(what) < 0 ? -1 : 0); }
EXPORT long vram_standin_calls(const char *name) { LOCKED(long, site_named(name)->calls); }
EXPORT long vram_standin_would_hang(void) { LOCKED(long, would_hang); }
EXPORT long vram_standin_would_crash(void) { LOCKED(long, would_crash); }
EXPORT long vram_standin_illegal(void) { LOCKED(long, illegal_accesses); }
EXPORT long vram_standin_faults_played(void) { LOCKED(long, faults_played); }

EXPORT void vram_standin_fail(const char *name, long nth, int code, int forever) {
    pthread_mutex_lock(&mutex);
    add_fault(name, nth, code, forever);
    pthread_mutex_unlock(&mutex);
}

EXPORT void vram_standin_clear(void) { // no more faults, all counts 0; what lives is left alone
    pthread_mutex_lock(&mutex);
    for (Fault *fault; (fault = faults);) {
        faults = fault->next;
        free(fault);
    }
    for (Site *site = sites; site; site = site->next) site->calls = 0;
    faults_played = would_hang = would_crash = illegal_accesses = 0;
    pthread_mutex_unlock(&mutex);
}

// "cuInit cuMemCreate ...": those called since the last clear. Returns the length that the whole list needs.
EXPORT long vram_standin_called(char *out, long room) {
    pthread_mutex_lock(&mutex);
    long length = 0;
    for (Site *site = sites; site; site = site->next) {
        if (!site->calls) continue;
        long size = (long)strlen(site->name) + 1;
        if (length + size < room) sprintf(out + length, "%s ", site->name);
        length += size;
    }
    pthread_mutex_unlock(&mutex);
    return length;
}

EXPORT int vram_standin_set_free(int device, unsigned long long bytes) { // ULLONG_MAX: as at the beginning
    LOCKED(int, initialized && valid_device(device)
                    ? (devices[device].limit = bytes == ULLONG_MAX
                                      ? config.memory
                                      : devices[device].used + pinned_bytes(device) + bytes,
                            0)
                    : -1);
}

EXPORT void vram_standin_fabric(int on) { // as VRAM_STANDIN_FABRIC, from now on
    pthread_mutex_lock(&mutex);
    config.fabric = on;
    pthread_mutex_unlock(&mutex);
}

EXPORT void vram_standin_capture(CUstream stream) { // 0: none
    pthread_mutex_lock(&mutex);
    capturing = stream;
    pthread_mutex_unlock(&mutex);
}

EXPORT void vram_standin_defer(int on) { // off: what is pending is run first
    pthread_mutex_lock(&mutex);
    if (!on) drain_all();
    deferring = on;
    pthread_mutex_unlock(&mutex);
}

/* ---- how the bindings find functions ---- */

static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static bool hidden(const char *symbol) {
    const char *list = getenv("VRAM_STANDIN_NO_SYMBOLS");
    size_t length = strlen(symbol);
    for (const char *at = list; at && (at = strstr(at, symbol)); at += length)
        if ((at == list || at[-1] == ',') && (at[length] == ',' || !at[length])) return true;
    return false;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *result) {
    (void)flags; // the per-thread default stream is the legacy one here
    static const Entry *const tables[] = {device_entries, vmm_entries, memory_entries, ipc_entries, pool_entries,
            stream_entries, multicast_entries};
    CUdriverProcAddressQueryResult ignored;
    if (!result) result = &ignored;
    *function = NULL;
    if (hidden(symbol)) {
        *result = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return CUDA_ERROR_NOT_FOUND;
    }
    const Entry *found = NULL;
    bool known = false;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const Entry *entry = tables[t]; entry->name; entry++) {
            if (strcmp(entry->name, symbol)) continue;
            known = true;
            if (entry->since <= version && (!found || entry->since > found->since)) found = entry;
        }
    // What an older driver does: it has not heard of functions, or versions of them, that came after it.
    if (version > config.driver_version || (known && (!found || found->since > config.driver_version))) {
        *result = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        return CUDA_ERROR_NOT_FOUND;
    }
    // Some 350 functions are nobody's concern here: they are there and say NOT_SUPPORTED.
    *function = found ? found->function : (void *)unsupported;
    *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = config.driver_version;
    return CUDA_SUCCESS;
}
