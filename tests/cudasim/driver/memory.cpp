// Device and pinned host memory, copies and fills. All of it is host memory; copies happen at once.
//
// An allocation starts out as 0xff bytes (NaN) and lies between two inaccessible ranges, its end (rounded up to the
// alignment) right before the second. The gaps that alignment leaves are filled with 0xff and checked after launches.
#include "driver.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>

namespace driver {

constexpr ptrdiff_t CHECKED_GAP = 256;
constexpr unsigned char POISON = 0xff;

struct Allocation {
    char *address;
    size_t bytes;
    char *mapping;
    size_t mapping_bytes;
    CUcontext owner;
    bool on_host;
    char *end() const { return address + bytes; }
    char *accessible() const { return mapping + GUARD_BYTES; }
    char *accessible_end() const { return mapping + mapping_bytes - GUARD_BYTES; }
};

static std::map<uintptr_t, Allocation> allocations;  // by address
static std::map<uintptr_t, uintptr_t> device_variables;  // begin -> end, one entry per module
static size_t used_bytes[16];                             // per device

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static CUresult allocate(void **address, size_t bytes, bool on_host) {
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(mutex);
    CUcontext owner = current_context();
    if (!on_host && bytes > memory_bytes() - std::min(memory_bytes(), used_bytes[owner->device]))
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t padded = round_up(bytes, allocation_alignment()), accessible = round_up(padded, PAGE);
    size_t mapping_bytes = accessible + 2 * GUARD_BYTES;
    void *mapped = mmap(nullptr, mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *mapping = static_cast<char *>(mapped), *limit = mapping + GUARD_BYTES + accessible;
    mprotect(mapping + GUARD_BYTES, accessible, PROT_READ | PROT_WRITE);
    memset(mapping + GUARD_BYTES, POISON, accessible);
    char *start = limit - padded;
    allocations[reinterpret_cast<uintptr_t>(start)] = {start, bytes, mapping, mapping_bytes, owner, on_host};
    if (!on_host) used_bytes[owner->device] += bytes;
    *address = start;
    return CUDA_SUCCESS;
}

static void release(const Allocation &allocation) {
    if (!allocation.on_host) used_bytes[allocation.owner->device] -= allocation.bytes;
    munmap(allocation.mapping, allocation.mapping_bytes);
}

static CUresult deallocate(uintptr_t address, bool on_host) {
    Lock lock(mutex);
    auto found = allocations.find(address);
    if (found == allocations.end() || found->second.on_host != on_host) return CUDA_ERROR_INVALID_VALUE;
    release(found->second);
    allocations.erase(found);
    return CUDA_SUCCESS;
}

void free_allocations_of(CUcontext context) {
    for (auto entry = allocations.begin(); entry != allocations.end();) {
        if (entry->second.owner != context) { ++entry; continue; }
        release(entry->second);
        entry = allocations.erase(entry);
    }
}

// The allocation that starts at or before an address, or null.
static const Allocation *allocation_before(uintptr_t address) {
    auto next = allocations.upper_bound(address);
    return next == allocations.begin() ? nullptr : &std::prev(next)->second;
}

static bool is_device_memory(CUdeviceptr address, size_t bytes) {
    Lock lock(mutex);
    auto next = device_variables.upper_bound(address);
    if (next != device_variables.begin() && address + bytes <= std::prev(next)->second) return true;
    const Allocation *allocation = allocation_before(address);
    return allocation && address + bytes <= reinterpret_cast<uintptr_t>(allocation->end());
}

void add_device_variables(const char *begin, const char *end) {
    device_variables[reinterpret_cast<uintptr_t>(begin)] = reinterpret_cast<uintptr_t>(end);
}
void remove_device_variables(const char *begin) { device_variables.erase(reinterpret_cast<uintptr_t>(begin)); }

std::string describe_address(const void *address) {
    const char *where = static_cast<const char *>(address);
    for (const auto &entry : allocations) {
        const Allocation &a = entry.second;
        if (where < a.mapping || where >= a.mapping + a.mapping_bytes) continue;
        std::string size = std::to_string(a.bytes) + " bytes";
        if (where < a.address) return std::to_string(a.address - where) + " bytes before an allocation of " + size;
        if (where >= a.end()) return std::to_string(where - a.end()) + " bytes past the end of an allocation of " + size;
        return "inside an allocation of " + size + " on another device";
    }
    return "in no allocation";
}

static char *first_changed(char *begin, char *end) {
    for (; begin < end; begin++)
        if (static_cast<unsigned char>(*begin) != POISON) return begin;
    return nullptr;
}

std::string find_stray_write() {
    for (const auto &entry : allocations) {
        const Allocation &a = entry.second;
        char *lowest = a.accessible(), *limit = a.accessible_end();
        char *changed = first_changed(a.address - std::min<ptrdiff_t>(CHECKED_GAP, a.address - lowest), a.address);
        if (!changed) changed = first_changed(a.end(), limit);
        if (!changed) continue;
        std::string text = "a write " + describe_address(changed);
        memset(lowest, POISON, a.address - lowest);
        memset(a.end(), POISON, limit - a.end());
        return text;
    }
    return "";
}

void protect_other_devices(int device, bool protect) {
    for (const auto &entry : allocations) {
        const Allocation &a = entry.second;
        if (a.on_host || a.owner->device == device) continue;
        mprotect(a.accessible(), a.accessible_end() - a.accessible(), protect ? PROT_NONE : PROT_READ | PROT_WRITE);
    }
}

template <class T> static CUresult fill(CUdeviceptr destination, T value, size_t count) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, count * sizeof value)) return CUDA_ERROR_INVALID_VALUE;
    std::fill_n(reinterpret_cast<T *>(destination), count, value);
    return CUDA_SUCCESS;
}

}  // namespace driver

