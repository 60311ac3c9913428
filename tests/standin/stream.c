// Streams, events, copies and fills. Work is done at once and in order; vram_standin_defer(1) leaves it until somebody
// waits for it, so that a missing wait shows as wrong bytes.
#include "standin.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct Stream {
    uint64_t handle;
    Context *context;
    unsigned flags;
    int priority;
    uint64_t issued, done; // numbers of its last issued and last finished work
    struct Work *first, *last;
    struct Stream *next; // all streams ever, since events and work may still point to one that was destroyed
    bool destroyed;
} Stream;

typedef struct Event {
    uint64_t handle;
    Context *context;
    unsigned flags;
    Stream *stream; // of its last record, NULL: never recorded
    uint64_t number;
    double at; // milliseconds
    bool imported;
    SharedEvent *shared;    // INTERPROCESS
    uint64_t generation;    // another one there: the event was destroyed, and its place taken
    uint64_t shared_number; // of its last record here
} Event;

typedef enum What { COPY, FILL, FREE, WAIT, WAIT_SHARED, RECORD } What;
typedef struct Work {
    What what;
    uint64_t target, source, size; // bytes
    uint32_t value, width;
    Reach to, from; // what its ends were when it was issued
    int to_device, from_device; // COPY: under which each end is looked at; two for a peer copy
    void *staged; // what a pageable source held when it was copied from
    Stream *other;
    uint64_t number;    // WAIT: of the other stream's work
    uint64_t handle;    // RECORD, WAIT_SHARED: the event
    struct Work *next;
} Work;

static Stream *all_streams;
CUstream capturing;

/* ---- doing work ---- */

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void put(uint64_t target, const void *bytes, size_t size) {
    Span *span = multicast_span(target);
    if (span) multicast_write(span->memory, target - span->range.base, bytes, size);
    else memmove((void *)target, bytes, size);
}

static void fill_plain(uint64_t target, size_t size, uint32_t value, uint32_t width) {
    if (width == 1) memset((void *)target, (int)value, size);
    else if (width == 2) for (size_t i = 0; i < size / 2; i++) ((uint16_t *)target)[i] = (uint16_t)value;
    else for (size_t i = 0; i < size / 4; i++) ((uint32_t *)target)[i] = value;
}

static void fill(uint64_t target, size_t size, uint32_t value, uint32_t width) {
    static uint32_t pattern[16384];
    Span *span = multicast_span(target);
    if (!span) {
        fill_plain(target, size, value, width);
        return;
    }
    fill_plain((uint64_t)pattern, sizeof pattern, value, width);
    for (size_t at = 0; at < size; at += sizeof pattern)
        put(target + at, pattern, size - at < sizeof pattern ? size - at : sizeof pattern);
}

// Memory may have gone since deferred work was issued: on hardware a fault that no call of this context survives.
static bool still_there(Stream *stream, uint64_t address, size_t size, bool write, int device, Reach before) {
    if (reach(address, size, write, device) == before) return true;
    stream->context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    illegal_accesses++;
    return false;
}

static void run_until(Stream *stream, uint64_t number);

static bool shared_now(const Event *event) { return event->shared && event->shared->generation == event->generation; }

// The other process finishes its work in its own time; who waits ten seconds for it waits for nothing.
static void wait_shared(Stream *stream, Event *event, uint64_t number) {
    double deadline = now_ms() + 10e3;
    while (shared_now(event) && event->shared->completed < number) {
        if (now_ms() > deadline) {
            would_hang++;
            stream->context->sticky = CUDA_ERROR_LAUNCH_TIMEOUT;
            return;
        }
        usleep(200);
    }
}

static void do_work(Stream *stream, Work *work) {
    Event *event;
    switch (work->what) {
    case COPY:
        if (!still_there(stream, work->target, work->size, true, work->to_device, work->to)) break;
        if (work->staged) put(work->target, work->staged, work->size);
        else if (still_there(stream, work->source, work->size, false, work->from_device, work->from))
            put(work->target, (void *)work->source, work->size);
        break;
    case FILL:
        if (still_there(stream, work->target, work->size, true, stream->context->device, work->to))
            fill(work->target, work->size, work->value, work->width);
        break;
    case FREE: {
        Span *span = (Span *)ranges_at(&spans, work->target);
        if (span && span->id == work->number) span_drop(span);
        break;
    }
    case WAIT: run_until(work->other, work->number); break;
    case WAIT_SHARED:
        if ((event = handle_find(EVENT, work->handle))) wait_shared(stream, event, work->number);
        break;
    case RECORD:
        if (!(event = handle_find(EVENT, work->handle))) break;
        event->at = now_ms();
        if (shared_now(event) && event->shared->completed < work->number) event->shared->completed = work->number;
        break;
    }
}

