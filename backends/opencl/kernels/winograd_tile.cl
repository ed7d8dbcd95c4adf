// One register tile of the Winograd core, included once for each width TILE_W (vectors along the line).
//
//   z[c][lane] = sum over taps tw along width and input channels i of  w[tw][i][c] * v[i][lane + offset(tw)]
//
// The same tile as conv_tile.cl with the taps along depth and height gone: they live in the transforms.
static void PASTE(winograd_tile_, TILE_W)(global const REAL *restrict v, const int rw, global const REAL *restrict w,
                                          global REAL *restrict z) {
  real_v acc[THREAD_C][TILE_W];
#pragma unroll
  for (int c = 0; c < THREAD_C; c++)
#pragma unroll
    for (int j = 0; j < TILE_W; j++) acc[c][j] = SPLAT(R(0.0));
  for (int tw = 0; tw < TAPS_W[rw]; tw++) {
    global const REAL *restrict vr = v + OFFSET_W[rw][tw];
    for (int i = 0; i < GROUP_IC; i++) {
      real_v vv[TILE_W];
#pragma unroll
      for (int j = 0; j < TILE_W; j++) vv[j] = LOAD_V(vr + j * VEC);
#pragma unroll
      for (int c = 0; c < THREAD_C; c++) {
        const real_v wc = SPLAT(w[c]);
#pragma unroll
        for (int j = 0; j < TILE_W; j++) acc[c][j] = fma(vv[j], wc, acc[c][j]);
      }
      vr += CHANNEL;
      w += THREAD_C;
    }
  }
#pragma unroll
  for (int c = 0; c < THREAD_C; c++)
#pragma unroll
    for (int j = 0; j < TILE_W; j++) STORE_V(acc[c][j], z + (c * TILE_W + j) * VEC);
}

// Applies the inverse transform along height to the KEYS tiles z[b], and adds the results to the lines of the two rows along
// depth, where component `part` of the depth transform enters with factors INVERSE_D[count][part][jd].
//
// Args:
//   line     lines of row 0: line[((jd*2 + jh)*LINE_CHANNELS + c)*STRIDE_W*LINE + lane]
//   poison   becomes NaN when a result is not finite
static void PASTE(winograd_inverse_, TILE_W)(global const REAL *restrict z, const int parts_d, const int part, const int parts_h,
                                             global REAL *restrict line, global const REAL *restrict operands,
                                             const int channel, real_v *poison) {
  const int step = THREAD_C * TILE_W * VEC;
  for (int c = 0; c < THREAD_C; c++)
#pragma unroll
    for (int j = 0; j < TILE_W; j++) {
      global const REAL *p = z + (c * TILE_W + j) * VEC;
      real_v row[2];
      const real_v z0 = LOAD_V(p), z1 = LOAD_V(p + step);
      if (parts_h == 2) {
        row[0] = z0;
        row[1] = z1;
      } else if (parts_h == 3) {
        row[0] = z0 + z1;
        row[1] = z1 - LOAD_V(p + 2 * step);
      } else {
        const real_v z2 = LOAD_V(p + 2 * step);
        row[0] = z0 + z1 + z2;
        row[1] = z1 - z2 - LOAD_V(p + 3 * step);
      }
#pragma unroll
      for (int jd = 0; jd < 2; jd++) {
        // Row 0 along depth sums the components but the last, row 1 those but the first.
        if (part < jd || part > parts_d - 2 + jd) continue;
        const bool first = part == jd, last = part == parts_d - 2 + jd, negative = jd == 1 && part >= 2;
#pragma unroll
        for (int jh = 0; jh < 2; jh++) {
          global REAL *target = line + ((size_t)(jd * 2 + jh) * LINE_CHANNELS + c) * (STRIDE_W * LINE) + j * VEC;
          real_v value = negative ? -row[jh] : row[jh];
          if (!first) value += LOAD_V(target);
          if (last) {
            *poison = fma(value, SPLAT(R(0.0)), *poison);
            CONV_TAIL(value, channel + c);
          }
          STORE_V(value, target);
        }
      }
    }
}
