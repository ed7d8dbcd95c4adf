// What a launch leaves of each row that it makes, for the next one. Needs numeric.cl and lanes.cl.
//
// A row is (n, c, d, h), OUT_W elements; its numbers lie at its own place in `partials`, so that they do not depend on who computes
// it, channels side by side, as kernels make them: [n][d][h][c]. Kernels write GATHER_BEGIN, then GATHER(v, w, left) for each vector
// of the row, of which `left` lanes count, from w = 0 on, then GATHER_END(place). The host defines OUT_W and GATHER_ROWS, the rows of the whole value, and one of
//   GATHER_MOMENTS       [2][places]: mean, and sum of squared deviations from it
//   GATHER_TOTAL         [places]: GATHER_COMBINE(a, b) of GATHER_LIFT(x), from GATHER_IDENTITY on
//   GATHER_EXPONENTIALS  [2][places]: the largest value, and the sum of exponentials of all others' distances from it
// or none. OUT_W is at least a vector.

#if GATHER_MOMENTS
// Deviations from the row's first vector, lane by lane, so that nothing cancels: they are as large as those from the mean at most,
// times the number of vectors, which groups.py limits. Then the lanes are combined, by deviations from the first lane.
// (Chan, Golub and LeVeque, 1983.)
static REAL tree_sum(const real_v v) {
#if VEC == 16
  const PASTE(REAL, 8) eight = v.lo + v.hi;
  const PASTE(REAL, 4) four = eight.lo + eight.hi;
#elif VEC == 8
  const PASTE(REAL, 4) four = v.lo + v.hi;
#elif VEC == 4
  const real_v four = v;
#endif
#if VEC == 1
  return v;
#elif VEC == 2
  return v.x + v.y;
#else
  return (four.x + four.z) + (four.y + four.w);
#endif
}

static void keep_moments(const real_v shift, const real_v sums, const real_v squares, global REAL *restrict partials,
                         const size_t place) {
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = OUT_W / VEC + (i < OUT_W % VEC);
  const real_v counts = LOAD_V(lanes);
  const real_v means = sums / counts, from_first = (shift - SPLAT(LANE0(shift))) + means;
  const REAL mean = tree_sum(from_first * counts) * (R(1.0) / OUT_W);
  const real_v deviation = from_first - SPLAT(mean);
  const real_v within = squares - sums * means;
  partials[place] = LANE0(shift) + mean;
  partials[GATHER_ROWS + place] = tree_sum(fma(deviation * counts, deviation, within));
}

#define GATHER_BEGIN real_v gathered_shift = SPLAT(R(0.0)), gathered_sums = gathered_shift, gathered_squares = gathered_shift;
#define GATHER(v, w, left)                                                                     \
  {                                                                                            \
    if ((w) == 0) gathered_shift = v;                                                          \
    const real_v deviation = first_lanes((v) - gathered_shift, left, R(0.0));                  \
    gathered_sums += deviation;                                                                \
    gathered_squares = fma(deviation, deviation, gathered_squares);                            \
  }
#define GATHER_END(place) keep_moments(gathered_shift, gathered_sums, gathered_squares, partials, place);

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
    const real_v distance = exp_v(-fabs(element - gathered_largest));                          \
    const real_v below = (element == gathered_largest) ? C(1.0) : distance;                    \
    gathered = (element > gathered_largest) ? fma(gathered, below, counts) : fma(below, counts, gathered); \
    gathered_largest = max_v(gathered_largest, element);                                       \
  }
static void keep_exponentials(const real_v largest_v, const real_v sums_v, global REAL *restrict partials, const size_t place) {
  const REAL all = max_of_lanes(largest_v);
  const real_v below = (largest_v == SPLAT(all)) ? C(1.0) : exp_v(largest_v - SPLAT(all));
  partials[place] = all;
  partials[GATHER_ROWS + place] = sum_of_lanes(sums_v * below);
}
#define GATHER_END(place) keep_exponentials(gathered_largest, gathered, partials, place);

#else
#define GATHER_BEGIN
#define GATHER(v, w, left)
#define GATHER_END(place)
#endif
