/* Packing, reading back, and products with rows that are quantised on the way. */
#include "support.h"

static int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

static int64_t *all_rows(int n) {
  int64_t *rows = FUZZ_INTS(n);
  for (int i = 0; i < n; i++) rows[i] = i;
  return rows;
}

fuzz_matrix fuzz_pack(int format, int n, int k, const float *rows, int has_bias) {
  fuzz_matrix m = {.matrix = {.format = format, .n = n, .k = k, .n_padded = padded(n, 16), .k_padded = padded(k, 64)}};
  uint8_t *packed = fuzz_take(sk_packed_bytes(format, n, k), 64);
  fuzz_check(sk_pack(format, SK_SRC_F32, rows, (size_t)k * sizeof *rows, n, k, packed) == 0, "cannot be packed");
  m.matrix.packed = packed;
  m.weights = FUZZ_FLOATS((size_t)n * (size_t)k);
  sk_unpack(&m.matrix, all_rows(n), n, m.weights);
  if (has_bias) {
    float *bias = FUZZ_FLOATS(m.matrix.n_padded);
    for (int i = 0; i < m.matrix.n_padded; i++) bias[i] = i < n ? fuzz_normal() : 0.0f;
    m.matrix.bias = bias;
  }
  return m;
}

/* No weight is further from its original than half a step of the format. */
static void check_packed(const fuzz_matrix *m, const float *rows) {
  const int k = m->matrix.k;
  for (int row = 0; row < m->matrix.n; row++)
    for (int from = 0; from < k; from += SK_GROUP) {
      const int count = k - from < SK_GROUP ? k - from : SK_GROUP;
      const float *x = rows + (size_t)row * k + from, *w = m->weights + (size_t)row * k + from;
      float low = count < SK_GROUP ? 0.0f : x[0], high = low, largest = 0; /* padding is quantised too */
      double squares = 0;
      for (int i = 0; i < count; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
        largest = fmaxf(largest, fabsf(x[i]));
        squares += ((double)w[i] - x[i]) * ((double)w[i] - x[i]);
      }
      const double step = m->matrix.format == SK_Q4 ? (high - low) / 15.0 : largest / 127.0;
      const double slack = 2e-3 * largest + 1e-6;
      for (int i = 0; i < count; i++) {
        const double off = fabs((double)w[i] - x[i]);
        if (m->matrix.format == SK_BF16) fuzz_check(w[i] == fuzz_from_bf16(fuzz_to_bf16(x[i])), "not rounded to bfloat16");
        else if (m->matrix.format == SK_Q8) fuzz_check(off <= 0.5 * step + slack, "Q8 off by %g, step %g", off, step);
      }
      if (m->matrix.format == SK_Q4)
        fuzz_check(sqrt(squares) <= 0.5 * step * sqrt(SK_GROUP) + 8 * slack, "Q4 off by %g, step %g", sqrt(squares), step);
    }
}

/* What a product sees of a row: groups of 32 as int8 and a scale, in the kernels' own arithmetic; or bfloat16. */
static void quantise_plainly(int format, const float *x, int k, double *seen) {
  for (int from = 0; from < k; from += SK_GROUP) {
    const int to = from + SK_GROUP < k ? from + SK_GROUP : k;
    float largest = 0;
    for (int i = from; i < to; i++) largest = fmaxf(largest, fabsf(x[i]));
    const float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (int i = from; i < to; i++)
      seen[i] = format == SK_BF16       ? (double)fuzz_from_bf16(fuzz_to_bf16(x[i]))
                : inverse <= 3.0e38f ? (double)scale * (double)lrintf(x[i] * inverse)
                                     : 0.0;
  }
}

static void compare(const fuzz_matrix *m, const float *x, int rows, const float *out) {
  const int n = m->matrix.n, k = m->matrix.k;
  double *seen = malloc((size_t)k * sizeof *seen);
  for (int row = 0; row < rows; row++) {
    quantise_plainly(m->matrix.format, x + (size_t)row * k, k, seen);
    for (int channel = 0; channel < n; channel++) {
      const float *w = m->weights + (size_t)channel * k;
      double sum = m->matrix.bias ? m->matrix.bias[channel] : 0, size = fabs(sum);
      for (int i = 0; i < k; i++) {
        sum += seen[i] * w[i];
        size += fabs(seen[i] * w[i]);
      }
      const double got = out[(size_t)row * n + channel];
      fuzz_check(fabs(got - sum) <= 4e-6 * size + 1e-30, "format %d, row %d of %d, channel %d of %d, k %d: %.8g not %.8g",
                 m->matrix.format, row, rows, channel, n, k, got, sum);
    }
  }
  free(seen);
}

static float *draw(size_t count, float size) {
  float *x = FUZZ_FLOATS(count);
  for (size_t i = 0; i < count; i++) x[i] = fuzz_normal() * size;
  return x;
}

