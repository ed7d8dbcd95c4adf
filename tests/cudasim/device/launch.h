// The table of a module's kernels. Parameter types come from each kernel's own signature.
#pragma once
#include <cstdio>
#include <tuple>
#include <type_traits>

#include "runtime.h"

namespace cusim {

constexpr size_t align_up(size_t offset, size_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

template <class T> struct Signature;
template <class... P> struct Signature<void (*)(P...)> {
    using Arguments = std::tuple<std::remove_cv_t<P>...>;

    static constexpr size_t bytes() {
        size_t offset = 0;
        ((offset = align_up(offset, alignof(P)) + sizeof(P)), ...);
        return offset;
    }

    static bool unpack(cusim_abi::Launch &launch, Arguments &arguments) {
        if (launch.packed && launch.packed_bytes != bytes()) {
            snprintf(launch.message, sizeof launch.message, "the argument buffer has %zu bytes, the kernel's parameters %zu",
                     launch.packed_bytes, bytes());
            return false;
        }
        if (!launch.packed && !launch.parameters && sizeof...(P)) return false;
        size_t offset = 0, index = 0;
        auto take = [&](auto &argument) {
            offset = align_up(offset, alignof(std::remove_reference_t<decltype(argument)>));
            const void *source = launch.packed ? launch.packed + offset : launch.parameters[index];
            memcpy(static_cast<void *>(&argument), source, sizeof argument);
            offset += sizeof argument;
            index++;
        };
        std::apply([&](auto &...argument) { (take(argument), ...); }, arguments);
        return true;
    }
};

template <auto kernel> cusim_abi::Outcome run(cusim_abi::Launch &launch) {
    using S = Signature<decltype(kernel)>;
    typename S::Arguments arguments;
    if (!S::unpack(launch, arguments)) return cusim_abi::Outcome::bad_arguments;
    auto body = [](const void *packed) {
        std::apply([](auto... argument) { kernel(argument...); }, *static_cast<const typename S::Arguments *>(packed));
    };
    return run_blocks(launch, body, &arguments);
}

template <auto kernel> constexpr cusim_abi::Kernel entry(const char *name, unsigned max_threads) {
    return {name, run<kernel>, Signature<decltype(kernel)>::bytes(), max_threads};
}

}  // namespace cusim

// Set by the linker script module.ld.
extern "C" const char cusim_shared_begin[], cusim_shared_end[], cusim_globals_begin[], cusim_globals_end[];
