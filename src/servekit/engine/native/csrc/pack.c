/* Weights into panels and back (servekit.h describes the panels). Plain C for every CPU: packing happens once a model,
   and reading single rows back is the embedding's look-up.

   Rows that ggml has quantised are only moved: their scales, minimums and quants go over bit by bit. Floats are
   quantised here, always against scales that have been rounded to float16 first. */
#include "scalars.h"
#include "servekit.h"

#include <math.h>
#include <string.h>

#define Q4_MAX 15
#define Q8_MAX 127
#define Q4_K_INPUTS 256

enum { Q4_0_BYTES = 18, Q4_1_BYTES = 20, Q8_0_BYTES = 34, Q4_K_BYTES = 144 };

/* bfloat16, to nearest even. */
static uint16_t to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- places in a panel ---- */

static int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

static size_t panel_bytes(int format, int k) {
  const size_t pairs = (size_t)padded(k, 2 * SK_GROUP) / (2 * SK_GROUP);
  return pairs * (format == SK_Q4   ? 2 * SK_Q4_GROUP_BYTES
                  : format == SK_Q8 ? SK_Q8_PAIR_BYTES
                                    : 2 * SK_BF16_GROUP_BYTES);
}

size_t sk_packed_bytes(int format, int n, int k) {
  return (size_t)padded(n, SK_PANEL) / SK_PANEL * panel_bytes(format, k);
}

static void store_u32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }
static uint32_t load_u32(const uint8_t *at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}
static void store_u16(uint8_t *at, uint16_t value) { memcpy(at, &value, sizeof value); }
static uint16_t load_u16(const uint8_t *at) {
  uint16_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

/* Channel c of one group of a Q4 panel. */
static void put_scales_q4(uint8_t *group, int c, uint16_t scale, uint16_t minimum) {
  store_u16(group + 256 + 2 * c, scale);
  store_u16(group + 256 + 32 + 2 * c, minimum);
}

/* 32 nibbles, one a byte. */
static void put_q4(uint8_t *group, int c, const uint8_t *q) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) group[64 * i + 4 * c + j] = (uint8_t)(q[8 * i + j] | q[8 * i + 4 + j] << 4);
}

/* Group g of a Q8 panel: its quants, and behind both groups of the pair its scales. */
static uint8_t *quants_q8(uint8_t *panel, int g) { return panel + (size_t)(g / 2) * SK_Q8_PAIR_BYTES + g % 2 * 512; }
static uint8_t *scales_q8(uint8_t *panel, int g) {
  return panel + (size_t)(g / 2) * SK_Q8_PAIR_BYTES + 1024 + g % 2 * 2 * SK_PANEL;
}

static void put_q8(uint8_t *panel, int g, int c, const uint8_t *q, uint16_t scale) {
  for (int i = 0; i < 8; i++) memcpy(quants_q8(panel, g) + 64 * i + 4 * c, q + 4 * i, 4);
  store_u16(scales_q8(panel, g) + 2 * c, scale);
}

static void unpack_q4(const uint8_t *group, int c, float *out) {
  const float scale = sk_half(load_u16(group + 256 + 2 * c)), minimum = sk_half(load_u16(group + 288 + 2 * c));
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      const uint8_t both = group[64 * i + 4 * c + j];
      out[8 * i + j] = scale * (float)(both & 15) + minimum;
      out[8 * i + 4 + j] = scale * (float)(both >> 4) + minimum;
    }
}

/* ---- from ggml's blocks ---- */

/* ggml keeps inputs 0..15 in the low nibbles of 16 bytes and 16..31 in the high ones. */
static void move_q4(uint8_t *group, int c, const uint8_t *quants) {
  const uint32_t low = 0x0f0f0f0f;
  uint32_t w[4];
  for (int i = 0; i < 4; i++) w[i] = load_u32(quants + 4 * i);
  for (int i = 0; i < 2; i++) {
    store_u32(group + 64 * i + 4 * c, (w[2 * i] & low) | (w[2 * i + 1] & low) << 4);
    store_u32(group + 64 * (i + 2) + 4 * c, (w[2 * i] >> 4 & low) | (w[2 * i + 1] & ~low));
  }
}