static void run_until(Stream *stream, uint64_t number) {
    while (stream->done < number && stream->first) {
        Work *work = stream->first;
        do_work(stream, work);
        if (stream->first != work) continue; // waiting for another stream has run it
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(work->staged);
        free(work);
    }
}

static void drain(Stream *stream) { run_until(stream, stream->issued); }

void drain_context(Context *context) {
    for (Stream *stream = all_streams; stream; stream = stream->next)
        if (stream->context == context) drain(stream);
}

void drain_all(void) {
    for (Stream *stream = all_streams; stream; stream = stream->next) drain(stream);
}

long pending_work(void) {
    long count = 0;
    for (Stream *stream = all_streams; stream; stream = stream->next) count += (long)(stream->issued - stream->done);
    return count;
}

/* ---- streams ---- */

static Stream *new_stream(Context *context, unsigned flags, int priority) {
    Stream *stream = make(sizeof *stream);
    *stream = (Stream){.context = context, .flags = flags, .priority = priority, .next = all_streams};
    return all_streams = stream;
}

static Stream *legacy_stream(Context *context) {
    if (!context->legacy) context->legacy = new_stream(context, 0, 0);
    return context->legacy;
}

// 0 and 1 are the legacy stream of the current context, and so is 2, the per-thread one, whose order here is stricter.
static CUresult find_stream(Stream **out, CUstream handle, Context *context) {
    if ((uintptr_t)handle <= 2) {
        *out = legacy_stream(context);
        return CUDA_SUCCESS;
    }
    *out = handle_find(STREAM, (uint64_t)handle);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult check_stream(Context *context, CUstream handle) {
    Stream *stream;
    return find_stream(&stream, handle, context);
}

static void append(Stream *stream, Work work) {
    Work *made = make(sizeof *made);
    *made = work;
    if (stream->last) stream->last->next = made;
    else stream->first = made;
    stream->last = made;
    stream->issued++;
}

static void append_wait(Stream *stream, Stream *other) {
    if (other->done < other->issued) append(stream, (Work){.what = WAIT, .other = other, .number = other->issued});
}

// The legacy stream waits for the streams of its context, and they for it, unless they were made NON_BLOCKING.
static void order_with_legacy(Stream *stream) {
    Stream *legacy = legacy_stream(stream->context);
    if (stream->flags & CU_STREAM_NON_BLOCKING) return;
    if (stream != legacy) {
        append_wait(stream, legacy);
        return;
    }
    for (Stream *other = all_streams; other; other = other->next)
        if (other != legacy && other->context == stream->context &&
                !(other->flags & CU_STREAM_NON_BLOCKING)) append_wait(legacy, other);
}

static CUresult submit(Stream *stream, Work work, bool wait) {
    order_with_legacy(stream);
    append(stream, work);
    if (wait || !deferring) drain(stream);
    return stream->context->sticky;
}

CUresult enqueue_free(Context *context, CUstream handle, Span *span) {
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    return submit(stream, (Work){.what = FREE, .target = span->range.base, .number = span->id}, false);
}

static CUresult create_stream(CUstream *out, unsigned flags, int priority, Context *context) {
    NEED(out && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
    Stream *stream = new_stream(context, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
    stream->handle = handle_new(STREAM, stream);
    *out = (CUstream)stream->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamCreate(CUstream *out, unsigned flags) {
    ENTER_CONTEXT;
    return create_stream(out, flags, 0, context);
}

static CUresult f_cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    ENTER_CONTEXT;
    return create_stream(out, flags, priority, context);
}

static void destroy_stream(Stream *stream) { // its work is finished all the same
    drain(stream);
    handle_drop(STREAM, stream->handle);
    stream->destroyed = true;
}

static CUresult f_cuStreamDestroy(CUstream handle) {
    ENTER_CONTEXT;
    Stream *stream = handle_find(STREAM, (uint64_t)handle);
    NEED(stream, CUDA_ERROR_INVALID_HANDLE);
    destroy_stream(stream);
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamSynchronize(CUstream handle) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(!capturing || handle != capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream == legacy_stream(stream->context)) order_with_legacy(stream); // others wait for what was issued before them only
    drain(stream);
    return stream->context->sticky;
}

static CUresult f_cuStreamQuery(CUstream handle) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    return stream->done < stream->issued ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult f_cuStreamGetCtx(CUstream handle, CUcontext *out) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = (CUcontext)stream->context->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetCtx_v2(CUstream handle, CUcontext *out, CUgreenCtx *green) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out && green, CUDA_ERROR_INVALID_VALUE);
    *out = (CUcontext)stream->context->handle;
    *green = NULL;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetDevice(CUstream handle, CUdevice *out) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = stream->context->device;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetFlags(CUstream handle, unsigned *out) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = stream->flags;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetPriority(CUstream handle, int *out) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = stream->priority;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetId(CUstream handle, unsigned long long *out) {
    ENTER_CONTEXT;
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = (uint64_t)stream;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *out) { // graphs are not played
    ENTER_CONTEXT;
    TRY(check_stream(context, handle));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = capturing && handle == capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph,
                                            const CUgraphNode **nodes, size_t *count) {
    ENTER_CONTEXT;
    TRY(check_stream(context, handle));
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    *out = CU_STREAM_CAPTURE_STATUS_NONE;
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}

static CUresult f_cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *out, cuuint64_t *id, CUgraph *graph,
                                            const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    if (edges) *edges = NULL;
    return f_cuStreamGetCaptureInfo_v2(handle, out, id, graph, nodes, count);
}

static CUresult f_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER;
    static __thread CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    NEED(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- events ---- */

static void destroy_event(Event *event) {
    handle_drop(EVENT, event->handle);
    if (event->imported) shared_event_close(event->shared);
    else if (event->shared) shared_event_give(event->shared);
    free(event);
}

void drop_streams_of(Context *context) {
    size_t cursor = 0;
    for (Event *event; (event = handle_next(EVENT, &cursor));)
        if (event->context == context) destroy_event(event);
    cursor = 0;
    for (Stream *stream; (stream = handle_next(STREAM, &cursor));)
        if (stream->context == context) destroy_stream(stream);
}

static CUresult new_event(CUevent *out, unsigned flags, SharedEvent *shared, bool imported, Context *context) {
    Event *event = make(sizeof *event);
    *event = (Event){.context = context, .flags = flags, .shared = shared, .imported = imported,
            .generation = shared ? shared->generation : 0};
    event->handle = handle_new(EVENT, event);
    *out = (CUevent)event->handle;
    return CUDA_SUCCESS;
}

static CUresult f_cuEventCreate(CUevent *out, unsigned flags) {
    ENTER_CONTEXT;
    NEED(out && !(flags & ~7u), CUDA_ERROR_INVALID_VALUE);
    bool interprocess = flags & CU_EVENT_INTERPROCESS;
    NEED(!interprocess || flags & CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_VALUE);
    SharedEvent *shared = interprocess ? shared_event_take() : NULL;
    NEED(shared || !interprocess, CUDA_ERROR_OUT_OF_MEMORY);
    return new_event(out, flags, shared, false, context);
}

static CUresult f_cuEventDestroy(CUevent handle) {
    ENTER_CONTEXT;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(event, CUDA_ERROR_INVALID_HANDLE);
    destroy_event(event);
    return CUDA_SUCCESS;
}

static CUresult record(CUevent handle, CUstream stream_handle, unsigned flags, Context *context) {
    Stream *stream;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(event, CUDA_ERROR_INVALID_HANDLE);
    NEED(!flags || flags == CU_EVENT_RECORD_EXTERNAL, CUDA_ERROR_INVALID_VALUE);
    TRY(find_stream(&stream, stream_handle, context));
    NEED(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE); // an event belongs to one context
    if (shared_now(event)) event->shared_number = ++event->shared->recorded;
    order_with_legacy(stream);
    append(stream, (Work){.what = RECORD, .handle = event->handle, .number = event->shared_number});
    event->stream = stream;
    event->number = stream->issued;
    if (!deferring) drain(stream);
    return stream->context->sticky;
}

static CUresult f_cuEventRecord(CUevent event, CUstream stream) {
    ENTER_CONTEXT;
    return record(event, stream, 0, context);
}

static CUresult f_cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    ENTER_CONTEXT;
    return record(event, stream, flags, context);
}

static bool complete(const Event *event) {
    if (event->shared) return !shared_now(event) || event->shared->completed >= event->shared->recorded;
    return !event->stream || event->stream->done >= event->number;
}

static CUresult f_cuEventQuery(CUevent handle) {
    ENTER_CONTEXT;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(event, CUDA_ERROR_INVALID_HANDLE);
    return complete(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult f_cuEventSynchronize(CUevent handle) {
    ENTER_CONTEXT;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(event, CUDA_ERROR_INVALID_HANDLE);
    if (event->stream) run_until(event->stream, event->number);
    if (event->shared) wait_shared(legacy_stream(event->context), event, event->shared->recorded);
    return event->context->sticky;
}

static CUresult f_cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
    ENTER_CONTEXT;
    Stream *stream;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(event, CUDA_ERROR_INVALID_HANDLE);
    NEED(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    TRY(find_stream(&stream, stream_handle, context));
    if (complete(event)) return CUDA_SUCCESS;
    if (event->stream && event->stream->done < event->number)
        return submit(stream, (Work){.what = WAIT, .other = event->stream, .number = event->number}, false);
    return submit(stream, (Work){.what = WAIT_SHARED, .handle = event->handle, .number = event->shared->recorded},
            false);
}

static CUresult f_cuEventElapsedTime(float *out, CUevent start_handle, CUevent end_handle) {
    ENTER_CONTEXT;
    Event *start = handle_find(EVENT, (uint64_t)start_handle), *end = handle_find(EVENT, (uint64_t)end_handle);
    NEED(start && end && start->stream && end->stream, CUDA_ERROR_INVALID_HANDLE);
    NEED(!((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(complete(start) && complete(end), CUDA_ERROR_NOT_READY);
    *out = (float)(end->at - start->at);
    return CUDA_SUCCESS;
}

// The source must have been made INTERPROCESS, which includes DISABLE_TIMING.
static CUresult f_cuIpcGetEventHandle(CUipcEventHandle *out, CUevent handle) {
    ENTER_CONTEXT;
    Event *event = handle_find(EVENT, (uint64_t)handle);
    NEED(out && event && event->shared && !event->imported, CUDA_ERROR_INVALID_HANDLE);
    Token token;
    shared_event_token(&token, event->shared, devices[event->context->device].number);
    memset(out, 0, sizeof *out);
    memcpy(out, &token, sizeof token);
    return CUDA_SUCCESS;
}

static CUresult f_cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle) {
    ENTER_CONTEXT;
    Token token;
    memcpy(&token, &handle, sizeof token);
    NEED(out, CUDA_ERROR_INVALID_VALUE);
    NEED(token_valid(&token, 'e'), CUDA_ERROR_MAP_FAILED); // measured
    NEED(!token_is_own(&token), CUDA_ERROR_INVALID_CONTEXT);
    SharedEvent *shared = shared_event_open(&token);
    NEED(shared, CUDA_ERROR_MAP_FAILED); // our guess
    return new_event(out, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, shared, true, context);
}

/* ---- copies ---- */

static bool pageable(uint64_t address) { return !ranges_at(&spans, address); }

// device_target, device_source: this end must be memory that the driver knows; otherwise a plain host address will do.
static CUresult copy(uint64_t target, uint64_t source, size_t size, bool device_target, bool device_source,
        CUstream handle,
                     bool wait, Context *context) {
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    if (!size) return CUDA_SUCCESS;
    int device = stream->context->device;
    Reach to = reach(target, size, true, device), from = reach(source, size, false, device);
    NEED(target && source && to != REFUSED && from != REFUSED, CUDA_ERROR_INVALID_VALUE);
    NEED((!device_target || to == REACHED) && (!device_source || from == REACHED), CUDA_ERROR_INVALID_VALUE);
    Work work = {.what = COPY, .target = target, .source = source, .size = size, .to = to, .from = from,
            .to_device = device, .from_device = device};
    if (!wait && deferring && pageable(source)) { // read before the call returns, as by the real one
        work.staged = malloc(size);
        NEED(work.staged, CUDA_ERROR_OUT_OF_MEMORY);
        memcpy(work.staged, (void *)source, size);
    }
    return submit(stream, work, wait || pageable(target)); // into pageable memory: finished when the call returns
}

static CUresult f_cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size) {
    ENTER_CONTEXT;
    return copy(target, source, size, false, false, 0, true, context);
}

static CUresult f_cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER_CONTEXT;
    return copy(target, source, size, false, false, stream, false, context);
}

static CUresult f_cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t size) {
    ENTER_CONTEXT;
    return copy(target, (uint64_t)source, size, true, false, 0, true, context);
}

static CUresult f_cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    ENTER_CONTEXT;
    return copy(target, (uint64_t)source, size, true, false, stream, false, context);
}

static CUresult f_cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size) {
    ENTER_CONTEXT;
    return copy((uint64_t)target, source, size, false, true, 0, true, context);
}

