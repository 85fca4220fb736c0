/* Single float16s and bfloat16s as floats. */
#ifndef SK_SCALARS_H
#define SK_SCALARS_H

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

static inline float sk_widen(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

#endif