/* w = d * (q - 8), so the minimum is -8 d: three more in the exponent, or a subnormal that is multiplied out. */
static int row_q4_0(const uint8_t *row, int groups, int c, uint8_t *panel) {
  for (int g = 0; g < groups; g++, row += Q4_0_BYTES, panel += SK_Q4_GROUP_BYTES) {
    const uint16_t d = load_u16(row);
    if ((d >> 10 & 31) > 27) return -1; /* 8 d is infinite in float16, or d is */
    put_scales_q4(panel, c, d, sk_to_half(-8.0f * sk_half(d)));
    move_q4(panel, c, row + 2);
  }
  return 0;
}

static int row_q4_1(const uint8_t *row, int groups, int c, uint8_t *panel) {
  for (int g = 0; g < groups; g++, row += Q4_1_BYTES, panel += SK_Q4_GROUP_BYTES) {
    const uint16_t d = load_u16(row), m = load_u16(row + 2);
    if ((d >> 10 & 31) == 31 || (m >> 10 & 31) == 31) return -1;
    put_scales_q4(panel, c, d, m);
    move_q4(panel, c, row + 4);
  }
  return 0;
}

/* 256 inputs with 8 scales and minimums of 6 bits each, as multiples of two in float16. The quants stay; only the
   products are rounded to float16, by at most 2^-11 of their size. */
static int row_q4_k(const uint8_t *row, int groups, int c, uint8_t *panel) {
  for (int g = 0; g < groups; row += Q4_K_BYTES) {
    const float d = sk_half(load_u16(row)), least = sk_half(load_u16(row + 2));
    const uint8_t *bits = row + 4, *quants = row + 16;
    for (int i = 0; i < 8; i++, g++, panel += SK_Q4_GROUP_BYTES) {
      const int scale = i < 4 ? bits[i] & 63 : (bits[i + 4] & 15) | bits[i - 4] >> 6 << 4;
      const int minimum = i < 4 ? bits[i + 4] & 63 : bits[i + 4] >> 4 | bits[i] >> 6 << 4;
      const float s = d * (float)scale, m = -least * (float)minimum;
      if (!(fabsf(s) <= SK_HALF_MAX) || !(fabsf(m) <= SK_HALF_MAX)) return -1;
      put_scales_q4(panel, c, sk_to_half(s), sk_to_half(m));
      uint8_t q[SK_GROUP];
      for (int j = 0; j < SK_GROUP; j++) q[j] = i % 2 ? quants[32 * (i / 2) + j] >> 4 : quants[32 * (i / 2) + j] & 15;
      put_q4(panel, c, q);
    }
  }
  return 0;
}

static int row_q8_0(const uint8_t *row, int groups, int c, uint8_t *panel) {
  for (int g = 0; g < groups; g++, row += Q8_0_BYTES) {
    const uint16_t d = load_u16(row);
    if ((d >> 10 & 31) == 31) return -1;
    uint8_t *to = quants_q8(panel, g);
    int has_lowest = 0;
    for (int j = 0; j < SK_GROUP; j++) has_lowest |= row[2 + j] == 0x80;
    if (has_lowest) return -1; /* -128, which ggml never writes and the format does not hold */
    for (int i = 0; i < 8; i++) store_u32(to + 64 * i + 4 * c, load_u32(row + 2 + 4 * i) ^ 0x80808080u);
    store_u16(scales_q8(panel, g) + 2 * c, d);
  }
  return 0;
}

/* ---- from floats ---- */

/* 1 / scale, or 0 for a scale of 0. */
static float inverse_of(uint16_t scale) {
  const float s = sk_half(scale);
  return s != 0.0f ? 1.0f / s : 0.0f;
}

/* The scale that reaches the largest of 32 numbers with 127; -1 for numbers beyond it. */
static int scale_q8(const float *x, uint16_t *scale) {
  float largest = 0.0f;
  int is_bad = 0;
  for (int j = 0; j < SK_GROUP; j++) {
    const float size = fabsf(x[j]);
    is_bad |= !(size <= SK_HALF_MAX * Q8_MAX);
    largest = size > largest ? size : largest;
  }
  if (is_bad) return -1;
  *scale = sk_to_half(largest / Q8_MAX);
  /* Among subnormals the rounding is coarse; upwards, so that the largest value is not cut off. */
  if (*scale < 0x400 && sk_half(*scale) * Q8_MAX < largest) *scale += 1;
  return 0;
}

