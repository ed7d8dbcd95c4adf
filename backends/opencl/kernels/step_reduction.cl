// Steps that reduce over axes, one launch each: normalise, softmax, and reductions of any form.
//
// Tensors are contiguous [N][C][D][H][W]. A work-item owns one place of the axes that stay (without width). Lanes of a vector run
// along width in either case:
//   USE_WIDTH_REDUCTION 1: width is reduced too; lanes are partial results that are combined at the end.
//   USE_WIDTH_REDUCTION 0: width stays; each lane is a result of its own.
// Sums are taken of runs (parts of the last reduced axis), which are then added up with compensation; reductions have three levels,
// a run, CASCADE runs, and all of those, so that errors grow with the sum of the three counts, not with their product.
//
// Normalise and softmax may work in place (x and y the same buffer): each element is read before it is written.
//
// The host defines, besides numeric.cl's:
//   WIDTH                 extent of the width axis
//   COUNT                 elements that one result reduces over
//   OUTER_BASE(outer)     offset of place `outer` in the tensor
//   OUTER_RESULT(outer)   offset of place `outer` in a reduced tensor
//   EACH_RUN              loops over the reduced axes but the last, and over the runs of that one, declaring their indices
//   CASCADE               runs that are added up before they join the whole sum
//   EACH_IN_RUN           loop over one run (width in vectors, when it is reduced)
//   OFFSET                offset inside the reduction, from the loops' indices and w or w0
//   TAIL(x), RESULT_TAIL(x)  pointwise steps that ride on the store of an element, and of a reduced result
//   AFFINE(x), EPS        for normalise
//   REDUCE_COMBINE(a, b), REDUCE_COMBINE_ONE(a, b), REDUCE_IDENTITY, REDUCE_LIFT(x), REDUCE_FINISH(t), REDUCE_SHIFTED
//                         for a reduction: combining vectors and numbers, what an element contributes, the result of the
//                         total; the maximum is subtracted before and added after when it is shifted
//   PARAMETERS            of the kernel, for a0, a1, ...
//   STEP_*                which kernel to compile

#if USE_WIDTH_REDUCTION
#define EACH_RESULT const int w0 = 0;
#define COMBINE_SUM(v) SPLAT(sum_of_lanes(v))
#define COMBINE_MAX(v) SPLAT(max_of_lanes(v))
#define COMBINE_ALL(v) SPLAT(combined_lanes(v))
#define RESULT_WIDTH 1
#else
#define EACH_RESULT for (int w0 = 0; w0 < WIDTH; w0 += VEC)
#define COMBINE_SUM(v) (v)
#define COMBINE_MAX(v) (v)
#define COMBINE_ALL(v) (v)
#define RESULT_WIDTH WIDTH
#endif
// Width index of lane 0 at the current element, and the lanes left from there.
#if USE_WIDTH_REDUCTION
#define LEFT (WIDTH - w)
#else
#define LEFT (WIDTH - w0)
#endif

#if STEP_NORMALIZE
// `sum` becomes `value`, which is made of it, and changes places with `other`: two sums that do not wait for each other.
#define IN_TURN(sum, other, value) \
  {                                \
    const real_v next = value;     \
    sum = other;                   \
    other = next;                  \
  }
#define KEEP_IN_TURN(sum, other, term)                               \
  {                                                                  \
    const real_v before = other, before_lost = other##_lost;         \
    other = sum, other##_lost = sum##_lost;                          \
    sum = before, sum##_lost = before_lost;                          \
    KEEP(other, term)                                                \
  }
