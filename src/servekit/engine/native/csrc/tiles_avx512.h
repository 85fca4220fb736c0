/* One panel of 16 channels times a tile of rows: vpdpbusd adds four products of every channel at once.

   The unsigned operand is the weight, so that activations are broadcast straight from memory. Weights of SK_Q8 are
   stored 128 too high; starting from z = -128 * sum(q) takes that back for nothing. */
#define SK_MAX_TILE 12
#define SK_ASK_ROWS 4

#define SK_ROWS _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++)

static inline __m512i sk_bytes(const int8_t *q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm512_set1_epi32(four);
}

static inline __attribute__((always_inline)) void tile_q4(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const float *s, f32x16 *acc) {
  const __m512i low = _mm512_set1_epi8(15);
  const size_t panel = (size_t)groups * SK_Q4_GROUP_BYTES;
  for (int g = 0; g < groups; g++, w += SK_Q4_GROUP_BYTES, q += rows * SK_GROUP, d += rows, s += rows) {
    if (rows >= SK_ASK_ROWS) sk_ask(w + panel, SK_Q4_GROUP_BYTES);
    __m512i dot[SK_MAX_TILE];
    SK_ROWS dot[r] = _mm512_setzero_si512();
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
      __m512i both = _mm512_load_si512(w + 64 * i);
      __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      SK_ROWS dot[r] = _mm512_dpbusd_epi32(dot[r], first, sk_bytes(q + r * SK_GROUP + 8 * i));
      SK_ROWS dot[r] = _mm512_dpbusd_epi32(dot[r], second, sk_bytes(q + r * SK_GROUP + 8 * i + 4));
    }
    __m512 scale = v_load_f16((const uint16_t *)(w + 256)), minimum = v_load_f16((const uint16_t *)(w + 288));
    SK_ROWS acc[r] = v_fma(v_mul(scale, v_set1(d[r])), _mm512_cvtepi32_ps(dot[r]), acc[r]);
    SK_ROWS acc[r] = v_fma(minimum, v_set1(s[r]), acc[r]);
  }
}

static inline __attribute__((always_inline)) void tile_q8(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const int32_t *z, f32x16 *acc) {
  const size_t panel = (size_t)groups / 2 * SK_Q8_PAIR_BYTES;
  for (int g = 0; g < groups; g += 2, w += SK_Q8_PAIR_BYTES) {
    if (rows >= SK_ASK_ROWS) sk_ask(w + panel, SK_Q8_PAIR_BYTES);
    for (int half = 0; half < 2; half++, q += rows * SK_GROUP, d += rows, z += rows) {
      __m512i dot[SK_MAX_TILE];
      SK_ROWS dot[r] = _mm512_set1_epi32(z[r]);
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        __m512i weights = _mm512_load_si512(w + 512 * half + 64 * i);
        SK_ROWS dot[r] = _mm512_dpbusd_epi32(dot[r], weights, sk_bytes(q + r * SK_GROUP + 4 * i));
      }
      __m512 scale = v_load_f16((const uint16_t *)(w + 1024 + 32 * half));
      SK_ROWS acc[r] = v_fma(v_mul(scale, v_set1(d[r])), _mm512_cvtepi32_ps(dot[r]), acc[r]);
    }
  }
}

#ifdef SK_BF16_DOT
#define SK_HAS_BF16_TILE
/* vdpbf16ps adds two products of every channel at once; it takes subnormals for zero. */
static inline __attribute__((always_inline)) void tile_bf16(const int rows, const uint8_t *w, int groups,
                                                            const uint16_t *q, f32x16 *acc) {
  const size_t panel = (size_t)groups * SK_BF16_GROUP_BYTES;
  for (int g = 0; g < groups; g++, w += SK_BF16_GROUP_BYTES, q += rows * SK_GROUP) {
    if (rows >= SK_ASK_ROWS) sk_ask(w + panel, SK_BF16_GROUP_BYTES);
    _Pragma("GCC unroll 16") for (int i = 0; i < SK_GROUP / 2; i++) {
      __m512bh weights = (__m512bh)_mm512_load_si512(w + 64 * i);
      SK_ROWS acc[r] = _mm512_dpbf16_ps(acc[r], weights,
                                        (__m512bh)sk_bytes((const int8_t *)(q + r * SK_GROUP + 2 * i)));
    }
  }
}
#endif

static inline __attribute__((always_inline)) void dot_keys(const int rows, const uint8_t *keys, const int8_t *q,
                                                           const int32_t *z, f32x16 *dots) {
  __m512i dot[SK_MAX_TILE];
  SK_ROWS dot[r] = _mm512_set1_epi32(z[r]);
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
    __m512i four = _mm512_loadu_si512(keys + 64 * i);
    SK_ROWS dot[r] = _mm512_dpbusd_epi32(dot[r], four, sk_bytes(q + r * SK_GROUP + 4 * i));
  }
  SK_ROWS dots[r] = _mm512_cvtepi32_ps(dot[r]);
}
#undef SK_ROWS