void fuzz_linear(const fuzz_subject *subject) {
  const int format = fuzz_int(SK_Q4, SK_BF16);
  const int n = fuzz_int(1, 100), k = fuzz_chance(0.1) ? fuzz_int(1000, 6000) : fuzz_int(1, 300);
  const int rows = fuzz_chance(0.05) ? 0 : fuzz_chance(0.5) ? fuzz_int(1, 13) : fuzz_int(1, 70);
  float *w = draw((size_t)n * (size_t)k, fuzz_chance(0.1) ? 100.0f : 0.1f);
  float *x = draw((size_t)rows * (size_t)k, fuzz_chance(0.1) ? 1e4f : 1.0f);
  /* Groups of nothing, and of next to nothing. */
  if (fuzz_chance(0.3))
    for (int i = 0; i < k && i < 40; i++) w[i] = 0;
  if (fuzz_chance(0.3) && rows)
    for (int i = 0; i < k; i++) x[i] = 0;
  if (fuzz_chance(0.1) && rows)
    for (int i = 0; i < k; i++) x[i] = 1e-39f * fuzz_float();
  if (fuzz_chance(0.1))
    for (int i = 0; i < k; i++) w[i] = 0.25f;
  const fuzz_matrix m = fuzz_pack(format, n, k, w, fuzz_chance(0.5));
  check_packed(&m, w);
  float *out = FUZZ_FLOATS((size_t)rows * (size_t)n);
  fuzz_check(sk_linear(subject->context, &m.matrix, x, rows, out) == 0, "failed");
  compare(&m, x, rows, out);
}

/* ---- blocks as ggml writes them ---- */

/* A float16 of ordinary size and the number it stands for. */
static uint16_t draw_half(double *value) {
  const int exponent = fuzz_chance(0.1) ? 0 : fuzz_int(1, 20), mantissa = fuzz_int(0, 1023), sign = fuzz_int(0, 1);
  *value = (sign ? -1.0 : 1.0) * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
  return (uint16_t)(sign << 15 | exponent << 10 | mantissa);
}

static uint8_t *draw_block(int source, uint8_t *to, double *values) {
  double scale, minimum = 0;
  const uint16_t d = draw_half(&scale);
  memcpy(to, &d, 2);
  to += 2;
  if (source == SK_SRC_Q4_1) {
    const uint16_t m = draw_half(&minimum);
    memcpy(to, &m, 2);
    to += 2;
  } else if (source == SK_SRC_Q4_0) {
    minimum = -8 * scale;
  }
  if (source == SK_SRC_Q8_0) {
    for (int i = 0; i < 32; i++) {
      const int q = fuzz_int(-127, 127);
      to[i] = (uint8_t)(int8_t)q;
      values[i] = scale * q;
    }
    return to + 32;
  }
  for (int i = 0; i < 16; i++) {
    const int low = fuzz_int(0, 15), high = fuzz_int(0, 15);
    to[i] = (uint8_t)(low | high << 4);
    values[i] = scale * low + minimum;
    values[i + 16] = scale * high + minimum;
  }
  return to + 16;
}

/* Moved without rounding where the format can hold it; else as good as eight bits get. */
static void check_moved(const float *weights, const double *values, int is_exact) {
  double largest = 0, squares = 0;
  for (int i = 0; i < SK_GROUP; i++) largest = fmax(largest, fabs(values[i]));
  for (int i = 0; i < SK_GROUP; i++) {
    const double off = fabs(weights[i] - values[i]);
    fuzz_check(!is_exact || off <= 1e-6 * largest, "weight %d: %.8g not %.8g", i, (double)weights[i], values[i]);
    squares += off * off;
  }
  const double step = largest / 127 * 1.01 + 0x1p-24;
  fuzz_check(sqrt(squares) <= 0.5 * step * sqrt(SK_GROUP) + 1e-2 * step, "off by %g, step %g", sqrt(squares), step);
}

void fuzz_ggml(const fuzz_subject *subject) {
  static const int sources[] = {SK_SRC_Q4_0, SK_SRC_Q4_1, SK_SRC_Q8_0}, sizes[] = {18, 20, 34};
  const int which = fuzz_int(0, 2), n = fuzz_int(1, 40), groups = fuzz_int(1, 9), k = groups * SK_GROUP;
  const int own = sources[which] == SK_SRC_Q8_0 ? SK_Q8 : SK_Q4, format = fuzz_chance(0.7) ? own : SK_Q8;
  const size_t row_bytes = (size_t)groups * (size_t)sizes[which];
  uint8_t *blocks = fuzz_take((size_t)n * row_bytes, 1), *at = blocks;
  double *values = malloc((size_t)n * (size_t)k * sizeof *values);
  for (int i = 0; i < n * groups; i++) at = draw_block(sources[which], at, values + (size_t)i * SK_GROUP);
  uint8_t *packed = fuzz_take(sk_packed_bytes(format, n, k), 64);
  fuzz_check(sk_pack(format, sources[which], blocks, row_bytes, n, k, packed) == 0, "source %d refused", sources[which]);
  fuzz_check(own == SK_Q4 || sk_pack(SK_Q4, SK_SRC_Q8_0, blocks, row_bytes, n, k, packed) == -1,
             "eight bits taken for four");
  fuzz_matrix m = {.matrix = {.format = format, .n = n, .k = k, .n_padded = padded(n, 16), .k_padded = padded(k, 64)}};
  m.matrix.packed = packed;
  m.weights = FUZZ_FLOATS((size_t)n * (size_t)k);
  sk_unpack(&m.matrix, all_rows(n), n, m.weights);
  for (int i = 0; i < n * k; i += SK_GROUP) check_moved(m.weights + i, values + i, format == own);
  const int rows = fuzz_int(1, 9);
  float *x = draw((size_t)rows * (size_t)k, 1.0f), *out = FUZZ_FLOATS((size_t)rows * (size_t)n);
  fuzz_check(sk_linear(subject->context, &m.matrix, x, rows, out) == 0, "failed");
  compare(&m, x, rows, out);
  free(values);
}
