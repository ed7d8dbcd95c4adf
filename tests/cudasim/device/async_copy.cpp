// What cp.async still has to copy, for each thread of the block. Linked into every module.
#include "runtime.h"

#include <vector>

namespace cusim {

struct Pending {
    std::vector<AsyncCopy> copies;
    std::vector<size_t> groups;  // how many of the copies each committed group ends at
};
static Pending pending[cusim_abi::MAX_THREADS];

void perform(const AsyncCopy &copy) {
    memcpy(copy.destination, copy.source, copy.valid_bytes);
    memset(static_cast<char *>(copy.destination) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

void postpone(const AsyncCopy &copy) { pending[current->index].copies.push_back(copy); }

void cp_async_commit() { pending[current->index].groups.push_back(pending[current->index].copies.size()); }

void cp_async_wait(unsigned groups_left) {
    auto &[copies, groups] = pending[current->index];
    if (groups.size() <= groups_left) return;
    size_t done = groups[groups.size() - groups_left - 1];
    for (size_t i = 0; i < done; i++) perform(copies[i]);
    copies.erase(copies.begin(), copies.begin() + done);
    groups.erase(groups.begin(), groups.end() - groups_left);
    for (size_t &end : groups) end -= done;
}

void forget_copies(unsigned thread) {
    pending[thread].copies.clear();
    pending[thread].groups.clear();
}

}  // namespace cusim
