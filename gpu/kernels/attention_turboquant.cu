// Attention on TurboQuant's codes (reference/turboquant.py). Frame: k = g R p with R orthogonal (signs and Hadamard matrix), p the points that
// the codes name and g = norm / sqrt(d): a query is turned by R^T once, and outputs back by R once. Kind "prod" has as many numbers more, signs
// of the residual's sketch times its norm, whose part of the frame holds S too. Algorithm, grid and block: attention.cuh.
//
// Codes and norms lie token by token, heads within, as in streams: vector r = token heads + head has bits r d b ... of the codes.
#include "attention.cuh"
#include "bits.cuh"

// A stored norm (reference/vectors.py): 0, or code E 2^m + F for (1 + F / 2^m) 2^(E - 256); a mantissa of 23 bits lies in two halves.
__device__ inline double stored_norm(const unsigned short* __restrict__ norms, long long at, int mantissa_bits) {
    const unsigned code = mantissa_bits <= 7 ? norms[at] : norms[2 * at] | (unsigned)norms[2 * at + 1] << 16;
    const long long fraction = code & ((1u << mantissa_bits) - 1), exponent = (long long)(code >> mantissa_bits) - 256 + 1023;
    return code ? __longlong_as_double(exponent << 52 | fraction << (52 - mantissa_bits)) : 0.0;
}

// Keys or values. points (2^b): of each code, "prod": of its lower b - 1 bits.
struct Turned {
    const unsigned short* norms;
    const unsigned* codes;
    const float* points;
    double unit;                        // sqrt(d)
    int dim, bits, mantissa_bits;

    __device__ unsigned few(long long row, int channel) const {
        const int many = min(dim - channel, 4);
        return get_bits(codes, ((unsigned long long)row * dim + channel) * bits, many * bits);
    }
};

template <bool PROD> struct TurboQuant {
    static constexpr bool ORDERED = true;
    const Cache& c;
    const Room& room;
    Stretch stretch;
    Turned key, value;
    float *keys, *values;
    int key_stride, value_stride;

    __device__ TurboQuant(const Cache& c, const Room& room, Turned k, Turned v, long long split)
        : c(c), room(room), stretch(c, split), key(k), value(v) {
        key_stride = tile_stride(c.key_width), value_stride = tile_stride(c.value_width);
        keys = room.tiles, values = keys + c.tile * key_stride;
    }
    __device__ long long tiles() const { return stretch.tiles(); }
    __device__ long long token(long long tile, int place) const { return stretch.token(tile, place); }
    __device__ int key_at(int) const { return 0; }
    __device__ int value_at(int) const { return 0; }

    __device__ void side(const Turned& own, float* scales, float* tile, int stride) {
        const int head = c.first_head(), width = (own.dim + 3) / 4 * 4;
        const int point_bits = own.bits - PROD, each = PROD && point_bits ? 2 : 1;
        const unsigned mask = (1u << own.bits) - 1, low = (1u << point_bits) - 1;
        if (!PROD && threadIdx.x < c.tile && room.token[threadIdx.x] >= 0)
            scales[threadIdx.x] =
                float(stored_norm(own.norms, row_number(room.token[threadIdx.x], c.heads, head), own.mantissa_bits) / own.unit);
        fill(c, room, tile, stride, width, [&](long long token, int channel) {
            Vec<float, 4> out;
            const unsigned few = own.few(row_number(token, c.heads, head), channel);
#pragma unroll
            for (int v = 0; v < 4; ++v) out.v[v] = channel + v < own.dim && point_bits ? own.points[few >> (v * own.bits) & low] : 0.0f;
            if (PROD && point_bits) {
                const float gain = float(stored_norm(own.norms, row_number(token, c.heads, head) * each, own.mantissa_bits) / own.unit);
#pragma unroll
                for (int v = 0; v < 4; ++v) out.v[v] *= gain;
            }
            return out;
        });
        if (PROD)
            fill(c, room, tile + width, stride, width, [&](long long token, int channel) {
                Vec<float, 4> out;
                const long long row = row_number(token, c.heads, head);
                const unsigned few = own.few(row, channel);
                const float norm = float(stored_norm(own.norms, row * each + each - 1, own.mantissa_bits));
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    out.v[v] = channel + v >= own.dim ? 0.0f : (few >> (v * own.bits) & mask) >> point_bits ? -norm : norm;
                return out;
            });
    }
    __device__ void load(long long) {
        side(key, room.key_scales, keys, key_stride);
        side(value, room.value_scales, values, value_stride);
    }
};

template <bool PROD>
__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_turboquant(const unsigned short* __restrict__ key_norms, const unsigned* __restrict__ key_codes, const float* __restrict__ key_points,
                  const unsigned short* __restrict__ value_norms, const unsigned* __restrict__ value_codes,
                  const float* __restrict__ value_points, double key_unit, double value_unit, int dim, int value_dim, int bits,
                  int mantissa_bits, long long split, CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    TurboQuant<PROD> codec(cache, room, {key_norms, key_codes, key_points, key_unit, dim, bits, mantissa_bits},
                           {value_norms, value_codes, value_points, value_unit, value_dim, bits, mantissa_bits}, split);
    attend(codec, cache, room);
}
