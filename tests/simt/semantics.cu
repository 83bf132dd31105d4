// Small kernels whose right answer Python knows: one for each operation that simt.h supplies.
#include "common.cuh"

// ---- warps -----------------------------------------------------------------------------------------------------
// Lanes of `mask` take part, the others do something else; the rest of out stays as it is.
template <class T, int WIDTH> __global__ void shuffle(const T* in, const int* argument, T* out, unsigned mask, int operation) {
    const int lane = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    const T x = in[lane];
    const int a = argument[lane];
    T y = x;
    if (operation == 0) y = __shfl_sync(mask, x, a, WIDTH);
    if (operation == 1) y = __shfl_xor_sync(mask, x, argument[0], WIDTH);
    if (operation == 2) y = __shfl_up_sync(mask, x, argument[0], WIDTH);
    if (operation == 3) y = __shfl_down_sync(mask, x, argument[0], WIDTH);
    out[lane] = y;
}
// Two groups of lanes, each in an operation of its own at the same time.
__global__ void votes(const unsigned* in, unsigned* out, unsigned mask) {
    const unsigned lane = threadIdx.x, x = in[lane];
    const unsigned own = mask >> lane & 1 ? mask : ~mask;
    int same = 0;
    unsigned* to = out + 16 * lane;
    to[0] = __ballot_sync(own, x & 1);
    to[1] = __any_sync(own, x & 1);
    to[2] = __all_sync(own, x & 1);
    to[3] = __match_any_sync(own, x);
    to[4] = __match_all_sync(own, x, &same);
    to[5] = same;
    to[6] = __reduce_add_sync(own, x);
    to[7] = __reduce_min_sync(own, x);
    to[8] = __reduce_max_sync(own, x);
    to[9] = __reduce_and_sync(own, x);
    to[10] = __reduce_or_sync(own, x);
    to[11] = __reduce_xor_sync(own, x);
    to[12] = (unsigned)__reduce_min_sync(own, (int)x);
    to[13] = (unsigned)__reduce_max_sync(own, (int)x);
    to[14] = (unsigned)__reduce_add_sync(own, (int)x);
}
// Full mask although some lanes have ended, and a block that is no multiple of 32.
__global__ void sum_of_the_living(const int* in, int* out, int ended) {
    if ((int)threadIdx.x % 32 < ended) return;
    out[threadIdx.x] = __reduce_add_sync(ALL, in[threadIdx.x]);
}
__global__ void exchange_by_syncwarp(const int* in, int* out) {
    __shared__ int s[64];
    s[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    const int other = s[threadIdx.x ^ 31];
    __syncwarp();
    s[threadIdx.x] = other + 1;
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ 31];
}

// ---- blocks ----------------------------------------------------------------------------------------------------
__global__ void block_votes(const int* in, int* out, int ended) {
    const int t = threadIdx.x;
    if (t < ended) return;
    out[4 * t] = __syncthreads_count(in[t]);
    out[4 * t + 1] = __syncthreads_and(in[t]);
    out[4 * t + 2] = __syncthreads_or(in[t]);
    __syncthreads();
    out[4 * t + 3] = __syncthreads_count(in[t] == 0);
}
template <class T> __global__ void reverse(const T* in, T* out, int n) {       // static and dynamic shared memory together
    extern __shared__ uint4 smem[];
    __shared__ T last[2];
    T* s = reinterpret_cast<T*>(smem);
    for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = in[i];
    if (threadIdx.x == 0) last[0] = in[n - 1], last[1] = in[0];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = s[n - 1 - i];
    if (threadIdx.x == blockDim.x - 1) out[n] = last[0], out[n + 1] = last[1];
}
__global__ void unwritten_shared(unsigned* out) {
    __shared__ unsigned s[32];
    if (threadIdx.x >= 32) s[threadIdx.x % 32] = 1;
    out[threadIdx.x + blockIdx.x * 32] = s[threadIdx.x];
}
__global__ void indices(unsigned* out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned size = blockDim.x * blockDim.y * blockDim.z;
    out[block * size + thread] = 1 + block * size + thread;
}
__global__ void tickets(unsigned* counter, unsigned* out) {        // each thread's turn: the order of threads and blocks, seen
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = atomicAdd(counter, 1u);
}
__global__ void turns(unsigned* counter, unsigned* out) {          // the same after a barrier
    __syncthreads();
    out[threadIdx.x] = atomicAdd(counter, 1u);
}
__global__ void locked(unsigned* lock, unsigned* sum) {            // a lock taken by spinning; atomics inside, so no race
    bool done = false;
    while (!done)
        if (atomicCAS(lock, 0u, 1u) == 0u) {
            const unsigned old = atomicAdd(sum, 0u);
            atomicExch(sum, old + 1);
            atomicExch(lock, 0u);
            done = true;
        }
}

