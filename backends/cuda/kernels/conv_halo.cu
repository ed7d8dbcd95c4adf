// Transposed 3-D convolution with what follows it, on tensor cores (sm_80 and newer): the resident halo.
//   y[n,o,z,y,x] = finish( bias[o] + sum over taps k and channels c of x[n,c, m + offset(k)] * w[c,o,k] ),
//   z = SD*m + r: outputs fall into stride^3 phases by their residues r, and within a phase every tap reads x at
//   a constant offset. An ordinary convolution of stride STEP has one phase and reads x[n,c, STEP*m + offset(k)].
//
// Layouts
//   x  (N, IC, ID, IH, IW) INPUT, half_t or float; with a PROLOGUE the tensor that it starts from,
//      (N, IC, SD, SH, SW), of which every PRE_Z x PRE_Y x PRE_X window becomes one input
//   y  (N, OC, OD, OH, OW) OUTPUT, half_t or float, or the pooled or summed shape
//   w  packed in the order in which it is read: [channel tile][slice][step][k8], then for 8 channels k8 of one tap
//      the fragments of mma_tf32: [pair of 8 columns][lane][4], and [lane][2] for an odd column block at the end
//
// GEMM of one phase and group: GEMM_M = voxels m, GEMM_N = OC, GEMM_K = taps * IC of a group, by the instruction
// m16n8k8. IN_CHANNELS and OUT_CHANNELS are those of one of GROUPS groups.
//   A[m][(k, c)] = x tile[c][m + offset(k)], B[(k, c)][o] = w[c,o,k].
//
// A block owns a box of TILE_Z x TILE_Y x TILE_X voxels m for ALL phases, and BLOCK_N channels. The box of x with
// its halo is loaded to shared memory once, for all IC channels; every tap of every phase is a shifted read of it.
// Where they do not fit, channels come in slices of SLICE_CHANNELS, which each phase loads one after another.
// After that one barrier the warps go their own ways: a warp owns 16*WARP_M voxels x BLOCK_N channels, and reads
// the weights from the first-level cache straight to registers, AHEAD times 8 channels before their use. So one warp's
// epilogue runs under another one's products. A quad of lanes owns all channels of a voxel. The host passes a flat
// program: one shared-memory offset for every tap of every phase. Stride, kernel size and dilation appear nowhere
// in the main loop. PAIRED: a warp makes two phases that differ in W alone before it stores, so that 8 voxels of
// a line become 64 contiguous bytes.
//
// Precision. USE_3XTF32: x and w are split in two TF32 parts each, and three products are added. Otherwise one TF32
// product, of inputs that ROUND_X rounds; TF32 holds float16 as it is. PROMOTE: the sums of each BLOCK_K channels are
// added to the result by ordinary additions, since the tensor core cuts its own sums: float32 accuracy. A sum that is
// not finite is made again by fused multiply-add with only the inputs that exist: splitting turns inf into NaN, and so
// does 0 * inf where 0 stands for an input outside the tensor.
//
// Prologue, while the box is loaded: pre_first_chain on each element, the pool of each window,
// pre_second_chain. Blocks repeat it for their halos. The first pass of a softmax keeps the inputs that it made (KEEP_X,
// each block those of its own voxels), and the second pass reads them.
//
// Epilogue, in registers: first_chain on each voxel's channels; FOLD over all phases or not; second_chain; then one of
//   - store, or CHANNEL_REDUCE: the reduction over channels
//   - pools of POOL_Z x POOL_Y x POOL_X boxes of folded voxels, reduced over channels where CHANNEL_REDUCE
//     (last_chain is applied to what either of them stores)
//   - the two passes of a softmax over space whose argument a clamp bounds: SOFTMAX_SUM adds up exp(v - bound) of
//     its voxels per channel; SOFTMAX_SCALE, a second launch, makes the convolution again, which is cheaper than
//     storing and reading exponentials, and divides.
//
// GATHER: statistics of the values that are made, over the box and for each channel, for a later step. Each lane keeps
// its state in shared memory, so that the main loop has all registers; the block joins them in a fixed order, in double.
// With STORE 0 nothing else is stored.
//
// Shared memory, in floats: x tile [IC][z][y][x mod STEP_X][x / STEP_X] with a channel pitch of 8 mod 32, so that a
// fragment read (4 channels x 8 voxels, neighbours at any STEP) meets 32 banks; the program; softmax sums; with FOLD_SHARED what is folded so far, each
// thread's own. The second pooling's staging of 8 channels takes the x tile's place.
// Registers: WARP_M*BLOCK_N/2 results, as many again for each of the sums of PROMOTE, PAIRED and FOLD
// (without FOLD_SHARED).
// Barriers: one or two before the products, two or three for each slice of channels; two per 8 channels of a second
// pooling; one or two for softmax sums.
//
// FLOPs 2*M*N*K (3 times that with USE_3XTF32) on the tensor core; ideal bytes x + w + y. A block reads each input
// 1 + halo times, and all weights, from the L2 cache: TILE voxels * taps multiply-adds a loaded weight.
//
// The host guarantees: the tile's constraints (tiles.py); x 16-byte aligned where USE_VECTOR_X; ASYNC_X only for float without
// a prologue; the
// program one step and the packed weights AHEAD times 8 channels longer than what is used, since both are read ahead;
// y aligned for pairs and OW even where pair_stores; fewer than 2^31 blocks; layer norm and reductions of channels only
// where GROUPS = 1 and OC <= BLOCK_N; POOL boxes do not cross tiles.
// Generated: pre_first_chain, pre_second_chain, last_chain; first_chain and second_chain, of a team; the monoids pool,
// fold, box, channel and gather.
#include "chain.cuh"
#include "gather.cuh"
#include "window.cuh"

#define SOFTMAX_NONE 0
#define SOFTMAX_SUM 1
#define SOFTMAX_SCALE 2

