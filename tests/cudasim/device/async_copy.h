// cp.async (sm_80 and later), as functions that kernels call where nvcc would see inline PTX.
//
// Late mode copies only when the thread waits, so a missing wait shows as unwritten (NaN) shared memory. Eager mode
// copies at once, so an overwrite of data still in use shows. A correct kernel gives the same result in both.
#pragma once
#include "architecture.h"

namespace cusim {

inline void cp_async(void *destination, const void *source, unsigned bytes, unsigned valid_bytes) {
    need_sm_80("cp.async");
    if (bytes != 4 && bytes != 8 && bytes != 16)
        fail(cusim_abi::Outcome::launch_failure, "cp.async copies 4, 8 or 16 bytes, not %u", bytes);
    if ((reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source)) % bytes != 0)
        fail(cusim_abi::Outcome::misaligned, "cp.async of %u bytes from %p to %p", bytes, source, destination);
    AsyncCopy copy{destination, source, bytes, valid_bytes};
    eager_copies ? perform(copy) : postpone(copy);
}

}  // namespace cusim
