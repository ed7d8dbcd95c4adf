// CUDA C++ for the host: included before the very same .cu source that nvcc compiles.
//
// compiler.py rewrites the tokens __global__, __shared__ and `extern __shared__` after preprocessing; everything else
// is plain C++. Kernels may test CUSIM where nvcc needs inline PTX and call the cusim:: functions instead.
#pragma once
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CUSIM 1
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define DYN_SHARED(T, name) extern __shared__ __align__(16) T name[]

#pragma GCC visibility push(hidden)
#include "runtime.h"
#include "launch.h"
#include "math.h"
#include "atomics.h"
#include "warp.h"
#include "async_copy.h"
#include "tensor_core.h"
#pragma GCC visibility pop

#define threadIdx (cusim::current->thread_index)
#define blockIdx (cusim::block_index)
#define blockDim (cusim::block_size)
#define gridDim (cusim::grid_size)
static constexpr int warpSize = 32;

static inline void __syncthreads(int line = __builtin_LINE()) { cusim::block_barrier(false, line); }
static inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    cusim::block_barrier(predicate, line);
    return cusim::barrier_any;
}
static inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    cusim::block_barrier(predicate, line);
    return cusim::barrier_all;
}
static inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    cusim::block_barrier(predicate, line);
    return cusim::barrier_count;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() {}
