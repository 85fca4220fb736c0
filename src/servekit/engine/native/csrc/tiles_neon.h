/* One panel of 16 channels times up to 4 rows: sdot adds four products of every channel at once.

   A register holds 4 inputs of 4 channels, so a group is taken in quarters; the inputs of a row's group fill two
   registers, and each instruction picks 4 of them by lane. A panel passes twice, with half of its channels each time,
   which is what 32 registers hold. Weights of SK_Q8 are stored 128 too high, which flipping their top bit takes
   back. */
#define SK_MAX_TILE 4

#define SK_ROWS _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)

/* Inputs 4 * lane to 4 * lane + 3 of a half group, for every row. */
#define SK_DOT(weights, half, lane) SK_ROWS dot[r] = vdotq_laneq_s32(dot[r], weights, x[r][half], lane)

static inline int8x16_t sk_low(uint8x16_t both) { return vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))); }
static inline int8x16_t sk_high(uint8x16_t both) { return vreinterpretq_s8_u8(vshrq_n_u8(both, 4)); }
static inline int8x16_t sk_centred(const uint8_t *w) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(128))); }
static inline float32x4_t sk_half4(const uint8_t *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}

/* sums[r] += scale * d * dot, for one quarter. */
static inline __attribute__((always_inline)) void quarter_q4(const int rows, const uint8_t *w, int quarter,
                                                             int8x16_t (*x)[2], const float *d, const float *s,
                                                             float32x4_t *sums) {
  int32x4_t dot[SK_MAX_TILE];
  SK_ROWS dot[r] = vdupq_n_s32(0);
  uint8x16_t both = vld1q_u8(w + 16 * quarter);
  SK_DOT(sk_low(both), 0, 0);
  SK_DOT(sk_high(both), 0, 1);
  both = vld1q_u8(w + 64 + 16 * quarter);
  SK_DOT(sk_low(both), 0, 2);
  SK_DOT(sk_high(both), 0, 3);
  both = vld1q_u8(w + 128 + 16 * quarter);
  SK_DOT(sk_low(both), 1, 0);
  SK_DOT(sk_high(both), 1, 1);
  both = vld1q_u8(w + 192 + 16 * quarter);
  SK_DOT(sk_low(both), 1, 2);
  SK_DOT(sk_high(both), 1, 3);
  const float32x4_t scale = sk_half4(w + 256 + 8 * quarter), minimum = sk_half4(w + 288 + 8 * quarter);
  SK_ROWS sums[r] = vfmaq_f32(sums[r], vmulq_n_f32(scale, d[r]), vcvtq_f32_s32(dot[r]));
  SK_ROWS sums[r] = vfmaq_n_f32(sums[r], minimum, s[r]);
}

static inline __attribute__((always_inline)) void quarter_q8(const int rows, const uint8_t *w, const uint8_t *scales,
                                                             int quarter, int8x16_t (*x)[2], const float *d,
                                                             float32x4_t *sums) {
  int32x4_t dot[SK_MAX_TILE];
  SK_ROWS dot[r] = vdupq_n_s32(0);
  w += 16 * quarter;
  SK_DOT(sk_centred(w), 0, 0);
  SK_DOT(sk_centred(w + 64), 0, 1);
  SK_DOT(sk_centred(w + 128), 0, 2);
  SK_DOT(sk_centred(w + 192), 0, 3);
  SK_DOT(sk_centred(w + 256), 1, 0);
  SK_DOT(sk_centred(w + 320), 1, 1);
  SK_DOT(sk_centred(w + 384), 1, 2);
  SK_DOT(sk_centred(w + 448), 1, 3);
  const float32x4_t scale = sk_half4(scales + 8 * quarter);
  SK_ROWS sums[r] = vfmaq_f32(sums[r], vmulq_n_f32(scale, d[r]), vcvtq_f32_s32(dot[r]));
}

#define SK_LOAD_GROUP                            \
  int8x16_t x[SK_MAX_TILE][2];                   \
  SK_ROWS {                                      \
    x[r][0] = vld1q_s8(q + r * SK_GROUP);        \
    x[r][1] = vld1q_s8(q + r * SK_GROUP + 16);   \
  }

