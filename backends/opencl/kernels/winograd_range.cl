// Where the Winograd core's rounding would show, and what is computed directly there.
//
// A tile's sums mix all its input rows, so that an output gets rounding errors of the size of the tile's largest element, also of one
// that it does not read. They vanish in the output's own rounding where two things hold in each lane; a chunk with any other lane is
// left to the direct sums below:
//   - No output is small beside the others of its tile: the magnitudes of an output, added up over the group's channels, are at least
//     1/MOST_APART of those of the tile's largest output. What it reads is then not small beside what the others read.
//   - No input channel dominates: in the depth component of the planes that both rows along depth read (in each one at borders, where
//     there may be no such plane) the transformed magnitudes of all channels of the group add up to sqrt(GROUP_IC)/2 times the largest
//     channel's. An element that all outputs of a tile read shows here, and small weights cannot happen to hide most of an output.
// winograd.py sees to it that no tap's weights are small beside the others, and few in a tap.
//
// Layouts in scratch
//   loads   [group][sum, largest, marks][LEAD + CHANNEL ...]: of transformed input, over channels, lanes as in v; 1 where one dominates
//   sums    [rw][group][jd][jh][LINE]: of the magnitudes of results, over channels, lanes as in lines
//   direct  [rw][group][chunk]: 1 where a chunk is computed directly

// How far the outputs of a tile may be apart. The fewer channels are added up, the more do even outputs differ by chance.
#define MOST_APART (R(2.0) + R(10.0) / sqrt((REAL)GROUP_OC))
#if VEC == 1
#define ANY_V(condition) (condition)
#else
#define ANY_V(condition) any(condition)
#endif
#define SUMS_OF(rw, group) (((rw) * GROUPS + (group)) * (2 * LINES_H * LINE))

// Marks the lanes of loads where one channel dominates, all of them afresh or further ones.
static void mark_loads(global REAL *restrict loads, const int tiles, const bool fresh) {
  const real_v most = SPLAT(R(0.5) * sqrt((REAL)GROUP_IC));
  for (int group = 0; group < GROUPS; group++, loads += 3 * LOADS)
    for (int i = 0; i < tiles; i++)
      for (int w = 0; w < IW; w += VEC) {
        global REAL *const at = loads + i * PITCH + w;
        const real_v marks = fresh ? SPLAT(R(0.0)) : LOAD_V(at + 2 * LOADS);
        const real_v sum = LOAD_V(at);
        STORE_V(sum < most * LOAD_V(at + LOADS) || sum == SPLAT(INFINITY) ? SPLAT(R(1.0)) : marks, at + 2 * LOADS);
      }
}

// Is an output of lane `at` of the lines small beside another one of its tile? planes, rows: of the tile that are positions.
static bool small_output(global const REAL *sums, const int rd, const int rh, const int planes, const int rows, const int at) {
  // One tap alone along an axis is not transformed, and shares nothing.
  const int share_d = TAPS_D[rd] > 1 ? 2 : 1, share_h = TAPS_H[rh] > 1 ? LINES_H : 1;
  for (int d = 0; d < planes; d += share_d)
    for (int h = 0; h < rows; h += share_h) {
      REAL least = INFINITY, largest = R(0.0);
      for (int jd = d; jd < d + share_d; jd++)
        for (int jh = h; jh < h + share_h; jh++) {
          const REAL sum = sums[(jd * LINES_H + jh) * LINE + at];
          if (jd < planes && jh < rows) least = min(least, sum);
          largest = max(largest, sum);
        }
      if (MOST_APART * least < largest || largest == INFINITY) return true;
    }
  return false;
}

