// Where the Winograd core's rounding would show, and what is computed directly there.
//
// A tile's sums mix all its input rows, so that an output gets rounding errors of the size of the tile's largest element, also of one
// that it does not read. They vanish in the output's own rounding as long as the magnitudes that it reads, one window of taps along
// depth and height over all channels of its group, N elements, add up to sqrt(N)/2 times the largest magnitude of its tile: then
// no few elements make up the output's own sum, whose terms the weights could happen to cancel, either. winograd.py sees to it that
// the weights are as even. Chunks of tiles with any lane where that does not hold are left to the direct sums below.
//
// Layouts in scratch, from SCRATCH_RANGE
//   range  [group][plane of the box][row of the box][sum, largest][EDGE]: magnitudes over a group's channels
//   uneven [LEAD + CHANNEL ...]: one line like those of v, 1 where an output that reads the lane must not be made of transforms
//   direct [group][chunk]: 1 where a chunk holds such an output

#define RANGE_PLANE (ROWS * 2 * EDGE)

static real_v magnitude_v(global const REAL *row, const int at, global const REAL *restrict operands, const int channel) {
#if IW >= VEC
  return fabs(combine_v(row + at, 0, -1, operands, channel));
#else
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = i < IW ? combine_one(row + i, 0, -1, operands, channel) : R(0.0);
  return fabs(LOAD_V(lanes));
#endif
}

// Fills range for one box.
static void measure_box(global REAL *restrict range, global const REAL *restrict x, const int first_d, const int first_h,
                        global const REAL *restrict operands) {
  for (int group = 0; group < GROUPS; group++)
    for (int plane = 0; plane < PLANES; plane++)
      for (int row = 0; row < ROWS; row++, range += 2 * EDGE) {
        const int d = first_d + INPUT_D[plane], h = first_h + INPUT_H[row];
        const bool inside = (uint)d < ID && (uint)h < IH;
        for (int w = 0; w < IW; w += VEC) {
          const int at = max(0, min(w, IW - VEC));
          real_v sum = SPLAT(R(0.0)), largest = SPLAT(R(0.0));
          if (inside) {
            global const REAL *source = x + ((size_t)(group * GROUP_IC) * ID + d) * (IH * IW) + (size_t)h * IW;
            for (int c = 0; c < GROUP_IC; c++, source += (size_t)ID * IH * IW) {
              const real_v size = magnitude_v(source, at, operands, group * GROUP_IC + c);
              sum += size;
              largest = size > largest ? size : largest;
            }
          }
          STORE_V(sum, range + at);
          STORE_V(largest, range + EDGE + at);
        }
      }
}

// Fills uneven for the tile rows of one (rd, rh). range: at the first plane and row that they read.
static void mark_uneven(global REAL *restrict uneven, global const REAL *restrict range, const int rd, const int rh,
                        const int tiles) {
  const int taps_d = TAPS_D[rd], taps_h = TAPS_H[rh];
  const real_v least = SPLAT(R(0.5) * sqrt((REAL)(GROUP_IC * taps_d * taps_h)));
  for (int i = 0; i < tiles; i++)
    for (int w = 0; w < IW; w += VEC) {
      real_v marks = SPLAT(R(0.0));
      for (int jd = 0; jd < 2; jd++)
        for (int jh = 0; jh < LINES_H; jh++) {
          real_v sum = SPLAT(R(0.0)), largest = SPLAT(R(0.0));
          // One tap alone along an axis is not transformed, and its tile is the output itself.
          for (int d = taps_d > 1 ? 0 : jd; d <= (taps_d > 1 ? taps_d : jd); d++)
            for (int h = taps_h > 1 ? 0 : jh; h < (taps_h > 1 ? taps_h + LINES_H - 1 : jh + 1); h++) {
              global const REAL *at = range + d * RANGE_PLANE + (i * LINES_H + h) * (2 * EDGE) + w;
              const real_v size = LOAD_V(at + EDGE);
              largest = size > largest ? size : largest;
              if (d >= jd && d < jd + taps_d && h >= jh && h < jh + taps_h) sum += LOAD_V(at);
            }
          marks = sum < least * largest ? SPLAT(R(1.0)) : marks;
        }
      STORE_V(marks, uneven + i * PITCH + w);
    }
}

