// A pointwise step, or a chain of them, in a launch of its own. Operands may be scalars, per-channel tensors (both in `operands`)
// or whole tensors and earlier values of any broadcast shape (a0, a1, ...: buffers with a stride for each axis).
//
// It may work in place (x and y the same buffer). A work-item owns every SHARES-th vector of one row (n, c, d, h) of OUT_W elements:
// the whole row with SHARES 1, and one vector of it with as many shares as vectors, so that neighbouring work-items, which is what
// GPUs like, work on neighbouring elements. The host defines CHANNELS, DEPTH, HEIGHT, OUT_W, SHARES, PARAMETERS
// (for a0, a1, ...) TAIL(x), and what
// row_statistics.cl needs; statistics only with SHARES 1.
kernel void pointwise_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                           const ulong count PARAMETERS) {
  const size_t item = get_global_id(0), row = item / SHARES;
  if (item >= count) return;
  const size_t h = row % HEIGHT, d = row / HEIGHT % DEPTH, c = row / ((size_t)HEIGHT * DEPTH) % CHANNELS,
               n = row / ((size_t)HEIGHT * DEPTH * CHANNELS);
  GATHER_BEGIN
  for (int w = item % SHARES * VEC; w < OUT_W; w += SHARES * VEC) {
    real_v value = load_lanes(x + row * OUT_W + w, OUT_W - w, R(0.0));
    TAIL(value);
    GATHER(value, w, OUT_W - w)
#if USE_STORE
    store_lanes(value, y + row * OUT_W + w, OUT_W - w);
#endif
  }
  GATHER_END(((n * DEPTH + d) * HEIGHT + h) * CHANNELS + c)
}
