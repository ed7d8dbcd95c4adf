// Core of the Winograd convolution: F(2, n) along depth and height, n = 1, 2 or 3 taps a phase, width in the vector lanes.
//
// Along one axis, two neighbouring outputs of an n-tap phase need 2n products; from n + 1 sums of inputs, n + 1 products do:
//
//   n = 1   z0 = x[0] g0                  z1 = x[1] g0
//           y0 = z0                       y1 = z1
//   n = 2   z0 = (x[0] - x[1]) g0         z1 = x[1] (g0 + g1)                z2 = (x[1] - x[2]) g1
//           y0 = z0 + z1                  y1 = z1 - z2
//   n = 3   z0 = (x[0] - x[2]) g0         z1 = (x[1] + x[2]) (g0 + g1 + g2)/2
//           z2 = (x[2] - x[1]) (g0 - g1 + g2)/2                              z3 = (x[1] - x[3]) g2
//           y0 = z0 + z1 + z2             y1 = z1 - z2 - z3
//
// (Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray, 2016.) Every input sum has the form x[a] + s*x[b]
// with s = -1, 0 or 1: the host's tables name a, b and s, and fold all other factors into the packed weights. The two axes nest.
//
// Layouts in scratch
//   v  [height component][IC][CHANNEL]: transformed lines of one depth component; tile row i lies at i * PITCH and serves output
//      rows 2i and 2i + 1. Gaps between rows are zero and serve as halo, as in the direct core.
//   e  [input row][EDGE]: one channel's rows, combined along depth.
//   lines  [depth tile][jd][jh][channel][rw][LINE]
// Weights: for each (rd, rh, depth component, rw) [group][channel tile][height component][KW taps][IC/groups][THREAD_C].
//
// Only for finite data: a sum of an infinity with its opposite is NaN, and a NaN spreads over its tile. Results that are not
// finite set the launch's flag, and the caller repeats it with the direct core.

#if CHUNKS > WIDE_CHUNKS
#define TILE_W 1
#include "winograd_tiles.cl"
#undef TILE_W
#endif
#if WIDE_CHUNKS > 0
#define TILE_W THREAD_W
#include "winograd_tiles.cl"
#undef TILE_W
#endif

// Transformed lines of depth component (a, b, s) for the height components of phase rh.
static void transform(global REAL *restrict v, global REAL *restrict e, global const REAL *restrict x, const int a, const int b,
                      const int s, const int first_h, const int rh, global const REAL *restrict operands) {
  const bool has_a = (uint)a < ID, has_b = s != 0 && (uint)b < ID;
  for (int c = 0; c < IC; c++) {
    global const REAL *image = x + (size_t)c * ((size_t)ID * IH * IW);
    for (int row = 0; row < ROWS; row++) {
      const int h = first_h + INPUT_H[row];
      const bool inside = (uint)h < IH;
      combine_row(e + row * EDGE, inside && has_a ? image + ((size_t)a * IH + h) * IW : 0,
                  inside && has_b ? image + ((size_t)b * IH + h) * IW : 0, s, operands, c);
    }
    for (int part = 0; part < PARTS_H[rh]; part++) {
      const int sign = SIGN_H[rh][part];
      for (int i = 0; i < BOX_H / 2; i++) {
        global const REAL *ra = e + (2 * i + ROW_A_H[rh][part]) * EDGE, *rb = e + (2 * i + ROW_B_H[rh][part]) * EDGE;
        global REAL *line = v + ((size_t)part * IC + c) * CHANNEL + i * PITCH;
        if (sign == 0)
          for (int w = 0; w < IW; w += VEC) STORE_V(LOAD_V(ra + w), line + w);
        else if (sign > 0)
          for (int w = 0; w < IW; w += VEC) STORE_V(LOAD_V(ra + w) + LOAD_V(rb + w), line + w);
        else
          for (int w = 0; w < IW; w += VEC) STORE_V(LOAD_V(ra + w) - LOAD_V(rb + w), line + w);
      }
    }
  }
}

static void begin_box(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                      global const REAL *restrict operands) {}

// All phases along width of the rows of one (rd, rh): lines [BOX_D][2][LINE_CHANNELS][STRIDE_W][LINE].
static void convolve(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                     const int rd, const int rh, global const REAL *restrict weights, global REAL *restrict lines,
                     global const REAL *restrict operands, real_v *poison) {
  global REAL *const v = scratch + LEAD, *const e = scratch + SCRATCH_EDGE;
  const int parts_d = PARTS_D[rd], parts_h = PARTS_H[rh];
  for (int tile = 0; tile < BOX_D / 2; tile++) {
    global REAL *const tile_lines = lines + (size_t)tile * (4 * LINE_CHANNELS * STRIDE_W * LINE);
    const int base = first_d + 2 * tile;
    global const REAL *w = weights + PHASE_WEIGHTS[rd * STRIDE_H + rh];
    for (int part = 0; part < parts_d; part++) {
      transform(v, e, x, base + ROW_A_D[rd][part], base + ROW_B_D[rd][part], SIGN_D[rd][part], first_h, rh, operands);
      for (int rw = 0; rw < STRIDE_W; rw++) {
        const int part_weights = TAPS_W[rw] * (GROUP_IC * THREAD_C);
        for (int group = 0; group < GROUPS; group++) {
          global const REAL *vg = v + group * (GROUP_IC * CHANNEL);
          for (int c = 0; c < GROUP_OC; c += THREAD_C, w += parts_h * part_weights) {
            const int channel = group * GROUP_OC + c;
            global REAL *line = tile_lines + (channel * STRIDE_W + rw) * LINE;
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
              global const REAL *vc = vg + CHUNK_X[chunk];
              global REAL *lc = line + CHUNK_LINE[chunk];
#if WIDE_CHUNKS > 0
              if (chunk < WIDE_CHUNKS)
                PASTE(winograd_tiles_, THREAD_W)(parts_h, vc, rw, w, parts_d, part, lc, operands, channel, poison);
#endif
#if CHUNKS > WIDE_CHUNKS
              if (chunk >= WIDE_CHUNKS) winograd_tiles_1(parts_h, vc, rw, w, parts_d, part, lc, operands, channel, poison);
#endif
            }
          }
        }
      }
    }
  }
}
