// Packs the rows of all depth components of a phase, included once for each number of TAPS of a phase along depth that occurs.
#define PARTS (TAPS + M_D - 1)

// Writes e [component][IC][CHANNEL] for the rows that the box's tiles read, so that each plane is read once.
//
// row: [component][ROW_SIZE], zeros before and behind the row of input.
__attribute__((noinline)) static void PASTE(pack_planes_, TAPS)(global REAL *restrict e, global REAL *restrict row, global const REAL *restrict x,
                                                                const int plane, const int rd, const int first_h,
                                                                global const REAL *restrict operands) {
  for (int p = 0; p < IC / DEALT_W; p++)
    for (int r = 0; r < ROWS; r++) {
      const int c = p / (DEALT_D * DEALT_H), h = SOURCE_AT(H, first_h + LOW_H + r, p % DEALT_H);
      global REAL *const lines = e + (size_t)p * (DEALT_W * CHANNEL) + ROW_AT(r);
      bool inside[PARTS], any_inside = false;
      global const REAL *source[PARTS];
#pragma unroll
      for (int b = 0; b < PARTS; b++) {
        const int d = SOURCE_AT(D, plane + INPUT_D[rd][b], p / DEALT_H % DEALT_D);
        inside[b] = (uint)d < SOURCE_D && (uint)h < SOURCE_H;
        any_inside |= inside[b];
        source[b] = inside[b] ? x + (((size_t)c * SOURCE_D + d) * SOURCE_H + h) * SOURCE_W : x;
      }
      if (!any_inside) {
        for (int b = 0; b < PARTS; b++)
          for (int q = 0; q < DEALT_W * SUB_LINES; q++)
            clear(lines + (size_t)b * (IC * CHANNEL) + q / SUB_LINES * CHANNEL + q % SUB_LINES * EDGE, (PITCH + VEC - 1) / VEC * VEC);
        continue;
      }
      for (int w = 0; w < SOURCE_W; w += VEC) {
        // The last vector ends with the row, and may repeat some of the one before it.
        const int at = SOURCE_W < VEC ? 0 : min(w, SOURCE_W - VEC);
        real_v values[PARTS], sums[PARTS];
#pragma unroll
        for (int b = 0; b < PARTS; b++) {
          values[b] = SPLAT(R(0.0));
          if (inside[b]) {
            PREFETCH(source[b] + at + (size_t)SOURCE_D * SOURCE_H * SOURCE_W);
            values[b] = SOURCE_W < VEC ? load_lanes(source[b], SOURCE_W, R(0.0)) : LOAD_V(source[b] + at);
            PROLOGUE(values[b], c);
          }
        }
        PASTE(INPUT_SUMS_D_, TAPS)(values, sums);
#pragma unroll
        for (int b = 0; b < PARTS; b++)
          if (SOURCE_W < VEC)
            store_lanes(sums[b], row + b * ROW_SIZE + ROW_LEAD, SOURCE_W);
          else
            STORE_V(sums[b], row + b * ROW_SIZE + ROW_LEAD + at);
      }
      for (int b = 0; b < PARTS; b++)
        for (int s = 0; s < SUB_LINES; s += M_W)
          deal_out(lines + (size_t)b * (IC * CHANNEL) + s * EDGE, row + b * ROW_SIZE + ROW_LEAD + SOURCE_AT(W, LOW_W + s, 0));
    }
}
#undef PARTS
