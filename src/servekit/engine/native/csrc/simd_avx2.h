/* 16 floats in two AVX2 registers. The operations are described in simd_generic.h. */
typedef struct {
  __m256 lo, hi;
} f32x16;

static inline f32x16 v_pair(__m256 lo, __m256 hi) { f32x16 r = {lo, hi}; return r; }
static inline f32x16 v_load(const float *p) { return v_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void v_store(float *p, f32x16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
static inline f32x16 v_set1(float x) { return v_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline f32x16 v_zero(void) { return v_pair(_mm256_setzero_ps(), _mm256_setzero_ps()); }
#define SK_BINARY(name, op) \
  static inline f32x16 name(f32x16 a, f32x16 b) { return v_pair(op(a.lo, b.lo), op(a.hi, b.hi)); }
SK_BINARY(v_add, _mm256_add_ps)
SK_BINARY(v_sub, _mm256_sub_ps)
SK_BINARY(v_mul, _mm256_mul_ps)
SK_BINARY(v_div, _mm256_div_ps)
SK_BINARY(v_max, _mm256_max_ps)
SK_BINARY(v_min, _mm256_min_ps)
#undef SK_BINARY
static inline f32x16 v_fma(f32x16 a, f32x16 b, f32x16 c) {
  return v_pair(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
static inline f32x16 v_abs(f32x16 a) {
  __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return v_pair(_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask));
}
static inline f32x16 v_copysign(f32x16 a, f32x16 sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return v_pair(_mm256_or_ps(_mm256_andnot_ps(mask, a.lo), _mm256_and_ps(mask, sign.lo)),
                _mm256_or_ps(_mm256_andnot_ps(mask, a.hi), _mm256_and_ps(mask, sign.hi)));
}
static inline float v_hsum(f32x16 a) {
  __m256 s = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float v_hmax(f32x16 a) {
  __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
static inline f32x16 v_round(f32x16 a) {
  return v_pair(_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256 v_exp2i_half(__m256 a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
static inline f32x16 v_exp2i(f32x16 a) { return v_pair(v_exp2i_half(a.lo), v_exp2i_half(a.hi)); }
static inline __m256 v_load_bf16_half(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
static inline f32x16 v_load_bf16(const uint16_t *p) { return v_pair(v_load_bf16_half(p), v_load_bf16_half(p + 8)); }
static inline void v_load_bf16_pairs(const uint16_t *p, f32x16 *first, f32x16 *second) {
  __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 16));
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  *first = v_pair(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
  *second = v_pair(_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper)));
}
static inline __m256i v_bf16_half(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
static inline void v_store_bf16(uint16_t *p, f32x16 a) {
  __m256i packed = _mm256_packus_epi32(v_bf16_half(a.lo), v_bf16_half(a.hi));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline f32x16 v_load_f16(const uint16_t *p) {
  return v_pair(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
static inline void v_store_s8(int8_t *p, f32x16 a) {
  __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

static inline __m256 v_load_s8_half(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline f32x16 v_load_s8(const int8_t *p) { return v_pair(v_load_s8_half(p), v_load_s8_half(p + 8)); }

#define SK_SUMS 6

/* Sums of 4 x 8 lanes: each half of the result has what its half of a, b, c and d adds up to. */
static inline __m256 v_sum4(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  __m256 e = _mm256_add_ps(a.lo, a.hi), f = _mm256_add_ps(b.lo, b.hi);
  __m256 g = _mm256_add_ps(c.lo, c.hi), h = _mm256_add_ps(d.lo, d.hi);
  __m256d ef = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f)));
  __m256d gh = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h)));
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ef, gh)), _mm256_castpd_ps(_mm256_unpackhi_pd(ef, gh)));
}
static inline __m256 v_sum8(const f32x16 *x) {
  __m256 a = v_sum4(x[0], x[1], x[2], x[3]), b = v_sum4(x[4], x[5], x[6], x[7]);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
static inline f32x16 v_sum16(const f32x16 *x) { return v_pair(v_sum8(x), v_sum8(x + 8)); }
/* 8 x 8, read from and written to every other half of 8 pairs. */
static inline void v_transpose8(const __m256 *x, __m256 *out) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      __m256d a = _mm256_castps_pd(t[i + j]), b = _mm256_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      u[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  for (int i = 0; i < 4; i++) {
    out[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    out[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
static inline void v_transpose(f32x16 *x) {
  __m256 part[4][8], turned[4][8];
  for (int i = 0; i < 8; i++) {
    part[0][i] = x[i].lo;
    part[1][i] = x[i + 8].lo;
    part[2][i] = x[i].hi;
    part[3][i] = x[i + 8].hi;
  }
  for (int i = 0; i < 4; i++) v_transpose8(part[i], turned[i]);
  for (int i = 0; i < 8; i++) {
    x[i] = v_pair(turned[0][i], turned[1][i]);
    x[i + 8] = v_pair(turned[2][i], turned[3][i]);
  }
}
