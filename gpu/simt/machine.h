// What the scheduler (simt.cpp) and the checker (check.cpp) share.
#pragma once
#define SIMT_MACHINE                    // these files are not watched
#include "simt.h"

#include <ucontext.h>

#if !defined(__x86_64__) || defined(SIMT_PORTABLE)
#include <setjmp.h>
#endif

namespace simt {

constexpr size_t STACK = 256 << 10;     // of one fiber, its guard page included
constexpr unsigned MAX_THREADS = 1024, FAULT_ROOM = 40;

#if defined(__x86_64__) && !defined(SIMT_PORTABLE)
struct Context { void* pointer; };
#else
struct Context { ucontext_t first; jmp_buf later; bool started; };
#endif

enum State { READY, IN_BLOCK, IN_WARP, DONE };
struct Fiber : Thread {
    Context context;
    State state;
    unsigned clock[32];                 // what this thread knows of the lanes of its warp
};
extern Fiber fibers[MAX_THREADS];
extern unsigned n_threads;
extern unsigned epoch;                  // block barriers passed since the block began
extern Launch* current;
extern const void* last_access;         // code of the last one: where an endless kernel was, if it is interrupted in our code

struct Lanes {                          // those that take part in a warp operation
    unsigned base, mask;
    bool has(unsigned l) const { return mask >> l & 1; }
    Fiber& operator[](unsigned l) const { return fibers[base + l]; }
};

char* place_of(uint32_t buffer);        // where the copy of an argument lies
bool name_address(char* text, size_t room, uintptr_t at);

// The checker; in the fast build all but begin_block do nothing.
void begin_launch(Launch&, char* dynamic, size_t capacity);
void begin_block();
void begin_clocks();
void end_launch();
void join_clocks(Lanes&);
void note_atomic(const void* p, size_t bytes, const void* code);

}  // namespace simt
