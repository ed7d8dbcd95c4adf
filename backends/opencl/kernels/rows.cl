// Rows of input on their way into lines. Needs numeric.cl; the host defines IW, PITCH and PROLOGUE(x, c).

// Copies one input row of IW elements to the line and clears the gap behind it, where taps of this row's end and of the next
// row's start may reach.
static void load_row(global REAL *restrict line, global const REAL *restrict x, global const REAL *restrict operands,
                     const int channel) {
  int w = 0;
#if IW >= VEC
  for (; w + VEC <= IW; w += VEC) {
    real_v value = LOAD_V(x + w);
    PROLOGUE(value, channel);
    STORE_V(value, line + w);
  }
#endif
  for (; w < IW; w++) {
    real_v value = SPLAT(x[w]);
    PROLOGUE(value, channel);
    line[w] = LANE0(value);
  }
  for (; w < PITCH; w++) line[w] = R(0.0);
}

static void clear(global REAL *line, const int count) {
  int i = 0;
  for (; i + VEC <= count; i += VEC) STORE_V(SPLAT(R(0.0)), line + i);
  for (; i < count; i++) line[i] = R(0.0);
}

