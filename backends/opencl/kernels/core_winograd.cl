// Core of the Winograd convolution: F(2, n) along depth and F(LINES_H, n) along height, n = 1, 2 or 3 taps a phase, width in the
// vector lanes.
//
// Along one axis, m neighbouring outputs of an n-tap phase need m*n products; m + n - 1 do, between sums of inputs and sums of taps:
//
//   y = A^T ((G g) * (B^T x))
//
// (Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray, 2016.) winograd.py makes the matrices; the sums of taps
// are in the packed weights. Along depth every row of B^T has the form x[a] + s*x[b] with s = -1, 0 or 1, which the tables
// ROW_A_D, ROW_B_D and SIGN_D name; along height the macros INPUT_SUMS_n and OUTPUT_SUMS_n are B^T and A^T. The two axes nest.
//
// Layouts in scratch
//   v  [height component][IC][CHANNEL]: transformed lines of one depth component; tile row i lies at i * PITCH and serves output
//      rows LINES_H*i .. LINES_H*i + LINES_H - 1. Gaps between rows are zero and serve as halo, as in the direct core.
//   e  [input row][EDGE]: one channel's rows, combined along depth.
//   lines  [jd][jh][channel][rw][LINE], of one pair of planes
// Weights: for each (rd, rh, depth component, rw) [group][channel tile][height component][KW taps][IC/groups][THREAD_C],
// behind those of the direct core.
//
// Only for finite data: a sum of an infinity with its opposite is NaN, and a NaN spreads over its tile. Results that are not
// finite set the launch's flag, and the caller repeats it with the direct core. Where finite data differ so much in magnitude that a
// tile's rounding would show, winograd_range.cl takes over.

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

#if USE_TAPS_1
#define TAPS 1
#include "winograd_inputs.cl"
#undef TAPS
#endif
#if USE_TAPS_2
#define TAPS 2
#include "winograd_inputs.cl"
#undef TAPS
#endif
#if USE_TAPS_3
#define TAPS 3
#include "winograd_inputs.cl"
#undef TAPS
#endif

#include "winograd_range.cl"

// Transformed lines of depth component (a, b, s) for the height components of phase rh; `tiles` tile rows. loads: where
// magnitudes go, or null.
static void transform(global REAL *restrict v, global REAL *restrict e, global const REAL *restrict x, const int a, const int b,
                      const int s, const int first_h, const int rh, const int tiles,
                      global REAL *restrict loads, global const REAL *restrict operands) {
  const bool has_a = (uint)a < ID, has_b = s != 0 && (uint)b < ID;
  const int rows = TAPS_H[rh] - 1 + LINES_H * tiles;
  for (int c = 0; c < IC; c++) {
    global const REAL *image = x + (size_t)c * ((size_t)ID * IH * IW);
    for (int row = 0; row < rows; row++) {
      const int h = first_h + INPUT_H[START_H[rh] + row];
      const bool inside = (uint)h < IH;
      combine_row(e + row * EDGE, inside && has_a ? image + ((size_t)a * IH + h) * IW : 0,
                  inside && has_b ? image + ((size_t)b * IH + h) * IW : 0, s, operands, c);
    }
    global REAL *const vc = v + (size_t)c * CHANNEL;
    global REAL *const load = loads ? loads + c / GROUP_IC * (3 * LOADS) : 0;
    const bool fresh = c % GROUP_IC == 0;
#if USE_TAPS_1
    if (TAPS_H[rh] == 1) winograd_inputs_1(vc, e, tiles, load, fresh);
#endif
#if USE_TAPS_2
    if (TAPS_H[rh] == 2) winograd_inputs_2(vc, e, tiles, load, fresh);
#endif
#if USE_TAPS_3
    if (TAPS_H[rh] == 3) winograd_inputs_3(vc, e, tiles, load, fresh);
#endif
  }
}

static void begin_box(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                      global const REAL *restrict operands) {}

// All phases along width of the rows of one (rd, rh): lines [2][LINES_H][LINE_CHANNELS][STRIDE_W][LINE]. Chunks of tile rows
// beyond the last position are left out.
static void convolve(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                     const int rd, const int rh, const int step, global const REAL *restrict weights,
                     global REAL *restrict lines, global const REAL *restrict operands, real_v *poison) {
  global REAL *const v = scratch + LEAD, *const e = scratch + SCRATCH_EDGE;
  const int parts_d = PARTS_D[rd], parts_h = TAPS_H[rh] + LINES_H - 1, base = first_d + step;
  const int tiles = min(BOX_H / LINES_H, (POSITIONS_H - first_h + LINES_H - 1) / LINES_H);
  global const REAL *w = weights + PHASE_WEIGHTS[rd * STRIDE_H + rh];
  global REAL *const loads = scratch + SCRATCH_LOADS, *const sums = scratch + SCRATCH_SUMS;
  const bool transformed = TAPS_D[rd] > 1 || TAPS_H[rh] > 1;
  // Component 1 mixes the planes that both rows along depth read. There are none where a phase has one tap.
  const int planes = min(2, POSITIONS_D - base), start_d = base + FIRST_D[rd];
  const bool border = TAPS_D[rd] == 1 || planes < 2 || start_d < 0 || start_d + TAPS_D[rd] >= ID;
  for (int part = 0; part < parts_d; part++) {
    const bool measured = transformed && (part == 1 || border);
    transform(v, e, x, base + ROW_A_D[rd][part], base + ROW_B_D[rd][part], SIGN_D[rd][part], first_h, rh, tiles,
              measured ? loads : 0, operands);
    if (measured) mark_loads(loads, tiles, border ? part == 0 : true);
    for (int rw = 0; rw < STRIDE_W; rw++) {
      const int part_weights = TAPS_W[rw] * (GROUP_IC * THREAD_C);
      for (int group = 0; group < GROUPS; group++) {
        global const REAL *vg = v + group * (GROUP_IC * CHANNEL);
        for (int c = 0; c < GROUP_OC; c += THREAD_C, w += parts_h * part_weights) {
          const int channel = group * GROUP_OC + c;
          global REAL *line = lines + (channel * STRIDE_W + rw) * LINE;
          for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (CHUNK_LINE[chunk] >= tiles * ROW) continue;
            global const REAL *vc = vg + CHUNK_X[chunk];
            global REAL *lc = line + CHUNK_LINE[chunk], *sc = transformed ? sums + SUMS_OF(rw, group) + CHUNK_LINE[chunk] : 0;
#if WIDE_CHUNKS > 0
            if (chunk < WIDE_CHUNKS)
              PASTE(winograd_tiles_, THREAD_W)(TAPS_H[rh], vc, rw, w, rd, part, lc, operands, channel, sc, poison);
#endif
#if CHUNKS > WIDE_CHUNKS
            if (chunk >= WIDE_CHUNKS) winograd_tiles_1(TAPS_H[rh], vc, rw, w, rd, part, lc, operands, channel, sc, poison);
#endif
          }
        }
      }
    }
  }
  if (transformed && planes > 0)
    *poison += compute_uneven(scratch, x, base, first_h, rd, rh, planes, tiles, weights, lines, operands);
}
