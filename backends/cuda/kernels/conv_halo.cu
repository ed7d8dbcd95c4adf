// Transposed 3-D convolution with what follows it, on tensor cores (sm_80 and newer): the resident halo.
//   y[n,o,z,y,x] = finish( bias[o] + sum over taps k and channels c of x[n,c, m + offset(k)] * w[c,o,k] ),
//   z = SD*m + r: outputs fall into stride^3 phases by their residues r, and within a phase every tap reads x at
//   a constant offset.
//
// Layouts
//   x  (N, IC, ID, IH, IW) float
//   y  (N, OC, OD, OH, OW) float, or the pooled or summed shape
//   w  packed in the order in which it is streamed: [channel tile][step][chunk of BLOCK_K channels][phase group]
//      [k / 8][pair of 8 columns][lane][4]; the four values of a lane are its fragments of both columns (mma_tf32)
//
// GEMM of one phase: GEMM_M = voxels m, GEMM_N = OC, GEMM_K = taps * IC, by the instruction m16n8k8.
//   A[m][(k, c)] = x tile[c][m + offset(k)], B[(k, c)][o] = w[c,o,k].
//
// A block owns a box of TILE_Z x TILE_Y x TILE_X voxels m for ALL phases, and BLOCK_N channels. The box of x with
// its halo is loaded to shared memory once, for all IC channels; every tap of every phase is a shifted read of
// it, and only the weights stream, through a ring of STAGES buffers. PHASE_GROUPS = 2 gives each of two phases
// that differ in W alone its own warps, so that both meet in shared memory and output lines are written whole.
// A warp owns 16*WARP_M voxels x BLOCK_N channels; a quad of lanes owns all channels of a voxel. The host passes
// a flat program: for every step one shared-memory offset per phase group (-1: that phase has no such tap).
// Stride, kernel size and dilation appear nowhere in the main loop.
//
// Precision. USE_3XTF32: x and w are split in two TF32 parts each, three products are added, and the sums of each
// BLOCK_K channels are added to the result by ordinary additions, since the tensor core cuts its own sums:
// float32 accuracy. Otherwise one TF32 product. A sum that is not finite is made again by fused multiply-add with
// only the inputs that exist: splitting turns inf into NaN, and so does 0 * inf where 0 stands for an input
// outside the tensor.
//
// Epilogue, in registers: FIRST_CHAIN on each voxel's channels; FOLD over all phases (mean or max) or not;
// SECOND_CHAIN; then one of
//   - store, or CHANNEL_SUM: the sum over channels
//   - maxima of POOL_Z x POOL_Y x POOL_X boxes of folded voxels, summed over channels where CHANNEL_SUM
//   - the two passes of a softmax over space whose argument a clamp bounds: SOFTMAX_SUM adds up exp(v - bound) of
//     its voxels per channel; SOFTMAX_SCALE, a second launch, makes the convolution again, which is cheaper than
//     storing and reading exponentials, and divides.
//
// Shared memory, in floats: x tile [IC][z][y][x] with a channel pitch of 8 mod 32, so that a fragment read
// (4 channels x 8 voxels) meets 32 banks; STAGES weight buffers, read 16 bytes a lane; staging of 8 channels; the
// program; softmax sums.
// Registers: WARP_M*BLOCK_N/2 results, as many again for the sums of USE_3XTF32 and for FOLD.
// Barriers: one per BLOCK_K channels of a step, which also completes the x tile, and two per 8 channels stored.
//
// FLOPs 2*M*N*K (3 times that with USE_3XTF32) on the tensor core; ideal bytes x + w + y. A block reads each input
// 1 + halo times, and all weights, from the L2 cache: TILE voxels * taps multiply-adds a loaded weight.
//
// The host guarantees: groups = 1; the tile's constraints (tiles.py); x 16-byte aligned where USE_VECTOR_X;
// y 8-byte aligned and OW even where pair_stores; fewer than 2^31 blocks; layer norm and sums over channels only
// where OC <= BLOCK_N; POOL boxes do not cross tiles.
#include "chain.cuh"