// Does the chunk hold a lane that has to be computed directly? rows: positions from the box's first one along height.
static bool uneven(global const REAL *loads, global const REAL *sums, const int rd, const int rh, const int rw, const int planes,
                   const int rows, const int chunk) {
  const int width = chunk < WIDE_CHUNKS ? THREAD_W : 1;
  for (int j = 0; j < width; j++) {
    for (int tw = 0; tw < TAPS_W[rw]; tw++)
      if (ANY_V(LOAD_V(loads + 2 * LOADS + CHUNK_X[chunk] + OFFSET_W[rw][tw] + j * VEC) != SPLAT(R(0.0)))) return true;
    // Most vectors have no lane with a small output even if all that they hold is taken for one tile of positions.
    const int first = CHUNK_LINE[chunk] + j * VEC;
    real_v least = LOAD_V(sums + first), largest = least;
    for (int row = 1; row < 2 * LINES_H; row++) {
      const real_v sum = LOAD_V(sums + row * LINE + first);
      least = sum < least ? sum : least;
      largest = sum > largest ? sum : largest;
    }
    if (!ANY_V(SPLAT(MOST_APART) * least < largest || largest == SPLAT(INFINITY))) continue;
    for (int at = first; at < first + VEC; at++)
      if (at % ROW < POSITIONS_W && small_output(sums, rd, rh, planes, min(LINES_H, rows - at / ROW * LINES_H), at)) return true;
  }
  return false;
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

// Writes a plane's rows: v[b][channel][i * PITCH + w] is row b of tile i itself.
static void plain_rows(global REAL *restrict v, global const REAL *restrict x, const int d, const int first_h, const int rh,
                       const int tiles, global const REAL *restrict operands) {
  for (int c = 0; c < IC; c++)
    for (int b = 0; b < TAPS_H[rh] + LINES_H - 1; b++)
      for (int i = 0; i < tiles; i++) {
        const int h = first_h + INPUT_H[START_H[rh] + i * LINES_H + b];
        global REAL *const to = v + b * PLANE + c * CHANNEL + i * PITCH;
        if ((uint)d < ID && (uint)h < IH)
          combine_row(to, x + (((size_t)c * ID + d) * IH + h) * IW, 0, 1, operands, c);
        else
          clear(to, IW);
      }
}

// Finds the uneven chunks among the lines of one (rd, rh), and computes them directly. base: first position of the pair along depth.
// Returns NaN when a result is not finite, else 0. A function of its own, so that compilers treat the usual path as if it were alone.
__attribute__((noinline)) static real_v compute_uneven(global REAL *restrict scratch, global const REAL *restrict x, const int base,
                                                       const int first_h, const int rd, const int rh, const int planes,
                                                       const int tiles, global const REAL *restrict weights,
                                                       global REAL *restrict lines, global const REAL *restrict operands) {
  global REAL *const v = scratch + LEAD, *const direct = scratch + SCRATCH_DIRECT;
  global const REAL *const loads = scratch + SCRATCH_LOADS, *const sums = scratch + SCRATCH_SUMS;
  const int rows = min(BOX_H, POSITIONS_H - first_h);
  real_v poison = SPLAT(R(0.0));
  bool any_direct = false;
  for (int rw = 0; rw < STRIDE_W; rw++)
    for (int group = 0; group < GROUPS; group++)
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const bool mark = CHUNK_LINE[chunk] < tiles * ROW && uneven(loads + group * (3 * LOADS), sums + SUMS_OF(rw, group), rd, rh, rw,
                                                                    planes, rows, chunk);
        direct[(rw * GROUPS + group) * CHUNKS + chunk] = mark;
        any_direct |= mark;
      }
  for (int part = 0; any_direct && part < PARTS_D[rd]; part++) {
    plain_rows(v, x, base + FIRST_D[rd] + part, first_h, rh, tiles, operands);
    for (int rw = 0; rw < STRIDE_W; rw++) {
      global const REAL *w = weights + DIRECT_WEIGHTS[(rd * STRIDE_H + rh) * STRIDE_W + rw];
      for (int group = 0; group < GROUPS; group++)
        for (int c = 0; c < GROUP_OC; c += THREAD_C, w += TAPS_D[rd] * TAPS_H[rh] * TAPS_W[rw] * (GROUP_IC * THREAD_C))
          for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (direct[(rw * GROUPS + group) * CHUNKS + chunk] == R(0.0)) continue;
            const int channel = group * GROUP_OC + c, width = chunk < WIDE_CHUNKS ? THREAD_W : 1;
            direct_tile(v + group * (GROUP_IC * CHANNEL) + CHUNK_X[chunk], rd, rh, rw, w, part, width,
                        lines + (channel * STRIDE_W + rw) * LINE + CHUNK_LINE[chunk], operands, channel, &poison);
          }
    }
  }
  return poison;
}
