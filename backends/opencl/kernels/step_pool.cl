// Pooling in a launch of its own: windows of any stride, padding and dilation.
//
// A work-item owns one output row (n, c, d, h). Of a window's places only those inside the input are combined: those of a column
// first, vector by vector, for SPAN outputs at a time, and then neighbouring columns. With VEC 1 each window is combined at once.
// The host defines CHANNELS, IN_D, IN_H, IN_W, OUT_D, OUT_H, OUT_W, and for each axis WINDOW_, STRIDE_, BEFORE_ and AFTER_
// (the padding) and DILATION_; SPAN; COLUMNS, those of SPAN outputs; REPEAT, whether the last vector of a row may begin in the one
// before it; COUNT_PADDING, DIVISOR (0 for the number of places); ADAPTIVE: output o of OUT takes in the inputs from o*IN/OUT, rounded
// down, up to (o + 1)*IN/OUT, rounded up, WINDOW_ of them at most; the reduction: POOL_COMBINE(a, b), POOL_COMBINE_ONE(a, b),
// POOL_IDENTITY, POOL_LIFT(x), POOL_FINISH(t), which reads `places`; TAIL(x); and what row_statistics.cl needs. IN_W is at least a
// vector.
#if ADAPTIVE
#define FIRST(o, AXIS) ((int)((ulong)(o) * IN_##AXIS / OUT_##AXIS))
#define LIMIT(o, AXIS) ((int)(((ulong)((o) + 1) * IN_##AXIS + (OUT_##AXIS - 1)) / OUT_##AXIS))
#else
#define FIRST(o, AXIS) ((o) * STRIDE_##AXIS - BEFORE_##AXIS)
#define LIMIT(o, AXIS) IN_##AXIS
#endif
// The taps inside the input: from BEGIN on, up to END.
#define BEGIN(o, AXIS) (max(DILATION_##AXIS - 1 - FIRST(o, AXIS), 0) / DILATION_##AXIS)
#define END(o, AXIS) min(WINDOW_##AXIS, (LIMIT(o, AXIS) - FIRST(o, AXIS) + DILATION_##AXIS - 1) / DILATION_##AXIS)
// Those places of a window that a mean counts: from UNCOUNTED on, up to WINDOW_ or COUNTED, which is at the input's or its padding's end.
#define UNCOUNTED(o, AXIS) (COUNT_PADDING ? 0 : max(-FIRST(o, AXIS), 0))
#define COUNTED(o, AXIS) (LIMIT(o, AXIS) + COUNT_PADDING * AFTER_##AXIS - FIRST(o, AXIS))
#define PLACES(o, AXIS) (min(WINDOW_##AXIS, COUNTED(o, AXIS)) - UNCOUNTED(o, AXIS))

// The rows of window row (d, h) combined, and of these the taps from `begin` up to `end`; plane is what tap 0 in row (0, 0) takes.
static real_v folded(global const REAL *plane, const int d, const int h, const int begin, const int end) {
  real_v total = SPLAT(POOL_IDENTITY);
  for (int kd = BEGIN(d, D); kd < END(d, D); kd++)
    for (int kh = BEGIN(h, H); kh < END(h, H); kh++) {
      const long row = (long)(FIRST(d, D) + kd * DILATION_D) * IN_H + FIRST(h, H) + kh * DILATION_H;
      for (int k = begin; k < end; k++) {
        const real_v loaded = LOAD_V(plane + row * IN_W + k * DILATION_W);
        total = POOL_COMBINE(total, POOL_LIFT(loaded));
      }
    }
  return total;
}

kernel void pool_step(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                      const ulong count PARAMETERS) {
  const size_t row = get_global_id(0);
  if (row >= count) return;
  const size_t nc = row / ((size_t)OUT_H * OUT_D), c = nc % CHANNELS, n = nc / CHANNELS;
  const int h = row % OUT_H, d = row / OUT_H % OUT_D;
  global const REAL *plane = x + nc * ((size_t)IN_D * IN_H * IN_W);
  GATHER_BEGIN
  for (int first = 0; first < OUT_W; first += SPAN) {
#if VEC > 1
    REAL around[VEC + COLUMNS + VEC], *columns = around + VEC;
    const int begin = FIRST(first, W);  // the input's column of columns[0]
    if (begin < 0 || begin + COLUMNS > IN_W)
      for (int i = 0; i < COLUMNS; i += VEC) STORE_V(SPLAT(POOL_IDENTITY), columns + i);
    for (int next = max(begin, 0); next < min(begin + COLUMNS, IN_W); next += VEC) {
      const int at = min(next, IN_W - VEC);
      STORE_V(folded(plane + at, d, h, 0, 1), columns + (at - begin));
    }
#endif
    for (int next = first; next < min(first + SPAN, OUT_W); next += VEC) {
      const int w = REPEAT ? min(next, OUT_W - VEC) : next;
#if VEC == 1
      const real_v total = folded(plane + FIRST(w, W), d, h, BEGIN(w, W), END(w, W));
#elif ADAPTIVE || STRIDE_W > 2
      REAL totals[VEC];
      for (int i = 0; i < VEC; i++) {
        totals[i] = POOL_IDENTITY;
        if (w + i >= OUT_W) continue;
        for (int k = 0; k < (ADAPTIVE ? PLACES(w + i, W) : WINDOW_W); k++)
          totals[i] = POOL_COMBINE_ONE(totals[i], columns[FIRST(w + i, W) - begin + k * DILATION_W]);
      }
      const real_v total = LOAD_V(totals);
#else
      real_v total = SPLAT(POOL_IDENTITY);
      for (int k = 0; k < WINDOW_W; k++) {
        const REAL *from = columns + (w - first) * STRIDE_W + k * DILATION_W;
#if STRIDE_W == 2
        total = POOL_COMBINE(total, ((real_v)(LOAD_V(from).even, LOAD_V(from + VEC).even)));
#else
        total = POOL_COMBINE(total, LOAD_V(from));
#endif
      }
#endif
#if DIVISOR
      const real_v places = SPLAT(R(1.0) * DIVISOR);
#else
      REAL lanes[VEC];
      for (int i = 0; i < VEC; i++) lanes[i] = ADAPTIVE ? PLACES(w + i, W) : i * STRIDE_W;
      real_v places = LOAD_V(lanes);
      if (!ADAPTIVE)
        places = SMALLER(places + R(1.0) * WINDOW_W, SPLAT((REAL)COUNTED(w, W))) - LARGER(places, SPLAT((REAL)UNCOUNTED(w, W)));
      places = places * (R(1.0) * PLACES(d, D) * PLACES(h, H));
#endif
      real_v value = POOL_FINISH(total);
      TAIL(value);
      GATHER(value, w, OUT_W - w)
#if USE_STORE
      store_lanes(value, y + row * OUT_W + w, OUT_W - w);
#endif
    }
  }
  GATHER_END(((n * OUT_D + d) * OUT_H + h) * CHANNELS + c)
}
