// Transposed 3-D convolution of any geometry, with what follows it, by fused multiply-add.
//   y[n,o,z,y,x] = finish( bias[o] + sum over taps k and channels c of the group of
//                          x[n,c, (z*TD+PD-kd*LD)/SD, (y*TH+PH-kh*LH)/SH, (x*TW+PW-kw*LW)/SW] * w[c,o,k] )
//   where T is the stride of an ordinary convolution, whose S is 1, and 1 in a transposed one, and
//   where only taps with exact divisions and inputs inside the tensor count. Outputs fall into stride^3 phases by
//   their residues r: z = SD*m + r. Within a phase every tap has a constant offset, so that a phase is a dense
//   convolution over m and no zero is multiplied.
//
// Layouts
//   x  (N, IC, ID, IH, IW) INPUT
//   w  packed (groups, terms, padded OC/groups) COMPUTE; a *term* is a pair of tap and channel, ordered by phase
//   y  (N, OC, OD, OH, OW) OUTPUT, or the pooled or summed shape
//
// GEMM of one phase and group: GEMM_M = N*MD*MH*MW voxels m, GEMM_N = OC/groups, GEMM_K = the phase's terms.
//   A[m][k] = x[voxel(m) + terms[k].delta], 0 outside; B[k][n] = w[group][k][n].
//
// A block owns BLOCK_M voxels x BLOCK_N channels of one phase, or of all phases where pooling folds them: it then
// makes them one after another. A thread owns THREAD_M = 4 consecutive voxels x THREAD_N consecutive channels.
// Results go through shared memory, where a thread owns one voxel and every SLICES-th channel; there run
//   GATHER: statistics of a tile's values, for each channel (gather.cuh); a tile's voxels are of one batch item then
//   first chain (per voxel and phase), fold over the phases, second chain, channel reduction and last chain, store.
// Layer norm and the channel reduction need all channels of a voxel: groups = 1 and OC <= BLOCK_N.
// A sum that is not finite is made again term by term with only the inputs that exist, since 0 * inf, where 0
// stands for an input outside the tensor, is NaN.
//
// Shared memory, in COMPUTE: A [BLOCK_K][BLOCK_M], B [BLOCK_K][BLOCK_N], results [BLOCK_N][BLOCK_M], the same again
// where USE_FOLD, and one value a thread for sums over channels. Registers: 4*THREAD_N sums. Barriers: two per
// BLOCK_K terms, and two for each reduction of channels.
//
// FLOPs 2*M*N*K of each phase; ideal bytes x + w + y. Intensity of a block: BLOCK_M*BLOCK_N / (BLOCK_M+BLOCK_N)
// multiply-adds a loaded value, from the L2 cache where neighbouring phases and taps meet.
//
// The host guarantees: extents and positions below 2^31; the tile's constraints (tiles.py); y overlaps nothing.
// Generated: first_chain and second_chain, of a team; last_chain; the monoids fold, channel and gather.
#include "chain.cuh"
#include "gather.cuh"

constexpr int THREADS_M = BLOCK_M / THREAD_M;
constexpr int THREADS_N = BLOCK_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int SLICES = THREADS / BLOCK_M;
static_assert(THREADS % BLOCK_M == 0 && BLOCK_M % 32 == 0 && THREAD_M == 4, "tile");

struct Phase {
  int first, count;  // its terms
};

struct Term {
  index_t delta;  // from the voxel's element of channel 0 to the term's, in elements
  int offset[3];  // from m*step to the input position
  int channel;    // within the group
};

struct ConvParams {
  const INPUT *x;
  const COMPUTE *w;
  const STORAGE *bias;
  OUTPUT *y;
  const Phase *phases;  // of the residues that have taps on every axis, by slot (depth, height, width)
  const int *slots;     // residue -> slot, or -1 where it has no tap: depth, then height, then width
  const Term *terms;
  double *gathered;  // [box of a batch item][OC][GATHERED], batch items one after another
  index_t voxels, voxel_tiles, tiles;  // voxels: of all batch items, or of one where statistics are gathered
  index_t phase_count;  // residues of all axes
  int groups, in_channels, out_channels, padded_channels, channel_tiles, term_count;
  int in[3], positions[3], out[3], stride[3], step[3], residues[3], axis_slots[3];
  Operand operand[OPERANDS];
};
CHECK_PARAMS(ConvParams);

struct Voxel {
  bool inside;
  int m[3], base[3];  // base: m*step, an input position
  index_t batch;
  index_t input;  // element (batch, first channel of the group, base)
};

