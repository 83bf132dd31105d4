// CUDA C++ for the host's compiler: included by force ahead of an unmodified .cu file, it gives the file CUDA's names.
//
// A CUDA thread is a fiber (simt.cpp); in the checked build every load and store of a kernel is looked at (check.cpp).
// What is declared here and compiled with the kernel is instrumented like the kernel itself: whatever the simulator reads
// or writes on its own account therefore happens in simt.cpp, behind a call.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <math.h>
#include <stdlib.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// ---- words of the language -------------------------------------------------------------------------------------
// A __shared__ variable becomes thread_local. That keeps `__shared__ T s[N];` in a function (then implicitly static),
// in a template, and `extern __shared__ uint4 smem[];` valid, and gathers all shared memory in the TLS segment of the
// library, where the checker finds one symbol for each variable.
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __shared__ thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define warpSize 32
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()      // where the caller stands

#define SIMT_INLINE inline __attribute__((always_inline))        // so that a return address lies in the kernel

namespace simt {

struct Lanes;
using Collective = void (*)(Lanes&);

struct Wait {                           // what a fiber that sleeps sleeps in
    const char *operation, *file;
    int line;
    unsigned mask, source;              // of a warp operation: who takes part, and the lane that this one reads
    uint64_t value, result;
    Collective compute;
};
struct Thread {
    uint3 index;
    unsigned linear, lane;
    Wait wait;
};
struct Grid { uint3 block_index; dim3 block, grid; };
extern Thread* self;
extern Grid grid;

struct Parameter { char kind; bool pointer, constant; uint32_t size; };     // kind: f i u h b, or x for a struct; size of the pointee
struct Buffer { void* host; size_t bytes; const char* name; uint8_t writable, tail; };
struct Variable { size_t offset, bytes; const char* name; };                // one __shared__ variable, by its place in the TLS segment
struct Launch {                         // what Python hands over; the same layout in machine.py
    uint32_t grid[3], block[3];
    size_t shared_bytes;
    Buffer* buffers; uint32_t n_buffers;
    const int32_t* buffer_of;           // for each parameter: the buffer that it points to, or -1
    void** values; const size_t* value_bytes; uint32_t n_values;
    const Variable* variables; uint32_t n_variables;
    char* stacks;
    uint64_t seed;                      // 0: threads and blocks run in order; else both are shuffled
    double seconds;                     // of processor time, after which a kernel counts as endless
    uint32_t races, flush;
    char *fault, *text; uint32_t room;  // out: the kind of fault, and the sentence
    const void* code[2];                // out: addresses of the access at fault and of the one before it
    const char* file; int32_t line;     // out: where, if known without an address
    uint32_t thread[3], at_block[3];    // out: who
};

[[noreturn]] void fail(const char* fault, const char* file, int line, const char* format, ...) __attribute__((format(printf, 4, 5)));
uint64_t warp_operation(const char* operation, const char* file, int line, unsigned mask, uint64_t value, unsigned source, Collective);
int block_barrier(const char* operation, const char* file, int line, int predicate, char vote);
void yield();
uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
unsigned lane();
void copy_hidden(void* to, const void* from, size_t bytes);         // unseen by the checker
void* copy_seen(void* to, const void* from, size_t bytes);          // seen, as one read and one write
void* set_seen(void* to, int byte, size_t bytes);
uint64_t atomic_load(const void* p, size_t bytes, const char* file, int line);
void atomic_store(void* p, uint64_t bits, size_t bytes);
int run(Launch&, void (*body)(void*), void* context, char* dynamic, size_t capacity);

template <class T> uint64_t to_bits(T x) {          // locals only: they become registers
    static_assert(sizeof x <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t u = 0;
    __builtin_memcpy(&u, &x, sizeof x);
    return u;
}
template <class T> T from_bits(uint64_t u) { T x; __builtin_memcpy(static_cast<void*>(&x), &u, sizeof x); return x; }

// ---- the call of one kernel ------------------------------------------------------------------------------------
template <class P> constexpr char kind_of() {
    using T = std::remove_cv_t<P>;
    if (std::is_same_v<T, __half>) return 'h';
    if (std::is_same_v<T, __nv_bfloat16>) return 'b';
    if (std::is_same_v<T, bool>) return '?';
    if (std::is_floating_point_v<T>) return 'f';
    if (std::is_integral_v<T>) return std::is_signed_v<T> ? 'i' : 'u';
    return 'x';
}
template <class P> constexpr uint32_t size_of() { if constexpr (std::is_void_v<P>) return 1; else return sizeof(P); }
template <class P> constexpr Parameter parameter() {
    using T = std::remove_pointer_t<P>;
    return {kind_of<T>(), std::is_pointer_v<P>, std::is_pointer_v<P> && std::is_const_v<T>, size_of<T>()};
}
template <class... P> int describe(void (*)(P...), Parameter* out) {
    const Parameter all[] = {parameter<P>()..., Parameter{}};
    copy_hidden(out, all, sizeof...(P) * sizeof(Parameter));
    return sizeof...(P);
}
template <class... P> struct Call { void (*kernel)(P...); void** values; };
template <class P> std::remove_cv_t<P> value(void* const* values, size_t i) {
    void* from;
    std::remove_cv_t<P> x;
    copy_hidden(&from, values + i, sizeof from);
    copy_hidden(&x, from, sizeof x);
    return x;
}
template <class... P, size_t... I> void call_with(const Call<P...>& call, std::index_sequence<I...>) {
    call.kernel(value<P>(call.values, I)...);
}
template <class... P> void enter(void* context) {
    Call<P...> call;
    copy_hidden(&call, context, sizeof call);
    call_with(call, std::index_sequence_for<P...>{});
}
template <class... P> int launch(void (*kernel)(P...), Launch& how, char* dynamic, size_t capacity) {
    Call<P...> call{kernel, how.values};
    return run(how, enter<P...>, &call, dynamic, capacity);
}

// ---- warp operations -------------------------------------------------------------------------------------------
void read_source(Lanes&);               // the shuffles: each lane reads the value of its source lane
void vote(Lanes&);                      // the ballot
void order_memory(Lanes&);              // __syncwarp: the one warp operation that orders memory
void match_value(Lanes&);
void match_everyone(Lanes&);
void add(Lanes&);
void minimum(Lanes&);
void maximum(Lanes&);
void minimum_signed(Lanes&);
void maximum_signed(Lanes&);
void conjunction(Lanes&);
void disjunction(Lanes&);
void exclusive(Lanes&);

void check_width(int width, const char* operation, const char* file, int line);
template <class T> T shuffle(const char* operation, const char* file, int line, unsigned mask, T x, int width, unsigned source) {
    check_width(width, operation, file, line);
    return from_bits<T>(warp_operation(operation, file, line, mask, to_bits(x), source, read_source));
}

template <class T, class F> SIMT_INLINE T atomic(T* p, const char* file, int line, F f) {
    const T old = from_bits<T>(atomic_load(p, sizeof *p, file, line));
    atomic_store(p, to_bits(T(f(old))), sizeof *p);
    return old;
}
}  // namespace simt

#if defined(SIMT_CHECK) && !defined(SIMT_MACHINE)      // the fields of the running fiber are not the kernel's to be watched
#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())
#define memcpy(...) simt::copy_seen(__VA_ARGS__)
#define memset(...) simt::set_seen(__VA_ARGS__)
#else
#define threadIdx (simt::self->index)
#define blockIdx (simt::grid.block_index)
#define blockDim (simt::grid.block)
#define gridDim (simt::grid.grid)
#endif

inline void __syncthreads(SIMT_HERE) { simt::block_barrier("__syncthreads", file, line, 0, ' '); }
inline int __syncthreads_count(int p, SIMT_HERE) { return simt::block_barrier("__syncthreads_count", file, line, p, '+'); }
inline int __syncthreads_and(int p, SIMT_HERE) { return simt::block_barrier("__syncthreads_and", file, line, p, '&'); }
inline int __syncthreads_or(int p, SIMT_HERE) { return simt::block_barrier("__syncthreads_or", file, line, p, '|'); }
inline void __syncwarp(unsigned mask = ~0u, SIMT_HERE) { simt::warp_operation("__syncwarp", file, line, mask, 0, 0, simt::order_memory); }
inline unsigned __activemask(SIMT_HERE) {       // which lanes happen to run together is not a property of the program
    simt::fail("unspecified", file, line, "__activemask() depends on the scheduling of the machine; compute the mask");
}
inline unsigned __ballot_sync(unsigned mask, int p, SIMT_HERE) {
    return unsigned(simt::warp_operation("__ballot_sync", file, line, mask, p != 0, 0, simt::vote));
}
inline int __any_sync(unsigned mask, int p, SIMT_HERE) { return simt::warp_operation("__any_sync", file, line, mask, p != 0, 0, simt::vote) != 0; }
inline int __all_sync(unsigned mask, int p, SIMT_HERE) { return simt::warp_operation("__all_sync", file, line, mask, p == 0, 0, simt::vote) == 0; }
template <class T> T __shfl_sync(unsigned mask, T x, int from, int width = 32, SIMT_HERE) {
    const unsigned base = simt::lane() & ~unsigned(width - 1);
    return simt::shuffle("__shfl_sync", file, line, mask, x, width, base + (unsigned(from) & unsigned(width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int flip, int width = 32, SIMT_HERE) {
    const unsigned own = simt::lane(), from = own ^ unsigned(flip), last = own | unsigned(width - 1);
    return simt::shuffle("__shfl_xor_sync", file, line, mask, x, width, from > last ? own : from);
}
template <class T> T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, SIMT_HERE) {
    const unsigned own = simt::lane(), within = own & unsigned(width - 1);
    return simt::shuffle("__shfl_up_sync", file, line, mask, x, width, by > within ? own : own - by);
}
template <class T> T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, SIMT_HERE) {
    const unsigned own = simt::lane(), within = own & unsigned(width - 1);
    return simt::shuffle("__shfl_down_sync", file, line, mask, x, width, within + by >= unsigned(width) ? own : own + by);
}
template <class T> unsigned __match_any_sync(unsigned mask, T x, SIMT_HERE) {
    return unsigned(simt::warp_operation("__match_any_sync", file, line, mask, simt::to_bits(x), 0, simt::match_value));
}
template <class T> unsigned __match_all_sync(unsigned mask, T x, int* same, SIMT_HERE) {
    const unsigned m = unsigned(simt::warp_operation("__match_all_sync", file, line, mask, simt::to_bits(x), 0, simt::match_everyone));
    *same = m != 0;
    return m;
}
#define SIMT_REDUCE(NAME, TYPE, HOW)                                                                   \
    inline TYPE NAME(unsigned mask, TYPE x, SIMT_HERE) {                                                \
        return TYPE(simt::warp_operation(#NAME, file, line, mask, unsigned(x), 0, simt::HOW));          \
    }
SIMT_REDUCE(__reduce_add_sync, unsigned, add) SIMT_REDUCE(__reduce_add_sync, int, add)
SIMT_REDUCE(__reduce_min_sync, unsigned, minimum) SIMT_REDUCE(__reduce_min_sync, int, minimum_signed)
SIMT_REDUCE(__reduce_max_sync, unsigned, maximum) SIMT_REDUCE(__reduce_max_sync, int, maximum_signed)
SIMT_REDUCE(__reduce_and_sync, unsigned, conjunction)
SIMT_REDUCE(__reduce_or_sync, unsigned, disjunction)
SIMT_REDUCE(__reduce_xor_sync, unsigned, exclusive)
#undef SIMT_REDUCE

// ---- atomics: exactly the types that CUDA has --------------------------------------------------------------------
#define SIMT_ATOMIC(NAME, T, EXPRESSION) \
    SIMT_INLINE T NAME(T* p, T v, SIMT_HERE) { return simt::atomic(p, file, line, [v](T o) { return EXPRESSION; }); }
#define SIMT_ATOMIC_INTEGERS(NAME, EXPRESSION) \
    SIMT_ATOMIC(NAME, int, EXPRESSION) SIMT_ATOMIC(NAME, unsigned, EXPRESSION) SIMT_ATOMIC(NAME, unsigned long long, EXPRESSION)
SIMT_ATOMIC(atomicAdd, int, int(unsigned(o) + unsigned(v)))
SIMT_ATOMIC(atomicAdd, unsigned, o + v)
SIMT_ATOMIC(atomicAdd, unsigned long long, o + v)
SIMT_ATOMIC(atomicAdd, float, o + v)
SIMT_ATOMIC(atomicAdd, double, o + v)
SIMT_ATOMIC(atomicSub, int, int(unsigned(o) - unsigned(v)))
SIMT_ATOMIC(atomicSub, unsigned, o - v)
SIMT_ATOMIC(atomicInc, unsigned, o >= v ? 0 : o + 1)
SIMT_ATOMIC(atomicDec, unsigned, o == 0 || o > v ? v : o - 1)
SIMT_ATOMIC_INTEGERS(atomicMin, v < o ? v : o)
SIMT_ATOMIC_INTEGERS(atomicMax, v > o ? v : o)
SIMT_ATOMIC(atomicMin, long long, v < o ? v : o)
SIMT_ATOMIC(atomicMax, long long, v > o ? v : o)
SIMT_ATOMIC_INTEGERS(atomicAnd, o & v)
SIMT_ATOMIC_INTEGERS(atomicOr, o | v)
SIMT_ATOMIC_INTEGERS(atomicXor, o ^ v)
SIMT_ATOMIC_INTEGERS(atomicExch, (void(o), v))
SIMT_ATOMIC(atomicExch, float, (void(o), v))
#undef SIMT_ATOMIC
#undef SIMT_ATOMIC_INTEGERS
#define SIMT_CAS(T)                                                                                    \
    SIMT_INLINE T atomicCAS(T* p, T expected, T v, SIMT_HERE) {                                              \
        simt::yield();      /* whoever spins on it lets the others run */                               \
        return simt::atomic(p, file, line, [=](T o) { return o == expected ? v : o; });                 \
    }
SIMT_CAS(int) SIMT_CAS(unsigned) SIMT_CAS(unsigned long long) SIMT_CAS(unsigned short)
#undef SIMT_CAS
inline void __threadfence() {}          // orders nothing for the checker: see docs/gpu.md
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { simt::yield(); }
inline void __trap(SIMT_HERE) { simt::fail("trap", file, line, "__trap() was called"); }

// ---- arithmetic ------------------------------------------------------------------------------------------------
template <class T> SIMT_INLINE T __ldg(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldcs(const T* p) { return *p; }
template <class T> SIMT_INLINE T __ldcg(const T* p) { return *p; }
template <class T> SIMT_INLINE void __stcs(T* p, T x) { *p = x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
    return r;
}
inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)(__brev(unsigned(x))) << 32 | __brev(unsigned(x >> 32));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return unsigned((uint64_t(high) << 32 | low) << (by & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return unsigned((uint64_t(high) << 32 | low) >> (by & 31)); }
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) { return by >= 32 ? low : __funnelshift_l(low, high, by); }
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) { return by >= 32 ? high : __funnelshift_r(low, high, by); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> (4 * i), byte = unsigned(both >> (8 * (choice & 7))) & 255u;
        r |= (choice & 8 ? (byte >> 7) * 255u : byte) << (8 * i);           // the fourth bit replicates the sign
    }
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)(a) * b >> 64); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)(a) * b >> 64); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 255u) * (b >> (8 * i) & 255u);
    return c;
}
inline float __uint_as_float(unsigned x) { return simt::from_bits<float>(simt::to_bits(x)); }
inline unsigned __float_as_uint(float x) { return simt::from_bits<unsigned>(simt::to_bits(x)); }
inline float __int_as_float(int x) { return simt::from_bits<float>(simt::to_bits(x)); }
inline int __float_as_int(float x) { return simt::from_bits<int>(simt::to_bits(x)); }
inline double __longlong_as_double(long long x) { return simt::from_bits<double>(simt::to_bits(x)); }
inline long long __double_as_longlong(double x) { return simt::from_bits<long long>(simt::to_bits(x)); }
// Correctly rounded on both machines:
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }       // NaN becomes 0, as there
// Conversions saturate, and NaN becomes 0 (64-bit ones: the smallest number on a GPU; here too).
namespace simt {
template <class I, class F> I saturate(F x) {
    constexpr I low = std::is_signed_v<I> ? I(I(1) << (8 * sizeof(I) - 2)) * I(-2) : I(0), high = I(~low);
    if (x != x) return sizeof(I) == 8 ? (std::is_signed_v<I> ? low : I(I(1) << 63)) : I(0);
    if (x <= F(low)) return low;
    const F beyond = std::ldexp(F(1), int(8 * sizeof(I)) - (std::is_signed_v<I> ? 1 : 0));
    return x >= beyond ? high : I(x);
}
}  // namespace simt
inline int __float2int_rn(float x) { return simt::saturate<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return simt::saturate<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return simt::saturate<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return simt::saturate<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return simt::saturate<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return simt::saturate<unsigned>(std::trunc(x)); }
inline unsigned __float2uint_rd(float x) { return simt::saturate<unsigned>(std::floor(x)); }
inline long long __float2ll_rn(float x) { return simt::saturate<long long>(std::nearbyint(x)); }
inline int __double2int_rn(double x) { return simt::saturate<int>(std::nearbyint(x)); }
inline int __double2int_rz(double x) { return simt::saturate<int>(std::trunc(x)); }
inline long long __double2ll_rn(double x) { return simt::saturate<long long>(std::nearbyint(x)); }
inline float __double2float_rn(double x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline double __int2double_rn(int x) { return double(x); }
// Approximate on a GPU: no bit may depend on them.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
// The host part of the half headers lacks these. A double holds the product exactly; the sum is rounded to odd, so that
// the second rounding, to the narrow type, is as if from the exact sum.
namespace simt {
inline double sum_to_odd(double a, double b) {
    const double s = a + b, back = s - a, lost = (a - (s - back)) + (b - back);
    if (lost == 0 || !std::isfinite(s) || to_bits(s) & 1) return s;
    return from_bits<double>(to_bits(s) + ((lost > 0) == (s > 0) ? 1 : -1));
}
}  // namespace simt
inline __half __hfma(__half a, __half b, __half c) {
    return __double2half(simt::sum_to_odd(double(__half2float(a)) * double(__half2float(b)), double(__half2float(c))));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)), __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16(simt::sum_to_odd(double(__bfloat162float(a)) * double(__bfloat162float(b)), double(__bfloat162float(c))));
}
inline int __half2int_rn(__half x) { return __float2int_rn(__half2float(x)); }

// CUDA's min and max, overloaded on the types that CUDA overloads them on.
#define SIMT_EXTREMES(T)                              \
    inline T min(T a, T b) { return b < a ? b : a; }  \
    inline T max(T a, T b) { return a < b ? b : a; }
SIMT_EXTREMES(int) SIMT_EXTREMES(unsigned) SIMT_EXTREMES(long) SIMT_EXTREMES(unsigned long)
SIMT_EXTREMES(long long) SIMT_EXTREMES(unsigned long long)
#undef SIMT_EXTREMES
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
