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

static REAL sum_of_lanes(const real_v value) {
  REAL lanes[VEC];
  STORE_V(value, lanes);
  REAL total = lanes[0];
  for (int i = 1; i < VEC; i++) total += lanes[i];
  return total;
}

// The largest lane; NaN when any lane is NaN.
static REAL max_of_lanes(const real_v value) {
  REAL lanes[VEC];
  STORE_V(value, lanes);
  REAL largest = lanes[0];
  for (int i = 1; i < VEC; i++) largest = (lanes[i] > largest || lanes[i] != lanes[i]) ? lanes[i] : largest;
  return largest;
}
