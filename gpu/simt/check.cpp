// The checker: what every load and store of a kernel is held against.
//
// The checked build compiles the kernel (not this file) with -fsanitize=thread,bounds-strict,... as instrumentation
// only, and links the callbacks below in place of the sanitizers' libraries: g++ calls __tsan_* at every access to
// memory, and __ubsan_* where arithmetic or an index leaves its type. Known are then
//   - ranges: each argument, and each __shared__ variable by its symbol in the library's TLS segment. Nothing else is
//     the kernel's, but constants and its own stack. Gaps lie between the variables (build.py) and the arguments.
//   - for each four bytes of them, which accesses were last and by whom (a Cell). Two accesses of one address, one of
//     them a plain write or against a plain one, race unless one happened before the other: by the thread itself, by a
//     block barrier (epochs), or by __syncwarp (a vector clock for each warp). Nothing orders two blocks.
//   - for each byte of shared memory, whether a thread of this block has written it.
#include "machine.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace simt {

const void* last_access;
static uintptr_t tls_begin;
static uintptr_t dynamic_begin, dynamic_bytes;
struct Module { uintptr_t begin, end, tls; };
static Module module;

static int find_module(dl_phdr_info* info, size_t, void*) {         // the library that this very code is linked into
    Module m{~uintptr_t(0), 0, reinterpret_cast<uintptr_t>(info->dlpi_tls_data)};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& p = info->dlpi_phdr[i];
        if (p.p_type != PT_LOAD) continue;
        m.begin = std::min<uintptr_t>(m.begin, info->dlpi_addr + p.p_vaddr);
        m.end = std::max<uintptr_t>(m.end, info->dlpi_addr + p.p_vaddr + p.p_memsz);
    }
    const uintptr_t here = reinterpret_cast<uintptr_t>(&find_module);
    if (here < m.begin || here >= m.end) return 0;
    module = m;
    return 1;
}
static uintptr_t address(const Variable& v) { return tls_begin + v.offset; }

#ifdef SIMT_CHECK
enum Kind : uint8_t { READ, WRITE, ATOMIC, NONE };
static const char* const KIND[] = {"read", "write", "atomic"};
struct Stamp { uint32_t code, epoch, clock; uint16_t thread; uint8_t bytes; Kind kind; };   // code: offset in the library
struct Foreign { uint32_t code; uint16_t thread; uint8_t bytes; };
struct Cell {
    uint32_t block;                     // whose stamps these are; of an earlier launch: the cell is void
    uint8_t written, turn;
    Stamp write[2], read[3];            // the last ones of this block
    Foreign here[3], foreign[3];        // by kind: all bytes touched by this block, and by earlier ones
};
struct Range { uintptr_t begin, end; const char* name; bool writable, shared; Cell* cells; };
static std::vector<Range> ranges;       // ascending
static const Range* hot;
static Cell* shadow;
static size_t shadow_cells;
static uint32_t first_block, block;     // counted through all launches, so that old cells need no clearing

static const Range* range_of(uintptr_t at, size_t bytes) {
    if (hot && at >= hot->begin && at + bytes <= hot->end) return hot;
    auto next = std::upper_bound(ranges.begin(), ranges.end(), at, [](uintptr_t a, const Range& r) { return a < r.begin; });
    if (next == ranges.begin()) return nullptr;
    const Range& r = *--next;
    return at >= r.begin && at + bytes <= r.end ? hot = &r : nullptr;
}

[[noreturn]] static void report_nowhere(uintptr_t at, size_t bytes, Kind kind) {
    const uintptr_t stacks = reinterpret_cast<uintptr_t>(current->stacks);
    if (at - stacks < MAX_THREADS * STACK)
        fail("out of bounds", nullptr, 0, "%s of %zu bytes in the local memory of thread %u", KIND[kind], bytes, unsigned((at - stacks) / STACK));
    const Range* near = nullptr;
    uintptr_t distance = ~uintptr_t(0);
    for (const Range& r : ranges) {
        // in a gap between two, it is rather behind the one than before the other
        const uintptr_t d = at < r.begin ? r.begin - at + 512 : at - r.begin < r.end - r.begin ? 0 : at - r.end + 1;
        if (d < distance) distance = d, near = &r;
    }
    if (near && distance < 1u << 20)
        fail("out of bounds", nullptr, 0, "%s of %zu bytes at byte offset %td of %s (%zu bytes)", KIND[kind], bytes,
             ptrdiff_t(at - near->begin), near->name, size_t(near->end - near->begin));
    fail("out of bounds", nullptr, 0, "%s of %zu bytes at address %p, which belongs to no argument", KIND[kind], bytes, reinterpret_cast<void*>(at));
}

