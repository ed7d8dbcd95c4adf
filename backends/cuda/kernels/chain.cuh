// The pointwise functions of the vocabulary, and chains of them that run on a convolution's results.
//
// A chain is one number: each byte is an operation, the lowest byte first, 0 ends it. The lower 6 bits name the
// operation; bits 6 and 7 say that its operand a or b has one value a channel. A kernel that knows the chain when it
// is compiled unrolls it; a kernel that gets it as an argument interprets it. Operation i of a chain takes its
// operands from stage i of the kernel's parameters.
#pragma once
#include "device.cuh"

using chain_t = unsigned long long;

enum Operation : int {
  OP_END = 0,
  OP_ADD = 1,
  OP_SUBTRACT = 2,
  OP_SCALE = 3,
  OP_CLAMP = 4,
  OP_GELU = 5,
  OP_RELU = 6,
  OP_LEAKY_RELU = 7,
  OP_SIGMOID = 8,
  OP_TANH = 9,
  OP_SILU = 10,
  OP_SOFTPLUS = 11,
  OP_HARDSWISH = 12,
  OP_LAYER_NORM = 32,  // over the channels of a voxel: not pointwise
};

// Operands of one operation: numbers, or pointers to one value a channel.
// Layer norm: a is eps; weight and bias are operands a and b, where they have values.
struct Stage {
  const STORAGE *a_channels, *b_channels;
  double a, b;
};

constexpr int MAX_STAGES = 8;  // in each of a kernel's two chains

__host__ __device__ constexpr int chain_operation(chain_t chain, int i) {
  return static_cast<int>(chain >> (8 * i) & 63u);
}
__host__ __device__ constexpr bool channels_a(chain_t chain, int i) {
  return chain >> (8 * i + 6) & 1u;
}
__host__ __device__ constexpr bool channels_b(chain_t chain, int i) {
  return chain >> (8 * i + 7) & 1u;
}

// in -> out of one operation. NaN goes through all of them.
__device__ __forceinline__ COMPUTE pointwise(int operation, COMPUTE in, COMPUTE a, COMPUTE b) {
  switch (operation) {
    case OP_ADD: return in + a;
    case OP_SUBTRACT: return in - a;
    case OP_SCALE: return in * a;
    case OP_CLAMP: in = in < a ? a : in; return in > b ? b : in;
    case OP_GELU: return gelu(in);
    case OP_RELU: return in < 0 ? COMPUTE(0) : in;
    case OP_LEAKY_RELU: return in > 0 ? in : in * a;
    case OP_SIGMOID: return 1 / (1 + exponential(-in));
    case OP_TANH: return hyperbolic_tangent(in);
    case OP_SILU: {  // with exp(-|in|), which does not overflow
      COMPUTE e = exponential(-magnitude(in));
      return in * ((in < 0 ? e : COMPUTE(1)) / (1 + e));
    }
    case OP_SOFTPLUS: return (in < 0 ? COMPUTE(0) : in) + logarithm_1p(exponential(-magnitude(in)));
    case OP_HARDSWISH: {
      COMPUTE gate = in + 3;
      gate = gate < 0 ? COMPUTE(0) : gate;
      return in * ((gate > 6 ? COMPUTE(6) : gate) / 6);
    }
    default: return in;
  }
}

__device__ __forceinline__ COMPUTE stage_a(const Stage &stage, bool by_channel, int channel) {
  return by_channel ? COMPUTE(stage.a_channels[channel]) : COMPUTE(stage.a);
}

__device__ __forceinline__ COMPUTE stage_b(const Stage &stage, bool by_channel, int channel) {
  return by_channel ? COMPUTE(stage.b_channels[channel]) : COMPUTE(stage.b);
}
