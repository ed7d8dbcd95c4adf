// A pooling window; pool.cu stores it, conv_halo.cu reads its input through it. Generated: the monoid pool.
#pragma once
#include "chain.cuh"

// Neighbours along W that are read at once.
template <class T, int COUNT> struct alignas(COUNT * sizeof(T)) Neighbours {
  T v[COUNT];
};

// Of the window whose first element is `corner`, in planes of `height` lines of `width` elements; `change` is applied
// to each element first. COUNT neighbours are read at once: it divides window_x and width. NaN wins in a maximum. Sums
// run in order of memory.
template <int COUNT, class T, class Change>
__device__ __forceinline__ COMPUTE pool_window(const T *corner, int window_z, int window_y, int window_x,
                                               int height, int width, Change change) {
  COMPUTE result = 0;
#pragma unroll
  for (int z = 0; z < window_z; z++)
#pragma unroll
    for (int y = 0; y < window_y; y++) {
      const T *line = corner + (index_t(z) * height + y) * width;
#pragma unroll
      for (int x = 0; x < window_x; x += COUNT) {
        const auto read = *reinterpret_cast<const Neighbours<T, COUNT> *>(line + x);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
          const COMPUTE value = pool_lift(change(COMPUTE(read.v[i])));
          result = z + y + x + i == 0 ? value : pool_combine(result, value);
        }
      }
    }
  return pool_finish(result, Share<COMPUTE>{COMPUTE(window_z) * window_y * window_x});
}
