// Transposed 3-D convolution, phase by phase, with the steps behind it fused: the kernel for CPU devices.
//
// Equation, per axis (stride S, padding P, dilation L): output o = S*m + r of phase r takes tap k when S divides r + P - k*L,
// and reads input m + (r + P - k*L)/S. Each phase is a dense little convolution: no zero insertion, no atomics, no scatter.
//
// Layouts
//   x         [N][IC][ID][IH][IW]
//   weights   [rd][rh][rw][channel tile][KD taps][KH taps][KW taps][IC/groups][THREAD_C]   packed once by the host
//   operands  bias, scalars and per-channel tensors of the fused steps, one after another (offsets are defines)
//   y         [N][C][D][H][W] of the last fused step
// GEMM view, per phase: M = positions m, N = output channels, K = input channels * taps.
//
// Who owns what: a work-group is one work-item, a persistent worker that takes items from a shared counter. An item is a box of
// BOX_D x BOX_H positions along depth and height, all of width, all phases, all output channels:
//   1. pack: the box's input rows go to scratch as lines, [plane][channel][row][PITCH], zero where a tap may reach outside.
//   2. convolve: for each (rd, rh), register tiles (conv_tile.cl) fill lines [row of the box along depth][OC][rw][LINE]. A line
//      holds BOX_H rows, ROW apart, so that short rows can share vectors.
//   3. stages: each fused step works on whole lines in cache: pointwise work rides on the store of the stage before it, layer
//      norm and channel sums run lane by lane, pools fold lines of one window together.
//   4. store: phases along width are interleaved and rows written whole.
// Scratch is a slice of global memory per worker, small enough for its core's L2 cache.
//
// The host guarantees: weights are finite (zero lines stand for what lies outside the tensor), BOX covers whole pooling windows,
// every table below matches the geometry, and scratch has SCRATCH elements a worker. No barriers and no local memory are used.

#define TILE_W 1
#include "conv_tile.cl"
#undef TILE_W
#if THREAD_W > 1
#define TILE_W THREAD_W
#include "conv_tile.cl"
#undef TILE_W
#endif

// Copies one input row of IW elements to the line and clears the gap behind it, where taps of this row's end and of the next
// row's start may reach.
static void pack_row(global REAL *restrict line, global const REAL *restrict x, global const REAL *restrict operands,
                     const int channel) {
  int w = 0;
#if IW >= VEC
  for (; w + VEC <= IW; w += VEC) {
    real_v value = LOAD_V(x + w);
    PROLOGUE(value, channel);
    STORE_V(value, line + w);
  }
#endif
  for (; w < IW; w++) {
    real_v value = SPLAT(x[w]);
    PROLOGUE(value, channel);
    line[w] = LANE0(value);
  }
  for (; w < PITCH; w++) line[w] = R(0.0);
}

static void clear(global REAL *line, const int count) {
  int i = 0;
  for (; i + VEC <= count; i += VEC) STORE_V(SPLAT(R(0.0)), line + i);
  for (; i < count; i++) line[i] = R(0.0);
}

// Packs the input rows of one box: planes first_d + INPUT_D[..], rows first_h + INPUT_H[..].
static void pack_box(global REAL *restrict packed, global const REAL *restrict x, const int first_d, const int first_h,
                     global const REAL *restrict operands) {
  for (int plane = 0; plane < PLANES; plane++) {
    const int d = first_d + INPUT_D[plane];
    if ((uint)d >= ID) continue;
    for (int row = 0; row < ROWS; row++) {
      const int h = first_h + INPUT_H[row];
      global REAL *line = packed + (size_t)plane * PLANE + row * PITCH;
      if ((uint)h < IH) {
        global const REAL *source = x + ((size_t)d * IH + h) * IW;
        for (int c = 0; c < IC; c++) pack_row(line + c * CHANNEL, source + (size_t)c * ((size_t)ID * IH * IW), operands, c);
      } else {
        for (int c = 0; c < IC; c++) clear(line + c * CHANNEL, PITCH);
      }
    }
  }
}

