// Atomic functions. Blocks run on several OS threads, so these are real atomics.
#pragma once
#include <cstring>
#include <type_traits>

namespace cusim {

template <class Bits, class T, class Update> T update_cell(T *address, Update update) {
    Bits *cell = reinterpret_cast<Bits *>(address);
    Bits seen = __atomic_load_n(cell, __ATOMIC_RELAXED);
    for (;;) {
        T old, value;
        Bits wanted;
        memcpy(&old, &seen, sizeof old);
        value = update(old);
        memcpy(&wanted, &value, sizeof wanted);
        if (__atomic_compare_exchange_n(cell, &seen, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return old;
    }
}
template <class T, class Update> T update_atomically(T *address, Update update) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics work on 4 or 8 bytes");
    if constexpr (sizeof(T) == 4) return update_cell<unsigned>(address, update);
    else return update_cell<unsigned long long>(address, update);
}

}  // namespace cusim

#define CUSIM_ATOMIC(name, expression, allowed)                                                   \
    template <class T, class U> static T name(T *address, U operand) {                            \
        static_assert(allowed, "CUDA has no " #name " for this type");                            \
        T value = static_cast<T>(operand);                                                        \
        return cusim::update_atomically(address, [=](T old) -> T { (void)old; return expression; }); \
    }
CUSIM_ATOMIC(atomicAdd, old + value, true)
CUSIM_ATOMIC(atomicExch, value, true)
CUSIM_ATOMIC(atomicSub, old - value, std::is_integral_v<T>)
CUSIM_ATOMIC(atomicMax, old > value ? old : value, std::is_integral_v<T>)
CUSIM_ATOMIC(atomicMin, old < value ? old : value, std::is_integral_v<T>)
CUSIM_ATOMIC(atomicOr, old | value, std::is_integral_v<T>)
CUSIM_ATOMIC(atomicAnd, old & value, std::is_integral_v<T>)
CUSIM_ATOMIC(atomicXor, old ^ value, std::is_integral_v<T>)
#undef CUSIM_ATOMIC
template <class T> static T atomicCAS(T *address, T compare, T value) {
    return cusim::update_atomically(address, [=](T old) { return old == compare ? value : old; });
}
