// cp.async (sm_80 and later), as functions that kernels call where nvcc would see inline PTX.
//
// Late mode copies only when the thread waits, so a missing wait shows as unwritten (NaN) shared memory. Eager mode
// copies at once, so an overwrite of data still in use shows. A correct kernel gives the same result in both.
#pragma once
#include "architecture.h"

namespace cusim {

inline void perform(const AsyncCopy &copy) {
    memcpy(copy.destination, copy.source, copy.valid_bytes);
    memset(static_cast<char *>(copy.destination) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

inline void cp_async(void *destination, const void *source, unsigned bytes, unsigned valid_bytes) {
    need_sm_80("cp.async");
    if (bytes != 4 && bytes != 8 && bytes != 16)
        fail(cusim_abi::Outcome::launch_failure, "cp.async copies 4, 8 or 16 bytes, not %u", bytes);
    if ((reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source)) % bytes != 0)
        fail(cusim_abi::Outcome::misaligned, "cp.async of %u bytes from %p to %p", bytes, source, destination);
    AsyncCopy copy{destination, source, bytes, valid_bytes};
    if (eager_copies) perform(copy);
    else current->pending_copies.push_back(copy);
}

inline void cp_async_commit() { current->committed_groups.push_back(current->pending_copies.size()); }

// Waits until at most `groups_left` committed groups are still pending.
inline void cp_async_wait(unsigned groups_left) {
    auto &groups = current->committed_groups;
    auto &copies = current->pending_copies;
    if (groups.size() <= groups_left) return;
    size_t done = groups[groups.size() - groups_left - 1];
    for (size_t i = 0; i < done; i++) perform(copies[i]);
    copies.erase(copies.begin(), copies.begin() + done);
    groups.erase(groups.begin(), groups.end() - groups_left);
    for (size_t &end : groups) end -= done;
}

}  // namespace cusim