static void assign_q8(const float *x, uint16_t scale, uint8_t *q) {
  const float inverse = inverse_of(scale);
  for (int j = 0; j < SK_GROUP; j++) {
    float v = x[j] * inverse;
    v = v > Q8_MAX ? Q8_MAX : v < -Q8_MAX ? -Q8_MAX : v;
    q[j] = (uint8_t)((int)(v + 128.5f)); /* v + 128 is positive, so cutting off rounds to nearest */
  }
}

/* Adding and taking away 1.5 * 2^23 rounds a small float to a whole one, in loops that become vector instructions. */
#define ROUNDER 12582912.0f

/* The sum of 32 floats, eight at a time: the order of float additions is ours to choose, not the compiler's. */
static float sum_group(const float *x) {
  float lanes[8];
  for (int i = 0; i < 8; i++) lanes[i] = (x[i] + x[i + 8]) + (x[i + 16] + x[i + 24]);
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

/* The sum of squared errors that a scale of eight bits makes. */
static float error_q8(const float *restrict x, float scale) {
  const float inverse = 1.0f / scale;
  float squares[SK_GROUP];
  for (int j = 0; j < SK_GROUP; j++) {
    float v = x[j] * inverse;
    v = v > 127.0f ? 127.0f : v;
    v = v < -127.0f ? -127.0f : v;
    const float off = ((v + ROUNDER) - ROUNDER) * scale - x[j];
    squares[j] = off * off;
  }
  return sum_group(squares);
}

/* Eight bits for numbers that are minimum + step * 0..15. A scale that divides the step hits the steps themselves and
   misses by the minimum's rest alone, of which the least is taken; it is nothing for Q4_0, whose minimum is -8 steps. */
static int group_q8_of_steps(const float *x, float step, uint8_t *q, uint16_t *scale) {
  if (scale_q8(x, scale) != 0) return -1;
  if (*scale != 0) {
    const float reach = Q8_MAX * 1.002f, largest = sk_half(*scale) * Q8_MAX;
    float best = error_q8(x, sk_half(*scale));
    for (int part = 1; part <= 16 && best > 0.0f; part++) {
      const uint16_t tried = sk_to_half(fabsf(step) / (float)part);
      const float s = sk_half(tried);
      if (s == 0.0f || s * reach < largest) break;
      const float error = error_q8(x, s);
      if (error < best) {
        best = error;
        *scale = tried;
      }
    }
  }
  assign_q8(x, *scale, q);
  return 0;
}

/* Nibbles (as whole floats) for one scale and minimum, and the sum of squared errors. */
static float assign_q4(const float *restrict x, float scale, float minimum, float *restrict q) {
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  float squares[SK_GROUP];
  for (int j = 0; j < SK_GROUP; j++) {
    float v = (x[j] - minimum) * inverse;
    v = v < 0.0f ? 0.0f : v;
    v = v > 15.0f ? 15.0f : v;
    v = (v + ROUNDER) - ROUNDER;
    const float off = scale * v + minimum - x[j];
    q[j] = v;
    squares[j] = off * off;
  }
  return sum_group(squares);
}

/* The scale and minimum that fit given nibbles best; 0 where all nibbles are equal and no scale can be told. */
static int fit_q4(const float *restrict x, const float *restrict q, float sum_x, float *scale, float *minimum) {
  float squares[SK_GROUP], products[SK_GROUP];
  for (int j = 0; j < SK_GROUP; j++) {
    squares[j] = q[j] * q[j];
    products[j] = x[j] * q[j];
  }
  const float sum_q = sum_group(q), sum_qq = sum_group(squares), sum_xq = sum_group(products);
  const float determinant = SK_GROUP * sum_qq - sum_q * sum_q;
  if (!(determinant > 0.0f)) return 0;
  *scale = (SK_GROUP * sum_xq - sum_x * sum_q) / determinant;
  *minimum = (sum_qq * sum_x - sum_q * sum_xq) / determinant;
  return 1;
}

/* Least squares over a small search: for each of some widths of the grid the nibbles are assigned, scale and minimum
   fitted to them, rounded to float16, and the nibbles assigned again; the smallest squared error wins. */
static int group_q4(const float *x, uint8_t *q, uint16_t *scale, uint16_t *minimum) {
  float lowest = x[0], highest = x[0];
  int is_bad = 0;
  for (int j = 0; j < SK_GROUP; j++) {
    is_bad |= !(fabsf(x[j]) <= SK_HALF_MAX);
    lowest = x[j] < lowest ? x[j] : lowest;
    highest = x[j] > highest ? x[j] : highest;
  }
  const float width = highest - lowest, sum_x = sum_group(x);
  if (is_bad || !(width <= SK_HALF_MAX)) return -1;
  float tried[SK_GROUP], chosen[SK_GROUP];
  *scale = sk_to_half(width / Q4_MAX);
  *minimum = sk_to_half(lowest);
  float best = assign_q4(x, sk_half(*scale), sk_half(*minimum), chosen);
  for (int step = -8; step <= 4 && best > 0.0f; step++) {
    float s = width / (Q4_MAX - 0.125f * (float)step), m = lowest;
    assign_q4(x, s, m, tried);
    if (!fit_q4(x, tried, sum_x, &s, &m) || !(fabsf(s) <= SK_HALF_MAX) || !(fabsf(m) <= SK_HALF_MAX)) continue;
    const uint16_t half_s = sk_to_half(s), half_m = sk_to_half(m);
    const float error = assign_q4(x, sk_half(half_s), sk_half(half_m), tried);
    if (error < best) {
      best = error;
      *scale = half_s;
      *minimum = half_m;
      memcpy(chosen, tried, sizeof chosen);
    }
  }
  for (int j = 0; j < SK_GROUP; j++) q[j] = (uint8_t)chosen[j];
  return 0;
}

static int row_f32(int format, const uint8_t *row, int k, int c, uint8_t *panel) {
  for (int g = 0; g * SK_GROUP < k; g++) {
    const int from = g * SK_GROUP, count = k - from < SK_GROUP ? k - from : SK_GROUP;
    float x[SK_GROUP] = {0};
    memcpy(x, row + (size_t)from * sizeof *x, (size_t)count * sizeof *x);
    if (format == SK_BF16) {
      uint8_t *group = panel + (size_t)g * SK_BF16_GROUP_BYTES;
      for (int j = 0; j < SK_GROUP; j++) store_u16(group + 64 * (j / 2) + 4 * c + 2 * (j % 2), to_bf16(x[j]));
      continue;
    }
    uint8_t q[SK_GROUP];
    uint16_t scale, minimum;
    if (format == SK_Q4) {
      uint8_t *group = panel + (size_t)g * SK_Q4_GROUP_BYTES;
      if (group_q4(x, q, &scale, &minimum) != 0) return -1;
      put_scales_q4(group, c, scale, minimum);
      put_q4(group, c, q);
    } else {
      if (scale_q8(x, &scale) != 0) return -1;
      assign_q8(x, scale, q);
      put_q8(panel, g, c, q, scale);
    }
  }
  return 0;
}

/* Rows of four-bit blocks in eight bits: unpacked from a small panel of their own, and quantised again. */
static int row_steps_q8(int source, const uint8_t *row, int groups, int c, uint8_t *panel) {
  uint8_t group[8 * SK_Q4_GROUP_BYTES];
  const int at_once = source == SK_SRC_Q4_K ? 8 : 1;
  const size_t bytes = source == SK_SRC_Q4_K ? Q4_K_BYTES : source == SK_SRC_Q4_1 ? Q4_1_BYTES : Q4_0_BYTES;
  for (int g = 0; g < groups; row += bytes) {
    const int status = source == SK_SRC_Q4_K   ? row_q4_k(row, at_once, 0, group)
                       : source == SK_SRC_Q4_1 ? row_q4_1(row, at_once, 0, group)
                                               : row_q4_0(row, at_once, 0, group);
    if (status != 0) return -1;
    for (int i = 0; i < at_once; i++, g++) {
      const uint8_t *from = group + (size_t)i * SK_Q4_GROUP_BYTES;
      float x[SK_GROUP];
      uint8_t q[SK_GROUP];
      uint16_t scale;
      unpack_q4(from, 0, x);
      if (group_q8_of_steps(x, sk_half(load_u16(from + 256)), q, &scale) != 0) return -1;
      put_q8(panel, g, c, q, scale);
    }
  }
  return 0;
}

/* ---- the interface ---- */

static int can_become(int format, int source, int k) {
  if (source == SK_SRC_F32) return format == SK_Q4 || format == SK_Q8 || format == SK_BF16;
  if (k % (source == SK_SRC_Q4_K ? Q4_K_INPUTS : SK_GROUP)) return 0;
  if (source == SK_SRC_Q8_0) return format == SK_Q8;
  const int has_nibbles = source == SK_SRC_Q4_0 || source == SK_SRC_Q4_1 || source == SK_SRC_Q4_K;
  return has_nibbles && (format == SK_Q4 || format == SK_Q8);
}

/* Padding: zero scales and minimums. A quant of 128 is Q8's zero. */
static void clear(int format, uint8_t *packed, size_t bytes) {
  memset(packed, 0, bytes);
  if (format == SK_Q8)
    for (size_t at = 0; at < bytes; at += SK_Q8_PAIR_BYTES) memset(packed + at, 128, 1024);
}

int sk_pack(int format, int source, const void *rows, size_t row_bytes, int n, int k, uint8_t *packed) {
  if (!can_become(format, source, k)) return -1;
  const size_t size = panel_bytes(format, k);
  for (int row = 0; row < n; row++) {
    const uint8_t *from = (const uint8_t *)rows + (size_t)row * row_bytes;
    uint8_t *panel = packed + (size_t)(row / SK_PANEL) * size;
    const int c = row % SK_PANEL, groups = k / SK_GROUP;
    if (c == 0) clear(format, panel, size);
    int status;
    if (format == SK_Q8 && source != SK_SRC_F32 && source != SK_SRC_Q8_0) {
      if (row_steps_q8(source, from, groups, c, panel) != 0) return -1;
      continue;
    }
    switch (source) {
    case SK_SRC_Q4_0: status = row_q4_0(from, groups, c, panel); break;
    case SK_SRC_Q4_1: status = row_q4_1(from, groups, c, panel); break;
    case SK_SRC_Q4_K: status = row_q4_k(from, groups, c, panel); break;
    case SK_SRC_Q8_0: status = row_q8_0(from, groups, c, panel); break;
    default: status = row_f32(format, from, k, c, panel);
    }
    if (status != 0) return -1;
  }
  return 0;
}

static void unpack_q8(const uint8_t *quants, const uint8_t *scales, int c, float *out) {
  const float scale = sk_half(load_u16(scales + 2 * c));
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 4; j++) out[4 * i + j] = scale * (float)(quants[64 * i + 4 * c + j] - 128);
}

