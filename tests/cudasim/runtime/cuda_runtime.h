// The CUDA runtime for libraries with kernels and functions of the host that launch them (`nvcc -shared`): what such
// functions need, on top of the stand-in driver. A library is its own module, which the driver loads once more.
#pragma once
#define __CUDACC__ 1
#include <dlfcn.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

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

namespace cusim_runtime {

// The name of a kernel of this library; compiler.py writes it.
const char *kernel_name(const void *kernel);

inline thread_local int last_error = 0;

inline cudaError_t kept(int error) {
    if (error) last_error = error;
    return cudaError_t(error);
}

template <class Function> Function *driver(const char *name) {
    return reinterpret_cast<Function *>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

// The function of a kernel in the module that is loaded in the current context.
inline int function_of(const void *kernel, void **function) {
    static thread_local std::map<void *, void *> *modules;
    if (!modules) modules = new std::map<void *, void *>;
    void *context = nullptr;
    if (int error = driver<int(void **)>("cuCtxGetCurrent")(&context)) return error;
    void *&module = (*modules)[context];
    if (!module) {
        Dl_info place;
        dladdr(kernel, &place);
        std::ifstream file(place.dli_fname, std::ios::binary);
        const std::string image{std::istreambuf_iterator<char>(file), {}};
        if (int error = driver<int(void **, const void *)>("cuModuleLoadData")(&module, image.data())) return error;
    }
    return driver<int(void **, void *, const char *)>("cuModuleGetFunction")(function, module, kernel_name(kernel));
}

// kernel<<<grid, block, shared, stream>>>(arguments...)
template <class... Wanted>
auto configured(void (*kernel)(Wanted...), dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) {
    return [=](Wanted... arguments) {
        void *function = nullptr, *pointers[] = {const_cast<void *>(static_cast<const void *>(&arguments))..., nullptr};
        int error = function_of(reinterpret_cast<const void *>(kernel), &function);
        using Launch = int(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
        if (!error)
            error = driver<Launch>("cuLaunchKernel")(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                                     unsigned(shared), stream, pointers, nullptr);
        kept(error);
    };
}

}  // namespace cusim_runtime

inline cudaError_t cudaGetLastError() { return cudaError_t(std::exchange(cusim_runtime::last_error, 0)); }
inline cudaError_t cudaPeekAtLastError() { return cudaError_t(cusim_runtime::last_error); }
inline const char *cudaGetErrorString(cudaError_t error) {
    const char *text = "unknown";
    cusim_runtime::driver<int(int, const char **)>("cuGetErrorString")(error, &text);
    return text;
}
inline cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t) {
    return cusim_runtime::kept(cusim_runtime::driver<int(void **, size_t)>("cuMemAlloc_v2")(memory, bytes));
}
inline cudaError_t cudaFreeAsync(void *memory, cudaStream_t) {
    return cusim_runtime::kept(cusim_runtime::driver<int(void *)>("cuMemFree_v2")(memory));
}
inline cudaError_t cudaGetDevice(int *device) {
    return cusim_runtime::kept(cusim_runtime::driver<int(int *)>("cuCtxGetDevice")(device));
}
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return cusim_runtime::kept(cusim_runtime::driver<int(int *, int, int)>("cuDeviceGetAttribute")(value, attribute, device));
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *, int) { return cudaSuccess; }
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    void *function = nullptr;
    int error = cusim_runtime::function_of(reinterpret_cast<const void *>(kernel), &function);
    if (!error) error = cusim_runtime::driver<int(void *, int, int)>("cuFuncSetAttribute")(function, attribute, value);
    return cusim_runtime::kept(error);
}
