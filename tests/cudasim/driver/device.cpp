// Settings, devices, contexts and error texts.
#include "driver.h"

#include <ctype.h>
#include <cudaProfiler.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <thread>

namespace driver {

constexpr int MAX_DEVICES = 8;

// NVIDIA, "CUDA C++ Programming Guide", table of technical specifications per compute capability.
static const Architecture ARCHITECTURES[] = {
    {75, 65536, 65536, 1024, 16},    {80, 166912, 167936, 2048, 32},  {86, 101376, 102400, 1536, 16},
    {87, 166912, 167936, 1536, 16},  {89, 101376, 102400, 1536, 24},  {90, 232448, 233472, 2048, 32},
    {100, 232448, 233472, 2048, 32}, {120, 101376, 102400, 1536, 24},
};

std::recursive_mutex mutex;
static bool init_done;
static CUctx_st primary_contexts[MAX_DEVICES];
static thread_local std::vector<CUcontext> context_stack;
static thread_local CUresult detailed_error;
static thread_local std::string error_detail, error_text;

static const char *setting(const char *name, const char *fallback) {
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}
static bool setting_is(const char *name, const char *value) { return !strcmp(setting(name, ""), value); }

bool requested() { return setting_is("DISPATCHER_CUDA_SIM", "1"); }
int device_count() {
    int count = atoi(setting("DISPATCHER_CUDA_SIM_DEVICES", "2"));
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
}
size_t memory_bytes() { return size_t(atol(setting("DISPATCHER_CUDA_SIM_MEMORY_MB", "8192"))) << 20; }
size_t allocation_alignment() { return size_t(atol(setting("DISPATCHER_CUDA_SIM_ALIGNMENT", "256"))); }
unsigned char poison_byte() { return static_cast<unsigned char>(atoi(setting("DISPATCHER_CUDA_SIM_POISON", "255"))); }
int processor_count() { return std::max(1, atoi(setting("DISPATCHER_CUDA_SIM_PROCESSORS", "4"))); }
unsigned worker_limit() {
    int limit = atoi(setting("DISPATCHER_CUDA_SIM_THREADS", "0"));
    return limit > 0 ? unsigned(limit) : std::thread::hardware_concurrency();
}

// DISPATCHER_CUDA_SIM_BLOCKS holds "FIRST:END", either of which may be missing; negative numbers count from the end.
void chosen_blocks(uint64_t blocks, uint64_t &first, uint64_t &end) {
    const char *first_text = setting("DISPATCHER_CUDA_SIM_BLOCKS", ":"), *colon = strchr(first_text, ':');
    auto position = [blocks](const char *text, uint64_t missing) {
        char *rest;
        long long number = strtoll(text, &rest, 10);
        if (rest == text) return missing;
        if (number < 0) number += (long long)blocks;
        return uint64_t(std::clamp(number, 0LL, (long long)blocks));
    };
    first = position(first_text, 0);
    end = std::max(first, colon ? position(colon + 1, blocks) : blocks);
}

bool reverse_schedule() { return setting_is("DISPATCHER_CUDA_SIM_SCHEDULE", "reverse"); }
bool eager_copies() { return setting_is("DISPATCHER_CUDA_SIM_ASYNC_COPY", "eager"); }
bool truncating_mma() { return setting_is("DISPATCHER_CUDA_SIM_MMA", "rz"); }
bool eager_streams() { return !strcmp(setting("DISPATCHER_CUDA_SIM_STREAMS", "eager"), "eager"); }
int stream_seed() {
    const char *text = setting("DISPATCHER_CUDA_SIM_STREAMS", "eager");
    return isdigit(*text) ? atoi(text) : -1;
}

// DISPATCHER_CUDA_SIM_ARCH holds "8.9", or one such item per device, "8.9,7.5"; the last one stands for the rest.
const Architecture *architecture(int device) {
    const char *item = setting("DISPATCHER_CUDA_SIM_ARCH", "8.9");
    for (const char *comma; device > 0 && (comma = strchr(item, ',')); device--) item = comma + 1;
    int major = 0, minor = 0;
    if (sscanf(item, "%d.%d", &major, &minor) != 2) return nullptr;
    for (const Architecture &known : ARCHITECTURES)
        if (known.capability == 10 * major + minor) return &known;
    return nullptr;
}

bool initialized() { return init_done; }
CUcontext current_context() {
    return context_stack.empty() || !context_stack.back()->alive ? nullptr : context_stack.back();
}

CUresult fail(CUresult error, const std::string &detail) {
    detailed_error = error;
    error_detail = detail;
    fprintf(stderr, "CUDA simulator: %s\n", detail.c_str());
    return error;
}

static void drop_reference(CUcontext context) {
    if (--context->references) return;
    finish_all();
    free_allocations_of(context);
    context->alive = false;
    if (!context_stack.empty() && context_stack.back() == context) context_stack.pop_back();
}

}  // namespace driver

