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

// Where input `place` of phase `phase` of an axis lies in memory: neighbours of a phase lie APART.
#define SOURCE_AT(axis, place, phase) ((place) * APART_##axis + (phase) - LEAD_##axis)

// Vector k of phase p of the row.
static inline real_v load_phase(global const REAL *row, const int p, const int k) {
#if APART_W == 1
  return LOAD_V(row + k * VEC);
#elif APART_W == 2 && VEC > 1
  const real_v low = LOAD_V(row + 2 * k * VEC), high = LOAD_V(row + (2 * k + 1) * VEC);
  return p == 0 ? (real_v)(low.even, high.even) : (real_v)(low.odd, high.odd);
#else
  REAL lanes[VEC];
  for (int i = 0; i < VEC; i++) lanes[i] = row[(k * VEC + i) * APART_W + p];
  return LOAD_V(lanes);
#endif
}

// Deals PITCH tiles of a row out to sub-lines of each phase: line[s * EDGE + t] = row[M_W * t + s]. A little more of each is overwritten.
static void deal_out(global REAL *restrict lines, global const REAL *restrict row) {
  for (int t = 0; t < PITCH; t += VEC)
#pragma unroll
    for (int p = 0; p < DEALT_W; p++) {
      global const REAL *const from = row + APART_W * M_W * t;
      global REAL *const line = lines + p * CHANNEL;
      real_v x[M_W];
#pragma unroll
      for (int k = 0; k < M_W; k++) x[k] = load_phase(from, p, k);
#if M_W == 1
      STORE_V(x[0], line + t);
#elif M_W == 2 && VEC > 1
      STORE_V((real_v)(x[0].even, x[1].even), line + t);
      STORE_V((real_v)(x[0].odd, x[1].odd), line + EDGE + t);
#elif M_W == 3 && VEC > 1
      STORE_V(PICK_V(PICK_V(x[0], x[1], DEAL_0_LOW), x[2], DEAL_0_HIGH), line + t);
      STORE_V(PICK_V(PICK_V(x[0], x[1], DEAL_1_LOW), x[2], DEAL_1_HIGH), line + EDGE + t);
      STORE_V(PICK_V(PICK_V(x[0], x[1], DEAL_2_LOW), x[2], DEAL_2_HIGH), line + 2 * EDGE + t);
#else
      for (int s = 0; s < M_W; s++)
        for (int i = 0; i < VEC; i++) line[s * EDGE + t + i] = ((const REAL *)x)[M_W * i + s];
#endif
    }
}
