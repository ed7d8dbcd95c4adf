// Device functions that the host's <cmath> lacks. The fast intrinsics are as exact here as the plain functions.
#pragma once
#include <cstring>
#include <type_traits>  // the first header of the library, with its settings
// The special functions of C++17 would take a third of a kernel's compilation, and no kernel knows them.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>

template <class T> constexpr const T &max(const T &a, const T &b) { return a < b ? b : a; }
template <class T> constexpr const T &min(const T &a, const T &b) { return b < a ? b : a; }

// glibc declares functions of these names, so they are macros.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf

static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }  // NaN gives 0

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Never contracted to a fused multiply-add: the product or sum passes through a register the compiler can't see.
static inline float __fadd_rn(float a, float b) { float sum = a + b; asm("" : "+x"(sum)); return sum; }
static inline float __fsub_rn(float a, float b) { float difference = a - b; asm("" : "+x"(difference)); return difference; }
static inline float __fmul_rn(float a, float b) { float product = a * b; asm("" : "+x"(product)); return product; }

namespace cusim {
template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace cusim
static inline unsigned __float_as_uint(float x) { return cusim::bits_as<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return cusim::bits_as<float>(x); }
static inline int __float_as_int(float x) { return cusim::bits_as<int>(x); }
static inline float __int_as_float(int x) { return cusim::bits_as<float>(x); }
static inline long long __double_as_longlong(double x) { return cusim::bits_as<long long>(x); }
static inline double __longlong_as_double(long long x) { return cusim::bits_as<double>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }

template <class T> static T __ldg(const T *address) { return *address; }
template <class T> static T __ldcs(const T *address) { return *address; }
template <class T> static T __ldca(const T *address) { return *address; }
template <class T> static T __ldcg(const T *address) { return *address; }
template <class T> static void __stcs(T *address, T value) { *address = value; }
template <class T> static void __stcg(T *address, T value) { *address = value; }