constexpr int NT = BLOCK_N / 8;                   // column blocks of a warp
constexpr int TILE_M = TILE_X * TILE_Y * TILE_Z;  // voxels of a block
constexpr int ROWS_M = WARPS * 16 * WARP_M;  // voxels that warps work on; those beyond TILE_M are idle
constexpr int THREADS = 32 * WARPS;
constexpr int PHASES = PAIRED ? 2 : 1;  // of a warp before it stores
constexpr int ALL_IN = GROUPS * IN_CHANNELS, ALL_OUT = GROUPS * OUT_CHANNELS;
constexpr int GROUP_TILES = (OUT_CHANNELS + BLOCK_N - 1) / BLOCK_N;  // channel tiles of a group
constexpr int SLICES = (IN_CHANNELS + SLICE_CHANNELS - 1) / SLICE_CHANNELS;
constexpr int CHUNKS = SLICE_CHANNELS / BLOCK_K;  // of a slice
constexpr int SLICE_K8 = SLICE_CHANNELS / 8;
constexpr int PRE_VOLUME = PRE_X * PRE_Y * PRE_Z;
constexpr bool WHOLE = OUT_CHANNELS % BLOCK_N == 0;  // no channel of any tile is padding
constexpr int ROWS_Y = (TILE_Y - 1) * STEP_Y + 1 + LOW_Y + HIGH_Y, ROWS_Z = (TILE_Z - 1) * STEP_Z + 1 + LOW_Z + HIGH_Z;
constexpr int ROW_X = (TILE_X + LOW_X + HIGH_X) * STEP_X;  // inputs of a row, STEP_X lines
constexpr int SLAB = 8 * BLOCK_N;  // weights of one tap and 8 channels
constexpr bool ROTATES = BLOCK_K / 8 > AHEAD;        // fragments of weights stay in their registers
constexpr int SLOTS = ROTATES ? BLOCK_K / 8 : AHEAD + 1;
constexpr int POOL_VOLUME = POOL_X * POOL_Y * POOL_Z;
constexpr int X_FLOATS = SLICE_CHANNELS * PITCH_C;
constexpr int STATES = 2 * NT * THREADS;  // from one number of a lane's states to the next
static_assert(TILE_X % 8 == 0 && BLOCK_N % 8 == 0 && BLOCK_K % 8 == 0 && SLICE_CHANNELS % BLOCK_K == 0
                  && THREADS <= 1024,
              "tile");
// The layout of the shared memory comes from the host: x with PAD_X floats left of a line, which keep it 16-byte aligned,
// PITCH_X from line to line and PITCH_C from channel to channel; then SUM_FLOATS, FOLD_FLOATS and GATHER_FLOATS.
static_assert(TILE_FLOATS >= X_FLOATS && (POOL_VOLUME == 1 || TILE_FLOATS >= 8 * STAGE_PITCH) && PITCH_X % 4 == 0, "x");
static_assert(SOFTMAX == SOFTMAX_NONE || SUM_FLOATS >= (SOFTMAX == SOFTMAX_SUM ? WARPS * BLOCK_N : THREADS + 2 * BLOCK_N),
              "sums");
static_assert(!GATHER || GATHER_FLOATS * sizeof(float) >= (GATHER_NUMBERS * STATES + THREADS) * sizeof(State), "states");
static_assert(PITCH_C % 32 == 8 && PITCH_C >= PITCH_X * STEP_X * ROWS_Y * ROWS_Z + HIGH_X, "pitch");
static_assert(!PAIRED || !FOLD, "folded phases are not stored");

struct Tap {
  int shared;     // offset of its x in the tile
  int offset[3];  // from STEP*m to the input position
};

struct Pass {  // one phase, or two that are stored together
  int residue[2][3];
  int first[2], steps[2];  // rows of the program
};

struct HaloParams {
  const INPUT *x;
  const float *w;
  const STORAGE *bias;
  OUTPUT *y;
  float *partial;  // softmax sums, [batch][tile of the box][padded OC]
  float *kept;     // inputs that the prologue made, where KEEP_X
  double *gathered;  // [box of a batch item][OC][GATHERED], batch items one after another
  const Pass *passes;
  const Tap *taps;
  index_t tile_weights;  // floats of one channel tile
  int pass_count, step_count;
  int source[3], in[3];  // extents of x before and after the prologue
  int out[3], limit[3], stride[3],
      tiles[3];  // out: as stored; limit: outputs of the convolution, or folded voxels
  int pair_stores;
  float softmax_bound;
  Operand operand[OPERANDS];
};
CHECK_PARAMS(HaloParams);

using Rows = float[WARP_M][NT][4];  // a warp's results of one phase

struct Box {  // what this block owns
  index_t batch;
  int tile;        // of output channels, of all groups
  int channel;     // first output channel
  int channels;    // that exist
  int in_channel;  // first input channel of the group
  bool keeps;      // it is the one among its group's channel tiles that keeps inputs
  int m[3];        // first voxel
  index_t number;  // among the boxes of all batches
};

__device__ __forceinline__ Box box_at(const HaloParams &p) {
  unsigned rest = blockIdx.x;
  Box box;
  box.tile = static_cast<int>(rest % (GROUPS * GROUP_TILES));
  const int group = box.tile / GROUP_TILES, first = box.tile % GROUP_TILES * BLOCK_N;
  box.channel = group * OUT_CHANNELS + first;
  box.channels = WHOLE || OUT_CHANNELS - first > BLOCK_N ? BLOCK_N : OUT_CHANNELS - first;
  box.in_channel = group * IN_CHANNELS;
  box.keeps = first == 0;
  rest /= GROUPS * GROUP_TILES;
  box.number = rest;
  box.m[2] = static_cast<int>(rest % p.tiles[2]) * TILE_X;
  rest /= p.tiles[2];
  box.m[1] = static_cast<int>(rest % p.tiles[1]) * TILE_Y;
  rest /= p.tiles[1];
  box.m[0] = static_cast<int>(rest % p.tiles[0]) * TILE_Z;
  box.batch = rest / p.tiles[0];
  return box;
}

__device__ __forceinline__ void clear(Rows &rows) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) rows[m][n][i] = 0.f;
}

