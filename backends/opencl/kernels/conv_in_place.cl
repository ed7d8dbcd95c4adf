// Convolution that reads its input where it lies, for groups of few channels, which memory bounds: CPU devices.
//
//   y[n][c][d][h][w] = sum over taps (td, th, tw) and channels i of c's group of
//       weight[..][i][c] * x[n][i][d*STEP_D + LOW_D + td*APART_D][h*STEP_H + LOW_H + th*APART_H][w*STEP_W + LOW_W + tw*APART_W]
//
// Layouts: x [N][IC][ID][IH][IW], weights [group][channel tile][KD][KH][KW][GROUP_IC][THREAD_C], y [N][OC][OUT_D][OUT_H][OUT_W];
// operands as in conv_transpose3d_lines.cl. Positions along width are in the vector lanes, THREAD_C output channels of TILE_W vectors
// in registers. Nothing is packed and no line is kept, so that a core reads and writes memory at the same time; stores past the caches took twice
// as long as plain ones here.
//
// Only positions LO .. HI - 1, whose taps all lie inside the row, are computed in vectors. The few others are summed up one by one,
// over the taps that meet the row. The last vector of a row ends with it, and may repeat some of the one before.
//
// An item, which a persistent worker (a work-group of one work-item) takes from a shared counter, is BOX_G groups of channels by a
// row along depth by BOX_H along height by one of BOXES_W parts of the width.

#if STEP_W == 1
#define LOAD_STEPS(p) LOAD_V(p)
#elif STEP_W == 2 && VEC > 2
#define LOAD_STEPS(p) ((real_v)(LOAD_V(p).even, LOAD_V((p) + VEC).even))
#else
#define LOAD_STEPS(p) load_steps(p)
static real_v load_steps(global const REAL *p) {
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = p[i * STEP_W];
  return LOAD_V(lanes);
}
#endif
// Where there is one, shuffles make the inputs of each tap from vectors that are loaded once for a row of taps: a load that is not
// aligned takes several times as long as a product. The host defines TAPS_W, a TAP(tw, shift, shift_end) for each tap, if REACH_W,
// the distance of the last tap from the first one, is below VEC.
#if defined(SHUFFLE_V) && USE_SHIFTS
#define SHIFTS 1
#else
#define SHIFTS 0
#endif
// acc[c][v] += values[v] * weight for all c and v.
#define MULTIPLY(values, weight)                                                             \
  _Pragma("unroll") for (int c = 0; c < THREAD_C; c++) {                                     \
    const real_v wc = SPLAT(weight);                                                         \
    _Pragma("unroll") for (int v = 0; v < TILE_W; v++) acc[c][v] = fma(values[v], wc, acc[c][v]); \
  }

// Writes `left` lanes, at most VEC, of output channel c.
static void finish(real_v value, global REAL *to, const int left, const int n, const int c, const int d, const int h,
                   const int w, global const REAL *restrict operands PARAMETERS) {
  CONV_TAIL(value, c);
  STORE_TAIL(value);
  store_lanes(value, to + w, left);
}

#define TILE_W THREAD_W
#include "conv_in_place_tile.cl"
#undef TILE_W
#if THREAD_W > 1
#define TILE_W 1
#include "conv_in_place_tile.cl"
#undef TILE_W
#endif

