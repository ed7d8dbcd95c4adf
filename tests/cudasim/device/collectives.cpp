// Compiled once and linked into every module.
#include "collectives.h"

#include <cmath>

namespace cusim {

void no_exchange(Warp &, uint32_t) {}

void exchange_values(Warp &warp, uint32_t lanes) {
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest), source = warp.in[lane][2];
        memcpy(warp.out[lane], warp.in[lanes >> source & 1 ? source : lane], 8);
    }
}

void collect_votes(Warp &warp, uint32_t lanes) {
    uint32_t ballot = 0;
    for (uint32_t rest = lanes; rest; rest &= rest - 1)
        ballot |= (warp.in[__builtin_ctz(rest)][0] & 1u) << __builtin_ctz(rest);
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        warp.out[__builtin_ctz(rest)][0] = ballot;
        warp.out[__builtin_ctz(rest)][1] = lanes;
    }
}

// ---- mma.sync
static float tf32_operand(uint32_t bits) {  // the hardware ignores the low 13 bits
    float value;
    bits &= 0xffffe000u;
    memcpy(&value, &bits, 4);
    return value;
}

// The adder of real tensor cores, after Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores"
// (2021): four exact products and the accumulator are aligned to the largest exponent, cut two bits below the 24-bit
// significand, and summed; the sum is cut to float32. `b` is a column of an 8 x 8 row-major matrix.
static float truncating_dot4(float accumulator, const float *a, const float *b) {
    double terms[5] = {accumulator, double(a[0]) * b[0], double(a[1]) * b[8], double(a[2]) * b[16], double(a[3]) * b[24]};
    double largest = 0, sum = 0;
    for (double term : terms) {
        if (!std::isfinite(term)) return float(terms[0] + terms[1] + terms[2] + terms[3] + terms[4]);
        largest = std::fmax(largest, std::fabs(term));
    }
    if (largest == 0) return 0;
    int exponent;
    std::frexp(largest, &exponent);
    double quantum = std::ldexp(1.0, exponent - 24 - 2);
    for (double term : terms) sum += std::trunc(term / quantum) * quantum;
    float result = float(sum);
    return std::fabs(double(result)) > std::fabs(sum) ? std::nextafterf(result, 0.f) : result;
}

void multiply_m16n8k8_tf32(Warp &warp, uint32_t) {
    float a[16][8], b[8][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane >> 2, quad = lane & 3;
        const uint32_t *in = warp.in[lane];
        a[group][quad] = tf32_operand(in[0]);
        a[group + 8][quad] = tf32_operand(in[1]);
        a[group][quad + 4] = tf32_operand(in[2]);
        a[group + 8][quad + 4] = tf32_operand(in[3]);
        b[quad][group] = tf32_operand(in[4]);
        b[quad + 4][group] = tf32_operand(in[5]);
        for (int i = 0; i < 4; i++) d[group + (i >> 1) * 8][2 * quad + (i & 1)] = warp.accumulator[lane][i];
    }
    for (int row = 0; row < 16; row++) {
        if (truncating_mma) {
            for (int k = 0; k < 8; k += 4)
                for (int col = 0; col < 8; col++) d[row][col] = truncating_dot4(d[row][col], &a[row][k], &b[k][col]);
        } else {
            for (int k = 0; k < 8; k++)
                for (int col = 0; col < 8; col++) d[row][col] += a[row][k] * b[k][col];
        }
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            warp.accumulator[lane][i] = d[(lane >> 2) + (i >> 1) * 8][2 * (lane & 3) + (i & 1)];
}

}  // namespace cusim