kernel void normalize_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                           const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  const REAL share = R(1.0) / COUNT;
  EACH_RESULT {
    // Lanes behind the last element deviate from nothing.
#define APART(from) (load_lanes(x + base + OFFSET, LEFT, LANE0(from)) - (from))
    const real_v shift = USE_WIDTH_REDUCTION ? SPLAT(x[base]) : load_lanes(x + base + w0, WIDTH - w0, R(0.0));
    real_v factor = SPLAT(R(1.0));
    real_v mean = SPLAT(R(0.0)), farthest = mean, scale_lost;
    EACH_RUN {
      real_v run = SPLAT(R(0.0)), other = run;
      EACH_IN_RUN {
        const real_v apart = APART(shift), far = fabs(apart);
        IN_TURN(run, other, fma(apart, SPLAT(share), run))
        farthest = (far > farthest) ? far : farthest;  // a NaN is in the mean as well
      }
      mean += run + other;
    }
    mean = coarse(COMBINE_SUM(mean) + shift, COMBINE_MAX(farthest));
    KEPT_SUM(rest)
    KEPT_SUM(squares)
    for (int pass = 0; pass < 2; pass++) {
      KEPT_SUM(other_rest)
      KEPT_SUM(other_squares)
      rest = rest_lost = squares = squares_lost = SPLAT(R(0.0));
      EACH_RUN {
        real_v run = SPLAT(R(0.0)), other = run, rest_run = run, rest_other = run;
        EACH_IN_RUN {
          const real_v deviation = APART(mean) * factor;
          IN_TURN(rest_run, rest_other, rest_run + deviation)
          IN_TURN(run, other, fma(deviation, deviation, run))
        }
        KEEP_IN_TURN(rest, other_rest, rest_run + rest_other)
        KEEP_IN_TURN(squares, other_squares, run + other)
      }
      KEEP(rest, other_rest)
      KEEP(squares, other_squares)
      squares = COMBINE_SUM(squares);
      if (pass || !OVERFLOWS(squares)) break;
      factor = (squares < SPLAT(INFINITY)) ? SPLAT(R(1.0)) : SPLAT(FAR);
    }
    rest = COMBINE_SUM(rest) * share;
    const real_v scale = split_scale(squares, rest, factor, SPLAT(COUNT), operands[EPS], &scale_lost), offset = -rest * scale;
    EACH_RUN {
      EACH_IN_RUN {
        const real_v deviation = APART(mean) * factor;
        real_v value = fma(deviation, scale, fma(deviation, scale_lost, offset));
        AFFINE(value);
        TAIL(value);
        store_lanes(value, y + base + OFFSET, LEFT);
      }
    }
  }
}
#endif

#if STEP_SOFTMAX
kernel void softmax_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                         const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  EACH_RESULT {
    real_v largest = SPLAT(-INFINITY);
    EACH_RUN {
      EACH_IN_RUN { largest = max_v(largest, load_lanes(x + base + OFFSET, LEFT, -INFINITY)); }
    }
    largest = COMBINE_MAX(largest);
    KEPT_SUM(total)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN {
        const real_v e = exp_below_v(load_lanes(x + base + OFFSET, LEFT, -INFINITY) - largest);
        store_lanes(e, y + base + OFFSET, LEFT);
        run += e;
      }
      KEEP(total, run)
    }
    const real_v scale = SPLAT(R(1.0)) / COMBINE_SUM(total);
    EACH_RUN {
      EACH_IN_RUN {
        real_v value = load_lanes(y + base + OFFSET, LEFT, R(0.0)) * scale;
        TAIL(value);
        store_lanes(value, y + base + OFFSET, LEFT);
      }
    }
  }
}
#endif

#if STEP_REDUCE
#if USE_WIDTH_REDUCTION
OVER_LANES(combined_lanes, REDUCE_COMBINE_ONE)
#endif

kernel void reduce_step(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                        const ulong count PARAMETERS) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  EACH_RESULT {
#if REDUCE_SHIFTED
    real_v largest = SPLAT(-INFINITY);
    EACH_RUN {
      EACH_IN_RUN { largest = max_v(largest, load_lanes(x + base + OFFSET, LEFT, -INFINITY)); }
    }
    largest = COMBINE_MAX(largest);
    // An infinite maximum is not subtracted: exp then gives 0 or infinity, and the logarithm the right limit.
    const real_v shift = (fabs(largest) == SPLAT(INFINITY)) ? SPLAT(R(0.0)) : largest;
#define SHIFTED(v) ((v) - shift)
#else
#define SHIFTED(v) (v)
#endif
    const real_v nothing = SPLAT(REDUCE_IDENTITY);
    real_v total = nothing, total_above = nothing;
    int total_runs = 0;
    EACH_RUN {
      real_v run = nothing;
      EACH_IN_RUN {
#if REDUCE_LIFTED
        const real_v element = SHIFTED(load_lanes(x + base + OFFSET, LEFT, R(0.0)));
        const real_v lifted = first_lanes(REDUCE_LIFT(element), LEFT, REDUCE_IDENTITY);
#else
        const real_v lifted = load_lanes(x + base + OFFSET, LEFT, REDUCE_IDENTITY);
#endif
        run = REDUCE_COMBINE(run, lifted);
      }
      total = REDUCE_COMBINE(total, run);
      if (++total_runs == CASCADE) {
        total_above = REDUCE_COMBINE(total_above, total);
        total = nothing;
        total_runs = 0;
      }
    }
    total = REDUCE_COMBINE(total, total_above);
    total = COMBINE_ALL(total);
    real_v value = REDUCE_FINISH(total);
#if REDUCE_SHIFTED
    value = value + shift;
#endif
    RESULT_TAIL(value);
    store_lanes(value, y + OUTER_RESULT(outer) + w0, RESULT_WIDTH - w0);
  }
}
#endif
