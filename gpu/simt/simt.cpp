// The machine behind simt.h: it runs the threads of a grid, and stops at the first thing that CUDA forbids.
//
// The threads of one block are fibers on one thread of the system, each running until it waits in a barrier or a warp
// operation; blocks run one after another. So a run is deterministic for a seed, and an atomic needs no lock. The seed
// shuffles blocks and, whenever a fiber has to be chosen, the ready ones.
//
// Signals tell what no callback can: a fault on a guard page (the end of an argument, a stack), an illegal instruction,
// and the timer of a kernel that never ends. Each leaves the fibers where they are and jumps back to the launch.
#include "machine.h"

#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <numeric>
#include <vector>

namespace simt {

Thread* self;
Grid grid;
Launch* current;
unsigned epoch, n_threads;
Fiber fibers[MAX_THREADS];

// ---- changing from one stack to another ------------------------------------------------------------------------
#if defined(__x86_64__) && !defined(SIMT_PORTABLE)
// Only what a callee must keep has to be kept: six registers and the stack pointer.
extern "C" void simt_change(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
    .text
    .hidden simt_change
    .type simt_change, @function
simt_change:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size simt_change, . - simt_change
)");
static void prepare(Context& c, char* bottom, size_t size, void (*entry)()) {
    uintptr_t top = (reinterpret_cast<uintptr_t>(bottom) + size) & ~uintptr_t(63);
    void** at = reinterpret_cast<void**>(top) - 2;      // as just after a call: 8 bytes off a multiple of 16
    at[1] = nullptr;
    at[0] = reinterpret_cast<void*>(entry);
    c.pointer = at - 6;
}
static void change(Context& from, Context& to) { simt_change(&from.pointer, to.pointer); }
#else
static void prepare(Context& c, char* bottom, size_t size, void (*entry)()) {
    getcontext(&c.first);
    c.first.uc_stack.ss_sp = bottom, c.first.uc_stack.ss_size = size, c.first.uc_link = nullptr;
    makecontext(&c.first, entry, 0);
    c.started = false;
}
static void change(Context& from, Context& to) {        // the first time by its context, later by the quicker jump
    from.started = true;
    if (_setjmp(from.later)) return;
    if (to.started) _longjmp(to.later, 1);
    to.started = true;
    setcontext(&to.first);
}
#endif

// ---- scheduler -------------------------------------------------------------------------------------------------
struct Warp { unsigned alive, waiting; };
static Warp warps[MAX_THREADS / 32];
static Context launcher;
static unsigned ready_ring[2 * MAX_THREADS], ring_head, ring_tail, n_alive, n_at_barrier, sum_of_votes, result_of_vote, voters;
static uint64_t random_state;
static void (*kernel)(void*);
static void* kernel_context;
static bool failed;
static sigjmp_buf after_signal;
static pthread_t running_thread;
static volatile sig_atomic_t armed;

static unsigned random_below(unsigned n) {              // xorshift*: every state but 0
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return unsigned(((random_state * 0x2545f4914f6cdd1du >> 32) * n) >> 32);
}

static Fiber& me() { return static_cast<Fiber&>(*self); }
static void make_ready(unsigned i) {
    fibers[i].state = READY;
    ready_ring[ring_tail++ % (2 * MAX_THREADS)] = i;
}

[[noreturn]] static void report_deadlock();

static void run_another() {             // sleep until made ready and chosen
    Fiber& from = me();
    if (ring_head == ring_tail) {
        if (n_alive) report_deadlock();
        change(from.context, launcher);
        return;
    }
    unsigned& front = ready_ring[ring_head % (2 * MAX_THREADS)];
    if (current->seed) std::swap(front, ready_ring[(ring_head + random_below(ring_tail - ring_head)) % (2 * MAX_THREADS)]);
    ++ring_head;
    Fiber& to = fibers[front];
    if (&to == &from) return;
    self = &to;
    change(from.context, to.context);
}
void yield() {
    make_ready(me().linear);
    run_another();
}

static void note_fault(const char* fault, const char* file, int line) {
    snprintf(current->fault, FAULT_ROOM, "%s", fault);
    current->file = file, current->line = line;
    const uint3 t = self->index, b = grid.block_index;
    const uint32_t thread[] = {t.x, t.y, t.z}, block[] = {b.x, b.y, b.z};
    std::copy(thread, thread + 3, current->thread), std::copy(block, block + 3, current->at_block);
    failed = true;
}
void fail(const char* fault, const char* file, int line, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(current->text, current->room, format, args);
    va_end(args);
    note_fault(fault, file, line);
    change(me().context, launcher);
    __builtin_unreachable();
}

static void report_deadlock() {         // the running fiber is the last that went to sleep
    char text[700];
    int n = 0;
    const Fiber* last = nullptr;
    for (unsigned i = 0; i < n_threads && n < 600; ++i) {
        const Fiber& f = fibers[i];
        if (f.state == DONE) continue;
        if (last && last->state == f.state && last->wait.line == f.wait.line && last->wait.mask == f.wait.mask) continue;
        n += snprintf(text + n, sizeof text - n, "%s thread %u in %s at line %d", last ? ";" : "", i, f.wait.operation, f.wait.line);
        if (f.state == IN_WARP) n += snprintf(text + n, sizeof text - n, " (mask %08x)", f.wait.mask);
        last = &f;
    }
    // name a line where somebody waits, also when the thread that ran last has ended
    const Fiber& blame = me().state == DONE && last ? *last : me();
    self = const_cast<Fiber*>(&blame);
    current->code[0] = nullptr;
    char whole[800];
    snprintf(whole, sizeof whole, "%u of %u threads wait for others, who never come:%s", n_alive, n_threads, text);
    snprintf(current->text, current->room, "%s", whole);
    note_fault("deadlock", blame.wait.file, blame.wait.line);
    Context nowhere;
    change(nowhere, launcher);
    __builtin_unreachable();
}

static void open_barrier() {
    const Fiber* first = nullptr;
    for (unsigned i = 0; i < n_threads; ++i) {
        const Fiber& f = fibers[i];
        if (f.state != IN_BLOCK) continue;
        if (!first) first = &f;
        if (f.wait.line != first->wait.line || f.wait.file != first->wait.file || f.wait.operation != first->wait.operation)
            fail("divergent barrier", f.wait.file, f.wait.line, "thread %u waits in %s at line %d, thread %u in %s at line %d",
                 first->linear, first->wait.operation, first->wait.line, f.linear, f.wait.operation, f.wait.line);
    }
    const unsigned sum = sum_of_votes;
    const char vote = char(first->wait.source);
    result_of_vote = vote == '+' ? sum : vote == '&' ? sum == voters : sum != 0;
    n_at_barrier = 0, sum_of_votes = 0, voters = 0, ++epoch;
    for (unsigned i = 0; i < n_threads; ++i)
        if (fibers[i].state == IN_BLOCK) {
            fibers[i].wait.result = result_of_vote;
            if (&fibers[i] == self) fibers[i].state = READY;
            else make_ready(i);
        }
}
int block_barrier(const char* operation, const char* file, int line, int predicate, char vote) {
    Fiber& f = me();
    f.wait.operation = operation, f.wait.file = file, f.wait.line = line, f.wait.mask = 0, f.wait.source = unsigned(vote);
    f.state = IN_BLOCK;
    sum_of_votes += predicate != 0, ++voters;
    if (++n_at_barrier == n_alive) {
        open_barrier();
        if (current->seed && random_below(2)) yield();          // the last to come need not be the first to go on
    } else {
        run_another();
    }
    return int(f.wait.result);
}

static bool complete_warp_operation(Warp& warp, unsigned base, unsigned mask) {
    mask &= warp.alive;                 // lanes that have ended are not waited for
    if ((warp.waiting & mask) != mask) return false;
    Lanes lanes{base, mask};
    const Fiber& first = lanes[unsigned(__builtin_ctz(mask))];
    for (unsigned l = 0; l < 32; ++l) {
        if (!lanes.has(l)) continue;
        const Wait &a = first.wait, &b = lanes[l].wait;
        if (a.mask != b.mask || a.operation != b.operation || a.line != b.line || a.file != b.file)
            fail("divergent warp operation", b.file, b.line, "lane %u is in %s (mask %08x) at line %d, lane %u in %s (mask %08x) at line %d",
                 first.lane, a.operation, a.mask, a.line, l, b.operation, b.mask, b.line);
    }
    first.wait.compute(lanes);
    warp.waiting &= ~mask;
    for (unsigned l = 0; l < 32; ++l)
        if (lanes.has(l) && &lanes[l] != self) make_ready(base + l);
    return true;
}
uint64_t warp_operation(const char* operation, const char* file, int line, unsigned mask, uint64_t value, unsigned source, Collective compute) {
    Fiber& f = me();
    if (!(mask >> f.lane & 1)) fail("mask", file, line, "the mask %08x of %s lacks lane %u, which calls it", mask, operation, f.lane);
    f.wait = {operation, file, line, mask, source, value, 0, compute};
    f.state = IN_WARP;
    Warp& warp = warps[f.linear / 32];
    warp.waiting |= 1u << f.lane;
    if (complete_warp_operation(warp, f.linear & ~31u, mask)) {
        f.state = READY;
        if (current->seed && random_below(2)) yield();
    } else {
        run_another();
    }
    return f.wait.result;
}

static void fiber_main() {
    for (;;) {
        kernel(kernel_context);
        Fiber& f = me();
        f.state = DONE, --n_alive;
        Warp& warp = warps[f.linear / 32];
        warp.alive &= ~(1u << f.lane);
        if (n_alive && n_at_barrier == n_alive) open_barrier();         // the others may have waited for this one alone
        if (warp.waiting) {
            // a lane is waited for by name: all groups that named it may now be complete
            for (unsigned left = warp.waiting; left; left &= left - 1) {
                const unsigned l = unsigned(__builtin_ctz(left));
                if (warp.waiting >> l & 1) complete_warp_operation(warp, f.linear & ~31u, fibers[(f.linear & ~31u) + l].wait.mask);
            }
        }
        run_another();
    }
}

// ---- what warp operations compute --------------------------------------------------------------------------------
void check_width(int width, const char* operation, const char* file, int line) {
    if (width < 1 || width > 32 || width & (width - 1)) fail("width", file, line, "%s with width %d, which is no power of two up to 32", operation, width);
}
void read_source(Lanes& lanes) {
    for (unsigned l = 0; l < 32; ++l) {
        if (!lanes.has(l)) continue;
        const Wait& w = lanes[l].wait;
        if (!lanes.has(w.source)) {
            self = &lanes[l];           // name the lane that reads; every lane of the group sleeps here, so its stack is not needed
            fail("inactive lane", w.file, w.line, "%s: lane %u reads lane %u, which takes no part (mask %08x)", w.operation, l, w.source, w.mask);
        }
        lanes[l].wait.result = lanes[w.source].wait.value;
    }
}
template <class F> static void all_get(Lanes& lanes, uint64_t start, F combine) {
    for (unsigned l = 0; l < 32; ++l) if (lanes.has(l)) start = combine(start, lanes[l].wait.value, l);
    for (unsigned l = 0; l < 32; ++l) if (lanes.has(l)) lanes[l].wait.result = start;
}
void vote(Lanes& lanes) { all_get(lanes, 0, [](uint64_t s, uint64_t v, unsigned l) { return s | v << l; }); }
void add(Lanes& lanes) { all_get(lanes, 0, [](uint64_t s, uint64_t v, unsigned) { return uint64_t(uint32_t(s + v)); }); }
void conjunction(Lanes& lanes) { all_get(lanes, ~uint64_t(0), [](uint64_t s, uint64_t v, unsigned) { return s & v; }); }
void disjunction(Lanes& lanes) { all_get(lanes, 0, [](uint64_t s, uint64_t v, unsigned) { return s | v; }); }
void exclusive(Lanes& lanes) { all_get(lanes, 0, [](uint64_t s, uint64_t v, unsigned) { return s ^ v; }); }
void minimum(Lanes& lanes) { all_get(lanes, ~uint64_t(0), [](uint64_t s, uint64_t v, unsigned) { return std::min(s, v); }); }
void maximum(Lanes& lanes) { all_get(lanes, 0, [](uint64_t s, uint64_t v, unsigned) { return std::max(s, v); }); }
void minimum_signed(Lanes& lanes) {
    all_get(lanes, uint32_t(INT32_MAX), [](uint64_t s, uint64_t v, unsigned) { return uint64_t(uint32_t(std::min(int32_t(s), int32_t(v)))); });
}
void maximum_signed(Lanes& lanes) {
    all_get(lanes, uint32_t(INT32_MIN), [](uint64_t s, uint64_t v, unsigned) { return uint64_t(uint32_t(std::max(int32_t(s), int32_t(v)))); });
}
void match_value(Lanes& lanes) {
    for (unsigned l = 0; l < 32; ++l) {
        if (!lanes.has(l)) continue;
        unsigned same = 0;
        for (unsigned k = 0; k < 32; ++k) if (lanes.has(k) && lanes[k].wait.value == lanes[l].wait.value) same |= 1u << k;
        lanes[l].wait.result = same;
    }
}
void match_everyone(Lanes& lanes) {
    const uint64_t value = lanes[unsigned(__builtin_ctz(lanes.mask))].wait.value;
    bool same = true;
    for (unsigned l = 0; l < 32; ++l) same &= !lanes.has(l) || lanes[l].wait.value == value;
    for (unsigned l = 0; l < 32; ++l) if (lanes.has(l)) lanes[l].wait.result = same ? lanes[l].wait.mask : 0;
}
void order_memory(Lanes& lanes) { join_clocks(lanes); }

uint3 thread_index() { return self->index; }
uint3 block_index() { return grid.block_index; }
dim3 block_size() { return grid.block; }
dim3 grid_size() { return grid.grid; }
unsigned lane() { return self->lane; }
void copy_hidden(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

uint64_t atomic_load(const void* p, size_t bytes, const char* file, int line) {
    note_atomic(p, bytes, __builtin_return_address(0));
    if (reinterpret_cast<uintptr_t>(p) % bytes) fail("misaligned", file, line, "atomic on %zu bytes at an address that is no multiple of that", bytes);
    uint64_t bits = 0;
    memcpy(&bits, p, bytes);
    return bits;
}
void atomic_store(void* p, uint64_t bits, size_t bytes) { memcpy(p, &bits, bytes); }

// ---- arguments -------------------------------------------------------------------------------------------------
// Each travels in memory of its own, as on a GPU, that ends at a page nobody may touch; what is left of the last 16 bytes
// and of the first page holds a pattern that must not have changed afterwards.
static const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));
constexpr unsigned char PATTERN = 0xa5;
struct Place { char* map; size_t pages; char* data; };
static std::map<size_t, std::vector<char*>> spare;      // by number of pages
static std::vector<Place> places;                       // of this launch's buffers
static size_t spare_pages;

