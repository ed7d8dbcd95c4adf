// Stage of a tiled kernel: reduction over the channels of each column: [STAGE_CHANNELS][COLUMNS] becomes [1][COLUMNS], in place.
// The host defines the reduction, STAGE_COMBINE(a, b), STAGE_IDENTITY, STAGE_LIFT(x), STAGE_FINISH(t), and STAGE_TAIL(x, c).
#define STAGE_OVER_SLICES PASTE(over_slices_, STAGE)
#define OVER_SLICES STAGE_OVER_SLICES
#define SLICES_COMBINE STAGE_COMBINE
#include "over_slices.cl"

static void PASTE(stage_, STAGE)(local REAL *results, local REAL *partial, global const REAL *operands,
                                 const int lane, const int slice) {
  for (int column = lane; column < COLUMNS; column += LANES) {
    REAL value = STAGE_IDENTITY;
    for (int c = slice; c < STAGE_CHANNELS; c += SLICES) value = STAGE_COMBINE(value, STAGE_LIFT(results[c * COLUMNS + column]));
    value = STAGE_FINISH(STAGE_OVER_SLICES(value, partial, lane, slice));
    STAGE_TAIL(value, 0);
    // Channel 0 belongs to slice 0, which alone has read it.
    if (slice == 0) results[column] = value;
  }
}
#undef STAGE_OVER_SLICES
