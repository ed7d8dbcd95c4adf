// Combining slices: SLICES work-items share a result (a column of the tiled kernel's results, or a place of a reduction), and a
// work-group has LANES results side by side. Every work-item of the group has to call these; all slices get the answer. The host
// defines SLICES and LANES, both powers of two; `partial` has an element for each work-item.

// Slices that are combined one after another, once a tree has left no more of them.
#define LAST_SLICES 8

#define SUM_OF(a, b) ((a) + (b))
#define OVER_SLICES sum_over_slices
#define SLICES_COMBINE SUM_OF
#include "over_slices.cl"
#define OVER_SLICES max_over_slices
#define SLICES_COMBINE max_v
#include "over_slices.cl"

// What to multiply deviations by before they are squared, by how far values lie from their shift (numeric.cl).
static REAL factor_over_slices(const REAL farthest, local REAL *partial, const int lane, const int slice) {
  return max_over_slices(farthest, partial, lane, slice) < FAR_APART ? R(1.0) : FAR;
}