// ---- atomics ---------------------------------------------------------------------------------------------------
template <class T> __global__ void atomics(const T* in, T* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const T x = in[i];
    atomicAdd(&out[0], x);
    atomicMin(&out[1], x);
    atomicMax(&out[2], x);
    atomicAnd(&out[3], x);
    atomicOr(&out[4], x);
    atomicXor(&out[5], x);
    atomicExch(&out[6], x);
    atomicCAS(&out[7], T(0), x);
}
__global__ void atomics_of_unsigned(const unsigned* in, unsigned* out, unsigned most) {
    atomicSub(&out[0], in[threadIdx.x]);
    atomicInc(&out[1], most);
    atomicDec(&out[2], most);
}
template <class T> __global__ void atomic_sum(const T* in, T* out) { atomicAdd(out, in[threadIdx.x]); }

// ---- arithmetic ------------------------------------------------------------------------------------------------
__global__ void integers(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* out) {
    const unsigned x = a[threadIdx.x], y = b[threadIdx.x], z = c[threadIdx.x];
    const unsigned long long w = (unsigned long long)x << 32 | y, v = (unsigned long long)y << 32 | z;
    unsigned* to = out + 32 * threadIdx.x;
    to[0] = __popc(x), to[1] = __clz((int)x), to[2] = __ffs((int)x), to[3] = __brev(x);
    to[4] = __popcll(w), to[5] = __clzll((long long)w), to[6] = __ffsll((long long)w), to[7] = (unsigned)(__brevll(w) >> 32);
    to[8] = __funnelshift_l(x, y, z), to[9] = __funnelshift_r(x, y, z), to[10] = __funnelshift_lc(x, y, z & 63), to[11] = __funnelshift_rc(x, y, z & 63);
    to[12] = __byte_perm(x, y, z), to[13] = __umulhi(x, y), to[14] = (unsigned)__mulhi((int)x, (int)y);
    to[15] = __dp4a(x, y, z), to[16] = (unsigned)(__umul64hi(w, v) >> 32), to[17] = (unsigned)__umul64hi(w, v);
    to[18] = min(x, y), to[19] = max(x, y), to[20] = (unsigned)min((int)x, (int)y), to[21] = (unsigned)max((int)x, (int)y);
    to[22] = __float_as_uint(__uint_as_float(x)), to[23] = (unsigned)(__mul64hi((long long)w, (long long)v) >> 32);
    to[24] = (unsigned)__mul64hi((long long)w, (long long)v);
}
__global__ void conversions(const float* in, int* to_int, unsigned* to_unsigned, long long* to_long) {
    const float x = in[threadIdx.x];
    const int i = threadIdx.x;
    to_int[4 * i] = __float2int_rn(x), to_int[4 * i + 1] = __float2int_rz(x), to_int[4 * i + 2] = __float2int_rd(x), to_int[4 * i + 3] = __float2int_ru(x);
    to_unsigned[2 * i] = __float2uint_rn(x), to_unsigned[2 * i + 1] = __float2uint_rz(x);
    to_long[i] = __float2ll_rn(x);
}
__global__ void two_roundings(const float* a, const float* b, const float* c, float* out) {        // no fused multiply-add
    const int i = threadIdx.x;
    out[i] = a[i] * b[i] + c[i];
    out[i + blockDim.x] = a[i] / b[i];
    out[i + 2 * blockDim.x] = sqrtf(fabsf(a[i]));
    out[i + 3 * blockDim.x] = fmaf(a[i], b[i], c[i]);
}
template <class T> __global__ void fused(const T* a, const T* b, const T* c, T* out) {
    out[threadIdx.x] = __hfma(a[threadIdx.x], b[threadIdx.x], c[threadIdx.x]);
}
template <class T> __global__ void to_and_fro(const float* in, T* narrow, float* back) {
    narrow[threadIdx.x] = from_float<T>(in[threadIdx.x]);
    back[threadIdx.x] = to_float(narrow[threadIdx.x]);
}

// ---- common.cuh ------------------------------------------------------------------------------------------------
template <class T> __global__ void reductions(const T* in, T* out) {
    const T x = in[threadIdx.x];
    out[3 * threadIdx.x] = warp_sum(x), out[3 * threadIdx.x + 1] = warp_max(x), out[3 * threadIdx.x + 2] = warp_min(x);
}
template <class T, int N> __global__ void vectors(const T* in, T* out) { store(out + N * threadIdx.x, load<N>(in + N * threadIdx.x)); }
__global__ void test_finite(const float* in, int* out) { out[threadIdx.x] = is_finite(in[threadIdx.x]); }

// ---- arguments -------------------------------------------------------------------------------------------------
struct Pair { int a; float b; };
__global__ void every_type(bool yes, char c, unsigned char u, short s, int i, unsigned w, long long l, float f, double d, Pair p, double* out) {
    const double all[] = {(double)yes, (double)c, (double)u, (double)s, (double)i, (double)w, (double)l, (double)f, d, (double)p.a, (double)p.b};
    for (int k = 0; k < 11; ++k) out[k] = all[k];
}
__global__ void write_at(unsigned char* x, int at) { if (threadIdx.x == 0) x[at] = 7; }
__global__ void add_one(const int* in, int* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] + 1;
}