using namespace driver;

DRIVER_API cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    NEED_CONTEXT();
    return allocate(reinterpret_cast<void **>(address), bytes, false);
}
DRIVER_API cuMemFree(CUdeviceptr address) {
    NEED_CONTEXT();
    return address ? deallocate(address, false) : CUDA_SUCCESS;
}
DRIVER_API cuMemHostAlloc(void **address, size_t bytes, unsigned) { NEED_CONTEXT(); return allocate(address, bytes, true); }
DRIVER_API cuMemFreeHost(void *address) { return deallocate(reinterpret_cast<uintptr_t>(address), true); }
DRIVER_API cuMemHostGetDevicePointer(CUdeviceptr *device_address, void *address, unsigned) {
    *device_address = reinterpret_cast<CUdeviceptr>(address);
    return CUDA_SUCCESS;
}
DRIVER_API cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    NEED_CONTEXT();
    Lock lock(mutex);
    *total_bytes = memory_bytes();
    *free_bytes = *total_bytes - std::min(*total_bytes, used_bytes[current_context()->device]);
    return CUDA_SUCCESS;
}
DRIVER_API cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    NEED_CONTEXT();
    Lock lock(mutex);
    const Allocation *allocation = allocation_before(address);
    if (!allocation || address >= reinterpret_cast<uintptr_t>(allocation->end())) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = reinterpret_cast<CUdeviceptr>(allocation->address);
    if (bytes) *bytes = allocation->bytes;
    return CUDA_SUCCESS;
}
DRIVER_API cuMemcpyHtoD(CUdeviceptr destination, const void *source, size_t bytes) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, bytes)) return CUDA_ERROR_INVALID_VALUE;
    memcpy(reinterpret_cast<void *>(destination), source, bytes);
    return CUDA_SUCCESS;
}
DRIVER_API cuMemcpyDtoH(void *destination, CUdeviceptr source, size_t bytes) {
    NEED_CONTEXT();
    if (!is_device_memory(source, bytes)) return CUDA_ERROR_INVALID_VALUE;
    memcpy(destination, reinterpret_cast<void *>(source), bytes);
    return CUDA_SUCCESS;
}
DRIVER_API cuMemcpyDtoD(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, bytes) || !is_device_memory(source, bytes)) return CUDA_ERROR_INVALID_VALUE;
    memmove(reinterpret_cast<void *>(destination), reinterpret_cast<void *>(source), bytes);
    return CUDA_SUCCESS;
}
DRIVER_API cuMemcpyHtoDAsync(CUdeviceptr d, const void *s, size_t n, CUstream) { return cuMemcpyHtoD(d, s, n); }
DRIVER_API cuMemcpyDtoHAsync(void *d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpyDtoH(d, s, n); }
DRIVER_API cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpyDtoD(d, s, n); }
DRIVER_API cuMemsetD8(CUdeviceptr d, unsigned char value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD16(CUdeviceptr d, unsigned short value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD32(CUdeviceptr d, unsigned value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD8Async(CUdeviceptr d, unsigned char value, size_t n, CUstream) { return fill(d, value, n); }
DRIVER_API cuMemsetD16Async(CUdeviceptr d, unsigned short value, size_t n, CUstream) { return fill(d, value, n); }
DRIVER_API cuMemsetD32Async(CUdeviceptr d, unsigned value, size_t n, CUstream) { return fill(d, value, n); }
