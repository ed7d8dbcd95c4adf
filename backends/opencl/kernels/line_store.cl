// Rows of results on their way from lines to where they belong. Needs numeric.cl, lanes.cl and row_statistics.cl.
//
// A line holds STORE_PLANES phases, STORE_LINE apart, which rows interleave.

// With BOX_W an item is as many positions along width, not all of them, and a row the part of it that these make.
#if BOX_W
#define ROW_W min(OUT_W - first, BOX_W * STRIDE_W)
#else
#define ROW_W OUT_W
#endif

#if (STORE_PLANES == 3 || STORE_PLANES == 6) && VEC > 1
#define MERGE_V(a, b, c, s) PICK_V(PICK_V(a, b, MERGE_##s##_LOW), c, MERGE_##s##_HIGH)
static inline void merge(const real_v a, const real_v b, const real_v c, real_v *row) {
  row[0] = MERGE_V(a, b, c, 0);
  row[1] = MERGE_V(a, b, c, 1);
  row[2] = MERGE_V(a, b, c, 2);
}
#endif

// VEC positions of a row: STORE_PLANES phases, STORE_LINE apart, interleaved.
static inline void interleave(global const REAL *line, real_v *row) {
#if STORE_PLANES == 1
  row[0] = LOAD_V(line);
#elif STORE_PLANES == 2 && VEC > 1
  const real_v even = LOAD_V(line), odd = LOAD_V(line + STORE_LINE);
  row[0] = INTERLEAVE_LOW(even, odd);
  row[1] = INTERLEAVE_HIGH(even, odd);
#elif STORE_PLANES == 4 && VEC > 1
  const real_v p0 = LOAD_V(line), p1 = LOAD_V(line + STORE_LINE), p2 = LOAD_V(line + 2 * STORE_LINE), p3 = LOAD_V(line + 3 * STORE_LINE);
  const real_v even_low = INTERLEAVE_LOW(p0, p2), odd_low = INTERLEAVE_LOW(p1, p3);
  const real_v even_high = INTERLEAVE_HIGH(p0, p2), odd_high = INTERLEAVE_HIGH(p1, p3);
  row[0] = INTERLEAVE_LOW(even_low, odd_low);
  row[1] = INTERLEAVE_HIGH(even_low, odd_low);
  row[2] = INTERLEAVE_LOW(even_high, odd_high);
  row[3] = INTERLEAVE_HIGH(even_high, odd_high);
#elif STORE_PLANES == 3 && VEC > 1
  merge(LOAD_V(line), LOAD_V(line + STORE_LINE), LOAD_V(line + 2 * STORE_LINE), row);
#elif STORE_PLANES == 6 && VEC > 1
  real_v low[3], high[3];
  for (int p = 0; p < 3; p++) {
    const real_v even = LOAD_V(line + p * STORE_LINE), odd = LOAD_V(line + (p + 3) * STORE_LINE);
    low[p] = INTERLEAVE_LOW(even, odd);
    high[p] = INTERLEAVE_HIGH(even, odd);
  }
  merge(low[0], low[1], low[2], row);
  merge(high[0], high[1], high[2], row + 3);
#else
  for (int i = 0; i < STORE_PLANES * VEC; i++) ((REAL *)row)[i] = line[i % STORE_PLANES * STORE_LINE + i / STORE_PLANES];
#endif
}

// Writes one row of ROW_W elements from position m on, as far as vectors are whole, by WRITE_V; then the rest, by WRITE_LEFT.
#define WRITE_ROW(WRITE_V)                                                                             \
  for (; STORE_PLANES * (m + VEC) <= ROW_W; m += VEC) {                                                \
    real_v row[STORE_PLANES];                                                                          \
    interleave(line + m, row);                                                                         \
    for (int i = 0; i < STORE_PLANES; i++) WRITE_V(row[i], to + m * STORE_PLANES + i * VEC);           \
  }
#define WRITE_REST(WRITE_LEFT)                                                                         \
  for (; STORE_PLANES * m < ROW_W; m += VEC) {                                                         \
    real_v row[STORE_PLANES];                                                                          \
    interleave(line + m, row);                                                                         \
    for (int i = 0; i < STORE_PLANES; i++) {                                                           \
      const int left = ROW_W - m * STORE_PLANES - i * VEC;                                             \
      if (left > 0) WRITE_LEFT(row[i], to + ROW_W - left, left);                                       \
    }                                                                                                  \
  }

