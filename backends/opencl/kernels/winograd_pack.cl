// The input of the Winograd core on its way into panels: rows of one depth component, dealt out to sub-lines (core_winograd.cl).

// Where row `row` and input `k` along width of a tile lie in e, from the tile's lane.
#define ROW_AT(row) ((row) % M_H * (SUB_LINES * EDGE) + (row) / M_H * PITCH)
#define COLUMN_AT(k) ((k) % SUB_LINES * EDGE + (k) / SUB_LINES)
// Is the lane a tile of the box's first `tiles` tile rows?
#define IS_TILE(lane, tiles) ((lane) % ROW < POSITIONS_W && (lane) / ROW < (tiles))

#if VEC == 1
#define ANY_V(condition) (condition)
#else
#define ANY_V(condition) any(condition)
#endif

// Deals PITCH tiles of a row out to sub-lines: line[s * EDGE + t] = row[M_W * t + s]. A little more of each is overwritten.
static void deal_out(global REAL *restrict line, global const REAL *restrict row) {
  for (int t = 0; t < PITCH; t += VEC) {
    global const REAL *const from = row + M_W * t;
#if M_W == 1
    STORE_V(LOAD_V(from), line + t);
#elif M_W == 2 && VEC > 1
    const real_v low = LOAD_V(from), high = LOAD_V(from + VEC);
    STORE_V((real_v)(low.even, high.even), line + t);
    STORE_V((real_v)(low.odd, high.odd), line + EDGE + t);
#elif M_W == 3 && VEC > 1
    const real_v low = LOAD_V(from), middle = LOAD_V(from + VEC), high = LOAD_V(from + 2 * VEC);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_0_LOW), high, DEAL_0_HIGH), line + t);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_1_LOW), high, DEAL_1_HIGH), line + EDGE + t);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_2_LOW), high, DEAL_2_HIGH), line + 2 * EDGE + t);
#else
    for (int s = 0; s < M_W; s++)
      for (int i = 0; i < VEC; i++) line[s * EDGE + t + i] = from[M_W * i + s];
#endif
  }
}

// Writes e: the sum of planes `plane + TERM_D[i]`, times FACTOR_D[i], for from <= i < to, of all rows that the box's tiles read.
__attribute__((noinline)) static void pack_plane(global REAL *restrict e, global REAL *restrict row, global const REAL *restrict x, const int plane, const int from,
                       const int to, const int first_h, global const REAL *restrict operands) {
  for (int c = 0; c < IC; c++)
    for (int r = 0; r < ROWS; r++) {
      const int h = first_h + LOW_H + r;
      global REAL *const line = e + (size_t)c * CHANNEL + ROW_AT(r);
      global const REAL *source[MOST_TERMS];
      REAL factor[MOST_TERMS];
      int terms = 0;
#pragma unroll 1
      for (int i = from; i < to; i++) {
        const int d = plane + TERM_D[i];
        if ((uint)d >= ID || (uint)h >= IH) continue;
        source[terms] = x + (((size_t)c * ID + d) * IH + h) * IW;
        factor[terms++] = FACTOR_D[i];
      }
      if (terms == 0) {
        for (int s = 0; s < SUB_LINES; s++) clear(line + s * EDGE, (PITCH + VEC - 1) / VEC * VEC);
        continue;
      }
      for (int w = 0; w < IW; w += VEC) {
        // The last vector ends with the row, and may repeat some of the one before it.
        const int at = IW < VEC ? 0 : min(w, IW - VEC);
        real_v sum = SPLAT(R(0.0));
#pragma unroll
        for (int i = 0; i < MOST_TERMS; i++)
          if (i < terms) {
            real_v value = IW < VEC ? load_lanes(source[i], IW, R(0.0)) : LOAD_V(source[i] + at);
            PROLOGUE(value, c);
            sum = fma(value, SPLAT(factor[i]), sum);
          }
        if (IW < VEC)
          store_lanes(sum, row + ROW_LEAD, IW);
        else
          STORE_V(sum, row + ROW_LEAD + at);
      }
      for (int s = 0; s < SUB_LINES; s += M_W) deal_out(line + s * EDGE, row + ROW_LEAD + LOW_W + s);
    }
}
