// Reorder a convolution's weights.
//   packed[i] = order[i] < 0 ? 0 : weight[order[i]]
//
// Layouts: weight as the caller gives it, (IC, OC/groups, KD, KH, KW) STORAGE; packed in whatever order the
// convolution kernel streams it, COMPUTE; order (count) int32, made once by the host.
// A thread makes one value. Memory: count * (4 + 2 * sizeof) bytes; nothing is shared.
// USE_TF32: round to a 10-bit mantissa.
#include "device.cuh"

struct PackParams {
  const STORAGE *weight;
  COMPUTE *packed;
  const int *order;
  index_t count;
};
CHECK_PARAMS(PackParams);

extern "C" __global__ void pack_weights(const PackParams p) {
  index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  int from = p.order[i];
  COMPUTE value = from < 0 ? COMPUTE(0) : COMPUTE(p.weight[from]);
#if USE_TF32
  value = __uint_as_float(round_tf32(value));
#endif
  p.packed[i] = value;
}