// ---- x into shared memory --------------------------------------------------------------------------------
// Where the window of an input starts.
__device__ __forceinline__ const INPUT *corner_of(const HaloParams &p, index_t batch, int c, int z, int y,
                                                  int x) {
  return p.x
         + (((batch * ALL_IN + c) * p.source[0] + index_t(z) * PRE_Z) * p.source[1] + index_t(y) * PRE_Y)
               * p.source[2]
         + index_t(x) * PRE_X;
}

// The input of channel c that is made from a window.
__device__ __forceinline__ float input_from(const HaloParams &p, const INPUT *corner, int c) {
  const VoxelAt at{0, c, {}, true};  // operands of the prologue vary along channels at most
  const auto change = [&](float v) { return pre_first_chain(p.operand, v, at); };
  float v;
  if constexpr (PRE_VOLUME == 1)
    v = change(float(*corner));
  else
    v = pool_window<PRE_VECTOR>(corner, PRE_Z, PRE_Y, PRE_X, p.source[1], p.source[2], change);
  return pre_second_chain(p.operand, v, at);
}

// Where input u of the ROW_X of a row lies in the x tile, from the row's first line.
__device__ __forceinline__ int place_in_row(int u) {
  return u % STEP_X * PITCH_X + PAD_X + u / STEP_X - LOW_X;
}

#if !ASYNC_X
// Where the second pass reads an input of channel c, or null where it is another box's. A box owns the inputs from its first
// one to the next box's first one, all of which it loads if anybody does; at the end of an axis what lies behind them too.
__device__ __forceinline__ float *kept_at(const HaloParams &p, const Box &box, int c, const int (&at)[3]) {
  constexpr int TILE[3] = {TILE_Z, TILE_Y, TILE_X}, STEP[3] = {STEP_Z, STEP_Y, STEP_X},
                LOW[3] = {LOW_Z, LOW_Y, LOW_X * STEP_X};
  bool own = box.keeps;
#pragma unroll
  for (int axis = 0; axis < 3; axis++) {
    const int end = box.m[axis] + TILE[axis];
    own = own && unsigned(at[axis]) < unsigned(p.in[axis]) && at[axis] >= box.m[axis] * STEP[axis] - LOW[axis]
          && (at[axis] < end * STEP[axis] - LOW[axis] || end >= p.tiles[axis] * TILE[axis]);
  }
  return own ? p.kept + (((box.batch * ALL_IN + c) * p.in[0] + at[0]) * p.in[1] + at[1]) * p.in[2] + at[2]
             : nullptr;
}

// Start to load the slice of channels that starts at `channel`, of this box and its halo; zeros where there is no input.
// A thread makes TOGETHER channels of a place at once, all of whose reads are under way before the first one is used.
// No branch may wait for them: what is not there is made of the nearest input.
__device__ __forceinline__ void load_x(const HaloParams &p, const Box &box, int channel, bool keep,
                                       float *tile) {
  constexpr int PLACES = ROWS_Z * ROWS_Y * ROW_X;
  constexpr int TOGETHER = PRE_VOLUME > 16 ? 1 : PRE_VOLUME > 8 ? 2 : PRE_VOLUME > 4 ? 4 : 8;
  const index_t plane = index_t(p.source[0]) * p.source[1] * p.source[2],
                in_plane = index_t(p.in[0]) * p.in[1] * p.in[2];
#pragma unroll 1
  for (int i = threadIdx.x; i < SLICE_CHANNELS / TOGETHER * PLACES; i += THREADS) {
    const int u = i % ROW_X, row = i / ROW_X % (ROWS_Y * ROWS_Z), first = i / PLACES * TOGETHER;
    const int at[3] = {box.m[0] * STEP_Z + row / ROWS_Y - LOW_Z, box.m[1] * STEP_Y + row % ROWS_Y - LOW_Y,
                       (box.m[2] - LOW_X) * STEP_X + u};
    bool inside = true;
    int there[3];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) {
      there[axis] = min(max(at[axis], 0), p.in[axis] - 1);
      inside = inside && there[axis] == at[axis];
    }
    const INPUT *corner = corner_of(p, box.batch, box.in_channel, there[0], there[1], there[2]);
    float value[TOGETHER];
#pragma unroll
    for (int k = 0; k < TOGETHER; k++) {
      const int c = channel + first + k, from = min(c, IN_CHANNELS - 1);
      const float made = input_from(p, corner + from * plane, box.in_channel + from);
      value[k] = inside && c < IN_CHANNELS ? made : 0.f;
    }
#pragma unroll
    for (int k = 0; k < TOGETHER; k++)
      tile[(first + k) * PITCH_C + row * (STEP_X * PITCH_X) + place_in_row(u)] = value[k];
    if (KEEP_X && keep) {
      float *kept = kept_at(p, box, box.in_channel + channel + first, at);
#pragma unroll
      for (int k = 0; k < TOGETHER; k++)
        if (kept && channel + first + k < IN_CHANNELS) kept[k * in_plane] = value[k];
    }
  }
}
#else
// The same where nothing has to be done to an input: asynchronous copies.
__device__ __forceinline__ void load_x(const HaloParams &p, const Box &box, int channel, bool, float *tile) {
  constexpr bool USE_VECTORS = USE_VECTOR_X && STEP_X == 1;
  constexpr int VECTORS = USE_VECTORS ? TILE_X / 4 : 0, PIECES = VECTORS + ROW_X - VECTORS * 4;
  const index_t plane = index_t(p.in[0]) * p.in[1] * p.in[2];
  for (int i = threadIdx.x; i < SLICE_CHANNELS * ROWS_Z * ROWS_Y * PIECES; i += THREADS) {
    const int piece = i % PIECES, y = i / PIECES % ROWS_Y, z = i / (PIECES * ROWS_Y) % ROWS_Z,
              c = i / (PIECES * ROWS_Y * ROWS_Z);
    const int iz = box.m[0] * STEP_Z + z - LOW_Z, iy = box.m[1] * STEP_Y + y - LOW_Y;
    const bool row = unsigned(iz) < unsigned(p.in[0]) && unsigned(iy) < unsigned(p.in[1])
                     && channel + c < IN_CHANNELS;
    const float *from =
        p.x + (box.batch * ALL_IN + box.in_channel + channel + c) * plane + (index_t(iz) * p.in[1] + iy) * p.in[2];
    float *to = tile + c * PITCH_C + (z * ROWS_Y + y) * (STEP_X * PITCH_X);
    if (piece < VECTORS) {
      const int x = box.m[2] + 4 * piece;
      const bool inside = row && x < p.in[2];
      copy_async<16>(to + PAD_X + 4 * piece, inside ? from + x : p.x, inside);
    } else {
      const int rest = piece - VECTORS, u = VECTORS == 0 || rest < LOW_X ? rest : TILE_X + rest;
      const int x = (box.m[2] - LOW_X) * STEP_X + u;
      const bool inside = row && unsigned(x) < unsigned(p.in[2]);
      copy_async<4>(to + place_in_row(u), inside ? from + x : p.x, inside);
    }
  }
  copy_commit();
}
#endif

