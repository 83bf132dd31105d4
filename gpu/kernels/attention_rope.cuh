// RoPE of keys in registers, in float: angles are the integers of reference/rotary.py, exact whatever the position; cosine and sine of what is
// left, |x| <= pi/4, are Taylor polynomials to x^10 and x^11, each within 6 2^-24 (docs/attention.md).
#pragma once
#include "common.cuh"
#include "rotary.cuh"

// Of one pair of channels; frequency: turns of one position in units of 2^-64.
__device__ inline float2 single_turn(long long position, unsigned long long frequency) {
    const unsigned long long angle = (unsigned long long)position * frequency;
    const unsigned long long quarter = (angle + (1ull << 61)) >> 62;
    const float x = float((long long)(angle - (quarter << 62))) * 3.4061215800304e-19f;       // 2 pi 2^-64
    const float s = x * x;
    float c = -1.0f / 3628800, d = -1.0f / 39916800;
    c = fmaf(c, s, 1.0f / 40320), d = fmaf(d, s, 1.0f / 362880);
    c = fmaf(c, s, -1.0f / 720), d = fmaf(d, s, -1.0f / 5040);
    c = fmaf(c, s, 1.0f / 24), d = fmaf(d, s, 1.0f / 120);
    c = fmaf(c, s, -0.5f), d = fmaf(d, s, -1.0f / 6);
    c = fmaf(c, s, 1.0f), d = fmaf(d * s, x, x);
    const float2 turned = quarter & 1 ? make_float2(-d, c) : make_float2(c, d);
    return quarter & 2 ? make_float2(-turned.x, -turned.y) : turned;
}

// The rope of a layer: pairs of channels 0 ... 2 pairs - 1; pairs = 0: none.
struct Turns {
    const unsigned long long* frequencies;
    int pairs, interleaved;
    float scaling;
    __device__ int first(int pair) const { return interleaved ? 2 * pair : pair; }
    __device__ int second(int pair) const { return interleaved ? 2 * pair + 1 : pair + pairs; }
    // R_p of a pair of channels.
    __device__ float2 of(float a, float b, long long position, int pair) const {
        const float2 turn = single_turn(position, frequencies[pair]);
        return make_float2(fmaf(a, turn.x, -(b * turn.y)) * scaling, fmaf(b, turn.x, a * turn.y) * scaling);
    }
};