#define FOLD_NONE 0
#define FOLD_MEAN 1
#define FOLD_MAX 2
#define SOFTMAX_NONE 0
#define SOFTMAX_SUM 1
#define SOFTMAX_SCALE 2

constexpr int NT = BLOCK_N / 8;                      // column blocks of a warp
constexpr int TILE_M = TILE_X * TILE_Y * TILE_Z;     // voxels of a block
constexpr int GROUP_WARPS = TILE_M / (16 * WARP_M);  // warps of a phase group
constexpr int WARPS = GROUP_WARPS * PHASE_GROUPS;
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNKS = (IN_CHANNELS + BLOCK_K - 1) / BLOCK_K;
constexpr int PAD_X = (LOW_X + 3) / 4 * 4;  // zone left of a row, which keeps it 16-byte aligned
// The right halo of a row may lie in the left zone of the next one.
constexpr int PITCH_X = HIGH_X + LOW_X <= PAD_X ? PAD_X + TILE_X : (PAD_X + TILE_X + HIGH_X + 3) / 4 * 4;
constexpr int ROWS_Y = TILE_Y + LOW_Y + HIGH_Y, ROWS_Z = TILE_Z + LOW_Z + HIGH_Z;
constexpr int PITCH_C = (PITCH_X * ROWS_Y * ROWS_Z + HIGH_X + 23) / 32 * 32 + 8;
constexpr int X_FLOATS = CHUNKS * BLOCK_K * PITCH_C;
constexpr int SLAB = BLOCK_K * BLOCK_N;           // weights of one tap and chunk
constexpr int RING_FLOATS = PHASE_GROUPS * SLAB;  // one buffer of the ring
constexpr int STAGE_VOXELS = TILE_M % 32 == 16 ? TILE_M : TILE_M + 16;
constexpr int STAGE_PITCH = (PHASE_GROUPS * STAGE_VOXELS + 27) / 32 * 32 + 4;
constexpr int POOL_VOLUME = POOL_X * POOL_Y * POOL_Z;
static_assert(TILE_M % (16 * WARP_M) == 0 && TILE_X % 8 == 0 && BLOCK_N % 16 == 0 && BLOCK_K % 8 == 0
                  && THREADS <= 1024,
              "tile");
static_assert(PITCH_C % 32 == 8 && PITCH_C >= PITCH_X * ROWS_Y * ROWS_Z + HIGH_X, "pitch");

struct Tap {            // one step of one phase group
  int shared;           // offset of its x in the tile, or -1: no such tap
  int offset[3];        // from m to the input position
  int weights, stride;  // first slab within the channel tile's weights, and slabs from chunk to chunk
};

struct Pass {  // one phase group's worth of phases
  int residue[2][3];
  int first, steps;  // rows of the program
};

struct HaloParams {
  const float *x, *w;
  const STORAGE *bias;
  float *y, *partial;  // partial: softmax sums, [batch][tile of the box][padded OC]
  const Pass *passes;
  const Tap *taps;       // [step][phase group]
  index_t tile_weights;  // floats of one channel tile
  int pass_count, step_count, out_channels, channel_tiles;
  int in[3], out[3], limit[3], stride[3],
      tiles[3];  // out: as stored; limit: outputs of the convolution, or folded voxels
  int pair_stores;
  float softmax_bound;
  Stage stages[2 * MAX_STAGES];
};
CHECK_PARAMS(HaloParams);

using Accumulators = float[WARP_M][NT][4];

struct Box {  // what this block owns
  index_t batch;
  int channel;     // first output channel
  int m[3];        // first voxel
  index_t number;  // among the boxes of all batches
};

