// A chain of pointwise steps.
//   y[i] = last_chain(x[i]),  i = (n, c, d, h, w)
//
// Layouts: x and y contiguous in C order, INPUT and OUTPUT; with STRIDED x has any strides (in elements). What the
// chain's operands are stands in chain.cuh.
//
// A thread makes every gridDim*blockDim-th value. Ideal bytes: x and each tensor operand once, y once.
//
// The host guarantees: y overlaps nothing.
// Generated: last_chain.
#include "chain.cuh"

struct ElementwiseParams {
  const INPUT *x;
  OUTPUT *y;
  index_t count, stride[5];
  int extent[5];
  Operand operand[OPERANDS];
};
CHECK_PARAMS(ElementwiseParams);

extern "C" __global__ void elementwise(const ElementwiseParams p) {
  for (index_t i = index_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += index_t(gridDim.x) * blockDim.x) {
    const LinearAt at{i, p.extent};
    p.y[i] = OUTPUT(last_chain(p.operand, COMPUTE(p.x[STRIDED ? at.offset(p.stride) : i]), at));
  }
}
