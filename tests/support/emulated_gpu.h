// A GPU, played by one thread of a processor, for src/vram/collectives/kernels.cu: it takes the place of instructions.cu.
//
// Every thread of a kernel is a fiber. Wherever it touches memory that other ranks touch, meets its block or asks for the
// time, another one may go on: which, a generator of random numbers says, so that a schedule is repeated by its seed. One
// rank is often far ahead of the others, which is where protocols break. Accesses are seen by all at once and in order:
// what is tested is the protocol and the arithmetic, and not the order of memory.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct Index {
    u32 x;
};

#define DEVICE static inline
#define __device__
#define __global__ static
#define __noinline__
#define __launch_bounds__(...)
#define SHARED(type, name, count) type *const name = (type *)gpu::current->block->shared
#define threadIdx (gpu::current->index)
#define blockIdx (gpu::current->block->index)
#define blockDim (gpu::current->block->size)
#define gridDim (gpu::current->block->grid)

namespace gpu {
struct Block {
    Index index, size, grid;
    int rank;
    u32 alive, arrived = 0, meeting = 0;
    bool any = false, was_any = false;
    float lanes[1024];
    u64 shared[64];
};
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Index index;
    Block *block;
    bool is_done = false;
    void (*work)(const u64 *);
    const u64 *arguments;
};
static Fiber *current;
static ucontext_t scheduler;
static u64 random_state;
static u64 generator() {  // xorshift
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1dull >> 33;
}
static u64 clock_now;

static void pass() { swapcontext(&current->context, &scheduler); }
static void touch() {
    if (generator() % 4 == 0) pass();
}
static bool meet(bool mine) {
    Block &block = *current->block;
    const u32 meeting = block.meeting;
    block.any |= mine;
    ++block.arrived;
    for (;;) {
        if (block.meeting != meeting) return block.was_any;
        if (block.arrived >= block.alive) {  // who has ended is waited for no longer
            block.was_any = block.any;
            block.any = false;
            block.arrived = 0;
            ++block.meeting;
            return block.was_any;
        }
        pass();
    }
}
static void begin() {
    Fiber *const self = current;
    self->work(self->arguments);
    self->is_done = true;
    --self->block->alive;
    pass();
}
}  // namespace gpu

static inline void __syncthreads() { gpu::meet(false); }
static inline bool __syncthreads_or(bool mine) { return gpu::meet(mine); }
static inline void __threadfence_system() {}
static inline float __shfl_xor_sync(u32, float mine, int lanes) {
    gpu::Block &block = *gpu::current->block;
    const u32 at = gpu::current->index.x;
    block.lanes[at] = mine;
    gpu::meet(false);
    const float theirs = block.lanes[at ^ lanes];
    gpu::meet(false);
    return theirs;
}
static inline u32 atomicAdd(u32 *at, u32 more) {
    gpu::touch();
    const u32 before = *at;
    *at += more;
    return before;
}
static inline u32 atomicExch(u32 *at, u32 value) {
    gpu::touch();
    return std::exchange(*at, value);
}
template <typename A, typename B> static inline auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> static inline auto max(A a, B b) { return a < b ? b : a; }
static inline float __uint_as_float(u32 w) {
    float a;
    memcpy(&a, &w, 4);
    return a;
}
static inline u32 __float_as_uint(float a) {
    u32 w;
    memcpy(&w, &a, 4);
    return w;
}

DEVICE void store_packet(u8 *at, u64 low, u64 high) {  // one half may be seen before the other
    gpu::touch();
    ((u64 *)at)[0] = low;
    gpu::touch();
    ((u64 *)at)[1] = high;
}
DEVICE void load_packet(const u8 *at, u64 &low, u64 &high) {
    gpu::touch();
    low = ((const u64 *)at)[0];
    gpu::touch();
    high = ((const u64 *)at)[1];
}
DEVICE void store_four(u8 *at, uint4 v) {
    gpu::touch();
    ((u32 *)at)[0] = v.x, ((u32 *)at)[1] = v.y;
    gpu::touch();
    ((u32 *)at)[2] = v.z, ((u32 *)at)[3] = v.w;
}
DEVICE uint4 load_four(const u8 *at) {
    gpu::touch();
    const u32 x = ((const u32 *)at)[0], y = ((const u32 *)at)[1];
    gpu::touch();
    return uint4{x, y, ((const u32 *)at)[2], ((const u32 *)at)[3]};
}
DEVICE u32 load_relaxed(const u32 *at) {
    gpu::touch();
    return *at;
}
DEVICE u32 load_acquire(const u32 *at) { return load_relaxed(at); }
DEVICE void store_relaxed(u32 *at, u32 v) {
    gpu::touch();
    *at = v;
}
DEVICE void store_release(u32 *at, u32 v) { store_relaxed(at, v); }
DEVICE u64 nanoseconds() {
    gpu::pass();
    return gpu::clock_now;
}
DEVICE void wait_for_the_kernel_before() { gpu::touch(); }
DEVICE void let_the_next_kernel_begin() {}