static void unpack_bf16(const uint8_t *group, int c, float *out) {
  for (int j = 0; j < SK_GROUP; j++) out[j] = sk_widen(load_u16(group + 64 * (j / 2) + 4 * c + 2 * (j % 2)));
}

void sk_unpack(const sk_matrix *matrix, const int64_t *rows, int count, float *out) {
  const size_t size = panel_bytes(matrix->format, matrix->k);
  for (int row = 0; row < count; row++) {
    const uint8_t *panel = matrix->packed + (size_t)(rows[row] / SK_PANEL) * size;
    const int c = (int)(rows[row] % SK_PANEL);
    for (int from = 0; from < matrix->k; from += SK_GROUP, out += SK_GROUP) {
      const int g = from / SK_GROUP, left = matrix->k - from;
      float last[SK_GROUP], *to = left < SK_GROUP ? last : out;
      if (matrix->format == SK_Q4) unpack_q4(panel + (size_t)g * SK_Q4_GROUP_BYTES, c, to);
      else if (matrix->format == SK_BF16) unpack_bf16(panel + (size_t)g * SK_BF16_GROUP_BYTES, c, to);
      else unpack_q8(quants_q8((uint8_t *)panel, g), scales_q8((uint8_t *)panel, g), c, to);
      if (left < SK_GROUP) {
        memcpy(out, last, (size_t)left * sizeof *out);
        out += left - SK_GROUP;
      }
    }
  }
}
