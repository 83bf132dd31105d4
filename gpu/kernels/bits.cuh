// Codes of 1 to 32 bits in a stream of 32-bit words, least significant bit first: bit n of the stream is bit n % 32 of
// word n / 32, as reference/packing.py has it. A warp builds the bits of one row in shared memory, then stores them
// where the row lies.
#pragma once

// The words that a row of `bits` bits may touch, wherever in a word it begins.
__device__ constexpr int row_words(int bits) { return (bits + 31 + 31) / 32; }

// ORs the low bits of a value, those above them 0, into a zeroed row of shared memory. Lanes may meet in a word.
__device__ inline void put_bits(unsigned* row, int at, unsigned value) {
    const int shift = at % 32;
    atomicOr(&row[at / 32], value << shift);
    const unsigned rest = shift ? value >> (32 - shift) : 0;
    if (rest) atomicOr(&row[at / 32 + 1], rest);
}

// The `count` bits (1 to 32) from bit `at` on. Never reads a word that holds none of them.
__device__ inline unsigned get_bits(const unsigned* __restrict__ words, unsigned long long at, int count) {
    const unsigned* word = words + at / 32;
    const int shift = at % 32;
    unsigned long long both = word[0];
    if (shift + count > 32) both |= (unsigned long long)word[1] << 32;
    return unsigned(both >> shift) & (0xffffffffu >> (32 - count));
}

// Stores a row of `bits` bits, which begins at bit first % 32 of row[0], to bit `first` of a zeroed stream: by one
// warp. Only the first and the last word can hold bits of other rows.
__device__ inline void store_bits(unsigned* __restrict__ stream, unsigned long long first, int bits,
                                  const unsigned* row, int lane) {
    const int shift = first % 32, words = (shift + bits + 31) / 32;
    for (int w = lane; w < words; w += 32) {
        unsigned* to = stream + first / 32 + w;
        if (w * 32 >= shift && w * 32 + 32 <= shift + bits)
            *to = row[w];
        else
            atomicOr(to, row[w]);
    }
}
