// One register tile of conv_in_place.cl, included once for each width TILE_W: positions w .. w + TILE_W * VEC - 1 of a row, all taps
// of which lie inside it along width. Planes and rows outside the tensor add nothing and are skipped.
static void PASTE(tile_, TILE_W)(global const REAL *restrict x, global const REAL *restrict weights, global REAL *restrict to,
                                 const int w, const int n, const int channel, const int channels, const int d,
                                 const int h, global const REAL *restrict operands PARAMETERS) {
  real_v acc[THREAD_C][TILE_W];
  #pragma unroll
  for (int c = 0; c < THREAD_C; c++)
    #pragma unroll
    for (int v = 0; v < TILE_W; v++) acc[c][v] = SPLAT(R(0.0));
  for (int td = 0; td < KD; td++)
    for (int th = 0; th < KH; th++) {
      const int at_d = d * STEP_D + LOW_D + td * APART_D, at_h = h * STEP_H + LOW_H + th * APART_H;
      if ((uint)at_d >= ID || (uint)at_h >= IH) continue;
      global const REAL *row = x + ((size_t)at_d * IH + at_h) * IW + w * STEP_W + LOW_W;
      global const REAL *tap = weights + (td * KH + th) * (KW * GROUP_IC * THREAD_C);
#if SHIFTS && (KW * GROUP_IC <= MOST_UNROLLED)
#pragma unroll
#else
#pragma unroll 1
#endif
#if SHIFTS
      for (int i = 0; i < GROUP_IC; i++) {
        real_v xv[TILE_W + 1], shifted[TILE_W];
        #pragma unroll
        for (int v = 0; v < TILE_W; v++) xv[v] = LOAD_V(row + i * CHANNEL + v * VEC);
        xv[TILE_W] = LOAD_V(row + i * CHANNEL + (TILE_W - 1) * VEC + REACH_W);
#define TAP(tw, shift, shift_end)                                                            \
  {                                                                                          \
    for (int v = 0; v < TILE_W - 1; v++) shifted[v] = shift(xv[v], xv[v + 1]);               \
    shifted[TILE_W - 1] = shift_end(xv[TILE_W - 1], xv[TILE_W]);                             \
    MULTIPLY(shifted, tap[(tw * GROUP_IC + i) * THREAD_C + c])                               \
  }
        TAPS_W
#undef TAP
      }
#else
      for (int tw = 0; tw < KW; tw++)
#if GROUP_IC <= MOST_UNROLLED
#pragma unroll
#else
#pragma unroll 1
#endif
        for (int i = 0; i < GROUP_IC; i++) {
          real_v xv[TILE_W];
          #pragma unroll
          for (int v = 0; v < TILE_W; v++) xv[v] = LOAD_STEPS(row + i * CHANNEL + tw * APART_W + v * (VEC * STEP_W));
          MULTIPLY(xv, tap[(tw * GROUP_IC + i) * THREAD_C + c])
        }
#endif
    }
  #pragma unroll
  for (int c = 0; c < THREAD_C; c++)
    if (c < channels) {
      #pragma unroll
      for (int v = 0; v < TILE_W; v++)
        finish(acc[c][v], to + c * OUT_CHANNEL, VEC, n, channel + c, d, h, w + v * VEC, operands ARGUMENTS);
    }
}
