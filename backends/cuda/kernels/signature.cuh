// Checks that a user's function has the parameters that a problem asks for, as far as its C ABI goes: as many, each a
// pointer or number where one is wanted, numbers of the same size. It is compiled behind the user's file:
//
//     static_assert(kernel_dispatcher::Parameters<const float*, float*, size_t>::fit<decltype(&solution)>());
#include <cstddef>
#include <type_traits>

namespace kernel_dispatcher {

// Elements of a vector type, such as float4, or of __half are the user's choice; of other numbers they are not.
template <typename Wanted, typename Given>
constexpr bool same_element =
    std::is_void_v<Given> || !std::is_arithmetic_v<Given> || std::is_same_v<std::remove_cv_t<Wanted>, std::remove_cv_t<Given>>;

template <typename Wanted, typename Given>
constexpr bool same_parameter() {
    if constexpr (std::is_pointer_v<Wanted> && std::is_pointer_v<Given>)
        return same_element<std::remove_pointer_t<Wanted>, std::remove_pointer_t<Given>>;
    else
        return std::is_pointer_v<Wanted> == std::is_pointer_v<Given> && sizeof(Wanted) == sizeof(Given) &&
               std::is_floating_point_v<Wanted> == std::is_floating_point_v<Given>;
}

template <typename... Given>
struct List {};

template <typename Function>
struct ParametersOf;
template <typename Result, typename... Given>
struct ParametersOf<Result (*)(Given...)> {
    using type = List<Given...>;
};
template <typename Result, typename... Given>
struct ParametersOf<Result (*)(Given...) noexcept> {
    using type = List<Given...>;
};

template <typename... Wanted>
struct Parameters {
    template <typename Function>
    static constexpr bool fit() {
        return compare(typename ParametersOf<Function>::type{});
    }

    template <typename... Given>
    static constexpr bool compare(List<Given...>) {
        static_assert(sizeof...(Given) == sizeof...(Wanted), "it has another number of parameters");
        if constexpr (sizeof...(Given) == sizeof...(Wanted))
            static_assert((same_parameter<Wanted, Given>() && ...), "a parameter has another type");
        return true;
    }
};

}  // namespace kernel_dispatcher

#if defined(KERNEL_DISPATCHER_HOST) && defined(__CUDACC__)
// What the CUDA runtime in this library holds against the last launches; NULL when nothing.
extern "C" const char *kernel_dispatcher_error() {
    const cudaError_t status = cudaGetLastError();
    return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
#endif