// Positions first .. end - 1 of a row, one by one.
static void edge(global const REAL *restrict x, global const REAL *restrict weights, global REAL *restrict to, const int first,
                 const int end, const int n, const int channel, const int channels, const int d, const int h,
                 global const REAL *restrict operands PARAMETERS) {
  for (int w = first; w < end; w += VEC) {
    REAL lanes[THREAD_C][VEC];
    for (int c = 0; c < THREAD_C; c++)
      for (int j = 0; j < VEC; j++) lanes[c][j] = R(0.0);
    for (int j = 0; j < min(VEC, end - w); j++)
      for (int td = 0; td < KD; td++)
        for (int th = 0; th < KH; th++) {
          const int at_d = d * STEP_D + LOW_D + td * APART_D, at_h = h * STEP_H + LOW_H + th * APART_H;
          if ((uint)at_d >= ID || (uint)at_h >= IH) continue;
          for (int tw = 0; tw < KW; tw++) {
            const int at_w = (w + j) * STEP_W + LOW_W + tw * APART_W;
            if ((uint)at_w >= IW) continue;
            global const REAL *from = x + ((size_t)at_d * IH + at_h) * IW + at_w;
            global const REAL *tap = weights + ((td * KH + th) * KW + tw) * (GROUP_IC * THREAD_C);
            for (int i = 0; i < GROUP_IC; i++)
              for (int c = 0; c < THREAD_C; c++) lanes[c][j] = fma(from[i * CHANNEL], tap[i * THREAD_C + c], lanes[c][j]);
          }
        }
    for (int c = 0; c < channels; c++)
      finish(LOAD_V(lanes[c]), to + c * OUT_CHANNEL, end - w, n, channel + c, d, h, w, operands ARGUMENTS);
  }
}

// Positions first .. end - 1 of a row of `channels` output channels from `channel` on, to[c * OUT_CHANNEL + w].
static void convolve_row(global const REAL *restrict x, global const REAL *restrict weights, global REAL *restrict to, const int first,
                         const int end, const int n, const int channel, const int channels, const int d, const int h,
                         global const REAL *restrict operands PARAMETERS) {
  int low = max(LO, first), high = min(HI, end);
  if (high - low < VEC) low = high = end;
  edge(x, weights, to, first, low, n, channel, channels, d, h, operands ARGUMENTS);
  edge(x, weights, to, high, end, n, channel, channels, d, h, operands ARGUMENTS);
  MARK(EDGES)
#define TILE(width, w) PASTE(tile_, width)(x, weights, to, w, n, channel, channels, d, h, operands ARGUMENTS)
  for (; low + THREAD_W * VEC <= high; low += THREAD_W * VEC) TILE(THREAD_W, low);
  for (; low + VEC <= high; low += VEC) TILE(1, low);
  if (low < high) TILE(1, high - VEC);
  MARK(PRODUCTS)
}

// counter: [0] the next item, [1] workers that are done; both zero before the launch and again after it. For the hint, see
// conv_transpose3d_lines.cl.
__attribute__((reqd_work_group_size(1, 1, 1), vec_type_hint(real_v)))
kernel void conv_in_place(global const REAL *restrict x, global const REAL *restrict weights, global const REAL *restrict operands,
                          global REAL *restrict y, global volatile int *restrict counter, const int items PARAMETERS) {
  MARK(START)
  for (;;) {
    int item = atomic_inc(counter);
    if (item >= items) break;
    const int part = item % BOXES_W, first_h = (item /= BOXES_W) % BOXES_H * BOX_H, d = (item /= BOXES_H) % OUT_D,
              first_g = (item /= OUT_D) % BOXES_G * BOX_G, n = item / BOXES_G;
    const int first = (long)part * OUT_W / BOXES_W, end = (long)(part + 1) * OUT_W / BOXES_W;
    for (int g = first_g; g < min(first_g + BOX_G, GROUPS); g++)
      for (int c = 0; c < GROUP_OC; c += THREAD_C) {
        global const REAL *w = weights + (size_t)(g * TILES_C + c / THREAD_C) * (KD * KH * KW * GROUP_IC * THREAD_C);
        const int channel = g * GROUP_OC + c;
        for (int h = first_h; h < min(first_h + BOX_H, OUT_H); h++)
          convolve_row(x + ((size_t)n * GROUPS + g) * (GROUP_IC * CHANNEL), w,
                       y + ((size_t)n * (GROUPS * GROUP_OC) + channel) * OUT_CHANNEL + ((size_t)d * OUT_H + h) * OUT_W, first, end, n,
                       channel, min(THREAD_C, GROUP_OC - c), d, h, operands ARGUMENTS);
      }
  }
  if (atomic_inc(counter + 1) == get_global_size(0) - 1) counter[0] = counter[1] = 0;
}