__device__ __forceinline__ Box box_at(const HaloParams &p) {
  unsigned rest = blockIdx.x;
  Box box;
  box.channel = static_cast<int>(rest % p.channel_tiles) * BLOCK_N;
  rest /= p.channel_tiles;
  box.number = rest;
  box.m[2] = static_cast<int>(rest % p.tiles[2]) * TILE_X;
  rest /= p.tiles[2];
  box.m[1] = static_cast<int>(rest % p.tiles[1]) * TILE_Y;
  rest /= p.tiles[1];
  box.m[0] = static_cast<int>(rest % p.tiles[0]) * TILE_Z;
  box.batch = rest / p.tiles[0];
  return box;
}

__device__ __forceinline__ void clear(Accumulators &acc) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;
}

// ---- x and weights into shared memory ---------------------------------------------------------------------
__device__ __forceinline__ void load_x(const HaloParams &p, const Box &box, float *tile) {
  constexpr int VECTORS = USE_VECTOR_X ? TILE_X / 4 : TILE_X, PIECES = VECTORS + LOW_X + HIGH_X;
  const index_t plane = index_t(p.in[0]) * p.in[1] * p.in[2];
  for (int i = threadIdx.x; i < CHUNKS * BLOCK_K * ROWS_Z * ROWS_Y * PIECES; i += THREADS) {
    const int piece = i % PIECES, y = i / PIECES % ROWS_Y, z = i / (PIECES * ROWS_Y) % ROWS_Z,
              c = i / (PIECES * ROWS_Y * ROWS_Z);
    const int iz = box.m[0] + z - LOW_Z, iy = box.m[1] + y - LOW_Y;
    const bool row = unsigned(iz) < unsigned(p.in[0]) && unsigned(iy) < unsigned(p.in[1]) && c < IN_CHANNELS;
    const float *from = p.x + (box.batch * IN_CHANNELS + c) * plane + (index_t(iz) * p.in[1] + iy) * p.in[2];
    float *to = tile + c * PITCH_C + (z * ROWS_Y + y) * PITCH_X + PAD_X;
    if (USE_VECTOR_X && piece < VECTORS) {
      const int x = box.m[2] + 4 * piece;
      const bool inside = row && x < p.in[2];
      copy_async<16>(to + 4 * piece, inside ? from + x : p.x, inside);
    } else {
      const int dx = piece < VECTORS           ? piece
                     : piece < VECTORS + LOW_X ? piece - VECTORS - LOW_X
                                               : TILE_X + piece - VECTORS - LOW_X;
      const int x = box.m[2] + dx;
      const bool inside = row && unsigned(x) < unsigned(p.in[2]);
      copy_async<4>(to + dx, inside ? from + x : p.x, inside);
    }
  }
}

__device__ __forceinline__ void round_x(float *tile) {
  for (int i = threadIdx.x; i < X_FLOATS; i += THREADS) tile[i] = __uint_as_float(round_tf32(tile[i]));
}

struct WeightStream {
  const float *from;
  const int *step, *end;  // the program in shared memory
  int chunk;
  __device__ __forceinline__ void next(float *buffer) {
    if (step < end) {
#pragma unroll
      for (int f = 0; f < PHASE_GROUPS; f++) {
        if (step[f] < 0) continue;
        for (int e = threadIdx.x * 4; e < SLAB; e += THREADS * 4)
          copy_async<16>(buffer + f * SLAB + e, from + e);
        from += SLAB;
      }
      if (++chunk == CHUNKS) {
        chunk = 0;
        step += PHASE_GROUPS;
      }
    }
    copy_commit();
  }
};