// Does any tap of any phase along width read a marked lane for the chunk at `line`?
static bool reads_marked(global const REAL *line, const int width) {
  real_v marks = SPLAT(R(0.0));
  for (int rw = 0; rw < STRIDE_W; rw++)
    for (int tw = 0; tw < TAPS_W[rw]; tw++)
      for (int j = 0; j < width; j++) marks += LOAD_V(line + OFFSET_W[rw][tw] + j * VEC);
  return sum_of_lanes(marks) != R(0.0);
}

// Fills direct for one (rd, rh), and tells whether any chunk is marked there.
static bool mark_chunks(global REAL *restrict direct, global REAL *restrict uneven, global const REAL *restrict range,
                        const int rd, const int rh, const int tiles) {
  bool any = false;
  for (int group = 0; group < GROUPS; group++) {
    const bool transformed = TAPS_D[rd] > 1 || TAPS_H[rh] > 1;
    if (transformed) mark_uneven(uneven, range + group * PLANES * RANGE_PLANE, rd, rh, tiles);
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const bool marked = transformed && reads_marked(uneven + CHUNK_X[chunk], chunk < WIDE_CHUNKS ? THREAD_W : 1);
      direct[group * CHUNKS + chunk] = marked;
      any |= marked;
    }
  }
  return any;
}

// Adds the products of one input plane to a chunk of the lines of both rows along depth, without transforms.
//
// Args: as in winograd_tile.cl, but
//   v     the plane's rows: v[b] is input row b of each tile
//   w     weights [KD taps][KH taps][KW taps][IC/groups][THREAD_C]
//   part  number of the plane among those that the two rows along depth read
static void direct_tile(global const REAL *restrict v, const int rd, const int rh, const int rw, global const REAL *restrict w,
                        const int part, const int width, global REAL *restrict line, global const REAL *restrict operands,
                        const int channel, real_v *poison) {
  for (int jd = 0; jd < 2; jd++) {
    const int td = part - jd;
    if ((uint)td >= TAPS_D[rd]) continue;
    for (int j = 0; j < width; j++) {
      global const REAL *wt = w + td * (TAPS_H[rh] * TAPS_W[rw] * GROUP_IC * THREAD_C);
      real_v sums[LINES_H][THREAD_C];
#pragma unroll
      for (int jh = 0; jh < LINES_H; jh++)
#pragma unroll
        for (int c = 0; c < THREAD_C; c++) sums[jh][c] = SPLAT(R(0.0));
      for (int th = 0; th < TAPS_H[rh]; th++)
        for (int tw = 0; tw < TAPS_W[rw]; tw++) {
          global const REAL *vr = v + th * PLANE + OFFSET_W[rw][tw] + j * VEC;
#pragma unroll 1
          for (int i = 0; i < GROUP_IC; i++, vr += CHANNEL, wt += THREAD_C) {
#pragma unroll
            for (int jh = 0; jh < LINES_H; jh++) {
              const real_v value = LOAD_V(vr + jh * PLANE);
#pragma unroll
              for (int c = 0; c < THREAD_C; c++) sums[jh][c] = fma(value, SPLAT(wt[c]), sums[jh][c]);
            }
          }
        }
#pragma unroll
      for (int jh = 0; jh < LINES_H; jh++)
#pragma unroll
        for (int c = 0; c < THREAD_C; c++) {
#if GROUP_OC % THREAD_C
          if (channel % GROUP_OC + c >= GROUP_OC) continue;
#endif
          global REAL *target = line + ((size_t)(jd * LINES_H + jh) * LINE_CHANNELS + c) * (STRIDE_W * LINE) + j * VEC;
          real_v value = sums[jh][c];
          if (td > 0) value += LOAD_V(target);
          if (td == TAPS_D[rd] - 1) {
            *poison = fma(value, SPLAT(R(0.0)), *poison);
            CONV_TAIL(value, channel + c);
          }
          STORE_V(value, target);
        }
    }
  }
}
