// Transposed 3-D convolution as a tiled implicit GEMM, phase by phase, with the steps behind it fused: the kernel for GPUs.
//
// Equation, per axis (stride S, padding P, dilation L): output o = S*m + r of phase r takes tap k when S divides r + P - k*L,
// and reads input m + (r + P - k*L)/S. Each phase is a dense little convolution: no zero insertion, no atomics, no scatter.
//
// Layouts
//   x         [N][IC][ID][IH][IW]
//   weights   [group][channel tile][TAP_ROWS taps, phase after phase][PADDED_IC][BLOCK_N], zeros in the padding
//   operands  bias, scalars and per-channel tensors of the fused steps, one after another (offsets are defines)
//   phases    per phase (rd, rh, rw): its first tap and its number of taps
//   taps      per tap, phase after phase: offset from m to the input position, along depth, height and width
//   y         [N][OUT_C][OUT_D][OUT_H][OUT_W] of the last fused step
//
// GEMM view, per phase and group of channels: GEMM_M = N*MD*MH*MW positions m, GEMM_N = OC/GROUPS, GEMM_K = taps * IC/GROUPS:
//   A[k][m] = x[n][channel(k)][m + offset(tap(k))], 0 outside the tensor;  B[k][n] = weights[tap(k)][channel(k)][n]
// A step of K is BLOCK_T taps x BLOCK_C channels = BLOCK_K rows. BLOCK_T > 1 only where BLOCK_C holds all channels of a group.
//
// Who owns what
//   A work-group owns BLOCK_M consecutive positions, which run on over rows, planes and images, so that no extent has to divide by
//   anything, and BLOCK_N channels of one group, or with USE_ALL_CHANNELS every channel, tile after tile. It computes
//   PHASES_PER_GROUP phases one after another: PLANES neighbouring phases along width, whose results then alternate in memory and
//   are stored as whole lines; or all phases where pooling folds them, since then a window is exactly the phases of one position.
//   Staging: consecutive work-items load consecutive positions, which lie side by side along width.
//   Products: work-item (tm, tn) owns THREAD_M consecutive positions x THREAD_N consecutive channels in registers.
//   Epilogue: results pass through local memory as [channel][column], column = position * PLANES + plane. There a work-item owns
//   every LANES-th column and of it every SLICES-th channel. Channel-wise steps combine the slices of a column.
//
// Local memory: A [BLOCK_K][BLOCK_M], B [BLOCK_K][BLOCK_N], results [RESULT_ROWS][COLUMNS] (over A and B where both are never needed
// at once: RESULTS_AT 0), partial sums. Registers: THREAD_M*THREAD_N sums, and the next step's share of A and B, which is loaded
// while the current one is multiplied. Barriers: two a step of K, three a phase, two a sum over slices.
// FLOPs 2*GEMM_M*GEMM_N*GEMM_K a phase; ideal bytes x + weights + y. Intensity of a work-group: BLOCK_M*BLOCK_N/(BLOCK_M + BLOCK_N)
// multiply-adds a loaded value.
//
// The host guarantees: weights are finite (zeros stand for what lies outside the tensor); every block extent is a power of two; the
// constraints of tiled.py's Tile; the global size is whole work-groups.

#define STAGE_LANES (WORK_ITEMS < BLOCK_M ? WORK_ITEMS : BLOCK_M)  // work-items side by side along m while staging
#define STAGE_SLICES (WORK_ITEMS / STAGE_LANES)
#define STAGE_ROWS (BLOCK_K / STAGE_SLICES)     // rows of A that a work-item stages
#define STAGE_COLUMNS (BLOCK_M / STAGE_LANES)   // columns of A that a work-item stages
#define STAGE_WEIGHTS ((BLOCK_K * BLOCK_N + WORK_ITEMS - 1) / WORK_ITEMS)
#define THREADS_M (BLOCK_M / THREAD_M)
#define THREADS_N (BLOCK_N / THREAD_N)
#define INPUT_PLANE ((long)ID * IH * IW)

