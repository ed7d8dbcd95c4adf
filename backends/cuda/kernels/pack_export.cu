// Reorder a convolution's weights, as pack.cu does, with the order as a formula: for exported programs.
//
// Layouts: weight (IC, OUT, VOLUME) where TRANSPOSED, else (OC, IN, VOLUME) with the taps reversed, STORAGE; packed, COMPUTE,
//   HALO      as conv_halo.cu reads it: [group][channel tile][slice][step][k8] and then for 8 channels of one tap the
//             fragments of mma_tf32; zeros behind the last ones
//   else      as conv_fma.cu reads it: [group][step][channel][PADDED]
// A thread makes one value. IN and OUT are channels of a group. USE_TF32: round to a 10-bit mantissa.
// Generated: tap_of, the place in the kernel of each step.
#include "device.cuh"
#include "operations.cuh"

struct PackParams {
  const STORAGE *weight;
  COMPUTE *packed;
  index_t count;
};

extern "C" __global__ void pack_export(const PackParams p) {
  const index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
#if HALO
  constexpr index_t SLAB = 8 * BLOCK_N, TILES = (OUT + BLOCK_N - 1) / BLOCK_N;
  const int pair = static_cast<int>(i % SLAB) / 128, place = static_cast<int>(i % SLAB) % 128;
  const int blocks = BLOCK_N - 16 * pair >= 16 ? 2 : 1, lane = place / (2 * blocks), half = place % 2;
  index_t rest = i / SLAB;
  index_t channel = rest % (SLICE_CHANNELS / 8) * 8 + lane % 4 + 4 * half;
  rest /= SLICE_CHANNELS / 8;
  const index_t step = rest % STEPS;
  rest /= STEPS;
  channel += rest % SLICES * SLICE_CHANNELS;
  rest /= SLICES;
  const index_t column = rest % TILES * BLOCK_N + 16 * pair + lane / 4 + place / 2 % blocks * 8;
  const index_t group = rest / TILES;
#else
  const index_t column = i % PADDED, channel = i / PADDED % IN, step = i / PADDED / IN % STEPS;
  const index_t group = i / PADDED / IN / STEPS;
#endif
  COMPUTE value = 0;
  if (group < GROUPS && channel < IN && column < OUT) {
    const index_t tap = tap_of(static_cast<int>(step));
#if TRANSPOSED
    value = COMPUTE(p.weight[((group * IN + channel) * OUT + column) * VOLUME + tap]);
#else
    value = COMPUTE(p.weight[((group * OUT + column) * IN + channel + 1) * VOLUME - 1 - tap]);
#endif
  }
#if USE_TF32
  value = __uint_as_float(round_tf32(value));
#endif
  p.packed[i] = value;
}
