// Stage: layer norm over the channels of each position, lane by lane (numeric.cl says how).
//
//   y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]
//
// Line: [STAGE_CHANNELS][STAGE_RUN]. The host defines STAGE_TERMS, the channels of a run, STAGE_EPS (an index into operands) and
// STAGE_AFFINE(value, c).
#define EACH_RUN for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS)
#define EACH_IN_RUN for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++)
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  const REAL share = R(1.0) / STAGE_CHANNELS;
  for (int i = 0; i < STAGE_RUN; i += VEC) {
    global REAL *p = line + i;
    const real_v shift = LOAD_V(p);
    real_v mean = SPLAT(R(0.0)), factor = SPLAT(R(1.0));
    KEPT_SUM(rest)
    KEPT_SUM(squares)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN run = fma(LOAD_V(p + c * STAGE_RUN) - shift, SPLAT(share), run);
      mean += run;
    }
    mean += shift;
    for (int pass = 0; pass < 2; pass++) {
      rest = rest_lost = squares = squares_lost = SPLAT(R(0.0));
      EACH_RUN {
        real_v rest_run = SPLAT(R(0.0)), run = rest_run;
        EACH_IN_RUN {
          const real_v deviation = fma(LOAD_V(p + c * STAGE_RUN), factor, -mean);
          rest_run += deviation;
          run = fma(deviation, deviation, run);
        }
        KEEP(rest, rest_run)
        KEEP(squares, run)
      }
      if (pass || !OVERFLOWS(squares)) break;
      factor = (squares < SPLAT(INFINITY)) ? SPLAT(R(1.0)) : SPLAT(FAR);
      mean *= factor;
    }
    rest *= share;
    const real_v scale = SCALE_OF(squares, rest, factor, STAGE_CHANNELS, operands[STAGE_EPS]), offset = -rest * scale;
    for (int c = 0; c < STAGE_CHANNELS; c++) {
      real_v value = fma(fma(LOAD_V(p + c * STAGE_RUN), factor, -mean), scale, offset);
      STAGE_AFFINE(value, c);
      STAGE_TAIL(value, c);
      STORE_V(value, p + c * STAGE_RUN);
    }
  }
}
#undef EACH_RUN
#undef EACH_IN_RUN
