// Device and pinned host memory, copies and fills. All of it is host memory; copies and fills are work in streams.
//
// An allocation starts out as poison, 0xff bytes (NaN) by default, and lies between two inaccessible ranges, its end
// (rounded up to the alignment) right before the second. The gaps that alignment leaves hold poison too, which is checked
// after launches.
//
// A large allocation takes memory only where it is written: until then its pages are those of one file of poison.
// The ranges around it are so large that an offset cut to 32 bits ends there or in the allocation itself.
#include "driver.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace driver {

constexpr ptrdiff_t CHECKED_GAP = 256;
constexpr size_t POISON_FILE_BYTES = 64 << 20;              // larger allocations are made of this file
constexpr size_t LARGE_GUARD_BYTES = sizeof(double) << 32;  // of theirs

struct Allocation {
    char *address;
    size_t bytes;
    char *mapping;
    size_t mapping_bytes, guard_bytes;
    CUcontext owner;
    bool on_host;
    unsigned char poison;
    char *end() const { return address + bytes; }
    char *accessible() const { return mapping + guard_bytes; }
    char *accessible_end() const { return mapping + mapping_bytes - guard_bytes; }
};

static std::map<uintptr_t, Allocation> allocations;  // by address
static std::map<uintptr_t, uintptr_t> device_variables;  // begin -> end, one entry per module
static size_t used_bytes[16];                             // per device

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void *map(void *where, size_t bytes, int protection, int flags, int file) {
    return mmap(where, bytes, protection, MAP_PRIVATE | MAP_NORESERVE | flags, file, 0);
}

// Made on first use, and kept; -1 where that fails.
static int poison_file(unsigned char poison) {
    static std::map<unsigned char, int> files;
    auto found = files.find(poison);
    if (found != files.end()) return found->second;
    int file = memfd_create("cusim-poison", MFD_CLOEXEC);
    std::string content(POISON_FILE_BYTES, char(poison));
    if (file < 0 || write(file, content.data(), content.size()) != ssize_t(content.size())) file = -1;
    return files[poison] = file;
}

// Makes address space writable, and poisons it.
static bool fill_with_poison(char *begin, char *end, unsigned char poison) {
    constexpr int WRITABLE = PROT_READ | PROT_WRITE;
    if (size_t(end - begin) <= POISON_FILE_BYTES) {
        if (mprotect(begin, end - begin, WRITABLE)) return false;
        memset(begin, poison, end - begin);
        return true;
    }
    for (; begin < end; begin += POISON_FILE_BYTES) {
        size_t bytes = std::min<size_t>(POISON_FILE_BYTES, end - begin);
        if (map(begin, bytes, WRITABLE, MAP_FIXED, poison_file(poison)) == MAP_FAILED) return false;
    }
    return true;
}

static CUresult allocate(void **address, size_t bytes, bool on_host) {
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    NEED_SAFE("an allocation");
    Lock lock(mutex);
    CUcontext owner = current_context();
    if (!on_host && bytes > memory_bytes() - std::min(memory_bytes(), used_bytes[owner->device]))
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t padded = round_up(bytes, allocation_alignment()), accessible = round_up(padded, PAGE);
    size_t guard_bytes = accessible > POISON_FILE_BYTES ? LARGE_GUARD_BYTES : GUARD_BYTES;
    size_t mapping_bytes = accessible + 2 * guard_bytes;
    void *mapped = map(nullptr, mapping_bytes, PROT_NONE, MAP_ANONYMOUS, -1);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *mapping = static_cast<char *>(mapped), *limit = mapping + guard_bytes + accessible;
    unsigned char poison = poison_byte();
    if (!fill_with_poison(mapping + guard_bytes, limit, poison)) {
        munmap(mapping, mapping_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    char *start = limit - padded;
    allocations[reinterpret_cast<uintptr_t>(start)] = {start,       bytes, mapping, mapping_bytes,
                                                       guard_bytes, owner, on_host, poison};
    if (!on_host) used_bytes[owner->device] += bytes;
    *address = start;
    return CUDA_SUCCESS;
}

// While work is pending, which may be about to use it, the address space stays, inaccessible.
static void release(const Allocation &allocation) {
    static std::vector<Allocation> left;
    if (!allocation.on_host) used_bytes[allocation.owner->device] -= allocation.bytes;
    mprotect(allocation.mapping, allocation.mapping_bytes, PROT_NONE);
    left.push_back(allocation);
    if (anything_pending()) return;
    for (const Allocation &old : left) munmap(old.mapping, old.mapping_bytes);
    left.clear();
}

static CUresult deallocate(uintptr_t address, bool on_host) {
    NEED_SAFE("giving memory back");
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

static char *first_changed(char *begin, char *end, unsigned char poison) {
    for (; begin < end; begin++)
        if (static_cast<unsigned char>(*begin) != poison) return begin;
    return nullptr;
}

std::string find_stray_write() {
    for (const auto &entry : allocations) {
        const Allocation &a = entry.second;
        char *lowest = a.accessible(), *limit = a.accessible_end();
        char *changed = first_changed(a.address - std::min<ptrdiff_t>(CHECKED_GAP, a.address - lowest), a.address, a.poison);
        if (!changed) changed = first_changed(a.end(), limit, a.poison);
        if (!changed) continue;
        std::string text = "a write " + describe_address(changed);
        memset(lowest, a.poison, a.address - lowest);
        memset(a.end(), a.poison, limit - a.end());
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

static CUresult gone(const char *what) {
    return fail(CUDA_ERROR_ILLEGAL_ADDRESS, std::string(what) + " of memory that was given back before its turn came");
}

static bool is_pinned(const void *address) {
    Lock lock(mutex);
    const Allocation *allocation = allocation_before(reinterpret_cast<uintptr_t>(address));
    return allocation && allocation->on_host && address < allocation->end();
}

template <class T> static CUresult fill(CUdeviceptr destination, T value, size_t count, CUstream stream = nullptr) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, count * sizeof value)) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, [=] {
        if (!is_device_memory(destination, count * sizeof value)) return gone("a fill");
        std::fill_n(reinterpret_cast<T *>(destination), count, value);
        return CUDA_SUCCESS;
    });
}

// From memory of the host that is not pinned, a copy reads at once; in a graph, whenever that is launched.
static CUresult to_device(CUdeviceptr destination, const void *source, size_t bytes, CUstream stream) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, bytes)) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<std::string> staged;
    if (!is_pinned(source) && !is_capturing(stream))
        staged = std::make_shared<std::string>(static_cast<const char *>(source), bytes);
    return enqueue(stream, [=] {
        if (!is_device_memory(destination, bytes)) return gone("a copy");
        memcpy(reinterpret_cast<void *>(destination), staged ? staged->data() : source, bytes);
        return CUDA_SUCCESS;
    });
}

