// A pointwise step, or a chain of them, in a launch of its own. Operands may be scalars, per-channel tensors (both in `operands`)
// or whole tensors and earlier values of any broadcast shape (a0, a1, ...: buffers with a stride for each axis).
//
// It may work in place (x and y the same buffer). A work-item owns one row (n, c, d, h) of WIDTH elements. The host defines CHANNELS, DEPTH, HEIGHT, WIDTH, BUFFERS (the extra
// kernel parameters), FIRST(x, c) (the step, reading its buffers at row base w), and TAIL(x, c).
kernel void pointwise_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                           const ulong count BUFFERS) {
  const size_t row = get_global_id(0);
  if (row >= count) return;
  const size_t h = row % HEIGHT, d = row / HEIGHT % DEPTH, c = row / ((size_t)HEIGHT * DEPTH) % CHANNELS,
               n = row / ((size_t)HEIGHT * DEPTH * CHANNELS);
  for (int w = 0; w < WIDTH; w += VEC) {
    real_v value = load_lanes(x + row * WIDTH + w, WIDTH - w, R(0.0));
    FIRST(value, c);
    TAIL(value, c);
    store_lanes(value, y + row * WIDTH + w, WIDTH - w);
  }
}
