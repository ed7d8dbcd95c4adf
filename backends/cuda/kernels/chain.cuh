// Chains of pointwise operations: their operands, and where these are read. The chains themselves are generated for
// each launch from the operator table (sources.py) and included here; a kernel's header says which of them it calls.
//
// A chain without norms is a function of one value,
//     COMPUTE NAME(const Operand *operand, COMPUTE value, const At &at)
// and `at` says where the value is: LinearAt or VoxelAt. One that may hold layer norms works on all channels of a
// voxel that a thread holds, its team:
//     void NAME(const Operand *operand, Team &team)
// calls team.each(function of value, at), team.layer_norm(eps, weight, bias) and team.keep(), a copy of all values that
// at.of(copy) reads.
//
// How layer_norm finds mean and variance: the first channel is subtracted before anything is added up, so that equal
// channels leave exactly 0; the second pass adds up the deviations and their squares, and the mean of the former is
// what the first pass missed (much, where the first channel is an outlier); where squares overflow, deviations are multiplied
// by FAR first.
//
// A monoid NAME has NAME_lift(x), NAME_combine(a, b), NAME_identity<T>() and NAME_finish(total, share).
#pragma once
#include "device.cuh"

// A compensated sum (Kahan, 1965): its error does not grow with the number of terms.
struct KeptSum {
  COMPUTE total, lost;
  __device__ __forceinline__ void add(COMPUTE term) {
    const COMPUTE corrected = term - lost, sum = total + corrected;
    lost = (sum - total) - corrected;
    total = sum;
  }
};
[[maybe_unused]] constexpr COMPUTE FAR = COMPUTE(sizeof(COMPUTE) == 8 ? 0x1p-600 : 0x1p-80);

// What an operation takes besides its input: a number, or a tensor that broadcasts.
struct Operand {
  const void *data;
  double number;
  index_t stride[5];  // in elements; 0 along axes on which it broadcasts
};

// Element `index` of a contiguous tensor (N, C, D, H, W).
struct LinearAt {
  index_t index;
  const int *extent;
  __device__ __forceinline__ bool inside() const { return true; }
  __device__ __forceinline__ index_t linear() const { return index; }
  // 64-bit divisions would cost more than the memory traffic, so that indices are decoded in 32 bits where they fit.
  template <class Index> __device__ __forceinline__ int decoded_channel() const {
    Index rest = static_cast<Index>(index);
#pragma unroll
    for (int axis = 4; axis > 1; axis--) rest /= static_cast<Index>(extent[axis]);
    return static_cast<int>(rest % static_cast<Index>(extent[1]));
  }
  __device__ __forceinline__ int channel() const {
    return index < (index_t(1) << 32) ? decoded_channel<unsigned>() : decoded_channel<unsigned long long>();
  }
  template <class Index> __device__ __forceinline__ index_t decoded(const index_t *stride) const {
    Index rest = static_cast<Index>(index);
    index_t at = 0;
#pragma unroll
    for (int axis = 4; axis > 0; axis--) {
      const Index size = static_cast<Index>(extent[axis]);
      at += static_cast<index_t>(rest % size) * stride[axis];
      rest /= size;
    }
    return at + static_cast<index_t>(rest) * stride[0];
  }
  __device__ __forceinline__ index_t offset(const index_t *stride) const {
    return index < (index_t(1) << 32) ? decoded<unsigned>(stride) : decoded<unsigned long long>(stride);
  }
};

// A voxel's value of one channel, which may not exist.
struct VoxelAt {
  index_t batch;
  int c, place[3];
  bool exists;
  __device__ __forceinline__ bool inside() const { return exists; }
  __device__ __forceinline__ int channel() const { return c; }
  __device__ __forceinline__ index_t offset(const index_t *stride) const {
    return batch * stride[0] + c * stride[1] + place[0] * stride[2] + place[1] * stride[3] + place[2] * stride[4];
  }
};

template <class T, class At> __device__ __forceinline__ COMPUTE tensor_at(const Operand &operand, const At &at) {
  return at.inside() ? COMPUTE(static_cast<const T *>(operand.data)[at.offset(operand.stride)]) : COMPUTE(0);
}

// The words of the generated text.
#define VALUE COMPUTE
#define INLINE __device__ __forceinline__
#define C(number) COMPUTE(number)
#define NUMBER(k) COMPUTE(operand[k].number)
#define CHANNEL(k) COMPUTE(static_cast<const STORAGE *>(operand[k].data)[at.channel()])
#define LINEAR(k, T) COMPUTE(static_cast<const T *>(operand[k].data)[at.linear()])
#define TENSOR(k, T) tensor_at<T>(operand[k], at)
#include "operations.cuh"
#undef C
