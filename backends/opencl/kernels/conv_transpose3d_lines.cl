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

#if (STORE_PLANES == 3 || STORE_PLANES == 6) && VEC > 1
#define MERGE_V(a, b, c, s) PICK_V(PICK_V(a, b, MERGE_##s##_LOW), c, MERGE_##s##_HIGH)
static inline void merge(const real_v a, const real_v b, const real_v c, real_v *row) {
  row[0] = MERGE_V(a, b, c, 0);
  row[1] = MERGE_V(a, b, c, 1);
  row[2] = MERGE_V(a, b, c, 2);
}
#endif

// VEC positions of a row: STORE_PLANES phases, STORE_LINE apart, interleaved.
static inline void interleave(global const REAL *line, real_v *row) {
#if STORE_PLANES == 1
  row[0] = LOAD_V(line);
#elif STORE_PLANES == 2 && VEC > 1
  const real_v even = LOAD_V(line), odd = LOAD_V(line + STORE_LINE);
  row[0] = INTERLEAVE_LOW(even, odd);
  row[1] = INTERLEAVE_HIGH(even, odd);
#elif STORE_PLANES == 4 && VEC > 1
  const real_v p0 = LOAD_V(line), p1 = LOAD_V(line + STORE_LINE), p2 = LOAD_V(line + 2 * STORE_LINE), p3 = LOAD_V(line + 3 * STORE_LINE);
  const real_v even_low = INTERLEAVE_LOW(p0, p2), odd_low = INTERLEAVE_LOW(p1, p3);
  const real_v even_high = INTERLEAVE_HIGH(p0, p2), odd_high = INTERLEAVE_HIGH(p1, p3);
  row[0] = INTERLEAVE_LOW(even_low, odd_low);
  row[1] = INTERLEAVE_HIGH(even_low, odd_low);
  row[2] = INTERLEAVE_LOW(even_high, odd_high);
  row[3] = INTERLEAVE_HIGH(even_high, odd_high);
#elif STORE_PLANES == 3 && VEC > 1
  merge(LOAD_V(line), LOAD_V(line + STORE_LINE), LOAD_V(line + 2 * STORE_LINE), row);
#elif STORE_PLANES == 6 && VEC > 1
  real_v low[3], high[3];
  for (int p = 0; p < 3; p++) {
    const real_v even = LOAD_V(line + p * STORE_LINE), odd = LOAD_V(line + (p + 3) * STORE_LINE);
    low[p] = INTERLEAVE_LOW(even, odd);
    high[p] = INTERLEAVE_HIGH(even, odd);
  }
  merge(low[0], low[1], low[2], row);
  merge(high[0], high[1], high[2], row + 3);
#else
  for (int i = 0; i < STORE_PLANES * VEC; i++) ((REAL *)row)[i] = line[i % STORE_PLANES * STORE_LINE + i / STORE_PLANES];
#endif
}

// Writes one row of ROW_W elements from position m on, as far as vectors are whole, by WRITE_V; then the rest, by WRITE_LEFT.
#define WRITE_ROW(WRITE_V)                                                                             \
  for (; STORE_PLANES * (m + VEC) <= ROW_W; m += VEC) {                                                \
    real_v row[STORE_PLANES];                                                                          \
    interleave(line + m, row);                                                                         \
    for (int i = 0; i < STORE_PLANES; i++) WRITE_V(row[i], to + m * STORE_PLANES + i * VEC);           \
  }
#define WRITE_REST(WRITE_LEFT)                                                                         \
  for (; STORE_PLANES * m < ROW_W; m += VEC) {                                                         \
    real_v row[STORE_PLANES];                                                                          \
    interleave(line + m, row);                                                                         \
    for (int i = 0; i < STORE_PLANES; i++) {                                                           \
      const int left = ROW_W - m * STORE_PLANES - i * VEC;                                             \
      if (left > 0) WRITE_LEFT(row[i], to + ROW_W - left, left);                                       \
    }                                                                                                  \
  }

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
#define FINISH_LEFT(v, p, left)             \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, left)                      \
    store_lanes(value, p, left);            \
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
#define FINISH_LEFT(v, p, left)             \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, left)                      \
  }
#endif
  int m = 0;
#if USE_STREAM && USE_STORE && defined(STREAM_V)
  if ((size_t)to % sizeof(real_v) == 0) {
    WRITE_ROW(FINISH_STREAM_V)
  }
#endif
  WRITE_ROW(FINISH_V)
  WRITE_REST(FINISH_LEFT)
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
  WRITE_REST(store_lanes)
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
  MARK(START)
  for (;;) {
    const int item = atomic_inc(counter);
    if (item >= items) break;
    const int first_w = item % BOXES_W * BOX_W, first_h = item / BOXES_W % BOXES_H * BOX_H,
              first_d = item / (BOXES_W * BOXES_H) % BOXES_D * BOX_D, n = item / (BOXES_W * BOXES_H * BOXES_D);
    global const REAL *image = x + n * (size_t)IMAGE;
    begin_box(base, image, first_d, first_h, first_w, operands);
    MARK(PACK)
#if USE_FOLD
    global REAL *const pooled = base + SCRATCH_POOLED;
    fold_clear(pooled);
#endif
    for (int rd = 0; rd < STRIDE_D; rd++)
      for (int step = 0; step < BOX_D; step += STEP_D)
        for (int rh = 0; rh < STRIDE_H; rh++) {
          convolve(base, image, first_d, first_h, rd, rh, step, weights, lines, operands, &poison);
          for (int j = 0; j < STEP_D * LINES_H; j++) {
            global REAL *line = lines + (size_t)j * (LINE_CHANNELS * STRIDE_W * LINE);
            STAGES_BEFORE_FOLD(line);
            MARK(STEPS)
            for (int i = 0; i < BOX_H / LINES_H; i++) {
              const int md = step + j / LINES_H, mh = i * LINES_H + j % LINES_H;
#if USE_FOLD
              // Rows that no whole window holds fall into window rows beyond the output and are never stored.
              const int window_d = (md * STRIDE_D + rd) / WINDOW_D, window_h = (mh * STRIDE_H + rh) / WINDOW_H;
              fold_row(pooled + (size_t)window_d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE) + window_h * FOLD_ROW, line + i * ROW);
              MARK(STEPS)
#else
              store_rows(y, n, (first_d + md) * STRIDE_D + rd, (first_h + mh) * STRIDE_H + rh, first_w * STRIDE_W, line + i * ROW,
                         operands ARGUMENTS);
              MARK(STORE)
#endif
            }
          }
        }
#if USE_FOLD
    for (int d = 0; d < FOLD_BOX_D; d++) {
      global REAL *line = pooled + (size_t)d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE);
      fold_finish(line, operands);
      STAGES_AFTER_FOLD(line);
      MARK(STEPS)
      for (int h = 0; h < FOLD_BOX_H; h++)
        store_rows(y, n, first_d * STRIDE_D / WINDOW_D + d, first_h * STRIDE_H / WINDOW_H + h, 0,
                   line + h * FOLD_ROW, operands ARGUMENTS);
      MARK(STORE)
    }
#endif
  }
  if (sum_of_lanes(poison) != R(0.0)) counter[2] = 1;
  if (atomic_inc(counter + 1) == get_global_size(0) - 1) counter[0] = counter[1] = 0;
}
