// Steps over whole planes whose statistics the launch before has left for each row (row_statistics.cl): normalise and softmax with one
// pass over their input, reductions with none.
//
// A plane is (n, c): OUT_D*OUT_H rows of OUT_W elements. A work-item owns one place of the axes that stay, and the planes of it: it
// combines the numbers of their rows, `given`, and then works on the planes. Numbers are added up in runs of GIVEN_RUN vectors, so that
// errors grow with the length of a run and the number of runs. Results are the same in every call: nobody shares a sum.
//
// Normalise and softmax may work in place (x and y the same buffer): each element is read before it is written.
//
// The host defines, besides numeric.cl's and row_statistics.cl's: CHANNELS, OUT_D, OUT_H, OUT_W;
//   PLANES(outer)         planes of place `outer`
//   PLANE(outer, i)       n * CHANNELS + c of plane i of them
//   GIVEN_ROWS            rows of the whole input
//   COUNT                 elements that one result combines
//   TAIL(x)               pointwise steps that ride on the store of an element, or of a result
//   AFFINE(x), EPS        for normalise
//   REDUCE_*              for a reduction, as in step_reduction.cl
//   PARAMETERS            of the kernel, for a0, a1, ... and partials
//   GIVEN_*               which numbers there are
//   STEP_*                which kernel to compile; STEP_REDUCE_NORMALIZED is the mean or sum over space of normalised values, which
//                         follows from the means of planes

#define PLANE_ROWS (OUT_D * OUT_H)
#define GIVEN_RUN 64
#define EACH_PLANE for (int i = 0; i < PLANES(outer); i++)

// total combined with `term`, an expression in row and left, of the numbers of one plane.
#define OVER_ROWS(total, term, COMBINE, nothing)                                           \
  for (int first = 0; first < PLANE_ROWS; first += GIVEN_RUN * VEC) {                      \
    real_v run = SPLAT(nothing);                                                           \
    for (int row = first; row < min(first + GIVEN_RUN * VEC, PLANE_ROWS); row += VEC) {    \
      const int left = PLANE_ROWS - row;                                                   \
      run = COMBINE(run, first_lanes(term, left, nothing));                                \
    }                                                                                      \
    total = COMBINE(total, run);                                                           \
  }
#define NUMBERS(k) numbers_of(given + (size_t)(k) * GIVEN_ROWS, plane, row, left)

// Numbers of a plane's rows from `row` on, of which there are `left`.
static real_v numbers_of(global const REAL *restrict given, const size_t plane, const int row, const int left) {
  given += (plane / CHANNELS * PLANE_ROWS + row) * CHANNELS + plane % CHANNELS;
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = i < left ? given[(size_t)i * CHANNELS] : R(0.0);
  return LOAD_V(lanes);
}

#if GIVEN_MOMENTS
// `total`, a compensated sum, and `term`, an expression in row and left, of a plane's rows.
#define SUM_ROWS(total, term)                            \
  for (int row = 0; row < PLANE_ROWS; row += VEC) {      \
    const int left = PLANE_ROWS - row;                   \
    KEEP(total, first_lanes(term, left, R(0.0)))         \
  }
#define SUM_PLANES(total, term)                          \
  EACH_PLANE {                                           \
    const size_t plane = PLANE(outer, i);                \
    SUM_ROWS(total, term)                                \
  }

// Of vectors of rows: how far their means lie from `mean`, and their sums of squares, with `factor` as in numeric.cl. Sums that are
// of deviations times FAR already are infinite without it.
#define FROM_MEAN (((NUMBERS(0) - SPLAT(mean)) + NUMBERS(1)) * factor)
#define WITHIN squares_with(NUMBERS(2), factor)
static real_v squares_with(const real_v squares, const REAL factor) {
  if (factor == R(1.0)) return (squares < SPLAT(R(0.0))) ? SPLAT(INFINITY) : squares;
  return (squares < SPLAT(R(0.0))) ? -squares : squares * FAR * FAR;
}

#define NORMALIZE_BEGIN                                                                        \
  const REAL share = R(1.0) / ((size_t)PLANES(outer) * PLANE_ROWS);                            \
  const size_t first_plane = PLANE(outer, 0);                                                  \
  const REAL shift = given[first_plane / CHANNELS * PLANE_ROWS * CHANNELS + first_plane % CHANNELS]; \
  REAL factor = R(1.0);                                                                        \
  KEPT_SUM(means)                                                                              \
  KEPT_SUM(rests)                                                                              \
  KEPT_SUM(squares)                                                                            \
  SUM_PLANES(means, (NUMBERS(0) - SPLAT(shift)) * share)                                       \
  const REAL mean = sum_of_lanes(means) + shift;                                               \
  for (int pass = 0; pass < 2; pass++) {                                                       \
    rests = rests_lost = squares = squares_lost = SPLAT(R(0.0));                               \
    SUM_PLANES(rests, FROM_MEAN)                                                               \
    SUM_PLANES(squares, fma(FROM_MEAN * OUT_W, FROM_MEAN, WITHIN))                             \
    if (!OVERFLOWS(squares)) break;                                                            \
    factor = FAR;                                                                              \
  }                                                                                            \
  const REAL rest = sum_of_lanes(rests) * share, square = sum_of_lanes(squares);               \
  real_v scale_lost;                                                                           \
  const real_v scale = split_scale(SPLAT(square), SPLAT(rest), SPLAT(factor), SPLAT(COUNT), operands[EPS], &scale_lost); \
  const real_v centre = coarse(SPLAT(mean), SPLAT(sqrt(square))), offset = ((centre - mean) * factor - rest) * scale;
