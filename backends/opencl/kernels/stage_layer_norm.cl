// Stage: layer norm over the channels of each position, lane by lane (numeric.cl says how).
//
//   y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]
//
// Line: [STAGE_CHANNELS][STAGE_RUN]. The host defines STAGE_TERMS, the channels of a run, STAGE_EPS (an index into operands) and
// STAGE_AFFINE(value, c).
// Vectors that are summed up side by side, since each sum waits for the addition before. The last ones may be taken twice.
#define SIDE 4
#define EACH_SIDE _Pragma("unroll") for (int s = 0; s < SIDE; s++)
#define EACH_RUN for (int first = 0; first < STAGE_CHANNELS; first += STAGE_TERMS)
#define EACH_IN_RUN for (int c = first; c < min(first + STAGE_TERMS, STAGE_CHANNELS); c++)
static void PASTE(stage_, STAGE)(global REAL *restrict line, global const REAL *restrict operands) {
  const REAL share = R(1.0) / STAGE_CHANNELS;
  for (int i = 0; i < STAGE_RUN; i += SIDE * VEC) {
    int at[SIDE];
    real_v shift[SIDE], mean[SIDE], factor[SIDE], rest[SIDE], rest_lost[SIDE], squares[SIDE], squares_lost[SIDE];
    EACH_SIDE {
      at[s] = min(i + s * VEC, STAGE_RUN - VEC);
      shift[s] = LOAD_V(line + at[s]);
      mean[s] = SPLAT(R(0.0));
      factor[s] = SPLAT(R(1.0));
    }
    EACH_RUN {
      real_v run[SIDE];
      EACH_SIDE run[s] = SPLAT(R(0.0));
      EACH_IN_RUN EACH_SIDE run[s] = fma(LOAD_V(line + at[s] + c * STAGE_RUN) - shift[s], SPLAT(share), run[s]);
      EACH_SIDE mean[s] += run[s];
    }
    EACH_SIDE mean[s] += shift[s];
    for (int pass = 0; pass < 2; pass++) {
      EACH_SIDE rest[s] = rest_lost[s] = squares[s] = squares_lost[s] = SPLAT(R(0.0));
      EACH_RUN {
        real_v rest_run[SIDE], run[SIDE];
        EACH_SIDE rest_run[s] = run[s] = SPLAT(R(0.0));
        EACH_IN_RUN EACH_SIDE {
          const real_v deviation = fma(LOAD_V(line + at[s] + c * STAGE_RUN), factor[s], -mean[s]);
          rest_run[s] += deviation;
          run[s] = fma(deviation, deviation, run[s]);
        }
        EACH_SIDE {
          keep(&rest[s], &rest_lost[s], rest_run[s]);
          keep(&squares[s], &squares_lost[s], run[s]);
        }
      }
      bool again = false;
      EACH_SIDE again |= OVERFLOWS(squares[s]);
      if (pass || !again) break;
      EACH_SIDE {
        factor[s] = (squares[s] < SPLAT(INFINITY)) ? SPLAT(R(1.0)) : SPLAT(FAR);
        mean[s] *= factor[s];
      }
    }
#pragma unroll 1
    for (int s = 0; s < min(SIDE, (STAGE_RUN - i) / VEC); s++) {
      global REAL *const p = line + at[s];
      const real_v scale = SCALE_OF(squares[s], rest[s] * share, factor[s], STAGE_CHANNELS, operands[STAGE_EPS]);
      const real_v offset = -(rest[s] * share) * scale;
      for (int c = 0; c < STAGE_CHANNELS; c++) {
        real_v value = fma(fma(LOAD_V(p + c * STAGE_RUN), factor[s], -mean[s]), scale, offset);
        STAGE_AFFINE(value, c);
        STAGE_TAIL(value, c);
        STORE_V(value, p + c * STAGE_RUN);
      }
    }
  }
}
#undef SIDE
#undef EACH_SIDE
#undef EACH_RUN
#undef EACH_IN_RUN