// ---- products ---------------------------------------------------------------------------------------------
// One tap, BLOCK_K channels: a_tile points at this lane's channel of the tap's x, voxel[m][h] at its voxels within.
__device__ __forceinline__ void multiply(const float *a_tile, const int (&voxel)[WARP_M][2],
                                         const float *b_slab, Accumulators &result) {
#if USE_3XTF32
  Accumulators acc;
  clear(acc);
#else
  Accumulators &acc = result;
#endif
#pragma unroll
  for (int kk = 0; kk < BLOCK_K / 8; kk++) {
    uint32_t a[WARP_M][4];
#if USE_3XTF32
    uint32_t a_small[WARP_M][4];
#endif
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {  // bit 0: voxel + 8, bit 1: channel + 4
        const float value = a_tile[(kk * 8 + (i >> 1) * 4) * PITCH_C + voxel[m][i & 1]];
#if USE_3XTF32
        split_tf32(value, a[m][i], a_small[m][i]);
#else
        a[m][i] = __float_as_uint(value);
#endif
      }
#pragma unroll
    for (int pair = 0; pair < NT / 2; pair++) {
      const float4 v = *reinterpret_cast<const float4 *>(b_slab + (kk * (NT / 2) + pair) * 128);
#if USE_3XTF32
      uint32_t b[2][2], b_small[2][2];
      split_tf32(v.x, b[0][0], b_small[0][0]);
      split_tf32(v.y, b[0][1], b_small[0][1]);
      split_tf32(v.z, b[1][0], b_small[1][0]);
      split_tf32(v.w, b[1][1], b_small[1][1]);
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][2 * pair + e], a_small[m], b[e]);
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][2 * pair + e], a[m], b_small[e]);
#else
      const uint32_t b[2][2] = {{__float_as_uint(v.x), __float_as_uint(v.y)},
                                {__float_as_uint(v.z), __float_as_uint(v.w)}};
#endif
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int m = 0; m < WARP_M; m++) mma_tf32(acc[m][2 * pair + e], a[m], b[e]);
    }
  }
#if USE_3XTF32
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) result[m][n][i] += acc[m][n][i];
#endif
}

// The sum of voxel `m` of the box and channel n of the channel tile, with the inputs that exist.
__device__ __noinline__ float exact_sum(const HaloParams &p, const Box &box, const Pass &pass, int group,
                                        int m, int n) {
  const int at[3] = {box.m[0] + m / (TILE_X * TILE_Y), box.m[1] + m / TILE_X % TILE_Y, box.m[2] + m % TILE_X};
  const index_t plane = index_t(p.in[0]) * p.in[1] * p.in[2];
  const float *w =
      p.w + box.channel / BLOCK_N * p.tile_weights + (n / 16 * 32 + n % 8 * 4) * 4 + n / 8 % 2 * 2;
  float total = 0.f;
  for (int s = pass.first; s < pass.first + pass.steps; s++) {
    const Tap tap = p.taps[s * PHASE_GROUPS + group];
    const int z = at[0] + tap.offset[0], y = at[1] + tap.offset[1], x = at[2] + tap.offset[2];
    if (tap.shared < 0 || unsigned(z) >= unsigned(p.in[0]) || unsigned(y) >= unsigned(p.in[1])
        || unsigned(x) >= unsigned(p.in[2]))
      continue;
    const float *from = p.x + box.batch * IN_CHANNELS * plane + (index_t(z) * p.in[1] + y) * p.in[2] + x;
    for (int c = 0; c < IN_CHANNELS; c++) {
      const index_t slab = tap.weights + index_t(c / BLOCK_K) * tap.stride;
      const int k = c % BLOCK_K;
      total = fmaf(from[c * plane], w[slab * SLAB + k / 8 * (NT / 2) * 128 + k % 4 * 4 + k / 4 % 2], total);
    }
  }
  return total;
}

// ---- what follows, on registers ---------------------------------------------------------------------------
// A lane's values of one voxel: v[i] belongs to channel 8*(i/2) + 2*t + i%2 of the channel tile.
__device__ __forceinline__ int channel_of(int i, int t) {
  return (i >> 1) * 8 + 2 * t + (i & 1);
}

