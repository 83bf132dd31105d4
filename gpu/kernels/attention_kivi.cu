// Attention on KIVI's codes (reference/kivi.py): keys in groups of tokens of one channel, values in groups of channels of one token, and the
// newest tokens as they are, all in one pass: keys from token coded_keys on, values from coded_values on. Numbers are those that a decoder
// has, to the last bit. Algorithm, grid and block: attention.cuh; layout of rows: kivi.cu.
#include "attention.cuh"
#include "bits.cuh"
#include "minmax.cuh"

template <class T> struct Grouped {
    const T* zeros;
    const unsigned short* scales;
    const unsigned* codes;
    Rows<T> recent;
    long long coded;
    float limit;
    int dim, group, bits;

    __device__ float number(const Group& own, unsigned code) const { return to_float(from_float<T>(own.number(code, limit))); }
};

template <class T> struct KIVI {
    static constexpr bool ORDERED = true;
    const Cache& c;
    const Room& room;
    Stretch stretch;
    Grouped<T> key, value;
    float *keys, *values;
    int key_stride, value_stride;

    __device__ KIVI(const Cache& c, const Room& room, Grouped<T> k, Grouped<T> v, long long split)
        : c(c), room(room), stretch(c, split), key(k), value(v) {
        key_stride = tile_stride(k.dim), value_stride = tile_stride(v.dim);
        keys = room.tiles, values = keys + c.tile * key_stride;
    }
    __device__ long long tiles() const { return stretch.tiles(); }
    __device__ long long token(long long tile, int place) const { return stretch.token(tile, place); }
    __device__ int key_at(int) const { return 0; }
    __device__ int value_at(int) const { return 0; }

    // A thread takes a run of tokens of a channel, whose codes lie side by side; neighbouring threads neighbouring channels.
    __device__ void load_keys() {
        const int head = c.first_head(), width = (key.dim + 3) / 4 * 4;
        const int run = key.group % 8 == 0 && c.tile % 8 == 0 && key.bits <= 4 ? 8 : key.group % 4 == 0 && c.tile % 4 == 0 ? 4 : 1;
        for (int i = threadIdx.x; i < c.tile / run * width; i += THREADS) {
            const int channel = i % width, place = i / width * run;
            const long long first = room.token[place];
            float* to = keys + place * key_stride + channel;
            if (first < 0 || channel >= key.dim) {
                for (int t = 0; t < run; ++t) to[t * key_stride] = 0.0f;
            } else if (first < key.coded) {             // coded tokens are whole groups, and a run lies in one
                const long long row = row_number(first / key.group, c.heads, head) * key.dim + channel;
                const Group own(to_float(key.zeros[row]), key.scales[row], key.bits);
                const unsigned few = get_bits(key.codes, ((unsigned long long)row * key.group + first % key.group) * key.bits, run * key.bits);
                for (int t = 0; t < run; ++t) to[t * key_stride] = key.number(own, few >> (t * key.bits) & ((1u << key.bits) - 1));
            } else {
                for (int t = 0; t < run; ++t) {
                    const long long token = room.token[place + t];
                    to[t * key_stride] = token < 0 ? 0.0f : to_float(key.recent.numbers[key.recent.at(head, token - key.coded) + channel]);
                }
            }
        }
    }

    __device__ void load_values() {
        const int head = c.first_head(), width = (value.dim + 3) / 4 * 4, each = (value.dim + value.group - 1) / value.group;
        fill(c, room, values, value_stride, width, [&](long long token, int channel) {
            if (token >= value.coded) return value.recent.quad(value.recent.at(head, token - value.coded), channel);
            Vec<float, 4> out;
            const long long row = row_number(token, c.heads, head);
            const int many = min(value.dim - channel, 4);
            const unsigned few = get_bits(value.codes, ((unsigned long long)row * value.dim + channel) * value.bits, many * value.bits);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                out.v[v] = 0.0f;
                if (v < many) {
                    const long long place = row * each + (channel + v) / value.group;
                    const Group own(to_float(value.zeros[place]), value.scales[place], value.bits);
                    out.v[v] = value.number(own, few >> (v * value.bits) & ((1u << value.bits) - 1));
                }
            }
            return out;
        });
    }

    __device__ void load(long long) {
        load_keys();
        load_values();
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_kivi(const T* __restrict__ key_zeros, const unsigned short* __restrict__ key_scales, const unsigned* __restrict__ key_codes,
            const T* __restrict__ recent_keys, const T* __restrict__ value_zeros, const unsigned short* __restrict__ value_scales,
            const unsigned* __restrict__ value_codes, const T* __restrict__ recent_values, const long long* __restrict__ key_starts,
            const long long* __restrict__ value_starts, long long coded_keys, long long coded_values, float key_limit, float value_limit,
            int group, int bits, long long split, CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    const Rows<T> new_keys{recent_keys, key_starts, (long long)heads * key_width, key_width};
    const Rows<T> new_values{recent_values, value_starts, (long long)heads * value_width, value_width};
    KIVI<T> codec(cache, room, {key_zeros, key_scales, key_codes, new_keys, coded_keys, key_limit, key_width, group, bits},
                  {value_zeros, value_scales, value_codes, new_values, coded_values, value_limit, value_width, group, bits}, split);
    attend(codec, cache, room);
}
