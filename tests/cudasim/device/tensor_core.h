// mma.sync.m16n8k8 on tf32 operands (sm_80 and later) and the conversion to tf32.
#pragma once
#include "architecture.h"
#include "collectives.h"

namespace cusim {

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    need_sm_80("mma.sync on tf32");
    Warp &warp = current_warp();
    unsigned lane = current->lane;
    if (warp.alive != ALL_LANES) fail(cusim_abi::Outcome::launch_failure, "mma.sync needs all 32 lanes");
    memcpy(warp.in[lane], a, 16);
    memcpy(warp.in[lane] + 4, b, 8);
    memcpy(warp.accumulator[lane], d, 16);
    warp_collective(ALL_LANES, multiply_m16n8k8_tf32);
    memcpy(d, warp.accumulator[lane], 16);
}

// cvt.rna.tf32.f32: to nearest, ties away from zero; Inf and NaN stay as they are.
inline uint32_t cvt_rna_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace cusim
