// The scheduler: runs a block's threads as fibers, hand-switched on one OS thread. Linked into every module.
#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

using cusim_abi::Launch;
using cusim_abi::MAX_THREADS;
using cusim_abi::Outcome;

// Saves the callee-saved registers and the stack pointer, then continues on another stack.
extern "C" void cusim_switch(void **saved_stack, void *stack) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden cusim_switch
.globl cusim_switch
.type cusim_switch,@function
cusim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size cusim_switch,.-cusim_switch
)");
extern "C" char cusim_shared_begin[], cusim_shared_end[];  // set by module.ld

namespace cusim {

constexpr size_t SHARED_ALIGNMENT = 128;
constexpr unsigned char POISON = 0xff;  // four of them are a NaN

Fiber *current;
Warp warps[MAX_THREADS / WARP_SIZE];
uint3 block_index;
dim3 block_size, grid_size;
char *dynamic_shared;
bool eager_copies, truncating_mma;
bool barrier_any, barrier_all;
int barrier_count;

static Fiber fibers[MAX_THREADS];
static void *main_stack_pointer;
static Launch *launch;
static Outcome outcome;
static unsigned thread_count, alive_count, arrived_count;
static int true_count;  // predicates that were true at the barrier so far
static void (*kernel_body)(const void *);
static const void *kernel_arguments;

void describe_thread(char *text, size_t bytes) {
    uint3 thread = current ? current->thread_index : uint3{};
    snprintf(text, bytes, "block (%u,%u,%u), thread (%u,%u,%u)", block_index.x, block_index.y, block_index.z, thread.x,
             thread.y, thread.z);
}

static void switch_to(Fiber *next) {
    Fiber *previous = current;
    current = next;
    cusim_switch(&previous->stack_pointer, next->stack_pointer);
}

[[noreturn]] static void leave_block() {
    void *abandoned;
    cusim_switch(&abandoned, main_stack_pointer);
    __builtin_unreachable();
}

static void record_failure(Outcome kind, const char *format, va_list values) {
    outcome = kind;
    char where[96], what[200];
    describe_thread(where, sizeof where);
    vsnprintf(what, sizeof what, format, values);
    snprintf(launch->message, sizeof launch->message, "%s; %s", what, where);
}

void fail(Outcome kind, const char *format, ...) {
    va_list values;
    va_start(values, format);
    record_failure(kind, format, values);
    va_end(values);
    leave_block();
}

// The next ready fiber among `count` from `first` on, after the current one in the launch's order; or null.
static Fiber *next_ready(unsigned first, unsigned count) {
    unsigned i = current->index - first;
    for (unsigned tried = 0; tried < count; tried++) {
        if (launch->reverse) i = (i ? i : count) - 1;
        else if (++i == count) i = 0;
        if (fibers[first + i].state == State::ready) return &fibers[first + i];
    }
    return nullptr;
}

// The current fiber can't go on: runs the next ready one, or ends the block. A warp runs until all its lanes wait for
// other warps; so it gets as far ahead of them as barriers let it.
static void run_next() {
    unsigned first = current->index / WARP_SIZE * WARP_SIZE;
    Fiber *next = next_ready(first, std::min(WARP_SIZE, thread_count - first));
    if (!next) next = next_ready(0, thread_count);
    if (next) {
        if (next != current) switch_to(next);
        return;
    }
    if (alive_count)
        fail(Outcome::launch_failure, "deadlock: the remaining threads wait at different barriers or warp functions "
             "(divergent barrier)");
    leave_block();
}

static void release_block() {
    int line = 0;
    for (unsigned i = 0; i < thread_count; i++) {
        if (fibers[i].state != State::at_block_barrier) continue;
        if (line && fibers[i].barrier_line != line)
            fail(Outcome::launch_failure, "divergent barrier: threads of one block wait in lines %d and %d", line,
                 fibers[i].barrier_line);
        line = fibers[i].barrier_line;
        fibers[i].state = State::ready;
    }
    barrier_count = true_count;
    barrier_any = true_count > 0;
    barrier_all = true_count == int(arrived_count);
    arrived_count = 0;
    true_count = 0;
}

void block_barrier(bool predicate, int line) {
    true_count += predicate;
    current->barrier_line = line;
    current->state = State::at_block_barrier;
    if (++arrived_count == alive_count) release_block();
    else run_next();
}

// Runs a collective if all its living lanes have arrived.
static bool complete_collective(Warp &warp, uint32_t mask) {
    uint32_t needed = mask & warp.alive;
    if (!needed || (warp.arrived & needed) != needed) return false;
    Collective collective = warp.collective[__builtin_ctz(needed)];
    for (uint32_t rest = needed; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest);
        if (warp.collective[lane] != collective || warp.mask[lane] != mask)
            fail(Outcome::launch_failure, "lanes of one mask are in different warp functions");
    }
    collective(warp, needed);
    warp.arrived &= ~needed;
    Fiber *lanes = &fibers[(&warp - warps) * WARP_SIZE];
    for (uint32_t rest = needed; rest; rest &= rest - 1) lanes[__builtin_ctz(rest)].state = State::ready;
    return true;
}

void warp_collective(uint32_t mask, Collective collective) {
    Warp &warp = current_warp();
    unsigned lane = current->lane;
    if (!(mask >> lane & 1)) fail(Outcome::launch_failure, "the calling lane is not in its own mask");
    warp.collective[lane] = collective;
    warp.mask[lane] = mask;
    warp.arrived |= 1u << lane;
    current->state = State::in_warp_collective;
    if (!complete_collective(warp, mask)) run_next();
}

