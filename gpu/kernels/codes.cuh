// Codes of 1 to 8 bits on their way into whole words of a stream (bits.cuh has its layout): one thread's, or one warp's. Where a thread or
// a warp takes so many vectors that their codes fill whole words, no word has two writers, and nothing needs an atomic or a zeroed stream.
#pragma once
#include "common.cuh"

// The rows that thread or warp number `unit` takes, `together` of `all`: the last one fewer, those behind it none.
struct Share {
    long long first;
    int count;
    __device__ Share(long long unit, long long all, int together)
        : first(unit * together), count(int(max(0ll, min(all - first, (long long)together)))) {}
};

// Codes of one thread, from a bit on that starts a word; words are written as they fill.
class ThreadCodes {
    unsigned* next;
    unsigned long long held = 0;
    int count = 0;

public:
    __device__ explicit ThreadCodes(unsigned* word) : next(word) {}
    __device__ void put(unsigned code, int bits) {
        held |= (unsigned long long)code << count;
        count += bits;
        if (count >= 32) {
            *next++ = unsigned(held);
            held >>= 32, count -= 32;
        }
    }
    __device__ void finish() {
        if (count) *next = unsigned(held);
    }
};

// Codes of one warp, 32 at a time, one of each lane: they fill `bits` words. Words are held by the lanes, and written 32 or fewer at a time.
class WarpCodes {
    unsigned* next;
    unsigned mine = 0;
    int held = 0;

    __device__ void flush(int count, int lane) {
        if (lane < count) next[lane] = mine;
        next += count, held = 0;
    }

public:
    __device__ explicit WarpCodes(unsigned* word) : next(word) {}
    // All lanes call it. Word w of the 32 codes holds their bits 32 w ... 32 w + 31: lane l votes with bit 32 w + l.
    __device__ void put(unsigned code, int bits, int lane) {
        if (held + bits > 32) flush(held, lane);
        for (int w = 0; w < bits; ++w) {
            const int bit = 32 * w + lane, source = bit / bits;
            const unsigned word = __ballot_sync(ALL, __shfl_sync(ALL, code, source) >> (bit - source * bits) & 1);
            if (lane == held + w) mine = word;
        }
        held += bits;
    }
    // padding: how many of the last 32 codes belong to nothing; words of theirs alone are not written.
    __device__ void finish(int padding, int bits, int lane) { flush(held - padding * bits / 32, lane); }
};