__device__ __forceinline__ float sum_over_quad(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

__device__ __forceinline__ void layer_norm(float (&v)[2 * NT], const Stage &stage, int t, int channels,
                                           int first_channel) {
  float total = 0.f, squares = 0.f;
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) total += channel_of(i, t) < channels ? v[i] : 0.f;
  const float mean = sum_over_quad(total) / channels;
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    v[i] -= mean;
    const float centred = channel_of(i, t) < channels ? v[i] : 0.f;
    squares = fmaf(centred, centred, squares);
  }
  const float factor = 1.f / sqrtf(sum_over_quad(squares) / channels + float(stage.a));
#pragma unroll
  for (int i = 0; i < 2 * NT; i++) {
    v[i] *= factor;
    const int c = channel_of(i, t);
    if (stage.a_channels && c < channels) v[i] *= stage.a_channels[first_channel + c];
    if (stage.b_channels && c < channels) v[i] += stage.b_channels[first_channel + c];
  }
}

template <chain_t CHAIN>
__device__ __forceinline__ void run_chain(const Stage *stages, Accumulators &acc, int t, int channels,
                                          int first_channel) {
  if constexpr (CHAIN != 0) {
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float v[2 * NT];
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) v[i] = acc[m][i / 2][2 * h + i % 2];
#pragma unroll
        for (int s = 0; s < MAX_STAGES; s++) {
          const int operation = chain_operation(CHAIN, s);
          if (operation == OP_END) break;
          if (operation == OP_LAYER_NORM) {
            layer_norm(v, stages[s], t, channels, first_channel);
          } else {
#pragma unroll
            for (int i = 0; i < 2 * NT; i++) {
              const int c = channel_of(i, t) < channels ? first_channel + channel_of(i, t) : first_channel;
              v[i] = pointwise(operation, v[i], stage_a(stages[s], c), stage_b(stages[s], c));
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) acc[m][i / 2][2 * h + i % 2] = v[i];
      }
  }
}

// ---- results to memory ------------------------------------------------------------------------------------
// Column block n of this warp's results into staging: [8 channels][phase group][voxel].
__device__ __forceinline__ void stage(float *staging, const Accumulators &acc, int n, int first_voxel,
                                      int group, int g, int t) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      staging[(2 * t + (i & 1)) * STAGE_PITCH + group * STAGE_VOXELS + first_voxel + m * 16 + (i >> 1) * 8
              + g] = acc[m][n][i];
}

struct Place {  // an output position: of voxel m in a phase, or of a folded voxel
  int at[3];
  bool inside;
};

__device__ __forceinline__ Place place_of(const HaloParams &p, const Box &box, int voxel,
                                          const int (&residue)[3]) {
  const int m[3] = {box.m[0] + voxel / (TILE_X * TILE_Y), box.m[1] + voxel / TILE_X % TILE_Y,
                    box.m[2] + voxel % TILE_X};
  Place place;
  place.inside = true;
#pragma unroll
  for (int axis = 0; axis < 3; axis++) {
    place.at[axis] = FOLD == FOLD_NONE ? m[axis] * p.stride[axis] + residue[axis] : m[axis];
    place.inside = place.inside && place.at[axis] < p.limit[axis];
  }
  return place;
}

__device__ __forceinline__ index_t element(const HaloParams &p, const int (&at)[3]) {
  return (index_t(at[0]) * p.out[1] + at[1]) * p.out[2] + at[2];
}

