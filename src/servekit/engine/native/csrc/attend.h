/* The scratch memory of one unit of attention, alike for all instruction sets. */
#ifndef SK_ATTEND_H
#define SK_ATTEND_H

#include "kv_q8.h"

/* Keys that are scored before their values are summed. Blocks begin at multiples of it whatever the cache's blocks are,
   so that a result depends on a context alone. */
#define SK_KEY_BLOCK 64
#define SK_KEY_TILES (SK_KEY_BLOCK / SK_KV_TILE)
/* Rows are padded to a multiple of every instruction set's SK_SUMS. */
#define SK_ROW_PAD 12

typedef struct {
  int rows, width; /* query heads of all queries, and head_dim, padded to whole registers */
  float *q;        /* [rows, width], scaled */
  float *sums;     /* [rows, width] weighted values so far */
  float *largest;  /* [rows] score so far */
  float *weights;  /* [rows, 16] sums of exponentials so far, to be added up at the end */
  float *scores;   /* [SK_ROW_PAD, SK_KEY_BLOCK] */
  float *keys;     /* [SK_KEY_BLOCK / 16, width, 16] */
  float *values;   /* [width / 16, SK_KEY_BLOCK, 16] */
  sk_rows queries; /* for keys in eight bits: q, rounded */
  size_t bytes;
} sk_attend_memory;

static inline float *sk_attend_take(char *from, size_t *at, size_t floats) {
  float *taken = from ? (float *)(from + *at) : NULL;
  *at += (floats * sizeof(float) + 63) / 64 * 64;
  return taken;
}

/* `rows` query heads in eight bits, a tile of them at once; who fills it says how many a tile has. */
static inline sk_rows sk_queries_lay(int rows, int head_dim, char *from, size_t *at) {
  const size_t groups = ((size_t)head_dim + SK_GROUP - 1) / SK_GROUP, all = (size_t)rows * groups;
  sk_rows queries = {.rows = rows, .k_padded = (int)groups * SK_GROUP};
  queries.q = sk_attend_take(from, at, all * SK_GROUP / sizeof(float));
  queries.d = sk_attend_take(from, at, all);
  queries.s = sk_attend_take(from, at, all);
  queries.z = (int32_t *)sk_attend_take(from, at, all);
  return queries;
}

/* Lays a unit's arrays into `from`, which is aligned to 64 bytes, or measures them where it is NULL. */
static inline sk_attend_memory sk_attend_lay(const sk_attention *a, int queries, char *from) {
  const int group = a->heads / a->kv_heads;
  sk_attend_memory m = {.rows = (queries * group + SK_ROW_PAD - 1) / SK_ROW_PAD * SK_ROW_PAD,
                        .width = (a->head_dim + 15) / 16 * 16};
  const size_t rows = (size_t)m.rows, width = (size_t)m.width;
  m.q = sk_attend_take(from, &m.bytes, rows * width);
  m.sums = sk_attend_take(from, &m.bytes, rows * width);
  m.largest = sk_attend_take(from, &m.bytes, rows);
  m.weights = sk_attend_take(from, &m.bytes, rows * 16);
  m.scores = sk_attend_take(from, &m.bytes, SK_ROW_PAD * SK_KEY_BLOCK);
  m.keys = sk_attend_take(from, &m.bytes, SK_KEY_BLOCK * width);
  m.values = sk_attend_take(from, &m.bytes, SK_KEY_BLOCK * width);
  m.queries = sk_queries_lay(m.rows, a->head_dim, from, &m.bytes);
  return m;
}

#endif
