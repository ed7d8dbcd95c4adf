// Warp shuffles and votes. A shuffle that reads a lane which has returned or is outside the mask yields its own value.
#pragma once
#include "collectives.h"

namespace cusim {

template <class T> T shuffle(uint32_t mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    Warp &warp = current_warp();
    unsigned lane = current->lane;
    memcpy(warp.in[lane], &value, sizeof value);
    warp.in[lane][2] = source;
    warp_collective(mask, exchange_values);
    memcpy(&value, warp.out[lane], sizeof value);
    return value;
}

struct Votes { uint32_t ballot, lanes; };
inline Votes vote(uint32_t mask, bool predicate) {
    Warp &warp = current_warp();
    unsigned lane = current->lane;
    warp.in[lane][0] = predicate;
    warp_collective(mask, collect_votes);
    return {warp.out[lane][0], warp.out[lane][1]};
}

}  // namespace cusim

static inline void __syncwarp(unsigned mask = ~0u) { cusim::warp_collective(mask, cusim::no_exchange); }

template <class T> static T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned segment = cusim::current->lane & ~(width - 1u);
    return cusim::shuffle(mask, value, segment | (source & (width - 1)));
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    unsigned lane = cusim::current->lane, source = lane ^ lane_mask;
    return cusim::shuffle(mask, value, source / width > lane / width ? lane : source);
}
template <class T> static T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = cusim::current->lane;
    return cusim::shuffle(mask, value, (lane & (width - 1u)) + delta >= unsigned(width) ? lane : lane + delta);
}
template <class T> static T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = cusim::current->lane;
    return cusim::shuffle(mask, value, (lane & (width - 1u)) < delta ? lane : lane - delta);
}

static inline unsigned __activemask() { return cusim::current_warp().alive; }
static inline unsigned __ballot_sync(unsigned mask, int predicate) { return cusim::vote(mask, predicate).ballot; }
static inline int __any_sync(unsigned mask, int predicate) { return cusim::vote(mask, predicate).ballot != 0; }
static inline int __all_sync(unsigned mask, int predicate) {
    cusim::Votes votes = cusim::vote(mask, predicate);
    return votes.ballot == votes.lanes;
}
