// Minimum/maximum quantisation of one group of numbers, as reference/minmax.py has it: the stored scale, a number's code, a code's number.
//
//     z = min x      s = the least stored scale >= (max x - z) / (2^b - 1)      c = rint((x - z) (1/s))      x^ = z + c s
//
// A stored scale 256 E + F is (1 + F/256) 2^(E - 126). Where |z| >= 2^125 or s >= 2^(125 - b) all is done in units of 4, lest it overflows.
#pragma once
#include "common.cuh"

constexpr int LARGEST_SCALE = (254 << 8) + 255;

// The code of the least stored scale >= range / (2^bits - 1). A range of two floats is 0 or a normal double: its exponent and mantissa are its bits.
__device__ inline unsigned scale_code(double range, int bits) {
    if (!(range > 0)) return 0;
    const unsigned long long word = __double_as_longlong(range / ((1 << bits) - 1));
    const int exponent = int(word >> 52);
    const unsigned long long mantissa = (word & ((1ull << 52) - 1)) | 1ull << 52;
    const int rounded_up = int((mantissa + ((1ull << 44) - 1)) >> 44);                 // of 9 bits, or 2^9
    const int code = (exponent - 1023 + 126) * 256 + rounded_up - 256;
    return unsigned(min(max(code, 1 << 8), LARGEST_SCALE));
}

// One group: its zero and scale, in the units that its arithmetic is done in.
struct Group {
    float shift, scale, unit;       // z and s in units of 1 / unit

    __device__ Group(float zero, unsigned stored, int bits) {
        const bool wide = fabsf(zero) >= 0x1p125f || stored >= unsigned(251 - bits) << 8;
        const float half = __uint_as_float(stored << 15);                              // s / 2, which a float always holds
        unit = wide ? 0.25f : 1.0f;
        shift = zero * unit;
        scale = wide ? half * 0.5f : half * 2.0f;
    }
    __device__ float inverse() const { return scale > 0 ? 1.0f / scale : 0.0f; }
    __device__ unsigned code(float x, float inverse, int bits) const {
        const float most = float((1 << bits) - 1), nearest = rintf((x * unit - shift) * inverse);
        return unsigned(fminf(fmaxf(nearest, 0.0f), most));     // at 1 bit the largest scale may be too small; NaN, refused later, is 0
    }
    __device__ float number(unsigned code, float limit) const {
        float x = float(code) * scale;
        x = x + shift;
        if (unit != 1.0f) x = x * 4.0f;
        return fminf(fmaxf(x, -limit), limit);
    }
};
