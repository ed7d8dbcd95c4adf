// Combining slices: SLICES work-items share a result (a column of the tiled kernel's results, or a place of a reduction), and a
// work-group has LANES results side by side. Every work-item of the group has to call these; all slices get the answer. The host
// defines SLICES and LANES, both powers of two; `partial` has an element for each work-item.

// Slices that are combined one after another, once a tree has left no more of them.
#define LAST_SLICES 8

// Defines NAME(value, partial, lane, slice): one value of each slice combined by COMBINE(a, b).
#define OVER_SLICES(NAME, COMBINE)                                                                         \
  static REAL NAME(const REAL value, local REAL *partial, const int lane, const int slice) {              \
    if (SLICES == 1) return value;                                                                         \
    partial[slice * LANES + lane] = value;                                                                 \
    barrier(CLK_LOCAL_MEM_FENCE); /* all partial values are there */                                       \
    for (int left = SLICES / 2; left >= LAST_SLICES; left /= 2) {                                          \
      if (slice < left) {                                                                                  \
        local REAL *mine = partial + slice * LANES + lane;                                                 \
        *mine = COMBINE(*mine, partial[(slice + left) * LANES + lane]);                                    \
      }                                                                                                    \
      barrier(CLK_LOCAL_MEM_FENCE); /* pairs are combined */                                               \
    }                                                                                                      \
    REAL total = partial[lane];                                                                            \
    for (int i = 1; i < SLICES && i < LAST_SLICES; i++) total = COMBINE(total, partial[i * LANES + lane]); \
    barrier(CLK_LOCAL_MEM_FENCE); /* everybody has read them */                                            \
    return total;                                                                                          \
  }

#define SUM_OF(a, b) ((a) + (b))
OVER_SLICES(sum_over_slices, SUM_OF)
OVER_SLICES(max_over_slices, max_v)
