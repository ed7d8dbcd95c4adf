// What every kernel here shares: element types, functions for both precisions, and all inline PTX.
//
// Types, chosen by the host:
//   STORAGE        what the caller's tensors hold: half_t, bfloat_t, float or double
//   COMPUTE        what sums and functions are computed in: double for double, float for all others
//   INPUT, OUTPUT  what a kernel's x and y hold: STORAGE, or COMPUTE for a value between two launches
//
// CUSIM is defined when this source is compiled for a CPU that stands in for the device; then the PTX instructions
// are replaced by functions that do the same on the host.
#pragma once

#ifdef CUSIM
using half_t = _Float16;
#else
#include <cstdint>
#include <cuda_fp16.h>
using half_t = __half;
#endif

// The upper half of a float.
struct bfloat_t {
  unsigned short bits;

  bfloat_t() = default;
  // To the nearest one, of two the even. Rounding would carry a NaN over to an infinity or to a zero.
  __device__ __forceinline__ explicit bfloat_t(float v) {
    const unsigned whole = __float_as_uint(v);
    bits = (unsigned short)(v != v ? whole >> 16 | 0x40 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16);
  }
  __device__ __forceinline__ explicit operator float() const { return __uint_as_float((unsigned)bits << 16); }
};

using index_t = long long;

// Set by the host to the size of the structure that it passes, so that both sides agree on its layout.
#define CHECK_PARAMS(type) static_assert(sizeof(type) == PARAMS_BYTES, "the host packs " #type " differently")

__device__ __forceinline__ bool is_finite(float v) {
  return v - v == 0.f;
}
__device__ __forceinline__ bool is_finite(double v) {
  return v - v == 0.;
}

// The names of the dialect in which operations are written (dispatcher/ops/forms.py), for both precisions.
// The larger and the smaller one; NaN wins, which fmax would drop.
template <class T> __device__ __forceinline__ T max_v(T a, T b) {
  return b > a || b != b ? b : a;
}
template <class T> __device__ __forceinline__ T min_v(T a, T b) {
  return b < a || b != b ? b : a;
}
#define DIALECT(name, function)                                                  \
  __device__ __forceinline__ float name(float v) { return function##f(v); }     \
  __device__ __forceinline__ double name(double v) { return function(v); }
DIALECT(exp_v, exp)
DIALECT(exp_below_v, exp)
DIALECT(expm1_v, expm1)
DIALECT(log_v, log)
DIALECT(log1p_v, log1p)
DIALECT(tanh_v, tanh)
DIALECT(abs_v, fabs)
DIALECT(sqrt_v, sqrt)
#undef DIALECT

__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// One over a number of values, for means: a product with it is one division, which rounds once.
template <class T> struct Share {
  T count;
  __device__ __forceinline__ operator T() const { return T(1) / count; }
};
template <class T> __device__ __forceinline__ T operator*(T total, Share<T> share) {
  return total / share.count;
}

// x/2 * (1 + erf(x/sqrt(2))), with the limits 0 and +inf at the ends.
__device__ __forceinline__ double gelu_v(double x) {
  return x < -40. ? 0. : .5 * x * erfc(-x * .70710678118654752440);
}

// 1/x and 2^x to a few units of roundoff, one instruction each.
__device__ __forceinline__ float fast_reciprocal(float x) {
#ifdef CUSIM
  return 1.f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef CUSIM
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// The same in float, as max(x, 0) - |x| exp(-x^2/2) Q(t), t = 1 / (1 + 0.29 |x|), where Q(t) stands for
// exp(x^2/2) erfc(|x|/sqrt(2)) / 2: a minimax polynomial for |x| <= 9, fitted to 1.5e-8. Relative error measured in
// float32: 4e-7 for x > -1, 2e-6 down to -6.
__device__ __forceinline__ float gelu_v(float x) {
  const float size = fminf(fabsf(x), 20.f);  // infinity times zero would be NaN; a NaN of x comes back below
  const float t = fast_reciprocal(fmaf(size, .29f, 1.f));
  const float bell = fast_exp2(x * x * -.72134752044448170368f);
  float q = 4.1137389838695526e-2f;
  q = fmaf(q, t, -2.0185942947864532e-1f);
  q = fmaf(q, t, 3.2540199160575867e-1f);
  q = fmaf(q, t, -1.7420183122158051e-1f);
  q = fmaf(q, t, 2.0244294404983521e-1f);
  q = fmaf(q, t, 6.9207422435283661e-2f);
  q = fmaf(q, t, 1.2295261770486832e-1f);
  q = fmaf(q, t, 1.1487935483455658e-1f);
  q = fmaf(q, t, 3.9546986954519525e-5f);
  return fmaf(-bell * size, q, fmaxf(x, 0.f));
}

// ---- tensor cores and asynchronous copies (sm_80 and newer) -----------------------------------------------

// d[16][8] += a[16][8] * b[8][8] for one warp. With g = lane / 4 and t = lane % 4 a lane holds
// a: rows g, g+8 of column t, then rows g, g+8 of column t+4; b: rows t, t+4 of column g; d: columns 2t, 2t+1
// of row g, then of row g+8.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CUSIM
  cusim::mma_m16n8k8_tf32(d, a, b);
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The nearest value with a 10-bit mantissa; ties go away from zero. What would become infinite, infinities and NaN stay
// what they are; the tensor core cuts them to 10 bits.
__device__ __forceinline__ uint32_t round_tf32(float v) {
  uint32_t bits = __float_as_uint(v);
  return (bits & 0x7fffffffu) >= 0x7f7ff000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

// v = big + small, big with a 10-bit mantissa; the tensor core cuts small to 10 bits too, an error of 2^-23
// of v. Values that are not finite come out as NaN sums, which the kernels replace (see exact sums there).
__device__ __forceinline__ void split_tf32(float v, uint32_t &big, uint32_t &small) {
  big = (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
  small = __float_as_uint(v - __uint_as_float(big));
}

// Copy BYTES (4 or 16) from global to shared memory without waiting; zeros where not `inside`.
template <int BYTES>
__device__ __forceinline__ void copy_async(float *shared, const float *global, bool inside = true) {
#ifdef CUSIM
  cusim::cp_async(shared, global, BYTES, inside ? BYTES : 0);
#elif __CUDA_ARCH__ >= 800
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global),
                 "r"(inside ? 16 : 0));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(address), "l"(global),
                 "r"(inside ? 4 : 0));
#endif
}

__device__ __forceinline__ void copy_commit() {
#ifdef CUSIM
  cusim::cp_async_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n");
#endif
}

// Wait until at most KEEP committed groups of copies are under way.
template <int KEEP> __device__ __forceinline__ void copy_wait() {
#ifdef CUSIM
  cusim::cp_async_wait(KEEP);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(KEEP));
#endif
}