// All phases along width of the rows of one (rd, rh): lines [BOX_D][LINE_CHANNELS][STRIDE_W][LINE].
// A ragged last tile writes past its group; the next group overwrites that, and LINE_CHANNELS leaves room behind the last one.
static void convolve(global const REAL *restrict packed, const int first_d, const int rd, const int rh,
                     global const REAL *restrict weights, global REAL *restrict lines, global const REAL *restrict operands) {
  for (int rw = 0; rw < STRIDE_W; rw++) {
    const int tile_weights = TAPS_D[rd] * TAPS_H[rh] * TAPS_W[rw] * (GROUP_IC * THREAD_C);
    global const REAL *w = weights + PHASE_WEIGHTS[(rd * STRIDE_H + rh) * STRIDE_W + rw];
    for (int group = 0; group < GROUPS; group++) {
      global const REAL *x = packed + group * (GROUP_IC * CHANNEL);
      for (int c = 0; c < GROUP_OC; c += THREAD_C, w += tile_weights) {
        const int channel = group * GROUP_OC + c;
        for (int md = 0; md < BOX_D; md++) {
          global REAL *line = lines + ((size_t)(md * LINE_CHANNELS + channel) * STRIDE_W + rw) * LINE;
          int chunk = 0;
#if THREAD_W > 1
          for (; chunk < WIDE_CHUNKS; chunk++)
            PASTE(conv_tile_, THREAD_W)(x + CHUNK_X[chunk], first_d, rd, rh, rw, w, md, line + CHUNK_LINE[chunk], operands, channel);
#endif
          for (; chunk < CHUNKS; chunk++)
            conv_tile_1(x + CHUNK_X[chunk], first_d, rd, rh, rw, w, md, line + CHUNK_LINE[chunk], operands, channel);
        }
      }
    }
  }
}

// Writes one row of OUT_W elements: STORE_PLANES phases, STORE_LINE apart, interleaved.
static void store_row(global REAL *restrict y, global const REAL *restrict line) {
  int m = 0;
#if STORE_PLANES == 1 && VEC > 1
  for (; m + VEC <= OUT_W; m += VEC) STORE_V(LOAD_V(line + m), y + m);
#elif STORE_PLANES == 2 && VEC > 1
  for (; 2 * (m + VEC) <= OUT_W; m += VEC) {
    const real_v even = LOAD_V(line + m), odd = LOAD_V(line + STORE_LINE + m);
    STORE_V(INTERLEAVE_LOW(even, odd), y + 2 * m);
    STORE_V(INTERLEAVE_HIGH(even, odd), y + 2 * m + VEC);
  }
#endif
  for (int w = m * STORE_PLANES; w < OUT_W; w++)
    y[w] = line[(w % STORE_PLANES) * STORE_LINE + w / STORE_PLANES];
}

// Writes one row of every channel. d, h: the row's place in the output.
static void store_rows(global REAL *restrict y, const int n, const int d, const int h, global const REAL *restrict line) {
  if (d >= OUT_D || h >= OUT_H) return;
  global REAL *row = y + (((size_t)n * OUT_C * OUT_D + d) * OUT_H + h) * OUT_W;
  for (int c = 0; c < OUT_C; c++)
    store_row(row + (size_t)c * ((size_t)OUT_D * OUT_H * OUT_W), line + c * (STORE_PLANES * STORE_LINE));
}

// counter: [0] the next item, [1] workers that are done; both zero before the launch and again after it.
__attribute__((reqd_work_group_size(1, 1, 1)))
kernel void conv_transpose3d_direct(global const REAL *restrict x, global const REAL *restrict weights,
                                    global const REAL *restrict operands, global REAL *restrict y,
                                    global REAL *restrict scratch, global volatile int *restrict counter, const int items) {
  global REAL *const base = scratch + (size_t)get_global_id(0) * SCRATCH;
  global REAL *const packed = base + LEAD;
  global REAL *const lines = base + SCRATCH_LINES;
  clear(base, LEAD);
  for (;;) {
    const int item = atomic_inc(counter);
    if (item >= items) break;
    const int first_h = (item % BOXES_H) * BOX_H, first_d = (item / BOXES_H % BOXES_D) * BOX_D, n = item / (BOXES_H * BOXES_D);
    pack_box(packed, x + (size_t)n * ((size_t)IC * ID * IH * IW), first_d, first_h, operands);
#if USE_FOLD
    global REAL *const pooled = base + SCRATCH_POOLED;
    fold_clear(pooled);
#endif
    for (int rd = 0; rd < STRIDE_D; rd++)
      for (int rh = 0; rh < STRIDE_H; rh++) {
        convolve(packed, first_d, rd, rh, weights, lines, operands);
        for (int md = 0; md < BOX_D; md++) {
          global REAL *line = lines + (size_t)md * (LINE_CHANNELS * STRIDE_W * LINE);
          STAGES_BEFORE_FOLD(line);
          for (int mh = 0; mh < BOX_H; mh++) {
#if USE_FOLD
            // Rows that no whole window holds fall into window rows beyond the output and are never stored.
            const int window_d = (md * STRIDE_D + rd) / WINDOW_D, window_h = (mh * STRIDE_H + rh) / WINDOW_H;
            fold_row(pooled + (size_t)window_d * (FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE) + window_h * FOLD_ROW, line + mh * ROW);
#else
            store_rows(y, n, (first_d + md) * STRIDE_D + rd, (first_h + mh) * STRIDE_H + rh, line + mh * ROW);
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
        store_rows(y, n, first_d * STRIDE_D / WINDOW_D + d, first_h * STRIDE_H / WINDOW_H + h, line + h * FOLD_ROW);
    }
#endif
  }
  if (atomic_inc(counter + 1) == get_global_size(0) - 1) counter[0] = counter[1] = 0;
}