DEVICE float least(float a, float b) {
    if (a != a || b != b) return NAN;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
DEVICE float greatest(float a, float b) {
    if (a != a || b != b) return NAN;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
// float16 by the processor's own instructions (F16C), which round as a GPU does.
#include <immintrin.h>
DEVICE void float16_unpack(u32 w, float &a, float &b) { a = _cvtsh_ss(w & 0xffff), b = _cvtsh_ss(w >> 16); }
DEVICE u32 float16_pack(float a, float b) { return (u32)_cvtss_sh(a, 0) | (u32)_cvtss_sh(b, 0) << 16; }
DEVICE u32 bfloat16(float a) {
    const u32 w = __float_as_uint(a);
    return a != a ? 0x7fff : (w + 0x7fff + (w >> 16 & 1)) >> 16;
}
DEVICE u32 bfloat16_pack(float a, float b) { return bfloat16(a) | bfloat16(b) << 16; }

// -- what a test calls --------------------------------------------------------------------------------------------------
template <auto Kernel> struct Called;
template <typename... A, void (*Kernel)(A...)> struct Called<Kernel> {
    template <size_t... I> static void all(const u64 *arguments, std::index_sequence<I...>) {
        Kernel((A)arguments[I]...);
    }
    static void run(const u64 *arguments) { all(arguments, std::index_sequence_for<A...>{}); }
};
struct Launch {
    int rank, kernel, blocks, threads;
    u64 arguments[40];
};
typedef void (*Work)(const u64 *);

// Run launches, those of a rank one after the other. Returns 0, or 1 if that took more than so many steps: a hang.
// `slow`: a rank that is hardly ever scheduled; -1 for none.
static int run_all(const Work *kernels, int ranks, const Launch *launches, int count, u64 seed, int slow, u64 steps) {
    using namespace gpu;
    random_state = (seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    clock_now = 0;
    std::vector<std::vector<const Launch *>> queues(ranks);
    for (int i = 0; i < count; ++i) queues[launches[i].rank].push_back(&launches[i]);
    std::vector<size_t> next(ranks, 0);
    std::vector<std::vector<std::unique_ptr<Fiber>>> fibers(ranks);
    std::vector<std::vector<std::unique_ptr<Block>>> blocks(ranks);
    static std::vector<std::unique_ptr<char[]>> stacks;
    constexpr size_t stack_size = 64 << 10;
    const int favourite = generator() % ranks;
    for (u64 step = 0; step < steps; ++step) {
        std::vector<int> alive;
        for (int rank = 0; rank < ranks; ++rank) {
            if (fibers[rank].empty() && next[rank] < queues[rank].size()) {
                const Launch &launch = *queues[rank][next[rank]++];
                blocks[rank].clear();
                for (int b = 0; b < launch.blocks; ++b) {
                    auto block = std::make_unique<Block>();
                    block->index.x = b, block->size.x = launch.threads, block->grid.x = launch.blocks;
                    block->rank = rank, block->alive = launch.threads;
                    for (int t = 0; t < launch.threads; ++t) {
                        auto fiber = std::make_unique<Fiber>();
                        if (stacks.empty()) stacks.emplace_back(new char[stack_size]);
                        fiber->stack = std::move(stacks.back());
                        stacks.pop_back();
                        fiber->index.x = t, fiber->block = block.get();
                        fiber->work = kernels[launch.kernel], fiber->arguments = launch.arguments;
                        getcontext(&fiber->context);
                        fiber->context.uc_stack.ss_sp = fiber->stack.get();
                        fiber->context.uc_stack.ss_size = stack_size;
                        fiber->context.uc_link = nullptr;
                        makecontext(&fiber->context, begin, 0);
                        fibers[rank].push_back(std::move(fiber));
                    }
                    blocks[rank].push_back(std::move(block));
                }
            }
            if (!fibers[rank].empty()) alive.push_back(rank);
        }
        if (alive.empty()) return 0;
        int rank = alive[generator() % alive.size()];
        if (!fibers[favourite].empty() && generator() % 2) rank = favourite;
        if (rank == slow && alive.size() > 1 && generator() % 50) rank = alive[generator() % alive.size()];
        auto &some = fibers[rank];
        const size_t which = generator() % some.size();
        // A run of neighbours: fibers of one block often come to the same place.
        for (size_t i = which; i < some.size() && i < which + 8; ++i) {
            current = some[i].get();
            if (current->is_done) continue;
            clock_now += 10;
            swapcontext(&scheduler, &current->context);
        }
        for (size_t i = which; i < some.size() && i < which + 8;) {
            if (!some[i]->is_done) {
                ++i;
                continue;
            }
            stacks.push_back(std::move(some[i]->stack));
            std::swap(some[i], some.back());
            some.pop_back();
        }
    }
    for (auto &some : fibers)
        for (auto &fiber : some) stacks.push_back(std::move(fiber->stack));
    return 1;
}
