// All-reduce, reduce-scatter, gather and barrier between GPUs that have one another's memory mapped. No headers; compiled by
// vram.collectives.kernels, which writes instructions.cu in front of it, and these:
//
//   WORLD, RANK       how many ranks there are, and which this is: constants, so that no loop over ranks indexes
//                     registers by what is known only when it runs
//   KIND              0 float32, 1 float16, 2 bfloat16, 3 int32
//   OP                0 sum, 1 min, 2 max
//   PEERS, PEER_LIST  "u8 *p0, u8 *p1", "p0, p1": the workspaces of all ranks, as this one has them mapped
//   ROWS, ROW_LIST    the same of what is reduced, for the kernels that reach into it
//   OUTS, OUT_LIST    the same of where the result goes
//   LL_ROW, PUSH_AT, PUSH_ROW, SCATTER_AT, GATHER_AT, SHARE_ROW, FLAGS_AT, STAGED_AT, BLOCKS
//                     where what lies in a workspace, in bytes; and the largest grid
//   DEPENDENT         if kernels of a stream may begin before the one before them has ended (sm_90)
//
// A workspace holds, for each of two halves: a row of packets from each rank; a row of sentinels from each rank; the same
// for shares that are to be reduced, and for shares that are; and a word from each rank for each block, twice. Calls have numbers, odd and even ones a half each. The number belongs to
// the whole call and lies in memory of the device, so that graphs may be launched again and grids may differ from call
// to call; whichever block arrives last counts it up. Two halves are enough because every rank hears from every other
// one in every call: who has come to call n + 1 knows that all others are done with call n - 1.
//
// Nothing here waits for ever, and nothing traps, which would cost the process its context: who waits looks every 2048
// polls whether the host says stop or its patience is over, says which rank it waited for, marks the workspace as
// poisoned and returns. Kernels that find it poisoned return at once.

struct State {        // of this rank alone, in its own memory
    u32 call;         // the number of the newest call
    u32 arrived;      // blocks that have read it
    u32 poisoned;
};

struct Fault {        // on the host: what went wrong first
    u32 is_set;
    u32 rank;         // who was waited for
    u32 why;          // 1: the host said stop; 2: it took too long
    u32 call;
};

struct Run {          // what every kernel is given
    State *state;
    const u32 *stop;
    Fault *fault;
    u64 patience;     // nanoseconds
    u32 call;
    u32 polls;
};

// -- a call, from its first step to its last --------------------------------------------------------------------------
// Take the number of this call. False where the workspace is poisoned: then there is nothing to do.
DEVICE bool enter(Run &run) {
    wait_for_the_kernel_before();  // before the state is read, which that writes
    const volatile State *state = run.state;
    run.call = state->call + 1;
    if (run.call == 0) run.call = 2;  // 2^32 - 1 is odd, so an even one follows; and fresh memory holds zeros
    const bool is_poisoned = state->poisoned;
    __syncthreads();  // all of this block have read; no later kernel of the stream begins before this one has ended
    if (threadIdx.x == 0 && atomicAdd(&run.state->arrived, 1u) == gridDim.x - 1) {
        run.state->arrived = 0;
        *(volatile u32 *)&run.state->call = run.call;
    }
    return !is_poisoned;
}

// Have the next kernel of the stream begin, after the last store: it may read what this one has written.
DEVICE void leave() { let_the_next_kernel_begin(); }

// Whether to wait no longer for a rank; asked every 2048 polls, so the host's memory is not read on the fast path. Given
// all by value but for when this thread's patience began: what is given by address lies in memory, not in registers.
static __device__ __noinline__ bool give_up(State *state, const u32 *stop, Fault *fault, u64 patience, u32 call, u32 rank,
                                            u64 &since) {
    const u64 now = nanoseconds();
    if (since == 0) since = now;
    const bool is_stopped = load_relaxed(stop) != 0;
    if (!is_stopped && now - since < patience) return false;
    if (atomicExch(&state->poisoned, 1u) == 0) {
        store_relaxed(&fault->rank, rank);
        store_relaxed(&fault->why, is_stopped ? 1u : 2u);
        store_relaxed(&fault->call, call);
        __threadfence_system();
        store_relaxed(&fault->is_set, 1u);
    }
    return true;
}
#define MUST_GIVE_UP(rank, since) \
    (++run.polls % 2048 == 0 && give_up(run.state, run.stop, run.fault, run.patience, run.call, rank, since))

