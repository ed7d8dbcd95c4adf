// Arithmetic shared by every kernel: the element type, vectors, loads and stores, and the names that the C text of the
// operator table uses (dispatcher/ops/forms.py).
//
// The host defines
//   REAL         float or double: the type of every intermediate value and accumulator
//   REAL_IS_DOUBLE  1 when REAL is double
//   VEC          lanes of a vector: 1, 4, 8 or 16
// No function here uses fmin, fmax or clamp: those drop NaN, and a NaN must travel to the output.

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
// What ran since the mark before was this part of a kernel: bench/anatomy.py defines it, to see where time goes.
#ifndef MARK
#define MARK(part)
#endif

#if REAL_IS_DOUBLE
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define R(literal) literal
#else
#define R(literal) PASTE(literal, f)
#endif

#if VEC == 1
typedef REAL real_v;
#define LOAD_V(pointer) (*(pointer))
#define STORE_V(value, pointer) (*(pointer) = (value))
#else
typedef PASTE(REAL, VEC) real_v;
#define LOAD_V(pointer) PASTE(vload, VEC)(0, (pointer))
#define STORE_V(value, pointer) PASTE(vstore, VEC)((value), 0, (pointer))
#endif
#define SPLAT(value) ((real_v)(value))
#define VALUE real_v
#define C(literal) SPLAT(R(literal))
#define INLINE inline
// A store past the caches, to a pointer that is a multiple of the vector, where the compiler has one.
#if VEC > 1 && defined(__has_builtin)
#if __has_builtin(__builtin_nontemporal_store)
#define STREAM_V(value, pointer) __builtin_nontemporal_store((value), (global real_v *)(pointer))
#endif
#endif

// Lane 0 of a vector; the two interleavings a0 b0 a1 b1 ... of two vectors.
#if VEC == 1
#define LANE0(v) (v)
#else
#define LANE0(v) ((v).s0)
#endif
// Compilers take long over many vectors that are put together lane by lane: one builtin does it where there is one.
#if VEC > 1 && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE_V __builtin_shufflevector
#endif
#endif
#if defined(SHUFFLE_V) && VEC == 4
#define INTERLEAVE_LOW(a, b) SHUFFLE_V((a), (b), 0, 4, 1, 5)
#define INTERLEAVE_HIGH(a, b) SHUFFLE_V((a), (b), 2, 6, 3, 7)
#elif defined(SHUFFLE_V) && VEC == 8
#define INTERLEAVE_LOW(a, b) SHUFFLE_V((a), (b), 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) SHUFFLE_V((a), (b), 4, 12, 5, 13, 6, 14, 7, 15)
#elif defined(SHUFFLE_V) && VEC == 16
#define INTERLEAVE_LOW(a, b) SHUFFLE_V((a), (b), 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b) SHUFFLE_V((a), (b), 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif VEC == 2
#define INTERLEAVE_LOW(a, b) ((real_v)(a.s0, b.s0))
#define INTERLEAVE_HIGH(a, b) ((real_v)(a.s1, b.s1))
#elif VEC == 4
#define INTERLEAVE_LOW(a, b) ((real_v)(a.s0, b.s0, a.s1, b.s1))
#define INTERLEAVE_HIGH(a, b) ((real_v)(a.s2, b.s2, a.s3, b.s3))
#elif VEC == 8
#define INTERLEAVE_LOW(a, b) ((real_v)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3))
#define INTERLEAVE_HIGH(a, b) ((real_v)(a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7))
#elif VEC == 16
#define INTERLEAVE_LOW(a, b) \
  ((real_v)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5, b.s5, a.s6, b.s6, a.s7, b.s7))
#define INTERLEAVE_HIGH(a, b) \
  ((real_v)(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc, a.sd, b.sd, a.se, b.se, a.sf, b.sf))
#endif

// The unsigned integers that shuffle takes have the size of the elements.
#if REAL_IS_DOUBLE
#define mask_v PASTE(ulong, VEC)
#else
#define mask_v PASTE(uint, VEC)
#endif
// Those lanes of two vectors that a list names. As a function of the runtime, which may take any list, it is slow without AVX-512.
#if defined(SHUFFLE_V)
#define PICK_V(a, b, mask) SHUFFLE_V((a), (b), mask)
#else
#define PICK_V(a, b, mask) shuffle2((a), (b), (mask_v)(mask))
#endif

