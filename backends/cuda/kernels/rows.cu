// Steps that look at many values at once: normalise, softmax and reductions, over any set of axes.
//   FUNCTION_NORMALIZE   y = (x - mean) / sqrt(variance + eps) * weight[channel] + bias[channel], biased variance
//   FUNCTION_SOFTMAX     y = exp(x - max) / sum(exp(x - max))
//   FUNCTION_SUM, _MEAN, _MAX, _LOG_SUM_EXP   y[row] = that of the row's items
//
// Layouts: x and y contiguous, INPUT and OUTPUT; y is shaped like x, or holds one value a row in order.
// Index maps: the host splits the axes of x in kept ones, whose combinations are the rows, and others, whose
// combinations are a row's items; axes that are neighbours in memory are merged.
//   x[row, item] = x[offset(row) + offset(item)]
//
// rows_by_block: a block owns a row at a time and its threads take the items in turn, for rows that lie in memory
// in one piece. rows_by_thread: a thread owns a row at a time, neighbouring threads neighbouring rows, for rows
// across the memory, such as the channels of a voxel. Sums are kept in double, and the variance is taken in a
// second pass around the mean, so that a large mean or a long row costs no accuracy.
//
// Shared memory: one double a thread; two barriers and a tree for each sum of a block.
// Bytes: two or three reads of x (small rows come from the cache), one write of y.
//
// The host guarantees: blockDim.x a power of two, at most 256; items >= 1.
#include "chain.cuh"

struct Axes {
  index_t extent[6], stride[6];
  int rank, pad;
};

struct RowsParams {
  const INPUT *x;
  OUTPUT *y;
  const STORAGE *weight, *bias;
  Axes row, item;
  index_t rows, items;
  index_t channel_stride;
  double eps;
  int channels, function;
};
CHECK_PARAMS(RowsParams);

enum Function : int {
  FUNCTION_NORMALIZE = 0,
  FUNCTION_SOFTMAX = 1,
  FUNCTION_SUM = 2,
  FUNCTION_MEAN = 3,
  FUNCTION_MAX = 4,
  FUNCTION_LOG_SUM_EXP = 5,
};

__device__ __forceinline__ index_t offset(const Axes &axes, index_t i) {
  if (axes.rank == 1) return i * axes.stride[0];
  index_t result = 0;
  for (int axis = axes.rank - 1; axis >= 0; axis--) {
    result += i % axes.extent[axis] * axes.stride[axis];
    i /= axes.extent[axis];
  }
  return result;
}

// Who works on one row: all threads of a block, or one thread.
struct BlockTeam {
  double *shared;
  __device__ int first() const { return threadIdx.x; }
  __device__ int step() const { return blockDim.x; }
  template <class Join> __device__ double join(double value, Join combine) const {
    __syncthreads();
    shared[threadIdx.x] = value;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return shared[0];
  }
};

struct ThreadTeam {
  __device__ int first() const { return 0; }
  __device__ int step() const { return 1; }
  template <class Join> __device__ double join(double value, Join) const { return value; }
};

template <class Team, class Map>
__device__ __forceinline__ double sum(const RowsParams &p, const INPUT *x, Team team, Map map) {
  double total = 0;
  for (index_t i = team.first(); i < p.items; i += team.step())
    total += double(map(COMPUTE(x[offset(p.item, i)])));
  return team.join(total, [](double a, double b) { return a + b; });
}

template <class Team>
__device__ __forceinline__ COMPUTE maximum(const RowsParams &p, const INPUT *x, Team team) {
  COMPUTE best = COMPUTE(x[0]);
  for (index_t i = team.first(); i < p.items; i += team.step())
    best = max_nan(best, COMPUTE(x[offset(p.item, i)]));
  return COMPUTE(team.join(double(best), [](double a, double b) { return max_nan(a, b); }));
}

template <class Team> __device__ __forceinline__ void run(const RowsParams &p, index_t row, Team team) {
  const index_t start = offset(p.row, row);
  const INPUT *x = p.x + start;
  if (p.function == FUNCTION_NORMALIZE) {
    const double mean = sum(p, x, team, [](COMPUTE v) { return v; }) / double(p.items);
    const double variance =
        sum(p, x, team, [=](COMPUTE v) { return (double(v) - mean) * (double(v) - mean); }) / double(p.items);
    const double factor = 1. / sqrt(variance + p.eps);
    for (index_t i = team.first(); i < p.items; i += team.step()) {
      const index_t at = start + offset(p.item, i);
      const int channel = static_cast<int>(at / p.channel_stride % p.channels);
      COMPUTE value = COMPUTE((double(COMPUTE(p.x[at])) - mean) * factor);
      if (p.weight) value *= COMPUTE(p.weight[channel]);
      if (p.bias) value += COMPUTE(p.bias[channel]);
      p.y[at] = OUTPUT(value);
    }
  } else if (p.function == FUNCTION_SOFTMAX) {
    const COMPUTE top = maximum(p, x, team);
    const double total = sum(p, x, team, [=](COMPUTE v) { return exponential(v - top); });
    for (index_t i = team.first(); i < p.items; i += team.step()) {
      const index_t at = start + offset(p.item, i);
      p.y[at] = OUTPUT(COMPUTE(double(exponential(COMPUTE(p.x[at]) - top)) / total));
    }
  } else {
    COMPUTE result;
    if (p.function == FUNCTION_MAX) {
      result = maximum(p, x, team);
    } else if (p.function == FUNCTION_LOG_SUM_EXP) {
      COMPUTE top = maximum(p, x, team);
      if (!is_finite(top)) top = 0;
      result = COMPUTE(log(sum(p, x, team, [=](COMPUTE v) { return exponential(v - top); }))) + top;
    } else {
      double total = sum(p, x, team, [](COMPUTE v) { return v; });
      result = COMPUTE(p.function == FUNCTION_MEAN ? total / double(p.items) : total);
    }
    if (team.first() == 0) p.y[row] = OUTPUT(result);
  }
}

extern "C" __global__ void rows_by_block(const RowsParams p) {
  __shared__ double shared[256];
  for (index_t row = blockIdx.x; row < p.rows; row += gridDim.x) run(p, row, BlockTeam{shared});
}

extern "C" __global__ void rows_by_thread(const RowsParams p) {
  for (index_t row = index_t(blockIdx.x) * blockDim.x + threadIdx.x; row < p.rows;
       row += index_t(gridDim.x) * blockDim.x)
    run(p, row, ThreadTeam{});
}
