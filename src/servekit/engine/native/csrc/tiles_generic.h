/* One panel of 16 channels times a tile of rows, in plain C: what the other tiles compute, written down. */
#define SK_MAX_TILE 4

/* acc[r] += sum over groups of d * scale * (q . nibbles) + s * minimum, for one tile of `rows` rows. */
static inline void tile_q4(const int rows, const uint8_t *w, int groups, const int8_t *q, const float *d,
                           const float *s, f32x16 *acc) {
  for (int g = 0; g < groups; g++, w += SK_Q4_GROUP_BYTES) {
    f32x16 scale = v_load_f16((const uint16_t *)(w + 256)), minimum = v_load_f16((const uint16_t *)(w + 288));
    for (int r = 0; r < rows; r++, q += SK_GROUP, d++, s++) {
      f32x16 dot;
      SK_EACH {
        int32_t sum = 0;
        for (int k = 0; k < SK_GROUP; k++) {
          uint8_t byte = w[k / 8 * 64 + i * 4 + k % 4];
          sum += (k % 8 < 4 ? byte & 15 : byte >> 4) * q[k];
        }
        dot.v[i] = (float)sum;
      }
      acc[r] = v_fma(v_mul(scale, v_set1(*d)), dot, acc[r]);
      acc[r] = v_fma(minimum, v_set1(*s), acc[r]);
    }
  }
}

/* acc[r] += sum over groups of d * scale * (q . (weights - 128)); groups is even. */
static inline void tile_q8(const int rows, const uint8_t *w, int groups, const int8_t *q, const float *d,
                           const int32_t *z, f32x16 *acc) {
  for (int g = 0; g < groups; g++) {
    const uint8_t *pair = w + (size_t)(g / 2) * SK_Q8_PAIR_BYTES, *quants = pair + g % 2 * 512;
    f32x16 scale = v_load_f16((const uint16_t *)(pair + 1024 + g % 2 * 32));
    for (int r = 0; r < rows; r++, q += SK_GROUP, d++, z++) {
      f32x16 dot;
      SK_EACH {
        int32_t sum = *z;
        for (int k = 0; k < SK_GROUP; k++) sum += quants[k / 4 * 64 + i * 4 + k % 4] * q[k];
        dot.v[i] = (float)sum;
      }
      acc[r] = v_fma(v_mul(scale, v_set1(*d)), dot, acc[r]);
    }
  }
}

/* Lane t of dots[r]: q[r] times the 32 elements of key t, in one group of a panel of keys in 8 bits (SK_KV_Q8_0), which
   are stored 128 too high; exact. q is [rows, 32], and z is -128 times the sum of each. */
static inline void dot_keys(const int rows, const uint8_t *keys, const int8_t *q, const int32_t *z, f32x16 *dots) {
  for (int r = 0; r < rows; r++, q += SK_GROUP)
    SK_EACH {
      int32_t sum = z[r];
      for (int k = 0; k < SK_GROUP; k++) sum += keys[k / 4 * 64 + i * 4 + k % 4] * q[k];
      dots[r].v[i] = (float)sum;
    }
}
