// What depends on the architecture that a kernel is compiled for.
#pragma once
#include "runtime.h"

namespace cusim {

extern const int architecture;  // such as 80; compiler.py writes it

inline void need_sm_80(const char *instruction) {
    if (architecture < 80)
        fail(cusim_abi::Outcome::launch_failure, "%s needs sm_80; compiled for sm_%d", instruction, architecture);
}

}  // namespace cusim