static CUresult to_host(void *destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    NEED_CONTEXT();
    if (!is_device_memory(source, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, [=] {
        if (!is_device_memory(source, bytes)) return gone("a copy");
        memcpy(destination, reinterpret_cast<void *>(source), bytes);
        return CUDA_SUCCESS;
    });
}

static CUresult on_device(CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream) {
    NEED_CONTEXT();
    if (!is_device_memory(destination, bytes) || !is_device_memory(source, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, [=] {
        if (!is_device_memory(destination, bytes) || !is_device_memory(source, bytes)) return gone("a copy");
        memmove(reinterpret_cast<void *>(destination), reinterpret_cast<void *>(source), bytes);
        return CUDA_SUCCESS;
    });
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
DRIVER_API cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_NOT_SUPPORTED;
    NEED_CONTEXT();
    Lock lock(mutex);
    const Allocation *allocation = allocation_before(address);
    if (!allocation || address >= reinterpret_cast<uintptr_t>(allocation->end())) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int *>(value) = allocation->owner->device;
    return CUDA_SUCCESS;
}
DRIVER_API cuMemcpyHtoD(CUdeviceptr d, const void *s, size_t n) {
    NEED_SAFE("cuMemcpyHtoD");
    CUresult error = to_device(d, s, n, nullptr);
    return error || !is_pinned(s) ? error : finish_stream(nullptr);
}
DRIVER_API cuMemcpyDtoH(void *d, CUdeviceptr s, size_t n) {
    NEED_SAFE("cuMemcpyDtoH");
    CUresult error = to_host(d, s, n, nullptr);
    return error ? error : finish_stream(nullptr);
}
DRIVER_API cuMemcpyDtoD(CUdeviceptr d, CUdeviceptr s, size_t n) { return on_device(d, s, n, nullptr); }
DRIVER_API cuMemcpyHtoDAsync(CUdeviceptr d, const void *s, size_t n, CUstream stream) { return to_device(d, s, n, stream); }
DRIVER_API cuMemcpyDtoHAsync(void *d, CUdeviceptr s, size_t n, CUstream stream) { return to_host(d, s, n, stream); }
DRIVER_API cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream stream) { return on_device(d, s, n, stream); }
DRIVER_API cuMemsetD8(CUdeviceptr d, unsigned char value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD16(CUdeviceptr d, unsigned short value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD32(CUdeviceptr d, unsigned value, size_t n) { return fill(d, value, n); }
DRIVER_API cuMemsetD8Async(CUdeviceptr d, unsigned char value, size_t n, CUstream stream) { return fill(d, value, n, stream); }
DRIVER_API cuMemsetD16Async(CUdeviceptr d, unsigned short value, size_t n, CUstream stream) { return fill(d, value, n, stream); }
DRIVER_API cuMemsetD32Async(CUdeviceptr d, unsigned value, size_t n, CUstream stream) { return fill(d, value, n, stream); }