static bool before(const Stamp& a, const Fiber& f) {    // did that access happen before what this thread does now?
    if (a.thread == f.linear || a.epoch < epoch) return true;
    return a.thread / 32 == f.linear / 32 && f.clock[a.thread % 32] >= a.clock;
}

[[noreturn]] static void report_race(const Range& r, uintptr_t at, Kind kind, uint32_t code, Kind other, unsigned thread, bool other_block) {
    current->code[1] = reinterpret_cast<const void*>(module.begin + code);
    fail("data race", nullptr, 0, "%s of byte offset %zu of %s races with %s %s by thread %u%s", KIND[kind], size_t(at - r.begin), r.name,
         other == ATOMIC ? "an" : "a", KIND[other], thread, other_block ? " of another block" : "");
}
static bool conflict(Kind a, Kind b) { return a != NONE && b != NONE && !(a == READ && b == READ) && !(a == ATOMIC && b == ATOMIC); }

// Of a block that has ended, one mask of bytes and one witness for each kind of access are kept.
static void enter_block(Cell& c, bool shared) {
    if (c.block < first_block || shared) {
        c = Cell{};
    } else {
        for (int k = 0; k < 3; ++k) {
            if (!c.here[k].bytes) continue;
            c.here[k].bytes |= c.foreign[k].bytes;
            c.foreign[k] = c.here[k], c.here[k].bytes = 0;
        }
    }
    for (Stamp& s : c.write) s.kind = NONE;
    for (Stamp& s : c.read) s.kind = NONE;
    c.block = block;
}

static void visit(Cell& c, const Range& r, uintptr_t at, uint8_t bytes, Kind kind, uint32_t code, const Fiber& f) {
    if (c.block != block) enter_block(c, r.shared);
    if (r.shared) {
        if (kind != WRITE && bytes & ~c.written)
            fail("uninitialised", nullptr, 0, "%s of byte offset %zu of %s, which no thread of this block has written", KIND[kind], size_t(at - r.begin), r.name);
        if (kind != READ) c.written |= bytes;
    }
    if (!current->races) return;
    for (int k = 0; k < 3; ++k) {
        const Foreign& o = c.foreign[k];
        if (o.bytes & bytes && conflict(Kind(k), kind)) report_race(r, at, kind, o.code, Kind(k), o.thread, true);
    }
    for (const Stamp& s : c.write) if (conflict(s.kind, kind) && s.bytes & bytes && !before(s, f)) report_race(r, at, kind, s.code, s.kind, s.thread, false);
    const Stamp now{code, epoch, f.clock[f.lane], uint16_t(f.linear), bytes, kind};
    Stamp *slots, *slot = nullptr;
    unsigned n;
    if (kind == READ) {
        slots = c.read, n = 3;
    } else {
        for (Stamp& s : c.read) {
            if (s.kind == NONE || !(s.bytes & bytes)) continue;
            if (!before(s, f)) report_race(r, at, kind, s.code, READ, s.thread, false);
            if (!(s.bytes & ~bytes) && kind == WRITE) s.kind = NONE;       // what races with that read races with this write
        }
        slots = c.write, n = 2;
    }
    for (unsigned i = 0; i < n && !slot; ++i)
        if (slots[i].kind != NONE && slots[i].thread == now.thread && !(slots[i].bytes & ~bytes) && slots[i].kind == kind) slot = &slots[i];
    for (unsigned i = 0; i < n && !slot; ++i) if (slots[i].kind == NONE) slot = &slots[i];
    for (unsigned i = 0; i < n && !slot; ++i)           // what happened before now cannot race with what comes after now, if now is seen
        if (!(slots[i].bytes & ~bytes) && before(slots[i], f) && !(slots[i].kind == WRITE && kind == ATOMIC)) slot = &slots[i];
    if (!slot) slot = &slots[c.turn++ % n];
    if (!r.shared) {
        Foreign& h = c.here[kind];
        h = {code, uint16_t(f.linear), uint8_t(h.bytes | bytes)};
    }
    *slot = now;
}

