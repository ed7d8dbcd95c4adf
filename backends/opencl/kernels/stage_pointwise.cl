// Stage: pointwise steps that no earlier stage could carry in its store.
// Line: [STAGE_CHANNELS][STAGE_RUN].
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  for (int c = 0; c < STAGE_CHANNELS; c++)
    for (int i = 0; i < STAGE_RUN; i += VEC) {
      global REAL *p = line + c * STAGE_RUN + i;
      real_v value = LOAD_V(p);
      STAGE_TAIL(value, c);
      STORE_V(value, p);
    }
}
