// Rounds of the inner loop of one register tile, for timing: behind conv_tile.cl and winograd_product.cl as direct_CxW and
// product_CxW for each tile. DIRECT_TILES(DO) and PRODUCT_TILES(DO) have DO(number, C, W) for each of them.
//
// The data is what the second-level cache holds of it while a core works: a line of LINE lanes, or PARTS components of a chunk.
#define DIRECT(number, channels, width)                                                                              \
  case number:                                                                                                       \
    for (int c = 0; c < CHANNELS / channels; c++)                                                                    \
      for (int chunk = 0; chunk < LINE / (width * VEC); chunk++)                                                     \
        direct_##channels##x##width(inputs, 0, 0, 0, 0, 0, weights + c * (WEIGHTS * channels), 0, chunk * width, sums, weights, 0); \
    break;
#define PRODUCT(number, channels, width)                                                                             \
  case number:                                                                                                       \
    for (int part = 0; part < PARTS; part++)                                                                         \
      for (int c = 0; c < CHANNELS / channels; c++)                                                                  \
        product_##channels##x##width(inputs + part * (GROUP_IC * width * VEC + SKEW),                                \
                                     weights + (part * (CHANNELS / channels) + c) * (GROUP_IC * channels),           \
                                     sums + c * (channels * width * VEC));                                           \
    break;

kernel void tile_probe(global const REAL *restrict inputs, global const REAL *restrict weights, global REAL *restrict sums,
                       const int tile, const int rounds) {
  for (int round = 0; round < rounds; round++)
    switch (tile) {
      DIRECT_TILES(DIRECT)
      PRODUCT_TILES(PRODUCT)
    }
}