// -- elements ---------------------------------------------------------------------------------------------------------
// A word is one element of 32 bits or two of 16.
#if KIND == 1 || KIND == 2
#define ELEMENT 2
#else
#define ELEMENT 4
#endif

#if KIND != 3
DEVICE float combine(float a, float b) {
#if OP == 0
    return a + b;
#elif OP == 1
    return least(a, b);
#else
    return greatest(a, b);
#endif
}
// No sum is -0.0, on no route: the sentinel turns zeros into it where it is used, and what is added takes that back.
DEVICE float finished(float a) { return OP == 0 ? a + 0.0f : a; }
#endif

#if KIND == 1
DEVICE void unpack(u32 w, float &a, float &b) { float16_unpack(w, a, b); }
DEVICE u32 pack(float a, float b) { return float16_pack(a, b); }
#elif KIND == 2
DEVICE void unpack(u32 w, float &a, float &b) {
    a = __uint_as_float(w << 16);
    b = __uint_as_float(w & 0xffff0000u);
}
DEVICE u32 pack(float a, float b) { return bfloat16_pack(a, b); }
#endif

// Reduce the words of all ranks, in the order of the ranks and in 32 bits: one rounding, and the same bits everywhere.
DEVICE u32 reduce(const u32 (&words)[WORLD]) {
#if KIND == 3
    u32 a = words[0];
#pragma unroll
    for (int r = 1; r < WORLD; ++r) {
        const u32 b = words[r];
        a = OP == 0 ? a + b : OP == 1 ? (u32)min((int)a, (int)b) : (u32)max((int)a, (int)b);
    }
    return a;
#elif KIND == 0
    float a = __uint_as_float(words[0]);
#pragma unroll
    for (int r = 1; r < WORLD; ++r) a = combine(a, __uint_as_float(words[r]));
    return __float_as_uint(finished(a));
#else
    float a, b;
    unpack(words[0], a, b);
#pragma unroll
    for (int r = 1; r < WORLD; ++r) {
        float x, y;
        unpack(words[r], x, y);
        a = combine(a, x), b = combine(b, y);
    }
    return pack(finished(a), finished(b));
#endif
}

#define REDUCE_ONE(o, d, c)                                                \
    {                                                                      \
        u32 words[WORLD];                                                  \
        _Pragma("unroll") for (int r = 0; r < WORLD; ++r) words[r] = d[r].c; \
        o.c = reduce(words);                                               \
    }
#define REDUCE_FOUR(o, d) REDUCE_ONE(o, d, x) REDUCE_ONE(o, d, y) REDUCE_ONE(o, d, z) REDUCE_ONE(o, d, w)

// -- words of arrays that begin and end anywhere -----------------------------------------------------------------------
// Load and store up to 16 bytes; `whole` where all are there and the address is a multiple of as many.
template <typename T> DEVICE T load(const u8 *at, u64 left, bool is_aligned) {
    T v;
    if (is_aligned && left >= sizeof(T)) return *(const T *)at;
    u32 *words = (u32 *)&v;
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / 4); ++k) {
        u32 w = 0;
#if ELEMENT == 2
        if (left > 4 * k) w = ((const u16 *)at)[2 * k];
        if (left > 4 * k + 2) w |= (u32)((const u16 *)at)[2 * k + 1] << 16;
#else
        if (left > 4 * k) w = ((const u32 *)at)[k];
#endif
        words[k] = w;
    }
    return v;
}
template <typename T> DEVICE void store(u8 *at, T v, u64 left, bool is_aligned) {
    if (is_aligned && left >= sizeof(T)) {
        *(T *)at = v;
        return;
    }
    const u32 *words = (const u32 *)&v;
#pragma unroll
    for (int k = 0; k < (int)(sizeof(T) / 4); ++k) {
#if ELEMENT == 2
        if (left > 4 * k) ((u16 *)at)[2 * k] = (u16)words[k];
        if (left > 4 * k + 2) ((u16 *)at)[2 * k + 1] = (u16)(words[k] >> 16);
#else
        if (left > 4 * k) ((u32 *)at)[k] = words[k];
#endif
    }
}

#define RUN(run) Run run = {(State *)state, (const u32 *)stop, (Fault *)fault, patience, 0, 0}
#define COMMON u64 state, u64 stop, u64 fault, u64 patience
#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS (gridDim.x * blockDim.x)

