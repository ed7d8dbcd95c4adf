// Where the Winograd core's rounding would show, and what is computed directly there.
//
// A tile's sums mix all its inputs, so that an output gets rounding errors of the size of the tile's largest element, also of one
// that it does not read. They vanish in the output's own rounding where two things hold for each tile; any other tile is left to the
// direct sums below:
//   - No output is small beside the others of its tile: the magnitudes of an output, added up over the group's channels, are at least
//     1/MOST_APART of those of the tile's largest output. What it reads is then not small beside what the others read.
//   - No channel dominates what an output reads: in the depth component of the planes that all outputs along depth read (in each one at
//     borders, where there may be no such plane) the magnitudes of all elements of its window along height and width add up to at least
//     sqrt(GROUP_IC)/2 times, and twice, the sum, over the window's columns, of the largest channel's; where the window is a single row,
//     to half as much again of the former. An element that an output reads shows here, and small weights cannot happen to hide most of what it reads.
//     Nor does one column of its window hold nearly all that it reads there: few products round less than their neighbours.
// At edges, where outputs read one tap of several along two axes, that is so by the geometry, and these tiles are always left to them.
// winograd.py sees to it that no tap's weights are small beside the others, and few in a tap.
//
// Layouts in scratch
//   sums   [group][jd][jh][column and phase along width][LINE]: of the magnitudes of results, lanes as in lines
//   marks  [VECTORS * VEC]: 1 for each lane whose tile is computed directly

// Off the usual path, what matters of a loop is its size: compilers take long to unroll and to vectorize what is rarely run.
#if defined(__clang__)
#define COLD_LOOP _Pragma("clang loop vectorize(disable) unroll(disable)")
#else
#define COLD_LOOP
#endif

// How far the outputs of a tile may be apart. The fewer channels are added up, the more do even outputs differ by chance; transforms of
// more than three taps leave less room.
#define MOST_APART ((MOST_TAPS > 3 ? R(0.75) : R(1.0)) * (R(2.0) + R(10.0) / sqrt((REAL)GROUP_OC)))

// Of what an output reads, in windows of so many columns, the most that one of them may hold.
#define MOST_IN_A_COLUMN(columns) ((columns) < 3 ? R(0.9) : R(0.7))

// Marks the tiles of the vector at `lane` that a channel or a column dominates. Called for each channel c; known when c is its group's
// last.
//
// x: the vector's input of that channel, of which a tile reads rows at[0 .. taps + M_H - 1); sum, largest: over channels so far, of the
// rows of each output along height, for each input along width, and of the same as the last one of a window.
__attribute__((always_inline)) static void measure(global const REAL *x, const int *at, real_v (*sum)[ENDS_W][REACH_W],
                                                   real_v (*largest)[ENDS_W][REACH_W], const int taps, const int c, const int lane,
                                                   const int tiles, global int *marks) {
  // Phases of a strided convolution's input may have no last tap.
  const bool last_row = c / DEALT_W % DEALT_H < FULL_H, last_column = c % DEALT_W < FULL_W;
#pragma unroll
  for (int k = 0; k < REACH_W; k++)
#pragma unroll
    for (int jh = 0; jh < M_H; jh++) {
      real_v load = fabs(LOAD_V(x + at[jh] + COLUMN_AT(k)));
#pragma unroll
      for (int b = 1; b < taps; b++)
        if (b < taps - 1 || last_row) load += fabs(LOAD_V(x + at[jh + b] + COLUMN_AT(k)));
#pragma unroll
      for (int end = 0; end < ENDS_W; end++) {
        if (end && !last_column) continue;
        const real_v before = c % GROUP_IC == 0 ? SPLAT(R(0.0)) : largest[jh][end][k];
        largest[jh][end][k] = load > before ? load : before;
        sum[jh][end][k] = c % GROUP_IC == 0 ? load : sum[jh][end][k] + load;
      }
    }
  if (c % GROUP_IC < GROUP_IC - 1) return;
COLD_LOOP
  for (int q = 0; q < M_H * M_W * PHASES_W; q++) {
    const int jh = q / (M_W * PHASES_W), rw = q % PHASES_W, first = INPUT_W[rw][0] + q / PHASES_W % M_W;
    real_v all = SPLAT(R(0.0)), most = all, column = all;
COLD_LOOP
    for (int k = first; k < first + TAPS_W[rw]; k++) {
      const int end = k == first + TAPS_W[rw] - 1 ? ENDS_W - 1 : 0;
      all += sum[jh][end][k];
      most += largest[jh][end][k];
      column = sum[jh][end][k] > column ? sum[jh][end][k] : column;
    }
    most *= SPLAT(taps > 1 ? max(R(2.0), R(0.5) * sqrt((REAL)GROUP_IC)) : R(0.75) * sqrt((REAL)GROUP_IC));
    column *= SPLAT(TAPS_W[rw] > 1 ? R(1.0) / MOST_IN_A_COLUMN(TAPS_W[rw]) : R(0.0));
    if (!ANY_V(all < most || all < column || all == SPLAT(INFINITY))) continue;
    REAL sums[VEC], least[VEC], columns[VEC];
    STORE_V(all, sums);
    STORE_V(most, least);
    STORE_V(column, columns);
COLD_LOOP
    for (int i = 0; i < VEC; i++) {
      // At edges most columns may lie outside the tensor: see mark_edges.
      const int w = LOW_W + (lane + i) % ROW * M_W + first, inside = min(w + TAPS_W[rw], IW) - max(w, 0);
      const bool alone = sums[i] < columns[i] && inside >= min(TAPS_W[rw], 3);
      if ((sums[i] < least[i] || sums[i] == INFINITY || alone) && IS_TILE(lane + i, tiles)) marks[lane + i] = 1;
    }
  }
}

