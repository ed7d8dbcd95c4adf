// The register tiles of a line with output channels in the vector lanes. A row begins with a tile of FIRST_W positions, ends with one
// of LAST_W from LAST_START on where it has several (ROW_TILES), and has tiles of THREAD_W positions between them.
#define TILE_V (THREAD_C / VEC)
// Positions of the longest kind of tile, in whole vectors.
#define MOST_W ((THREAD_W + VEC - 1) / VEC * VEC)

#define TILE_NAME conv_tile_first
#define TILE_W FIRST_W
#define TILE_START 0
#include "channels_tile.cl"
#undef TILE_NAME
#undef TILE_W
#undef TILE_START
#if ROW_TILES > 1
#define TILE_NAME conv_tile_last
#define TILE_W LAST_W
#define TILE_START LAST_START
#include "channels_tile.cl"
#undef TILE_NAME
#undef TILE_W
#undef TILE_START
#endif
#if ROW_TILES > 2
#define TILE_NAME conv_tile_inner
#define TILE_W THREAD_W
#include "channels_tile.cl"
#undef TILE_NAME
#undef TILE_W
#endif

// Computes a tile and transposes its results on their way into the line. Whole vectors are stored: lanes behind the tile's positions
// are overwritten by the next tile of that row.
static void conv_tile(global const REAL *restrict packed, const int first_d, const int first_h, const int rd, const int rh,
                      const int rw, global const REAL *restrict w, const int md, const int chunk, global REAL *restrict line,
                      global const REAL *restrict operands, const int channel) {
  real_v results[TILE_V][MOST_W];
  const int place = chunk % ROW_TILES;
  if (place == 0) {
    conv_tile_first(packed, first_d, first_h, rd, rh, rw, w, md, chunk, results);
#if ROW_TILES > 1
  } else if (place == ROW_TILES - 1) {
    conv_tile_last(packed, first_d, first_h, rd, rh, rw, w, md, chunk, results);
#endif
#if ROW_TILES > 2
  } else {
    conv_tile_inner(packed, first_d, first_h, rd, rh, rw, w, md, chunk, results);
#endif
  }
  const int end = place == 0 ? FIRST_W : place == ROW_TILES - 1 ? LAST_W : THREAD_W;
#pragma unroll 1
  for (int from = 0; from < end; from += VEC)
#pragma unroll 1
    for (int v = 0; v < TILE_V; v++) {
      // Each round interleaves the lower half of the rows with the upper one; log2(VEC) rounds transpose the square.
      real_v *rows = results[v] + from, mixed[VEC];
      #pragma unroll
      for (int round = 1; round < VEC; round *= 2) {
        #pragma unroll
        for (int p = 0; p < VEC / 2; p++) {
          mixed[2 * p] = INTERLEAVE_LOW(rows[p], rows[p + VEC / 2]);
          mixed[2 * p + 1] = INTERLEAVE_HIGH(rows[p], rows[p + VEC / 2]);
        }
        #pragma unroll
        for (int p = 0; p < VEC; p++) rows[p] = mixed[p];
      }
#pragma unroll 1
      for (int c = 0; c < VEC; c++) {
        real_v value = rows[c];
        CONV_TAIL(value, channel + v * VEC + c);
        STORE_V(value, line + (size_t)(v * VEC + c) * (STRIDE_W * LINE) + CHUNK_LINE[chunk] + from);
      }
    }
}