// Numbers repeat after 2^32 calls, and what a packet or a word holds may be that old. So in two of 2^30 calls, one of
// each half, its packets from `used` on and its words of blocks from `blocks` on are cleared: what this call does not
// use, and no rank writes before it has heard from this one in the next.
DEVICE void sweep(const Run &run, u8 *own, u32 used, u32 blocks) {
    if ((run.call & 0x3fffffff) >= 2) return;
    u8 *half = own + (run.call & 1) * (u64)WORLD * LL_ROW;
    for (u32 i = used + THREAD; i < LL_ROW / 16; i += THREADS)
        for (int r = 0; r < WORLD; ++r) store_packet(half + r * (u64)LL_ROW + (u64)i * 16, 0, 0);
    u32 *words = (u32 *)(own + FLAGS_AT) + (run.call & 1) * 2 * BLOCKS * 32;
    for (u32 i = THREAD; i < 2 * BLOCKS * 32; i += THREADS)
        if (i / 32 % BLOCKS >= blocks) store_relaxed(words + i, 0);
}

// -- one shot, with the number beside the data: half of what is sent is payload, and nothing else is waited for ---------
extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_packets(PEERS, COMMON, u64 in, u64 out, u64 nbytes) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (!enter(run)) return;
    const u64 tag = (u64)run.call << 32, half = (run.call & 1) * (u64)WORLD * LL_ROW;
    const u32 count = (u32)((nbytes + 7) / 8);
    const bool is_aligned = ((in | out) & 7) == 0;
    for (u32 i = THREAD; i < count; i += THREADS) {
        const u64 at = (u64)i * 8;
        const uint2 d = load<uint2>((const u8 *)in + at, nbytes - at, is_aligned);
#pragma unroll
        for (int k = 1; k < WORLD; ++k)  // from the next rank on: not all to one at a time
            store_packet(peers[(RANK + k) % WORLD] + half + RANK * (u64)LL_ROW + at * 2, tag | d.x, tag | d.y);
    }
    sweep(run, peers[RANK], count, 0);
    for (u32 i = THREAD; i < count; i += THREADS) {
        const u64 at = (u64)i * 8;
        const uint2 d = load<uint2>((const u8 *)in + at, nbytes - at, is_aligned);
        u32 x[WORLD], y[WORLD];
        u64 since = 0;
        for (;;) {
            int late = -1;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK) continue;
                u64 a, b;
                load_packet(peers[RANK] + half + r * (u64)LL_ROW + at * 2, a, b);
                if (a >> 32 != run.call || b >> 32 != run.call) late = r;
                x[r] = (u32)a, y[r] = (u32)b;
            }
            if (late < 0) break;
            if (MUST_GIVE_UP(late, since)) return;
        }
        x[RANK] = d.x, y[RANK] = d.y;
        store<uint2>((u8 *)out + at, uint2{reduce(x), reduce(y)}, nbytes - at, is_aligned);
    }
    leave();
}

// -- one shot, with a sentinel in the data: all of what is sent is payload. Sums of floats only -------------------------
// A word of zeros says that nothing has come: fresh memory is ready for it. A zero is sent as -0.0, which adds the same.
#if KIND != 3 && OP == 0
#define UNROLL (WORLD <= 2 ? 2 : 1)
DEVICE u32 visible(u32 w) { return w ? w : 0x80000000u; }
DEVICE bool has_come(uint4 v) { return v.x && v.y && v.z && v.w; }

extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_push(PEERS, COMMON, u64 in, u64 out, u64 nbytes) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (!enter(run)) return;
    const u64 half = PUSH_AT + (run.call & 1) * (u64)WORLD * PUSH_ROW;
    const u32 count = (u32)((nbytes + 15) / 16), step = THREADS;
    const bool is_aligned = ((in | out) & 15) == 0;
    for (u32 first = THREAD; first < count; first += step * UNROLL) {
        uint4 d[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i < count) d[u] = load<uint4>((const u8 *)in + (u64)i * 16, nbytes - (u64)i * 16, is_aligned);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i >= count) continue;
            const uint4 e = {visible(d[u].x), visible(d[u].y), visible(d[u].z), visible(d[u].w)};
