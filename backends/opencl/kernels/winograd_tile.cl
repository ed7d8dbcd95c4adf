// One register tile of the Winograd core, included once for each width TILE_W (vectors along the line) and number of TAPS of a
// phase along height that occur.
//
//   z[b][c][lane] = sum over taps tw along width and input channels i of  w[b][tw][i][c] * v[b][i][lane + offset(tw)]
//
// for each height component b, one after another in registers, then the inverse transform along height, and the results added to the
// lines of the two rows along depth: component `part` of the depth transform enters row 0 unless it is the last, row 1 unless it is the
// first (negated where NEGATE_D says so). The same products as in conv_tile.cl, with the taps along depth and height gone into the
// transforms.
//
// Args:
//   v        lines of height component 0, at the group's first channel and the tile's first position
//   w        packed weights: [height component][KW taps][IC/groups][THREAD_C]
//   line     lines of row 0: line[((jd*LINES_H + jh)*LINE_CHANNELS + c)*STRIDE_W*LINE + lane]
//   sums     of the magnitudes of results, at the tile's first position: sums[(jd*LINES_H + jh)*LINE + lane];
//            null where nobody asks
//   poison   becomes NaN when a result is not finite
#define WINOGRAD_TILE PASTE(winograd_tile_, PASTE(TAPS, PASTE(x, TILE_W)))
#define PARTS (TAPS + LINES_H - 1)
static void WINOGRAD_TILE(global const REAL *restrict v, const int rw, global const REAL *restrict w, const int rd,
                          const int part, global REAL *restrict line, global const REAL *restrict operands, const int channel,
                          global REAL *restrict sums, real_v *poison) {
  real_v z[PARTS][THREAD_C][TILE_W];
#pragma unroll 1
  for (int b = 0; b < PARTS; b++) {
    real_v acc[THREAD_C][TILE_W];
#pragma unroll
    for (int c = 0; c < THREAD_C; c++)
#pragma unroll
      for (int j = 0; j < TILE_W; j++) acc[c][j] = SPLAT(R(0.0));
#pragma unroll 1
    for (int tw = 0; tw < TAPS_W[rw]; tw++) {
      global const REAL *restrict vr = v + b * PLANE + OFFSET_W[rw][tw];
#pragma unroll 1
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
      for (int j = 0; j < TILE_W; j++) z[b][c][j] = acc[c][j];
  }
#pragma unroll
  for (int jd = 0; jd < 2; jd++) {
    if (part < jd || part > PARTS_D[rd] - 2 + jd) continue;
    const bool first = part == jd, last = part == PARTS_D[rd] - 2 + jd, negative = jd == 1 && NEGATE_D[rd][part];
#pragma unroll
    for (int j = 0; j < TILE_W; j++) {
      real_v sum[LINES_H];
#pragma unroll
      for (int jh = 0; jh < LINES_H; jh++) sum[jh] = SPLAT(R(0.0));
#pragma unroll
      for (int c = 0; c < THREAD_C; c++) {
#if GROUP_OC % THREAD_C
        // What a ragged last tile has beyond its group is not its own: the next group's sums may be under way there.
        if (channel % GROUP_OC + c >= GROUP_OC) continue;
#endif
        real_v zc[PARTS], row[LINES_H];
#pragma unroll
        for (int b = 0; b < PARTS; b++) zc[b] = z[b][c][j];
        PASTE(OUTPUT_SUMS_, TAPS)(zc, row);
#pragma unroll
        for (int jh = 0; jh < LINES_H; jh++) {
          global REAL *target = line + ((size_t)(jd * LINES_H + jh) * LINE_CHANNELS + c) * (STRIDE_W * LINE) + j * VEC;
          real_v value = negative ? -row[jh] : row[jh];
          if (!first) value += LOAD_V(target);
          if (last) {
            sum[jh] += fabs(value);
            *poison = fma(value, SPLAT(R(0.0)), *poison);
            CONV_TAIL(value, channel + c);
          }
          STORE_V(value, target);
        }
      }
      if (!last || !sums) continue;
#pragma unroll
      for (int jh = 0; jh < LINES_H; jh++) {
        global REAL *const total = sums + (jd * LINES_H + jh) * LINE + j * VEC;
        STORE_V(channel % GROUP_OC ? sum[jh] + LOAD_V(total) : sum[jh], total);
      }
    }
  }
}
#undef WINOGRAD_TILE
#undef PARTS
