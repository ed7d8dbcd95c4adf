// Core of the Winograd convolution: F(M_D, n) along depth, F(M_H, n) along height and F(M_W, n) along width, a matrix product for each
// component, tiles in the vector lanes.
//
// Along one axis, m neighbouring outputs of an n-tap phase need m*n products; m + n - 1 do, between sums of inputs and sums of taps:
//
//   y = A^T ((G g) * (B^T x))
//
// (Winograd, "Arithmetic complexity of computations", 1980; Lavin and Gray, 2016.) transforms.py makes the matrices; the sums of taps
// are in the packed weights. Along depth a table holds the rows of A^T; else macros do, and along width one
// matrix serves all phases. An axis with m = 1 is not transformed: its components are its taps.
//
// Width never shuffles lanes but in deal_out: a row is dealt out to M_W sub-lines, so that a tile's inputs, and its outputs, have the
// same place in different sub-lines. The outputs are like M_W times as many phases along width, which the store interleaves.
//
// Layouts in scratch
//   e      [depth component][IC][row % M_H][sub-line][row / M_H][PITCH]: rows; lane t of tile row i lies at i * PITCH + t.
//   v, z   [component][channel][a chunk's lanes]: transformed input, and products. Components start on different sets of the caches.
//   lines  [jd][jh][channel][column and phase along width][LINE], of the planes of one tile
// Weights: for each (rd, rh, depth component) [group][block of channels][component][channel tile][IC/groups][THREAD_C], behind those
// of the direct core.
//
// Only for finite data: a sum of an infinity with its opposite is NaN, and a NaN spreads over its tile. Results that are not
// finite set the launch's flag, and the caller repeats it with the direct core. Where finite data differ so much in magnitude that a
// tile's rounding would show, winograd_range.cl takes over.

static void begin_box(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                      const int first_w, global const REAL *restrict operands) {}

// All phases along width of the rows of one (rd, rh): lines [M_D][M_H][LINE_CHANNELS][STRIDE_W][LINE]. Vectors of tile
// rows beyond the last position are left out.
static void convolve(global REAL *restrict scratch, global const REAL *restrict x, const int first_d, const int first_h,
                     const int rd, const int rh, const int step, global const REAL *restrict weights,
                     global REAL *restrict lines, global const REAL *restrict operands, real_v *poison) {
  global REAL *const row = scratch + SCRATCH_ROW, *const v = scratch + SCRATCH_PANELS,
              *const z = scratch + SCRATCH_PRODUCTS, *const sums = scratch + SCRATCH_SUMS;
  const int base = first_d + step, planes = min(M_D, POSITIONS_D - base), parts = (TAPS_H[rh] + M_H - 1) * PARTS_W;
  const int tiles = min(BOX_H / M_H, (POSITIONS_H - first_h + M_H - 1) / M_H);
  const int vectors = ((tiles - 1) * ROW + POSITIONS_W + VEC - 1) / VEC;
  if (planes <= 0) return;
  // Component 1 mixes the planes that all outputs along depth read. There are none at borders and where depth is not transformed.
  const bool transformed = SHARE_D[rd] > 1 || SHARE_H[rh] > 1 || USE_SHARE_W;
  const int start = base + INPUT_D[rd][0];
  const bool border = SHARE_D[rd] == 1 || planes < M_D || start < 0 || start + PARTS_D[rd] > ID;
  global int *const marks = (global int *)(scratch + SCRATCH_MARKS);
  for (int i = 0; i < VECTORS * VEC; i++) marks[i] = 0;
  // Phases along height read the same rows.
#define PACK_PLANES(n) if (rh == 0 && TAPS_D[rd] == n) PASTE(pack_planes_, n)(scratch, row, x, base, rd, first_h, operands);
  FOR_TAPS_D(PACK_PLANES)
  MARK(PACK)
  for (int part = 0; part < PARTS_D[rd]; part++) {
    global const REAL *const e = scratch + (size_t)part * (IC * CHANNEL);
    global const REAL *const first_w = weights + PHASE_WEIGHTS[rd * STRIDE_H + rh] + part * parts * TAP_WEIGHTS;
    const bool measured = transformed && (part == 1 || border);
    for (int first = 0; first < vectors; first += THREAD_W) {
      const int lane = first * VEC, width = min(THREAD_W, vectors - first);
#define INPUTS(n) if (TAPS_H[rh] == n) PASTE(winograd_inputs_, n)(v, e + lane, rh, width, lane, tiles, measured ? marks : 0);
      FOR_TAPS(INPUTS)
      MARK(INPUTS)
      global const REAL *w = first_w;
      for (int group = 0; group < GROUPS; group++)
        for (int c = 0; c < GROUP_OC; c += BLOCK_C) {
          const int channels = min(BLOCK_C, GROUP_OC - c), channel = group * GROUP_OC + c;
          for (int n = 0; n < parts; n++) {
            global const REAL *const panel = v + n * PANEL + group * GROUP_IC * width * VEC;
            for (int i = 0; i < channels; i += THREAD_C, w += GROUP_IC * THREAD_C) {
#define PRODUCT(n_) if (width == n_) PASTE(winograd_product_, n_)(panel, w, z + n * PRODUCTS + i * width * VEC);
              FOR_WIDTHS(PRODUCT)
            }
          }
          MARK(PRODUCTS)
          global REAL *const line = lines + (size_t)channel * (STRIDE_W * LINE) + lane;
          global REAL *const total = transformed ? sums + group * (M_D * M_H * STRIDE_W * LINE) + lane : 0;
#define OUTPUTS(n) if (TAPS_H[rh] == n) PASTE(winograd_outputs_, n)(z, rd, part, width, channel, channels, line, operands, total, poison);
          FOR_TAPS(OUTPUTS)
          MARK(OUTPUTS)
        }
    }
  }
  if (transformed) *poison += compute_uneven(scratch, x, base, first_h, rd, rh, planes, tiles, weights, lines, operands);
  MARK(EDGES)
}
