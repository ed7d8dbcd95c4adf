// One way of combining slices, included once for each: defines OVER_SLICES(value, partial, lane, slice), which combines one value of
// each slice by SLICES_COMBINE(a, b).
static REAL OVER_SLICES(const REAL value, local REAL *partial, const int lane, const int slice) {
  if (SLICES == 1) return value;
  partial[slice * LANES + lane] = value;
  barrier(CLK_LOCAL_MEM_FENCE);  // all partial values are there
  for (int left = SLICES / 2; left >= LAST_SLICES; left /= 2) {
    if (slice < left) partial[slice * LANES + lane] = SLICES_COMBINE(partial[slice * LANES + lane], partial[(slice + left) * LANES + lane]);
    barrier(CLK_LOCAL_MEM_FENCE);  // pairs are combined
  }
  REAL total = partial[lane];
  for (int i = 1; i < SLICES && i < LAST_SLICES; i++) total = SLICES_COMBINE(total, partial[i * LANES + lane]);
  barrier(CLK_LOCAL_MEM_FENCE);  // everybody has read them
  return total;
}
#undef OVER_SLICES
#undef SLICES_COMBINE
