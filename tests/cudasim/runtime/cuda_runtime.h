// The CUDA runtime for libraries with kernels and functions of the host that launch them (`nvcc -shared`): what such
// functions need, on top of the stand-in driver. A library is its own module, which the driver loads once more.
#pragma once
#define __CUDACC__ 1
#include <cstddef>
#include <initializer_list>  // as the real one does

#include "../device/vector_types.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMisalignedAddress = 716 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
using cudaStream_t = struct CUstream_st *;
using cudaMemPool_t = struct CUmemPoolHandle_st *;

// Defined in cuda_runtime.cpp.
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t);
cudaError_t cudaFreeAsync(void *memory, cudaStream_t);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *, int) { return cudaSuccess; }
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }

namespace cusim_runtime {

void launch(const void *kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, void **arguments);
cudaError_t set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);

// kernel<<<grid, block, shared, stream>>>(arguments...)
template <class... Wanted>
auto configured(void (*kernel)(Wanted...), dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) {
    return [=](Wanted... arguments) {
        void *pointers[] = {const_cast<void *>(static_cast<const void *>(&arguments))..., nullptr};
        launch(reinterpret_cast<const void *>(kernel), grid, block, shared, stream, pointers);
    };
}

}  // namespace cusim_runtime

template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    return cusim_runtime::set_attribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