typedef REAL real_1;
typedef PASTE(REAL, 2) real_2;
typedef PASTE(REAL, 4) real_4;
typedef PASTE(REAL, 8) real_8;
typedef PASTE(real_, THREAD_M) real_m;
typedef PASTE(real_, THREAD_N) real_n;
typedef union {
  real_m v;
  REAL s[THREAD_M];
} lanes_m;
typedef union {
  real_n v;
  REAL s[THREAD_N];
} lanes_n;

// Position m of the GEMM: where it lies, and where its image starts in x.
typedef struct {
  int inside, d, h, w;
  size_t n;
} position_t;

static position_t position_at(INDEX m) {
  position_t p;
  p.inside = m < POSITIONS;
  if (!p.inside) m = 0;
  p.w = m % POSITIONS_W;
  m /= POSITIONS_W;
  p.h = m % POSITIONS_H;
  m /= POSITIONS_H;
  p.d = m % POSITIONS_D;
  p.n = m / POSITIONS_D;
  return p;
}

// Loads this work-item's share of one step of K into registers: taps tap .. tap + BLOCK_T - 1 of the phase, channels c0 .. of the
// group. What lies outside the tensor, the phase's taps or the group's channels is not read, and counts as zero.
static void fetch(REAL *restrict a, REAL *restrict b, global const REAL *restrict x, global const REAL *restrict weights,
                  global const REAL *restrict operands, global const int4 *restrict taps, const int taps_left, const int c0,
                  const int group, const position_t *columns) {
  const int item = get_local_id(0), slice = item / STAGE_LANES;
#pragma unroll
  for (int i = 0; i < STAGE_ROWS; i++) {
    const int k = slice + i * STAGE_SLICES;
    const int slot = BLOCK_T == 1 ? 0 : k / BLOCK_C, c = c0 + (BLOCK_T == 1 ? k : k % BLOCK_C);
    const int4 tap = taps[slot < taps_left ? slot : 0];
#pragma unroll
    for (int j = 0; j < STAGE_COLUMNS; j++) {
      const int d = columns[j].d + tap.x, h = columns[j].h + tap.y, w = columns[j].w + tap.z;
      REAL value = R(0.0);
      if (columns[j].inside && slot < taps_left && c < GROUP_IC && (uint)d < ID && (uint)h < IH && (uint)w < IW) {
        const int channel = group * GROUP_IC + c;
        value = x[((long)columns[j].n * IC + channel) * INPUT_PLANE + ((long)d * IH + h) * IW + w];
        PROLOGUE(value, channel);
      }
      a[i * STAGE_COLUMNS + j] = value;
    }
  }
#pragma unroll
  for (int i = 0; i < STAGE_WEIGHTS; i++) {
    const int e = item + i * WORK_ITEMS;
    if (BLOCK_K * BLOCK_N % WORK_ITEMS == 0 || e < BLOCK_K * BLOCK_N) b[i] = weights[e];
  }
}

// Writes what fetch loaded to local memory: A [BLOCK_K][BLOCK_M], B [BLOCK_K][BLOCK_N].
static void put(local REAL *restrict A, local REAL *restrict B, const REAL *restrict a, const REAL *restrict b) {
  const int item = get_local_id(0), lane = item % STAGE_LANES, slice = item / STAGE_LANES;
#pragma unroll
  for (int i = 0; i < STAGE_ROWS; i++)
#pragma unroll
    for (int j = 0; j < STAGE_COLUMNS; j++)
      A[(slice + i * STAGE_SLICES) * BLOCK_M + lane + j * STAGE_LANES] = a[i * STAGE_COLUMNS + j];
#pragma unroll
  for (int i = 0; i < STAGE_WEIGHTS; i++) {
    const int e = item + i * WORK_ITEMS;
    if (BLOCK_K * BLOCK_N % WORK_ITEMS == 0 || e < BLOCK_K * BLOCK_N) B[e] = b[i];
  }
}

