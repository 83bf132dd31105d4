// Attention over keys and values as they are (kvtheory/attention.py, up to rounding): a full cache, the tokens that a reducer kept, sinks,
// recent windows and appended tails. Algorithm, grid and block: attention.cuh. keys, values: rows of numbers, token t of head h from
// starts[h] + t stride on, whatever lies between.
#include "attention.cuh"

template <class T> struct Exact {
    static constexpr bool ORDERED = true;
    const Cache& c;
    const Room& room;
    Stretch stretch;
    Rows<T> key_rows, value_rows;
    float *keys, *values;
    int key_stride, value_stride;

    __device__ Exact(const Cache& c, const Room& room, Rows<T> k, Rows<T> v, long long split)
        : c(c), room(room), stretch(c, split), key_rows(k), value_rows(v) {
        key_stride = tile_stride(k.dim), value_stride = tile_stride(v.dim);
        keys = room.tiles, values = keys + c.tile * key_stride;
    }
    __device__ long long tiles() const { return stretch.tiles(); }
    __device__ long long token(long long tile, int place) const { return stretch.token(tile, place); }
    __device__ int key_at(int) const { return 0; }
    __device__ int value_at(int) const { return 0; }
    __device__ void load(long long) {
        const int head = c.first_head();
        fill(c, room, keys, key_stride, key_rows.dim, [&](long long token, int channel) {
            return c.is_there(head, token) ? key_rows.quad(key_rows.at(head, token), channel) : Vec<float, 4>{{0.0f, 0.0f, 0.0f, 0.0f}};
        });
        fill(c, room, values, value_stride, value_rows.dim, [&](long long token, int channel) {
            return c.is_there(head, token) ? value_rows.quad(value_rows.at(head, token), channel) : Vec<float, 4>{{0.0f, 0.0f, 0.0f, 0.0f}};
        });
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_exact(const T* __restrict__ keys, const T* __restrict__ values, const long long* __restrict__ key_starts,
             const long long* __restrict__ value_starts, long long key_step, long long value_step, long long split, CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    Exact<T> codec(cache, room, {keys, key_starts, key_step, key_width}, {values, value_starts, value_step, value_width}, split);
    attend(codec, cache, room);
}
