// The input of the Winograd core on its way into panels: rows of one depth component, dealt out to sub-lines (core_winograd.cl).

// Where row `row` and input `k` along width of a tile lie in e, from the tile's lane.
#define ROW_AT(row) ((row) % M_H * (SUB_LINES * EDGE) + (row) / M_H * PITCH)
#define COLUMN_AT(k) ((k) % SUB_LINES * EDGE + (k) / SUB_LINES)
// Is the lane a tile of the box's first `tiles` tile rows?
#define IS_TILE(lane, tiles) ((lane) % ROW < POSITIONS_W && (lane) / ROW < (tiles))

#if VEC == 1
#define ANY_V(condition) (condition)
#else
#define ANY_V(condition) any(condition)
#endif

// Asks for what is read after this channel, whose rows lie too far apart for the hardware to foresee. It may lie outside the array.
#if defined(__clang__)
#define PREFETCH(address) __builtin_prefetch((const void *)(ulong)(address))
#else
#define PREFETCH(address)
#endif

// Deals PITCH tiles of a row out to sub-lines: line[s * EDGE + t] = row[M_W * t + s]. A little more of each is overwritten.
static void deal_out(global REAL *restrict line, global const REAL *restrict row) {
  for (int t = 0; t < PITCH; t += VEC) {
    global const REAL *const from = row + M_W * t;
#if M_W == 1
    STORE_V(LOAD_V(from), line + t);
#elif M_W == 2 && VEC > 1
    const real_v low = LOAD_V(from), high = LOAD_V(from + VEC);
    STORE_V((real_v)(low.even, high.even), line + t);
    STORE_V((real_v)(low.odd, high.odd), line + EDGE + t);
#elif M_W == 3 && VEC > 1
    const real_v low = LOAD_V(from), middle = LOAD_V(from + VEC), high = LOAD_V(from + 2 * VEC);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_0_LOW), high, DEAL_0_HIGH), line + t);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_1_LOW), high, DEAL_1_HIGH), line + EDGE + t);
    STORE_V(PICK_V(PICK_V(low, middle, DEAL_2_LOW), high, DEAL_2_HIGH), line + 2 * EDGE + t);
#else
    for (int s = 0; s < M_W; s++)
      for (int i = 0; i < VEC; i++) line[s * EDGE + t + i] = from[M_W * i + s];
#endif
  }
}
