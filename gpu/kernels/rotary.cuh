// RoPE with the bits of reference/rotary.py: an angle is a fraction of a turn in 64-bit integers, its cosine and sine are polynomials by
// Horner's rule in double, and nothing is fused (-fmad=false).
#pragma once
#include "common.cuh"

struct Polynomial {             // sum_k (-1)^k s^k / (2 k + odd)!, k = 0 ... 8
    double c[9];
    __device__ double at(double square) const {
        double total = c[8];
#pragma unroll
        for (int k = 7; k >= 0; --k) total = c[k] + square * total;
        return total;
    }
};

// Cosine (x) and sine (y) of the angle of one pair of channels. frequency: turns of one position, in units of 2^-64.
__device__ inline double2 turn(long long position, unsigned long long frequency) {
    constexpr Polynomial cosine{{1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                                 -1.0 / 87178291200.0, 1.0 / 20922789888000.0}};
    constexpr Polynomial sine{{1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800.0,
                               -1.0 / 1307674368000.0, 1.0 / 355687428096000.0}};
    const unsigned long long angle = (unsigned long long)position * frequency;
    const unsigned long long quarter = (angle + (1ull << 61)) >> 62;
    const double unit = 6.283185307179586 * 0x1p-64;                    // 2 pi 2^-64
    const double x = double((long long)(angle - (quarter << 62))) * unit;
    const double square = x * x;
    double c = cosine.at(square), s = x * sine.at(square);
    if (quarter & 1) {
        const double before = c;
        c = -s, s = before;
    }
    return quarter & 2 ? make_double2(-c, -s) : make_double2(c, s);
}

// Which pair a channel is of, which other channel is in it, and whether it is the second of the two. Channels from `rotated` on are in none.
struct Pair {
    int number, other;
    bool second;
    __device__ Pair(int channel, int rotated, bool interleaved) {
        const int half = rotated / 2;
        second = interleaved ? channel & 1 : channel >= half;
        number = interleaved ? channel / 2 : second ? channel - half : channel;
        other = interleaved ? channel ^ 1 : second ? channel - half : channel + half;
    }
};

// One channel of R_p x s, of its own number and that of the other channel in its pair; and of R_p^T x / s.
__device__ inline double rotated_channel(double own, double other, bool second, double2 turn, double scaling) {
    const double along = own * turn.x, across = other * turn.y;
    return (second ? along + across : along - across) * scaling;
}
__device__ inline double unrotated_channel(double own, double other, bool second, double2 turn, double scaling) {
    const double along = own * turn.x, across = other * turn.y;
    return (second ? along - across : along + across) / scaling;
}