// Wait until all threads' inputs are there.
__device__ __forceinline__ void finish_x(float *tile) {
  copy_wait<0>();
  __syncthreads();
#if ROUND_X
  for (int i = threadIdx.x; i < X_FLOATS; i += THREADS) tile[i] = __uint_as_float(round_tf32(tile[i]));
  __syncthreads();
#endif
}

// ---- products ---------------------------------------------------------------------------------------------
struct Fragment {  // of B: this lane's weights of 8 channels, [column block][channel t, t + 4]
  float v[NT][2];
  // from: this lane's first value of the first pair of column blocks.
  __device__ __forceinline__ void load(const float *from, int lane) {
#pragma unroll
    for (int pair = 0; pair < NT / 2; pair++) {
      const float4 four = __ldg(reinterpret_cast<const float4 *>(from + pair * 128));
      v[2 * pair][0] = four.x, v[2 * pair][1] = four.y;
      v[2 * pair + 1][0] = four.z, v[2 * pair + 1][1] = four.w;
    }
    if constexpr (NT % 2 == 1) {
      const float2 two = __ldg(reinterpret_cast<const float2 *>(from + NT / 2 * 128 - lane * 2));
      v[NT - 1][0] = two.x, v[NT - 1][1] = two.y;
    }
  }
};

// 8 channels of one tap: a_tile points at this lane's channel of the tap's x, voxel[m][h] at its voxels within.
__device__ __forceinline__ void multiply(const float *a_tile, const int (&voxel)[WARP_M][2],
                                         const Fragment &weights, Rows &acc) {
  uint32_t a[WARP_M][4];
#if USE_3XTF32
  uint32_t a_small[WARP_M][4];
#endif
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {  // bit 0: voxel + 8, bit 1: channel + 4
      const float value = a_tile[(i >> 1) * 4 * PITCH_C + voxel[m][i & 1]];
#if USE_3XTF32
      split_tf32(value, a[m][i], a_small[m][i]);
#else
      a[m][i] = __float_as_uint(value);
#endif
    }
  constexpr int SPAN = 4;  // column blocks whose products take turns, so that none waits for its own last sum
#pragma unroll
  for (int first = 0; first < NT; first += SPAN) {
    uint32_t b[SPAN][2];
#if USE_3XTF32
    uint32_t b_small[SPAN][2];
#endif
#pragma unroll
    for (int e = 0; e < SPAN && first + e < NT; e++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
#if USE_3XTF32
        split_tf32(weights.v[first + e][i], b[e][i], b_small[e][i]);
#else
        b[e][i] = __float_as_uint(weights.v[first + e][i]);
#endif
      }
#if USE_3XTF32
#pragma unroll
    for (int e = 0; e < SPAN && first + e < NT; e++)
#pragma unroll
      for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][first + e], a_small[m], b[e]);
#pragma unroll
    for (int e = 0; e < SPAN && first + e < NT; e++)
#pragma unroll
      for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][first + e], a[m], b_small[e]);
#endif
#pragma unroll
    for (int e = 0; e < SPAN && first + e < NT; e++)
#pragma unroll
      for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][first + e], a[m], b[e]);
  }
}

// All taps of one phase with the channels that are resident, added to result. a_lane: this lane's channel in the x
// tile; weights: its own in B.
__device__ __forceinline__ void accumulate(const float *a_lane, const int (&voxel)[WARP_M][2],
                                           const int *program, int steps, const float *weights, int lane,
                                           Rows &result) {
  Fragment b[SLOTS];
#pragma unroll
  for (int k = 0; k < AHEAD; k++) b[k].load(weights + k * SLAB, lane);
  int tap = program[0];
#pragma unroll 1
  for (int s = 0; s < steps; s++) {
    const float *a = a_lane + tap;
    tap = program[s + 1];
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#if PROMOTE
      Rows sums;
      clear(sums);
#else
      Rows &sums = result;
#endif
#pragma unroll
      for (int k = 0; k < BLOCK_K / 8; k++) {
        b[ROTATES ? (k + AHEAD) % SLOTS : AHEAD].load(weights + AHEAD * SLAB, lane);
        multiply(a, voxel, b[ROTATES ? k : 0], sums);
        weights += SLAB;
        a += 8 * PITCH_C;
        if constexpr (!ROTATES) {
#pragma unroll
          for (int slot = 0; slot < AHEAD; slot++) b[slot] = b[slot + 1];
        }
      }
#if PROMOTE
#pragma unroll
      for (int m = 0; m < WARP_M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) result[m][n][i] += sums[m][n][i];
#endif
    }
  }
}

