// Steps that reduce, for devices whose work-groups share the work: normalise, softmax, reductions of any form, and pools, which
// reduce over a window.
//
// A work-group owns LANES consecutive results of `count` (places of the axes that stay, width included); SLICES work-items share
// each of them, and each takes every SLICES-th of its COUNT elements:
//   USE_SLICES_FIRST 1: elements lie side by side, so neighbouring work-items are slices of one result;
//   USE_SLICES_FIRST 0: results lie side by side, so neighbouring work-items have neighbouring results.
// A work-item sums up runs and then the runs' sums, and slices.cl combines the work-items, so that errors grow with the length of
// a run, the number of runs and the logarithm of SLICES, not with COUNT.
//
// Normalise and softmax may work in place (x and y the same buffer): an element is read and written by one work-item alone. Those
// without a result (behind the last one) have no elements, but meet the others at the barriers.
//
// The host defines, besides numeric.cl's and slices.cl's:
//   INDEX               uint, or ulong where an index may not fit
//   COUNT, STRETCH      elements of a result, and those of one run of all slices together
//   PARTIAL_ELEMENTS    of local memory
//   PLACE(result)       offset of a result's first element in the tensor
//   OFFSET(i)           offset of element i from there
//   TAIL(x), RESULT_TAIL(x)  pointwise steps that ride on the store of element i of a result, and of a reduced result
//   CHANNEL(result, i)  channel of an element
//   AFFINE(x, c), EPS   for normalise
//   KERNEL_NAME         of a reduction
//   REDUCE_COMBINE(a, b), REDUCE_IDENTITY, REDUCE_LIFT(x), REDUCE_FINISH(t), REDUCE_SHIFTED  for a reduction
//   PARAMETERS          of the kernel, for a0, a1, ...
//   STEP_*              which kernel to compile

#define EACH_ELEMENT for (INDEX i = slice; i < terms; i += SLICES)

// total combined with `term`, an expression in i, of all elements of the work-item.
#define COMBINE_UP(total, term, COMBINE, nothing)                      \
  for (INDEX first = slice; first < terms; first += STRETCH) {         \
    const INDEX end = min(first + STRETCH, terms);                     \
    REAL run = nothing;                                                \
    for (INDEX i = first; i < end; i += SLICES) run = COMBINE(run, (term)); \
    total = COMBINE(total, run);                                       \
  }
#define ADD_UP(total, term) COMBINE_UP(total, term, SUM_OF, R(0.0))

static INDEX lane_of(const INDEX item) { return USE_SLICES_FIRST ? item / SLICES : item % LANES; }

static INDEX slice_of(const INDEX item) { return USE_SLICES_FIRST ? item % SLICES : item / LANES; }

// What each kernel begins with: the work-item's lane and slice, its result, and how many elements that has.
#define BEGIN                                                                     \
  local REAL partial[PARTIAL_ELEMENTS];                                           \
  const INDEX lane = lane_of(get_local_id(0)), slice = slice_of(get_local_id(0)); \
  const INDEX result = (INDEX)get_group_id(0) * LANES + lane;                     \
  const INDEX terms = result < count ? COUNT : 0;                                 \
  const size_t base = PLACE(result);

#if STEP_NORMALIZE
// y = (x - mean) / sqrt(variance + eps) [* weight[c] + bias[c]]; numeric.cl says how.
kernel void normalize_group(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                            const ulong count PARAMETERS) {
  BEGIN
  const REAL share = R(1.0) / COUNT, shift = terms ? x[base] : R(0.0);
  barrier(CLK_GLOBAL_MEM_FENCE);  // all have read the first element, which one of them may write over
  REAL total = R(0.0), farthest = R(0.0);
  EACH_ELEMENT {
    const REAL apart = x[base + OFFSET(i)] - shift;
    total = fma(apart, share, total);
    farthest = max_v(farthest, fabs(apart));
  }
  const REAL factor = factor_over_slices(farthest, partial, lane, slice);
  const REAL mean = coarse(sum_over_slices(total, partial, lane, slice) + shift, max_over_slices(farthest, partial, lane, slice));
  KEPT_SUM(rest)
  KEPT_SUM(squares)
  EACH_ELEMENT {
    const REAL deviation = (x[base + OFFSET(i)] - mean) * factor;
    KEEP(rest, deviation)
    KEEP(squares, deviation * deviation)
  }
  rest = sum_over_slices(rest, partial, lane, slice) * share;
  const REAL high = coarse(squares, max_over_slices(squares, partial, lane, slice));
  const REAL low = sum_over_slices((squares - high) - squares_lost, partial, lane, slice);
  squares = sum_over_slices(high, partial, lane, slice) + low;
  REAL scale_lost;
  const REAL scale = scale_of(squares, rest, factor, COUNT, operands[EPS], &scale_lost), offset = -rest * scale;
  EACH_ELEMENT {
    const REAL deviation = (x[base + OFFSET(i)] - mean) * factor;
    REAL value = fma(deviation, scale, fma(deviation, scale_lost, offset));
    AFFINE(value, CHANNEL(result, i));
    TAIL(value);
    y[base + OFFSET(i)] = value;
  }
}
#endif

#if STEP_SOFTMAX
// The true maximum is subtracted. exp is computed again for the store: on a GPU that costs less than writing it and reading it.
kernel void softmax_group(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                          const ulong count PARAMETERS) {
  BEGIN
  REAL largest = -INFINITY, total = R(0.0);
  EACH_ELEMENT { largest = max_v(largest, x[base + OFFSET(i)]); }
  largest = max_over_slices(largest, partial, lane, slice);
  ADD_UP(total, exp_v(x[base + OFFSET(i)] - largest))
  const REAL scale = R(1.0) / sum_over_slices(total, partial, lane, slice);
  EACH_ELEMENT {
    REAL value = exp_v(x[base + OFFSET(i)] - largest) * scale;
    TAIL(value);
    y[base + OFFSET(i)] = value;
  }
}
#endif

#if STEP_REDUCE
#define OVER_SLICES combined_slices
#define SLICES_COMBINE REDUCE_COMBINE
#include "over_slices.cl"

kernel void KERNEL_NAME(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                        const ulong count PARAMETERS) {
  BEGIN
#if REDUCE_SHIFTED
  REAL largest = -INFINITY;
  EACH_ELEMENT { largest = max_v(largest, x[base + OFFSET(i)]); }
  largest = max_over_slices(largest, partial, lane, slice);
  // An infinite maximum is not subtracted: exp then gives 0 or infinity, and the logarithm the right limit.
  const REAL shift = fabs(largest) == INFINITY ? R(0.0) : largest;
#define SHIFTED(v) ((v) - shift)
#else
#define SHIFTED(v) (v)
#endif
  REAL total = REDUCE_IDENTITY;
  COMBINE_UP(total, REDUCE_LIFT(SHIFTED(x[base + OFFSET(i)])), REDUCE_COMBINE, REDUCE_IDENTITY)
  total = combined_slices(total, partial, lane, slice);
  REAL value = REDUCE_FINISH(total);
#if REDUCE_SHIFTED
  value = value + shift;
#endif
  if (slice == 0 && result < count) {
    RESULT_TAIL(value);
    y[result] = value;
  }
}
#endif