__device__ __forceinline__ Voxel voxel_at(const ConvParams &p, int group, index_t item, index_t m) {
  Voxel v;
  v.inside = m < p.voxels;
  index_t rest = v.inside ? m : 0;
#pragma unroll
  for (int axis = 2; axis >= 0; axis--) {
    v.m[axis] = static_cast<int>(rest % p.positions[axis]);
    v.base[axis] = v.m[axis] * p.step[axis];
    rest /= p.positions[axis];
  }
  v.batch = item + rest;
  const index_t channel = v.batch * p.in_channels * p.groups + index_t(group) * p.in_channels;
  v.input = ((channel * p.in[0] + v.base[0]) * p.in[1] + v.base[1]) * p.in[2] + v.base[2];
  return v;
}

__device__ __forceinline__ bool reads(const ConvParams &p, const Voxel &v, const Term &term) {
  return v.inside && unsigned(v.base[0] + term.offset[0]) < unsigned(p.in[0])
         && unsigned(v.base[1] + term.offset[1]) < unsigned(p.in[1])
         && unsigned(v.base[2] + term.offset[2]) < unsigned(p.in[2]);
}

// Phase `index` and its residues.
__device__ __forceinline__ Phase phase_at(const ConvParams &p, index_t index, int (&residue)[3]) {
  int slot[3], start = p.residues[0] + p.residues[1];
  bool taps = true;
#pragma unroll
  for (int axis = 2; axis >= 0; axis--) {
    residue[axis] = static_cast<int>(index % p.residues[axis]);
    index /= p.residues[axis];
    slot[axis] = p.slots[start + residue[axis]];
    taps = taps && slot[axis] >= 0;
    if (axis > 0) start -= p.residues[axis - 1];
  }
  return taps ? p.phases[(slot[0] * p.axis_slots[1] + slot[1]) * p.axis_slots[2] + slot[2]] : Phase{0, 0};
}

// The sum of one output, term by term, with the terms that exist.
__device__ __forceinline__ COMPUTE exact_sum(const ConvParams &p, const Phase &phase, const Voxel &v,
                                             const COMPUTE *w) {
  COMPUTE total = 0;
#pragma unroll 1
  for (int k = phase.first; k < phase.first + phase.count; k++)
    if (reads(p, v, p.terms[k]))
      total =
          multiply_add(COMPUTE(p.x[v.input + p.terms[k].delta]), w[index_t(k) * p.padded_channels], total);
  return total;
}

// acc[i][j]: voxel 4*tm + i, channel THREAD_N*tn + j.
__device__ __forceinline__ void multiply(const ConvParams &p, const Phase &phase, const Voxel &v,
                                         const COMPUTE *w, COMPUTE *A, COMPUTE *B,
                                         COMPUTE (&acc)[THREAD_M][THREAD_N]) {
  const int tm = threadIdx.x % THREADS_M, tn = threadIdx.x / THREADS_M;
#pragma unroll
  for (int i = 0; i < THREAD_M; i++)
#pragma unroll
    for (int j = 0; j < THREAD_N; j++) acc[i][j] = 0;
  for (int k0 = 0; k0 < phase.count; k0 += BLOCK_K) {
    for (int k = threadIdx.x / BLOCK_M; k < BLOCK_K; k += SLICES) {
      COMPUTE value = 0;
      if (k0 + k < phase.count) {
        const Term term = p.terms[phase.first + k0 + k];
        if (reads(p, v, term)) value = COMPUTE(p.x[v.input + term.delta]);
      }
      A[k * BLOCK_M + threadIdx.x % BLOCK_M] = value;
    }
    for (int e = threadIdx.x; e < BLOCK_K * BLOCK_N; e += THREADS) {
      const int k = e / BLOCK_N;
      B[e] = k0 + k < phase.count ? w[index_t(phase.first + k0 + k) * p.padded_channels + e % BLOCK_N]
                                  : COMPUTE(0);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_K; k++) {
      COMPUTE a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; i++) a[i] = A[k * BLOCK_M + tm * THREAD_M + i];
#pragma unroll
      for (int j = 0; j < THREAD_N; j++) b[j] = B[k * BLOCK_N + tn * THREAD_N + j];
#pragma unroll
      for (int i = 0; i < THREAD_M; i++)
#pragma unroll
        for (int j = 0; j < THREAD_N; j++) acc[i][j] = multiply_add(a[i], b[j], acc[i][j]);
    }
    __syncthreads();
  }
}

// The combination of one value of each of the SLICES threads that share a voxel.
template <class Join>
__device__ __forceinline__ COMPUTE over_slices(COMPUTE value, COMPUTE *partial, Join join) {
  const int voxel = threadIdx.x % BLOCK_M;
  partial[threadIdx.x] = value;
  __syncthreads();
  COMPUTE total = partial[voxel];
#pragma unroll
  for (int slice = 1; slice < SLICES; slice++) total = join(total, partial[slice * BLOCK_M + voxel]);
  __syncthreads();
  return total;
}