using namespace driver;

// ---- initialisation and devices
DRIVER_API cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (!requested() || !device_count()) return CUDA_ERROR_NO_DEVICE;
    for (int device = 0; device < device_count(); device++)
        if (!architecture(device))
            return fail(CUDA_ERROR_INVALID_VALUE, "DISPATCHER_CUDA_SIM_ARCH names an unknown architecture");
    init_done = true;
    return CUDA_SUCCESS;
}
DRIVER_API cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
DRIVER_API cuDeviceGetCount(int *count) { NEED_INIT(); *count = device_count(); return CUDA_SUCCESS; }
DRIVER_API cuDeviceGet(CUdevice *device, int ordinal) { NEED_DEVICE(ordinal); *device = ordinal; return CUDA_SUCCESS; }
DRIVER_API cuDeviceGetName(char *name, int bytes, CUdevice device) {
    NEED_DEVICE(device);
    snprintf(name, bytes, "CUDA simulator %d (sm_%d)", device, architecture(device)->capability);
    return CUDA_SUCCESS;
}
DRIVER_API cuDeviceGetPCIBusId(char *text, int bytes, CUdevice device) {
    NEED_DEVICE(device);
    snprintf(text, bytes, "0000:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
}
DRIVER_API cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    unsigned bus;
    if (sscanf(text, "%*x:%x", &bus) != 1) return CUDA_ERROR_INVALID_VALUE;
    NEED_DEVICE(int(bus) - 1);
    *device = int(bus) - 1;
    return CUDA_SUCCESS;
}
DRIVER_API cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    NEED_DEVICE(device);
    *bytes = memory_bytes();
    return CUDA_SUCCESS;
}
DRIVER_API cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    NEED_DEVICE(device);
    *major = architecture(device)->capability / 10;
    *minor = architecture(device)->capability % 10;
    return CUDA_SUCCESS;
}
DRIVER_API cuDeviceCanAccessPeer(int *result, CUdevice, CUdevice) { *result = 0; return CUDA_SUCCESS; }
DRIVER_API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    NEED_DEVICE(device);
    const Architecture &arch = *architecture(device);
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = arch.shared_per_block_optin; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = arch.shared_per_multiprocessor; break;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = arch.capability >= 80 ? 1024 : 0; break;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = processor_count(); break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = arch.threads_per_multiprocessor; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = arch.blocks_per_multiprocessor; break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1000000; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 4 << 20; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = arch.capability / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = arch.capability % 10; break;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = device + 1; break;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// ---- contexts
DRIVER_API cuCtxCreate(CUcontext *context, CUctxCreateParams *, unsigned, CUdevice device) {
    NEED_DEVICE(device);
    *context = new CUctx_st{device, 1, true};
    context_stack.push_back(*context);
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxAttach(CUcontext *context, unsigned) {
    NEED_CONTEXT();
    *context = current_context();
    (*context)->references++;
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxDetach(CUcontext context) {
    NEED_INIT();
    Lock lock(mutex);
    if (!context || !context->alive) return CUDA_ERROR_INVALID_CONTEXT;
    drop_reference(context);
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxPushCurrent(CUcontext context) {
    NEED_INIT();
    if (!context || !context->alive) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack.push_back(context);
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxPopCurrent(CUcontext *context) {
    NEED_INIT();
    if (context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = context_stack.back();
    context_stack.pop_back();
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxGetCurrent(CUcontext *context) { NEED_CONTEXT(); *context = current_context(); return CUDA_SUCCESS; }
DRIVER_API cuCtxGetDevice(CUdevice *device) { NEED_CONTEXT(); *device = current_context()->device; return CUDA_SUCCESS; }
DRIVER_API cuCtxGetApiVersion(CUcontext, unsigned *version) { *version = 3020; return CUDA_SUCCESS; }
DRIVER_API cuCtxGetLimit(size_t *value, CUlimit) { NEED_CONTEXT(); *value = 1024; return CUDA_SUCCESS; }
DRIVER_API cuCtxSetLimit(CUlimit, size_t) { NEED_CONTEXT(); return CUDA_SUCCESS; }
DRIVER_API cuCtxGetCacheConfig(CUfunc_cache *config) {
    NEED_CONTEXT();
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}
DRIVER_API cuCtxSetCacheConfig(CUfunc_cache) { NEED_CONTEXT(); return CUDA_SUCCESS; }
DRIVER_API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NEED_DEVICE(device);
    Lock lock(mutex);
    CUctx_st &primary = primary_contexts[device];
    primary = {device, primary.references + 1, true};
    *context = &primary;
    return CUDA_SUCCESS;
}
DRIVER_API cuDevicePrimaryCtxRelease(CUdevice device) {
    NEED_DEVICE(device);
    Lock lock(mutex);
    if (!primary_contexts[device].references) return CUDA_ERROR_INVALID_CONTEXT;
    drop_reference(&primary_contexts[device]);
    return CUDA_SUCCESS;
}

DRIVER_API cuProfilerStart() { return CUDA_SUCCESS; }
DRIVER_API cuProfilerStop() { return CUDA_SUCCESS; }

// ---- errors
static const char *error_name(CUresult error) {
    switch (error) {
        case CUDA_SUCCESS: return "no error";
        case CUDA_ERROR_INVALID_VALUE: return "invalid argument";
        case CUDA_ERROR_OUT_OF_MEMORY: return "out of memory";
        case CUDA_ERROR_NOT_INITIALIZED: return "initialization error";
        case CUDA_ERROR_NO_DEVICE: return "no CUDA-capable device is detected";
        case CUDA_ERROR_INVALID_DEVICE: return "invalid device ordinal";
        case CUDA_ERROR_INVALID_IMAGE: return "device kernel image is invalid";
        case CUDA_ERROR_INVALID_CONTEXT: return "invalid device context";
        case CUDA_ERROR_NO_BINARY_FOR_GPU: return "no kernel image is available for execution on the device";
        case CUDA_ERROR_FILE_NOT_FOUND: return "file not found";
        case CUDA_ERROR_INVALID_HANDLE: return "invalid resource handle";
        case CUDA_ERROR_NOT_FOUND: return "named symbol not found";
        case CUDA_ERROR_ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
        case CUDA_ERROR_MISALIGNED_ADDRESS: return "misaligned address";
        case CUDA_ERROR_LAUNCH_FAILED: return "unspecified launch failure";
        case CUDA_ERROR_NOT_READY: return "device not ready";
        case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
        case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
        case CUDA_ERROR_STREAM_CAPTURE_MERGE: return "operation would result in a merge of separate capture sequences";
        case CUDA_ERROR_STREAM_CAPTURE_UNJOINED: return "capturing stream has unjoined work";
        case CUDA_ERROR_STREAM_CAPTURE_ISOLATION: return "dependency created on uncaptured work in another stream";
        case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: return "operation would make the legacy stream depend on a capturing blocking stream";
        case CUDA_ERROR_CAPTURED_EVENT: return "operation not permitted on an event last recorded in a capturing stream";
        case CUDA_ERROR_NOT_SUPPORTED: return "operation not supported (by the CUDA simulator)";
        default: return nullptr;
    }
}
DRIVER_API cuGetErrorString(CUresult error, const char **text) {
    const char *name = error_name(error);
    if (!name) {
        *text = "unrecognized error code";
        return CUDA_ERROR_INVALID_VALUE;
    }
    error_text = name;
    if (error == detailed_error && !error_detail.empty()) {
        error_text += ": " + error_detail;
        error_detail.clear();
    }
    *text = error_text.c_str();
    return CUDA_SUCCESS;
}