static void run_thread() {
    kernel_body(kernel_arguments);
    Warp &warp = current_warp();
    current->state = State::finished;
    alive_count--;
    warp.alive &= ~(1u << current->lane);
    for (uint32_t rest = warp.arrived; rest; rest &= rest - 1) {  // lanes that waited only for this one
        unsigned lane = __builtin_ctz(rest);
        if (warp.arrived >> lane & 1) complete_collective(warp, warp.mask[lane]);
    }
    if (alive_count && arrived_count == alive_count) release_block();
    run_next();
    __builtin_unreachable();
}

static void prepare_fiber(unsigned i, uint3 thread_index) {
    Fiber &fiber = fibers[i];
    fiber.thread_index = thread_index;
    fiber.index = i;
    fiber.lane = i % WARP_SIZE;
    fiber.warp = i / WARP_SIZE;
    fiber.state = State::ready;
    forget_copies(i);
    // Stacks start at different offsets within a page, or they would compete for the same cache sets.
    void **top = reinterpret_cast<void **>(launch->arena.stacks + (i + 1) * cusim_abi::STACK_BYTES - 512 - fiber.lane * 64);
    *--top = nullptr;  // keeps the stack aligned as at a call
    *--top = reinterpret_cast<void *>(run_thread);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
}

// Dynamic shared memory ends up to 127 bytes before its guard page: a write into that gap shows here.
static void check_after_block(const char *gap, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        if (static_cast<unsigned char>(gap[i]) == POISON) continue;
        outcome = Outcome::illegal_access;
        snprintf(launch->message, sizeof launch->message,
                 "a write %zu bytes past the end of %u bytes of dynamic shared memory; block (%u,%u,%u)", i,
                 launch->dynamic_shared_bytes, block_index.x, block_index.y, block_index.z);
        return;
    }
}

static void run_block() {
    size_t shared_bytes = (launch->dynamic_shared_bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
    dynamic_shared = launch->arena.shared_limit - shared_bytes;
    memset(dynamic_shared, POISON, shared_bytes);
    memset(cusim_shared_begin, POISON, cusim_shared_end - cusim_shared_begin);
    alive_count = thread_count;
    arrived_count = 0;
    true_count = 0;
    for (unsigned first = 0; first < thread_count; first += WARP_SIZE) {
        unsigned lanes = std::min(WARP_SIZE, thread_count - first);
        warps[first / WARP_SIZE].arrived = 0;
        warps[first / WARP_SIZE].alive = lanes == WARP_SIZE ? ALL_LANES : (1u << lanes) - 1;
    }
    unsigned i = 0;
    for (unsigned z = 0; z < block_size.z; z++)
        for (unsigned y = 0; y < block_size.y; y++)
            for (unsigned x = 0; x < block_size.x; x++) prepare_fiber(i++, {x, y, z});
    current = &fibers[launch->reverse ? thread_count - 1 : 0];
    cusim_switch(&main_stack_pointer, current->stack_pointer);
    if (outcome == Outcome::ok) check_after_block(dynamic_shared + launch->dynamic_shared_bytes,
                                                  shared_bytes - launch->dynamic_shared_bytes);
}

Outcome run_blocks(Launch &requested, void (*body)(const void *), const void *arguments) {
    launch = &requested;
    outcome = Outcome::ok;
    kernel_body = body;
    kernel_arguments = arguments;
    grid_size = dim3(launch->grid[0], launch->grid[1], launch->grid[2]);
    block_size = dim3(launch->block[0], launch->block[1], launch->block[2]);
    thread_count = block_size.x * block_size.y * block_size.z;
    eager_copies = launch->eager_copies;
    truncating_mma = launch->truncating_mma;
    uint64_t blocks = launch->end_block - launch->first_block;
    while (outcome == Outcome::ok && !launch->stop->load(std::memory_order_relaxed)) {
        uint64_t taken = launch->next_block->fetch_add(1, std::memory_order_relaxed);
        if (taken >= blocks) break;
        uint64_t block = launch->first_block + (launch->reverse ? blocks - 1 - taken : taken);
        block_index.x = block % grid_size.x;
        block_index.y = block / grid_size.x % grid_size.y;
        block_index.z = block / grid_size.x / grid_size.y;
        run_block();
    }
    return outcome;
}

}  // namespace cusim

// ---- what -fsanitize=bounds,alignment and assert() call; the layouts are those of the compilers' runtime library
namespace {
struct SourceLocation { const char *file; uint32_t line, column; };
struct TypeDescriptor { uint16_t kind, info; char name[1]; };
struct OutOfBounds { SourceLocation location; const TypeDescriptor *array, *index; };
struct TypeMismatch { SourceLocation location; const TypeDescriptor *type; unsigned char log_alignment, check_kind; };
}  // namespace

extern "C" {
#pragma GCC visibility push(hidden)
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(const OutOfBounds *data, uintptr_t index) {
    cusim::fail(Outcome::illegal_access, "%s:%u: index %ld is out of bounds of %s", data->location.file,
                data->location.line, long(index), data->array->name);
}
[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch *data, uintptr_t address) {
    cusim::fail(Outcome::misaligned, "%s:%u: misaligned access to %s at 0x%lx, which needs %d-byte alignment",
                data->location.file, data->location.line, data->type->name, long(address), 1 << data->log_alignment);
}
[[noreturn]] void __assert_fail(const char *condition, const char *file, unsigned line, const char *) noexcept {
    cusim::fail(Outcome::launch_failure, "%s:%u: assertion failed: %s", file, line, condition);
}
#pragma GCC visibility pop
}