static CUresult f_cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER_CONTEXT;
    return copy((uint64_t)target, source, size, false, true, stream, false, context);
}

static CUresult f_cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t size) {
    ENTER_CONTEXT;
    return copy(target, source, size, true, true, 0, true, context);
}

static CUresult f_cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER_CONTEXT;
    return copy(target, source, size, true, true, stream, false, context);
}

// Each end is looked at under its own context; neither needs peer access, which only makes it faster.
static CUresult copy_peer(uint64_t target, CUcontext to_handle, uint64_t source, CUcontext from_handle, size_t size,
                          CUstream handle, bool wait, Context *context) {
    Stream *stream;
    Context *to = find_context(to_handle), *from = find_context(from_handle);
    NEED(to && from, CUDA_ERROR_INVALID_CONTEXT);
    TRY(find_stream(&stream, handle, context));
    if (!size) return CUDA_SUCCESS;
    NEED(reach(target, size, true, to->device) == REACHED && reach(source, size, false, from->device) == REACHED,
            CUDA_ERROR_INVALID_VALUE);
    return submit(stream, (Work){.what = COPY, .target = target, .source = source, .size = size, .to = REACHED,
            .from = REACHED, .to_device = to->device, .from_device = from->device}, wait);
}

static CUresult f_cuMemcpyPeer(CUdeviceptr target, CUcontext to, CUdeviceptr source, CUcontext from, size_t size) {
    ENTER_CONTEXT;
    return copy_peer(target, to, source, from, size, 0, true, context);
}

