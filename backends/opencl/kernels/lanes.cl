// Vectors that may stick out of a row: loads, stores and sums of their first lanes. Needs numeric.cl.

// The first min(count, VEC) elements at p; the other lanes hold fill.
static real_v load_lanes(global const REAL *p, const int count, const REAL fill) {
  if (count >= VEC) return LOAD_V(p);
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = i < count ? p[i] : fill;
  return LOAD_V(lanes);
}

static void store_lanes(const real_v value, global REAL *p, const int count) {
  if (count >= VEC) {
    STORE_V(value, p);
    return;
  }
  REAL lanes[VEC];
  STORE_V(value, lanes);
  for (int i = 0; i < count; i++) p[i] = lanes[i];
}

// The first min(count, VEC) lanes of a vector; the other ones become fill.
static real_v first_lanes(const real_v value, const int count, const REAL fill) {
  if (count >= VEC) return value;
  REAL lanes[VEC];
  STORE_V(value, lanes);
  for (int i = 0; i < VEC; i++) lanes[i] = i < count ? lanes[i] : fill;
  return LOAD_V(lanes);
}

// Defines NAME(value): the lanes of a vector combined by COMBINE(a, b), by halves, which go on at the same time.
#define OVER_LANES(NAME, COMBINE)                                                      \
  static REAL NAME(const real_v value) {                                               \
    REAL lanes[VEC];                                                                   \
    STORE_V(value, lanes);                                                             \
    for (int n = VEC / 2; n > 0; n /= 2)                                               \
      for (int i = 0; i < n; i++) lanes[i] = COMBINE(lanes[i], lanes[i + n]);          \
    return lanes[0];                                                                   \
  }

#define ADD_LANES(a, b) ((a) + (b))
OVER_LANES(max_of_lanes, LARGER)

// The sum of all lanes, by halves, and of what each addition rounded off (Knuth's two-sum). For finite lanes only. Halves are
// vectors: with lanes summed up one by one, statistics of rows of four vectors took up to half of a convolution's time.
#define ADD_HALVES(lanes, sum, v)                                                                  \
  const PASTE(REAL, lanes) sum = v.lo + v.hi, sum##_second = sum - v.lo;                           \
  const PASTE(REAL, lanes) sum##_lost =                                                            \
      ((v.lo - (sum - sum##_second)) + (v.hi - sum##_second)) + (v##_lost.lo + v##_lost.hi);
static REAL sum_of_lanes(const real_v v) {
#if VEC == 1
  return v;
#else
  const real_v v_lost = SPLAT(R(0.0));
#if VEC == 16
  ADD_HALVES(8, eight, v) ADD_HALVES(4, four, eight) ADD_HALVES(2, two, four) ADD_HALVES(, one, two)
#elif VEC == 8
  ADD_HALVES(4, four, v) ADD_HALVES(2, two, four) ADD_HALVES(, one, two)
#elif VEC == 4
  ADD_HALVES(2, two, v) ADD_HALVES(, one, two)
#else
  ADD_HALVES(, one, v)
#endif
  return one + one_lost;
#endif
}
