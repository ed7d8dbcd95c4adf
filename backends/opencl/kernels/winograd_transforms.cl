// The transforms along height and width, included once for each number of TAPS of a phase along height that occurs.
#define PARTS (TAPS + M_H - 1)

// Panels of one chunk of `width` vectors, from e at the chunk's first lane. Marks the tiles that one channel dominates
// (winograd_range.cl), but where marks is null.
static void PASTE(winograd_inputs_, TAPS)(global REAL *restrict v, global const REAL *restrict e, const int rh, const int width,
                                          const int lane, const int tiles, global int *restrict marks) {
  int at[PARTS];
  for (int b = 0; b < PARTS; b++) at[b] = ROW_AT(INPUT_H[rh][b]);
  real_v sum[THREAD_W][M_H][ENDS_W][REACH_W], largest[THREAD_W][M_H][ENDS_W][REACH_W];
  for (int c = 0; c < IC; c++)
    for (int j = 0; j < width; j++) {
      global const REAL *const from = e + (size_t)c * CHANNEL + j * VEC;
      global REAL *const to = v + (c * width + j) * VEC;
      real_v u[PARTS][REACH_W];
#pragma unroll
      for (int k = 0; k < REACH_W; k++) {
        real_v x[PARTS], z[PARTS];
#pragma unroll
        for (int b = 0; b < PARTS; b++) x[b] = LOAD_V(from + at[b] + COLUMN_AT(k));
        PASTE(INPUT_SUMS_, TAPS)(x, z);
#pragma unroll
        for (int b = 0; b < PARTS; b++) u[b][k] = z[b];
      }
#pragma unroll
      for (int b = 0; b < PARTS; b++) {
        real_v z[PARTS_W];
        INPUT_SUMS_W(u[b], z);
#pragma unroll
        for (int q = 0; q < PARTS_W; q++) STORE_V(z[q], to + (b * PARTS_W + q) * PANEL);
      }
      if (marks) measure(from, at, sum[j], largest[j], TAPS, c, lane + j * VEC, tiles, marks);
    }
}

// Adds the products of depth component `part` to the lines of one chunk: `channels` channels from `channel` on. The last component of
// a plane is followed by the steps that ride along. sums: of magnitudes of the group's results, or null.
static void PASTE(winograd_outputs_, TAPS)(global const REAL *restrict z, const int rd, const int part, const int width,
                                           const int channel, const int channels, global REAL *restrict line,
                                           global const REAL *restrict operands, global REAL *restrict sums, real_v *poison) {
  for (int c = 0; c < channels; c++)
    for (int j = 0; j < width; j++) {
      global const REAL *const from = z + (c * width + j) * VEC;
      real_v u[PARTS][STRIDE_W], y[STRIDE_W][M_H];
#pragma unroll
      for (int b = 0; b < PARTS; b++) {
        real_v products[PARTS_W];
#pragma unroll
        for (int q = 0; q < PARTS_W; q++) products[q] = LOAD_V(from + (b * PARTS_W + q) * PRODUCTS);
        OUTPUT_SUMS_W(products, u[b]);
      }
#pragma unroll
      for (int q = 0; q < STRIDE_W; q++) {
        real_v x[PARTS];
#pragma unroll
        for (int b = 0; b < PARTS; b++) x[b] = u[b][q];
        PASTE(OUTPUT_SUMS_, TAPS)(x, y[q]);
      }
#pragma unroll 1
      for (int jd = 0; jd < M_D; jd++) {
        const bool first = part == FIRST_PART[rd][jd], last = part == LAST_PART[rd][jd];
        if (part < FIRST_PART[rd][jd] || part > LAST_PART[rd][jd]) continue;
        const real_v factor = SPLAT(OUTPUT_D[rd][part][jd]);
        global REAL *const to = line + ((size_t)(jd * M_H) * LINE_CHANNELS + c) * (STRIDE_W * LINE) + j * VEC;
        global REAL *const total = sums + jd * (M_H * STRIDE_W * LINE) + j * VEC;
#pragma unroll 1
        for (int jh = 0; jh < M_H; jh++)
#pragma unroll 1
          for (int q = 0; q < STRIDE_W; q++) {
            global REAL *const target = to + (size_t)jh * (LINE_CHANNELS * STRIDE_W * LINE) + q * LINE;
            real_v value = first ? factor * y[q][jh] : fma(factor, y[q][jh], LOAD_V(target));
            if (last) {
              if (sums) {
                global REAL *const all = total + (jh * STRIDE_W + q) * LINE;
                STORE_V((channel + c) % GROUP_OC ? fabs(value) + LOAD_V(all) : fabs(value), all);
              }
              *poison = fma(value, SPLAT(R(0.0)), *poison);
              CONV_TAIL(value, channel + c);
            }
            STORE_V(value, target);
          }
      }
    }
}
#undef PARTS
