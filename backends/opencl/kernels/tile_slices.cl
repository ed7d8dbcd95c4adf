// Combining the slices of a column: in the epilogue of a tiled kernel, SLICES work-items share a column of results, each with every
// SLICES-th channel. Every work-item of the group has to call these.

// The sum of one value of each slice.
static REAL sum_over_slices(const REAL value, local REAL *partial, const int lane, const int slice) {
  if (SLICES == 1) return value;
  partial[slice * LANES + lane] = value;
  barrier(CLK_LOCAL_MEM_FENCE);  // all partial sums are there
  REAL total = partial[lane];
  for (int i = 1; i < SLICES; i++) total += partial[i * LANES + lane];
  barrier(CLK_LOCAL_MEM_FENCE);  // everybody has read the sums
  return total;
}

// The largest value of the slices; NaN when any is NaN.
static REAL max_over_slices(const REAL value, local REAL *partial, const int lane, const int slice) {
  if (SLICES == 1) return value;
  partial[slice * LANES + lane] = value;
  barrier(CLK_LOCAL_MEM_FENCE);  // all partial values are there
  REAL largest = partial[lane];
  for (int i = 1; i < SLICES; i++) largest = max_keep_nan(largest, partial[i * LANES + lane]);
  barrier(CLK_LOCAL_MEM_FENCE);  // everybody has read them
  return largest;
}
