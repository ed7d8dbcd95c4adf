// The contract between the stand-in driver (libcuda.so.1) and a compiled kernel module (a host shared object).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace cusim_abi {

constexpr int VERSION = 3;

enum class Outcome {
    ok,
    bad_arguments,
    launch_failure,  // deadlock, divergent barrier, failed assertion
    misaligned,
    illegal_access,
};

constexpr unsigned MAX_THREADS = 1024;  // in a block
constexpr size_t STACK_BYTES = 128 * 1024;

// The memory of one worker: stacks of a block's threads, the lowest page of each inaccessible, and dynamic shared memory,
// which ends at `shared_limit` before an inaccessible page.
struct Arena {
    char *stacks, *shared_limit;
};

// One launch as one worker sees it. Workers share `next_block` and `stop`, and have their own `message`.
struct Launch {
    unsigned grid[3], block[3];
    unsigned dynamic_shared_bytes;
    void **parameters;    // one pointer per parameter, or null
    const char *packed;   // all parameters in one buffer, or null
    size_t packed_bytes;
    bool reverse;         // run threads and blocks last to first
    bool eager_copies;    // cp.async copies at once instead of at the wait
    bool truncating_mma;  // mma.sync cuts its sums as tensor cores do, instead of rounding them
    uint64_t first_block, end_block;  // of those that run
    std::atomic<uint64_t> *next_block;  // counts from 0
    std::atomic<bool> *stop;
    Arena arena;
    char message[320];    // out: what went wrong, and where
};

struct Kernel {
    const char *name;
    Outcome (*run)(Launch &);
    size_t parameter_bytes;
    unsigned max_threads;  // in a block: its __launch_bounds__
};

struct Module {
    int version;
    int architecture;               // 80 for sm_80
    bool architecture_specific;     // sm_90a: runs on exactly that architecture
    const Kernel *kernels;
    size_t kernel_count;
    const char *shared_begin, *shared_end;    // all static __shared__ variables
    const char *globals_begin, *globals_end;  // all __device__ and __constant__ variables
    void (*describe_thread)(char *text, size_t bytes);  // which block and thread runs now
};

}  // namespace cusim_abi
