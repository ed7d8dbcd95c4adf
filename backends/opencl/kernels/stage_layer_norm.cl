// Stage: layer norm over the channels of each position, lane by lane.
//
//   y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]
//
// Two passes over the deviations: the one-pass formula E[x^2] - E[x]^2 cancels when the mean is large. Sums are taken in runs of
// STAGE_TERMS channels and then over runs, so that their errors stay small with hundreds of thousands of channels.
// Line: [STAGE_CHANNELS][STAGE_RUN]. The host defines STAGE_EPS (an index into operands) and STAGE_AFFINE(value, c).
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  const REAL share = R(1.0) / STAGE_CHANNELS;
  for (int i = 0; i < STAGE_RUN; i += VEC) {
    global REAL *p = line + i;
    real_v mean = SPLAT(R(0.0));
    for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS) {
      real_v run = SPLAT(R(0.0));
      for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++) run += LOAD_V(p + c * STAGE_RUN);
      mean += run;
    }
    mean = mean * share;
    real_v variance = SPLAT(R(0.0));
    for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS) {
      real_v run = SPLAT(R(0.0));
      for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++) {
        const real_v deviation = LOAD_V(p + c * STAGE_RUN) - mean;
        run = fma(deviation, deviation, run);
      }
      variance += run;
    }
    const real_v scale = SPLAT(R(1.0)) / sqrt(fma(variance, SPLAT(share), SPLAT(operands[STAGE_EPS])));
    for (int c = 0; c < STAGE_CHANNELS; c++) {
      real_v value = (LOAD_V(p + c * STAGE_RUN) - mean) * scale;
      STAGE_AFFINE(value, c);
      STAGE_TAIL(value, c);
      STORE_V(value, p + c * STAGE_RUN);
    }
  }
}
