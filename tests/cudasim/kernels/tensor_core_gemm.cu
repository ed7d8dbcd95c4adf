// C (m x n) = A (m x k) B (k x n) with tf32 tensor cores: 4 warps, 64 x 32 tile, k step 8 through a two-stage cp.async
// ring; m % 64 == 0, n % 32 == 0, k % 8 == 0. Defining one of the BUG_ names plants that bug.
#include "primitives.cuh"

extern "C" __global__ void __launch_bounds__(128)
    tensor_core_gemm(const float *__restrict__ a, const float *__restrict__ b, float *__restrict__ c, int m, int n, int k) {
    __shared__ __align__(16) float a_tile[2][64][12];  // [stage][row][k]
    __shared__ __align__(16) float b_tile[2][8][40];   // [stage][k][column]
    int thread = threadIdx.x, warp = thread >> 5, group = (thread & 31) >> 2, quad = thread & 3;
    int row0 = blockIdx.y * 64, col0 = blockIdx.x * 32, row = warp * 16 + group;
    float sums[4][4] = {};
    auto load = [&](int stage, int k0) {
        int r = thread >> 1, half = (thread & 1) * 4;
        copy_async_16(&a_tile[stage][r][half], a + (size_t)(row0 + r) * k + k0 + half);
        if (thread < 64) {
            int kk = thread >> 3, col = (thread & 7) * 4;
            copy_async_16(&b_tile[stage][kk][col], b + (size_t)(k0 + kk) * n + col0 + col);
        }
        commit_copies();
    };
    load(0, 0);
    for (int k0 = 0, stage = 0; k0 < k; k0 += 8, stage ^= 1) {
#ifdef BUG_LOADS_INTO_STAGE_IN_USE
        if (k0 + 8 < k) { wait_for_copies<0>(); __syncthreads(); load(stage, k0 + 8); }
#else
        if (k0 + 8 < k) load(stage ^ 1, k0 + 8);
#endif
#ifndef BUG_NO_COPY_WAIT
        if (k0 + 8 < k) wait_for_copies<1>();
        else wait_for_copies<0>();
#endif
#ifndef BUG_NO_BARRIER_AFTER_LOAD
        __syncthreads();
#endif
        uint32_t af[4] = {to_tf32(a_tile[stage][row][quad]), to_tf32(a_tile[stage][row + 8][quad]),
                          to_tf32(a_tile[stage][row][quad + 4]), to_tf32(a_tile[stage][row + 8][quad + 4])};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t bf[2] = {to_tf32(b_tile[stage][quad][j * 8 + group]), to_tf32(b_tile[stage][quad + 4][j * 8 + group])};
            mma_tf32(sums[j], af, bf);
        }
#ifndef BUG_NO_BARRIER_BEFORE_REUSE
        __syncthreads();
#endif
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++)
            c[(size_t)(row0 + row + (i >> 1) * 8) * n + col0 + j * 8 + quad * 2 + (i & 1)] = sums[j][i];
}
