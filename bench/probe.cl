// Two kernels that say what the machine can do: fused multiply-adds a second, and bytes copied a second.
//
// fma_chains: each work-item keeps CHAINS independent vectors in registers and does `steps` rounds of
//     a[i] = a[i] * m + b, which is 2 * VEC * CHAINS floating-point operations a round.
// copy: each work-item copies `vectors` vectors of its own stretch, past the caches where the compiler can.
//
// The host defines VEC (lanes of a float vector) and CHAINS (enough to hide the latency of a multiply-add, and few
// enough for the registers), and launches work-groups of one work-item.

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define real_v JOIN(float, VEC)
#define LOAD_V JOIN(vload, VEC)
#define STORE_V JOIN(vstore, VEC)

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void fma_chains(global float *restrict out, const int steps)
{
    real_v a[CHAINS];
    const real_v m = 0.999f, b = 0.001f;
    for (int i = 0; i < CHAINS; ++i)
        a[i] = (real_v)((float)(i + (int)get_global_id(0)));
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

__attribute__((reqd_work_group_size(1, 1, 1))) kernel void copy(
    global const float *restrict source, global float *restrict target, const int vectors)
{
    const size_t first = get_global_id(0) * (size_t)vectors;
    for (int i = 0; i < vectors; ++i) {
        const real_v value = LOAD_V(first + i, source);
#if __has_builtin(__builtin_nontemporal_store)
        __builtin_nontemporal_store(value, (global real_v *)target + first + i);
#else
        STORE_V(value, first + i, target);
#endif
    }
}
