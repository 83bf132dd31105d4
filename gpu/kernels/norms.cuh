// Scales of tokens as transform coders store them, in 16 bits (reference/vectors.py, norms of 7 bits' mantissa): 0 is 0, any other code
// E 2^7 + F is (1 + F / 2^7) 2^{E - 256}.
#pragma once
#include "common.cuh"

// 2^e, -1022 <= e <= 1023.
__device__ inline double power(int e) { return __longlong_as_double((long long)(e + 1023) << 52); }

__device__ inline double norm(unsigned code) { return code ? (1.0 + (code & 127) / 128.0) * power((int)(code >> 7) - 256) : 0.0; }

// The code of the least norm >= most; most is cut off at 2^133, and 0 below 2^-250.
__device__ inline unsigned rounded_up(double most) {
    if (!(most >= 0x1p-250)) return 0;
    const unsigned long long bits = __double_as_longlong(fmin(most, 0x1p133));
    const unsigned long long dropped = bits & ((1ull << 45) - 1);
    // exponent and the first 7 bits of the fraction, one more if anything was dropped: a carry goes into the exponent
    return (unsigned)((bits >> 45) + (dropped != 0)) - ((1023 - 256) << 7);
}
