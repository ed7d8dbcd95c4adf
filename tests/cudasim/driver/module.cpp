// Modules, functions and launches. A "cubin" is a host shared object made by compiler.py.
//
// A launch spreads its blocks over several OS threads. Each of them runs its own loaded copy of the module: the
// copy's static variables are the __shared__ memory of the one block that the thread runs. Modules with __device__
// or __constant__ variables, of which there must be one copy only, run on one thread.
#include "driver.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

using cusim_abi::Launch;
using cusim_abi::Outcome;

namespace {

constexpr int DEFAULT_SHARED_LIMIT = 49152;
constexpr size_t MAX_WORKERS = 8;  // each arena takes 2048 of the 65530 memory mappings that Linux allows
constexpr size_t SHARED_BYTES = 256 * 1024;

struct LoadedCopy {
    int file;  // stays open while loaded: its number is part of the name that dlopen() tells libraries apart by
    void *handle;
    const cusim_abi::Module *contents;
};

}  // namespace

struct CUfunc_st {
    CUmodule module;
    size_t kernel;  // index in the module's table
    int max_dynamic_shared;
};

struct CUmod_st {
    CUcontext context;
    std::string image;
    std::vector<LoadedCopy> copies;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;

    const cusim_abi::Module &contents() const { return *copies[0].contents; }
    bool has_device_variables() const { return contents().globals_begin != contents().globals_end; }
    // Exact for a module of one kernel; otherwise not known, and 0.
    int static_shared_bytes() const {
        return contents().kernel_count == 1 ? int(contents().shared_end - contents().shared_begin) : 0;
    }
};

using namespace driver;

// ---- loading
static std::string load_copy(CUmodule module) {
    int file = memfd_create("cusim-module", MFD_CLOEXEC);
    size_t bytes = module->image.size();
    if (file < 0 || write(file, module->image.data(), bytes) != ssize_t(bytes)) return "can't write the module to memory";
    void *handle = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    auto contents = handle ? static_cast<const cusim_abi::Module *>(dlsym(handle, "cusim_module")) : nullptr;
    if (contents && contents->version == cusim_abi::VERSION) {
        module->copies.push_back({file, handle, contents});
        return "";
    }
    std::string reason = handle ? "not made by this simulator's compiler" : dlerror();
    if (handle) dlclose(handle);
    close(file);
    return reason;
}

static void unload(CUmodule module) {
    for (LoadedCopy &copy : module->copies) {
        dlclose(copy.handle);
        close(copy.file);
    }
    delete module;
}

static bool runs_on(const cusim_abi::Module &contents, int capability) {
    if (contents.architecture_specific) return contents.architecture == capability;
    return contents.architecture / 10 == capability / 10 && contents.architecture <= capability;
}

// The image's length is not given; the section headers come last in a linked file.
static CUresult load_image(CUmodule *result, const void *image) {
    NEED_CONTEXT();
    NEED_SAFE("loading a module");
    Lock lock(mutex);
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_INVALID_IMAGE;
    if (header.e_machine != EM_X86_64) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    size_t bytes = header.e_shoff + size_t(header.e_shentsize) * header.e_shnum;
    auto module = new CUmod_st{current_context(), std::string(static_cast<const char *>(image), bytes), {}, {}};
    std::string problem = load_copy(module);
    if (!problem.empty()) {
        delete module;
        return fail(CUDA_ERROR_INVALID_IMAGE, problem);
    }
    int capability = architecture(module->context->device)->capability;
    if (!runs_on(module->contents(), capability)) {
        int built_for = module->contents().architecture;
        unload(module);
        return fail(CUDA_ERROR_NO_BINARY_FOR_GPU, "compiled for sm_" + std::to_string(built_for) +
                                                      ", but the device is sm_" + std::to_string(capability));
    }
    add_device_variables(module->contents().globals_begin, module->contents().globals_end);
    *result = module;
    return CUDA_SUCCESS;
}

DRIVER_API cuModuleLoadData(CUmodule *module, const void *image) { return load_image(module, image); }
DRIVER_API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *, void **) {
    return load_image(module, image);
}
DRIVER_API cuModuleLoad(CUmodule *module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    std::string image;
    char buffer[65536];
    for (size_t count; (count = fread(buffer, 1, sizeof buffer, file));) image.append(buffer, count);
    fclose(file);
    return image.size() < sizeof(Elf64_Ehdr) ? CUDA_ERROR_INVALID_IMAGE : load_image(module, image.data());
}
DRIVER_API cuModuleUnload(CUmodule module) {
    Lock lock(mutex);
    finish_all();
    remove_device_variables(module->contents().globals_begin);
    unload(module);
    return CUDA_SUCCESS;
}
DRIVER_API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    NEED_CONTEXT();
    Lock lock(mutex);
    const cusim_abi::Module &contents = module->contents();
    for (size_t i = 0; i < contents.kernel_count; i++) {
        if (strcmp(contents.kernels[i].name, name) != 0) continue;
        auto &entry = module->functions[name];
        if (!entry) entry.reset(new CUfunc_st{module, i, DEFAULT_SHARED_LIMIT - module->static_shared_bytes()});
        *function = entry.get();
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}
DRIVER_API cuModuleGetGlobal(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
    NEED_CONTEXT();
    const char *symbol = static_cast<const char *>(dlsym(module->copies[0].handle, name));
    Dl_info info;
    void *entry = nullptr;
    if (!symbol || symbol < module->contents().globals_begin || symbol >= module->contents().globals_end ||
        !dladdr1(symbol, &info, &entry, RTLD_DL_SYMENT) || !entry)
        return CUDA_ERROR_NOT_FOUND;
    if (address) *address = reinterpret_cast<CUdeviceptr>(symbol);
    if (bytes) *bytes = static_cast<const Elf64_Sym *>(entry)->st_size;
    return CUDA_SUCCESS;
}

