// Core of the direct convolution: register tiles over lines of packed input.
//
// The box's input rows are packed once, [plane][channel][row][PITCH], zero where a tap may reach outside along height and width;
// planes outside the tensor are skipped. Every tap is then a shifted read of the packed lines.

#if CHUNKS > WIDE_CHUNKS
#define TILE_W 1
#include "conv_tile.cl"
#undef TILE_W
#endif
#if WIDE_CHUNKS > 0
#define TILE_W THREAD_W
#include "conv_tile.cl"
#undef TILE_W
#endif

// Packs the input rows of one box: planes first_d + INPUT_D[..], rows first_h + INPUT_H[..].
static void pack_box(global REAL *restrict packed, global const REAL *restrict x, const int first_d, const int first_h,
                     global const REAL *restrict operands) {
  for (int plane = 0; plane < PLANES; plane++) {
    const int d = first_d + INPUT_D[plane];
    if ((uint)d >= ID) continue;
    for (int row = 0; row < ROWS; row++) {
      const int h = first_h + INPUT_H[row];
      global REAL *line = packed + (size_t)plane * PLANE + row * PITCH;
      if ((uint)h < IH) {
        global const REAL *source = x + ((size_t)d * IH + h) * IW;
        for (int c = 0; c < IC; c++)
          combine_row(line + c * CHANNEL, source + (size_t)c * ((size_t)ID * IH * IW), 0, 1, operands, c);
      } else {
        for (int c = 0; c < IC; c++) clear(line + c * CHANNEL, IW);
      }
    }
  }
}

static void begin_box(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                      global const REAL *restrict operands) {
  pack_box(scratch + LEAD, x, first_d, first_h, operands);
}

// All phases along width of the rows of one (rd, rh): lines [BOX_D][LINE_CHANNELS][STRIDE_W][LINE].
// A ragged last tile writes past its group; the next group overwrites that, and LINE_CHANNELS leaves room behind the last one.
static void convolve(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                     const int rd, const int rh, const int step, global const REAL *restrict weights,
                     global REAL *restrict lines, global const REAL *restrict operands, real_v *poison) {
  global const REAL *packed = scratch + LEAD;
  for (int rw = 0; rw < STRIDE_W; rw++) {
    const int tile_weights = TAPS_D[rd] * TAPS_H[rh] * TAPS_W[rw] * (GROUP_IC * THREAD_C);
    global const REAL *w = weights + PHASE_WEIGHTS[(rd * STRIDE_H + rh) * STRIDE_W + rw];
    for (int group = 0; group < GROUPS; group++) {
      global const REAL *xg = packed + group * (GROUP_IC * CHANNEL);
      for (int c = 0; c < GROUP_OC; c += THREAD_C, w += tile_weights) {
        const int channel = group * GROUP_OC + c;
        for (int md = 0; md < BOX_D; md++) {
          global REAL *line = lines + ((size_t)(md * LINE_CHANNELS + channel) * STRIDE_W + rw) * LINE;
          for (int chunk = 0; chunk < CHUNKS; chunk++) {
            global const REAL *xc = xg + CHUNK_X[chunk];
            global REAL *lc = line + CHUNK_LINE[chunk];
#if WIDE_CHUNKS > 0
            if (chunk < WIDE_CHUNKS) PASTE(conv_tile_, THREAD_W)(xc, first_d, rd, rh, rw, w, md, lc, operands, channel);
#endif
#if CHUNKS > WIDE_CHUNKS
            if (chunk >= WIDE_CHUNKS) conv_tile_1(xc, first_d, rd, rh, rw, w, md, lc, operands, channel);
#endif
          }
        }
      }
    }
  }
}