#pragma unroll
            for (int k = 1; k < WORLD; ++k)
                store_four(peers[(RANK + k) % WORLD] + half + RANK * (u64)PUSH_ROW + (u64)i * 16, e);
        }
    }
    sweep(run, peers[RANK], 0, 0);
    for (u32 first = THREAD; first < count; first += step * UNROLL) {
        uint4 d[UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i >= count) continue;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK)
                    d[u][r] = load<uint4>((const u8 *)in + (u64)i * 16, nbytes - (u64)i * 16, is_aligned);
                else
                    d[u][r] = load_four(peers[RANK] + half + r * (u64)PUSH_ROW + (u64)i * 16);
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i >= count) continue;
            const u64 at = (u64)i * 16;
            u64 since = 0;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK) continue;
                u8 *from = peers[RANK] + half + r * (u64)PUSH_ROW + at;
                while (!has_come(d[u][r])) {
                    if (MUST_GIVE_UP(r, since)) return;
                    d[u][r] = load_four(from);
                }
                *(uint4 *)from = uint4{0, 0, 0, 0};  // ready for the next call but one
            }
            uint4 o;
            REDUCE_FOUR(o, d[u]);
            store<uint4>((u8 *)out + at, o, nbytes - at, is_aligned);
        }
    }
    leave();
}

// -- two shots, with the sentinel: each rank is sent its share by all, and sends the result of it to all -----------------
// Every wait is for data: no flag, no fence, and no array has to be known to other ranks. A thread writes to `out` what it
// alone has read of `in`, so they may be the same. A result is never -0.0, so the sentinel's zero can be told from it.
#if SHARE_ROW > 0
#define SHOT_UNROLL (WORLD <= 4 ? 2 : 1)
DEVICE uint4 all_visible(uint4 v) { return uint4{visible(v.x), visible(v.y), visible(v.z), visible(v.w)}; }
DEVICE u32 result_of(u32 w) { return w == 0x80000000u ? 0 : w; }

extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_two_shots(PEERS, COMMON, u64 in, u64 out, u64 nbytes) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (!enter(run)) return;
    u64 since;  // one for both waits: its address is taken, so it lies in memory
    const u64 half = (run.call & 1) * (u64)WORLD * SHARE_ROW;
    const u32 count = (u32)((nbytes + 15) / 16), share = (count + WORLD - 1) / WORLD, step = THREADS;
    const u32 mine = RANK * share, ours = mine < count ? min(share, count - mine) : 0;
    const bool is_aligned = ((in | out) & 15) == 0;
    for (u32 i = THREAD; i < share; i += step) {
#pragma unroll
        for (int k = 1; k < WORLD; ++k) {
            const int r = (RANK + k) % WORLD;
            const u32 n = r * share + i;
            if (n >= count) continue;
            const u64 at = (u64)n * 16;
            store_four(peers[r] + SCATTER_AT + half + RANK * (u64)SHARE_ROW + (u64)i * 16,
                       all_visible(load<uint4>((const u8 *)in + at, nbytes - at, is_aligned)));
        }
    }
    sweep(run, peers[RANK], 0, 0);
    for (u32 first = THREAD; first < ours; first += step * SHOT_UNROLL) {
        uint4 d[SHOT_UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < SHOT_UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i >= ours) continue;
            const u64 at = (u64)(mine + i) * 16;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK)
                    d[u][r] = load<uint4>((const u8 *)in + at, nbytes - at, is_aligned);
                else
                    d[u][r] = load_four(peers[RANK] + SCATTER_AT + half + r * (u64)SHARE_ROW + (u64)i * 16);
            }
        }
#pragma unroll
        for (int u = 0; u < SHOT_UNROLL; ++u) {
            const u32 i = first + u * step;
            if (i >= ours) continue;
            const u64 at = (u64)(mine + i) * 16;
            since = 0;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK) continue;
                u8 *from = peers[RANK] + SCATTER_AT + half + r * (u64)SHARE_ROW + (u64)i * 16;
                while (!has_come(d[u][r])) {
                    if (MUST_GIVE_UP(r, since)) return;
                    d[u][r] = load_four(from);
                }
                *(uint4 *)from = uint4{0, 0, 0, 0};
            }
            uint4 o;
            REDUCE_FOUR(o, d[u]);
            const uint4 e = all_visible(o);