// The sum of voxel `m` of the box and channel n of the channel tile, with the inputs that exist.
__device__ __noinline__ float exact_sum(const HaloParams &p, const Box &box, int first, int steps, int m,
                                           int n) {
  const int at[3] = {box.m[0] + m / (TILE_X * TILE_Y), box.m[1] + m / TILE_X % TILE_Y, box.m[2] + m % TILE_X};
  const bool odd = n / 16 == NT / 2;  // in the odd column block
  const index_t slice_k8 = index_t(p.step_count) * SLICE_K8;
  const float *w = p.w + box.tile * p.tile_weights + n / 16 * 128
                   + (odd ? n % 8 * 8 : n % 8 * 16 + n / 8 % 2 * 2);
  float total = 0.f;
#pragma unroll 1
  for (int s = first; s < first + steps; s++) {
    const Tap tap = p.taps[s];
    const int z = at[0] * STEP_Z + tap.offset[0], y = at[1] * STEP_Y + tap.offset[1],
              x = at[2] * STEP_X + tap.offset[2];
    if (unsigned(z) >= unsigned(p.in[0]) || unsigned(y) >= unsigned(p.in[1])
        || unsigned(x) >= unsigned(p.in[2]))
      continue;
#pragma unroll 1
    for (int c = 0; c < IN_CHANNELS; c++) {
      const index_t slab = c / SLICE_CHANNELS * slice_k8 + index_t(s) * SLICE_K8 + c % SLICE_CHANNELS / 8;
      const int channel = box.in_channel + c;
      total = fmaf(input_from(p, corner_of(p, box.batch, channel, z, y, x), channel),
                   w[slab * SLAB + c % 4 * (odd ? 2 : 4) + c / 4 % 2], total);
    }
  }
  return total;
}

// ---- what follows, on registers ---------------------------------------------------------------------------
// A lane's values of one voxel: v[i] belongs to channel 8*(i/2) + 2*t + i%2 of the channel tile.
__device__ __forceinline__ int channel_of(int i, int t) {
  return (i >> 1) * 8 + 2 * t + (i & 1);
}

__device__ __forceinline__ bool exists(const Box &box, int i, int t) {
  return WHOLE || channel_of(i, t) < box.channels;
}

__device__ __forceinline__ float sum_over_quad(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// Make sums that are not finite again, and add the bias.
__device__ __forceinline__ void complete(const HaloParams &p, const Box &box, int first, int steps,
                                         Rows &rows, int first_voxel, int g, int t) {
  float zeros[WARP_M];  // NaN as soon as one sum is not finite
#pragma unroll
  for (int m = 0; m < WARP_M; m++) {
    zeros[m] = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) zeros[m] = fmaf(rows[m][n][i], 0.f, zeros[m]);
  }
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
    if (!(zeros[m] == 0.f)) {
#pragma unroll 1
      for (int e = 0; e < 4 * NT; e++) {  // registers have no index: each is compared
        float value = 0.f;
#pragma unroll
        for (int j = 0; j < 4 * NT; j++) value = j == e ? rows[m][j / 4][j % 4] : value;
        const int column = channel_of(e / 4 * 2 + e % 2, t);
        if (is_finite(value) || column >= box.channels) continue;
        value = exact_sum(p, box, first, steps, first_voxel + m * 16 + e / 2 % 2 * 8 + g, column);
#pragma unroll
        for (int j = 0; j < 4 * NT; j++) rows[m][j / 4][j % 4] = j == e ? value : rows[m][j / 4][j % 4];
      }
    }
#if HAS_BIAS
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    const float bias = exists(box, i, t) ? float(p.bias[box.channel + channel_of(i, t)]) : 0.f;
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) rows[m][i / 2][2 * h + i % 2] += bias;
  }
#endif
}

// The output position of voxel `voxel` in a phase, or of a folded voxel; `whole`: what is asked for is folded.
__device__ __forceinline__ VoxelAt place_of(const HaloParams &p, const Box &box, int voxel,
                                            const int (&residue)[3], bool whole = FOLD) {
  const int m[3] = {box.m[0] + voxel / (TILE_X * TILE_Y), box.m[1] + voxel / TILE_X % TILE_Y,
                    box.m[2] + voxel % TILE_X};
  VoxelAt place{box.batch, 0, {}, TILE_M == ROWS_M || voxel < TILE_M};
#pragma unroll
  for (int axis = 0; axis < 3; axis++) {
    place.place[axis] = whole ? m[axis] : m[axis] * p.stride[axis] + residue[axis];
    place.exists = place.exists && (FOLD ? m[axis] : place.place[axis]) < p.limit[axis];
  }
  return place;
}

struct Kept {  // a lane's values of one voxel at an earlier time
  float v[2 * NT];
};

struct ChannelAt : VoxelAt {
  int number;  // of the lane's channels
  __device__ __forceinline__ float of(const Kept &kept) const { return kept.v[number]; }
};

// The channels of one voxel that a lane holds; its quad holds all of them.
struct Team {
  const Box &box;
  VoxelAt at;
  int t;
  float (&v)[2 * NT];

  template <class Function> __device__ __forceinline__ void each(Function function) {
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
      ChannelAt here{at, i};
      here.c = box.channel + (exists(box, i, t) ? channel_of(i, t) : 0);
      here.exists = at.exists && exists(box, i, t);
      v[i] = function(v[i], here);
    }
  }

  __device__ __forceinline__ Kept keep() const {
    Kept kept;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) kept.v[i] = v[i];
    return kept;
  }

  __device__ __forceinline__ void layer_norm(float eps, const void *weight, const void *bias) {
    const STORAGE *factors = static_cast<const STORAGE *>(weight), *terms = static_cast<const STORAGE *>(bias);
    constexpr float share = 1.f / OUT_CHANNELS;
    const float shift = __shfl_sync(~0u, v[0], threadIdx.x % 32 - t);  // the quad's first channel
    float total = 0.f, factor = 1.f, rest, squares;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) total = fmaf(exists(box, i, t) ? v[i] - shift : 0.f, share, total);
    const float mean = shift + sum_over_quad(total);
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
      rest = 0.f;
      float parts[4] = {0.f, 0.f, 0.f, 0.f};  // short sums round less
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) {
        const float centred = exists(box, i, t) ? (v[i] - mean) * factor : 0.f;
        rest += centred;
        parts[i % 4] = fmaf(centred, centred, parts[i % 4]);
      }
      squares = sum_over_quad((parts[0] + parts[1]) + (parts[2] + parts[3]));
      const bool overflows = !(squares < INFINITY);
      if (pass || !__any_sync(~0u, overflows)) break;
      factor = overflows ? FAR : 1.f;
    }
    rest = sum_over_quad(rest) * share;
    const float scale = rsqrtf(fmaf(-rest, rest, squares * share) + eps * factor * factor);
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
      v[i] = fmaf((v[i] - mean) * factor, scale, -rest * scale);
      if (factors && exists(box, i, t)) v[i] *= float(factors[channel_of(i, t)]);
      if (terms && exists(box, i, t)) v[i] += float(terms[channel_of(i, t)]);
    }
  }
};

