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
//   Products: work-item (tm, tn) owns THREAD_M consecutive positions x THREAD_N consecutive channels, in registers. It also folds
//   what lies there of each phase, after the steps that combine channels.
//   Epilogue: results pass through local memory as [channel][column], column = position * PLANES + plane. There a work-item owns
//   every LANES-th column and of it every SLICES-th channel. Channel-wise steps combine the slices of a column.
//
// Local memory: where the positions lie, [BLOCK_M]; twice A [BLOCK_K][BLOCK_M] and B [BLOCK_K][BLOCK_N], one being filled while the
// other is multiplied; results [channel][COLUMNS], over both where they are not needed any more by then (RESULTS_AT 0); partial sums
// over slices. Registers: THREAD_M*THREAD_N sums, as many again with USE_FOLD, and the next step's share of A and B, which is on its
// way while the current step is multiplied. Barriers: one a step of K, two before the steps of a phase and one behind them (two with
// USE_FOLD), two a sum over slices.
// FLOPs 2*GEMM_M*GEMM_N*GEMM_K a phase; ideal bytes x + weights + y. Intensity of a work-group: BLOCK_M*BLOCK_N/(BLOCK_M + BLOCK_N)
// multiply-adds a loaded value.
//
// The host guarantees: weights are finite (zeros stand for what lies outside the tensor); every block extent is a power of two; the
// constraints of tiled.py's Tile; the global size is whole work-groups; batch and extents are below 2^31.
//
// There are no private arrays, and no vectors in memory but those of whole elements: CPU runtimes that run several work-items in the
// lanes of a vector have been seen to mix them up. Functions take no restrict pointers: one simulator cannot inline them.

#define STAGE_LANES (WORK_ITEMS < BLOCK_M ? WORK_ITEMS : BLOCK_M)  // work-items side by side along m while staging
#define STAGE_SLICES (WORK_ITEMS / STAGE_LANES)
#define STAGE_COLUMNS (BLOCK_M / STAGE_LANES)  // columns of A that a work-item stages; of each every STAGE_SLICES-th row
#define STAGE_SIZE (BLOCK_K * (BLOCK_M + BLOCK_N))
#define THREADS_M (BLOCK_M / THREAD_M)
#define THREADS_N (BLOCK_N / THREAD_N)
#define INPUT_PLANE ((long)ID * IH * IW)

typedef REAL real_1;
typedef PASTE(REAL, 2) real_2;
typedef PASTE(REAL, 4) real_4;
typedef PASTE(REAL, 8) real_8;
typedef PASTE(real_, THREAD_M) real_m;
typedef PASTE(real_, THREAD_N) real_n;

// EACH_M(STATEMENT) is STATEMENT(0) ... STATEMENT(THREAD_M - 1), for components of vectors and for variables in registers; likewise
// EACH_N for channels, EACH_A and EACH_B for what a work-item stages of A and B.
#define EACH_1(S) S(0)
#define EACH_2(S) S(0) S(1)
#define EACH_4(S) S(0) S(1) S(2) S(3)
#define EACH_8(S) S(0) S(1) S(2) S(3) S(4) S(5) S(6) S(7)
#define EACH_16(S) S(0) S(1) S(2) S(3) S(4) S(5) S(6) S(7) S(8) S(9) S(10) S(11) S(12) S(13) S(14) S(15)
#define EACH_M PASTE(EACH_, THREAD_M)
#define EACH_N PASTE(EACH_, THREAD_N)
#define EACH_A PASTE(EACH_, STAGE_A_ELEMENTS)
#define EACH_B PASTE(EACH_, STAGE_B_ELEMENTS)
#if THREAD_M == 1
#define COMPONENT_M(v, i) (v)
#else
#define COMPONENT_M(v, i) ((v).s##i)
#endif
#if THREAD_N == 1
#define COMPONENT_N(v, j) (v)
#else
#define COMPONENT_N(v, j) ((v).s##j)
#endif

// Where position m of the GEMM lies: (d, h, w, image); image -1 behind the last position.
static int4 place_of(INDEX m) {
  if (m >= POSITIONS) return (int4)(0, 0, 0, -1);
  const int w = m % POSITIONS_W;
  m /= POSITIONS_W;
  const int h = m % POSITIONS_H;
  m /= POSITIONS_H;
  return (int4)(m % POSITIONS_D, h, w, m / POSITIONS_D);
}

// A work-item's element e of the A of a step of K: row k, column m, of [BLOCK_K][BLOCK_M].
#define STAGE_K(e) (get_local_id(0) / STAGE_LANES + (e) / STAGE_COLUMNS * STAGE_SLICES)
#define STAGE_M(e) (get_local_id(0) % STAGE_LANES + (e) % STAGE_COLUMNS * STAGE_LANES)
// A work-item's element e of the B of a step of K; the last ones may lie behind its end.
#define STAGE_B(e) (get_local_id(0) + (e) * WORK_ITEMS)
#define HAS_STAGE_B(e) (BLOCK_K * BLOCK_N % WORK_ITEMS == 0 || STAGE_B(e) < BLOCK_K * BLOCK_N)