// acc[j].s[i] = sum over K of A[k][THREAD_M*tm + i] * B[k][THREAD_N*tn + j], for one phase, group and channel tile.
// phase: first tap and number of taps; weights: those of the channel tile.
static void multiply(lanes_m *restrict acc, local REAL *restrict A, local REAL *restrict B, global const REAL *restrict x,
                     global const REAL *restrict weights, global const REAL *restrict operands, global const int4 *restrict taps,
                     const int2 phase, const int group, const position_t *columns) {
  const int tm = get_local_id(0) % THREADS_M, tn = get_local_id(0) / THREADS_M;
  local const real_m *Am = (local const real_m *)A + tm;
  local const real_n *Bn = (local const real_n *)B + tn;
  REAL a[STAGE_ROWS * STAGE_COLUMNS], b[STAGE_WEIGHTS];
#pragma unroll
  for (int j = 0; j < THREAD_N; j++) acc[j].v = (real_m)(R(0.0));
  taps += phase.x;
  weights += (size_t)phase.x * (PADDED_IC * BLOCK_N);
  if (phase.y > 0) fetch(a, b, x, weights, operands, taps, phase.y, 0, group, columns);
  for (int tap = 0; tap < phase.y; tap += BLOCK_T)
    for (int c0 = 0; c0 < PADDED_IC; c0 += BLOCK_C) {
      barrier(CLK_LOCAL_MEM_FENCE);  // nobody reads the step before, or the results that lie over it
      put(A, B, a, b);
      barrier(CLK_LOCAL_MEM_FENCE);  // the whole step is there
      const int last = c0 + BLOCK_C == PADDED_IC, next = last ? tap + BLOCK_T : tap, next_c0 = last ? 0 : c0 + BLOCK_C;
      if (next < phase.y)
        fetch(a, b, x, weights + ((size_t)next * PADDED_IC + next_c0) * BLOCK_N, operands, taps + next, phase.y - next, next_c0, group,
              columns);
#pragma unroll
      for (int k = 0; k < BLOCK_K; k++) {
        const real_m am = Am[k * THREADS_M];
        lanes_n bn;
        bn.v = Bn[k * THREADS_N];
#pragma unroll
        for (int j = 0; j < THREAD_N; j++) acc[j].v = fma(am, (real_m)(bn.s[j]), acc[j].v);
      }
    }
}

// Writes the sums of one channel tile, with the steps that ride on them, to results [row][COLUMNS]. channel: the tile's first one.
static void keep(local REAL *restrict results, const lanes_m *acc, const int channel, const int channels, const int plane,
                 global const REAL *restrict operands) {
  const int tm = get_local_id(0) % THREADS_M, tn = get_local_id(0) / THREADS_M;
#pragma unroll
  for (int j = 0; j < THREAD_N; j++) {
    const int n = tn * THREAD_N + j;
    if (n < channels)
#pragma unroll
      for (int i = 0; i < THREAD_M; i++) {
        REAL value = acc[j].s[i];
        CONV_TAIL(value, channel + n);
        results[n * COLUMNS + (tm * THREAD_M + i) * PLANES + plane] = value;
      }
  }
}

