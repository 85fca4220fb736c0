/* Single float16s and bfloat16s as floats, and back. */
#ifndef SK_SCALARS_H
#define SK_SCALARS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float sk_half(uint16_t h) {
  const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023, sign = (uint32_t)(h & 0x8000) << 16;
  if (exponent == 0) {
    const float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

#define SK_HALF_MAX 65504.0f

/* Rounds to nearest even. |f| is below 65520, so that nothing becomes infinite. */
static inline uint16_t sk_to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits < 0x38800000) { /* below 2^-14: subnormal, a multiple of 2^-24 */
    float size;
    memcpy(&size, &bits, sizeof size);
    return (uint16_t)(sign | (uint16_t)lrintf(size * 0x1p24f));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (uint16_t)((bits >> 13) - (112 << 10)));
}

static inline float sk_widen(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

#endif
