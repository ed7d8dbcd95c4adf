// Two kernels that say what a device can do: fused multiply-adds a second, and bytes copied a second.
//
// fma_chains: each thread keeps CHAINS independent numbers in registers and does `rounds` rounds of
//     a[i] = a[i] * m + b, which is 2 * CHAINS floating-point operations a round.
// copy_words: the grid copies `count` words of 16 bytes, neighbours next to each other.
//
// The host defines REAL (float or double), CHAINS (enough to hide the latency of a multiply-add together with the
// other warps) and PARAMS_BYTES.
#include "device.cuh"

struct RooflineParams {
  void *out;
  const void *in;
  index_t count;
};
CHECK_PARAMS(RooflineParams);

extern "C" __global__ void fma_chains(const RooflineParams p) {
  REAL a[CHAINS];
  const REAL m = REAL(0.999), b = REAL(0.001);
  const index_t me = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) a[i] = REAL(i + int(me));
  for (index_t round = 0; round < p.count; round++) {
#pragma unroll
    for (int i = 0; i < CHAINS; i++) a[i] = multiply_add(a[i], m, b);
  }
  REAL sum = a[0];
#pragma unroll
  for (int i = 1; i < CHAINS; i++) sum += a[i];
  static_cast<REAL *>(p.out)[me] = sum;  // so that nothing can be left out
}

extern "C" __global__ void copy_words(const RooflineParams p) {
  const float4 *in = static_cast<const float4 *>(p.in);
  float4 *out = static_cast<float4 *>(p.out);
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += index_t(gridDim.x) * blockDim.x)
    out[i] = in[i];
}