__attribute__((reqd_work_group_size(WORK_ITEMS, 1, 1)))
kernel void conv_transpose3d_tiled(global const REAL *restrict x, global const REAL *restrict weights,
                                   global const REAL *restrict operands, global const int2 *restrict phases,
                                   global const int4 *restrict taps, global REAL *restrict y) {
  local REAL memory[LOCAL_ELEMENTS] __attribute__((aligned(64)));
  local REAL partial[PARTIAL_ELEMENTS];
  local REAL *const A = memory, *const B = memory + BLOCK_K * BLOCK_M, *const results = memory + RESULTS_AT;
  const int item = get_local_id(0), lane = item % LANES, slice = item / LANES;

  size_t id = get_group_id(0);
  const int only_tile = id % CHANNEL_BLOCKS;
  id /= CHANNEL_BLOCKS;
  const int first_phase = (int)(id % PHASE_BLOCKS) * PHASES_PER_GROUP;
  const INDEX m0 = (INDEX)(id / PHASE_BLOCKS) * BLOCK_M;
  const int first_tile = USE_ALL_CHANNELS ? 0 : only_tile, end_tile = USE_ALL_CHANNELS ? GROUPS * TILES : only_tile + 1;
  // The channels that results holds: row 0 is channel first_channel.
  const int tile_channel = first_tile % TILES * BLOCK_N;
  const int first_channel = first_tile / TILES * GROUP_OC + tile_channel;
  const int channels = USE_ALL_CHANNELS ? GROUPS * GROUP_OC : min(BLOCK_N, GROUP_OC - tile_channel);

  position_t columns[STAGE_COLUMNS];
#pragma unroll
  for (int j = 0; j < STAGE_COLUMNS; j++) columns[j] = position_at(m0 + item % STAGE_LANES + j * STAGE_LANES);

#if USE_FOLD
  REAL pooled[FOLD_ROWS * (COLUMNS / LANES)];
#endif
  for (int f = 0; f < PHASES_PER_GROUP; f++) {
    for (int tile = first_tile; tile < end_tile; tile++) {
      const int group = tile / TILES, c = tile % TILES * BLOCK_N, channel = group * GROUP_OC + c;
      lanes_m acc[THREAD_N];
      multiply(acc, A, B, x, weights + (size_t)tile * ((size_t)TAP_ROWS * PADDED_IC * BLOCK_N), operands, taps, phases[first_phase + f],
               group, columns);
      barrier(CLK_LOCAL_MEM_FENCE);  // nobody reads A and B, which results may lie over, or the results of the phase before
      keep(results + (channel - first_channel) * COLUMNS, acc, channel, min(BLOCK_N, GROUP_OC - c), f % PLANES, operands);
    }
    barrier(CLK_LOCAL_MEM_FENCE);  // the phase's results are there
#if USE_FOLD
    STAGES_BEFORE_FOLD;
    // Everybody folds the elements that only they have touched since the last barrier.
#pragma unroll
    for (int i = 0; i < FOLD_ROWS * (COLUMNS / LANES); i++) {
      const int row = slice + i / (COLUMNS / LANES) * SLICES;
      if (row < FOLD_CHANNELS) {
        const REAL value = results[row * COLUMNS + lane + i % (COLUMNS / LANES) * LANES];
        pooled[i] = f == 0 ? value : FOLD_COMBINE(pooled[i], value);
      }
    }
#endif
  }
#if USE_FOLD
  for (int i = 0; i < FOLD_ROWS * (COLUMNS / LANES); i++) {
    const int row = slice + i / (COLUMNS / LANES) * SLICES;
    if (row < FOLD_CHANNELS) {
      REAL value = pooled[i] * FOLD_SHARE;
      FOLD_TAIL(value, first_channel + row);
      results[row * COLUMNS + lane + i % (COLUMNS / LANES) * LANES] = value;
    }
  }
  STAGES_AFTER_FOLD;
#else
  STAGES_BEFORE_FOLD;
#endif

  // Consecutive work-items store consecutive columns. Everybody stores the elements that only they have touched.
  for (int column = lane; column < COLUMNS; column += LANES) {
    const position_t p = position_at(m0 + column / PLANES);
    int d = p.d, h = p.h, w = p.w;
#if !USE_FOLD
    const int phase = first_phase + column % PLANES;
    d = d * STRIDE_D + phase / (STRIDE_W * STRIDE_H);
    h = h * STRIDE_H + phase / STRIDE_W % STRIDE_H;
    w = w * STRIDE_W + phase % STRIDE_W;
#endif
    if (!p.inside || d >= OUT_D || h >= OUT_H || w >= OUT_W) continue;
    global REAL *out = y + ((p.n * OUT_C + OUT_CHANNEL) * OUT_D + d) * ((size_t)OUT_H * OUT_W) + (size_t)h * OUT_W + w;
    for (int row = slice; row < OUT_ROWS; row += SLICES) out[(size_t)row * ((size_t)OUT_D * OUT_H * OUT_W)] = results[row * COLUMNS + column];
  }
}
