// Pooling between two chains.
//   y[n,c,d,h,w] = last_chain( pool of pre_first_chain(x[n,c, d*WD .. d*WD+WD-1, h*WH .. , w*WW .. ]) )
// PLAIN: windows lie side by side. Else place k of window o is o*stride - before + k*dilation, and those inside x are
// combined; a mean divides by the divisor, or by the places that lie in x, or with counted, in x and its padding. Adaptive:
// window o of O takes in the inputs from o*I/O, rounded down, up to (o + 1)*I/O, rounded up.
//
// Layouts: x (planes, ID, IH, IW), y (planes, OD, OH, OW), contiguous, INPUT and OUTPUT; planes = N*C.
// A thread makes every gridDim*blockDim-th output. Neighbouring threads read neighbouring windows, so that a
// warp reads whole lines. Ideal bytes: x once, y once. NaN wins in a maximum.
// WINDOW_Z, _Y, _X: the window where it is small, so that all of a thread's reads are under way at once, else 0.
// VECTOR: neighbours along W that are read at once.
// Generated: pre_first_chain; the monoid pool; last_chain.
#include "chain.cuh"
#include "window.cuh"

struct PoolParams {
  const INPUT *x;
  OUTPUT *y;
  index_t count;
  int in[3], extent[5], window[3];  // extent: of y
  int stride[3], before[3], after[3], dilation[3], counted, divisor, adaptive;
  Operand operand[OPERANDS];
};
CHECK_PARAMS(PoolParams);

#if !PLAIN
// The window of output (d, h, w) of `plane`, whose first element is x.
template <class Change>
__device__ __forceinline__ COMPUTE any_window(const PoolParams &p, const INPUT *x, const int (&at)[3], Change change) {
  int first[3], limit[3];
  COMPUTE places = p.divisor;
  if (p.divisor == 0) places = 1;
#pragma unroll
  for (int axis = 0; axis < 3; axis++) {
    if (p.adaptive) {
      const index_t out = p.extent[axis + 2], share = at[axis] * index_t(p.in[axis]);
      first[axis] = static_cast<int>(share / out);
      limit[axis] = static_cast<int>((share + p.in[axis] + out - 1) / out);
      places *= limit[axis] - first[axis];
      continue;
    }
    first[axis] = at[axis] * p.stride[axis] - p.before[axis];
    limit[axis] = p.in[axis];
    const int end = first[axis] + p.window[axis], last = p.in[axis] + (p.counted ? p.after[axis] : 0);
    if (p.divisor == 0) places *= (end < last ? end : last) - (p.counted || first[axis] > 0 ? first[axis] : 0);
  }
  COMPUTE result = pool_identity<COMPUTE>();
  for (int z = 0; z < p.window[0]; z++)
    for (int y = 0; y < p.window[1]; y++)
      for (int w = 0; w < p.window[2]; w++) {
        const int iz = first[0] + z * p.dilation[0], iy = first[1] + y * p.dilation[1], ix = first[2] + w * p.dilation[2];
        if (unsigned(iz) < unsigned(limit[0]) && unsigned(iy) < unsigned(limit[1]) && unsigned(ix) < unsigned(limit[2]))
          result = pool_combine(result, pool_lift(change(COMPUTE(x[(index_t(iz) * p.in[1] + iy) * p.in[2] + ix]))));
      }
  return pool_finish(result, Share<COMPUTE>{places});
}
#endif

template <class Index> __device__ __forceinline__ void run(const PoolParams &p) {
  const int *out = p.extent + 2;
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += index_t(gridDim.x) * blockDim.x) {
    Index rest = static_cast<Index>(i);
    int w = static_cast<int>(rest % Index(out[2]));
    rest /= Index(out[2]);
    int h = static_cast<int>(rest % Index(out[1]));
    rest /= Index(out[1]);
    int d = static_cast<int>(rest % Index(out[0]));
    index_t plane = static_cast<index_t>(rest / Index(out[0]));
    const VoxelAt at{0, static_cast<int>(plane % p.extent[1]), {}, true};  // its operands vary along channels at most
    const auto change = [&](COMPUTE v) { return pre_first_chain(p.operand, v, at); };
#if PLAIN
    const INPUT *corner =
        p.x + ((plane * p.in[0] + index_t(d) * p.window[0]) * p.in[1] + index_t(h) * p.window[1]) * p.in[2]
        + index_t(w) * p.window[2];
    const int wz = WINDOW_Z ? WINDOW_Z : p.window[0], wy = WINDOW_Y ? WINDOW_Y : p.window[1],
              wx = WINDOW_X ? WINDOW_X : p.window[2];
    const COMPUTE value = pool_window<VECTOR>(corner, wz, wy, wx, p.in[1], p.in[2], change);
#else
    const COMPUTE value = any_window(p, p.x + plane * p.in[0] * p.in[1] * p.in[2], {d, h, w}, change);
#endif
    p.y[i] = OUTPUT(last_chain(p.operand, value, LinearAt{i, p.extent}));
  }
}

extern "C" __global__ void pool(const PoolParams p) {
  if (p.count < (index_t(1) << 31))
    run<unsigned>(p);
  else
    run<unsigned long long>(p);
}
