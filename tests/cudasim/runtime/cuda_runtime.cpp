// Once for all libraries, so that none of them reads the headers which this takes.
#include "cuda_runtime.h"

#include <dlfcn.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

namespace cusim_runtime {

// The name of a kernel of this library; compiler.py writes it.
const char *kernel_name(const void *kernel);

namespace {

thread_local int last_error = 0;

cudaError_t kept(int error) {
    if (error) last_error = error;
    return cudaError_t(error);
}

template <class... Arguments> int driver(const char *name, Arguments... arguments) {
    using Function = int(Arguments...);
    return reinterpret_cast<Function *>(dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name))(arguments...);
}

// The function of a kernel in the module that is loaded in the current context.
int function_of(const void *kernel, void **function) {
    static thread_local std::map<void *, void *> *modules;
    if (!modules) modules = new std::map<void *, void *>;
    void *context = nullptr;
    if (int error = driver("cuCtxGetCurrent", &context)) return error;
    void *&module = (*modules)[context];
    if (!module) {
        Dl_info place;
        dladdr(kernel, &place);
        std::ifstream file(place.dli_fname, std::ios::binary);
        const std::string image{std::istreambuf_iterator<char>(file), {}};
        if (int error = driver<void **, const void *>("cuModuleLoadData", &module, image.data())) return error;
    }
    return driver("cuModuleGetFunction", function, module, kernel_name(kernel));
}

}  // namespace

void launch(const void *kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, void **arguments) {
    void *function = nullptr;
    int error = function_of(kernel, &function);
    if (!error)
        error = driver("cuLaunchKernel", function, grid.x, grid.y, grid.z, block.x, block.y, block.z, unsigned(shared),
                       stream, arguments, static_cast<void **>(nullptr));
    kept(error);
}

cudaError_t set_attribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    void *function = nullptr;
    int error = function_of(kernel, &function);
    return kept(error ? error : driver("cuFuncSetAttribute", function, int(attribute), value));
}

}  // namespace cusim_runtime

using namespace cusim_runtime;

cudaError_t cudaGetLastError() { return cudaError_t(std::exchange(last_error, 0)); }
cudaError_t cudaPeekAtLastError() { return cudaError_t(last_error); }
const char *cudaGetErrorString(cudaError_t error) {
    const char *text = "unknown";
    driver("cuGetErrorString", int(error), &text);
    return text;
}
cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t) { return kept(driver("cuMemAlloc_v2", memory, bytes)); }
cudaError_t cudaFreeAsync(void *memory, cudaStream_t) { return kept(driver("cuMemFree_v2", memory)); }
cudaError_t cudaGetDevice(int *device) { return kept(driver("cuCtxGetDevice", device)); }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return kept(driver("cuDeviceGetAttribute", value, int(attribute), device));
}
