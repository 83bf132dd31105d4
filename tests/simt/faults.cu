// Kernels that each break one rule of CUDA; test_faults.py asks that each is named, at the line marked below.
// A line that must be named ends in a comment: FAULT kernel
#include <cuda_fp16.h>

constexpr unsigned ALL = 0xffffffffu;

__global__ void past_end(float* x) {
    if (blockIdx.x == 0) x[threadIdx.x + 1] = 1;                                    // FAULT past_end
}
__global__ void before_start(const float* x, float* y) {
    y[threadIdx.x] = x[(int)threadIdx.x - 1];                                       // FAULT before_start
}
__global__ void far_away(float* x) {
    x[(1ll << 33) + threadIdx.x] = 1;                                               // FAULT far_away
}
__global__ void past_dynamic(float* x) {
    extern __shared__ uint4 smem[];
    float* s = reinterpret_cast<float*>(smem);
    s[threadIdx.x] = x[threadIdx.x];                                                // FAULT past_dynamic
}
__global__ void into_next_variable(float* x, int n) {
    __shared__ float first[64];
    __shared__ float second[64];
    second[threadIdx.x] = 0;
    __syncthreads();
    float* p = first;
    p[threadIdx.x + n] = 1;                                                         // FAULT into_next_variable
    __syncthreads();
    x[threadIdx.x] = second[threadIdx.x];
}
__global__ void row_too_long(float* x, int n) {
    __shared__ float tile[4][16];
    for (int i = 0; i < n; ++i) tile[threadIdx.x / 16][i] = x[i];                   // FAULT row_too_long
    __syncthreads();
    x[threadIdx.x] = tile[0][threadIdx.x / 4];
}
__global__ void local_array(float* x, int n) {
    float v[4] = {x[0], x[1], x[2], x[3]};
    x[threadIdx.x] = v[n];                                                          // FAULT local_array
}
__global__ void race_shared(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    s[threadIdx.x] = 1;                                                             // FAULT race_shared
    const float v = s[63 - threadIdx.x];                                            // FAULT race_shared
    __syncthreads();
    x[threadIdx.x] = v;
}
__global__ void race_warp(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncwarp();
    s[threadIdx.x] = 1;                                                             // FAULT race_warp
    const float v = s[threadIdx.x ^ 1];                                             // FAULT race_warp
    __syncwarp();
    if (blockIdx.x == 0) x[threadIdx.x] = v;
}
__global__ void race_after_shuffle(float* x) {      // a shuffle orders no memory
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncwarp();
    s[threadIdx.x] = 1;                                                             // FAULT race_after_shuffle
    const float one = __shfl_xor_sync(ALL, 1.0f, 1);
    const float v = s[threadIdx.x ^ 1];                                             // FAULT race_after_shuffle
    __syncthreads();
    if (blockIdx.x == 0) x[threadIdx.x] = v + one;
}
__global__ void race_of_warps(float* x) {           // __syncwarp orders one warp only
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    s[threadIdx.x] = 1;                                                             // FAULT race_of_warps
    __syncwarp();
    const float v = s[63 - threadIdx.x];                                            // FAULT race_of_warps
    __syncthreads();
    if (blockIdx.x == 0) x[threadIdx.x] = v;
}
__global__ void race_blocks(float* x) {
    if (threadIdx.x == 0) x[0] += 1;                                                // FAULT race_blocks
}
__global__ void race_read_blocks(float* x, float* y) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) y[0] = x[0];                                               // FAULT race_read_blocks
    else x[0] = 2;                                                                  // FAULT race_read_blocks
}
__global__ void race_mixed(unsigned* x) {
    atomicAdd(x, 1u);                                                               // FAULT race_mixed
    if (threadIdx.x == 5) x[0] = 0;                                                 // FAULT race_mixed
}
__global__ void race_late(unsigned* x) {            // many readers, and a writer after a barrier, but of another block
    const unsigned seen = x[0];                                                     // FAULT race_late
    __syncthreads();
    if (threadIdx.x == 0 && seen < 5) x[0] = 0;                                     // FAULT race_late
}
__global__ void race_plain_after_atomic(unsigned* x) {
    atomicOr(&x[threadIdx.x / 2], 1u);                                              // FAULT race_plain_after_atomic
    __syncwarp(3u << (threadIdx.x / 2 * 2 % 32));
    if (x[threadIdx.x / 2 ^ 1] == 7) x[63] = 1;                                     // FAULT race_plain_after_atomic
}
__global__ void race_bytes(unsigned char* x) {      // two threads, one byte; its neighbours are nobody's business
    x[threadIdx.x == 9 ? 8 : threadIdx.x] = 1;                                      // FAULT race_bytes
}
__global__ void uninitialised(float* x) {
    __shared__ float s[64];
    if (threadIdx.x) s[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];                                                // FAULT uninitialised
}
__global__ void divergent_barrier(float* x) {
    if (threadIdx.x < 32) __syncthreads();                                          // FAULT divergent_barrier
    else
        __syncthreads();                                                            // FAULT divergent_barrier
    x[threadIdx.x] = 1;
}
__global__ void missing_lane(float* x) {
    if (threadIdx.x != 3) x[threadIdx.x] = __shfl_xor_sync(ALL, 1.0f, 1);           // FAULT missing_lane
    else __syncthreads();                                                           // FAULT missing_lane
}
__global__ void barrier_in_loop(float* x) {         // half of the threads pass one barrier more, then wait for nobody
    for (unsigned i = 0; i < 1 + threadIdx.x / 32; ++i) {
        __syncthreads();
        if (threadIdx.x < 32) __syncwarp();
    }
    if (threadIdx.x == 40) __syncwarp(1u << 8 | 1u << 9);                           // FAULT barrier_in_loop
    else if (threadIdx.x >= 32) __syncthreads();                                    // FAULT barrier_in_loop
    x[threadIdx.x] = 1;
}
__global__ void wrong_mask(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1);                             // FAULT wrong_mask
}
__global__ void two_masks(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(threadIdx.x & 1 ? ALL : 0xfffffffdu | 1u << (threadIdx.x & 31), 1.0f, 1);    // FAULT two_masks
}
__global__ void inactive_lane(float* x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 16);      // FAULT inactive_lane
}
__global__ void exited_lane(float* x) {
    if (threadIdx.x % 32 == 7) return;
    x[threadIdx.x] = __shfl_sync(ALL, 1.0f, 7);                                     // FAULT exited_lane
}
__global__ void wrong_width(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(ALL, 1.0f, 1, 12);                             // FAULT wrong_width
}
__global__ void misaligned_atomic(unsigned char* x) {
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned*>(x + 2), 1u);        // FAULT misaligned_atomic
}
__global__ void copied_past_end(const float* x, float* y) {
    if (blockIdx.x == 0 && threadIdx.x == 0) memcpy(y, x, 65 * sizeof(float));      // FAULT copied_past_end
}
__global__ void active_mask(float* x) {
    x[threadIdx.x] = (float)__activemask();                                         // FAULT active_mask
}
__global__ void misaligned(const unsigned* x, unsigned* y) {
    if (blockIdx.x + threadIdx.x == 0)
        *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(x + 1);      // FAULT misaligned
}
__global__ void read_only(const float* x) {
    const_cast<float*>(x)[0] = 1;                                                   // FAULT read_only
}
__global__ void shift_too_far(unsigned* x, int n) {
    x[threadIdx.x] = 1u << n;                                                       // FAULT shift_too_far
}
__global__ void signed_overflow(int* x, int n) {
    x[threadIdx.x] = n * 65536;                                                     // FAULT signed_overflow
}
__global__ void cast_overflow(int* x, float f) {
    x[threadIdx.x] = (int)f;                                                        // FAULT cast_overflow
}
__global__ void divided_by_zero(int* x, int n) {
    x[threadIdx.x] = 7 / n;                                                         // FAULT divided_by_zero
}
__global__ void endless(volatile int* x) {
    while (x[0] == 0) {}                                                            // FAULT endless
}
__global__ void endless_spin(unsigned* lock) {      // thread 0 never gives the lock back
    while (atomicCAS(lock, 0u, 1u) != 0u) {}                                        // FAULT endless_spin
}
__device__ __noinline__ int deep(volatile int* x, int n) {
    volatile int room[256];
    room[n % 256] = n;                                                              // FAULT stack_overflow
    return n == 0 ? 0 : deep(x, n - 1) + room[n % 256];                             // FAULT stack_overflow
}
__global__ void stack_overflow(int* x, int n) { x[threadIdx.x] = deep(x, n); }
__global__ void other_stack(float* x) {             // a pointer to another thread's local variable
    __shared__ float* p;
    float mine = 1;
    if (threadIdx.x == 0) p = &mine;
    __syncthreads();
    if (threadIdx.x == 1) x[0] = *p;                                                // FAULT other_stack
    __syncthreads();
    x[threadIdx.x + 2] = mine;
}
__global__ void trap(float* x) {
    if (x[threadIdx.x] == 0) __trap();                                              // FAULT trap
}
