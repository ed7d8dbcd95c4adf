// Pooling: stride = window, no padding, floor mode.
//   y[n,c,d,h,w] = max or mean of x[n,c, d*WD .. d*WD+WD-1, h*WH .. , w*WW .. ]
//
// Layouts: x (planes, ID, IH, IW), y (planes, OD, OH, OW), contiguous, INPUT and OUTPUT; planes = N*C.
// A thread makes every gridDim*blockDim-th output. Neighbouring threads read neighbouring windows, so that a
// warp reads whole lines. Ideal bytes: x once, y once. NaN wins in a maximum.
// WINDOW_Z, _Y, _X: the window where it is small, so that all of a thread's reads are under way at once, else 0.
// VECTOR: neighbours along W that are read at once.
#include "window.cuh"

struct PoolParams {
  const INPUT *x;
  OUTPUT *y;
  index_t count;
  int in[3], out[3], window[3];
  int maximum;  // 0: mean
};
CHECK_PARAMS(PoolParams);

template <class Index> __device__ __forceinline__ void run(const PoolParams &p) {
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += index_t(gridDim.x) * blockDim.x) {
    Index rest = static_cast<Index>(i);
    int w = static_cast<int>(rest % Index(p.out[2]));
    rest /= Index(p.out[2]);
    int h = static_cast<int>(rest % Index(p.out[1]));
    rest /= Index(p.out[1]);
    int d = static_cast<int>(rest % Index(p.out[0]));
    index_t plane = static_cast<index_t>(rest / Index(p.out[0]));
    const INPUT *corner =
        p.x + ((plane * p.in[0] + index_t(d) * p.window[0]) * p.in[1] + index_t(h) * p.window[1]) * p.in[2]
        + index_t(w) * p.window[2];
    const int wz = WINDOW_Z ? WINDOW_Z : p.window[0], wy = WINDOW_Y ? WINDOW_Y : p.window[1],
              wx = WINDOW_X ? WINDOW_X : p.window[2];
    p.y[i] = OUTPUT(pool_window<VECTOR>(corner, wz, wy, wx, p.in[1], p.in[2], p.maximum != 0,
                                        [](COMPUTE value) { return value; }));
  }
}

extern "C" __global__ void pool(const PoolParams p) {
  if (p.count < (index_t(1) << 31))
    run<unsigned>(p);
  else
    run<unsigned long long>(p);
}