static void access(const void* p, size_t bytes, Kind kind, const void* code, bool aligned) {
    if (!current || !bytes) return;
    const uintptr_t at = reinterpret_cast<uintptr_t>(p);
    const Fiber& f = *static_cast<Fiber*>(self);
    const uintptr_t stack = reinterpret_cast<uintptr_t>(current->stacks) + f.linear * STACK;
    if (at - stack < STACK) return;
    const Range* r = range_of(at, bytes);
    current->code[0] = last_access = code;
    if (!r) {
        if (at >= module.begin && at + bytes <= module.end) return;     // constants and __device__ variables
        report_nowhere(at, bytes, kind);
    }
    if (aligned && at & (bytes - 1))
        fail("misaligned", nullptr, 0, "%s of %zu bytes at byte offset %zu of %s", KIND[kind], bytes, size_t(at - r->begin), r->name);
    if (kind != READ && !r->writable) fail("read-only", nullptr, 0, "%s of %s, which is read-only", KIND[kind], r->name);
    const uint32_t offset = uint32_t(reinterpret_cast<uintptr_t>(code) - module.begin);
    const uintptr_t base = r->begin & ~uintptr_t(3);
    for (uintptr_t word = at & ~uintptr_t(3); word < at + bytes; word += 4) {
        const unsigned low = word < at ? unsigned(at - word) : 0, high = unsigned(std::min<uintptr_t>(4, at + bytes - word));
        visit(r->cells[(word - base) / 4], *r, word + low, uint8_t(((1u << high) - 1) & ~((1u << low) - 1)), kind, offset, f);
    }
    current->code[0] = nullptr;
}

void note_atomic(const void* p, size_t bytes, const void* code) { access(p, bytes, ATOMIC, code, true); }
void* copy_seen(void* to, const void* from, size_t bytes) {
    access(from, bytes, READ, __builtin_return_address(0), false);
    access(to, bytes, WRITE, __builtin_return_address(0), false);
    return memcpy(to, from, bytes);
}
void* set_seen(void* to, int byte, size_t bytes) {
    access(to, bytes, WRITE, __builtin_return_address(0), false);
    return memset(to, byte, bytes);
}

