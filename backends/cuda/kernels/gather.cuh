// Statistics that a convolution's launch gathers of the values that it makes, and how they are joined: of a box of voxels
// and a channel, GATHERED doubles.
//   MOMENTS    count, mean, sum of squares around the mean. A lane keeps a centre, how far the mean is from it, and the sum
//              of squares around the mean: nothing cancels, also where the first value is an outlier, and equal values
//              leave exactly 0. Moments are joined by the formula of Chan, Golub and LeVeque.
//   EXPONENTS  maximum, sum of exp(v - maximum)
//   COMBINED   the combination of the lifted values, by the monoid gather
// GATHER_NUMBERS numbers of the type GATHER_STATE are what one lane knows of a channel.
#pragma once
#include "chain.cuh"

#define MOMENTS 1
#define EXPONENTS 2
#define COMBINED 3
using State = GATHER_STATE;
[[maybe_unused]] constexpr int GATHER_NUMBERS = GATHER == MOMENTS ? 3 : GATHER == EXPONENTS ? 2 : 1;
[[maybe_unused]] constexpr int GATHERED = GATHER == MOMENTS ? 3 : GATHER == EXPONENTS ? 2 : 1;

struct Gathered {
  double a, b, c;  // MOMENTS: count, mean, squares; EXPONENTS: maximum, sum; COMBINED: the combination
};

__device__ __forceinline__ Gathered gathered_nothing() {
#if GATHER == MOMENTS
  return {0., 0., 0.};
#elif GATHER == EXPONENTS
  return {-INFINITY, 0., 0.};
#else
  return {gather_identity<double>(), 0., 0.};
#endif
}

// Where all values are minus infinity, nothing may be subtracted.
template <class T> __device__ __forceinline__ T exp_below(T v, T top) {
  return exp_v(v - (top == T(-INFINITY) ? T(0) : top));
}

// Both together.
__device__ __forceinline__ Gathered gathered_both(const Gathered &x, const Gathered &y) {
#if GATHER == MOMENTS
  if (y.a == 0.) return x;
  if (x.a == 0.) return y;
  const double count = x.a + y.a, apart = y.b - x.b;
  return {count, x.b + apart * (y.a / count), x.c + y.c + apart * apart * (x.a * y.a / count)};
#elif GATHER == EXPONENTS
  const double top = max_v(x.a, y.a);
  return {top, x.b * exp_below(x.a, top) + y.b * exp_below(y.a, top), 0.};
#else
  return {gather_combine(x.a, y.a), 0., 0.};
#endif
}

__device__ __forceinline__ Gathered gathered_at(const double *from) {
  Gathered result = {from[0], 0., 0.};
  if (GATHERED > 1) result.b = from[GATHERED > 1];
  if (GATHERED > 2) result.c = from[2 * (GATHERED > 2)];
  return result;
}

__device__ __forceinline__ void gather_store(const Gathered &total, double *to) {
  to[0] = total.a;
  if (GATHERED > 1) to[GATHERED > 1] = total.b;
  if (GATHERED > 2) to[2 * (GATHERED > 2)] = total.c;
}

// Values v[m] where inside[m], `more` of them and one at least, into a state of `seen` values, whose numbers are PITCH
// apart.
template <int COUNT, int PITCH>
__device__ __forceinline__ void gather_more(State *state, State seen, State more, const COMPUTE (&v)[COUNT],
                                            const bool (&inside)[COUNT]) {
  const bool fresh = seen == State(0);
#if GATHER == MOMENTS
  State first = 0, sum = 0, rest = 0, squares = 0;
#pragma unroll
  for (int m = COUNT - 1; m >= 0; m--) first = inside[m] ? State(v[m]) : first;
#pragma unroll
  for (int m = 0; m < COUNT; m++) sum += inside[m] ? State(v[m]) - first : State(0);
  const State centre = first + sum / more;
#pragma unroll
  for (int m = 0; m < COUNT; m++) {
    const State apart = inside[m] ? State(v[m]) - centre : State(0);
    rest += apart;
    squares = multiply_add(apart, apart, squares);
  }
  rest /= more;
  squares = multiply_add(-rest * more, rest, squares);
  if (fresh) state[0] = centre;
  const State mean = fresh ? State(0) : state[PITCH], total = seen + more;
  const State apart = (centre - state[0]) + (rest - mean);
  state[PITCH] = multiply_add(apart, more / total, mean);
  squares = multiply_add(apart * apart, seen * (more / total), squares);
  state[2 * PITCH] = fresh ? squares : state[2 * PITCH] + squares;
#elif GATHER == EXPONENTS
  const State before = fresh ? State(-INFINITY) : state[0];
  State top = before, sum = 0;
#pragma unroll
  for (int m = 0; m < COUNT; m++) top = inside[m] ? max_v(top, State(v[m])) : top;
#pragma unroll
  for (int m = 0; m < COUNT; m++) sum += inside[m] ? exp_below(State(v[m]), top) : State(0);
  state[0] = top;
  state[PITCH] = fresh ? sum : state[PITCH] * exp_below(before, top) + sum;
#else
  State total = fresh ? gather_identity<State>() : state[0];
#pragma unroll
  for (int m = 0; m < COUNT; m++) total = inside[m] ? gather_combine(total, State(gather_lift(v[m]))) : total;
  state[0] = total;
#endif
}

// Join a lane's state of `count` values to a total.
template <int PITCH>
__device__ __forceinline__ void gather_join(Gathered &total, const State *state, double count) {
  if (count == 0.) return;
#if GATHER == MOMENTS
  total = gathered_both(total, {count, double(state[0]) + double(state[PITCH]), double(state[2 * PITCH])});
#elif GATHER == EXPONENTS
  total = gathered_both(total, {double(state[0]), double(state[PITCH]), 0.});
#else
  total = gathered_both(total, {double(state[0]), 0., 0.});
#endif
}
