// What the functions of the host in an exported program share.
#pragma once
#include <cuda_runtime.h>

#include "device.cuh"

// One call: its stream, and memory for everything between inputs and output. Without memory it counts bytes and
// launches nothing.
struct Call {
  char *memory;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;
  index_t used = 0;

  template <class T> T *take(index_t count) {
    T *place = memory ? reinterpret_cast<T *>(memory + used) : nullptr;
    used += (count * index_t(sizeof(T)) + 255) / 256 * 256;
    return place;
  }

  template <class... Wanted, class... Given>
  void launch(void (*kernel)(Wanted...), index_t blocks, int threads, int shared_bytes, const Given &...arguments) {
    if (!memory || error != cudaSuccess) return;
    if (shared_bytes > 48 * 1024)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return;
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(arguments...);
    error = cudaPeekAtLastError();
  }

  // Kernels count extents in 32 bits.
  void check(const index_t (&shape)[5]) {
    for (index_t extent : shape)
      if (extent < 0 || extent > 0x7fffffff) error = cudaErrorInvalidValue;
  }
};

template <class T> void point(T *&pointer, const void *memory) {
  pointer = static_cast<T *>(const_cast<void *>(memory));
}

inline bool aligned(const void *memory) {
  return reinterpret_cast<size_t>(memory) % 16 == 0;
}

// Has the current device what the kernels of a case need?
inline bool fits(int architecture, int shared_bytes) {
  int device = 0, major = 0, minor = 0, limit = 0;
  return cudaGetDevice(&device) == cudaSuccess
         && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess
         && cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess
         && cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess
         && 10 * major + minor >= architecture && limit >= shared_bytes;
}

// ---- for sizes that are known when the program is called --------------------------------------------------
inline index_t floor_div(index_t a, index_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
inline index_t smaller(index_t a, index_t b) {
  return a < b ? a : b;
}
inline index_t larger(index_t a, index_t b) {
  return a > b ? a : b;
}
inline index_t elements(const index_t (&shape)[5]) {
  return shape[0] * shape[1] * shape[2] * shape[3] * shape[4];
}
inline index_t blocks_for(index_t threads) {
  return larger(1, smaller((threads + 255) / 256, 1 << 20));
}
template <class To> void set(To *to, const index_t (&shape)[5], int first = 0) {
  for (int axis = first; axis < 5; axis++) to[axis - first] = static_cast<To>(shape[axis]);
}

// A tensor of that shape as an operand that broadcasts.
template <class Operand> void broadcast(Operand &operand, const void *data, const index_t (&shape)[5]) {
  operand.data = data;
  index_t step = 1;
  for (int axis = 4; axis >= 0; axis--) {
    operand.stride[axis] = shape[axis] == 1 ? 0 : step;
    step *= shape[axis];
  }
}

// The axes of a contiguous tensor, split in those of a row's items (a bit for each axis in `over`) and the others, with
// neighbours merged. The channel axis counts as two, groups and the channels of one.
template <class Params> void split_axes(Params &p, const index_t (&shape)[5], unsigned over, index_t groups) {
  const index_t extent[6] = {shape[0], groups, shape[1] / groups, shape[2], shape[3], shape[4]};
  const bool item[6] = {bool(over & 1), groups == 1 && (over & 2), bool(over & 2), bool(over & 4), bool(over & 8),
                        bool(over & 16)};
  index_t step = elements(shape);
  p.rows = p.items = 1;
  p.row.rank = p.item.rank = 0;
  for (int axis = 0; axis < 6; axis++) {
    step /= extent[axis];
    if (extent[axis] == 1) continue;
    auto &axes = item[axis] ? p.item : p.row;
    (item[axis] ? p.items : p.rows) *= extent[axis];
    if (axes.rank > 0 && axes.stride[axes.rank - 1] == extent[axis] * step) {
      axes.extent[axes.rank - 1] *= extent[axis];
      axes.stride[axes.rank - 1] = step;
    } else {
      axes.extent[axes.rank] = extent[axis];
      axes.stride[axes.rank++] = step;
    }
  }
  for (auto *axes : {&p.row, &p.item})
    if (axes->rank == 0) {
      axes->rank = axes->extent[0] = 1;
      axes->stride[0] = 0;
    }
  p.count = static_cast<double>(p.items);
}