// ---- functions
static unsigned max_threads(CUfunction function) {
    return std::min(cusim_abi::MAX_THREADS, function->module->contents().kernels[function->kernel].max_threads);
}

DRIVER_API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = max_threads(function); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = function->module->static_shared_bytes(); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->max_dynamic_shared; break;
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = function->module->contents().architecture; break;
        default: *value = 0;  // registers and local memory are not modelled
    }
    return CUDA_SUCCESS;
}
DRIVER_API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    int limit = architecture(function->module->context->device)->shared_per_block_optin;
    if (value < 0 || value + function->module->static_shared_bytes() > limit) return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}
DRIVER_API cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
DRIVER_API cuFuncSetBlockShape(CUfunction, int, int, int) { return CUDA_SUCCESS; }  // PyCUDA calls it before launches
DRIVER_API cuFuncSetSharedSize(CUfunction, unsigned) { return CUDA_SUCCESS; }

// ---- launches: a fault in a kernel comes back here and the process goes on
static thread_local sigjmp_buf after_fault;
static thread_local volatile bool in_kernel;
static thread_local void *fault_address;
static constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous_actions[sizeof FAULTS / sizeof *FAULTS];

static void on_fault(int signal, siginfo_t *info, void *) {
    if (in_kernel) {
        in_kernel = false;
        fault_address = info->si_addr;
        siglongjmp(after_fault, signal);
    }
    for (size_t i = 0; i < std::size(FAULTS); i++)  // not ours: returning repeats it under the previous handler
        if (FAULTS[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
}

// Catches faults in kernels for as long as it lives.
struct FaultHandlers {
    FaultHandlers() {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (size_t i = 0; i < std::size(FAULTS); i++) sigaction(FAULTS[i], &action, &previous_actions[i]);
    }
    ~FaultHandlers() {
        for (size_t i = 0; i < std::size(FAULTS); i++) sigaction(FAULTS[i], &previous_actions[i], nullptr);
    }
};

// A stack of its own for the handler: the kernel's may have overflowed.
struct HandlerStack {
    std::unique_ptr<char[]> memory{new char[65536]};
    stack_t previous;
    HandlerStack() {
        stack_t stack = {};
        stack.ss_sp = memory.get();
        stack.ss_size = 65536;
        sigaltstack(&stack, &previous);
    }
    ~HandlerStack() { sigaltstack(&previous, nullptr); }
};

// Made on first use, and kept.
static cusim_abi::Arena worker_arena(size_t worker) {
    static std::vector<cusim_abi::Arena> arenas;
    auto map = [](size_t bytes) {
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        return static_cast<char *>(memory);
    };
    while (arenas.size() <= worker) {
        char *stacks = map(cusim_abi::MAX_THREADS * cusim_abi::STACK_BYTES);
        for (unsigned i = 0; i < cusim_abi::MAX_THREADS; i++)
            mprotect(stacks + i * cusim_abi::STACK_BYTES, PAGE, PROT_NONE);
        char *shared_limit = map(SHARED_BYTES + GUARD_BYTES) + SHARED_BYTES;
        mprotect(shared_limit, GUARD_BYTES, PROT_NONE);
        arenas.push_back({stacks, shared_limit});
    }
    return arenas[worker];
}

static Outcome run_worker(const LoadedCopy &copy, size_t kernel, Launch &launch) {
    HandlerStack handler_stack;
    int signal = sigsetjmp(after_fault, 1);
    Outcome outcome;
    if (!signal) {
        in_kernel = true;
        outcome = copy.contents->kernels[kernel].run(launch);
        in_kernel = false;
    } else {
        char where[96];
        copy.contents->describe_thread(where, sizeof where);
        outcome = signal == SIGSEGV || signal == SIGBUS ? Outcome::illegal_access : Outcome::launch_failure;
        if (outcome == Outcome::illegal_access)
            snprintf(launch.message, sizeof launch.message, "access to %p, %s; %s", fault_address,
                     describe_address(fault_address).c_str(), where);
        else
            snprintf(launch.message, sizeof launch.message, "signal %d (%s); %s", signal, strsignal(signal), where);
    }
    if (outcome != Outcome::ok) launch.stop->store(true);
    return outcome;
}

static CUresult error_for(Outcome outcome) {
    switch (outcome) {
        case Outcome::ok: return CUDA_SUCCESS;
        case Outcome::bad_arguments: return CUDA_ERROR_INVALID_VALUE;
        case Outcome::misaligned: return CUDA_ERROR_MISALIGNED_ADDRESS;
        case Outcome::illegal_access: return CUDA_ERROR_ILLEGAL_ADDRESS;
        case Outcome::launch_failure: break;
    }
    return CUDA_ERROR_LAUNCH_FAILED;
}

static std::string check_limits(CUfunction function, const Launch &launch) {
    const unsigned *grid = launch.grid, *block = launch.block;
    auto size = [](const unsigned *extent) {
        return std::to_string(extent[0]) + " x " + std::to_string(extent[1]) + " x " + std::to_string(extent[2]);
    };
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535)
        return "a grid of " + size(grid) + " blocks; the limits are 2147483647 x 65535 x 65535";
    if (!block[0] || !block[1] || !block[2] || block[0] > 1024 || block[1] > 1024 || block[2] > 64 ||
        uint64_t(block[0]) * block[1] * block[2] > 1024)
        return "a block of " + size(block) + " threads; the limits are 1024 x 1024 x 64 and 1024 in all";
    if (block[0] * block[1] * block[2] > max_threads(function))
        return "a block of " + size(block) + " threads; the kernel's __launch_bounds__ are " +
               std::to_string(max_threads(function));
    if (launch.dynamic_shared_bytes > unsigned(function->max_dynamic_shared))
        return std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory; the function's limit is " +
               std::to_string(function->max_dynamic_shared);
    return "";
}

static void read_packed_arguments(Launch &launch, void **extra) {
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) launch.packed = static_cast<const char *>(extra[1]);
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) launch.packed_bytes = *static_cast<size_t *>(extra[1]);
    }
    if (!launch.packed) launch.packed = "";
}

