// The transform of inputs along height, included once for each number of TAPS of a phase along height that occurs.
//
// v[part][i * PITCH + w] for one channel: sums of the rows LINES_H*i .. LINES_H*i + TAPS + LINES_H - 2 of e. Their magnitudes enter
// loads (winograd_range.cl), where it is not null; `fresh`: as the first ones.
#define PARTS (TAPS + LINES_H - 1)
static void PASTE(winograd_inputs_, TAPS)(global REAL *restrict v, global const REAL *restrict e, const int tiles,
                                          global REAL *restrict loads, const bool fresh) {
  for (int i = 0; i < tiles; i++)
    for (int w = 0; w < IW; w += VEC) {
      real_v x[PARTS], z[PARTS];
#pragma unroll
      for (int row = 0; row < PARTS; row++) x[row] = LOAD_V(e + (i * LINES_H + row) * EDGE + w);
      PASTE(INPUT_SUMS_, TAPS)(x, z);
#pragma unroll
      for (int part = 0; part < PARTS; part++) STORE_V(z[part], v + part * PLANE + i * PITCH + w);
      if (!loads) continue;
      global REAL *const sum = loads + i * PITCH + w;
      real_v load = fabs(z[0]) + fabs(z[PARTS - 1]);  // between them, these two mix every row
#if TAPS == 1
      for (int part = 1; part < PARTS - 1; part++) load += fabs(z[part]);
#endif
      const real_v largest = fresh ? load : LOAD_V(sum + LOADS);
      STORE_V(load > largest ? load : largest, sum + LOADS);
      STORE_V(fresh ? load : load + LOAD_V(sum), sum);
    }
}
#undef PARTS
