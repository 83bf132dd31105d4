// One uniform step for all coefficients, and what rANS and plain bits then carry (reference/transform_coding/entropy.py): the same symbols,
// escapes and low bits for the same coefficients, and the same integers for the same symbols.
//
//   contexts    classes of tokens -> the table of each coefficient
//   symbolise   coefficients in steps (count, size) -> codes n, symbols, their tables, and how many of each token escape
//   residue     codes -> escaped ones in full, one after the other; the low bits of the others, as many as each one's shift says
//   escapes     symbols -> how many of each token escape
//   levels<Y>   symbols, escapes, low bits -> integers y (count, size), in units of 1/256 of a step
//
// Grid: a warp for each token, 32 coefficients at a time in order, so that ballots and prefix sums say where each one's escape or low bits
// lie. rANS itself is rans.cu.
//
// A token has a class in each unit; class k has table tables[k size + c] and shift shifts[k size + c] for coefficient c, NOT_CODED: none.

constexpr unsigned ALL = 0xffffffffu, NOT_CODED = 255, TABLES = 29, SYMBOLS = 258, ESCAPE = SYMBOLS - 1;
constexpr int MOST_CODE = 1 << 27, UNIT = 256;

struct Contexts {
    const unsigned short* classes;     // (count, units)
    const unsigned short* unit_of;     // (size)
    const unsigned char* tables;       // (classes, size)
    const unsigned char* shifts;
    unsigned units, size;

    __device__ size_t at(unsigned long long t, unsigned c) const { return (size_t)classes[t * units + unit_of[c]] * size + c; }
};

__device__ inline unsigned before(unsigned lanes) { return __popc(lanes & ((1u << threadIdx.x % 32) - 1)); }

// What comes before this lane in a sum over the warp, and the whole sum.
__device__ inline unsigned exclusive_sum(unsigned x, unsigned& total) {
    const unsigned lane = threadIdx.x % 32;
    unsigned sum = x;
    for (unsigned d = 1; d < 32; d *= 2) {
        const unsigned other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    total = __shfl_sync(ALL, sum, 31);
    return sum - x;
}

// What a symbol's table is: the last one, TABLES, is of a certain symbol 0, for what is not coded.
__device__ inline unsigned short in_use(unsigned table) { return (unsigned short)(table == NOT_CODED ? TABLES : table); }

__global__ void __launch_bounds__(128)
contexts(const unsigned short* __restrict__ classes, const unsigned short* __restrict__ unit_of, const unsigned char* __restrict__ tables,
         unsigned short* __restrict__ used, unsigned long long count, unsigned units, unsigned size) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const Contexts contexts{classes, unit_of, tables, nullptr, units, size};
    for (unsigned c = threadIdx.x % 32; c < size; c += 32) used[t * size + c] = in_use(tables[contexts.at(t, c)]);
}

__global__ void __launch_bounds__(128)
symbolise(const double* __restrict__ y, const unsigned short* __restrict__ classes, const unsigned short* __restrict__ unit_of,
          const unsigned char* __restrict__ tables, const unsigned char* __restrict__ shifts,
          const int* __restrict__ alphabets,                 // (TABLES): a larger code escapes
          int* __restrict__ codes, unsigned short* __restrict__ symbols, unsigned short* __restrict__ used, unsigned* __restrict__ escapes,
          unsigned long long count, unsigned units, unsigned size) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const Contexts contexts{classes, unit_of, tables, shifts, units, size};
    unsigned found = 0;
    for (unsigned c0 = 0; c0 < size; c0 += 32) {
        const unsigned c = c0 + threadIdx.x % 32;
        bool escaped = false;
        if (c < size) {
            const size_t at = contexts.at(t, c), own = t * size + c;
            const unsigned table = tables[at];
            const int n = (int)rint(fmin(fmax(y[own], (double)-MOST_CODE), (double)MOST_CODE));
            const int m = n >> shifts[at], magnitude = m < 0 ? -m : m;
            const bool coded = table != NOT_CODED;
            escaped = coded && magnitude > alphabets[table];
            codes[own] = n;
            used[own] = in_use(table);
            symbols[own] = (unsigned short)(!coded ? 0 : escaped ? ESCAPE : 2 * magnitude - (m < 0));
        }
        found += __popc(__ballot_sync(ALL, escaped));
    }
    if (threadIdx.x % 32 == 0) escapes[t] = found;
}

