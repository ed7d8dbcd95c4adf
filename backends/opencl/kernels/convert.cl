// Between 16-bit floats in memory and the float that everything is computed in. vload_half and vstore_half are core OpenCL C:
// no fp16 extension is needed. A bfloat16 is the upper half of a float; it is rounded to the nearest one, of two the even.
// A work-item owns RUN consecutive elements (defined by the host).

#define EACH(i)                                         \
  const size_t first = get_global_id(0) * RUN;          \
  const size_t end = min(first + RUN, (size_t)count);   \
  for (size_t i = first; i < end; i++)

kernel void float16_to_float(global const half *restrict x, global float *restrict y, const ulong count) {
  EACH(i) y[i] = vload_half(i, x);
}

kernel void float_to_float16(global const float *restrict x, global half *restrict y, const ulong count) {
  EACH(i) vstore_half_rte(x[i], i, y);
}

kernel void bfloat16_to_float(global const ushort *restrict x, global float *restrict y, const ulong count) {
  EACH(i) y[i] = as_float((uint)x[i] << 16);
}

kernel void float_to_bfloat16(global const float *restrict x, global ushort *restrict y, const ulong count) {
  EACH(i) {
    const uint bits = as_uint(x[i]);
    // Rounding would carry a NaN over to an infinity or to a zero: it keeps its sign and becomes a quiet one.
    y[i] = (ushort)(x[i] != x[i] ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