// Store all channels; a thread keeps its voxels, so that addresses are made once.
__device__ __forceinline__ void store(const HaloParams &p, const Box &box, const Pass &pass,
                                      const Accumulators &acc, float *staging, int channels, int first_voxel,
                                      int group, int g, int t) {
  constexpr int EACH = (TILE_M + THREADS - 1) / THREADS;
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
  float *y[EACH][PHASE_GROUPS];
  bool inside[EACH][PHASE_GROUPS];
#pragma unroll
  for (int j = 0; j < EACH; j++)
#pragma unroll
    for (int f = 0; f < PHASE_GROUPS; f++) {
      const int voxel = threadIdx.x + j * THREADS;
      const Place place = place_of(p, box, voxel, pass.residue[f]);
      inside[j][f] = place.inside && voxel < TILE_M;
      y[j][f] = p.y + (box.batch * p.out_channels + box.channel) * plane + element(p, place.at);
    }
#pragma unroll
  for (int n = 0; n < NT; n++) {
    __syncthreads();
    stage(staging, acc, n, first_voxel, group, g, t);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; c++) {
      if (n * 8 + c >= channels) break;
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const float *values = staging + c * STAGE_PITCH + threadIdx.x + j * THREADS;
        if (PHASE_GROUPS == 2 && p.pair_stores) {
          if (inside[j][0])
            *reinterpret_cast<float2 *>(y[j][0]) = make_float2(values[0], values[STAGE_VOXELS]);
        } else {
#pragma unroll
          for (int f = 0; f < PHASE_GROUPS; f++)
            if (inside[j][f]) *y[j][f] = values[f * STAGE_VOXELS];
        }
#pragma unroll
        for (int f = 0; f < PHASE_GROUPS; f++) y[j][f] += plane;
      }
    }
  }
}

// Sum over channels, from registers.
__device__ __forceinline__ void store_channel_sum(const HaloParams &p, const Box &box, const Pass &pass,
                                                  const Accumulators &acc, int channels, int first_voxel,
                                                  int group, int g, int t) {
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++)
        total += channel_of(i, t) < channels ? acc[m][i / 2][2 * h + i % 2] : 0.f;
      total = sum_over_quad(total);
      const Place place = place_of(p, box, first_voxel + m * 16 + h * 8 + g, pass.residue[group]);
      if (place.inside && t == 0) p.y[box.batch * plane + element(p, place.at)] = total;
    }
}

// Maxima of POOL boxes of folded voxels; summed over channels where CHANNEL_SUM.
__device__ __forceinline__ void store_pooled(const HaloParams &p, const Box &box, const Accumulators &acc,
                                             float *staging, int channels, int first_voxel, int g, int t) {
  constexpr int PX = TILE_X / POOL_X, PY = TILE_Y / POOL_Y, PZ = TILE_Z / POOL_Z, OUTPUTS = PX * PY * PZ;
  constexpr int EACH = (8 * OUTPUTS + THREADS - 1) / THREADS;
  const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
  float total[EACH];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    __syncthreads();
    stage(staging, acc, n, first_voxel, 0, g, t);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int item = threadIdx.x + j * THREADS, c = item % 8, o = item / 8;
      const int at[3] = {box.m[0] / POOL_Z + o / (PX * PY), box.m[1] / POOL_Y + o / PX % PY,
                         box.m[2] / POOL_X + o % PX};
      const bool inside =
          o < OUTPUTS && at[0] < p.out[0] && at[1] < p.out[1] && at[2] < p.out[2] && n * 8 + c < channels;
      float best = 0.f;
      if (inside) {
        const float *corner = staging + c * STAGE_PITCH
                              + (o / (PX * PY) * POOL_Z * TILE_Y + o / PX % PY * POOL_Y) * TILE_X
                              + o % PX * POOL_X;
        best = corner[0];
#pragma unroll
        for (int e = 1; e < POOL_VOLUME; e++)
          best = max_nan(
              best, corner[(e / (POOL_X * POOL_Y) * TILE_Y + e / POOL_X % POOL_Y) * TILE_X + e % POOL_X]);
        if (!CHANNEL_SUM)
          p.y[(box.batch * p.out_channels + box.channel + n * 8 + c) * plane + element(p, at)] = best;
      }
      total[j] = n == 0 ? best : total[j] + best;
    }
  }
  if constexpr (CHANNEL_SUM) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      float sum = total[j];  // eight lanes hold the eight channels of a column block
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      sum += __shfl_xor_sync(~0u, sum, 4);
      const int item = threadIdx.x + j * THREADS, o = item / 8;
      const int at[3] = {box.m[0] / POOL_Z + o / (PX * PY), box.m[1] / POOL_Y + o / PX % PY,
                         box.m[2] / POOL_X + o % PX};
      if (item % 8 == 0 && o < OUTPUTS && at[0] < p.out[0] && at[1] < p.out[1] && at[2] < p.out[2])
        p.y[box.batch * plane + element(p, at)] = sum;
    }
  }
}

