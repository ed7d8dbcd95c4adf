// Transposed 3-D convolution, phase by phase, with the steps behind it fused: the kernel for CPU devices.
//
// Equation, per axis (stride S, padding P, dilation L): output o = S*m + r of phase r takes tap k when S divides r + P - k*L,
// and reads input m + (r + P - k*L)/S. Each phase is a dense little convolution: no zero insertion, no atomics, no scatter.
//
// Layouts
//   x         [N][IC][ID][IH][IW]
//   weights   packed once by the host in the order in which the core reads them (core_direct.cl, core_winograd.cl)
//   operands  bias, scalars and per-channel tensors of the fused steps, one after another (offsets are defines)
//   y         [N][C][D][H][W] of the last fused step
// GEMM view, per phase: M = positions m, N = output channels, K = input channels * taps.
//
// Who owns what: a work-group is one work-item, a persistent worker that takes items from a shared counter. An item is a box of
// BOX_D x BOX_H positions along depth and height, all of width, all phases, all output channels:
//   1. The core fills, for each (rd, rh) and STEP_D planes at a time, lines [STEP_D][LINES_H][channel][rw][LINE]. A line holds the
//      rows jh, jh + LINES_H, ... of the box, ROW apart, so that short rows can share vectors.
//   2. Stages: each fused step works on whole lines in cache: pointwise work rides on the store of the stage before it, layer
//      norm and channel sums run lane by lane, pools fold lines of one window together.
//   3. Store: phases along width are interleaved and rows written whole.
// With USE_STREAM rows go past the caches (a result larger than them need not push anything out, nor be read before it is written).
// Scratch is a slice of global memory per worker, small enough for its core's L2 cache. No barriers and no local memory are used.
//
// The host guarantees: weights are finite (zero lines stand for what lies outside the tensor), a box covers whole pooling windows,
// every table matches the geometry, scratch has SCRATCH zeroed elements a worker, and padding in it is never written.

// With BOX_W an item is as many positions along width, not all of them, and a row the part of it that these make.
#if BOX_W
#define ROW_W min(OUT_W - first, BOX_W * STRIDE_W)
#else
#define ROW_W OUT_W
#endif

// Writes one row of ROW_W elements: STORE_PLANES phases, STORE_LINE apart, interleaved. Whole vectors first, by WRITE_V.
#if STORE_PLANES == 1 && VEC > 1
#define WRITE_ROW(WRITE_V) \
  for (; m + VEC <= ROW_W; m += VEC) WRITE_V(LOAD_V(line + m), to + m);
#elif STORE_PLANES == 2 && VEC > 1
#define WRITE_ROW(WRITE_V)                                                      \
  for (; 2 * (m + VEC) <= ROW_W; m += VEC) {                                    \
    const real_v even = LOAD_V(line + m), odd = LOAD_V(line + STORE_LINE + m);  \
    WRITE_V(INTERLEAVE_LOW(even, odd), to + 2 * m);                             \
    WRITE_V(INTERLEAVE_HIGH(even, odd), to + 2 * m + VEC);                      \
  }
#elif STORE_PLANES == 4 && VEC > 1
#define WRITE_ROW(WRITE_V)                                                                                            \
  for (; 4 * (m + VEC) <= ROW_W; m += VEC) {                                                                          \
    const real_v p0 = LOAD_V(line + m), p1 = LOAD_V(line + STORE_LINE + m), p2 = LOAD_V(line + 2 * STORE_LINE + m),   \
                 p3 = LOAD_V(line + 3 * STORE_LINE + m), even_low = INTERLEAVE_LOW(p0, p2),                           \
                 even_high = INTERLEAVE_HIGH(p0, p2), odd_low = INTERLEAVE_LOW(p1, p3), odd_high = INTERLEAVE_HIGH(p1, p3); \
    WRITE_V(INTERLEAVE_LOW(even_low, odd_low), to + 4 * m);                                                           \
    WRITE_V(INTERLEAVE_HIGH(even_low, odd_low), to + 4 * m + VEC);                                                    \
    WRITE_V(INTERLEAVE_LOW(even_high, odd_high), to + 4 * m + 2 * VEC);                                               \
    WRITE_V(INTERLEAVE_HIGH(even_high, odd_high), to + 4 * m + 3 * VEC);                                              \
  }
#else
#define WRITE_ROW(WRITE_V)
#endif

#define LINE_AT(w) line[(w) % STORE_PLANES * STORE_LINE + (w) / STORE_PLANES]

#if USE_ROWS
// The same with STORE_TAIL(x), the steps that need a result's place, and with statistics of the row. With USE_STORE 0 nothing is
// written but these.
static void store_row(global REAL *restrict y, global const REAL *restrict line, global const REAL *restrict operands, const int n,
                      const int c, const int d, const int h, const int first PARAMETERS) {
  global REAL *const to = y + first;
  GATHER_BEGIN
#define FINISH(v, w, left)  \
  real_v value = v;         \
  STORE_TAIL(value);        \
  GATHER(value, w, left)
#if USE_STORE
#define FINISH_V(v, p)                      \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
    STORE_V(value, p);                      \
  }
#define FINISH_STREAM_V(v, p)               \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
    STREAM_V(value, p);                     \
  }
#else
#define FINISH_V(v, p)                      \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
  }
#endif
  int m = 0;
#if USE_STREAM && USE_STORE && defined(STREAM_V)
  if ((size_t)to % sizeof(real_v) == 0) {
    WRITE_ROW(FINISH_STREAM_V)
  }