#if USE_ROWS
// The same with STORE_TAIL(x), the steps that need a result's place, and with statistics of the row. With USE_STORE 0 nothing is
// written but these.
static void store_row(global REAL *restrict y, global const REAL *restrict line, global const REAL *restrict operands, const int n,
                      const int c, const int d, const int h, const int first PARAMETERS) {
  global REAL *const to = y + first;
  GATHER_BEGIN
#define FINISH(v, w, left)  \
  real_v value = v;         \
  STORE_TAIL(value);        \
  GATHER(value, w, left)
#if USE_STORE
#define FINISH_V(v, p)                      \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
    STORE_V(value, p);                      \
  }
#define FINISH_LEFT(v, p, left)             \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, left)                      \
    store_lanes(value, p, left);            \
  }
#define FINISH_STREAM_V(v, p)               \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
    STREAM_V(value, p);                     \
  }
#else
#define FINISH_V(v, p)                      \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, VEC)                       \
  }
#define FINISH_LEFT(v, p, left)             \
  {                                         \
    const int w = (p) - y;                  \
    FINISH(v, w, left)                      \
  }
#endif
  int m = 0;
#if USE_STREAM && USE_STORE && defined(STREAM_V)
  if ((size_t)to % sizeof(real_v) == 0) {
    WRITE_ROW(FINISH_STREAM_V)
  }
#endif
  WRITE_ROW(FINISH_V)
  WRITE_REST(FINISH_LEFT)
  GATHER_END((((size_t)n * OUT_D + d) * OUT_H + h) * OUT_C + c)
}
#else
static void store_row(global REAL *restrict y, global const REAL *restrict line, const int first) {
  global REAL *const to = y + first;
  int m = 0;
#if USE_STREAM && defined(STREAM_V)
  if ((size_t)to % sizeof(real_v) == 0) {
    WRITE_ROW(STREAM_V)
  }
#endif
  WRITE_ROW(STORE_V)
  WRITE_REST(store_lanes)
}
#endif

// Writes one row of channels c0 .. end - 1; line: that of channel c0. d, h: the row's place in the output; first: the item's first
// column.
static void store_rows(global REAL *restrict y, const int n, const int c0, const int end, const int d, const int h, const int first,
                       global const REAL *restrict line, global const REAL *restrict operands PARAMETERS) {
  if (d >= OUT_D || h >= OUT_H) return;
  global REAL *const row = y + (((size_t)n * OUT_C * OUT_D + d) * OUT_H + h) * OUT_W;
  for (int c = c0; c < end; c++) {
    global REAL *const to = row + (size_t)c * ((size_t)OUT_D * OUT_H * OUT_W);
#if USE_ROWS
    store_row(to, line + (c - c0) * (STORE_PLANES * STORE_LINE), operands, n, c, d, h, first ARGUMENTS);
#else
    store_row(to, line + (c - c0) * (STORE_PLANES * STORE_LINE), first);
#endif
  }
}

// What the core is given besides to store rows by itself.
#if STORE_EARLY
#define STORE_PARAMETERS , global REAL *restrict y, const int n, const int first_w PARAMETERS
#define STORE_ARGUMENTS , y, n, first_w ARGUMENTS
// Where pointers to global memory are addresses of the process, the cache is told which lines will be written.
#define PREFETCH(pointer)
#if USE_PREFETCH && defined(__has_builtin)
#if __has_builtin(__builtin_prefetch)
#undef PREFETCH
#define PREFETCH(pointer) __builtin_prefetch((const void *)(size_t)(pointer), 1)
#endif
#endif
// Announces what store_rows will write.
static void fetch_rows(global REAL *restrict y, const int n, const int c0, const int end, const int d, const int h, const int first) {
  if (d >= OUT_D || h >= OUT_H) return;
  for (int c = c0; c < end; c++)
    for (int w = 0; w < ROW_W; w += 64 / sizeof(REAL))
      PREFETCH(y + ((((size_t)n * OUT_C + c) * OUT_D + d) * OUT_H + h) * OUT_W + first + w);
}
#else
#define STORE_PARAMETERS
#define STORE_ARGUMENTS
#endif
