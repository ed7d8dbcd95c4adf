// Steps over all of space whose statistics a convolution's launch gathered, then a chain.
//   NORMALIZE   y = (x - mean) / sqrt(variance + eps) * weight[channel] + bias[channel]
//   SOFTMAX     y = exp(x - max) / sum(exp(x - max))
//   MEAN        y[n,c] = the mean over space of what NORMALIZE makes, from the statistics alone
//   REDUCE      y[set] = finish(combination of the lifted elements), from the statistics alone
//
// Layouts: x and y (N, C, space), contiguous, INPUT and OUTPUT; y (N, C) for MEAN, (sets) for REDUCE; gathered as gather.cuh has it,
// (N, boxes, C, GATHERED).
// A *set* is what is normalised together: SET_BATCH batch items x SET_CHANNELS channels, which lie one after another.
//
// A block joins the statistics of its set, then takes one of `parts` equal shares of the set's elements, or its channels
// one after another for MEAN. Where squares have left the range of float the block takes the two passes over x that
// rows.cu takes. Shared memory: three doubles a thread; 8 barriers for joining.
// Bytes: x once, y once, and the statistics once for each part.
//
// The host guarantees: blockDim.x is 256.
// Generated: the monoid gather; last_chain.
#include "chain.cuh"
#include "gather.cuh"

#define NORMALIZE 0
#define SOFTMAX 1
#define MEAN 2
#define REDUCE 3

struct GatheredParams {
  const INPUT *x;
  OUTPUT *y;
  const double *gathered;
  const STORAGE *weight, *bias;
  index_t sets, parts, plane, boxes;
  int set_batch, set_channels, channels, extent[5];  // extent: of y
  double eps, count;  // count: elements of a set
  Operand operand[OPERANDS];
};
CHECK_PARAMS(GatheredParams);

constexpr int THREADS = 256;

__device__ __forceinline__ Gathered over_block(Gathered own, Gathered *shared) {
  __syncthreads();
  shared[threadIdx.x] = own;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = gathered_both(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

// The statistics of `items` batch items from n on and `channels` channels from c on.
__device__ __forceinline__ Gathered joined(const GatheredParams &p, index_t n, int items, int c, int channels,
                                           Gathered *shared) {
  const index_t each = p.boxes * channels;
  Gathered total = gathered_nothing();
  for (index_t i = threadIdx.x; i < items * each; i += THREADS) {
    const index_t box = (n + i / each) * p.boxes + i % each / channels;
    total = gathered_both(total, gathered_at(p.gathered + (box * p.channels + c + i % channels) * GATHERED));
  }
  return over_block(total, shared);
}

struct Set {
  index_t n;
  int c;
  index_t items;
};

// Visit elements [begin, end) of a set: function(element of x, its channel). Channels are taken one after another, so
// that no element's place has to be decoded.
template <class Function>
__device__ __forceinline__ void visit(const GatheredParams &p, const Set &set, index_t begin, index_t end,
                                      Function function) {
  for (index_t row = begin / p.plane; row * p.plane < end; row++) {
    const int channel = set.c + static_cast<int>(row % p.set_channels);
    const index_t at = ((set.n + row / p.set_channels) * p.channels + channel) * p.plane, first = row * p.plane;
    const index_t stop = min(p.plane, end - first);
    for (index_t i = max(begin - first, index_t(0)) + threadIdx.x; i < stop; i += THREADS)
      function(at + i, channel);
  }
}

#if GATHER == MOMENTS
// Have the squares of floats over- or underflowed? With eps, small ones do not matter.
__device__ __forceinline__ bool lost(const Gathered &moments, double eps) {
  return !(moments.c <= 1e30 * moments.a && moments.c + eps * moments.a >= 1e-28 * moments.a);
}

// The moments around `mean`, from the values.
__device__ __forceinline__ Gathered moments_around(const GatheredParams &p, const Set &set, double mean,
                                                   Gathered *shared) {
  double sum = 0., squares = 0.;
  visit(p, set, 0, set.items, [&](index_t at, int) {
    const double apart = double(COMPUTE(p.x[at])) - mean;
    sum += apart;
    squares += apart * apart;
  });
  __syncthreads();
  shared[threadIdx.x] = {0., sum, squares};
  __syncthreads();
  sum = squares = 0.;
  for (int thread = 0; thread < THREADS; thread++) sum += shared[thread].b, squares += shared[thread].c;
  __syncthreads();
  return {double(set.items), mean + sum / double(set.items), squares};
}
#endif

__device__ __forceinline__ void store(const GatheredParams &p, index_t at, int channel, COMPUTE value) {
#if FUNCTION == NORMALIZE || FUNCTION == MEAN
  if (p.weight) value *= COMPUTE(p.weight[channel]);
  if (p.bias) value += COMPUTE(p.bias[channel]);
#endif
  p.y[at] = OUTPUT(last_chain(p.operand, value, LinearAt{at, p.extent}));
}

extern "C" __global__ void __launch_bounds__(THREADS) gathered(const GatheredParams p) {
  __shared__ Gathered shared[THREADS];
  const int groups = p.channels / p.set_channels;
  for (index_t task = blockIdx.x; task < p.sets * p.parts; task += gridDim.x) {
    const index_t number = task / p.parts;
    const Set set = {number / groups * p.set_batch, static_cast<int>(number % groups) * p.set_channels,
                     p.plane * p.set_channels * p.set_batch};
    Gathered all = joined(p, set.n, p.set_batch, set.c, p.set_channels, shared);
#if FUNCTION == MEAN
    const double factor = 1. / sqrt(all.c / all.a + p.eps);
    for (int i = 0; i < p.set_batch * p.set_channels; i++) {
      const index_t n = set.n + i / p.set_channels;
      const int c = set.c + i % p.set_channels;
      const Gathered one = joined(p, n, 1, c, 1, shared);
      if (threadIdx.x == 0) store(p, n * p.channels + c, c, COMPUTE((one.b - all.b) * factor));
    }
#elif FUNCTION == REDUCE
    if (threadIdx.x == 0) store(p, number, 0, COMPUTE(gather_finish(all.a, Share<double>{p.count})));
#else
#if FUNCTION == NORMALIZE
    if (lost(all, p.eps)) all = moments_around(p, set, moments_around(p, set, 0., shared).b, shared);
    const double factor = 1. / sqrt(all.c / all.a + p.eps);
#else
    const COMPUTE top = COMPUTE(all.a);
#endif
    const index_t share = (set.items + p.parts - 1) / p.parts, begin = task % p.parts * share;
    visit(p, set, begin, min(set.items, begin + share), [&](index_t at, int channel) {
#if FUNCTION == NORMALIZE
      store(p, at, channel, COMPUTE((double(COMPUTE(p.x[at])) - all.b) * factor));
#else
      store(p, at, channel, COMPUTE(double(exp_v(COMPUTE(p.x[at]) - top)) / all.b));
#endif
    });
#endif
  }
}