// Run a chain, which `chain` calls, on all of a warp's voxels of a phase, or on folded ones.
template <class Chain>
__device__ __forceinline__ void run_chain(const HaloParams &p, const Box &box, const int (&residue)[3], bool whole,
                                          Rows &rows, int first_voxel, int g, int t, Chain chain) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float v[2 * NT];
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) v[i] = rows[m][i / 2][2 * h + i % 2];
      Team team{box, place_of(p, box, first_voxel + m * 16 + h * 8 + g, residue, whole), t, v};
      chain(team);
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) rows[m][i / 2][2 * h + i % 2] = v[i];
    }
}

// ---- results to memory ------------------------------------------------------------------------------------
__device__ __forceinline__ index_t element(const HaloParams &p, const int (&at)[3]) {
  return (index_t(at[0]) * p.out[1] + at[1]) * p.out[2] + at[2];
}

// Store all channels of a phase, or of both phases of a line: 8 lanes write 8 neighbours or pairs of neighbours.
__device__ __forceinline__ void store(const HaloParams &p, const Box &box, const Pass &pass,
                                      const Rows (&rows)[PHASES], int first_voxel, int g, int t) {
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      OUTPUT *y[PHASES];
      bool inside[PHASES];
#pragma unroll
      for (int f = 0; f < PHASES; f++) {
        const VoxelAt place = place_of(p, box, first_voxel + m * 16 + h * 8 + g, pass.residue[f]);
        inside[f] = place.exists;
        y[f] = p.y + (box.batch * ALL_OUT + box.channel + 2 * t) * plane + element(p, place.place);
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const bool there = exists(box, 2 * n + i, t);
          if (PAIRED && p.pair_stores) {
            if (inside[0] && there)
              *reinterpret_cast<Neighbours<OUTPUT, 2> *>(y[0]) = {
                  {OUTPUT(rows[0][m][n][2 * h + i]), OUTPUT(rows[PHASES - 1][m][n][2 * h + i])}};
            y[0] += i == 0 ? plane : 7 * plane;
          } else {
#pragma unroll
            for (int f = 0; f < PHASES; f++) {
              if (inside[f] && there) *y[f] = OUTPUT(rows[f][m][n][2 * h + i]);
              y[f] += i == 0 ? plane : 7 * plane;
            }
          }
        }
      }
    }
}

// Reduction of channels, from registers.
__device__ __forceinline__ void store_channels(const HaloParams &p, const Box &box, const int (&residue)[3],
                                               const Rows &rows, int first_voxel, int g, int t) {
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = channel_identity<float>();
#pragma unroll
      for (int i = 0; i < 2 * NT; i++)
        if (exists(box, i, t)) total = channel_combine(total, channel_lift(rows[m][i / 2][2 * h + i % 2]));
      total = channel_combine(total, __shfl_xor_sync(~0u, total, 1));
      total = channel_combine(total, __shfl_xor_sync(~0u, total, 2));
      const VoxelAt place = place_of(p, box, first_voxel + m * 16 + h * 8 + g, residue);
      total = channel_finish(total, Share<float>{OUT_CHANNELS});
      if (place.exists && t == 0)
        p.y[box.batch * plane + element(p, place.place)] = OUTPUT(last_chain(p.operand, total, place));
    }
}

// The position of pooled output o of a box, and whether it exists.
constexpr int POOLED_X = TILE_X / POOL_X, POOLED_Y = TILE_Y / POOL_Y, POOLED = POOLED_X * POOLED_Y * (TILE_Z / POOL_Z);
__device__ __forceinline__ bool pooled_place(const HaloParams &p, const Box &box, int o, int (&at)[3]) {
  at[0] = box.m[0] / POOL_Z + o / (POOLED_X * POOLED_Y);
  at[1] = box.m[1] / POOL_Y + o / POOLED_X % POOLED_Y;
  at[2] = box.m[2] / POOL_X + o % POOLED_X;
  return o < POOLED && at[0] < p.out[0] && at[1] < p.out[1] && at[2] < p.out[2];
}

