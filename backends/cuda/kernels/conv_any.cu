// A convolution of any geometry, transposed or ordinary, without tables and with the weights as the caller has them: for
// exported programs, whose sizes are known when they are called and not before.
//   y[n,o,z,y,x] = last_chain( bias[o] + sum over taps k and channels c of the group of x[n,c,i] * w )
//   where i*S = z*T + P - k*L on each axis: S is the stride of a transposed convolution, T that of an ordinary one, and
//   only taps with exact divisions and inputs inside the tensor count.
//
// Layouts: x (N, IC, ID, IH, IW) INPUT; w (IC, OC/groups, taps) STORAGE where TRANSPOSED, else (OC, IC/groups, taps) with
// the taps reversed; y (N, OC, OD, OH, OW) OUTPUT; all contiguous.
//
// A thread makes CHANNELS channels of one voxel, so that it reads each input once for all of them; neighbouring threads
// make neighbouring voxels of a line. Nothing is shared. Reads: inputs and weights once for CHANNELS products.
// Generated: last_chain.
#include "chain.cuh"

constexpr int CHANNELS = 8;

struct AnyConvParams {
  const INPUT *x;
  const STORAGE *w, *bias;
  OUTPUT *y;
  index_t batch, groups, in_channels, out_channels;  // channels of one group
  index_t in[3], out[3], kernel[3];
  index_t stride[3], step[3], padding[3], dilation[3];
  Operand operand[OPERANDS];
};

// The input that tap k of an output reads, or -1.
__device__ __forceinline__ index_t input_at(const AnyConvParams &p, int axis, index_t place, index_t k) {
  const index_t at = place * p.step[axis] + p.padding[axis] - k * p.dilation[axis];
  if (at < 0 || at % p.stride[axis] != 0) return -1;
  return at / p.stride[axis] < p.in[axis] ? at / p.stride[axis] : -1;
}

extern "C" __global__ void __launch_bounds__(256) conv_any(const AnyConvParams p) {
  const index_t blocks = (p.out_channels + CHANNELS - 1) / CHANNELS, plane = p.in[0] * p.in[1] * p.in[2];
  const index_t voxels = p.out[0] * p.out[1] * p.out[2], volume = p.kernel[0] * p.kernel[1] * p.kernel[2];
  const index_t count = p.batch * p.groups * blocks * voxels;
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += index_t(gridDim.x) * blockDim.x) {
    index_t rest = i, place[3];
#pragma unroll
    for (int axis = 2; axis >= 0; axis--) {
      place[axis] = rest % p.out[axis];
      rest /= p.out[axis];
    }
    const index_t first = rest % blocks * CHANNELS, group = rest / blocks % p.groups, n = rest / blocks / p.groups;
    const int channels = static_cast<int>(p.out_channels - first < CHANNELS ? p.out_channels - first : CHANNELS);
    const INPUT *x = p.x + (n * p.groups + group) * p.in_channels * plane;
    COMPUTE total[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) total[c] = 0;
    for (index_t kz = 0; kz < p.kernel[0]; kz++) {
      const index_t z = input_at(p, 0, place[0], kz);
      if (z < 0) continue;
      for (index_t ky = 0; ky < p.kernel[1]; ky++) {
        const index_t y = input_at(p, 1, place[1], ky);
        if (y < 0) continue;
        for (index_t kx = 0; kx < p.kernel[2]; kx++) {
          const index_t at = input_at(p, 2, place[2], kx), tap = (kz * p.kernel[1] + ky) * p.kernel[2] + kx;
          if (at < 0) continue;
          for (index_t ic = 0; ic < p.in_channels; ic++) {
            const COMPUTE value = COMPUTE(x[ic * plane + (z * p.in[1] + y) * p.in[2] + at]);
#if TRANSPOSED
            const index_t from = ((group * p.in_channels + ic) * p.out_channels + first) * volume + tap, next = volume;
#else
            const index_t from = ((group * p.out_channels + first) * p.in_channels + ic + 1) * volume - 1 - tap,
                          next = p.in_channels * volume;
#endif
#pragma unroll
            for (int c = 0; c < CHANNELS; c++)
              if (c < channels) total[c] = multiply_add(value, COMPUTE(p.w[from + c * next]), total[c]);
          }
        }
      }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
      if (c >= channels) break;
      const index_t channel = group * p.out_channels + first + c;
      const VoxelAt at{n, static_cast<int>(channel), {int(place[0]), int(place[1]), int(place[2])}, true};
      const COMPUTE value = p.bias ? total[c] + COMPUTE(p.bias[channel]) : total[c];
      p.y[((n * p.groups * p.out_channels + channel) * p.out[0] + place[0]) * p.out[1] * p.out[2] + place[1] * p.out[2]
          + place[2]] = OUTPUT(last_chain(p.operand, value, at));
    }
  }
}