/* Channels 8 * half to 8 * half + 7. */
static inline __attribute__((always_inline)) void half_q4(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const float *s, int half, float32x4_t *left,
                                                          float32x4_t *right) {
  for (int g = 0; g < groups; g++, w += SK_Q4_GROUP_BYTES, q += rows * SK_GROUP, d += rows, s += rows) {
    SK_LOAD_GROUP
    quarter_q4(rows, w, 2 * half, x, d, s, left);
    quarter_q4(rows, w, 2 * half + 1, x, d, s, right);
  }
}

static inline __attribute__((always_inline)) void half_q8(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, int half, float32x4_t *left,
                                                          float32x4_t *right) {
  for (int g = 0; g < groups; g++, q += rows * SK_GROUP, d += rows) {
    const uint8_t *pair = w + (size_t)(g / 2) * SK_Q8_PAIR_BYTES;
    const uint8_t *quants = pair + g % 2 * 512, *scales = pair + 1024 + g % 2 * 32;
    SK_LOAD_GROUP
    quarter_q8(rows, quants, scales, 2 * half, x, d, left);
    quarter_q8(rows, quants, scales, 2 * half + 1, x, d, right);
  }
}

/* The halves of acc as arrays of their own. */
#define SK_SPLIT                                                          \
  float32x4_t a[SK_MAX_TILE], b[SK_MAX_TILE], c[SK_MAX_TILE], e[SK_MAX_TILE]; \
  SK_ROWS {                                                               \
    a[r] = acc[r].a;                                                      \
    b[r] = acc[r].b;                                                      \
    c[r] = acc[r].c;                                                      \
    e[r] = acc[r].d;                                                      \
  }
#define SK_JOIN_HALVES SK_ROWS acc[r] = v_quad(a[r], b[r], c[r], e[r])

static inline __attribute__((always_inline)) void tile_q4(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const float *s, f32x16 *acc) {
  SK_SPLIT
  half_q4(rows, w, groups, q, d, s, 0, a, b);
  half_q4(rows, w, groups, q, d, s, 1, c, e);
  SK_JOIN_HALVES;
}

static inline __attribute__((always_inline)) void tile_q8(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const int32_t *z, f32x16 *acc) {
  (void)z; /* for instructions that want one factor unsigned */
  SK_SPLIT
  half_q8(rows, w, groups, q, d, 0, a, b);
  half_q8(rows, w, groups, q, d, 1, c, e);
  SK_JOIN_HALVES;
}

static inline __attribute__((always_inline)) void dot_keys_quarter(const int rows, const uint8_t *keys,
                                                                   int8x16_t (*x)[2], int32x4_t *dot) {
  SK_ROWS dot[r] = vdupq_n_s32(0);
  SK_DOT(sk_centred(keys), 0, 0);
  SK_DOT(sk_centred(keys + 64), 0, 1);
  SK_DOT(sk_centred(keys + 128), 0, 2);
  SK_DOT(sk_centred(keys + 192), 0, 3);
  SK_DOT(sk_centred(keys + 256), 1, 0);
  SK_DOT(sk_centred(keys + 320), 1, 1);
  SK_DOT(sk_centred(keys + 384), 1, 2);
  SK_DOT(sk_centred(keys + 448), 1, 3);
}

static inline __attribute__((always_inline)) void dot_keys(const int rows, const uint8_t *keys, const int8_t *q,
                                                           const int32_t *z, f32x16 *dots) {
  (void)z; /* the keys are read with their sign */
  SK_LOAD_GROUP
  int32x4_t dot[SK_MAX_TILE];
  dot_keys_quarter(rows, keys, x, dot);
  SK_ROWS dots[r].a = vcvtq_f32_s32(dot[r]);
  dot_keys_quarter(rows, keys + 16, x, dot);
  SK_ROWS dots[r].b = vcvtq_f32_s32(dot[r]);
  dot_keys_quarter(rows, keys + 32, x, dot);
  SK_ROWS dots[r].c = vcvtq_f32_s32(dot[r]);
  dot_keys_quarter(rows, keys + 48, x, dot);
  SK_ROWS dots[r].d = vcvtq_f32_s32(dot[r]);
}
#undef SK_LOAD_GROUP
#undef SK_SPLIT
#undef SK_JOIN_HALVES
#undef SK_DOT
#undef SK_ROWS
