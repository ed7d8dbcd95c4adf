// One planted bug per kernel; each must be caught.
#include <cassert>

#include "primitives.cuh"

extern "C" __global__ void write_at(float *x, int i) { x[i] = 1.f; }

extern "C" __global__ void read_at(const float *x, float *y, int i) { y[0] = x[i]; }

extern "C" __global__ void neighbour_without_barrier(float *y, int step) {
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;
    y[threadIdx.x] = s[(threadIdx.x + step) % 64];
}

extern "C" __global__ void barrier_in_one_branch(float *y) {
    if (threadIdx.x < 32) __syncthreads();
    else {
        y[threadIdx.x] = 1.f;
        __syncthreads();
    }
}

extern "C" __global__ void barrier_against_warp_sync(float *y) {
    if (threadIdx.x < 40) __syncthreads();
    else __syncwarp();
    y[threadIdx.x] = 1.f;
}

extern "C" __global__ void shuffle_in_one_branch(float *y) {
    float v = y[threadIdx.x];
    if (threadIdx.x & 1) v = __shfl_xor_sync(~0u, v, 2);
    else __syncwarp();
    y[threadIdx.x] = v;
}

extern "C" __global__ void vector_load_at(const float *x, float *y, int i) {
    float4 v = *reinterpret_cast<const float4 *>(x + i);
    y[0] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void async_copy_from(const float *x, float *y, int i) {
    __shared__ __align__(16) float s[4];
    copy_async_16(s, x + i);
    commit_copies();
    wait_for_copies<0>();
    y[0] = s[0];
}

extern "C" __global__ void static_shared_at(float *y, int i) {
    __shared__ float s[64];
    s[i] = 1.f;
    __syncthreads();
    y[0] = s[i];
}

extern "C" __global__ void dynamic_shared_at(float *y, int i) {
    extern __shared__ float dynamic[];
    dynamic[i] = 1.f;
    __syncthreads();
    y[0] = dynamic[i];
}

extern "C" __global__ void reads_unwritten_shared(float *y) {
    __shared__ float s[64];
    if (threadIdx.x) s[threadIdx.x] = 1.f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void deep_recursion(float *y, int depth) {
    struct Recursion {
        static __device__ __noinline__ float descend(int left, volatile float *path) {
            volatile float here[256];
            here[0] = left;
            return left == 0 ? path[0] : here[0] + descend(left - 1, here);
        }
    };
    y[0] = Recursion::descend(depth, y);
}

extern "C" __global__ void asserts(int n) { assert(n == 1); }

extern "C" __global__ void divides(int *y, int n) { y[0] = 7 / n; }
