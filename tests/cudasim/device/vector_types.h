// dim3 and the vector types of CUDA C++, with the alignments that nvcc gives them.
#pragma once

struct uint3 { unsigned x, y, z; };
struct int3 { int x, y, z; };
struct float3 { float x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

#define CUSIM_VECTOR_TYPES(scalar, name)                                                           \
    struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                   \
    struct alignas(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)) name##4 { scalar x, y, z, w; }; \
    inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                           \
    inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
CUSIM_VECTOR_TYPES(signed char, char)
CUSIM_VECTOR_TYPES(unsigned char, uchar)
CUSIM_VECTOR_TYPES(short, short)
CUSIM_VECTOR_TYPES(unsigned short, ushort)
CUSIM_VECTOR_TYPES(int, int)
CUSIM_VECTOR_TYPES(unsigned, uint)
CUSIM_VECTOR_TYPES(long long, longlong)
CUSIM_VECTOR_TYPES(unsigned long long, ulonglong)
CUSIM_VECTOR_TYPES(float, float)
CUSIM_VECTOR_TYPES(double, double)
#undef CUSIM_VECTOR_TYPES