__device__ __forceinline__ COMPUTE sum_over_slices(COMPUTE value, COMPUTE *partial) {
  return over_slices(value, partial, [](COMPUTE a, COMPUTE b) { return a + b; });
}

// Where the values of this thread's voxel are in the output; `whole`: its phases are folded.
__device__ __forceinline__ VoxelAt place_at(const ConvParams &p, const Voxel &v, const int (&residue)[3], bool whole) {
  VoxelAt at{v.batch, 0, {}, v.inside};
#pragma unroll
  for (int axis = 0; axis < 3; axis++) {
    const index_t place = whole ? index_t(v.m[axis]) : index_t(v.m[axis]) * p.stride[axis] + residue[axis];
    at.exists = at.exists && (place < p.out[axis] || (USE_FOLD && !whole));
    at.place[axis] = static_cast<int>(place);
  }
  return at;
}

// This thread's channels of its voxel: values[c * BLOCK_M], c = slice, slice + SLICES, ...
struct Team {
  COMPUTE *values;
  int channels, first_channel;
  COMPUTE *partial;
  VoxelAt at;

  template <class Function> __device__ __forceinline__ void each(Function function) {
    for (int c = threadIdx.x / BLOCK_M; c < channels; c += SLICES) {
      at.c = first_channel + c;
      values[c * BLOCK_M] = function(values[c * BLOCK_M], at);
    }
  }

  __device__ __forceinline__ void layer_norm(COMPUTE eps, const void *weight, const void *bias) {
    const int slice = threadIdx.x / BLOCK_M;
    const STORAGE *factors = static_cast<const STORAGE *>(weight), *terms = static_cast<const STORAGE *>(bias);
    const COMPUTE shift = values[0];
    COMPUTE total = 0, factor = 1;
    KeptSum rest, squares;
    for (int c = slice; c < channels; c += SLICES) total += (values[c * BLOCK_M] - shift) / channels;
    const COMPUTE mean = shift + sum_over_slices(total, partial);
    for (int pass = 0; pass < 2; pass++) {
      rest = squares = {0, 0};
      for (int c = slice; c < channels; c += SLICES) {
        const COMPUTE centred = (values[c * BLOCK_M] - mean) * factor;
        rest.add(centred);
        squares.add(centred * centred);
      }
      squares.total = sum_over_slices(squares.total, partial);
      const bool overflows = !(squares.total < INFINITY);
      if (pass || !__syncthreads_or(overflows)) break;
      factor = overflows ? FAR : COMPUTE(1);
    }
    const COMPUTE missed = sum_over_slices(rest.total, partial) / channels, mean_square = squares.total / channels;
    const COMPUTE deviation = sqrt_v(multiply_add(-missed, missed, mean_square) + eps * factor * factor);
    for (int c = slice; c < channels; c += SLICES) {
      COMPUTE value = ((values[c * BLOCK_M] - mean) * factor - missed) / deviation;
      if (factors) value *= COMPUTE(factors[first_channel + c]);
      if (terms) value += COMPUTE(terms[first_channel + c]);
      values[c * BLOCK_M] = value;
    }
  }
};