// Is an output of a tile, lane `at` of the lines, small beside another one of it? planes, rows, columns: of the tile that are positions.
static bool small_output(global const REAL *sums, const int rd, const int rh, const int rw, const int planes, const int rows,
                         const int columns, const int at) {
  // Outputs that are not transformed together share nothing.
  const int share_d = SHARE_D[rd], share_h = SHARE_H[rh], share_w = SHARE_W[rw];
COLD_LOOP
  for (int d = 0; d < planes; d += share_d)
COLD_LOOP
    for (int h = 0; h < rows; h += share_h)
COLD_LOOP
      for (int w = 0; w < columns; w += share_w) {
        REAL least = INFINITY, largest = R(0.0);
COLD_LOOP
        for (int jd = d; jd < d + share_d; jd++)
COLD_LOOP
          for (int jh = h; jh < h + share_h; jh++)
COLD_LOOP
            for (int jw = w; jw < w + share_w; jw++) {
              const REAL sum = sums[((jd * M_H + jh) * STRIDE_W + jw * PHASES_W + rw) * LINE + at];
              if (jd < planes && jh < rows && jw < columns) least = min(least, sum);
              largest = max(largest, sum);
            }
        if (MOST_APART * least < largest || largest == INFINITY) return true;
      }
  return false;
}

// Marks the tiles with a small output among the first `tiles` tile rows. rows: positions from the box's first one along height.
__attribute__((noinline)) static void mark_small_outputs(global REAL *sums, const int rd, const int rh, const int planes, const int rows, const int tiles,
                               global int *marks) {
  // What lies beyond the width is no small output: lest a vector of each tile row be looked at lane by lane.
COLD_LOOP
  for (int at = POSITIONS_W - 1; WIDTH % M_W > 0 && at < tiles * ROW; at += ROW)
COLD_LOOP
    for (int row = 0; row < M_D * M_H; row++)
COLD_LOOP
      for (int q = WIDTH % M_W * PHASES_W; q < STRIDE_W; q++) {
        global REAL *const sum = sums + (row * STRIDE_W + q) * LINE + at;
        *sum = max(*sum, *(sum - PHASES_W * LINE));
      }
COLD_LOOP
  for (int first = 0; first < min(VECTORS * VEC, tiles * ROW); first += VEC)
COLD_LOOP
    for (int rw = 0; rw < PHASES_W; rw++) {
      if (SHARE_D[rd] == 1 && SHARE_H[rh] == 1 && SHARE_W[rw] == 1) continue;
      // Most vectors have no small output even if all that they hold is taken for one tile of positions.
      real_v least = LOAD_V(sums + rw * LINE + first), largest = least;
COLD_LOOP
      for (int row = 0; row < M_D * M_H * M_W; row++) {
        const real_v sum = LOAD_V(sums + (row * PHASES_W + rw) * LINE + first);
        least = sum < least ? sum : least;
        largest = sum > largest ? sum : largest;
      }
      if (!ANY_V(SPLAT(MOST_APART) * least < largest || largest == SPLAT(INFINITY))) continue;
COLD_LOOP
      for (int at = first; at < first + VEC; at++)
        if (IS_TILE(at, tiles) && small_output(sums, rd, rh, rw, planes, min(M_H, rows - at / ROW * M_H),
                                               min(M_W, WIDTH - at % ROW * M_W), at))
          marks[at] = 1;
    }
}

