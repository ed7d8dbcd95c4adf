// Rows of input on their way into lines. Needs numeric.cl; the host defines IW and PROLOGUE(x, c).
//
// Only the IW elements of a row are written: the gap behind it, where taps of this row's end and of the next row's start may reach,
// keeps the zeros that scratch starts with.

static void clear(global REAL *line, const int count) {
  int i = 0;
  for (; i + VEC <= count; i += VEC) STORE_V(SPLAT(R(0.0)), line + i);
  for (; i < count; i++) line[i] = R(0.0);
}

// One vector of combine_row, and one element of it.
static real_v combine_v(global const REAL *a, global const REAL *b, const int s, global const REAL *restrict operands,
                        const int channel) {
  real_v value = SPLAT(R(0.0)), other = SPLAT(R(0.0));
  if (a) {
    value = LOAD_V(a);
    PROLOGUE(value, channel);
  }
  if (b) {
    other = LOAD_V(b);
    PROLOGUE(other, channel);
  }
  return s > 0 ? value + other : value - other;
}

static REAL combine_one(global const REAL *a, global const REAL *b, const int s, global const REAL *restrict operands,
                        const int channel) {
  real_v value = SPLAT(R(0.0)), other = SPLAT(R(0.0));
  if (a) {
    value = SPLAT(*a);
    PROLOGUE(value, channel);
  }
  if (b) {
    other = SPLAT(*b);
    PROLOGUE(other, channel);
  }
  return LANE0(s > 0 ? value + other : value - other);
}

// line[0 .. IW) = a + s * b for two input rows of one channel, s = 1 or -1; a null row stands for zeros.
static void combine_row(global REAL *restrict line, global const REAL *a, global const REAL *b, const int s,
                        global const REAL *restrict operands, const int channel) {
#if IW >= VEC
  for (int w = 0; w < IW; w += VEC) {
    // The last vector ends with the row, and may repeat some of the one before it.
    const int at = min(w, IW - VEC);
    STORE_V(combine_v(a ? a + at : a, b ? b + at : b, s, operands, channel), line + at);
  }
#else
  for (int w = 0; w < IW; w++) line[w] = combine_one(a ? a + w : a, b ? b + w : b, s, operands, channel);
#endif
}
