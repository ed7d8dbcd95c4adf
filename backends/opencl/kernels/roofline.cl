// Two kernels that say what a device can do: fused multiply-adds a second, and bytes copied a second.
//
// fma_chains: each work-item keeps CHAINS independent vectors in registers and does `steps` rounds of
//     a[i] = a[i] * m + b, which is 2 * VEC * CHAINS floating-point operations a round.
// copy: each work-item copies `vectors` vectors, past the caches where the compiler can. On a CPU it copies a stretch
//     of its own; on a GPU (INTERLEAVED) neighbours copy neighbouring vectors.
//
// The host defines REAL (float or double), VEC (lanes of a vector), CHAINS (enough to hide the latency of a
// multiply-add, and few enough for the registers), GROUP (work-items in a work-group) and INTERLEAVED.

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if VEC == 1
#define real_v REAL
#define LOAD_V(i, p) (p)[i]
#define STORE_V(v, i, p) (p)[i] = v
#else
#define real_v JOIN(REAL, VEC)
#define LOAD_V JOIN(vload, VEC)
#define STORE_V JOIN(vstore, VEC)
#endif

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void fma_chains(global REAL *restrict out, const int steps)
{
    real_v a[CHAINS];
    const real_v m = (REAL)0.999, b = (REAL)0.001;
    for (int i = 0; i < CHAINS; ++i)
        a[i] = (real_v)((REAL)(i + (int)get_global_id(0)));
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i)
            a[i] = fma(a[i], m, b);
    }
    real_v sum = a[0];
    for (int i = 1; i < CHAINS; ++i)
        sum += a[i];
    STORE_V(sum, get_global_id(0), out);  // so that nothing can be left out
}

__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void copy(
    global const REAL *restrict source, global REAL *restrict target, const int vectors)
{
    const size_t first = INTERLEAVED ? get_global_id(0) : get_global_id(0) * (size_t)vectors;
    const size_t distance = INTERLEAVED ? get_global_size(0) : 1;
    for (int i = 0; i < vectors; ++i) {
        const size_t at = first + i * distance;
        const real_v value = LOAD_V(at, source);
#if __has_builtin(__builtin_nontemporal_store)
        __builtin_nontemporal_store(value, (global real_v *)target + at);
#else
        STORE_V(value, at, target);
#endif
    }
}