// escape_at, bit_at (count): how many escapes, and how many low bits, come before a token's. words begins as zeros.
__global__ void __launch_bounds__(128)
residue(const int* __restrict__ codes, const unsigned short* __restrict__ symbols, const unsigned short* __restrict__ used,
        const unsigned short* __restrict__ classes, const unsigned short* __restrict__ unit_of, const unsigned char* __restrict__ tables,
        const unsigned char* __restrict__ shifts, const unsigned long long* __restrict__ escape_at,
        const unsigned long long* __restrict__ bit_at, int* __restrict__ escapes, unsigned* __restrict__ words,
        unsigned long long count, unsigned units, unsigned size) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const Contexts contexts{classes, unit_of, tables, shifts, units, size};
    unsigned long long escape = escape_at[t], bit = bit_at[t];
    for (unsigned c0 = 0; c0 < size; c0 += 32) {
        const unsigned c = c0 + threadIdx.x % 32;
        int n = 0;
        unsigned width = 0;
        bool escaped = false;
        if (c < size && used[t * size + c] != TABLES) {
            n = codes[t * size + c];
            width = shifts[contexts.at(t, c)];
            escaped = symbols[t * size + c] == ESCAPE;
        }
        const unsigned lanes = __ballot_sync(ALL, escaped);
        if (escaped) escapes[escape + before(lanes)] = n;
        escape += __popc(lanes);
        if (!__any_sync(ALL, width)) continue;
        unsigned total;
        const unsigned long long at = bit + exclusive_sum(width, total);
        bit += total;
        if (!width) continue;
        const unsigned long long low = (unsigned long long)((unsigned)n & ((1u << width) - 1)) << at % 32;
        atomicOr(&words[at / 32], (unsigned)low);                          // neighbours, of other tokens too, share words
        if (low >> 32) atomicOr(&words[at / 32 + 1], (unsigned)(low >> 32));
    }
}

__global__ void __launch_bounds__(128)
escapes(const unsigned short* __restrict__ symbols, const unsigned short* __restrict__ used, unsigned* __restrict__ found,
        unsigned long long count, unsigned size) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    unsigned total = 0;
    for (unsigned c0 = 0; c0 < size; c0 += 32) {
        const unsigned c = c0 + threadIdx.x % 32;
        const bool escaped = c < size && symbols[t * size + c] == ESCAPE && used[t * size + c] != TABLES;
        total += __popc(__ballot_sync(ALL, escaped));
    }
    if (threadIdx.x % 32 == 0) found[t] = total;
}

// deltas (TABLES + 1, SYMBOLS): centroids. words has one word more than the low bits need. wide: set where a y is no Y.
template <class Y>
__global__ void __launch_bounds__(128)
levels(const unsigned short* __restrict__ symbols, const unsigned short* __restrict__ used, const unsigned short* __restrict__ classes,
       const unsigned short* __restrict__ unit_of, const unsigned char* __restrict__ tables, const unsigned char* __restrict__ shifts,
       const signed char* __restrict__ deltas, const int* __restrict__ escapes, const unsigned* __restrict__ words,
       const unsigned long long* __restrict__ escape_at, const unsigned long long* __restrict__ bit_at, Y* __restrict__ y,
       unsigned* __restrict__ wide, unsigned long long count, unsigned units, unsigned size) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const Contexts contexts{classes, unit_of, tables, shifts, units, size};
    unsigned long long escape = escape_at[t], bit = bit_at[t];
    for (unsigned c0 = 0; c0 < size; c0 += 32) {
        const unsigned c = c0 + threadIdx.x % 32;
        unsigned symbol = 0, table = TABLES, width = 0;
        if (c < size) {
            symbol = symbols[t * size + c], table = used[t * size + c];
            if (table != TABLES) width = shifts[contexts.at(t, c)];
        }
        const bool escaped = symbol == ESCAPE && table != TABLES;
        const unsigned lanes = __ballot_sync(ALL, escaped);
        unsigned low = 0;
        if (__any_sync(ALL, width)) {
            unsigned total;
            const unsigned long long at = bit + exclusive_sum(width, total);
            bit += total;
            if (width) low = __funnelshift_r(words[at / 32], words[at / 32 + 1], (unsigned)(at % 32)) & ((1u << width) - 1);
        }
        if (c < size) {
            const long long m = symbol & 1 ? -(long long)((symbol + 1) >> 1) : symbol >> 1;
            long long value = UNIT * (m * (1ll << width) + low);
            if (table != TABLES && width == 0) value += deltas[table * SYMBOLS + symbol];
            if (escaped) value = (long long)UNIT * escapes[escape + before(lanes)];
            y[t * size + c] = (Y)value;
            if (value != (Y)value) atomicOr(wide, 1u);
        }
        escape += __popc(lanes);
    }
}
