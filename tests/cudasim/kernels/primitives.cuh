// PTX helpers of the test kernels: inline PTX for nvcc, the simulator's functions elsewhere.
#pragma once
#ifndef CUSIM
#include <cstdint>
#endif

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CUSIM
    cusim::mma_m16n8k8_tf32(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ __forceinline__ uint32_t to_tf32(float value) {
#ifdef CUSIM
    return cusim::cvt_rna_tf32(value);
#else
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    return bits;
#endif
}

__device__ __forceinline__ void copy_async_16(void *shared, const void *global) {
#ifdef CUSIM
    cusim::cp_async(shared, global, 16, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global));
#endif
}

__device__ __forceinline__ void commit_copies() {
#ifdef CUSIM
    cusim::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;\n");
#endif
}

template <int GROUPS_LEFT> __device__ __forceinline__ void wait_for_copies() {
#ifdef CUSIM
    cusim::cp_async_wait(GROUPS_LEFT);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(GROUPS_LEFT));
#endif
}
