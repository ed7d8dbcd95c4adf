// Stage: reduction over the channels of each position: [STAGE_CHANNELS][STAGE_RUN] becomes [1][STAGE_RUN], in place.
// The host defines the reduction: STAGE_COMBINE(a, b), STAGE_IDENTITY, STAGE_LIFT(x) and STAGE_FINISH(t).
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  for (int i = 0; i < STAGE_RUN; i += VEC) {
    real_v value = SPLAT(STAGE_IDENTITY);
    for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS) {
      real_v run = SPLAT(STAGE_IDENTITY);
      for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++)
        run = STAGE_COMBINE(run, STAGE_LIFT(LOAD_V(line + c * STAGE_RUN + i)));
      value = STAGE_COMBINE(value, run);
    }
    value = STAGE_FINISH(value);
    STAGE_TAIL(value, 0);
    STORE_V(value, line + i);
  }
}
