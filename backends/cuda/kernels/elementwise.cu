// One pointwise step with operands that broadcast.
//   y[i] = function(x[i], a[i], b[i]),  i = (n, c, d, h, w)
//
// Layouts: y is contiguous in C order, OUTPUT; x, a and b have any strides (in elements, 0 where they broadcast)
// and hold COMPUTE where `wide` is set, else STORAGE; a and b are plain numbers where the pointer is null.
//
// A thread makes every gridDim*blockDim-th value. Indices are decoded in 32 bits where they fit, since 64-bit
// divisions would cost more than the memory traffic. Ideal bytes: each operand once, y once.
//
// The host guarantees: y overlaps nothing.
#include "chain.cuh"

struct Operand {
  const void *data;
  double number;
  index_t stride[5];
  int wide, pad;
};

struct ElementwiseParams {
  Operand x, a, b;
  OUTPUT *y;
  index_t count;
  int extent[5];
  int operation;
};
CHECK_PARAMS(ElementwiseParams);

__device__ __forceinline__ COMPUTE load(const Operand &operand, index_t at) {
  if (!operand.data) return COMPUTE(operand.number);
  return operand.wide ? static_cast<const COMPUTE *>(operand.data)[at]
                      : COMPUTE(static_cast<const STORAGE *>(operand.data)[at]);
}

template <class Index> __device__ __forceinline__ void run(const ElementwiseParams &p) {
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += index_t(gridDim.x) * blockDim.x) {
    Index rest = static_cast<Index>(i);
    index_t x = 0, a = 0, b = 0;
#pragma unroll
    for (int axis = 4; axis >= 0; axis--) {
      Index extent = static_cast<Index>(p.extent[axis]);
      index_t at = static_cast<index_t>(rest % extent);
      rest /= extent;
      x += at * p.x.stride[axis];
      a += at * p.a.stride[axis];
      b += at * p.b.stride[axis];
    }
    p.y[i] = OUTPUT(pointwise(p.operation, load(p.x, x), load(p.a, a), load(p.b, b)));
  }
}

extern "C" __global__ void elementwise(const ElementwiseParams p) {
  if (p.count < (index_t(1) << 31))
    run<unsigned>(p);
  else
    run<unsigned long long>(p);
}
