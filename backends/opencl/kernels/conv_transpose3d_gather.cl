// Transposed 3-D convolution, one output element at a time, straight from the definition: for any weights, infinite ones included,
// and for devices without a kernel of their own class.
//
//   y[n][oc][od][oh][ow] = bias[oc] + sum of w[ic][oc][kd][kh][kw] * x[n][ic][id][ih][iw]
//                          over taps with i*S - P + k*L = o*T on every axis and i inside the tensor, T being 1 but in ordinary convolutions
//
// An ordinary convolution (TRANSPOSED 0) has weights w[oc][ic][kd][kh][kw] with the taps in reverse order.
// A work-item owns one output element. The host defines the extents, strides, steps, paddings, dilations, TAIL(x) and PARAMETERS.
kernel void conv_gather(global const REAL *restrict x, global const REAL *restrict weight,
                                    global const REAL *restrict operands, global REAL *restrict y, const ulong count PARAMETERS) {
  const size_t index = get_global_id(0);
  if (index >= count) return;
  const int ow = index % OW, oh = index / OW % OH, od = index / ((size_t)OW * OH) % OD;
  const size_t plane = index / ((size_t)OW * OH * OD), n = plane / OC;
  const int oc = plane % OC, group = oc / GROUP_OC;
  REAL sum = R(0.0);
  for (int kd = 0; kd < KD; kd++) {
    const int td = od * STEP_D + PADDING_D - kd * DILATION_D, id = td / STRIDE_D;
    if (td < 0 || td % STRIDE_D || id >= ID) continue;
    for (int kh = 0; kh < KH; kh++) {
      const int th = oh * STEP_H + PADDING_H - kh * DILATION_H, ih = th / STRIDE_H;
      if (th < 0 || th % STRIDE_H || ih >= IH) continue;
      for (int kw = 0; kw < KW; kw++) {
        const int tw = ow * STEP_W + PADDING_W - kw * DILATION_W, iw = tw / STRIDE_W;
        if (tw < 0 || tw % STRIDE_W || iw >= IW) continue;
        for (int i = 0; i < GROUP_IC; i++) {
          const size_t ic = group * GROUP_IC + i;
          const REAL xv = x[(((n * IC + ic) * ID + id) * IH + ih) * IW + iw];
#if TRANSPOSED
          const REAL wv = weight[(((ic * GROUP_OC + (oc - group * GROUP_OC)) * KD + kd) * KH + kh) * KW + kw];
#else
          const size_t plane = (size_t)oc * GROUP_IC + i;
          const REAL wv = weight[((plane * KD + KD - 1 - kd) * KH + KH - 1 - kh) * KW + KW - 1 - kw];
#endif
          sum = fma(xv, wv, sum);
        }
      }
    }
  }
  TAIL(sum);
  y[index] = sum;
}