#if GATHER
// Join the values of a tile's voxels that exist, values[c * BLOCK_M + voxel]; a warp takes one channel at a time.
__device__ __forceinline__ void store_gathered(const COMPUTE *values, int channels, bool exists, COMPUTE *partial,
                                               double *to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  partial[threadIdx.x] = exists ? 1 : 0;
  __syncthreads();
  for (int c = warp; c < channels; c += THREADS / 32) {
    State state[GATHER_NUMBERS];
    double count = 0.;
    for (int m = lane; m < BLOCK_M; m += 32) {
      if (partial[m] == COMPUTE(0)) continue;
      const COMPUTE v[1] = {values[c * BLOCK_M + m]};
      const bool inside[1] = {true};
      gather_more<1, 1>(state, State(count), State(1), v, inside);
      count += 1.;
    }
    Gathered total = gathered_nothing();
    gather_join<1>(total, state, count);
    for (int mask = 1; mask < 32; mask *= 2) {
      const Gathered other = {__shfl_xor_sync(~0u, total.a, mask), __shfl_xor_sync(~0u, total.b, mask),
                              __shfl_xor_sync(~0u, total.c, mask)};
      total = gathered_both(total, other);
    }
    if (lane == 0) gather_store(total, to + c * GATHERED);
  }
  __syncthreads();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) conv_fma(const ConvParams p) {
  extern __shared__ __align__(16) COMPUTE shared[];
  COMPUTE *A = shared;
  COMPUTE *B = A + BLOCK_K * BLOCK_M;
  COMPUTE *results = B + BLOCK_K * BLOCK_N;
  COMPUTE *folded = results + BLOCK_N * BLOCK_M;
  COMPUTE *partial = folded + (USE_FOLD ? BLOCK_N * BLOCK_M : 0);
  const int tm = threadIdx.x % THREADS_M, tn = threadIdx.x / THREADS_M;
  const int own = threadIdx.x % BLOCK_M, slice = threadIdx.x / BLOCK_M;
  for (index_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    index_t rest = tile;
    const int n0 = static_cast<int>(rest % p.channel_tiles) * BLOCK_N;
    rest /= p.channel_tiles;
    const int group = static_cast<int>(rest % p.groups);
    rest /= p.groups;
    index_t phase_index = 0, phase_end = p.phase_count;
    if (!USE_FOLD) {
      phase_index = rest % p.phase_count;
      phase_end = phase_index + 1;
      rest /= p.phase_count;
    }
    const index_t item = GATHER ? rest / p.voxel_tiles : 0;
    const index_t m0 = (GATHER ? rest % p.voxel_tiles : rest) * BLOCK_M;
    const Voxel v = voxel_at(p, group, item, m0 + own);
    const int channels = p.out_channels - n0 < BLOCK_N ? p.out_channels - n0 : BLOCK_N;
    const int first_channel = group * p.out_channels + n0;
    const COMPUTE *w = p.w + index_t(group) * p.term_count * p.padded_channels + n0;
    int residue[3];
    for (index_t f = phase_index; f < phase_end; f++) {
      const Phase phase = phase_at(p, f, residue);
      COMPUTE acc[THREAD_M][THREAD_N];
      multiply(p, phase, v, w, A, B, acc);
#pragma unroll
      for (int j = 0; j < THREAD_N; j++) {
        const int n = tn * THREAD_N + j;
#pragma unroll
        for (int i = 0; i < THREAD_M; i++) results[n * BLOCK_M + tm * THREAD_M + i] = acc[i][j];
      }
      __syncthreads();
      for (int c = slice; c < channels; c += SLICES) {
        COMPUTE &value = results[c * BLOCK_M + own];
        if (!is_finite(value)) value = exact_sum(p, phase, v, w + c);
        if (p.bias) value += COMPUTE(p.bias[first_channel + c]);
      }
      Team team{results + own, channels, first_channel, partial, place_at(p, v, residue, false)};
      first_chain(p.operand, team);
      if (USE_FOLD) {
        for (int c = slice; c < channels; c += SLICES) {
          const COMPUTE value = results[c * BLOCK_M + own];
          COMPUTE &total = folded[c * BLOCK_M + own];
          total = f == 0 ? fold_lift(value) : fold_combine(total, fold_lift(value));
        }
        __syncthreads();
      }
    }
    COMPUTE *values = (USE_FOLD ? folded : results) + own;
    VoxelAt at = place_at(p, v, residue, USE_FOLD);
    if (USE_FOLD) {
      for (int c = slice; c < channels; c += SLICES)
        values[c * BLOCK_M] = fold_finish(values[c * BLOCK_M], Share<COMPUTE>{COMPUTE(p.phase_count)});
      Team team{values, channels, first_channel, partial, at};
      second_chain(p.operand, team);
    }
#if GATHER
    const index_t box = USE_FOLD ? rest : rest * p.phase_count + phase_index;
    store_gathered(values - own, channels, at.exists, partial,
                   p.gathered + (box * p.groups * p.out_channels + first_channel) * GATHERED);
#endif
    const index_t plane = index_t(p.out[0]) * p.out[1] * p.out[2];
    OUTPUT *y = p.y + (index_t(at.place[0]) * p.out[1] + at.place[1]) * p.out[2] + at.place[2];
    if (CHANNEL_REDUCE) {
      COMPUTE total = channel_identity<COMPUTE>();
      for (int c = slice; c < channels; c += SLICES) total = channel_combine(total, channel_lift(values[c * BLOCK_M]));
      total = over_slices(total, partial, [](COMPUTE a, COMPUTE b) { return channel_combine(a, b); });
      total = channel_finish(total, Share<COMPUTE>{COMPUTE(channels)});
      at.c = 0;
      if (at.exists && slice == 0) y[v.batch * plane] = OUTPUT(last_chain(p.operand, total, at));
    } else if (STORE && at.exists) {
      const index_t first = v.batch * p.out_channels * p.groups + first_channel;
      for (int c = slice; c < channels; c += SLICES) y[(first + c) * plane] = OUTPUT(values[c * BLOCK_M]);
    }
    __syncthreads();
  }
}
