// One register tile of the direct convolution, included once for each width TILE_W (vectors along the line).
//
//   out[c][lane] = sum over taps t and input channels i of  weight[t][i][c] * x[i][lane + offset(t)]
//
// c runs over THREAD_C output channels and lane over TILE_W * VEC positions, all held in registers: for each (tap, input
// channel) TILE_W vectors are loaded, THREAD_C weights broadcast, and THREAD_C * TILE_W fused multiply-adds made.
// Weights are stored in exactly this order, so they are read as one stream.
//
// Args:
//   packed   plane 0 of the box's packed input, at channel 0 of the group
//   first_d first_h  input indices of the box's first position: planes and rows outside the tensor add nothing and are skipped
//   rd rh rw the phase
//   w        packed weights of this phase and channel tile: [KD taps][KH taps][KW taps][IC/groups][THREAD_C]
//   md       row of the box along depth
//   chunk    which tile of the line
//   line     where the line's first channel goes: line[(c*STRIDE_W)*LINE + CHUNK_LINE[chunk] + lane]
//   channel  first output channel, for the operands of the tail
static void PASTE(conv_tile_, TILE_W)(global const REAL *restrict packed, const int first_d, const int first_h, const int rd,
                                      const int rh, const int rw, global const REAL *restrict w, const int md, const int chunk,
                                      global REAL *restrict line, global const REAL *restrict operands, const int channel) {
  real_v acc[THREAD_C][TILE_W], total[THREAD_C][TILE_W];
  #pragma unroll
  for (int c = 0; c < THREAD_C; c++)
    #pragma unroll
    for (int v = 0; v < TILE_W; v++) acc[c][v] = total[c][v] = SPLAT(R(0.0));
  int terms = 0;
  for (int td = 0; td < TAPS_D[rd]; td++)
    for (int th = 0; th < TAPS_H[rh]; th++) {
      global const REAL *row = row_of_tap(packed, first_d, first_h, rd, rh, td, th, md, chunk);
      if (!row) {
        w += TAPS_W[rw] * (GROUP_IC * THREAD_C);
        continue;
      }
#pragma unroll 1
      for (int tw = 0; tw < TAPS_W[rw]; tw++) {
        global const REAL *restrict xr = row + OFFSET_W[rw][tw];
#pragma unroll 1
        for (int i = 0; i < GROUP_IC; i++) {
          real_v xv[TILE_W];
          #pragma unroll
          for (int v = 0; v < TILE_W; v++) xv[v] = LOAD_V(xr + v * VEC);
          #pragma unroll
          for (int c = 0; c < THREAD_C; c++) {
            const real_v wc = SPLAT(w[c]);
            #pragma unroll
            for (int v = 0; v < TILE_W; v++) acc[c][v] = fma(xv[v], wc, acc[c][v]);
          }
          xr += CHANNEL;
          w += THREAD_C;
        }
        terms += GROUP_IC;
        if (terms < SUM_BLOCK) continue;
        terms = 0;
        #pragma unroll
        for (int c = 0; c < THREAD_C; c++)
          #pragma unroll
          for (int v = 0; v < TILE_W; v++) {
            total[c][v] += acc[c][v];
            acc[c][v] = SPLAT(R(0.0));
          }
      }
    }
  line += CHUNK_LINE[chunk];
  #pragma unroll
  for (int c = 0; c < THREAD_C; c++)
    #pragma unroll
    for (int v = 0; v < TILE_W; v++) {
      real_v value = total[c][v] + acc[c][v];
      CONV_TAIL(value, channel + c);
      STORE_V(value, line + (size_t)c * (STRIDE_W * LINE) + v * VEC);
    }
}
