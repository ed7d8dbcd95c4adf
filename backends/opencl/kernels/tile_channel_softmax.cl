// Stage of a tiled kernel: softmax over the channels of each column, with the true maximum subtracted.
// results: [STAGE_CHANNELS][COLUMNS]. The host defines STAGE_TAIL(x, c).
static void PASTE(stage_, STAGE)(local REAL *results, local REAL *partial, global const REAL *operands,
                                 const int lane, const int slice) {
  for (int column = lane; column < COLUMNS; column += LANES) {
    REAL largest = -INFINITY, total = R(0.0);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) largest = max_v(largest, results[c * COLUMNS + column]);
    largest = max_over_slices(largest, partial, lane, slice);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      const REAL e = exp_v(results[c * COLUMNS + column] - largest);
      results[c * COLUMNS + column] = e;
      total += e;
    }
    const REAL scale = R(1.0) / sum_over_slices(total, partial, lane, slice);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      REAL value = results[c * COLUMNS + column] * scale;
      STAGE_TAIL(value, c);
      results[c * COLUMNS + column] = value;
    }
  }
}
