// Core of the direct convolution: register tiles over lines of packed input.
//
// The box's input rows are packed once, [plane][channel][row][PITCH], zero where a tap may reach outside along height and width;
// planes outside the tensor are skipped. Every tap is then a shifted read of the packed lines. Where positions lie APART_W inputs
// apart, a row is packed in PARTS_W parts, each with the inputs of one remainder PART_W, so that neighbours are read side by side;
// along height and depth, the order of the rows (INPUT_H, INPUT_D) does the same. With USE_CHANNELS output channels are in the lanes,
// positions STEP_W apart are read one by one, and rows stay as they are (APART_W 1).

// The packed row that tap (td, th) of a phase reads at the first position of a chunk of row md of the box along depth; null when all
// that the chunk would read there lies outside the tensor, and adds nothing.
static global const REAL *row_of_tap(global const REAL *restrict packed, const int first_d, const int first_h, const int rd,
                                     const int rh, const int td, const int th, const int md, const int chunk) {
  const int plane = md + SLOT_D[rd][td], row = SLOT_H[rh][th];
  const bool inside = (uint)(first_d + INPUT_D[plane]) < ID && first_h + INPUT_H[row + CHUNK_FIRST_H[chunk]] < IH &&
                      first_h + INPUT_H[row + CHUNK_LAST_H[chunk]] >= 0;
  return inside ? packed + plane * PLANE + row * PITCH + CHUNK_X[chunk] : 0;
}

// So many products, or all of a tap, are added up before they join the whole sum: its error then grows with the length of a block and
// the number of blocks, not with their product. Totals wait in the first-level cache; that takes about 4 % of a kernel's time.
#if USE_CHANNELS
#define SUM_BLOCK 32
#include "channels_tiles.cl"
#else
#define SUM_BLOCK 16
#include "conv_tiles.cl"
#endif

#if APART_W > 1 || BOX_W
// line[i] = row[start + APART_W * i] for all i below count, 0 outside the row.
static void pick_row(global REAL *restrict line, global const REAL *restrict row, const int start, const int count,
                     global const REAL *restrict operands, const int channel) {
  const int first = start < 0 ? min(count, (APART_W - 1 - start) / APART_W) : 0;
  const int end = max(first, min(count, (IW - start + APART_W - 1) / APART_W));
  clear(line, first);
  int i = first;
#if APART_W == 1
  for (; i + VEC <= end; i += VEC) {
    real_v value = LOAD_V(row + start + i);
    PROLOGUE(value, channel);
    STORE_V(value, line + i);
  }
#elif APART_W == 2 && VEC > 2
  for (; i + VEC <= end && start + 2 * (i + VEC) <= IW; i += VEC) {
    const real_v low = LOAD_V(row + start + 2 * i), high = LOAD_V(row + start + 2 * i + VEC);
    real_v value = (real_v)(low.even, high.even);
    PROLOGUE(value, channel);
    STORE_V(value, line + i);
  }
  // The last vector ends with the row: its lanes are the odd ones from one element earlier on, since nothing is read behind the row.
  if (i < end && end - first >= VEC && start + 2 * (end - VEC) > 0) {
    global const REAL *const last = row + start + 2 * (end - VEC) - 1;
    const real_v low = LOAD_V(last), high = LOAD_V(last + VEC);
    real_v value = (real_v)(low.odd, high.odd);
    PROLOGUE(value, channel);
    STORE_V(value, line + end - VEC);
    i = end;
  }
#endif
  for (; i < end; i += VEC) {
    REAL lanes[VEC];
    for (int j = 0; j < VEC; j++) lanes[j] = i + j < end ? row[start + (i + j) * APART_W] : R(0.0);
    real_v value = LOAD_V(lanes);
    PROLOGUE(value, channel);
    store_lanes(value, line + i, end - i);
  }
  clear(line + end, count - end);
}
#endif