// Reads element e of A. taps: those of the step, of which the phase has taps_left; c0: the step's first channel in the group.
// What lies outside the tensor, the phase's taps or the group's channels is not read, and counts as zero.
static REAL input_at(const int e, global const REAL *x, global const REAL *operands, global const int4 *taps, const int taps_left,
                     const int c0, const int group, local const int4 *places) {
  const int k = STAGE_K(e), slot = BLOCK_T == 1 ? 0 : k / BLOCK_C, c = c0 + (BLOCK_T == 1 ? k : k % BLOCK_C);
  const int4 place = places[STAGE_M(e)], tap = taps[slot < taps_left ? slot : 0];
  const int d = place.x + tap.x, h = place.y + tap.y, w = place.z + tap.z;
  if (place.w < 0 || slot >= taps_left || c >= GROUP_IC || (uint)d >= ID || (uint)h >= IH || (uint)w >= IW) return R(0.0);
  const int channel = group * GROUP_IC + c;
  REAL value = x[((long)place.w * IC + channel) * INPUT_PLANE + ((long)d * IH + h) * IW + w];
  PROLOGUE(value, channel);
  return value;
}

// Writes one channel's sums to its row of results, with the pointwise steps that ride on them. first: of this work-item's columns.
static void keep_sums(local REAL *first, const real_m sums, const int channel, global const REAL *operands) {
#define KEEP_SUM(i)                     \
  {                                     \
    REAL value = COMPONENT_M(sums, i);  \
    CONV_TAIL(value, channel);          \
    first[i * PLANES] = value;          \
  }
  EACH_M(KEEP_SUM)
}

#if USE_FOLD
// Writes one channel's folded values to its row of results, with the pointwise steps that ride on them.
static void keep_folded(local REAL *first, const real_m folded, const int channel, global const REAL *operands) {
#define KEEP_FOLDED(i)                                  \
  {                                                     \
    REAL value = FOLD_FINISH(COMPONENT_M(folded, i));    \
    FOLD_TAIL(value, channel);                          \
    first[i] = value;                                   \
  }
  EACH_M(KEEP_FOLDED)
}
#endif