// ---- softmax over space -----------------------------------------------------------------------------------
__device__ __forceinline__ void exponentials(const HaloParams &p, Accumulators &acc) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = expf(acc[m][n][i] - p.softmax_bound);
}

// Add this phase's exponentials, of voxels that exist, to the lane's sums over its voxels.
__device__ __forceinline__ void add_exponentials(const HaloParams &p, const Box &box, const Pass &pass,
                                                 const Accumulators &acc, float (&sums)[2 * NT],
                                                 int first_voxel, int group, int g) {
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool inside = place_of(p, box, first_voxel + m * 16 + h * 8 + g, pass.residue[group]).inside;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) sums[i] += inside ? acc[m][i / 2][2 * h + i % 2] : 0.f;
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
    p.partial[box.number * p.channel_tiles * BLOCK_N + box.channel + c] = total;
  }
}

// 1 / (sum over all boxes of this batch item) of each channel, into shared[0 .. BLOCK_N). shared: (THREADS +
// BLOCK_N) floats.
__device__ __forceinline__ void load_factors(const HaloParams &p, const Box &box, float *shared) {
  constexpr int SLICES = THREADS / BLOCK_N > 0 ? THREADS / BLOCK_N : 1;
  const index_t boxes = index_t(p.tiles[0]) * p.tiles[1] * p.tiles[2],
                pitch = index_t(p.channel_tiles) * BLOCK_N;
  for (int e = threadIdx.x; e < SLICES * BLOCK_N; e += THREADS) {
    double total = 0.;
    const float *from = p.partial + box.batch * boxes * pitch + box.channel + e % BLOCK_N;
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

// -----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) conv_halo(const HaloParams p) {
  extern __shared__ __align__(16) float shared[];
  float *x_tile = shared, *ring = x_tile + X_FLOATS, *staging = ring + STAGES * RING_FLOATS,
        *softmax = staging + 8 * STAGE_PITCH;
  int *program =
      reinterpret_cast<int *>(softmax + (SOFTMAX == SOFTMAX_NONE ? 0 : THREADS + BLOCK_N + WARPS * BLOCK_N));
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int group = warp / GROUP_WARPS, first_voxel = warp % GROUP_WARPS * 16 * WARP_M;
  const Box box = box_at(p);
  const int channels = p.out_channels - box.channel < BLOCK_N ? p.out_channels - box.channel : BLOCK_N;

  load_x(p, box, x_tile);
  copy_commit();
  for (int i = threadIdx.x; i < p.step_count * PHASE_GROUPS; i += THREADS) program[i] = p.taps[i].shared;
  if constexpr (SOFTMAX == SOFTMAX_SCALE) load_factors(p, box, softmax);
  __syncthreads();
  WeightStream weights{p.w + box.channel / BLOCK_N * p.tile_weights, program,
                       program + p.step_count * PHASE_GROUPS, 0};
  for (int i = 0; i < STAGES - 1; i++) weights.next(ring + i * RING_FLOATS);
#if !USE_3XTF32
  copy_wait<STAGES - 1>();
  __syncthreads();
  round_x(x_tile);
#endif

  int voxel[WARP_M][2];  // this lane's voxels in the x tile
#pragma unroll
  for (int m = 0; m < WARP_M; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int v = first_voxel + m * 16 + h * 8;  // eight voxels of one line
      voxel[m][h] = (v / (TILE_X * TILE_Y) * ROWS_Y + v / TILE_X % TILE_Y) * PITCH_X + v % TILE_X + g;
    }
  const float *a_lane = x_tile + t * PITCH_C, *b_lane = ring + group * SLAB + lane * 4;
  int use = 0, fill = STAGES - 1;  // buffers of the ring
  const int *step = program + group;
  Accumulators acc;
#if FOLD != FOLD_NONE
  Accumulators folded;
#endif
  float sums[2 * NT];
  if constexpr (SOFTMAX == SOFTMAX_SUM) {
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) sums[i] = 0.f;
  }

#pragma unroll 1
  for (int q = 0; q < p.pass_count; q++) {
    const Pass &pass = p.passes[q];
    clear(acc);
#pragma unroll 1
    for (int s = 0; s < pass.steps; s++, step += PHASE_GROUPS) {
      const int tap = *step;
      const float *a_tap = a_lane + tap;
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        weights.next(ring + fill * RING_FLOATS);
        if (tap >= 0) multiply(a_tap, voxel, b_lane + use * RING_FLOATS, acc);
        a_tap += BLOCK_K * PITCH_C;
        use = use + 1 == STAGES ? 0 : use + 1;
        fill = fill + 1 == STAGES ? 0 : fill + 1;
      }
    }
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int c = n * 8 + 2 * t + (i & 1);
          float &value = acc[m][n][i];
          if (!is_finite(value) && c < channels)
            value = exact_sum(p, box, pass, group, first_voxel + m * 16 + (i >> 1) * 8 + g, c);
          if (p.bias && c < channels) value += p.bias[box.channel + c];
        }
    run_chain<FIRST_CHAIN>(p.stages, acc, t, channels, box.channel);