// Pools of POOL boxes of folded voxels; reduced over channels where CHANNEL_REDUCE.
__device__ __forceinline__ void store_pooled(const HaloParams &p, const Box &box, const Rows &rows,
                                             float *staging, int first_voxel, int g, int t) {
  constexpr int PX = POOLED_X, PY = POOLED_Y;
  constexpr int EACH = (8 * POOLED + THREADS - 1) / THREADS;
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
  float total[EACH];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    __syncthreads();
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        staging[(2 * t + (i & 1)) * STAGE_PITCH + first_voxel + m * 16 + (i >> 1) * 8 + g] = rows[m][n][i];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int item = threadIdx.x + j * THREADS, c = item % 8, o = item / 8;
      VoxelAt at{box.batch, CHANNEL_REDUCE ? 0 : box.channel + n * 8 + c, {}, false};
      at.exists = pooled_place(p, box, o, at.place) && n * 8 + c < box.channels;
      float best = channel_identity<float>();
      if (at.exists) {
        const float *corner = staging + c * STAGE_PITCH
                              + (o / (PX * PY) * POOL_Z * TILE_Y + o / PX % PY * POOL_Y) * TILE_X
                              + o % PX * POOL_X;
        best = box_lift(corner[0]);
#pragma unroll
        for (int e = 1; e < POOL_VOLUME; e++)
          best = box_combine(best, box_lift(corner[(e / (POOL_X * POOL_Y) * TILE_Y + e / POOL_X % POOL_Y) * TILE_X
                                                   + e % POOL_X]));
        best = box_finish(best, Share<float>{POOL_VOLUME});
        if (CHANNEL_REDUCE)
          best = channel_lift(best);
        else
          p.y[(box.batch * ALL_OUT + at.c) * plane + element(p, at.place)] = OUTPUT(last_chain(p.operand, best, at));
      }
      total[j] = n == 0 ? best : channel_combine(total[j], best);
    }
  }
  if constexpr (CHANNEL_REDUCE) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      float all = total[j];  // eight lanes hold the eight channels of a column block
      all = channel_combine(all, __shfl_xor_sync(~0u, all, 1));
      all = channel_combine(all, __shfl_xor_sync(~0u, all, 2));
      all = channel_combine(all, __shfl_xor_sync(~0u, all, 4));
      all = channel_finish(all, Share<float>{OUT_CHANNELS});
      const int item = threadIdx.x + j * THREADS;
      VoxelAt at{box.batch, 0, {}, false};
      at.exists = pooled_place(p, box, item / 8, at.place);
      if (item % 8 == 0 && at.exists)
        p.y[box.batch * plane + element(p, at.place)] = OUTPUT(last_chain(p.operand, all, at));
    }
  }
}

// ---- softmax over space -----------------------------------------------------------------------------------
__device__ __forceinline__ void exponentials(const HaloParams &p, Rows &rows) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) rows[m][n][i] = expf(rows[m][n][i] - p.softmax_bound);
}

// Add this phase's exponentials, of voxels that exist, to the lane's sums over its voxels.
__device__ __forceinline__ void add_exponentials(const HaloParams &p, const Box &box,
                                                 const int (&residue)[3], const Rows &rows,
                                                 float (&sums)[2 * NT], int first_voxel, int g) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool inside = place_of(p, box, first_voxel + m * 16 + h * 8 + g, residue).exists;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) sums[i] += inside ? rows[m][i / 2][2 * h + i % 2] : 0.f;
    }
}

// The block's sums, lanes and warps joined in a fixed order. shared: WARPS * BLOCK_N floats.
__device__ __forceinline__ void store_sums(const HaloParams &p, const Box &box, float (&sums)[2 * NT],
                                           float *shared, int warp, int g, int t) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    float sum = sums[i];
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    if (g == 0) shared[warp * BLOCK_N + channel_of(i, t)] = sum;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < BLOCK_N; c += THREADS) {
    float total = 0.f;
    for (int w = 0; w < WARPS; w++) total += shared[w * BLOCK_N + c];
    p.partial[(box.number * (GROUPS * GROUP_TILES) + box.tile) * BLOCK_N + c] = total;
  }
}

// 1 / (sum over all boxes of this batch item) of each channel, into shared[0 .. BLOCK_N). shared: (THREADS +
// BLOCK_N) floats.
__device__ __forceinline__ void load_factors(const HaloParams &p, const Box &box, float *shared) {
  constexpr int SLICES = THREADS / BLOCK_N > 0 ? THREADS / BLOCK_N : 1;
  const index_t boxes = index_t(p.tiles[0]) * p.tiles[1] * p.tiles[2],
                pitch = GROUPS * GROUP_TILES * BLOCK_N;
  for (int e = threadIdx.x; e < SLICES * BLOCK_N; e += THREADS) {
    double total = 0.;
    const float *from = p.partial + box.batch * boxes * pitch + box.tile * BLOCK_N + e % BLOCK_N;
    for (index_t b = e / BLOCK_N; b < boxes; b += SLICES) total += from[b * pitch];
    shared[BLOCK_N + e] = static_cast<float>(total);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < BLOCK_N; c += THREADS) {
    float total = 0.f;
    for (int slice = 0; slice < SLICES; slice++) total += shared[BLOCK_N + slice * BLOCK_N + c];
    shared[c] = 1.f / total;
  }
}

// ---- statistics --------------------------------------------------------------------------------------------
// Take a phase's values, of voxels that exist, into the lane's states: number k of channel i at k * STATES + i * THREADS,
// and after them how many values of a channel there are.
__device__ __forceinline__ void gather(const HaloParams &p, const Box &box, const int (&residue)[3], bool whole,
                                       const Rows &rows, State *own, int first_voxel, int g) {
  bool inside[2 * WARP_M];
  int more = 0;
#pragma unroll
  for (int m = 0; m < 2 * WARP_M; m++) {
    inside[m] = place_of(p, box, first_voxel + m * 8 + g, residue, whole).exists;
    more += inside[m];
  }
  if (more == 0) return;
  State &count = own[GATHER_NUMBERS * STATES];
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    float v[2 * WARP_M];
#pragma unroll
    for (int m = 0; m < 2 * WARP_M; m++) v[m] = rows[m / 2][i / 2][2 * (m % 2) + i % 2];
    gather_more<2 * WARP_M, STATES>(own + i * THREADS, count, State(more), v, inside);
  }
  count += State(more);
}

// The block's states, joined in a fixed order.
__device__ __forceinline__ void store_gathered(const HaloParams &p, const Box &box, const State *states) {
  __syncthreads();
  for (int c = threadIdx.x; c < box.channels; c += THREADS) {
    Gathered total = gathered_nothing();
    for (int lane = c % 8 / 2; lane < THREADS; lane += 4) {
      const State *own = states + lane;
      gather_join<STATES>(total, own + (c / 8 * 2 + c % 2) * THREADS, double(own[GATHER_NUMBERS * STATES]));
    }
    gather_store(total, p.gathered + (box.number * ALL_OUT + box.channel + c) * GATHERED);
  }
}