#endif

#if GIVEN_EXPONENTIALS
static REAL largest_of(global const REAL *restrict given, const size_t plane) {
  real_v largest = SPLAT(-INFINITY);
  OVER_ROWS(largest, NUMBERS(0), max_v, -INFINITY)
  return max_of_lanes(largest);
}

static REAL sum_below(global const REAL *restrict given, const size_t plane, const REAL largest) {
  real_v total = SPLAT(R(0.0));
  OVER_ROWS(total, NUMBERS(1) * exp_below_v(NUMBERS(0) - SPLAT(largest)), ADD_LANES, R(0.0))
  return sum_of_lanes(total);
}

#define SOFTMAX_BEGIN                                                        \
  REAL largest = -INFINITY, total = R(0.0);                                  \
  EACH_PLANE largest = LARGER(largest, largest_of(given, PLANE(outer, i)));  \
  EACH_PLANE total += sum_below(given, PLANE(outer, i), largest);
#elif GIVEN_TOTAL
OVER_LANES(combined_lanes, REDUCE_COMBINE_ONE)
static REAL total_of(global const REAL *restrict given, const size_t plane) {
  real_v total = SPLAT(REDUCE_IDENTITY);
  OVER_ROWS(total, NUMBERS(0), REDUCE_COMBINE, REDUCE_IDENTITY)
  return combined_lanes(total);
}

#define SOFTMAX_BEGIN                    \
  REAL total = REDUCE_IDENTITY;          \
  EACH_PLANE total = REDUCE_COMBINE_ONE(total, total_of(given, PLANE(outer, i)));
#endif

#if STEP_REDUCE
kernel void KERNEL_NAME(global const REAL *restrict given, global const REAL *restrict operands, global REAL *restrict y,
                        const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  SOFTMAX_BEGIN
#if GIVEN_EXPONENTIALS
  // An infinite maximum is not subtracted: exp then gives 0 or infinity, and the logarithm the right limit.
  const bool infinite = fabs(largest) == INFINITY;
  const REAL shift = infinite ? R(0.0) : largest;
  if (infinite) total = largest > R(0.0) ? INFINITY : R(0.0);
  real_v value = REDUCE_FINISH(SPLAT(total)) + SPLAT(shift);
#else
  real_v value = REDUCE_FINISH(SPLAT(total));
#endif
  TAIL(value);
  y[outer] = LANE0(value);
}
#elif STEP_REDUCE_NORMALIZED
kernel void KERNEL_NAME(global const REAL *restrict given, global const REAL *restrict operands, global REAL *restrict y,
                        const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  NORMALIZE_BEGIN
  EACH_PLANE {
    const size_t plane = PLANE(outer, i), n = plane / CHANNELS, c = plane % CHANNELS;
    KEPT_SUM(from_mean)
    SUM_ROWS(from_mean, FROM_MEAN)
    real_v value = (sum_of_lanes(from_mean) * (R(1.0) / PLANE_ROWS) - rest) * scale;
    AFFINE(value);
    value = value * SPLAT(REDUCED_SHARE);
    TAIL(value);
    y[plane] = LANE0(value);
  }
}
#else
kernel void KERNEL_NAME(global const REAL *x, global const REAL *restrict given, global const REAL *restrict operands,
                        global REAL *y, const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
#if STEP_NORMALIZE
  NORMALIZE_BEGIN
#else
  SOFTMAX_BEGIN
  const REAL scale = R(1.0) / total;
#endif
  EACH_PLANE {
    const size_t plane = PLANE(outer, i), n = plane / CHANNELS, c = plane % CHANNELS;
    for (int row = 0; row < PLANE_ROWS; row++) {
      const int d = row / OUT_H, h = row % OUT_H;
      const size_t base = (plane * PLANE_ROWS + row) * OUT_W;
      GATHER_BEGIN
      for (int w = 0; w < OUT_W; w += VEC) {
        const real_v loaded = load_lanes(x + base + w, OUT_W - w, R(0.0));
#if STEP_NORMALIZE
        const real_v deviation = (loaded - centre) * factor;
        real_v value = fma(deviation, scale, fma(deviation, scale_lost, offset));
        AFFINE(value);
#elif GIVEN_EXPONENTIALS
        real_v value = exp_below_v(loaded - SPLAT(largest)) * SPLAT(scale);
#else
        real_v value = loaded * SPLAT(scale);
#endif
        TAIL(value);
        GATHER(value, w, OUT_W - w)
#if USE_STORE
        store_lanes(value, y + base + w, OUT_W - w);
#endif
      }
      GATHER_END((n * PLANE_ROWS + row) * CHANNELS + c)
    }
  }
}
#endif
