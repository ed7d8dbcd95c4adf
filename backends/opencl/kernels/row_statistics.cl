// What a launch leaves of each row that it makes, for the next one. Needs numeric.cl and lanes.cl.
//
// A row is (n, c, d, h), OUT_W elements; its numbers lie at its own place in `partials`, so that they do not depend on who computes
// it, channels side by side, as kernels make them: [n][d][h][c]. Kernels write GATHER_BEGIN, then GATHER(v, w, left) for each vector
// of the row, of which `left` lanes count, from w = 0 on, then GATHER_END(place). The host defines OUT_W and GATHER_ROWS, the rows of the whole value, and one of
//   GATHER_MOMENTS       [3][places]: mean, what it lacks, and the sum of squared deviations from both together; where that
//                        overflows, minus the one of deviations times FAR
//   GATHER_TOTAL         [places]: GATHER_COMBINE(a, b) of GATHER_LIFT(x), from GATHER_IDENTITY on
//   GATHER_EXPONENTIALS  [2][places]: the largest value, and the sum of exponentials of all others' distances from it
// or none. OUT_W is at least a vector.

#if GATHER_MOMENTS
// Lane by lane: the mean, brought up to date with each vector, and the sum of squared deviations from it (Welford, 1962), both with
// compensation, and that sum once more, of deviations times FAR. Then the lanes are combined (Chan, Golub and LeVeque, 1983), around
// a mean that is corrected once.
static REAL squares_of_lanes(const real_v deviation, const real_v counts, const real_v within) {
  return sum_of_lanes(fma(deviation * counts, deviation, within));
}

static void keep_moments(const real_v means, const real_v means_lost, const real_v squares, const real_v far_squares,
                         global REAL *restrict partials, const size_t place) {
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = OUT_W / VEC + (i < OUT_W % VEC);
  const real_v counts = LOAD_V(lanes), shares = counts * (R(1.0) / OUT_W);
  const REAL first = LANE0(means), mean = first + sum_of_lanes((means - SPLAT(first)) * shares);
  const real_v apart = (means - SPLAT(mean)) - means_lost;
  const REAL rest = sum_of_lanes(apart * shares);
  const real_v deviation = apart - SPLAT(rest);
  const REAL total = squares_of_lanes(deviation, counts, squares);
  partials[place] = mean;
  partials[GATHER_ROWS + place] = rest;
  partials[2 * (size_t)GATHER_ROWS + place] =
      total < INFINITY ? total : -squares_of_lanes(deviation * FAR, counts, far_squares);
}

#define GATHER_BEGIN                                                                           \
  KEPT_SUM(gathered_means)                                                                     \
  KEPT_SUM(gathered_squares)                                                                   \
  real_v gathered_far = SPLAT(R(0.0));
#define FROM_GATHERED(v, left) first_lanes(((v) - gathered_means) + gathered_means_lost, left, R(0.0))
#define GATHER(v, w, left)                                                                     \
  {                                                                                            \
    const real_v before = FROM_GATHERED(v, left);                                              \
    KEEP(gathered_means, before * (R(1.0) / ((w) / VEC + 1)))                                  \
    const real_v after = FROM_GATHERED(v, left);                                               \
    KEEP(gathered_squares, before * after)                                                     \
    gathered_far = fma(before * FAR, after * FAR, gathered_far);                               \
  }
#define GATHER_END(place)                                                                      \
  keep_moments(gathered_means, gathered_means_lost, gathered_squares, gathered_far, partials, place);

#elif GATHER_TOTAL
OVER_LANES(gathered_lanes, GATHER_COMBINE_ONE)
#define GATHER_BEGIN real_v gathered = SPLAT(GATHER_IDENTITY);
#define GATHER(v, w, left) gathered = GATHER_COMBINE(gathered, first_lanes(GATHER_LIFT(v), left, GATHER_IDENTITY));
#define GATHER_END(place) partials[place] = gathered_lanes(gathered);

#elif GATHER_EXPONENTIALS
// One exponential an element: of the distance between it and the largest one so far, whichever of them is larger.
#define GATHER_BEGIN real_v gathered_largest = SPLAT(-INFINITY), gathered = SPLAT(R(0.0));
#define GATHER(v, w, left)                                                                     \
  {                                                                                            \
    const real_v element = first_lanes(v, left, -INFINITY), counts = first_lanes(C(1.0), left, R(0.0)); \
    const real_v distance = exp_below_v(-fabs(element - gathered_largest));                          \
    const real_v below = (element == gathered_largest) ? C(1.0) : distance;                    \
    gathered = (element > gathered_largest) ? fma(gathered, below, counts) : fma(below, counts, gathered); \
    gathered_largest = max_v(gathered_largest, element);                                       \
  }
static void keep_exponentials(const real_v largest_v, const real_v sums_v, global REAL *restrict partials, const size_t place) {
  const REAL all = max_of_lanes(largest_v);
  const real_v below = (largest_v == SPLAT(all)) ? C(1.0) : exp_below_v(largest_v - SPLAT(all));
  partials[place] = all;
  partials[GATHER_ROWS + place] = sum_of_lanes(sums_v * below);
}
#define GATHER_END(place) keep_exponentials(gathered_largest, gathered, partials, place);

#else
#define GATHER_BEGIN
#define GATHER(v, w, left)
#define GATHER_END(place)
#endif