void begin_clocks() {
    for (unsigned i = 0; i < n_threads; ++i) {
        std::fill(fibers[i].clock, fibers[i].clock + 32, 0u);
        fibers[i].clock[i % 32] = 1;
    }
}
void join_clocks(Lanes& lanes) {        // all that any of them did before is before what each does now
    unsigned newest[32] = {};
    for (unsigned l = 0; l < 32; ++l)
        if (lanes.has(l)) for (unsigned k = 0; k < 32; ++k) newest[k] = std::max(newest[k], lanes[l].clock[k]);
    for (unsigned l = 0; l < 32; ++l) {
        if (!lanes.has(l)) continue;
        std::copy(newest, newest + 32, lanes[l].clock);
        ++lanes[l].clock[l];
    }
}
static void make_ranges(Launch& how) {
    ranges.clear(), hot = nullptr;
    for (uint32_t i = 0; i < how.n_variables; ++i) {
        const uintptr_t begin = address(how.variables[i]);
        const bool dynamic = begin == dynamic_begin;
        ranges.push_back({begin, begin + (dynamic ? dynamic_bytes : how.variables[i].bytes), how.variables[i].name, true, true, nullptr});
    }
    for (uint32_t i = 0; i < how.n_buffers; ++i) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(place_of(i));
        ranges.push_back({begin, begin + how.buffers[i].bytes, how.buffers[i].name, how.buffers[i].writable != 0, false, nullptr});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    size_t cells = 0;
    for (const Range& r : ranges) cells += (r.end - r.begin) / 4 + 2;
    const bool worn = block > 0x7fffffffu;
    if (cells > shadow_cells || worn) {
        if (shadow) munmap(shadow, shadow_cells * sizeof(Cell));
        shadow_cells = std::max(cells, 2 * shadow_cells);
        shadow = static_cast<Cell*>(mmap(nullptr, shadow_cells * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (worn) block = 0;
    }
    Cell* next = shadow;
    for (Range& r : ranges) r.cells = next, next += (r.end - r.begin) / 4 + 2;
    first_block = ++block;
}
static void next_block() { ++block; }
void end_launch() {}
#else
void note_atomic(const void*, size_t, const void* code) { last_access = code; }
void begin_clocks() {}
void join_clocks(Lanes&) {}
void end_launch() {}
static void make_ranges(Launch&) {}
static void next_block() {}
#endif

void begin_launch(Launch& how, char* dynamic, size_t capacity) {
    (void)capacity;
    dl_iterate_phdr(find_module, nullptr);
    tls_begin = module.tls;             // of this thread: the caller has touched it
    dynamic_begin = reinterpret_cast<uintptr_t>(dynamic), dynamic_bytes = how.shared_bytes;
    make_ranges(how);
}
void begin_block() {            // what no thread has written is no number
    next_block();
    for (uint32_t i = 0; i < current->n_variables; ++i) {
        const Variable& v = current->variables[i];
        memset(reinterpret_cast<void*>(address(v)), 0xff, address(v) == dynamic_begin ? dynamic_bytes : v.bytes);
    }
}
}  // namespace simt

#ifdef SIMT_CHECK
#define CODE __builtin_return_address(0)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESSES(N)                                                                               \
    void __tsan_read##N(void* p) { simt::access(p, N, simt::READ, CODE, true); }                   \
    void __tsan_write##N(void* p) { simt::access(p, N, simt::WRITE, CODE, true); }                 \
    void __tsan_volatile_read##N(void* p) { simt::access(p, N, simt::READ, CODE, true); }          \
    void __tsan_volatile_write##N(void* p) { simt::access(p, N, simt::WRITE, CODE, true); }        \
    void __tsan_unaligned_read##N(void* p) { simt::access(p, N, simt::READ, CODE, false); }        \
    void __tsan_unaligned_write##N(void* p) { simt::access(p, N, simt::WRITE, CODE, false); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { simt::access(p, bytes, simt::READ, CODE, false); }
void __tsan_write_range(void* p, size_t bytes) { simt::access(p, bytes, simt::WRITE, CODE, false); }

// What g++ hands over with each finding: where, and the types.
struct Site { const char* file; uint32_t line, column; };
struct Type { uint16_t kind, info; char name[1]; };
struct Finding { Site site; const Type* type[2]; };
#define FINDING(NAME, PARAMETERS, ...)                                                            \
    void __ubsan_handle_##NAME PARAMETERS {                                                       \
        if (!simt::current) return;                                                               \
        simt::current->code[0] = CODE;                                                            \
        simt::fail("arithmetic", d->site.file, int(d->site.line), __VA_ARGS__);                   \
    }
FINDING(add_overflow, (Finding* d, void*, void*), "a sum does not fit %s", d->type[0]->name)
FINDING(sub_overflow, (Finding* d, void*, void*), "a difference does not fit %s", d->type[0]->name)
FINDING(mul_overflow, (Finding* d, void*, void*), "a product does not fit %s", d->type[0]->name)
FINDING(negate_overflow, (Finding* d, void*), "a negated number does not fit %s", d->type[0]->name)
FINDING(divrem_overflow, (Finding* d, void*, void*), "an integer is divided by zero, or its quotient does not fit %s", d->type[0]->name)
FINDING(shift_out_of_bounds, (Finding* d, void* value, void* by), "shift of %s (%lld) by %lld bits", d->type[0]->name,
        (long long)(intptr_t)value, (long long)(intptr_t)by)
FINDING(float_cast_overflow, (Finding* d, void*), "a value of %s does not fit %s", d->type[0]->name, d->type[1]->name)
FINDING(load_invalid_value, (Finding* d, void* value), "%lld is no value of %s", (long long)(intptr_t)value, d->type[0]->name)
FINDING(builtin_unreachable, (Finding* d), "a place declared unreachable was reached")
FINDING(missing_return, (Finding* d), "a function with a result ends without one")
void __ubsan_handle_out_of_bounds(Finding* d, void* index) {
    if (!simt::current) return;
    simt::current->code[0] = CODE;
    simt::fail("out of bounds", d->site.file, int(d->site.line), "index %lld of an array %s", (long long)(intptr_t)index, d->type[0]->name);
}
void __ubsan_handle_type_mismatch_v1(Finding* d, void* pointer) {
    if (!simt::current) return;
    simt::current->code[0] = CODE;
    char where[200];
    if (!simt::name_address(where, sizeof where, reinterpret_cast<uintptr_t>(pointer))) snprintf(where, sizeof where, "access to address %p", pointer);
    simt::fail("misaligned", d->site.file, int(d->site.line), "%s as %s", where, d->type[0]->name);
}
}
#endif
