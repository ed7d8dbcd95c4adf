// Pooling: stride = window, no padding, floor mode, between two chains.
//   y[n,c,d,h,w] = last_chain( pool of pre_first_chain(x[n,c, d*WD .. d*WD+WD-1, h*WH .. , w*WW .. ]) )
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
  Operand operand[OPERANDS];
};
CHECK_PARAMS(PoolParams);

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
    const INPUT *corner =
        p.x + ((plane * p.in[0] + index_t(d) * p.window[0]) * p.in[1] + index_t(h) * p.window[1]) * p.in[2]
        + index_t(w) * p.window[2];
    const int wz = WINDOW_Z ? WINDOW_Z : p.window[0], wy = WINDOW_Y ? WINDOW_Y : p.window[1],
              wx = WINDOW_X ? WINDOW_X : p.window[2];
    const VoxelAt at{0, static_cast<int>(plane % p.extent[1]), {}, true};  // its operands vary along channels at most
    const COMPUTE value = pool_window<VECTOR>(corner, wz, wy, wx, p.in[1], p.in[2],
                                              [&](COMPUTE v) { return pre_first_chain(p.operand, v, at); });
    p.y[i] = OUTPUT(last_chain(p.operand, value, LinearAt{i, p.extent}));
  }
}

extern "C" __global__ void pool(const PoolParams p) {
  if (p.count < (index_t(1) << 31))
    run<unsigned>(p);
  else
    run<unsigned long long>(p);
}
