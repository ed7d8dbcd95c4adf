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
//   3. Store (line_store.cl): phases along width are interleaved and rows written whole. With STORE_EARLY the core does so as soon
//      as it has made them.
// With USE_STREAM rows go past the caches (a result larger than them need not push anything out, nor be read before it is written).
// Scratch is a slice of global memory per worker, small enough for its core's L2 cache. No barriers and no local memory are used.
//
// The host guarantees: weights are finite (zero lines stand for what lies outside the tensor), a box covers whole pooling windows,
// every table matches the geometry, scratch has SCRATCH zeroed elements a worker, and padding in it is never written.

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
          convolve(base, image, first_d, first_h, rd, rh, step, weights, lines, operands, &poison STORE_ARGUMENTS);
#if !STORE_EARLY
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
              store_rows(y, n, 0, OUT_C, (first_d + md) * STRIDE_D + rd, (first_h + mh) * STRIDE_H + rh, first_w * STRIDE_W,
                         line + i * ROW, operands ARGUMENTS);
              MARK(STORE)
#endif
            }
          }
#endif
        }
#if USE_FOLD
    for (int d = 0; d < FOLD_BOX_D; d++) {
      global REAL *line = pooled + (size_t)d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE);
      fold_finish(line, operands);
      STAGES_AFTER_FOLD(line);
      MARK(STEPS)
      for (int h = 0; h < FOLD_BOX_H; h++)
        store_rows(y, n, 0, OUT_C, first_d * STRIDE_D / WINDOW_D + d, first_h * STRIDE_H / WINDOW_H + h, 0,
                   line + h * FOLD_ROW, operands ARGUMENTS);
      MARK(STORE)
    }
#endif
  }
  if (sum_of_lanes(poison) != R(0.0)) counter[2] = 1;
  if (atomic_inc(counter + 1) == get_global_size(0) - 1) counter[0] = counter[1] = 0;
}
