// Folding pooling windows while the convolution's lines are in cache.
//
// Row o of the convolution belongs to window row o / WINDOW. Along width, the STRIDE_W phases of one position m lie in different
// planes of a line, so a window that is a multiple of the stride folds planes onto each other without moving lanes, and then
// WINDOW_W / STRIDE_W neighbouring positions; a stride that is a multiple of the window keeps STRIDE_W / WINDOW_W planes apart.
// pooled: [window rows along depth][FOLD_CHANNELS][FOLD_PLANES][FOLD_LINE], window rows along height FOLD_ROW apart.
// The host defines the reduction: FOLD_COMBINE(a, b) of vectors, FOLD_COMBINE_ONE(a, b) of numbers, FOLD_IDENTITY, FOLD_FINISH(t).

static void fold_clear(global REAL *restrict pooled) {
  for (int i = 0; i < FOLD_BOX_D * FOLD_CHANNELS * FOLD_PLANES * FOLD_LINE; i += VEC) STORE_V(SPLAT(FOLD_IDENTITY), pooled + i);
}

// Adds one row: line points at the row's first position, pooled at its window row.
static void fold_row(global REAL *restrict pooled, global const REAL *restrict line) {
  for (int c = 0; c < FOLD_CHANNELS; c++)
    for (int rw = 0; rw < STRIDE_W; rw++) {
      global REAL *target = pooled + (c * FOLD_PLANES + rw * FOLD_PLANES / STRIDE_W) * FOLD_LINE;
      global const REAL *source = line + (c * STRIDE_W + rw) * LINE;
      for (int m = 0; m < POSITIONS_W; m += VEC)
        STORE_V(FOLD_COMBINE(LOAD_V(target + m), LOAD_V(source + m)), target + m);
    }
}

// Ends the fold of one window row along depth: neighbouring positions, the mean's factor, the steps that ride along.
static void fold_finish(global REAL *restrict pooled, global const REAL *restrict operands) {
  for (int c = 0; c < FOLD_CHANNELS; c++) {
    global REAL *line = pooled + c * (FOLD_PLANES * FOLD_LINE);
#if FOLD_NEIGHBOURS > 1
    for (int row = 0; row < FOLD_BOX_H; row++)
      for (int m = 0; m < POSITIONS_W / FOLD_NEIGHBOURS; m++) {
        global const REAL *source = line + row * FOLD_ROW + m * FOLD_NEIGHBOURS;
        REAL folded = source[0];
        for (int j = 1; j < FOLD_NEIGHBOURS; j++) folded = FOLD_COMBINE_ONE(folded, source[j]);
        line[row * FOLD_ROW + m] = folded;
      }
#endif
    for (int i = 0; i < FOLD_PLANES * FOLD_LINE; i += VEC) {
      real_v value = FOLD_FINISH(LOAD_V(line + i));
      FOLD_TAIL(value, c);
      STORE_V(value, line + i);
    }
  }
}