// Runs a launch; settings are those of now.
static CUresult execute(CUfunction function, Launch launch) {
    CUmodule module = function->module;
    std::string kernel = std::string("kernel ") + module->contents().kernels[function->kernel].name + ": ";
    std::atomic<uint64_t> next_block{0};
    std::atomic<bool> stop{false};
    launch.next_block = &next_block, launch.stop = &stop;
    launch.reverse = reverse_schedule(), launch.eager_copies = eager_copies(), launch.truncating_mma = truncating_mma();

    Lock lock(mutex);
    chosen_blocks(uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2], launch.first_block, launch.end_block);
    uint64_t blocks = launch.end_block - launch.first_block;
    if (!blocks) return CUDA_SUCCESS;
    size_t workers = module->has_device_variables() ? 1 : size_t(std::min<uint64_t>({worker_limit(), blocks, MAX_WORKERS}));
    while (module->copies.size() < workers && load_copy(module).empty()) {}
    workers = std::min(workers, module->copies.size());

    std::vector<Launch> launches(workers, launch);
    for (size_t worker = 0; worker < workers; worker++) launches[worker].arena = worker_arena(worker);
    std::vector<Outcome> outcomes(workers, Outcome::ok);
    auto run = [&](size_t worker) {
        outcomes[worker] = run_worker(module->copies[worker], function->kernel, launches[worker]);
    };
    protect_other_devices(module->context->device, true);
    {
        FaultHandlers handlers;
        std::vector<std::thread> threads;
        for (size_t worker = 1; worker < workers; worker++) threads.emplace_back(run, worker);
        run(0);
        for (std::thread &thread : threads) thread.join();
    }
    protect_other_devices(module->context->device, false);

    for (size_t worker = 0; worker < workers; worker++)
        if (outcomes[worker] != Outcome::ok) return fail(error_for(outcomes[worker]), kernel + launches[worker].message);
    std::string stray = find_stray_write();
    if (!stray.empty()) return fail(CUDA_ERROR_ILLEGAL_ADDRESS, kernel + stray);
    return CUDA_SUCCESS;
}

DRIVER_API cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                          void **extra) {
    NEED_CONTEXT();
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    std::string kernel = std::string("kernel ") + function->module->contents().kernels[function->kernel].name + ": ";
    if (function->module->context != current_context())
        return fail(CUDA_ERROR_INVALID_CONTEXT, kernel + "its module belongs to another context");

    Launch launch = {};
    launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, parameters};
    if (extra) read_packed_arguments(launch, extra);
    std::string excess = check_limits(function, launch);
    if (!excess.empty()) return fail(CUDA_ERROR_INVALID_VALUE, kernel + excess);
    if (parameters) {  // how large they are is not known here, so that they cannot be kept
        CUresult error = is_capturing(stream) ? CUDA_ERROR_NOT_SUPPORTED : finish_stream(stream);
        return error ? error : execute(function, launch);
    }
    return enqueue(stream, [function, launch, packed = std::string(launch.packed, launch.packed_bytes)]() mutable {
        launch.packed = packed.data();
        return execute(function, launch);
    });
}
