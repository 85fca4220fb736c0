/* 16 floats in one AVX-512 register. The operations are described in simd_generic.h. */
typedef __m512 f32x16;

static inline f32x16 v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, f32x16 a) { _mm512_storeu_ps(p, a); }
static inline f32x16 v_set1(float x) { return _mm512_set1_ps(x); }
static inline f32x16 v_zero(void) { return _mm512_setzero_ps(); }
static inline f32x16 v_add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
static inline f32x16 v_sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
static inline f32x16 v_mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
static inline f32x16 v_div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
static inline f32x16 v_fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline f32x16 v_max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
static inline f32x16 v_min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
static inline f32x16 v_abs(f32x16 a) { return _mm512_abs_ps(a); }
static inline f32x16 v_copysign(f32x16 a, f32x16 sign) {
  const __m512i mask = _mm512_set1_epi32((int)0x80000000);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(mask, _mm512_castps_si512(sign), _mm512_castps_si512(a), 0xca));
}
static inline float v_hsum(f32x16 a) { return _mm512_reduce_add_ps(a); }
static inline float v_hmax(f32x16 a) { return _mm512_reduce_max_ps(a); }
static inline f32x16 v_round(f32x16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline f32x16 v_exp2i(f32x16 a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}
static inline f32x16 v_load_bf16(const uint16_t *p) {
  __m256i raw = _mm256_loadu_si256((const __m256i *)p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
static inline void v_load_bf16_pairs(const uint16_t *p, f32x16 *first, f32x16 *second) {
  __m512i both = _mm512_loadu_si512(p);
  *first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}
static inline void v_store_bf16(uint16_t *p, f32x16 a) {
  __m512i bits = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
static inline f32x16 v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void v_store_s8(int8_t *p, f32x16 a) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

static inline f32x16 v_load_s8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

#define SK_SUMS 12

/* In each quarter of the result: what that quarter of a, b, c and d adds up to. */
static inline f32x16 v_sum4(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  __m512d ab = _mm512_castps_pd(v_add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  __m512d cd = _mm512_castps_pd(v_add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}
/* Even quarters of a and b plus their odd ones. */
static inline f32x16 v_sum_quarters(f32x16 a, f32x16 b) {
  return v_add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
static inline f32x16 v_sum16(const f32x16 *x) {
  f32x16 a = v_sum4(x[0], x[1], x[2], x[3]), b = v_sum4(x[4], x[5], x[6], x[7]);
  f32x16 c = v_sum4(x[8], x[9], x[10], x[11]), d = v_sum4(x[12], x[13], x[14], x[15]);
  return v_sum_quarters(v_sum_quarters(a, b), v_sum_quarters(c, d));
}
static inline void v_transpose(f32x16 *x) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  /* u[4 * i + j] has, in quarter k, lane 4 * k + j of rows 4 * i to 4 * i + 3. */
  for (int j = 0; j < 4; j++) {
    f32x16 even01 = _mm512_shuffle_f32x4(u[j], u[j + 4], 0x88), odd01 = _mm512_shuffle_f32x4(u[j], u[j + 4], 0xdd);
    f32x16 even23 = _mm512_shuffle_f32x4(u[j + 8], u[j + 12], 0x88);
    f32x16 odd23 = _mm512_shuffle_f32x4(u[j + 8], u[j + 12], 0xdd);
    x[j] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    x[j + 8] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    x[j + 4] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    x[j + 12] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}
