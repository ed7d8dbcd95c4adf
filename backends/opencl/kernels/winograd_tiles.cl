// The register tiles of one width TILE_W, one for each number of height components that occurs, and the choice between them.
#if USE_PARTS_2
#define PARTS 2
#include "winograd_tile.cl"
#undef PARTS
#endif
#if USE_PARTS_3
#define PARTS 3
#include "winograd_tile.cl"
#undef PARTS
#endif
#if USE_PARTS_4
#define PARTS 4
#include "winograd_tile.cl"
#undef PARTS
#endif

static void PASTE(winograd_tiles_, TILE_W)(const int parts_h, global const REAL *restrict v, const int rw,
                                           global const REAL *restrict w, const int parts_d, const int part,
                                           global REAL *restrict line, global const REAL *restrict operands, const int channel,
                                           real_v *poison) {
#if USE_PARTS_2
  if (parts_h == 2) PASTE(winograd_tile_2x, TILE_W)(v, rw, w, parts_d, part, line, operands, channel, poison);
#endif
#if USE_PARTS_3
  if (parts_h == 3) PASTE(winograd_tile_3x, TILE_W)(v, rw, w, parts_d, part, line, operands, channel, poison);
#endif
#if USE_PARTS_4
  if (parts_h == 4) PASTE(winograd_tile_4x, TILE_W)(v, rw, w, parts_d, part, line, operands, channel, poison);
#endif
}