static CUresult f_cuMemcpyPeerAsync(CUdeviceptr target, CUcontext to, CUdeviceptr source, CUcontext from, size_t size,
        CUstream stream) {
    ENTER_CONTEXT;
    return copy_peer(target, to, source, from, size, stream, false, context);
}

/* ---- fills: asynchronous to the host even without Async in the name ---- */

static CUresult set(uint64_t target, uint32_t value, uint32_t width, size_t count, CUstream handle, Context *context) {
    Stream *stream;
    TRY(find_stream(&stream, handle, context));
    NEED(target % width == 0 && count <= SIZE_MAX / width, CUDA_ERROR_INVALID_VALUE);
    if (!count) return CUDA_SUCCESS;
    NEED(reach(target, count * width, true, stream->context->device) == REACHED, CUDA_ERROR_INVALID_VALUE);
    return submit(stream, (Work){.what = FILL, .target = target, .size = count * width, .value = value,
            .width = width}, false);
}

#define FILLS(bits, type)                                                                                              \
    static CUresult f_cuMemsetD##bits(CUdeviceptr target, type value, size_t count) {                                  \
        ENTER_CONTEXT;                                                                                                 \
        return set(target, value, bits / 8, count, 0, context);                                                        \
    }                                                                                                                  \
    static CUresult f_cuMemsetD##bits##Async(CUdeviceptr target, type value, size_t count, CUstream stream) {          \
        ENTER_CONTEXT;                                                                                                 \
        return set(target, value, bits / 8, count, stream, context);                                                   \
    }
FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned)

const Entry stream_entries[] = {
    E(cuStreamCreate, 2000), E(cuStreamCreateWithPriority, 5050), E(cuStreamDestroy, 4000), E(cuStreamSynchronize,
            2000),
    E(cuStreamQuery, 2000), E(cuStreamGetCtx, 9020), E_AS(cuStreamGetCtx, 12050, _v2), E(cuStreamGetDevice, 12080),
    E(cuStreamGetFlags, 5050), E(cuStreamGetPriority, 5050), E(cuStreamGetId, 12000), E(cuStreamIsCapturing, 10000),
    E_AS(cuStreamGetCaptureInfo, 11030, _v2), E_AS(cuStreamGetCaptureInfo, 12030, _v3),
    E(cuThreadExchangeStreamCaptureMode, 10010), E(cuStreamWaitEvent, 3020), E(cuEventCreate, 2000), E(cuEventDestroy,
            4000),
    E(cuEventRecord, 2000), E(cuEventRecordWithFlags, 11010), E(cuEventQuery, 2000), E(cuEventSynchronize, 2000),
    E(cuEventElapsedTime, 2000), E(cuIpcGetEventHandle, 4010), E(cuIpcOpenEventHandle, 4010), E(cuMemcpy, 4000),
    E(cuMemcpyAsync, 4000), E(cuMemcpyHtoD, 3020), E(cuMemcpyHtoDAsync, 3020), E(cuMemcpyDtoH, 3020),
    E(cuMemcpyDtoHAsync, 3020), E(cuMemcpyDtoD, 3020), E(cuMemcpyDtoDAsync, 3020), E(cuMemcpyPeer, 4000),
    E(cuMemcpyPeerAsync, 4000), E(cuMemsetD8, 3020), E(cuMemsetD8Async, 3020), E(cuMemsetD16, 3020),
            E(cuMemsetD16Async, 3020),
    E(cuMemsetD32, 3020), E(cuMemsetD32Async, 3020), {0},
};
