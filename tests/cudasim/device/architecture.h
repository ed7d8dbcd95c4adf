// What depends on the architecture that a kernel is compiled for.
#pragma once
#include "runtime.h"

namespace cusim {

inline void need_sm_80(const char *instruction) {
    if constexpr (__CUDA_ARCH__ < 800)
        fail(cusim_abi::Outcome::launch_failure, "%s needs sm_80; compiled for sm_%d", instruction, __CUDA_ARCH__ / 10);
}

}  // namespace cusim
