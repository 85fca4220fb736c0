/* 16 floats in plain C: what the other headers offer, written down, and the fallback for any CPU. */
#include <math.h>
#include <string.h>

typedef struct {
  float v[16];
} f32x16;

#define SK_EACH for (int i = 0; i < 16; i++)

static inline f32x16 v_load(const float *p) { f32x16 r; memcpy(&r, p, sizeof r); return r; }
static inline void v_store(float *p, f32x16 a) { memcpy(p, &a, sizeof a); }
static inline f32x16 v_set1(float x) { f32x16 r; SK_EACH r.v[i] = x; return r; }
static inline f32x16 v_zero(void) { return v_set1(0.0f); }
static inline f32x16 v_add(f32x16 a, f32x16 b) { SK_EACH a.v[i] += b.v[i]; return a; }
static inline f32x16 v_sub(f32x16 a, f32x16 b) { SK_EACH a.v[i] -= b.v[i]; return a; }
static inline f32x16 v_mul(f32x16 a, f32x16 b) { SK_EACH a.v[i] *= b.v[i]; return a; }
static inline f32x16 v_div(f32x16 a, f32x16 b) { SK_EACH a.v[i] /= b.v[i]; return a; }
/* a * b + c */
static inline f32x16 v_fma(f32x16 a, f32x16 b, f32x16 c) { SK_EACH a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; }
static inline f32x16 v_max(f32x16 a, f32x16 b) { SK_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline f32x16 v_min(f32x16 a, f32x16 b) { SK_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline f32x16 v_abs(f32x16 a) { SK_EACH a.v[i] = fabsf(a.v[i]); return a; }
static inline f32x16 v_copysign(f32x16 a, f32x16 sign) { SK_EACH a.v[i] = copysignf(a.v[i], sign.v[i]); return a; }
static inline float v_hsum(f32x16 a) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
  return a.v[0];
}
static inline float v_hmax(f32x16 a) {
  float m = a.v[0];
  SK_EACH m = a.v[i] > m ? a.v[i] : m;
  return m;
}
/* 2^round(x) with x in -126..127, and round to nearest even. */
static inline f32x16 v_round(f32x16 a) { SK_EACH a.v[i] = rintf(a.v[i]); return a; }
static inline f32x16 v_exp2i(f32x16 a) {
  SK_EACH { uint32_t bits = (uint32_t)((int32_t)a.v[i] + 127) << 23; memcpy(&a.v[i], &bits, 4); }
  return a;
}
static inline f32x16 v_load_bf16(const uint16_t *p) {
  f32x16 r;
  SK_EACH { uint32_t bits = (uint32_t)p[i] << 16; memcpy(&r.v[i], &bits, 4); }
  return r;
}
/* 16 pairs: the first of each, and the second. */
static inline void v_load_bf16_pairs(const uint16_t *p, f32x16 *first, f32x16 *second) {
  SK_EACH {
    uint32_t a = (uint32_t)p[2 * i] << 16, b = (uint32_t)p[2 * i + 1] << 16;
    memcpy(&first->v[i], &a, 4);
    memcpy(&second->v[i], &b, 4);
  }
}
/* Rounds to nearest even, as torch does. */
static inline void v_store_bf16(uint16_t *p, f32x16 a) {
  SK_EACH {
    uint32_t bits;
    memcpy(&bits, &a.v[i], 4);
    p[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}
static inline f32x16 v_load_f16(const uint16_t *p) { f32x16 r; SK_EACH r.v[i] = sk_half(p[i]); return r; }
/* Rounded to nearest even and stored as 16 int8; the values are within -127..127. */
static inline void v_store_s8(int8_t *p, f32x16 a) { SK_EACH p[i] = (int8_t)lrintf(a.v[i]); }

static inline f32x16 v_load_s8(const int8_t *p) { f32x16 r; SK_EACH r.v[i] = (float)p[i]; return r; }

/* How many f32x16 sums the registers hold beside what is added to them. */
#define SK_SUMS 4

/* Lane i is the sum of x[i]'s lanes. */
static inline f32x16 v_sum16(const f32x16 *x) { f32x16 r; SK_EACH r.v[i] = v_hsum(x[i]); return r; }
/* Lane j of x[i] and lane i of x[j] change places. */
static inline void v_transpose(f32x16 *x) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      float other = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = other;
    }
}