// Compensated sums (Kahan, 1965): their error does not grow with the number of terms. For finite terms only.
#define KEPT_SUM(total) real_v total = SPLAT(R(0.0)), total##_lost = total;
#define KEEP(total, term) keep(&total, &total##_lost, term);
inline void keep(real_v *total, real_v *lost, const real_v term) {
  const real_v corrected = term - *lost, sum = *total + corrected;
  *lost = (sum - *total) - corrected;
  *total = sum;
}

// Mean and variance, the same way in every norm here, of vectors or numbers:
// - One of the values, `shift`, is subtracted before anything is added up: equal values leave exactly 0, and a common offset, however
//   large, costs nothing. Each difference is divided before it is added up, so that no sum overflows.
// - The second pass adds up squares of deviations from the mean so found, and also the deviations: their mean, `rest`, is what the
//   first pass missed. That is much where the shift was an outlier.
// - Where squares would overflow, deviations are multiplied by FAR first.
#if REAL_IS_DOUBLE
#define FAR R(0x1p-600)
#define FAR_APART R(0x1p300)
#define MOST_COARSE R(0x1p1000)
#else
#define FAR R(0x1p-80)
#define FAR_APART R(0x1p40)
#define MOST_COARSE R(0x1p112)
#endif
#if VEC == 1
#define OVERFLOWS(squares) (!((squares) < INFINITY))
#else
#define OVERFLOWS(squares) any(~((squares) < SPLAT(INFINITY)))
#endif
// One over the deviation that eps has been added to.
#define SCALE_OF(squares, rest, factor, count, eps) \
  (R(1.0) / sqrt(fma(-(rest), rest, (squares) / (R(1.0) * (count))) + (eps) * (factor) * (factor)))

// Of rows longer than the channels: that scale in two parts, `lost` what the first one lacks. What is left is the rounding of
// squares, so that elements come out as nearly rounded once, provided that their distance from the mean is exact: see coarse().
inline real_v split_scale(const real_v squares, const real_v rest, const real_v factor, const real_v count, const REAL eps, real_v *lost) {
  const real_v part = squares / count, more = fma(-part, count, squares) / count + fma(-rest, rest, eps * factor * factor);
  const real_v variance = part + more, added = variance - part;
  const real_v variance_lost = (part - (variance - added)) + (more - added);
  const real_v scale = SPLAT(R(1.0)) / sqrt(variance), root = scale * variance;
  const real_v root_lost = fma(scale, variance_lost, fma(scale, variance, -root));
  *lost = SPLAT(R(0.5)) * scale * fma(-scale, root_lost, fma(-root, scale, SPLAT(R(1.0))));
  return scale;
}
// A value without its digits far below `largest`, where that is not huge. Differences of most elements from a mean so rounded are
// exact, and `rest` makes up for what it lacks; so are sums of some thousand values.
inline real_v coarse(const real_v value, const real_v largest) {
  const real_v above = (largest < SPLAT(MOST_COARSE)) ? largest * R(0x1.8p11) : SPLAT(R(0.0));
  return (value + above) - above;
}

// The larger and the smaller of two values of any type; NaN when either is NaN.
#define LARGER(a, b) (((b) > (a) || (b) != (b)) ? (b) : (a))
#define SMALLER(a, b) (((b) < (a) || (b) != (b)) ? (b) : (a))
inline real_v max_v(real_v a, real_v b) { return LARGER(a, b); }
inline real_v min_v(real_v a, real_v b) { return SMALLER(a, b); }
#define expm1_v expm1
#define log_v log
#define log1p_v log1p
#define sqrt_v sqrt
#define abs_v fabs

