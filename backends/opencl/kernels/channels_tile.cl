// One register tile of the direct convolution with output channels in the vector lanes, included once for each kind of tile:
// THREAD_C channels x TILE_W positions along a row, all held in registers.
//
// For each (tap, input channel) THREAD_C / VEC vectors of weights are loaded and TILE_W inputs broadcast, STEP_W apart: any step
// reads rows as they are, and rows of any length fill the lanes.
//
// TILE_START is the tile's first position, where that is known: what its taps would read outside the row is left out then, if there
// are few enough taps to write each one's products out.
//
// Args:
//   packed .. chunk  as those of conv_tile.cl
//   results  [vector of channels][position]; zeros behind the tile's positions
#if defined(TILE_START) && USE_EDGES
#define IN_ROW(p, tw) ((uint)((TILE_START + (p)) * STEP_W + OFFSET_W[0][tw]) < IW)
#else
#define IN_ROW(p, tw) 1
#endif
// A function of its own to compilers, which take several times as long where they put all kinds of tiles into their caller; but not
// with few channels, where loops are short and gain from what is known there.
#if GROUP_IC > 4
__attribute__((noinline))
#endif
static void TILE_NAME(global const REAL *restrict packed, const int first_d, const int first_h, const int rd, const int rh,
                      const int rw, global const REAL *restrict w, const int md, const int chunk, real_v results[TILE_V][MOST_W]) {
  real_v acc[TILE_W][TILE_V], total[TILE_W][TILE_V];
  #pragma unroll
  for (int p = 0; p < TILE_W; p++)
    #pragma unroll
    for (int v = 0; v < TILE_V; v++) acc[p][v] = total[p][v] = SPLAT(R(0.0));
  int terms = 0;
  for (int td = 0; td < TAPS_D[rd]; td++)
    for (int th = 0; th < TAPS_H[rh]; th++) {
      global const REAL *row = row_of_tap(packed, first_d, first_h, rd, rh, td, th, md, chunk);
      if (!row) {
        w += TAPS_W[rw] * (GROUP_IC * THREAD_C);
        continue;
      }
#if defined(TILE_START) && USE_EDGES
#pragma unroll
      for (int tw = 0; tw < ALL_TAPS_W; tw++) {
#else
      for (int tw = 0; tw < TAPS_W[rw]; tw++) {
#endif
        global const REAL *restrict xr = row + OFFSET_W[rw][tw];
#if GROUP_IC <= 4 && !USE_EDGES
#pragma unroll
#else
#pragma unroll 1
#endif
        for (int i = 0; i < GROUP_IC; i++) {
          real_v wv[TILE_V];
          #pragma unroll
          for (int v = 0; v < TILE_V; v++) wv[v] = LOAD_V(w + v * VEC);
          #pragma unroll
          for (int p = 0; p < TILE_W; p++) {
            if (!IN_ROW(p, tw)) continue;
            const real_v xp = SPLAT(xr[p * STEP_W]);
            #pragma unroll
            for (int v = 0; v < TILE_V; v++) acc[p][v] = fma(xp, wv[v], acc[p][v]);
          }
          xr += CHANNEL;
          w += THREAD_C;
        }
        terms += GROUP_IC;
        if (terms < SUM_BLOCK) continue;
        terms = 0;
        #pragma unroll
        for (int p = 0; p < TILE_W; p++)
          #pragma unroll
          for (int v = 0; v < TILE_V; v++) {
            total[p][v] += acc[p][v];
            acc[p][v] = SPLAT(R(0.0));
          }
      }
    }
  #pragma unroll
  for (int p = 0; p < MOST_W; p++)
    #pragma unroll
    for (int v = 0; v < TILE_V; v++) results[v][p] = p < TILE_W ? total[min(p, TILE_W - 1)][v] + acc[min(p, TILE_W - 1)][v] : SPLAT(R(0.0));
}
#undef IN_ROW
