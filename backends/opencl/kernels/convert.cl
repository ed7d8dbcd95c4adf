// Between 16-bit floats in memory and the float that everything is computed in. vload_half and vstore_half are core OpenCL C:
// no fp16 extension is needed. A work-item owns RUN consecutive elements (defined by the host).

kernel void half_to_float(global const half *restrict x, global float *restrict y, const ulong count) {
  const size_t first = get_global_id(0) * RUN;
  const size_t end = min(first + RUN, (size_t)count);
  for (size_t i = first; i < end; i++) y[i] = vload_half(i, x);
}

kernel void float_to_half(global const float *restrict x, global half *restrict y, const ulong count) {
  const size_t first = get_global_id(0) * RUN;
  const size_t end = min(first + RUN, (size_t)count);
  for (size_t i = first; i < end; i++) vstore_half_rte(x[i], i, y);
}
