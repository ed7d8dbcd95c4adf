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

// Defines NAME(value): the lanes of a vector combined by COMBINE(a, b).
#define OVER_LANES(NAME, COMBINE)                                      \
  static REAL NAME(const real_v value) {                               \
    REAL lanes[VEC];                                                   \
    STORE_V(value, lanes);                                             \
    REAL total = lanes[0];                                             \
    for (int i = 1; i < VEC; i++) total = COMBINE(total, lanes[i]);    \
    return total;                                                      \
  }

#define ADD_LANES(a, b) ((a) + (b))
OVER_LANES(sum_of_lanes, ADD_LANES)
OVER_LANES(max_of_lanes, LARGER)
