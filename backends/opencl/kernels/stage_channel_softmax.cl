// Stage: softmax over the channels of each position, with the true maximum subtracted.
// Line: [STAGE_CHANNELS][STAGE_RUN].
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  for (int i = 0; i < STAGE_RUN; i += VEC) {
    global REAL *p = line + i;
    real_v maximum = LOAD_V(p);
    for (int c = 1; c < STAGE_CHANNELS; c++) maximum = max_v(maximum, LOAD_V(p + c * STAGE_RUN));
    real_v total = SPLAT(R(0.0));
    for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS) {
      real_v run = SPLAT(R(0.0));
      for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++) {
        const real_v e = exp_below_v(LOAD_V(p + c * STAGE_RUN) - maximum);
        STORE_V(e, p + c * STAGE_RUN);
        run += e;
      }
      total += run;
    }
    const real_v scale = SPLAT(R(1.0)) / total;
    for (int c = 0; c < STAGE_CHANNELS; c++) {
      real_v value = LOAD_V(p + c * STAGE_RUN) * scale;
      STAGE_TAIL(value, c);
      STORE_V(value, p + c * STAGE_RUN);
    }
  }
}
