/* One panel of 16 channels times a tile of rows in halves of 8 channels, which is what 16 registers hold.

   SK_Q4: maddubs multiplies unsigned nibbles with signed activations; eight sums of two products of at most 15 * 127
   are exactly one group and fit into 16 bits. SK_Q8: the sign of the weight moves to the activation, since maddubs
   wants one factor unsigned and 255 * 127 * 2 would not fit. */
#define SK_MAX_TILE 4
#define SK_ASK_ROWS 2

#define SK_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)

static inline __m256i sk_bytes(const int8_t *q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

static inline __m256 sk_half8(const uint8_t *p) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)p)); }

static inline __attribute__((always_inline)) void half_q4(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const float *s, const int half,
                                                          __m256 *acc) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const size_t panel = (size_t)groups * SK_Q4_GROUP_BYTES;
  for (int g = 0; g < groups; g++, w += SK_Q4_GROUP_BYTES, q += rows * SK_GROUP, d += rows, s += rows) {
    if (rows >= SK_ASK_ROWS && half == 0) sk_ask(w + panel, SK_Q4_GROUP_BYTES);
    __m256i dot[SK_MAX_TILE];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
      __m256i both = _mm256_load_si256((const __m256i *)(w + 64 * i + 32 * half));
      __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      SK_ROWS {
        __m256i a = _mm256_maddubs_epi16(first, sk_bytes(q + r * SK_GROUP + 8 * i));
        dot[r] = i == 0 ? a : _mm256_add_epi16(dot[r], a);
      }
      SK_ROWS {
        __m256i a = _mm256_maddubs_epi16(second, sk_bytes(q + r * SK_GROUP + 8 * i + 4));
        dot[r] = _mm256_add_epi16(dot[r], a);
      }
    }
    __m256 scale = sk_half8(w + 256 + 16 * half), minimum = sk_half8(w + 288 + 16 * half);
    SK_ROWS {
      __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(dot[r], ones));
      acc[r] = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_broadcast_ss(d + r)), sum, acc[r]);
      acc[r] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(s + r), acc[r]);
    }
  }
}

static inline __attribute__((always_inline)) void half_q8(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const int half, __m256 *acc) {
  const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8((char)0x80);
  const size_t panel = (size_t)groups / 2 * SK_Q8_PAIR_BYTES;
  for (int g = 0; g < groups; g += 2, w += SK_Q8_PAIR_BYTES) {
    if (rows >= SK_ASK_ROWS && half == 0) sk_ask(w + panel, SK_Q8_PAIR_BYTES);
    for (int pair = 0; pair < 2; pair++, q += rows * SK_GROUP, d += rows) {
      __m256i dot[SK_MAX_TILE];
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        __m256i weights = _mm256_xor_si256(_mm256_load_si256((const __m256i *)(w + 512 * pair + 64 * i + 32 * half)), flip);
        __m256i size = _mm256_abs_epi8(weights);
        SK_ROWS {
          __m256i a = _mm256_maddubs_epi16(size, _mm256_sign_epi8(sk_bytes(q + r * SK_GROUP + 4 * i), weights));
          a = _mm256_madd_epi16(a, ones);
          dot[r] = i == 0 ? a : _mm256_add_epi32(dot[r], a);
        }
      }
      __m256 scale = sk_half8(w + 1024 + 32 * pair + 16 * half);
      SK_ROWS acc[r] = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_broadcast_ss(d + r)), _mm256_cvtepi32_ps(dot[r]),
                                       acc[r]);
    }
  }
}

static inline __attribute__((always_inline)) void tile_q4(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const float *s, f32x16 *acc) {
  __m256 part[SK_MAX_TILE];
  SK_ROWS part[r] = acc[r].lo;
  half_q4(rows, w, groups, q, d, s, 0, part);
  SK_ROWS acc[r].lo = part[r];
  SK_ROWS part[r] = acc[r].hi;
  half_q4(rows, w, groups, q, d, s, 1, part);
  SK_ROWS acc[r].hi = part[r];
}

static inline __attribute__((always_inline)) void tile_q8(const int rows, const uint8_t *w, int groups, const int8_t *q,
                                                          const float *d, const int32_t *z, f32x16 *acc) {
  (void)z; /* the weights are read with their sign */
  __m256 part[SK_MAX_TILE];
  SK_ROWS part[r] = acc[r].lo;
  half_q8(rows, w, groups, q, d, 0, part);
  SK_ROWS acc[r].lo = part[r];
  SK_ROWS part[r] = acc[r].hi;
  half_q8(rows, w, groups, q, d, 1, part);
  SK_ROWS acc[r].hi = part[r];
}

static inline __attribute__((always_inline)) void dot_keys_half(const int rows, const uint8_t *keys, const int8_t *q,
                                                                __m256i *dot) {
  const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8((char)0x80);
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
    __m256i four = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(keys + 64 * i)), flip);
    __m256i size = _mm256_abs_epi8(four);
    SK_ROWS {
      __m256i a = _mm256_maddubs_epi16(size, _mm256_sign_epi8(sk_bytes(q + r * SK_GROUP + 4 * i), four));
      a = _mm256_madd_epi16(a, ones);
      dot[r] = i == 0 ? a : _mm256_add_epi32(dot[r], a);
    }
  }
}

static inline __attribute__((always_inline)) void dot_keys(const int rows, const uint8_t *keys, const int8_t *q,
                                                           const int32_t *z, f32x16 *dots) {
  (void)z; /* the keys are read with their sign */
  __m256i dot[SK_MAX_TILE];
  dot_keys_half(rows, keys, q, dot);
  SK_ROWS dots[r].lo = _mm256_cvtepi32_ps(dot[r]);
  dot_keys_half(rows, keys + 32, q, dot);
  SK_ROWS dots[r].hi = _mm256_cvtepi32_ps(dot[r]);
}
#undef SK_ROWS
