// The transform of inputs along height, included once for each number of TAPS of a phase along height that occurs.
//
// v[part][i * PITCH + w] for one channel: sums of the rows LINES_H*i .. LINES_H*i + TAPS + LINES_H - 2 of e.
#define PARTS (TAPS + LINES_H - 1)
static void PASTE(winograd_inputs_, TAPS)(global REAL *restrict v, global const REAL *restrict e, const int tiles) {
  for (int i = 0; i < tiles; i++)
    for (int w = 0; w < IW; w += VEC) {
      real_v x[PARTS], z[PARTS];
#pragma unroll
      for (int row = 0; row < PARTS; row++) x[row] = LOAD_V(e + (i * LINES_H + row) * EDGE + w);
      PASTE(INPUT_SUMS_, TAPS)(x, z);
#pragma unroll
      for (int part = 0; part < PARTS; part++) STORE_V(z[part], v + part * PLANE + i * PITCH + w);
    }
}
#undef PARTS
