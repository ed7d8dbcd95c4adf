// Stage of a tiled kernel: layer norm over the channels of each column (numeric.cl says how).
//
//   y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]
//
// results: [STAGE_CHANNELS][COLUMNS]. The host defines STAGE_EPS (an index into operands), STAGE_AFFINE(x, c) and STAGE_TAIL(x, c).
static void PASTE(stage_, STAGE)(local REAL *results, local REAL *partial, global const REAL *operands,
                                 const int lane, const int slice) {
  const REAL share = R(1.0) / STAGE_CHANNELS;
  for (int column = lane; column < COLUMNS; column += LANES) {
    const REAL shift = results[column];
    REAL total = R(0.0), farthest = R(0.0);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      const REAL apart = results[c * COLUMNS + column] - shift;
      total = fma(apart, share, total);
      farthest = max_v(farthest, fabs(apart));
    }
    const REAL mean = sum_over_slices(total, partial, lane, slice) + shift;
    const REAL factor = factor_over_slices(farthest, partial, lane, slice);
    KEPT_SUM(rest)
    KEPT_SUM(squares)
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      const REAL deviation = (results[c * COLUMNS + column] - mean) * factor;
      KEEP(rest, deviation)
      KEEP(squares, deviation * deviation)
    }
    rest = sum_over_slices(rest, partial, lane, slice) * share;
    squares = sum_over_slices(squares, partial, lane, slice);
    const REAL scale = SCALE_OF(squares, rest, factor, STAGE_CHANNELS, operands[STAGE_EPS]);
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) {
      REAL value = fma((results[c * COLUMNS + column] - mean) * factor, scale, -rest * scale);
      STAGE_AFFINE(value, c);
      STAGE_TAIL(value, c);
      results[c * COLUMNS + column] = value;
    }
  }
}
