// The product of one component, included once for each width TILE_W of a chunk, in vectors, that occurs.
//
//   z[c][lane] = sum over input channels i of  w[i][c] * v[i][lane]
//
// for THREAD_C channels and TILE_W * VEC lanes in registers. Panels and weights are read as one stream each. Sums are of SUM_IC channels
// each, and then added up: they round less.
static void PASTE(winograd_product_, TILE_W)(global const REAL *restrict v, global const REAL *restrict w, global REAL *restrict z) {
  for (int first = 0; first < GROUP_IC; first += SUM_IC) {
    real_v acc[THREAD_C][TILE_W];
#pragma unroll
    for (int c = 0; c < THREAD_C; c++)
#pragma unroll
      for (int j = 0; j < TILE_W; j++) acc[c][j] = SPLAT(R(0.0));
    const int end = min(GROUP_IC, first + SUM_IC);
#pragma unroll 2
    for (int i = first; i < end; i++) {
      real_v vv[TILE_W];
#pragma unroll
      for (int j = 0; j < TILE_W; j++) vv[j] = LOAD_V(v + (i * TILE_W + j) * VEC);
#pragma unroll
      for (int c = 0; c < THREAD_C; c++) {
        const real_v wc = SPLAT(w[i * THREAD_C + c]);
#pragma unroll
        for (int j = 0; j < TILE_W; j++) acc[c][j] = fma(vv[j], wc, acc[c][j]);
      }
    }
#pragma unroll
    for (int c = 0; c < THREAD_C; c++)
#pragma unroll
      for (int j = 0; j < TILE_W; j++) {
        global REAL *const to = z + (c * TILE_W + j) * VEC;
        STORE_V(first == 0 ? acc[c][j] : acc[c][j] + LOAD_V(to), to);
      }
  }
}
