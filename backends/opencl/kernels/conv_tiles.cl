// The register tiles of a line with positions in the vector lanes: THREAD_W vectors wide, and single vectors behind them.
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

static void conv_tile(global const REAL *restrict packed, const int first_d, const int first_h, const int rd, const int rh,
                      const int rw, global const REAL *restrict w, const int md, const int chunk, global REAL *restrict line,
                      global const REAL *restrict operands, const int channel) {
#if WIDE_CHUNKS > 0
  if (CHUNK_WIDE[chunk])
    PASTE(conv_tile_, THREAD_W)(packed, first_d, first_h, rd, rh, rw, w, md, chunk, line, operands, channel);
#endif
#if CHUNKS > WIDE_CHUNKS
  if (!CHUNK_WIDE[chunk]) conv_tile_1(packed, first_d, first_h, rd, rh, rw, w, md, chunk, line, operands, channel);
#endif
}