// -----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_halo(const __grid_constant__ HaloParams p) {
  extern __shared__ __align__(16) float shared[];
  float *x_tile = shared, *softmax = x_tile + TILE_FLOATS;
  State *states = reinterpret_cast<State *>(softmax + SUM_FLOATS + FOLD_FLOATS);
  int *program = reinterpret_cast<int *>(softmax + SUM_FLOATS + FOLD_FLOATS + GATHER_FLOATS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_voxel = warp * 16 * WARP_M;
  const Box box = box_at(p);

  if constexpr (SLICES == 1) load_x(p, box, 0, true, x_tile);
  for (int i = threadIdx.x; i <= p.step_count; i += THREADS) program[i] = p.taps[i].shared;
  if constexpr (SOFTMAX == SOFTMAX_SCALE) load_factors(p, box, softmax);
  if constexpr (SLICES == 1)
    finish_x(x_tile);
  else
    __syncthreads();  // a phase without taps loads nothing and waits for nobody

  int voxel[WARP_M][2];  // this lane's voxels in the x tile
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = first_voxel + m * 16 + h * 8;  // eight voxels of one line; idle ones read the last line
      const int v = TILE_M == ROWS_M || row < TILE_M ? row : TILE_M - 8;
      voxel[m][h] = (v / (TILE_X * TILE_Y) * (STEP_Z * ROWS_Y) + v / TILE_X % TILE_Y * STEP_Y) * (STEP_X * PITCH_X)
                    + v % TILE_X + g;
    }
  const float *a_lane = x_tile + t * PITCH_C;
  const float *b_lane = p.w + box.tile * p.tile_weights + lane * 4;
  Rows rows[PHASES];  // what is stored
#if FOLD
  Rows acc;
  float *fold = softmax + SUM_FLOATS + threadIdx.x;  // where FOLD_SHARED: value i of this thread at i * THREADS
#else
  Rows &acc = rows[PHASES - 1];  // the last phase stays where it is made
#endif
  if constexpr (GATHER) states[GATHER_NUMBERS * STATES + threadIdx.x] = 0;
  float sums[2 * NT];
  if constexpr (SOFTMAX == SOFTMAX_SUM) {
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) sums[i] = 0.f;
  }

#pragma unroll 1
  for (int q = 0; q < p.pass_count; q++) {
    const Pass &pass = p.passes[q];
#pragma unroll 1
    for (int f = 0; f < PHASES; f++) {
      const int first = pass.first[f], steps = pass.steps[f];
      const bool keeps = KEEP_X && SLICES > 1 && q + f == 0;
      clear(acc);
#pragma unroll 1
      for (int slice = 0; slice < (steps > 0 || keeps ? SLICES : 0); slice++) {
        if constexpr (SLICES > 1) {
          __syncthreads();  // all warps are done with the slice before
          load_x(p, box, slice * SLICE_CHANNELS, keeps, x_tile);
          finish_x(x_tile);
        }
        const index_t k8 = (index_t(slice) * p.step_count + first) * SLICE_K8;
        accumulate(a_lane, voxel, program + first, steps, b_lane + k8 * SLAB, lane, acc);
      }
      complete(p, box, first, steps, acc, first_voxel, g, t);
      run_chain(p, box, pass.residue[f], false, acc, first_voxel, g, t,
                [&](Team &team) { first_chain(p.operand, team); });
      if constexpr (SOFTMAX != SOFTMAX_NONE) exponentials(p, acc);
      if constexpr (SOFTMAX == SOFTMAX_SUM)
        add_exponentials(p, box, pass.residue[f], acc, sums, first_voxel, g);
      if constexpr (SOFTMAX == SOFTMAX_SCALE) {
#pragma unroll
        for (int m = 0; m < WARP_M; m++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] *= softmax[n * 8 + 2 * t + (i & 1)];
        run_chain(p, box, pass.residue[f], false, acc, first_voxel, g, t,
                  [&](Team &team) { second_chain(p.operand, team); });
      }
#if FOLD
#pragma unroll
      for (int m = 0; m < WARP_M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float &total = FOLD_SHARED ? fold[((m * NT + n) * 4 + i) * THREADS] : rows[0][m][n][i];
            total = q == 0 ? fold_lift(acc[m][n][i]) : fold_combine(total, fold_lift(acc[m][n][i]));
          }
#elif GATHER
      gather(p, box, pass.residue[f], false, acc, states + threadIdx.x, first_voxel, g);
#elif CHANNEL_REDUCE && SOFTMAX != SOFTMAX_SUM
      store_channels(p, box, pass.residue[f], acc, first_voxel, g, t);
#endif
#if PAIRED && STORE && !CHANNEL_REDUCE && SOFTMAX != SOFTMAX_SUM
      if (f == 0) {
#pragma unroll
        for (int m = 0; m < WARP_M; m++)
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) rows[0][m][n][i] = acc[m][n][i];
      }
#endif
    }
#if !FOLD && !CHANNEL_REDUCE && STORE && SOFTMAX != SOFTMAX_SUM
    store(p, box, pass, rows, first_voxel, g, t);
#endif
  }
#if FOLD
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &total = rows[0][m][n][i];
        if (FOLD_SHARED) total = fold[((m * NT + n) * 4 + i) * THREADS];
        total = fold_finish(total, 1.f / float(p.pass_count));
      }
  run_chain(p, box, p.passes[0].residue[0], true, rows[0], first_voxel, g, t,
            [&](Team &team) { second_chain(p.operand, team); });
#if POOL_X * POOL_Y * POOL_Z > 1
  store_pooled(p, box, rows[0], shared, first_voxel, g, t);
#elif CHANNEL_REDUCE
  store_channels(p, box, p.passes[0].residue[0], rows[0], first_voxel, g, t);
#else
#if GATHER
  gather(p, box, p.passes[0].residue[0], true, rows[0], states + threadIdx.x, first_voxel, g);
#endif
#if STORE
  store(p, box, p.passes[0], rows, first_voxel, g, t);
#endif
#endif
#elif SOFTMAX == SOFTMAX_SUM
  store_sums(p, box, sums, softmax, warp, g, t);
#endif
#if GATHER
  store_gathered(p, box, states);
#endif
}
