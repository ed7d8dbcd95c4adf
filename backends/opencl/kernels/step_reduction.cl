// Steps that reduce over axes, one launch each: normalise, softmax, and the reductions sum, mean, max, log-sum-exp.
//
// Tensors are contiguous [N][C][D][H][W]. A work-item owns one place of the axes that stay (without width). Lanes of a vector run
// along width in either case:
//   USE_WIDTH_REDUCTION 1: width is reduced too; lanes are partial results that are combined at the end.
//   USE_WIDTH_REDUCTION 0: width stays; each lane is a result of its own.
// Sums are taken in three levels: a run (a part of the last reduced axis), CASCADE runs, and all of those, so that errors grow
// with the sum of the three counts, not with their product.
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
//   CHANNEL, RESULT_CHANNEL  channel of the current element, and of a reduced result
//   TAIL(x, c)            pointwise steps that ride on the store
//   AFFINE(x, c), EPS     for normalise
//   STEP_*                which kernel to compile

#if USE_WIDTH_REDUCTION
#define EACH_RESULT const int w0 = 0;
#define COMBINE_SUM(v) SPLAT(sum_of_lanes(v))
#define COMBINE_MAX(v) SPLAT(max_of_lanes(v))
#define RESULT_WIDTH 1
#else
#define EACH_RESULT for (int w0 = 0; w0 < WIDTH; w0 += VEC)
#define COMBINE_SUM(v) (v)
#define COMBINE_MAX(v) (v)
#define RESULT_WIDTH WIDTH
#endif
// A sum of runs: `total` of the last few, `total_above` of all before them.
#define SUM_BEGIN(total)            \
  real_v total = SPLAT(R(0.0));     \
  real_v total##_above = total;     \
  int total##_runs = 0;
#define SUM_AGAIN(total)            \
  total = total##_above = SPLAT(R(0.0)); \
  total##_runs = 0;
#define SUM_ADD(total, run)         \
  total += run;                     \
  if (++total##_runs == CASCADE) {  \
    total##_above += total;         \
    total = SPLAT(R(0.0));          \
    total##_runs = 0;               \
  }
// Width index of lane 0 at the current element, and the lanes left from there.
#if USE_WIDTH_REDUCTION
#define LEFT (WIDTH - w)
#else
#define LEFT (WIDTH - w0)
#endif

#if STEP_NORMALIZE
kernel void normalize_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                           const ulong count) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  EACH_RESULT {
    SUM_BEGIN(total)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN { run += load_lanes(x + base + OFFSET, LEFT, R(0.0)); }
      SUM_ADD(total, run)
    }
    total += total_above;
    const real_v mean = COMBINE_SUM(total) * SPLAT(R(1.0) / COUNT);
    SUM_AGAIN(total)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN {
        const real_v deviation = load_lanes(x + base + OFFSET, LEFT, LANE0(mean)) - mean;
        run = fma(deviation, deviation, run);
      }
      SUM_ADD(total, run)
    }
    total += total_above;
    const real_v variance = COMBINE_SUM(total) * SPLAT(R(1.0) / COUNT);
    const real_v scale = SPLAT(R(1.0)) / sqrt(variance + SPLAT(operands[EPS]));
    EACH_RUN {
      EACH_IN_RUN {
        real_v value = (load_lanes(x + base + OFFSET, LEFT, R(0.0)) - mean) * scale;
        AFFINE(value, CHANNEL);
        TAIL(value, CHANNEL);
        store_lanes(value, y + base + OFFSET, LEFT);
      }
    }
  }
}
#endif

#if STEP_SOFTMAX
kernel void softmax_step(global const REAL *x, global const REAL *restrict operands, global REAL *y,
                         const ulong count) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  EACH_RESULT {
    real_v largest = SPLAT(-INFINITY);
    EACH_RUN {
      EACH_IN_RUN { largest = max_keep_nan(largest, load_lanes(x + base + OFFSET, LEFT, -INFINITY)); }
    }
    largest = COMBINE_MAX(largest);
    SUM_BEGIN(total)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN {
        const real_v e = exp_real(load_lanes(x + base + OFFSET, LEFT, -INFINITY) - largest);
        store_lanes(e, y + base + OFFSET, LEFT);
        run += e;
      }
      SUM_ADD(total, run)
    }
    total += total_above;
    const real_v scale = SPLAT(R(1.0)) / COMBINE_SUM(total);
    EACH_RUN {
      EACH_IN_RUN {
        real_v value = load_lanes(y + base + OFFSET, LEFT, R(0.0)) * scale;
        TAIL(value, CHANNEL);
        store_lanes(value, y + base + OFFSET, LEFT);
      }
    }
  }
}
#endif

#if STEP_REDUCE
kernel void reduce_step(global const REAL *restrict x, global const REAL *restrict operands, global REAL *restrict y,
                        const ulong count) {
  const size_t outer = get_global_id(0);
  if (outer >= count) return;
  const size_t base = OUTER_BASE(outer);
  EACH_RESULT {
#if REDUCE_MAX || REDUCE_LOG_SUM_EXP
    real_v largest = SPLAT(-INFINITY);
    EACH_RUN {
      EACH_IN_RUN { largest = max_keep_nan(largest, load_lanes(x + base + OFFSET, LEFT, -INFINITY)); }
    }
    largest = COMBINE_MAX(largest);
#endif
#if REDUCE_MAX
    real_v value = largest;
#else
#if REDUCE_LOG_SUM_EXP
    // An infinite maximum is not subtracted: exp then gives 0 or infinity, and the logarithm the right limit.
    const real_v shift = (fabs(largest) == SPLAT(INFINITY)) ? SPLAT(R(0.0)) : largest;
#define TERM(p) exp_real(load_lanes(p, LEFT, -INFINITY) - shift)
#else
#define TERM(p) load_lanes(p, LEFT, R(0.0))
#endif
    SUM_BEGIN(total)
    EACH_RUN {
      real_v run = SPLAT(R(0.0));
      EACH_IN_RUN { run += TERM(x + base + OFFSET); }
      SUM_ADD(total, run)
    }
    total += total_above;
    real_v value = COMBINE_SUM(total);
#if REDUCE_MEAN
    value = value * SPLAT(R(1.0) / COUNT);
#elif REDUCE_LOG_SUM_EXP
    value = log(value) + shift;
#endif
#endif
    TAIL(value, RESULT_CHANNEL);
    store_lanes(value, y + OUTER_RESULT(outer) + w0, RESULT_WIDTH - w0);
  }
}
#endif