#pragma unroll
            for (int k = 1; k < WORLD; ++k)
                store_four(peers[(RANK + k) % WORLD] + GATHER_AT + half + RANK * (u64)SHARE_ROW + (u64)i * 16, e);
            store<uint4>((u8 *)out + at, o, nbytes - at, is_aligned);
        }
    }
    for (u32 i = THREAD; i < share; i += step) {
        uint4 d[WORLD];
#pragma unroll
        for (int k = 1; k < WORLD; ++k) {
            const int r = (RANK + k) % WORLD;
            if (r * share + i < count) d[r] = load_four(peers[RANK] + GATHER_AT + half + r * (u64)SHARE_ROW + (u64)i * 16);
        }
        since = 0;
#pragma unroll
        for (int k = 1; k < WORLD; ++k) {
            const int r = (RANK + k) % WORLD;
            const u32 n = r * share + i;
            if (n >= count) continue;
            u8 *from = peers[RANK] + GATHER_AT + half + r * (u64)SHARE_ROW + (u64)i * 16;
            while (!has_come(d[r])) {
                if (MUST_GIVE_UP(r, since)) return;
                d[r] = load_four(from);
            }
            *(uint4 *)from = uint4{0, 0, 0, 0};
            const uint4 o = {result_of(d[r].x), result_of(d[r].y), result_of(d[r].z), result_of(d[r].w)};
            store<uint4>((u8 *)out + (u64)n * 16, o, nbytes - (u64)n * 16, is_aligned);
        }
    }
    leave();
}
#endif

// -- all-reduce, a residual added, and RMSNorm: what a decoding layer does after each of its halves ----------------------
// A block takes a row at a time, so that its threads know the sum of its squares: `width` bytes, a multiple of 16, in at
// most ROW_UNITS pieces of 16 for each thread. As by separate kernels, the sum over the ranks is rounded, and that with
// the residual added is rounded; squares are summed in 32 bits, in an order that is the same on all ranks and on both
// ways. `out` may be `in`, and `total` (what the next layer adds) may be `residual`.
#define ROW_UNITS 4

#if KIND == 0
DEVICE u32 added(u32 w, u32 v) { return __float_as_uint(__uint_as_float(w) + __uint_as_float(v)); }
DEVICE float with_squares(float sum, u32 w) { return sum + __uint_as_float(w) * __uint_as_float(w); }
DEVICE u32 scaled(u32 w, u32 v, float scale) { return __float_as_uint(__uint_as_float(w) * scale * __uint_as_float(v)); }
#else
DEVICE u32 added(u32 w, u32 v) {
    float a, b, c, d;
    unpack(w, a, b), unpack(v, c, d);
    return pack(a + c, b + d);
}
DEVICE float with_squares(float sum, u32 w) {
    float a, b;
    unpack(w, a, b);
    return sum + a * a + b * b;
}
DEVICE u32 scaled(u32 w, u32 v, float scale) {
    float a, b, c, d;
    unpack(w, a, b), unpack(v, c, d);
    return pack(a * scale * c, b * scale * d);
}
#endif

// Sum a number of each thread of the block up; the same bits in all. False if one of them has failed.
DEVICE bool sum_of_block(float mine, bool has_failed, float &sum) {
    SHARED(float, warps, 32);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    if (__syncthreads_or(has_failed)) return false;
    sum = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; ++warp) sum += warps[warp];
    __syncthreads();  // all have read: the next row writes there again
    return true;
}

// Wait for 16 bytes of each other rank. False if some did not come.
template <bool IN_PACKETS> DEVICE bool receive(Run &run, u8 *own, u64 at, uint4 (&d)[WORLD]) {
    u64 since = 0;
    if (IN_PACKETS) {
        const u64 half = (run.call & 1) * (u64)WORLD * LL_ROW;
        for (;;) {
            int late = -1;
#pragma unroll
            for (int r = 0; r < WORLD; ++r) {
                if (r == RANK) continue;
                const u8 *from = own + half + r * (u64)LL_ROW + at * 2;
                u64 a, b, c, e;
                load_packet(from, a, b);
                load_packet(from + 16, c, e);
                if (a >> 32 != run.call || b >> 32 != run.call || c >> 32 != run.call || e >> 32 != run.call) late = r;
                d[r] = uint4{(u32)a, (u32)b, (u32)c, (u32)e};
            }
            if (late < 0) return true;
            if (MUST_GIVE_UP(late, since)) return false;
        }
    } else {
        const u64 half = PUSH_AT + (run.call & 1) * (u64)WORLD * PUSH_ROW;
#pragma unroll
        for (int r = 0; r < WORLD; ++r)
            if (r != RANK) d[r] = load_four(own + half + r * (u64)PUSH_ROW + at);
#pragma unroll
        for (int r = 0; r < WORLD; ++r) {
            if (r == RANK) continue;
            u8 *from = own + half + r * (u64)PUSH_ROW + at;
            while (!has_come(d[r])) {
                if (MUST_GIVE_UP(r, since)) return false;
                d[r] = load_four(from);
            }
            *(uint4 *)from = uint4{0, 0, 0, 0};  // ready for the next call but one
        }
        return true;
    }
}