// How many times as many inputs the output with most reads along an axis as the one with fewest, of `outputs` that share a transform
// from position `first` on; the others lie outside the tensor.
static int spread(const int first, const int outputs, const int share, const int offset, const int taps, const int extent) {
  int least = taps, most = 1;
COLD_LOOP
  for (int j = 0; j < (share > 1 ? outputs : 0); j++) {
    const int inside = min(first + j + offset + taps, extent) - max(first + j + offset, 0);
    least = min(least, inside);
    most = max(most, inside);
  }
  return least < 1 ? taps : most / least;
}

// Marks tiles at edges and corners, where an output reads less than a quarter of what another one of its tile does.
__attribute__((noinline)) static void mark_edges(const int base, const int planes, const int first_h, const int rd, const int rh,
                                                 const int tiles, global int *marks) {
  const int along_d = spread(base, planes, SHARE_D[rd], INPUT_D[rd][0], TAPS_D[rd], ID);
COLD_LOOP
  for (int i = 0; i < tiles; i++) {
    const int h = first_h + i * M_H;
    const int along_dh = along_d * spread(h, min(M_H, POSITIONS_H - h), SHARE_H[rh], LOW_H + INPUT_H[rh][0], TAPS_H[rh], IH);
COLD_LOOP
    for (int t = 0; t < POSITIONS_W; t++)
COLD_LOOP
      for (int rw = 0; rw < PHASES_W; rw++)
        if (along_dh * spread(t * M_W, min(M_W, WIDTH - t * M_W), SHARE_W[rw], LOW_W + INPUT_W[rw][0], TAPS_W[rw], IW) > 4)
          marks[i * ROW + t] = 1;
  }
}

// Channels of one register tile side by side, EDGE_LANES in a vector.
#if EDGE_LANES == 1
typedef REAL channels_v;
#define LOAD_C(pointer) (*(pointer))
#define STORE_C(value, pointer) (*(pointer) = (value))
#else
typedef PASTE(REAL, EDGE_LANES) channels_v;
#define LOAD_C(pointer) PASTE(vload, EDGE_LANES)(0, (pointer))
#define STORE_C(value, pointer) PASTE(vstore, EDGE_LANES)((value), 0, (pointer))
#endif
#define CHANNELS_V (THREAD_C / EDGE_LANES)