#if REAL_IS_DOUBLE
inline real_v erf_real(real_v x) { return erf(x); }
inline real_v exp_v(real_v x) { return exp(x); }
#define exp_near_v exp_v
#define exp_below_v exp_v
#define tanh_v tanh
#else
// erf by a rational minimax approximation on [-4, 4] (odd numerator of degree 13 over an even denominator of degree 8);
// beyond it erf rounds to +-1 in float. Absolute error below 2.5e-7.
inline real_v erf_real(real_v x) {
  real_v s = x * x;
  real_v p = fma(s, SPLAT(-2.72614225801306e-10f), SPLAT(2.77068142495902e-08f));
  p = fma(s, p, SPLAT(-2.10102402082508e-06f));
  p = fma(s, p, SPLAT(-5.69250639462346e-05f));
  p = fma(s, p, SPLAT(-7.34990630326855e-04f));
  p = fma(s, p, SPLAT(-2.95459980854025e-03f));
  p = fma(s, p, SPLAT(-1.60960333262415e-02f));
  real_v q = fma(s, SPLAT(-1.45660718464996e-05f), SPLAT(-2.13374055278905e-04f));
  q = fma(s, q, SPLAT(-1.68282697438203e-03f));
  q = fma(s, q, SPLAT(-7.37332916720468e-03f));
  q = fma(s, q, SPLAT(-1.42647390514189e-02f));
  real_v inside = p * x / q;
  inside = (x > SPLAT(4.0f)) ? SPLAT(1.0f) : inside;
  return (x < SPLAT(-4.0f)) ? SPLAT(-1.0f) : inside;
}

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2)/2, a minimax polynomial of degree 6 for exp(r), 3e-9 off. Relative error
// below 8e-8 for normal results. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; a NaN passes through the
// polynomial.
#if VEC == 1
typedef int int_v;
#define AS_REAL_V(bits) as_float(bits)
#define AS_INT_V(value) as_int(value)
#else
typedef PASTE(int, VEC) int_v;
#define AS_REAL_V(bits) PASTE(as_float, VEC)(bits)
#define AS_INT_V(value) PASTE(as_int, VEC)(value)
#endif
inline real_v exp_of_rest(const real_v x, int_v *exponent) {
  const real_v shifted = fma(x, SPLAT(1.44269504088896341f), SPLAT(12582912.0f));
  const real_v n = shifted - SPLAT(12582912.0f);
  real_v r = fma(n, SPLAT(-0.693145751953125f), x);
  r = fma(n, SPLAT(-1.42860682030941723e-6f), r);
  real_v p = fma(r, SPLAT(0.0013814539f), SPLAT(0.008368745f));
  p = fma(r, p, SPLAT(0.04166839f));
  p = fma(r, p, SPLAT(0.16666521f));
  p = fma(r, p, SPLAT(0.49999994f));
  p = fma(r, p, SPLAT(1.0f));
  *exponent = AS_INT_V(shifted) - 0x4B400000;
  return fma(r, p, SPLAT(1.0f));
}
// Any x. The scale 2^n is applied in two halves so that results below 2^-126 come out denormal.
inline real_v exp_v(real_v x) {
  real_v y = (x > SPLAT(89.0f)) ? SPLAT(89.0f) : x;
  y = (y < SPLAT(-104.0f)) ? SPLAT(-104.0f) : y;
  int_v exponent;
  real_v p = exp_of_rest(y, &exponent);
  const int_v half_exponent = exponent >> 1;
  p = p * AS_REAL_V((half_exponent + 127) << 23) * AS_REAL_V((exponent - half_exponent + 127) << 23);
  return (x > SPLAT(88.8f)) ? SPLAT(INFINITY) : p;
}
// x <= 0, or NaN. The scale is 2^24 times too large, so that it is a normal number, until the end.
inline real_v exp_below_v(const real_v x) {
  int_v exponent;
  const real_v p = exp_of_rest((x < SPLAT(-104.0f)) ? SPLAT(-104.0f) : x, &exponent);
  return p * AS_REAL_V((exponent << 23) + ((127 + 24) << 23)) * SPLAT(0x1p-24f);
}
// |x| <= 87, or NaN.
inline real_v exp_near_v(const real_v x) {
  int_v exponent;
  const real_v p = exp_of_rest(x, &exponent);
  return p * AS_REAL_V((exponent << 23) + 0x3F800000);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1), and below 0.65 an odd minimax polynomial of degree 11, with a relative error of 7e-9 there. The
// builtins may be off by 5 units in the last place, and PoCL's is never 1.
inline real_v tanh_v(real_v x) {
  const real_v size = fabs(x), s = x * x;
  real_v p = fma(s, SPLAT(-0.00551516330f), SPLAT(0.02046941966f));
  p = fma(s, p, SPLAT(-0.05368802324f));
  p = fma(s, p, SPLAT(0.13330830634f));
  p = fma(s, p, SPLAT(-0.33333259822f));
  const real_v far = SPLAT(1.0f) - SPLAT(2.0f) / (exp_v(size + size) + SPLAT(1.0f));
  return copysign((size < SPLAT(0.65f)) ? fma(size * s, p, size) : far, x);
}
#endif

// x/2 * (1 + erf(x/sqrt(2))). Below -20 the result is 0, also for -inf; +inf stays +inf.
inline real_v gelu_v(real_v x) {
  real_v v = (x < SPLAT(R(-20.0))) ? SPLAT(R(-20.0)) : x;
  real_v halved = v * SPLAT(R(0.5));
  return fma(halved, erf_real(v * SPLAT(R(0.70710678118654752440))), halved);
}
