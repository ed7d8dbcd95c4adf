// Packs the rows of all depth components of a phase, included once for each number of TAPS of a phase along depth that occurs.
#define PARTS (TAPS + M_D - 1)

// Writes e [component][IC][CHANNEL] for the rows that the box's tiles read, so that each plane is read once.
//
// row: [component][ROW_SIZE], zeros before and behind the row of input.
__attribute__((noinline)) static void PASTE(pack_planes_, TAPS)(global REAL *restrict e, global REAL *restrict row, global const REAL *restrict x,
                                                                const int plane, const int rd, const int first_h,
                                                                global const REAL *restrict operands) {
  for (int c = 0; c < IC; c++)
    for (int r = 0; r < ROWS; r++) {
      const int h = first_h + LOW_H + r;
      global REAL *const lines = e + (size_t)c * CHANNEL + ROW_AT(r);
      bool inside[PARTS], any_inside = false;
      global const REAL *source[PARTS];
#pragma unroll
      for (int b = 0; b < PARTS; b++) {
        const int d = plane + INPUT_D[rd][b];
        inside[b] = (uint)d < ID && (uint)h < IH;
        any_inside |= inside[b];
        source[b] = inside[b] ? x + (((size_t)c * ID + d) * IH + h) * IW : x;
      }
      if (!any_inside) {
        for (int b = 0; b < PARTS; b++)
          for (int s = 0; s < SUB_LINES; s++) clear(lines + (size_t)b * (IC * CHANNEL) + s * EDGE, (PITCH + VEC - 1) / VEC * VEC);
        continue;
      }
      for (int w = 0; w < IW; w += VEC) {
        // The last vector ends with the row, and may repeat some of the one before it.
        const int at = IW < VEC ? 0 : min(w, IW - VEC);
        real_v values[PARTS], sums[PARTS];
#pragma unroll
        for (int b = 0; b < PARTS; b++) {
          values[b] = SPLAT(R(0.0));
          if (inside[b]) {
            PREFETCH(source[b] + at + (size_t)ID * IH * IW);
            values[b] = IW < VEC ? load_lanes(source[b], IW, R(0.0)) : LOAD_V(source[b] + at);
            PROLOGUE(values[b], c);
          }
        }
        PASTE(INPUT_SUMS_D_, TAPS)(values, sums);
#pragma unroll
        for (int b = 0; b < PARTS; b++)
          if (IW < VEC)
            store_lanes(sums[b], row + b * ROW_SIZE + ROW_LEAD, IW);
          else
            STORE_V(sums[b], row + b * ROW_SIZE + ROW_LEAD + at);
      }
      for (int b = 0; b < PARTS; b++)
        for (int s = 0; s < SUB_LINES; s += M_W)
          deal_out(lines + (size_t)b * (IC * CHANNEL) + s * EDGE, row + b * ROW_SIZE + ROW_LEAD + LOW_W + s);
    }
}
#undef PARTS
