// The register tiles of one width TILE_W, one for each number of taps along height that occurs, and the choice between them.
#if USE_TAPS_1
#define TAPS 1
#include "winograd_tile.cl"
#undef TAPS
#endif
#if USE_TAPS_2
#define TAPS 2
#include "winograd_tile.cl"
#undef TAPS
#endif
#if USE_TAPS_3
#define TAPS 3
#include "winograd_tile.cl"
#undef TAPS
#endif

static void PASTE(winograd_tiles_, TILE_W)(const int taps_h, global const REAL *restrict v, const int rw,
                                           global const REAL *restrict w, const int rd, const int part,
                                           global REAL *restrict line, global const REAL *restrict operands, const int channel,
                                           global REAL *restrict sums, real_v *poison) {
#if USE_TAPS_1
  if (taps_h == 1) PASTE(winograd_tile_1x, TILE_W)(v, rw, w, rd, part, line, operands, channel, sums, poison);
#endif
#if USE_TAPS_2
  if (taps_h == 2) PASTE(winograd_tile_2x, TILE_W)(v, rw, w, rd, part, line, operands, channel, sums, poison);
#endif
#if USE_TAPS_3
  if (taps_h == 3) PASTE(winograd_tile_3x, TILE_W)(v, rw, w, rd, part, line, operands, channel, sums, poison);
#endif
}