// Packs the input rows of one box: planes APART_D*first_d + INPUT_D[..], rows APART_H*first_h + INPUT_H[..]; with BOX_W, of each
// what the taps of positions first_w .. first_w + BOX_W - 1 reach.
static void pack_box(global REAL *restrict packed, global const REAL *restrict x, const int first_d, const int first_h,
                     const int first_w, global const REAL *restrict operands) {
  for (int plane = 0; plane < PLANES; plane++) {
    const int d = first_d * APART_D + INPUT_D[plane];
    if ((uint)d >= ID) continue;
    for (int row = 0; row < ROWS; row++) {
      const int h = first_h * APART_H + INPUT_H[row];
      global REAL *line = packed + (size_t)plane * PLANE + row * PITCH;
      if ((uint)h < IH) {
        global const REAL *source = x + ((size_t)d * IH + h) * IW;
        for (int c = 0; c < IC; c++)
#if APART_W == 1 && !BOX_W
          combine_row(line + c * CHANNEL, source + (size_t)c * ((size_t)ID * IH * IW), 0, 1, operands, c);
#else
          for (int part = 0; part < PARTS_W; part++)
            pick_row(line + c * CHANNEL + part * (ROWS * PITCH), source + (size_t)c * ((size_t)ID * IH * IW),
                     (BOX_W ? first_w * STEP_W + LOW_W * APART_W : 0) + PART_W[part], PART_EXTENT[part], operands, c);
#endif
      } else {
        for (int c = 0; c < IC; c++)
          for (int part = 0; part < PARTS_W; part++) clear(line + c * CHANNEL + part * (ROWS * PITCH), PART_EXTENT[part]);
      }
    }
  }
}

static void begin_box(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                      const int first_w, global const REAL *restrict operands) {
  pack_box(scratch + LEAD, x, first_d, first_h, first_w, operands);
}

// All phases along width of the rows of one (rd, rh): lines [BOX_D][LINE_CHANNELS][STRIDE_W][LINE].
// A ragged last tile writes past its group; the next group overwrites that, and LINE_CHANNELS leaves room behind the last one.
// With STORE_EARLY all channels share the place of the first ones, since rows are stored as soon as they are complete: CHUNK_ROWS of
// them after each register tile. So memory takes them while the next tile is computed.
static void convolve(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                     const int rd, const int rh, const int step, global const REAL *restrict weights,
                     global REAL *restrict lines, global const REAL *restrict operands, real_v *poison STORE_PARAMETERS) {
  global const REAL *packed = scratch + LEAD;
  for (int rw = 0; rw < STRIDE_W; rw++) {
    const int tile_weights = TAPS_D[rd] * TAPS_H[rh] * TAPS_W[rw] * (GROUP_IC * THREAD_C);
    global const REAL *w = weights + PHASE_WEIGHTS[(rd * STRIDE_H + rh) * STRIDE_W + rw];
    for (int group = 0; group < GROUPS; group++) {
      global const REAL *xg = packed + group * (GROUP_IC * CHANNEL);
      for (int c = 0; c < GROUP_OC; c += THREAD_C, w += tile_weights) {
        const int channel = group * GROUP_OC + c;
        for (int md = 0; md < BOX_D; md++) {
#if STORE_EARLY
          const int end = channel + min(THREAD_C, GROUP_OC - c);
          for (int chunk = 0, row = 0; chunk < CHUNKS; chunk++) {
            for (int i = row; i < CHUNK_ROWS[chunk]; i++) fetch_rows(y, n, channel, end, first_d + md, first_h + i, first_w);
            conv_tile(xg, first_d * APART_D, first_h * APART_H, rd, rh, rw, w, md, chunk, lines, operands, channel);
            MARK(PRODUCTS)
            for (; row < CHUNK_ROWS[chunk]; row++)
              store_rows(y, n, channel, end, first_d + md, first_h + row, first_w, lines + row * ROW, operands ARGUMENTS);
            MARK(STORE)
          }
#else
          global REAL *line = lines + ((size_t)(md * LINE_CHANNELS + channel) * STRIDE_W + rw) * LINE;
          for (int chunk = 0; chunk < CHUNKS; chunk++)
            conv_tile(xg, first_d * APART_D, first_h * APART_H, rd, rh, rw, w, md, chunk, line, operands, channel);
#endif
        }
      }
    }
  }
  MARK(PRODUCTS)
}