template <bool IN_PACKETS>
DEVICE void reduce_and_normalize(Run &run, u8 *const (&peers)[WORLD], const u8 *in, const u8 *residual, const u8 *weight,
                                 u8 *out, u8 *total, u32 rows, u32 width, float epsilon) {
    const u32 units = width / 16;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        for (u32 i = threadIdx.x; i < units; i += blockDim.x) {
            const u64 at = (u64)row * width + (u64)i * 16;
            const uint4 d = *(const uint4 *)(in + at);
#pragma unroll
            for (int k = 1; k < WORLD; ++k) {
                u8 *const to = peers[(RANK + k) % WORLD];
                if (IN_PACKETS) {
                    const u64 tag = (u64)run.call << 32, half = (run.call & 1) * (u64)WORLD * LL_ROW;
                    store_packet(to + half + RANK * (u64)LL_ROW + at * 2, tag | d.x, tag | d.y);
                    store_packet(to + half + RANK * (u64)LL_ROW + at * 2 + 16, tag | d.z, tag | d.w);
                } else {
                    const u64 half = PUSH_AT + (run.call & 1) * (u64)WORLD * PUSH_ROW;
                    store_four(to + half + RANK * (u64)PUSH_ROW + at,
                               uint4{visible(d.x), visible(d.y), visible(d.z), visible(d.w)});
                }
            }
        }
    }
    sweep(run, peers[RANK], IN_PACKETS ? rows * units * 2 : 0, 0);
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        uint4 sums[ROW_UNITS], weights[ROW_UNITS];
        float squares = 0, all;
        bool has_failed = false;
#pragma unroll
        for (int u = 0; u < ROW_UNITS; ++u) {
            const u32 i = threadIdx.x + u * blockDim.x;
            if (i >= units || has_failed) continue;
            const u64 at = (u64)row * width + (u64)i * 16;
            weights[u] = *(const uint4 *)(weight + (u64)i * 16);
            const uint4 before = *(const uint4 *)(residual + at);
            uint4 d[WORLD], o;
            d[RANK] = *(const uint4 *)(in + at);
            if (!receive<IN_PACKETS>(run, peers[RANK], at, d)) {
                has_failed = true;
                continue;
            }
            REDUCE_FOUR(o, d);
            o = uint4{added(o.x, before.x), added(o.y, before.y), added(o.z, before.z), added(o.w, before.w)};
            *(uint4 *)(total + at) = o;
            sums[u] = o;
            squares = with_squares(with_squares(with_squares(with_squares(squares, o.x), o.y), o.z), o.w);
        }
        if (!sum_of_block(squares, has_failed, all)) return;
        const float scale = 1.0f / sqrtf(all / (width / ELEMENT) + epsilon);
#pragma unroll
        for (int u = 0; u < ROW_UNITS; ++u) {
            const u32 i = threadIdx.x + u * blockDim.x;
            if (i >= units) continue;
            const uint4 o = sums[u], w = weights[u];
            *(uint4 *)(out + (u64)row * width + (u64)i * 16) =
                uint4{scaled(o.x, w.x, scale), scaled(o.y, w.y, scale), scaled(o.z, w.z, scale), scaled(o.w, w.w, scale)};
        }
    }
    leave();
}

#define NORM u64 in, u64 residual, u64 weight, u64 out, u64 total, u64 rows, u64 width, u64 epsilon
#define NORM_LIST                                                                                              \
    (const u8 *)in, (const u8 *)residual, (const u8 *)weight, (u8 *)out, (u8 *)total, (u32)rows, (u32)width, \
        __uint_as_float((u32)epsilon)
extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_norm_packets(PEERS, COMMON, NORM) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (enter(run)) reduce_and_normalize<true>(run, peers, NORM_LIST);
}
extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_norm_push(PEERS, COMMON, NORM) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (enter(run)) reduce_and_normalize<false>(run, peers, NORM_LIST);
}
#endif