// Adds the products of one input plane, number `part` of those that a tile reads, to the lines of the tile at `lane`, without transforms.
// Lanes are output channels here. patch: room for what the tile reads, [row][input along width][IC].
__attribute__((noinline)) static void direct_tile(global const REAL *restrict x, global REAL *restrict patch, const int lane, const int d,
                                                  const int first_h, const int rd, const int rh, const int part,
                                                  global const REAL *restrict weights, global REAL *restrict lines,
                                                  global const REAL *restrict operands, real_v *poison) {
COLD_LOOP
  for (int b = 0; b < TAPS_H[rh] + M_H - 1; b++)
COLD_LOOP
    for (int k = 0; k < REACH_W; k++) {
      const int h = first_h + LOW_H + lane / ROW * M_H + INPUT_H[rh][b], w = LOW_W + lane % ROW * M_W + k;
COLD_LOOP
      for (int c = 0; c < IC; c++) {
        const int at_d = SOURCE_AT(D, d, c / (DEALT_H * DEALT_W) % DEALT_D), at_h = SOURCE_AT(H, h, c / DEALT_W % DEALT_H),
                  at_w = SOURCE_AT(W, w, c % DEALT_W), channel = c / (DEALT_D * DEALT_H * DEALT_W);
        real_v value = SPLAT(R(0.0));
        if ((uint)at_d < SOURCE_D && (uint)at_h < SOURCE_H && (uint)at_w < SOURCE_W) {
          value = SPLAT(x[(((size_t)channel * SOURCE_D + at_d) * SOURCE_H + at_h) * SOURCE_W + at_w]);
          PROLOGUE(value, channel);
        }
        patch[(b * REACH_W + k) * IC + c] = LANE0(value);
      }
    }
COLD_LOOP
  for (int jd = 0; jd < M_D; jd++) {
    const int td = part - jd;
    if ((uint)td >= TAPS_D[rd]) continue;
COLD_LOOP
    for (int rw = 0; rw < PHASES_W; rw++) {
      const int plane_weights = TAPS_H[rh] * TAPS_W[rw] * (GROUP_IC * THREAD_C);
      global const REAL *w = weights + DIRECT_WEIGHTS[(rd * STRIDE_H + rh) * PHASES_W + rw] + td * plane_weights;
COLD_LOOP
      for (int group = 0; group < GROUPS; group++)
COLD_LOOP
        for (int c = 0; c < GROUP_OC; c += THREAD_C, w += TAPS_D[rd] * plane_weights) {
          channels_v acc[M_H][M_W][CHANNELS_V];
#pragma unroll
          for (int jh = 0; jh < M_H; jh++)
#pragma unroll
            for (int jw = 0; jw < M_W; jw++)
#pragma unroll
              for (int n = 0; n < CHANNELS_V; n++) acc[jh][jw][n] = (channels_v)(R(0.0));
          global const REAL *wt = w;
COLD_LOOP
          for (int th = 0; th < TAPS_H[rh]; th++)
COLD_LOOP
            for (int tw = 0; tw < TAPS_W[rw]; tw++) {
              global const REAL *from = patch + (th * REACH_W + INPUT_W[rw][tw]) * IC + group * GROUP_IC;
COLD_LOOP
              for (int i = 0; i < GROUP_IC; i++, from++, wt += THREAD_C)
#pragma unroll
                for (int n = 0; n < CHANNELS_V; n++) {
                  const channels_v factor = LOAD_C(wt + n * EDGE_LANES);
#pragma unroll
                  for (int jh = 0; jh < M_H; jh++)
#pragma unroll
                    for (int jw = 0; jw < M_W; jw++)
                      acc[jh][jw][n] = fma((channels_v)(from[(jh * REACH_W + jw) * IC]), factor, acc[jh][jw][n]);
                }
            }
          REAL results[M_H * M_W * THREAD_C];
#pragma unroll
          for (int jh = 0; jh < M_H; jh++)
#pragma unroll
            for (int jw = 0; jw < M_W; jw++)
#pragma unroll
              for (int n = 0; n < CHANNELS_V; n++) STORE_C(acc[jh][jw][n], results + (jh * M_W + jw) * THREAD_C + n * EDGE_LANES);
COLD_LOOP
          for (int i = 0; i < M_H * M_W * THREAD_C; i++) {
            const int n = i % THREAD_C, q = i / THREAD_C % M_W * PHASES_W + rw, channel = group * GROUP_OC + c + n;
            if (c + n >= GROUP_OC) continue;
            global REAL *const to =
                lines + (((size_t)(jd * M_H + i / (M_W * THREAD_C)) * LINE_CHANNELS + channel) * STRIDE_W + q) * LINE + lane;
            real_v value = SPLAT(td > 0 ? *to + results[i] : results[i]);
            if (td == TAPS_D[rd] - 1) {
              *poison = fma(value, SPLAT(R(0.0)), *poison);
              CONV_TAIL(value, channel);
            }
            *to = LANE0(value);
          }
        }
    }
  }
}

// Finds the uneven tiles among the lines of one (rd, rh), besides those marked, and computes them directly. base: first position of the
// tiles along depth. Returns NaN when a result is not finite, else 0. A function of its own, so that compilers treat the usual path as
// if it were alone.
__attribute__((noinline)) static real_v compute_uneven(global REAL *restrict scratch, global const REAL *restrict x, const int base,
                                                       const int first_h, const int rd, const int rh, const int planes,
                                                       const int tiles, global const REAL *restrict weights,
                                                       global REAL *restrict lines, global const REAL *restrict operands) {
  real_v poison = SPLAT(R(0.0));
  global int *const marks = (global int *)(scratch + SCRATCH_MARKS);
COLD_LOOP
  for (int group = 0; group < GROUPS; group++)
    mark_small_outputs(scratch + SCRATCH_SUMS + group * (M_D * M_H * STRIDE_W * LINE), rd, rh, planes, POSITIONS_H - first_h, tiles, marks);
  mark_edges(base, planes, first_h, rd, rh, tiles, marks);
COLD_LOOP
  for (int lane = 0; lane < VECTORS * VEC; lane++)
COLD_LOOP
    for (int part = 0; marks[lane] && part < PARTS_D[rd]; part++)
      direct_tile(x, scratch + SCRATCH_PANELS, lane, base + INPUT_D[rd][part], first_h, rd, rh, part, weights, lines, operands, &poison);
  return poison;
}
