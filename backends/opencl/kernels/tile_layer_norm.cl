// Stage of a tiled kernel: layer norm over the channels of each column.
//
//   y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]
//
// Two passes over the deviations: the one-pass formula E[x^2] - E[x]^2 cancels when the mean is large.
// results: [STAGE_CHANNELS][COLUMNS]. The host defines STAGE_EPS (an index into operands), STAGE_AFFINE(x, c) and STAGE_TAIL(x, c).
static void PASTE(stage_, STAGE)(local REAL *results, local REAL *partial, global const REAL *operands,
                                 const int lane, const int slice) {
  const REAL share = R(1.0) / STAGE_CHANNELS;
  for (int column = lane; column < COLUMNS; column += LANES) {
    REAL total = R(0.0), squares = R(0.0);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) total += results[c * COLUMNS + column];
    const REAL mean = sum_over_slices(total, partial, lane, slice) * share;
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      const REAL deviation = results[c * COLUMNS + column] - mean;
      squares = fma(deviation, deviation, squares);
    }
    const REAL variance = sum_over_slices(squares, partial, lane, slice) * share;
    const REAL scale = R(1.0) / sqrt(variance + operands[STAGE_EPS]);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      REAL value = (results[c * COLUMNS + column] - mean) * scale;
      STAGE_AFFINE(value, c);
      STAGE_TAIL(value, c);
      results[c * COLUMNS + column] = value;
    }
  }
}
