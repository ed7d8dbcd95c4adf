// State and helpers shared by the parts of the stand-in driver.
#pragma once
#include <cuda.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../abi.h"

#define DRIVER_API extern "C" __attribute__((visibility("default"))) CUresult

struct CUctx_st {
    int device;
    int references;
    bool alive;
};

namespace driver {

constexpr size_t PAGE = 4096;
constexpr size_t GUARD_BYTES = 16 << 20;  // inaccessible address space on both sides of an allocation

struct Architecture {
    int capability;              // 89 for 8.9
    int shared_per_block_optin;  // bytes
    int shared_per_multiprocessor;
    int threads_per_multiprocessor;
    int blocks_per_multiprocessor;
};

// What the DISPATCHER_CUDA_SIM* environment variables ask for; read anew at each call, so that tests can change them.
bool requested();
int device_count();
const Architecture *architecture(int device);  // null: not one that is emulated
size_t memory_bytes();
size_t allocation_alignment();
unsigned char poison_byte();  // what fresh device memory holds
int processor_count();
unsigned worker_limit();
void chosen_blocks(uint64_t blocks, uint64_t &first, uint64_t &end);  // which of a launch's blocks run
bool reverse_schedule();
bool eager_copies();
bool truncating_mma();
bool eager_streams();
int stream_seed();  // -1: operations are not drawn at random

// Guards all state. Launches hold it, so they run one at a time.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

bool initialized();
CUcontext current_context();  // null: none, or a destroyed one

// Records what cuGetErrorString adds to the text of `error`, prints it to stderr, and returns `error`.
CUresult fail(CUresult error, const std::string &detail);

// What an operation in a stream does when its turn comes, once or at each launch of a graph.
using Work = std::function<CUresult()>;
CUresult enqueue(CUstream stream, Work work);
CUresult finish_stream(CUstream stream);  // runs what is in it; returns the first error
CUresult finish_all();
bool anything_pending();
bool is_capturing(CUstream stream);
CUresult unsafe_in_capture(const char *what);  // refuses calls that a capture under way forbids this thread

void free_allocations_of(CUcontext context);
void add_device_variables(const char *begin, const char *end);
void remove_device_variables(const char *begin);
std::string describe_address(const void *address);  // where it lies relative to the nearest allocation
std::string find_stray_write();                     // empty: the gaps around all allocations are untouched
void protect_other_devices(int device, bool protect);

}  // namespace driver

#define RETURN_UNLESS(condition, error) do { if (!(condition)) return error; } while (0)
#define NEED_INIT() RETURN_UNLESS(driver::initialized(), CUDA_ERROR_NOT_INITIALIZED)
#define NEED_CONTEXT() NEED_INIT(); RETURN_UNLESS(driver::current_context(), CUDA_ERROR_INVALID_CONTEXT)
#define NEED_DEVICE(d) NEED_INIT(); RETURN_UNLESS((d) >= 0 && (d) < driver::device_count(), CUDA_ERROR_INVALID_DEVICE)
#define NEED_SAFE(what) do { if (CUresult error = driver::unsafe_in_capture(what)) return error; } while (0)