// -- words of blocks: a block meets those of its number on all ranks ----------------------------------------------------
DEVICE u32 *flag(u8 *workspace, const Run &run, int which, int from) {
    return (u32 *)(workspace + FLAGS_AT) + (((run.call & 1) * 2 + which) * BLOCKS + blockIdx.x) * 32 + from;
}

// Wait until the same block of all ranks has come here. `orders`: what this block wrote is seen by those who wait.
// False if some did not come.
DEVICE bool meet(Run &run, u8 *const (&peers)[WORLD], int which, bool orders) {
    bool has_failed = false;
    __syncthreads();
    if (threadIdx.x < WORLD && threadIdx.x != RANK) {
        const int rank = threadIdx.x;
        u8 *theirs = peers[0];
#pragma unroll
        for (int r = 1; r < WORLD; ++r)
            if (r == rank) theirs = peers[r];
        if (orders)
            store_release(flag(theirs, run, which, RANK), run.call);
        else
            store_relaxed(flag(theirs, run, which, RANK), run.call);
        const u32 *said = flag(peers[RANK], run, which, rank);
        u64 since = 0;
        while (load_acquire(said) != run.call)  // nobody goes further before this rank has: the word stays
            if (MUST_GIVE_UP(rank, since)) {
                has_failed = true;
                break;
            }
    }
    return !__syncthreads_or(has_failed);
}

extern "C" __global__ void __launch_bounds__(64, 1) barrier(PEERS, COMMON) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    if (!enter(run)) return;
    sweep(run, peers[RANK], 0, gridDim.x);
    meet(run, peers, 0, true);
    leave();
}

// -- two shots, by loads and stores: each rank reduces its share of all arrays, and writes it to all --------------------
// In place or not. Each element is read and written by one rank, after all have come and before any goes.
#define SHARE_UNROLL (WORLD <= 2 ? 4 : WORLD <= 6 ? 2 : 1)
template <bool TO_ALL>
DEVICE bool reduce_share(Run &run, u8 *const (&peers)[WORLD], u8 *const (&rows)[WORLD], u8 *const (&outs)[WORLD],
                         u64 begin, u64 end, u64 shift, bool has_written) {
    const bool is_aligned = (begin & 15) == 0;  // the arrays themselves are
    if (!meet(run, peers, 0, has_written)) return false;
    const u64 step = (u64)THREADS * 16;
    for (u64 first = begin + (u64)THREAD * 16; first < end; first += step * SHARE_UNROLL) {
        uint4 d[SHARE_UNROLL][WORLD];
#pragma unroll
        for (int u = 0; u < SHARE_UNROLL; ++u) {
            const u64 at = first + u * step;
            if (at >= end) continue;
#pragma unroll
            for (int k = 0; k < WORLD; ++k) {
                constexpr int own = RANK;
                const int r = (own + k) % WORLD;
                d[u][r] = load<uint4>(rows[r] + at, end - at, is_aligned);
            }
        }
#pragma unroll
        for (int u = 0; u < SHARE_UNROLL; ++u) {
            const u64 at = first + u * step;
            if (at >= end) continue;
            uint4 o;
            REDUCE_FOUR(o, d[u]);
            if (TO_ALL) {
#pragma unroll
                for (int k = 0; k < WORLD; ++k) store<uint4>(outs[(RANK + k) % WORLD] + at, o, end - at, true);
            } else {
                store<uint4>(outs[RANK] + at - shift, o, end - at, ((u64)outs[RANK] & 15) == 0);
            }
        }
    }
    return meet(run, peers, 1, TO_ALL);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    all_reduce_shares(PEERS, COMMON, ROWS, OUTS, u64 nbytes) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    u8 *const rows[WORLD] = {ROW_LIST};
    u8 *const outs[WORLD] = {OUT_LIST};
    if (!enter(run)) return;
    sweep(run, peers[RANK], 0, gridDim.x);
    const u64 share = ((nbytes + 15) / 16 + WORLD - 1) / WORLD * 16;
    const u64 begin = min(share * RANK, nbytes), end = min(share * (RANK + 1), nbytes);
    if (reduce_share<true>(run, peers, rows, outs, begin, end, 0, false)) leave();
}