static char* take_pages(size_t pages) {                 // with one guard page on either side
    std::vector<char*>& left = spare[pages];
    if (!left.empty()) {
        char* p = left.back();
        left.pop_back(), spare_pages -= pages;
        return p;
    }
    char* p = static_cast<char*>(mmap(nullptr, (pages + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (p == MAP_FAILED) return nullptr;
    if (mprotect(p + PAGE, pages * PAGE, PROT_READ | PROT_WRITE)) { munmap(p, (pages + 2) * PAGE); return nullptr; }
    return p;
}
static void give_pages(char* p, size_t pages) {
    if (spare_pages + pages > 16384) { munmap(p, (pages + 2) * PAGE); return; }         // keep 64 MiB at most
    spare[pages].push_back(p), spare_pages += pages;
}
static size_t rounded(size_t bytes) { return (bytes + 15) & ~size_t(15); }

static bool bring_buffers(Launch& how) {
    places.clear();
    for (uint32_t i = 0; i < how.n_buffers; ++i) {
        const Buffer& b = how.buffers[i];
        size_t pages = std::max<size_t>(1, (b.bytes + PAGE - 1) / PAGE);
        if (pages > 8) while (pages & (pages - 1)) pages += pages & -pages;              // few sizes, so that spare ones fit
        char* map = take_pages(pages);
        if (!map) return false;
        char *begin = map + PAGE, *end = begin + pages * PAGE, *data = end - rounded(b.bytes);
        memset(std::max(begin, data - PAGE), PATTERN, size_t(data - std::max(begin, data - PAGE)));
        memcpy(data, b.host, b.bytes);
        memset(data + b.bytes, PATTERN, size_t(end - data) - b.bytes);
        places.push_back({map, pages, data});
    }
    for (uint32_t i = 0; i < how.n_values; ++i)
        if (how.buffer_of[i] >= 0) memcpy(how.values[i], &places[size_t(how.buffer_of[i])].data, sizeof(char*));
    return true;
}
static void return_buffers(Launch& how) {
    bool spilt = false;
    for (uint32_t i = 0; i < places.size() && !failed; ++i) {
        Buffer& b = how.buffers[i];
        const Place& p = places[i];
        const char *begin = std::max(p.map + PAGE, p.data - PAGE), *end = p.map + (p.pages + 1) * PAGE;
        const auto changed = [](const char* from, const char* to) {
            return std::any_of(from, to, [](char c) { return static_cast<unsigned char>(c) != PATTERN; });
        };
        if (changed(begin, p.data)) b.tail = 1;
        else if (changed(p.data + b.bytes, end)) b.tail = 2;
        else if (!b.writable && memcmp(b.host, p.data, b.bytes)) b.tail = 3;
        spilt |= b.tail != 0;
    }
    for (uint32_t i = 0; i < places.size(); ++i) {
        const Buffer& b = how.buffers[i];
        if (!failed && !spilt && b.writable) memcpy(b.host, places[i].data, b.bytes);
        give_pages(places[i].map, places[i].pages);
    }
    places.clear();
}
char* place_of(uint32_t buffer) { return places[buffer].data; }

// ---- signals ---------------------------------------------------------------------------------------------------
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction before[4], timer_before;
static int timer_signal;
static char* signal_stack;
constexpr size_t SIGNAL_STACK = 64 << 10;

static const void* instruction(void* context) {
#if defined(__x86_64__)
    return reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__aarch64__)
    return reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc + 1);
#else
    (void)context;
    return nullptr;
#endif
}
static void on_signal(int number, siginfo_t* info, void* context) {
    if (!armed || !pthread_equal(pthread_self(), running_thread)) {
        if (number == timer_signal) return;
        for (int i = 0; i < 4; ++i) if (SIGNALS[i] == number) sigaction(number, &before[i], nullptr);   // not ours: let it happen again
        return;
    }
    armed = 0;
    current->code[0] = instruction(context), current->code[1] = nullptr;
    const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
    const char* fault = "trap";
    if (number == timer_signal) {
        fault = "endless", current->code[1] = last_access;
        snprintf(current->text, current->room, "still running after %g s of processor time", current->seconds);
    } else if (number == SIGSEGV || number == SIGBUS) {
        const uintptr_t stacks = reinterpret_cast<uintptr_t>(current->stacks);
        fault = "out of bounds";
        if (info->si_code == SI_KERNEL && !at) {        // a general protection fault, which has no address
            fault = "misaligned";
            snprintf(current->text, current->room, "access of 16 bytes at an address that is no multiple of 16");
        } else if (at - stacks < MAX_THREADS * STACK) {
            fault = "stack overflow";
            snprintf(current->text, current->room, "thread %u uses more than %zu bytes of local memory", unsigned((at - stacks) / STACK), STACK - PAGE);
        } else if (!name_address(current->text, current->room, at)) {
            snprintf(current->text, current->room, "access to address %p, which belongs to no argument", info->si_addr);
        }
    } else {
        snprintf(current->text, current->room, number == SIGFPE ? "an integer was divided by zero, or its quotient does not fit" : "an illegal instruction was reached");
    }
    note_fault(fault, nullptr, 0);
    siglongjmp(after_signal, 1);
}
bool name_address(char* text, size_t room, uintptr_t at) {       // which argument an address is next to
    for (size_t i = 0; i < places.size(); ++i) {
        const Place& p = places[i];
        const uintptr_t begin = reinterpret_cast<uintptr_t>(p.map);
        if (at < begin || at >= begin + (p.pages + 2) * PAGE) continue;
        snprintf(text, room, "access to byte offset %td of %s (%zu bytes)", ptrdiff_t(at - reinterpret_cast<uintptr_t>(p.data)),
                 current->buffers[i].name, current->buffers[i].bytes);
        return true;
    }
    return false;
}

struct Watch {                          // the handlers and the timer, for the time of one launch
    timer_t timer;
    bool has_timer = false;
    stack_t stack_before;
    Watch(double seconds) {
        if (!signal_stack) signal_stack = static_cast<char*>(mmap(nullptr, SIGNAL_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        stack_t ours{};
        ours.ss_sp = signal_stack, ours.ss_size = SIGNAL_STACK;
        sigaltstack(&ours, &stack_before);
        struct sigaction action{};
        action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &before[i]);
        timer_signal = SIGRTMAX - 3;
        sigaction(timer_signal, &action, &timer_before);
        if (seconds > 0) {
            sigevent event{};
            event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = timer_signal;
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
            event.sigev_notify_thread_id = pid_t(syscall(SYS_gettid));
            if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0) {
                has_timer = true;
                itimerspec when{};
                when.it_value.tv_sec = time_t(seconds), when.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
                timer_settime(timer, 0, &when, nullptr);
            }
        }
    }
    ~Watch() {
        armed = 0;
        if (has_timer) timer_delete(timer);
        sigaction(timer_signal, &timer_before, nullptr);
        for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

// ---- launch ----------------------------------------------------------------------------------------------------
static void run_block(unsigned x, unsigned y, unsigned z) {
    grid.block_index = {x, y, z};
    epoch = 0, n_at_barrier = 0, sum_of_votes = 0, voters = 0, n_alive = n_threads, ring_head = ring_tail = 0;
    begin_block();
    for (unsigned i = 0; i < n_threads; ++i) {
        Fiber& f = fibers[i];
        f.linear = i, f.lane = i % 32;
        f.index = {i % grid.block.x, i / grid.block.x % grid.block.y, i / grid.block.x / grid.block.y};
        if (f.lane == 0) warps[i / 32] = {0, 0};
        warps[i / 32].alive |= 1u << f.lane;
        make_ready(i);
    }
    begin_clocks();
    unsigned& front = ready_ring[0];
    if (current->seed) std::swap(front, ready_ring[random_below(n_threads)]);
    ring_head = 1;
    self = &fibers[front];
    change(launcher, me().context);
}

// Fibers run between this and its return; a signal comes back here too. Nothing with a destructor lives in this frame.
static void __attribute__((noinline)) run_blocks(Launch& how, const uint32_t* order, uint64_t n_blocks) {
    if (sigsetjmp(after_signal, 0)) return;
    armed = 1;
    for (uint64_t i = 0; i < n_blocks && !failed; ++i) {
        const uint64_t b = order ? order[i] : i;
        run_block(unsigned(b % how.grid[0]), unsigned(b / how.grid[0] % how.grid[1]), unsigned(b / how.grid[0] / how.grid[1]));
    }
    armed = 0;
}

// Subnormal operands and results are 0 from here on: binary32 as with NVRTC's -ftz=true, and, as the processor knows no less, binary64.
static bool flush_subnormals() {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);
    return true;
#elif defined(__aarch64__)
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    asm volatile("msr fpcr, %0" : : "r"(control | uint64_t(1) << 24));
    return true;
#else
    return false;
#endif
}

int run(Launch& how, void (*body)(void*), void* context, char* dynamic, size_t capacity) {
    current = &how, kernel = body, kernel_context = context, running_thread = pthread_self(), failed = false;
    how.code[0] = how.code[1] = nullptr, how.file = nullptr, how.line = 0;
    random_state = how.seed * 0x9e3779b97f4a7c15u | 1;
    grid.grid = dim3(how.grid[0], how.grid[1], how.grid[2]), grid.block = dim3(how.block[0], how.block[1], how.block[2]);
    n_threads = how.block[0] * how.block[1] * how.block[2];
    if (!bring_buffers(how)) {
        places.clear();
        return 2;
    }
    fenv_t rounding;                                // another library may have switched subnormals off
    fegetenv(&rounding);
    fesetenv(FE_DFL_ENV);
    if (how.flush && !flush_subnormals()) {
        fesetenv(&rounding);
        return_buffers(how);
        return 3;
    }
    for (unsigned i = 0; i < n_threads; ++i)        // tops apart from each other in the cache, or they would all share one set
        prepare(fibers[i].context, how.stacks + i * STACK + PAGE, STACK - PAGE - (i % 61) * 64, fiber_main);
    begin_launch(how, dynamic, capacity);
    const uint64_t n_blocks = uint64_t(how.grid[0]) * how.grid[1] * how.grid[2];
    std::vector<uint32_t> order;
    if (how.seed && n_blocks <= 1u << 22) {
        order.resize(n_blocks);
        std::iota(order.begin(), order.end(), 0u);
        for (uint64_t i = n_blocks; i > 1; --i) std::swap(order[i - 1], order[random_below(unsigned(i))]);
    }
    {
        Watch watch(how.seconds);
        run_blocks(how, order.empty() ? nullptr : order.data(), n_blocks);
    }
    fesetenv(&rounding);
    end_launch();
    return_buffers(how);
    current = nullptr;
    return failed;
}
}  // namespace simt

// One set of stacks for all libraries of a process: they run one at a time.
extern "C" __attribute__((visibility("default"))) char* simt_stacks() {
    using namespace simt;
    char* p = static_cast<char*>(mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (p == MAP_FAILED) return nullptr;
    for (unsigned i = 0; i < MAX_THREADS; ++i) mprotect(p + i * STACK, PAGE, PROT_NONE);
    return p;
}
