// Pooling in a launch of its own: stride = window, no padding, whole windows only.
//
// A work-item owns one output row (n, c, d, h). Rows of the window are combined first, vector by vector, then neighbours along
// width. The host defines CHANNELS, IN_D, IN_H, IN_W, OUT_D, OUT_H, OUT_W, WINDOW_D, WINDOW_H, WINDOW_W, the reduction:
// POOL_COMBINE(a, b), POOL_COMBINE_ONE(a, b), POOL_LIFT(x), POOL_FINISH(t), and TAIL(x).
kernel void pool_step(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                      const ulong count PARAMETERS) {
  const size_t row = get_global_id(0);
  if (row >= count) return;
  const size_t h = row % OUT_H, d = row / OUT_H % OUT_D, nc = row / ((size_t)OUT_H * OUT_D), c = nc % CHANNELS, n = nc / CHANNELS;
  global const REAL *window = x + ((nc * IN_D + d * WINDOW_D) * IN_H + h * WINDOW_H) * IN_W;
  GATHER_BEGIN
  for (int w = 0; w < OUT_W; w += VEC) {
    REAL folded[VEC * WINDOW_W];
    const int extent = min(VEC, OUT_W - w) * WINDOW_W;
    for (int i = 0; i < extent; i += VEC) {
      global const REAL *p = window + w * WINDOW_W + i;
      real_v value = POOL_LIFT(load_lanes(p, extent - i, R(0.0)));
      for (int j = 1; j < WINDOW_D * WINDOW_H; j++) {
        global const REAL *q = p + ((size_t)(j / WINDOW_H) * IN_H + j % WINDOW_H) * IN_W;
        value = POOL_COMBINE(value, POOL_LIFT(load_lanes(q, extent - i, R(0.0))));
      }
      STORE_V(value, folded + i);
    }
    REAL pooled[VEC];
#if WINDOW_W == 2 && VEC > 1
    if (extent == 2 * VEC) {
      const real_v low = LOAD_V(folded), high = LOAD_V(folded + VEC);
      STORE_V(POOL_COMBINE(((real_v)(low.even, high.even)), ((real_v)(low.odd, high.odd))), pooled);
    } else
#endif
    for (int i = 0; i < VEC; i++) {
      REAL value = i * WINDOW_W < extent ? folded[i * WINDOW_W] : R(0.0);
      for (int j = 1; j < WINDOW_W; j++)
        if (i * WINDOW_W < extent) value = POOL_COMBINE_ONE(value, folded[i * WINDOW_W + j]);
      pooled[i] = value;
    }
    real_v value = POOL_FINISH(LOAD_V(pooled));
    TAIL(value);
    GATHER(value, w, OUT_W - w)
#if USE_STORE
    store_lanes(value, y + row * OUT_W + w, OUT_W - w);
#endif
  }
  GATHER_END(((n * OUT_D + d) * OUT_H + h) * CHANNELS + c)
}
