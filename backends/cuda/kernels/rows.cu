// Steps that look at many values at once, over any set of axes, then a chain.
//   NORMALIZE   y = (x - mean) / sqrt(variance + eps) * weight[channel] + bias[channel], biased variance
//   SOFTMAX     y = exp(x - max) / sum(exp(x - max))
//   REDUCE      y[row] = finish(combination of the lifted items of the row); with ROW_SHIFTED the largest item is
//               subtracted first and added last, unless it is infinite
//
// Layouts: x and y contiguous, INPUT and OUTPUT; y is shaped like x, or holds one value a row in order.
// Index maps: the host splits the axes of x in kept ones, whose combinations are the rows, and others, whose
// combinations are a row's items; axes that are neighbours in memory are merged.
//   x[row, item] = x[offset(row) + offset(item)]
//
// rows_by_block: a block owns a row at a time and its threads take the items in turn, for rows that lie in memory
// in one piece. rows_by_thread: a thread owns a row at a time, neighbouring threads neighbouring rows, for rows
// across the memory, such as the channels of a voxel. Sums are kept in double, of deviations from the row's first item for
// a mean, and the variance is taken in a second pass around the mean, so that a large mean or a long row costs no accuracy,
// and equal items leave exactly 0.
//
// Shared memory: one double a thread; two barriers and a tree for each sum of a block.
// Bytes: two or three reads of x (small rows come from the cache), one write of y.
//
// The host guarantees: blockDim.x a power of two, at most 256; items >= 1.
// Generated: the monoid row; last_chain.
#include "chain.cuh"

#define NORMALIZE 0
#define SOFTMAX 1
#define REDUCE 2

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
  double eps, count;  // count: values that a row stands for
  int extent[5];      // of y
  Operand operand[OPERANDS];
};
CHECK_PARAMS(RowsParams);

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

template <class Team, class Map, class Join>
__device__ __forceinline__ double combined(const RowsParams &p, const INPUT *x, Team team, double total, Map map,
                                           Join join) {
  for (index_t i = team.first(); i < p.items; i += team.step())
    total = join(total, double(map(COMPUTE(x[offset(p.item, i)]))));
  return team.join(total, join);
}

template <class Team, class Map>
__device__ __forceinline__ double sum(const RowsParams &p, const INPUT *x, Team team, Map map) {
  return combined(p, x, team, 0., map, [](double a, double b) { return a + b; });
}

template <class Team>
__device__ __forceinline__ COMPUTE maximum(const RowsParams &p, const INPUT *x, Team team) {
  return COMPUTE(combined(p, x, team, double(-INFINITY), [](COMPUTE v) { return v; },
                          [](double a, double b) { return max_v(a, b); }));
}

__device__ __forceinline__ void store(const RowsParams &p, index_t at, COMPUTE value) {
  p.y[at] = OUTPUT(last_chain(p.operand, value, LinearAt{at, p.extent}));
}

template <class Team> __device__ __forceinline__ void run(const RowsParams &p, index_t row, Team team) {
  const index_t start = offset(p.row, row);
  const INPUT *x = p.x + start;
#if FUNCTION == NORMALIZE
  const double first = COMPUTE(x[0]);
  const double mean = first + sum(p, x, team, [=](COMPUTE v) { return double(v) - first; }) / double(p.items);
  const double variance =
      sum(p, x, team, [=](COMPUTE v) { return (double(v) - mean) * (double(v) - mean); }) / double(p.items);
  const double factor = 1. / sqrt(variance + p.eps);
  for (index_t i = team.first(); i < p.items; i += team.step()) {
    const index_t at = start + offset(p.item, i);
    const int channel = p.weight || p.bias ? LinearAt{at, p.extent}.channel() : 0;
    COMPUTE value = COMPUTE((double(COMPUTE(p.x[at])) - mean) * factor);
    if (p.weight) value *= COMPUTE(p.weight[channel]);
    if (p.bias) value += COMPUTE(p.bias[channel]);
    store(p, at, value);
  }
#elif FUNCTION == SOFTMAX
  const COMPUTE top = maximum(p, x, team);
  const double total = sum(p, x, team, [=](COMPUTE v) { return exp_v(v - top); });
  for (index_t i = team.first(); i < p.items; i += team.step()) {
    const index_t at = start + offset(p.item, i);
    store(p, at, COMPUTE(double(exp_v(COMPUTE(p.x[at]) - top)) / total));
  }
#else
  COMPUTE top = 0;
  if constexpr (ROW_SHIFTED) {
    top = maximum(p, x, team);
    if (!is_finite(top)) top = 0;
  }
  const double total = combined(p, x, team, row_identity<double>(), [=](COMPUTE v) { return row_lift(v - top); },
                                [](double a, double b) { return row_combine(a, b); });
  COMPUTE result = COMPUTE(row_finish(total, Share<double>{p.count}));
  if constexpr (ROW_SHIFTED) result += top;
  if (team.first() == 0) store(p, row, result);
#endif
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