#endif
  WRITE_ROW(FINISH_V)
  for (int at = m * STORE_PLANES; at < ROW_W; at += VEC) {
    REAL lanes[VEC];
    for (int i = 0; i < VEC; i++) lanes[i] = at + i < ROW_W ? LINE_AT(at + i) : R(0.0);
    const int w = first + at;
    FINISH(LOAD_V(lanes), w, ROW_W - at)
#if USE_STORE
    store_lanes(value, to + at, ROW_W - at);
#endif
  }
  GATHER_END((((size_t)n * OUT_D + d) * OUT_H + h) * OUT_C + c)
}
#else
static void store_row(global REAL *restrict y, global const REAL *restrict line, const int first) {
  global REAL *const to = y + first;
  int m = 0;
#if USE_STREAM && defined(STREAM_V)
  if ((size_t)to % sizeof(real_v) == 0) {
    WRITE_ROW(STREAM_V)
  }
#endif
  WRITE_ROW(STORE_V)
  for (int w = m * STORE_PLANES; w < ROW_W; w++) to[w] = LINE_AT(w);
}
#endif

// Writes one row of every channel. d, h: the row's place in the output; first: the item's first column.
static void store_rows(global REAL *restrict y, const int n, const int d, const int h, const int first,
                       global const REAL *restrict line, global const REAL *restrict operands PARAMETERS) {
  if (d >= OUT_D || h >= OUT_H) return;
  global REAL *row = y + (((size_t)n * OUT_C * OUT_D + d) * OUT_H + h) * OUT_W;
  for (int c = 0; c < OUT_C; c++) {
    global REAL *const to = row + (size_t)c * ((size_t)OUT_D * OUT_H * OUT_W);
#if USE_ROWS
    store_row(to, line + c * (STORE_PLANES * STORE_LINE), operands, n, c, d, h, first ARGUMENTS);
#else
    store_row(to, line + c * (STORE_PLANES * STORE_LINE), first);
#endif
  }
}

// counter: [0] the next item, [1] workers that are done; both zero before the launch and again after it. [2] is set when a core
// that is right on finite data only met anything else; the caller then repeats the launch with the direct core.
//
// The hint says that it has vectors of its own: without it, Intel's compiler makes a second kernel over many work-items as well, which
// nobody runs, and takes up to twenty times as long.
__attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(real_v)))
kernel void KERNEL_NAME(global const REAL *restrict x, global const REAL *restrict weights,
                        global const REAL *restrict operands, global REAL *restrict y, global REAL *restrict scratch,
                        global volatile int *restrict counter, const int items PARAMETERS) {
  global REAL *const base = scratch + (size_t)get_global_id(0) * SCRATCH;
  global REAL *const lines = base + SCRATCH_LINES;
  real_v poison = SPLAT(R(0.0));
  for (;;) {
    const int item = atomic_inc(counter);
    if (item >= items) break;
    const int first_w = item % BOXES_W * BOX_W, first_h = item / BOXES_W % BOXES_H * BOX_H,
              first_d = item / (BOXES_W * BOXES_H) % BOXES_D * BOX_D, n = item / (BOXES_W * BOXES_H * BOXES_D);
    global const REAL *image = x + (size_t)n * ((size_t)IC * ID * IH * IW);
    begin_box(base, image, first_d, first_h, first_w, operands);
#if USE_FOLD
    global REAL *const pooled = base + SCRATCH_POOLED;
    fold_clear(pooled);
#endif
    for (int rd = 0; rd < STRIDE_D; rd++)
      for (int rh = 0; rh < STRIDE_H; rh++)
        for (int step = 0; step < BOX_D; step += STEP_D) {
          convolve(base, image, first_d, first_h, rd, rh, step, weights, lines, operands, &poison);
          for (int j = 0; j < STEP_D * LINES_H; j++) {
            global REAL *line = lines + (size_t)j * (LINE_CHANNELS * STRIDE_W * LINE);
            STAGES_BEFORE_FOLD(line);
            for (int i = 0; i < BOX_H / LINES_H; i++) {
              const int md = step + j / LINES_H, mh = i * LINES_H + j % LINES_H;
#if USE_FOLD
              // Rows that no whole window holds fall into window rows beyond the output and are never stored.
              const int window_d = (md * STRIDE_D + rd) / WINDOW_D, window_h = (mh * STRIDE_H + rh) / WINDOW_H;
              fold_row(pooled + (size_t)window_d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE) + window_h * FOLD_ROW, line + i * ROW);
#else
              store_rows(y, n, (first_d + md) * STRIDE_D + rd, (first_h + mh) * STRIDE_H + rh, first_w * STRIDE_W, line + i * ROW,
                         operands ARGUMENTS);
#endif
            }
          }
        }
#if USE_FOLD
    for (int d = 0; d < FOLD_BOX_D; d++) {
      global REAL *line = pooled + (size_t)d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE);
      fold_finish(line, operands);
      STAGES_AFTER_FOLD(line);
      for (int h = 0; h < FOLD_BOX_H; h++)
        store_rows(y, n, first_d * STRIDE_D / WINDOW_D + d, first_h * STRIDE_H / WINDOW_H + h, 0,
                   line + h * FOLD_ROW, operands ARGUMENTS);
    }
#endif
  }
  if (sum_of_lanes(poison) != R(0.0)) counter[2] = 1;
  if (atomic_inc(counter + 1) == get_global_size(0) - 1) counter[0] = counter[1] = 0;
}
