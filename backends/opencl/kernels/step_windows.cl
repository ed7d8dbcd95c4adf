// Pooling in a launch of its own with windows that overlap, leave gaps or reach into padding.
//
// A work-item owns one output row (n, c, d, h), element by element: VEC is 1. Of a window's places only those inside the
// input are combined. The host defines CHANNELS, IN_D, IN_H, IN_W, OUT_D, OUT_H, OUT_W, and for each axis WINDOW_, STRIDE_,
// BEFORE_ and AFTER_ (the padding) and DILATION_; COUNT_PADDING, DIVISOR (0 for the number of places); ADAPTIVE: output o of
// OUT takes in the inputs from o*IN/OUT, rounded down, up to (o + 1)*IN/OUT, rounded up, WINDOW_ of them at most; the reduction:
// POOL_COMBINE_ONE(a, b), POOL_IDENTITY, POOL_LIFT(x), POOL_FINISH(t), which reads `places`; and TAIL(x).
#if ADAPTIVE
#define FIRST(o, AXIS) ((int)((ulong)(o) * IN_##AXIS / OUT_##AXIS))
#define LIMIT(o, AXIS) ((int)(((ulong)((o) + 1) * IN_##AXIS + (OUT_##AXIS - 1)) / OUT_##AXIS))
#define PLACES(o, AXIS) (LIMIT(o, AXIS) - FIRST(o, AXIS))
#else
#define FIRST(o, AXIS) ((o) * STRIDE_##AXIS - BEFORE_##AXIS)
#define LIMIT(o, AXIS) IN_##AXIS
#define PLACES(o, AXIS)                                                                                             \
  (COUNT_PADDING ? min(FIRST(o, AXIS) + WINDOW_##AXIS, IN_##AXIS + AFTER_##AXIS) - FIRST(o, AXIS) \
                 : min(FIRST(o, AXIS) + WINDOW_##AXIS, IN_##AXIS) - max(FIRST(o, AXIS), 0))
#endif

kernel void windows_step(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                         const ulong count PARAMETERS) {
  const size_t row = get_global_id(0);
  if (row >= count) return;
  const size_t nc = row / ((size_t)OUT_H * OUT_D), c = nc % CHANNELS, n = nc / CHANNELS;
  const int h = row % OUT_H, d = row / OUT_H % OUT_D;
  GATHER_BEGIN
  for (int w = 0; w < OUT_W; w++) {
    REAL total = POOL_IDENTITY;
    for (int kd = 0; kd < WINDOW_D; kd++) {
      const int id = FIRST(d, D) + kd * DILATION_D;
      if (id < 0 || id >= LIMIT(d, D)) continue;
      for (int kh = 0; kh < WINDOW_H; kh++) {
        const int ih = FIRST(h, H) + kh * DILATION_H;
        if (ih < 0 || ih >= LIMIT(h, H)) continue;
        global const REAL *line = x + ((nc * IN_D + id) * IN_H + ih) * IN_W;
        for (int kw = 0; kw < WINDOW_W; kw++) {
          const int iw = FIRST(w, W) + kw * DILATION_W;
          if (iw >= 0 && iw < LIMIT(w, W)) total = POOL_COMBINE_ONE(total, POOL_LIFT(line[iw]));
        }
      }
    }
    const REAL places = DIVISOR ? R(1.0) * DIVISOR : R(1.0) * PLACES(d, D) * PLACES(h, H) * PLACES(w, W);
    real_v value = POOL_FINISH(total);
    TAIL(value);
    GATHER(value, w, OUT_W - w)
#if USE_STORE
    y[row * OUT_W + w] = value;
#endif
  }
  GATHER_END(((n * OUT_D + d) * OUT_H + h) * CHANNELS + c)
}
