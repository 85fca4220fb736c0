/* 16 floats in four NEON registers. The operations are described in simd_generic.h. */
typedef struct {
  float32x4_t a, b, c, d;
} f32x16;

static inline f32x16 v_quad(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  f32x16 r = {a, b, c, d};
  return r;
}
static inline f32x16 v_load(const float *p) {
  return v_quad(vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12));
}
static inline void v_store(float *p, f32x16 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
static inline f32x16 v_set1(float x) {
  float32x4_t all = vdupq_n_f32(x);
  return v_quad(all, all, all, all);
}
static inline f32x16 v_zero(void) { return v_set1(0.0f); }
#define SK_UNARY(name, op) \
  static inline f32x16 name(f32x16 x) { return v_quad(op(x.a), op(x.b), op(x.c), op(x.d)); }
#define SK_BINARY(name, op)                                                                             \
  static inline f32x16 name(f32x16 x, f32x16 y) {                                                       \
    return v_quad(op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d));                              \
  }
SK_BINARY(v_add, vaddq_f32)
SK_BINARY(v_sub, vsubq_f32)
SK_BINARY(v_mul, vmulq_f32)
SK_BINARY(v_div, vdivq_f32)
SK_BINARY(v_max, vmaxq_f32)
SK_BINARY(v_min, vminq_f32)
SK_UNARY(v_abs, vabsq_f32)
SK_UNARY(v_round, vrndnq_f32)
static inline f32x16 v_fma(f32x16 x, f32x16 y, f32x16 z) {
  return v_quad(vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                vfmaq_f32(z.d, x.d, y.d));
}
/* x with the sign of y */
static inline float32x4_t v_copysign_quarter(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vdupq_n_u32(0x7fffffff), x, y);
}
SK_BINARY(v_copysign, v_copysign_quarter)
static inline float v_hsum(f32x16 x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
static inline float v_hmax(f32x16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }
static inline float32x4_t v_exp2i_quarter(float32x4_t x) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
}
SK_UNARY(v_exp2i, v_exp2i_quarter)
#undef SK_UNARY
#undef SK_BINARY
static inline float32x4_t v_widen(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
static inline f32x16 v_load_bf16(const uint16_t *p) {
  return v_quad(v_widen(vld1_u16(p)), v_widen(vld1_u16(p + 4)), v_widen(vld1_u16(p + 8)), v_widen(vld1_u16(p + 12)));
}
static inline float32x4_t v_even(uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); }
static inline float32x4_t v_odd(uint32x4_t pairs) {
  return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}
static inline void v_load_bf16_pairs(const uint16_t *p, f32x16 *first, f32x16 *second) {
  uint32x4_t a = vreinterpretq_u32_u16(vld1q_u16(p)), b = vreinterpretq_u32_u16(vld1q_u16(p + 8));
  uint32x4_t c = vreinterpretq_u32_u16(vld1q_u16(p + 16)), d = vreinterpretq_u32_u16(vld1q_u16(p + 24));
  *first = v_quad(v_even(a), v_even(b), v_even(c), v_even(d));
  *second = v_quad(v_odd(a), v_odd(b), v_odd(c), v_odd(d));
}
static inline uint16x4_t v_narrow(float32x4_t x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
static inline void v_store_bf16(uint16_t *p, f32x16 x) {
  vst1_u16(p, v_narrow(x.a));
  vst1_u16(p + 4, v_narrow(x.b));
  vst1_u16(p + 8, v_narrow(x.c));
  vst1_u16(p + 12, v_narrow(x.d));
}
static inline float32x4_t v_half4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline f32x16 v_load_f16(const uint16_t *p) {
  return v_quad(v_half4(p), v_half4(p + 4), v_half4(p + 8), v_half4(p + 12));
}
static inline void v_store_s8(int8_t *p, f32x16 x) {
  int16x8_t low = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.a)), vqmovn_s32(vcvtnq_s32_f32(x.b)));
  int16x8_t high = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.c)), vqmovn_s32(vcvtnq_s32_f32(x.d)));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

static inline float32x4_t v_widen_s16(int16x4_t x) { return vcvtq_f32_s32(vmovl_s16(x)); }
static inline f32x16 v_load_s8(const int8_t *p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return v_quad(v_widen_s16(vget_low_s16(low)), v_widen_s16(vget_high_s16(low)), v_widen_s16(vget_low_s16(high)),
                v_widen_s16(vget_high_s16(high)));
}

/* 16 of 32 registers; with 6, compilers run out of them. */
#define SK_SUMS 4

static inline float32x4_t v_sum4(const f32x16 *x) {
  float32x4_t s[4];
  for (int i = 0; i < 4; i++) s[i] = vaddq_f32(vaddq_f32(x[i].a, x[i].b), vaddq_f32(x[i].c, x[i].d));
  return vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3]));
}
static inline f32x16 v_sum16(const f32x16 *x) { return v_quad(v_sum4(x), v_sum4(x + 4), v_sum4(x + 8), v_sum4(x + 12)); }

static inline void v_transpose4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float32x4_t *out) {
  float64x2_t ab = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), cd = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
  float64x2_t AB = vreinterpretq_f64_f32(vtrn2q_f32(a, b)), CD = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  out[0] = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
  out[1] = vreinterpretq_f32_f64(vtrn1q_f64(AB, CD));
  out[2] = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
  out[3] = vreinterpretq_f32_f64(vtrn2q_f64(AB, CD));
}
static inline void v_transpose(f32x16 *x) {
  float32x4_t turned[4][16]; /* rows 4 * i to 4 * i + 3, turned: lane j of each */
  for (int i = 0; i < 4; i++) {
    const f32x16 *from = x + 4 * i;
    v_transpose4(from[0].a, from[1].a, from[2].a, from[3].a, turned[i]);
    v_transpose4(from[0].b, from[1].b, from[2].b, from[3].b, turned[i] + 4);
    v_transpose4(from[0].c, from[1].c, from[2].c, from[3].c, turned[i] + 8);
    v_transpose4(from[0].d, from[1].d, from[2].d, from[3].d, turned[i] + 12);
  }
  for (int j = 0; j < 16; j++) x[j] = v_quad(turned[0][j], turned[1][j], turned[2][j], turned[3][j]);
}