#if FOLD != FOLD_NONE
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float &total = folded[m][n][i];
          total = q == 0             ? acc[m][n][i]
                  : FOLD == FOLD_MAX ? max_nan(total, acc[m][n][i])
                                     : total + acc[m][n][i];
        }
#elif SOFTMAX == SOFTMAX_SUM
    exponentials(p, acc);
    add_exponentials(p, box, pass, acc, sums, first_voxel, group, g);
#else
    if constexpr (SOFTMAX == SOFTMAX_SCALE) {
      exponentials(p, acc);
#pragma unroll
      for (int m = 0; m < WARP_M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) acc[m][n][i] *= softmax[n * 8 + 2 * t + (i & 1)];
      run_chain<SECOND_CHAIN>(p.stages + MAX_STAGES, acc, t, channels, box.channel);
    }
    if constexpr (CHANNEL_SUM)
      store_channel_sum(p, box, pass, acc, channels, first_voxel, group, g, t);
    else
      store(p, box, pass, acc, staging, channels, first_voxel, group, g, t);
#endif
  }
#if FOLD != FOLD_NONE
  if constexpr (FOLD == FOLD_MEAN) {
#pragma unroll
    for (int m = 0; m < WARP_M; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) folded[m][n][i] /= float(p.pass_count);
  }
  run_chain<SECOND_CHAIN>(p.stages + MAX_STAGES, folded, t, channels, box.channel);
  if constexpr (POOL_VOLUME > 1)
    store_pooled(p, box, folded, staging, channels, first_voxel, g, t);
  else if constexpr (CHANNEL_SUM)
    store_channel_sum(p, box, p.passes[0], folded, channels, first_voxel, 0, g, t);
  else
    store(p, box, p.passes[0], folded, staging, channels, first_voxel, 0, g, t);
#elif SOFTMAX == SOFTMAX_SUM
  store_sums(p, box, sums, softmax + THREADS + BLOCK_N, warp, g, t);
#endif
}