__attribute__((reqd_work_group_size(WORK_ITEMS, 1, 1)))
kernel void conv_tiled(global const REAL *restrict x, global const REAL *restrict weights,
                                   global const REAL *restrict operands, global const int2 *restrict phases,
                                   global const int4 *restrict taps, global REAL *restrict y PARAMETERS) {
  local REAL memory[LOCAL_ELEMENTS] __attribute__((aligned(64)));
  local int4 places[BLOCK_M];
  local REAL partial[PARTIAL_ELEMENTS];
  local REAL *const results = memory + RESULTS_AT;
  const int item = get_local_id(0), tm = item % THREADS_M, tn = item / THREADS_M, lane = item % LANES, slice = item / LANES;

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

  for (int j = item; j < BLOCK_M; j += WORK_ITEMS) places[j] = place_of(m0 + j);
#if USE_FOLD
#define DECLARE_FOLDED(j) real_m folded##j = (real_m)(R(0.0));
  EACH_N(DECLARE_FOLDED)
#endif
  for (int f = 0; f < PHASES_PER_GROUP; f++) {
    const int2 phase = phases[first_phase + f];  // its first tap and number of taps
    for (int tile = first_tile; tile < end_tile; tile++) {
      const int group = tile / TILES, tile_c = tile % TILES * BLOCK_N, channel = group * GROUP_OC + tile_c;
      global const REAL *w = weights + ((size_t)tile * TAP_ROWS + phase.x) * (PADDED_IC * BLOCK_N);
#define DECLARE_SUMS(j) real_m sums##j = (real_m)(R(0.0));  // positions THREAD_M*tm ..., channel THREAD_N*tn + j
      EACH_N(DECLARE_SUMS)
      barrier(CLK_LOCAL_MEM_FENCE);  // places are there, and nobody reads the results before, which may lie over A and B
#define DECLARE_A(e) REAL a##e = R(0.0);
#define DECLARE_B(e) REAL b##e = R(0.0);
      EACH_A(DECLARE_A)
      EACH_B(DECLARE_B)
      int next = 0, next_c0 = 0;
#define FETCH_A(e) a##e = input_at(e, x, operands, taps + phase.x + next, phase.y - next, next_c0, group, places);
#define FETCH_B(e) \
  if (HAS_STAGE_B(e)) b##e = w[((size_t)next * PADDED_IC + next_c0) * BLOCK_N + STAGE_B(e)];
#define PUT_A(e) stage[STAGE_K(e) * BLOCK_M + STAGE_M(e)] = a##e;
#define PUT_B(e) \
  if (HAS_STAGE_B(e)) stage[BLOCK_K * BLOCK_M + STAGE_B(e)] = b##e;
      local REAL *stage = memory;
      if (phase.y > 0) {
        EACH_A(FETCH_A)
        EACH_B(FETCH_B)
        EACH_A(PUT_A)
        EACH_B(PUT_B)
      }
      barrier(CLK_LOCAL_MEM_FENCE);  // the first step is there
      for (int tap = 0; tap < phase.y; tap += BLOCK_T)
#pragma unroll 1
        for (int c0 = 0; c0 < PADDED_IC; c0 += BLOCK_C) {
          next_c0 = c0 + BLOCK_C < PADDED_IC ? c0 + BLOCK_C : 0;
          next = next_c0 > 0 ? tap : tap + BLOCK_T;
          if (next < phase.y) {
            EACH_A(FETCH_A)
            EACH_B(FETCH_B)
          }
          local const real_m *A = (local const real_m *)stage + tm;
          local const real_n *B = (local const real_n *)(stage + BLOCK_K * BLOCK_M) + tn;
#pragma unroll
          for (int k = 0; k < BLOCK_K; k++) {
            const real_m am = A[k * THREADS_M];
            const real_n bn = B[k * THREADS_N];
#define ADD_PRODUCTS(j) sums##j = fma(am, (real_m)(COMPONENT_N(bn, j)), sums##j);
            EACH_N(ADD_PRODUCTS)
          }
          stage = stage == memory ? memory + STAGE_SIZE : memory;
          if (next < phase.y) {
            EACH_A(PUT_A)
            EACH_B(PUT_B)
          }
          barrier(CLK_LOCAL_MEM_FENCE);  // the next step is there, and nobody reads the current one
        }
      local REAL *own = results + (channel - first_channel + tn * THREAD_N) * COLUMNS + tm * (THREAD_M * PLANES) + f % PLANES;
      const int own_channels = min(BLOCK_N, GROUP_OC - tile_c) - tn * THREAD_N;
#define KEEP_SUMS(j) \
  if (j < own_channels) keep_sums(own + j * COLUMNS, sums##j, channel + tn * THREAD_N + j, operands);
      EACH_N(KEEP_SUMS)
    }
    barrier(CLK_LOCAL_MEM_FENCE);  // the phase's results are there
#if USE_FOLD
    STAGES_BEFORE_FOLD;
    barrier(CLK_LOCAL_MEM_FENCE);  // what the steps before the fold wrote is there
    local const real_m *own = (local const real_m *)(results + tn * (THREAD_N * COLUMNS)) + tm;
#define FOLD(j)                                                        \
  if (tn * THREAD_N + j < FOLD_CHANNELS) {                             \
    const real_m value = own[j * THREADS_M];                           \
    folded##j = f == 0 ? value : FOLD_COMBINE_ONE(folded##j, value);       \
  }
    EACH_N(FOLD)
#endif
  }
#if USE_FOLD
  local REAL *own = results + tn * (THREAD_N * COLUMNS) + tm * THREAD_M;
#define KEEP_ALL_FOLDED(j) \
  if (tn * THREAD_N + j < FOLD_CHANNELS) keep_folded(own + j * COLUMNS, folded##j, first_channel + tn * THREAD_N + j, operands);
  EACH_N(KEEP_ALL_FOLDED)
  barrier(CLK_LOCAL_MEM_FENCE);  // the folded results are there
  STAGES_AFTER_FOLD;
#else
  STAGES_BEFORE_FOLD;
#endif

  // Consecutive work-items store consecutive columns, and each the elements that only it has touched since the last barrier.
  for (int column = lane; column < COLUMNS; column += LANES) {
    const int4 place = places[column / PLANES];
    int d = place.x, h = place.y, w = place.z;
#if !USE_FOLD
    const int phase = first_phase + column % PLANES;
    d = d * STRIDE_D + phase / (STRIDE_W * STRIDE_H);
    h = h * STRIDE_H + phase / STRIDE_W % STRIDE_H;
    w = w * STRIDE_W + phase % STRIDE_W;
#endif
    if (place.w < 0 || d >= OUT_D || h >= OUT_H || w >= OUT_W) continue;
    global REAL *out = y + (((size_t)place.w * OUT_C + OUT_CHANNEL) * OUT_D + d) * ((size_t)OUT_H * OUT_W) + (size_t)h * OUT_W + w;
    for (int row = slice; row < OUT_ROWS; row += SLICES) {
      REAL value = results[row * COLUMNS + column];
      STORE_TAIL(value);
      out[(size_t)row * ((size_t)OUT_D * OUT_H * OUT_W)] = value;
    }
  }
}
