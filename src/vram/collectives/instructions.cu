// What kernels.cu asks of a GPU in the GPU's own language: accesses that all GPUs see, conversions, the clock, the kernels
// before and after. It stands in front of kernels.cu. Everything of PTX is here, so that a test can put functions of the
// same names in its place, and run the kernels themselves on a processor (tests/support/emulated_gpu.h).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]  // by the threads of a block

// -- words and packets, seen by all GPUs ------------------------------------------------------------------------------
// Each half of a .v2.b64 access is one access of 8 bytes to the memory model: its data and its number arrive together.
DEVICE void store_packet(u8 *at, u64 low, u64 high) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(low), "l"(high) : "memory");
}
DEVICE void load_packet(const u8 *at, u64 &low, u64 &high) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(at) : "memory");
}
DEVICE void store_four(u8 *at, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE uint4 load_four(const u8 *at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
DEVICE u32 load_relaxed(const u32 *at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE u32 load_acquire(const u32 *at) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE void store_relaxed(u32 *at, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
DEVICE void store_release(u32 *at, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// -- kernels of the same stream, which may begin before the one before them has ended (PTX ISA, griddepcontrol) ----------
DEVICE void wait_for_the_kernel_before() {
#ifdef DEPENDENT
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_the_next_kernel_begin() {
#ifdef DEPENDENT
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- floats -----------------------------------------------------------------------------------------------------------
// With a NaN among them the result is one, and -0.0 is less than 0.0.
DEVICE float least(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
DEVICE float greatest(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// Two of 16 bits in a word, the first one in its low half; rounded to the nearest, ties to even.
DEVICE void float16_unpack(u32 w, float &a, float &b) {
    asm("{.reg .b16 p, q; mov.b32 {p, q}, %2; cvt.f32.f16 %0, p; cvt.f32.f16 %1, q;}" : "=f"(a), "=f"(b) : "r"(w));
}
DEVICE u32 float16_pack(float a, float b) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
    return w;
}
DEVICE u32 bfloat16_pack(float a, float b) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(b), "f"(a));
    return w;
}
