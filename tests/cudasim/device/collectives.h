// What a warp's last arriving lane does for all of them.
#pragma once
#include "runtime.h"

namespace cusim {

void no_exchange(Warp &warp, uint32_t lanes);

// in[lane] = {low word, high word, source lane}; out[lane] = {low word, high word}
void exchange_values(Warp &warp, uint32_t lanes);

// in[lane] = {predicate}; out[lane] = {ballot, lanes taking part}
void collect_votes(Warp &warp, uint32_t lanes);

// D (16 x 8) += A (16 x 8) B (8 x 8), fragments as in the PTX manual: lane = 4 * group + quad position.
// in[lane] = {4 words of A, 2 words of B}; accumulator[lane] = 4 values of D
void multiply_m16n8k8_tf32(Warp &warp, uint32_t lanes);

}  // namespace cusim