// -- the same for arrays that a graph was captured with before other ranks knew them ---------------------------------------
// What is known of them is looked up when the kernel runs: `entry` holds whether all ranks have them mapped, and then where
// (arrays of all ranks, then results). Fresh memory holds zeros: until then, or for good, each piece goes through the
// workspace, and the launches of one array are as many as it has pieces. Once it is known the first one of them does all,
// and the others nothing: they take no number, and all ranks agree on it. A thread copies in and out what threads of its
// own number reduce, on whichever rank, so that blocks of one number have to meet, and no others.
extern "C" __global__ void __launch_bounds__(512, 1)
    all_reduce_entry(PEERS, COMMON, u64 entry, u64 in, u64 out, u64 start, u64 part, u64 nbytes) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    wait_for_the_kernel_before();  // also where there is nothing to do: the next kernel counts on all before this one
    const volatile u64 *known = (const u64 *)entry;
    const bool is_known = known[0] != 0;
    if (is_known && start != 0) return;
    if (!enter(run)) return;
    sweep(run, peers[RANK], 0, gridDim.x);
    u8 *rows[WORLD], *outs[WORLD];
#pragma unroll
    for (int r = 0; r < WORLD; ++r) {
        rows[r] = is_known ? (u8 *)known[1 + r] : peers[r] + STAGED_AT;
        outs[r] = is_known ? (u8 *)known[1 + WORLD + r] : peers[r] + STAGED_AT;
    }
    const u64 count = is_known ? nbytes : part, share = ((count + 15) / 16 + WORLD - 1) / WORLD * 16;
    const u64 begin = min(share * RANK, count), end = min(share * (RANK + 1), count), step = (u64)THREADS * 16;
    u8 *const staged = peers[RANK] + STAGED_AT;
    const u8 *const from = (const u8 *)in + start;
    u8 *const to = (u8 *)out + start;
    if (!is_known)
        for (int r = 0; r < WORLD; ++r)
            for (u64 at = share * r + (u64)THREAD * 16; at < min(share * (r + 1), count); at += step)
                *(uint4 *)(staged + at) = load<uint4>(from + at, count - at, ((u64)from & 15) == 0);
    if (!reduce_share<true>(run, peers, rows, outs, begin, end, 0, !is_known)) return;
    if (!is_known)
        for (int r = 0; r < WORLD; ++r)
            for (u64 at = share * r + (u64)THREAD * 16; at < min(share * (r + 1), count); at += step)
                store<uint4>(to + at, *(const uint4 *)(staged + at), count - at, ((u64)to & 15) == 0);
    leave();
}

// Each rank gets its part of the result: `part` bytes from RANK * part on.
extern "C" __global__ void __launch_bounds__(512, 1) reduce_scatter(PEERS, COMMON, ROWS, u64 out, u64 part) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    u8 *const rows[WORLD] = {ROW_LIST};
    if (!enter(run)) return;
    sweep(run, peers[RANK], 0, gridDim.x);
    u8 *outs[WORLD];
    outs[RANK] = (u8 *)out;
    if (reduce_share<false>(run, peers, rows, outs, RANK * part, RANK * part + part, RANK * part, false)) leave();
}

// -- each rank takes what it wants of the others: of all a part, one behind the other, or of one alone ------------------
DEVICE void copy(u8 *to, const u8 *from, u64 nbytes) {
    const u64 step = THREADS;
    const bool is_aligned = (((u64)to | (u64)from) & 15) == 0;
    const u64 whole = is_aligned ? nbytes / 16 : 0;
    u64 i = THREAD;
    for (; i + 3 * step < whole; i += 4 * step) {
        uint4 d[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) d[u] = ((const uint4 *)from)[i + u * step];
#pragma unroll
        for (int u = 0; u < 4; ++u) ((uint4 *)to)[i + u * step] = d[u];
    }
    for (; i < whole; i += step) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    for (u64 at = whole * 16 + THREAD; at < nbytes; at += step) to[at] = from[at];
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fetch(PEERS, COMMON, ROWS, u64 out, u64 part, u64 offset, u64 only) {
    RUN(run);
    u8 *const peers[WORLD] = {PEER_LIST};
    u8 *const rows[WORLD] = {ROW_LIST};
    if (!enter(run)) return;
    sweep(run, peers[RANK], 0, gridDim.x);
    if (!meet(run, peers, 0, false)) return;
#pragma unroll
    for (int k = 0; k < WORLD; ++k) {
        const int r = (RANK + k) % WORLD;
        u8 *const to = (u8 *)out + (only < WORLD ? 0 : r * part);
        if ((only >= WORLD || only == r) && to != rows[r] + offset) copy(to, rows[r] + offset, part);
    }
    if (meet(run, peers, 1, false)) leave();
}
