// What a kernel's code needs of the scheduler in runtime.cpp: the running thread, barriers, warp collectives.
//
// A CUDA thread is a fiber: a stack of its own, switched by hand. One OS thread runs one block at a time, so a
// `static` variable is shared by exactly one block. Each worker loads its own copy of the module.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../abi.h"
#include "vector_types.h"

namespace cusim {

constexpr unsigned WARP_SIZE = 32;
constexpr uint32_t ALL_LANES = ~0u;

enum class State : uint8_t { ready, at_block_barrier, in_warp_collective, finished };

struct Fiber {
    void *stack_pointer;
    uint3 thread_index;
    unsigned index, lane, warp;
    State state;
    int barrier_line;  // source line of the barrier it waits at
};

struct Warp;
using Collective = void (*)(Warp &, uint32_t lanes);

// The operands and results of the collective that a warp's lanes are meeting in.
struct alignas(64) Warp {
    uint32_t alive, arrived;
    Collective collective[WARP_SIZE];
    uint32_t mask[WARP_SIZE];
    uint32_t in[WARP_SIZE][8], out[WARP_SIZE][8];
    float accumulator[WARP_SIZE][4];
};

extern Fiber *current;
extern Warp warps[cusim_abi::MAX_THREADS / WARP_SIZE];
extern uint3 block_index;
extern dim3 block_size, grid_size;
extern char *dynamic_shared;
extern bool eager_copies, truncating_mma;
extern bool barrier_any, barrier_all;
extern int barrier_count;

// Ends the block: the launch fails with this outcome and message.
[[noreturn]] void fail(cusim_abi::Outcome outcome, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Waits for all threads of the block that have not returned. `line` tells one __syncthreads() from another.
void block_barrier(bool predicate, int line);

// Waits for the lanes in `mask`; the last one to arrive runs `collective` for all of them.
void warp_collective(uint32_t mask, Collective collective);

inline Warp &current_warp() { return warps[current->warp]; }

// What the running thread's cp.async instructions copy, now or when it waits for them.
struct AsyncCopy {
    void *destination;
    const void *source;
    unsigned bytes, valid_bytes;  // the rest is filled with zeros
};

void perform(const AsyncCopy &copy);
void postpone(const AsyncCopy &copy);
void cp_async_commit();
void cp_async_wait(unsigned groups_left);  // until at most so many committed groups are still pending
void forget_copies(unsigned thread);

// Runs the blocks that this worker can get. `body` is called once per CUDA thread.
cusim_abi::Outcome run_blocks(cusim_abi::Launch &launch, void (*body)(const void *), const void *arguments);

void describe_thread(char *text, size_t bytes);

}  // namespace cusim
