// Stage of a tiled kernel: reduction over the channels of each column: [STAGE_CHANNELS][COLUMNS] becomes [1][COLUMNS], in place.
// The host defines STAGE_COMBINE(a, b), STAGE_IDENTITY, STAGE_OVER_SLICES (sum or maximum that keeps NaN), STAGE_SHARE (1, or
// 1/channels for a mean) and STAGE_TAIL(x, c).
static void PASTE(stage_, STAGE)(local REAL *results, local REAL *partial, global const REAL *operands,
                                 const int lane, const int slice) {
  for (int column = lane; column < COLUMNS; column += LANES) {
    REAL value = STAGE_IDENTITY;
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) value = STAGE_COMBINE(value, results[c * COLUMNS + column]);
    value = STAGE_OVER_SLICES(value, partial, lane, slice) * STAGE_SHARE;
    STAGE_TAIL(value, 0);
    // Channel 0 belongs to slice 0, which alone has read it.
    if (slice == 0) results[column] = value;
  }
}
