// Correct kernels that touch each feature of the simulator. They compile unchanged with nvcc for sm_80 and later.
#include "primitives.cuh"

__constant__ float row_scale[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int finished_rows;

// ---- tiled matrix product: templates, static shared memory, barriers
template <int TILE>
__device__ __forceinline__ void matmul(const float *__restrict__ a, const float *__restrict__ b, float *__restrict__ c, int m,
                                       int n, int k) {
    __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE + 1];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * TILE + ty, col = blockIdx.x * TILE + tx;
    float sum = 0;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        a_tile[ty][tx] = row < m && k0 + tx < k ? a[row * k + k0 + tx] : 0.f;
        b_tile[ty][tx] = k0 + ty < k && col < n ? __ldg(&b[(k0 + ty) * n + col]) : 0.f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; i++) sum += a_tile[ty][i] * b_tile[i][tx];
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}
#define MATMUL(TILE)                                                                                        \
    extern "C" __global__ void __launch_bounds__(TILE *TILE)                                                \
        matmul_##TILE(const float *a, const float *b, float *c, int m, int n, int k) { matmul<TILE>(a, b, c, m, n, k); }
MATMUL(8)
MATMUL(16)

// ---- sum of each row: shuffles, dynamic shared memory, constants, an atomic, parameters with odd alignments
extern "C" __global__ void sum_rows(char scale, const float *__restrict__ x, short offset, double factor,
                                    float *__restrict__ sums, int n) {
    extern __shared__ __align__(16) float partial[];
    const float *row = x + (size_t)blockIdx.x * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i];
    for (int delta = 16; delta; delta >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, delta);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < (blockDim.x + 31) / 32 ? partial[threadIdx.x] : 0.f;
        for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (threadIdx.x == 0) {
            sums[blockIdx.x] = sum * (float)factor * row_scale[scale] + offset;
            atomicAdd(&finished_rows, 1);
        }
    }
}

// ---- votes and block-wide predicates
extern "C" __global__ void votes(unsigned *out) {
    int lane = threadIdx.x & 31;
    unsigned ballot = __ballot_sync(~0u, lane % 3 == 0);
    int any = __any_sync(~0u, lane == 7), all = __all_sync(~0u, lane < 31);
    int block_any = __syncthreads_or(threadIdx.x == 40), block_all = __syncthreads_and(threadIdx.x < 64);
    int count = __syncthreads_count(threadIdx.x % 2);
    if (threadIdx.x == 0) {
        out[0] = ballot; out[1] = any; out[2] = all; out[3] = block_any; out[4] = block_all; out[5] = count;
    }
}

// ---- one counter for all blocks
extern "C" __global__ void count_threads(int *counter, float *sum, int *largest) {
    atomicAdd(counter, 1);
    atomicAdd(sum, 0.5f);
    atomicMax(largest, (int)(blockIdx.x * blockDim.x + threadIdx.x));
}
