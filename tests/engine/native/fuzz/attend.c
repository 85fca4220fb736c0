/* Attention over random batches: ragged, paged or not, windowed, capped, looking both ways, grouped; and what is
   written to a cache for it. */
#include "decode.h"
#include "support.h"

typedef struct {
  sk_attention a;
  sk_batch batch;
  int dtype;
  float *q, *out;
  void *kv;
  size_t slots; /* of the cache */
  double *keys[8], *values[8]; /* [context, kv_heads, head_dim] of each sequence, as the cache holds them */
  float *raw[8];               /* [context, 2, kv_heads, head_dim]: before they were rounded to eight bits */
  int64_t *starts, *contexts;
} attend_case;

static void draw_shape(attend_case *c) {
  static const int dims[] = {16, 32, 48, 64, 64, 80, 96, 128, 160, 256}, groups[] = {1, 2, 2, 3, 4, 5, 8};
  const int group = fuzz_chance(0.2) ? fuzz_int(9, 14) : fuzz_int(1, 8);
  c->a.kv_heads = fuzz_int(1, 3);
  c->a.heads = group * c->a.kv_heads;
  c->a.head_dim = fuzz_chance(0.6) ? dims[fuzz_int(0, 9)] : fuzz_int(1, 100);
  c->a.scale = fuzz_chance(0.2) ? 1.0f : 1.0f / sqrtf((float)c->a.head_dim);
  c->a.window = fuzz_chance(0.4) ? fuzz_int(1, 90) : 0;
  c->a.softcap = fuzz_chance(0.3) ? (float)fuzz_int(1, 50) : 0.0f;
  c->a.causal = fuzz_chance(0.7);
  c->dtype = fuzz_int(SK_KV_F32, SK_KV_Q8_0);
  if (c->dtype == SK_KV_Q8_0) c->a.head_dim = SK_GROUP * groups[fuzz_int(0, 6)];
  c->batch.seqs = fuzz_chance(0.05) ? 0 : fuzz_int(1, 4);
}

static int draw_block_size(const attend_case *c) {
  return c->dtype == SK_KV_Q8_0 ? SK_KV_TILE * fuzz_int(1, 4) : fuzz_int(1, 32);
}

/* Rounded to what the cache holds; eight bits are rounded a group at a time, later. */
static double draw_element(int dtype, float size) {
  const float x = fuzz_normal() * size;
  return dtype == SK_KV_BF16 ? fuzz_from_bf16(fuzz_to_bf16(x)) : x;
}

static size_t elements(const attend_case *c) { return (size_t)c->a.kv_heads * (size_t)c->a.head_dim; }

/* 32 numbers as int8 with a scale in float16, and what that stands for. */
static uint16_t round_group(const float *x, int8_t *q, double *rounded) {
  float largest = 0;
  for (int i = 0; i < SK_GROUP; i++) largest = fmaxf(largest, fabsf(x[i]));
  uint16_t half = sk_to_half(fminf(largest / 127, SK_HALF_MAX));
  if (half < 0x400 && sk_half(half) * 127 < largest) half++;
  const float scale = sk_half(half);
  for (int i = 0; i < SK_GROUP; i++) {
    q[i] = scale > 0 ? (int8_t)fmaxf(-127, fminf(127, rintf(x[i] * (1 / scale)))) : 0;
    rounded[i] = (double)scale * q[i];
  }
  return half;
}

/* Draws a group now and then from the ends of what float16 can scale. */
static void draw_raw(attend_case *c, int seq, float size) {
  const size_t n = elements(c), count = (size_t)c->contexts[seq] * 2 * n;
  c->raw[seq] = malloc(count * sizeof(float) + 1);
  for (size_t i = 0; i < count; i += SK_GROUP) {
    int8_t q[SK_GROUP];
    float *x = c->raw[seq] + i;
    const int is_key = i / n % 2 == 0;
    float width = is_key ? size : 1;
    if (fuzz_chance(0.06)) width = (float[]){0, 1e-6f, 3e-3f}[fuzz_int(0, 2)];
    for (int j = 0; j < SK_GROUP; j++) x[j] = fuzz_normal() * width;
    round_group(x, q, (is_key ? c->keys : c->values)[seq] + i / (2 * n) * n + i % n);
  }
}

/* Where byte `at` of a slot's head lies, as servekit.h describes the tiles. */
static uint8_t *head_of(const attend_case *c, size_t slot, int head) {
  return (uint8_t *)c->kv + (slot / 16 * (size_t)c->a.kv_heads + (size_t)head) * 34 * (size_t)c->a.head_dim;
}

static void put_q8(const attend_case *c, int seq, int position, size_t slot) {
  const int dim = c->a.head_dim, place = (int)(slot % 16);
  for (int part = 0; part < 2; part++)
    for (int h = 0; h < c->a.kv_heads; h++)
      for (int d = 0; d < dim; d += SK_GROUP) {
        const float *x = c->raw[seq] + ((size_t)position * 2 + (size_t)part) * elements(c) + h * dim + d;
        int8_t q[SK_GROUP];
        double rounded[SK_GROUP];
        const uint16_t half = round_group(x, q, rounded);
        uint8_t *bytes = head_of(c, slot, h) + (part ? 17 * dim : 0);
        for (int i = 0; i < SK_GROUP; i++) {
          if (part) bytes[place * dim + d + i] = (uint8_t)q[i];
          else bytes[(d + i) / 4 * 64 + 4 * place + i % 4] = (uint8_t)(q[i] + 128);
        }
        memcpy(bytes + 16 * dim + (d / SK_GROUP * 16 + place) * 2, &half, sizeof half);
      }
}

static void put(const attend_case *c, size_t at, double value) {
  if (c->dtype == SK_KV_BF16) ((uint16_t *)c->kv)[at] = fuzz_to_bf16((float)value);
  else ((float *)c->kv)[at] = (float)value;
}

static void draw_batch(attend_case *c, int is_paged) {
  const float size = fuzz_chance(0.1) ? 8.0f : 1.0f;
  c->starts = FUZZ_INTS(c->batch.seqs + 1);
  c->contexts = FUZZ_INTS(c->batch.seqs);
  c->starts[0] = 0;
  for (int s = 0; s < c->batch.seqs; s++) {
    const int queries = fuzz_chance(0.05) ? 0 : fuzz_chance(0.5) ? fuzz_int(1, 3) : fuzz_int(1, 75);
    int context = queries;
    if (is_paged) context += fuzz_chance(0.3) ? 0 : fuzz_chance(0.5) ? fuzz_int(1, 40) : fuzz_int(1, 300);
    c->starts[s + 1] = c->starts[s] + queries;
    c->contexts[s] = context;
    const size_t count = (size_t)context * (size_t)c->a.kv_heads * (size_t)c->a.head_dim;
    c->keys[s] = malloc(count * sizeof(double) + 1);
    c->values[s] = malloc(count * sizeof(double) + 1);
    if (c->dtype == SK_KV_Q8_0) draw_raw(c, s, size);
    for (size_t i = 0; c->dtype != SK_KV_Q8_0 && i < count; i++) {
      c->keys[s][i] = draw_element(c->dtype, size);
      c->values[s][i] = draw_element(c->dtype, 1.0f);
    }
  }
  c->batch.tokens = (int)c->starts[c->batch.seqs];
  c->batch.starts = c->starts;
  c->batch.context_lens = c->contexts;
  const size_t floats = (size_t)c->batch.tokens * (size_t)c->a.heads * (size_t)c->a.head_dim;
  c->q = FUZZ_FLOATS(floats);
  for (size_t i = 0; i < floats; i++) c->q[i] = fuzz_normal() * size;
}

static void put_position(const attend_case *c, int seq, int position, size_t slot) {
  const size_t n = elements(c);
  if (c->dtype == SK_KV_Q8_0) {
    put_q8(c, seq, position, slot);
    return;
  }
  for (size_t i = 0; i < n; i++) {
    put(c, 2 * slot * n + i, c->keys[seq][(size_t)position * n + i]);
    put(c, (2 * slot + 1) * n + i, c->values[seq][(size_t)position * n + i]);
  }
}

static size_t kv_bytes(const attend_case *c, size_t slots) {
  if (c->dtype == SK_KV_Q8_0) return slots / 16 * (size_t)c->a.kv_heads * 34 * (size_t)c->a.head_dim;
  return slots * 2 * elements(c) * (c->dtype == SK_KV_BF16 ? sizeof(uint16_t) : sizeof(float));
}

static void *take_kv(const attend_case *c, size_t slots) {
  return fuzz_take(kv_bytes(c, slots), c->dtype == SK_KV_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* Spreads the contexts over blocks in random order. What belongs to nobody stays NaN, and table entries that nobody may
   read stay wild. */
static void lay_blocks(attend_case *c) {
  const int size = c->batch.block_size = draw_block_size(c);
  int most = 1, total = fuzz_int(0, 2);
  for (int s = 0; s < c->batch.seqs; s++) {
    const int blocks = (int)(c->contexts[s] + size - 1) / size;
    most = blocks > most ? blocks : most;
    total += blocks;
  }
  c->batch.max_blocks = most + fuzz_int(0, 2);
  int64_t *tables = FUZZ_INTS(c->batch.seqs * c->batch.max_blocks);
  int *order = malloc((size_t)total * sizeof *order + 1);
  for (int i = 0; i < total; i++) {
    const int j = fuzz_int(0, i);
    order[i] = order[j];
    order[j] = i;
  }
  c->slots = (size_t)total * (size_t)size;
  c->kv = take_kv(c, c->slots);
  int used = 0;
  for (int s = 0; s < c->batch.seqs; s++) {
    int64_t *table = tables + (size_t)s * (size_t)c->batch.max_blocks;
    for (int i = 0; i < c->batch.max_blocks; i++)
      table[i] = (int64_t)i * size < c->contexts[s] ? order[used++] : INT64_MAX / 4096;
    for (int p = 0; p < c->contexts[s]; p++)
      put_position(c, s, p, (size_t)table[p / size] * (size_t)size + (size_t)(p % size));
  }
  free(order);
  c->batch.block_tables = tables;
  c->batch.slot_mapping = tables; /* attention asks only whether there is one */
}

static void lay_step(attend_case *c) {
  c->kv = take_kv(c, (size_t)c->batch.tokens);
  for (int s = 0; s < c->batch.seqs; s++)
    for (int p = 0; p < c->contexts[s]; p++) put_position(c, s, p, (size_t)c->starts[s] + (size_t)p);
}

static int sees(const sk_attention *a, int query, int key) {
  if (a->causal) return key <= query && (!a->window || key > query - a->window);
  return !a->window || abs(key - query) < a->window;
}

/* A query head as it is multiplied: in eight bits where the keys are, with a scale for 32 of it. */
static void read_query(const attend_case *c, const float *q, double *out) {
  const float scale = c->a.softcap > 0 ? c->a.scale / c->a.softcap : c->a.scale;
  for (int d = 0; d < c->a.head_dim; d += SK_GROUP) {
    float largest = 0;
    for (int i = 0; i < SK_GROUP && d + i < c->a.head_dim; i++) largest = fmaxf(largest, fabsf(q[d + i] * scale));
    for (int i = 0; i < SK_GROUP && d + i < c->a.head_dim; i++)
      out[d + i] = c->dtype != SK_KV_Q8_0 ? q[d + i]
                   : largest > 0 ? (double)(largest / 127) * rintf(q[d + i] * scale * (127 / largest)) / scale
                                 : 0;
  }
}

/* One head of one query, as the formula is written. Returns how far float32 may be off. */
static double attend_plainly(const attend_case *c, int seq, int token, int head, double *out) {
  const int dim = c->a.head_dim, context = (int)c->contexts[seq];
  const int position = context - (int)(c->starts[seq + 1] - c->starts[seq]) + token;
  double *q = malloc((size_t)dim * sizeof *q);
  read_query(c, c->q + ((size_t)(c->starts[seq] + token) * (size_t)c->a.heads + (size_t)head) * (size_t)dim, q);
  const size_t offset = (size_t)(head / (c->a.heads / c->a.kv_heads)) * (size_t)dim;
  double *scores = malloc((size_t)context * sizeof *scores), largest = -INFINITY, sum = 0, size = 0, far = 0;
  for (int p = 0; p < context; p++) {
    const double *key = c->keys[seq] + (size_t)p * elements(c) + offset;
    double dot = 0, absolute = 0;
    for (int d = 0; d < dim; d++) {
      dot += q[d] * key[d];
      absolute += fabs(q[d] * key[d]);
    }
    dot *= c->a.scale;
    if (c->a.softcap > 0) dot = c->a.softcap * tanh(dot / c->a.softcap);
    scores[p] = sees(&c->a, position, p) ? dot : -INFINITY;
    far = fmax(far, absolute * c->a.scale);
    largest = fmax(largest, scores[p]);
  }
  for (int d = 0; d < dim; d++) out[d] = 0;
  for (int p = 0; p < context; p++) {
    const double weight = exp(scores[p] - largest);
    const double *value = c->values[seq] + (size_t)p * elements(c) + offset;
    sum += weight;
    for (int d = 0; d < dim; d++) {
      out[d] += weight * value[d];
      size = fmax(size, fabs(value[d]));
    }
  }
  for (int d = 0; d < dim; d++) out[d] /= sum;
  free(scores);
  free(q);
  return size * (3e-6 + 4e-7 * far + 1e-6 * c->a.softcap);
}

static void compare(const attend_case *c) {
  const int dim = c->a.head_dim;
  double *expected = malloc((size_t)dim * sizeof *expected);
  for (int s = 0; s < c->batch.seqs; s++)
    for (int token = 0; token < c->starts[s + 1] - c->starts[s]; token++)
      for (int head = 0; head < c->a.heads; head++) {
        const double tolerance = attend_plainly(c, s, token, head, expected);
        const float *got = c->out + ((size_t)(c->starts[s] + token) * (size_t)c->a.heads + (size_t)head) * (size_t)dim;
        for (int d = 0; d < dim; d++)
          fuzz_check(fabs(got[d] - expected[d]) <= tolerance,
                     "sequence %d token %d head %d dim %d: %.8g instead of %.8g, tolerance %.2g (heads %d/%d, dim %d, "
                     "window %d, softcap %g, causal %d, dtype %d, block size %d, context %d)",
                     s, token, head, d, (double)got[d], expected[d], tolerance, c->a.heads, c->a.kv_heads, dim,
                     c->a.window, (double)c->a.softcap, c->a.causal, c->dtype, c->batch.block_size,
                     (int)c->contexts[s]);
      }
  free(expected);
}

/* The only query of a sequence by the kernel for single queries, with scratch memory that ends where it must. */
static void decode_whole(const fuzz_subject *subject, const attend_case *c, int seq, float *out) {
  const size_t at = (size_t)c->starts[seq] * (size_t)c->a.heads * (size_t)c->a.head_dim;
  const int context = (int)c->contexts[seq], from = c->a.window && context > c->a.window ? context - c->a.window : 0;
  subject->context->kernels->decode(&c->a, &c->batch, c->kv, c->dtype, c->q + at, seq, from / SK_KEY_BLOCK,
                                    (context + SK_KEY_BLOCK - 1) / SK_KEY_BLOCK, NULL, out + at,
                                    fuzz_take(sk_decode_lay(&c->a, NULL).bytes, 64));
}

/* The kernels themselves, with queries further apart and scratch memory that ends where it must. */
static void attend_by_units(const fuzz_subject *subject, const attend_case *c, float *out) {
  const size_t row = (size_t)c->a.heads * (size_t)c->a.head_dim, ld = row + (size_t)fuzz_int(0, 9);
  float *q = FUZZ_FLOATS((size_t)c->batch.tokens * ld);
  for (int t = 0; t < c->batch.tokens; t++) memcpy(q + (size_t)t * ld, c->q + (size_t)t * row, row * sizeof *q);
  void *scratch = fuzz_take(sk_attend_lay(&c->a, SK_QUERY_TILE, NULL).bytes, 64);
  for (int s = 0; s < c->batch.seqs; s++) {
    const int queries = (int)(c->starts[s + 1] - c->starts[s]);
    if (queries == 1 && c->batch.slot_mapping && s % 2) {
      decode_whole(subject, c, s, out);
      continue;
    }
    for (int first = 0; first < queries; first += SK_QUERY_TILE) {
      const sk_unit unit = {s, first, first + SK_QUERY_TILE < queries ? first + SK_QUERY_TILE : queries};
      for (int head = 0; head < c->a.kv_heads; head++)
        subject->context->kernels->attend(&c->a, &c->batch, c->kv, c->dtype, q, ld, &unit, head, out, scratch);
    }
  }
}

static float *attend_all(const fuzz_subject *subject, const attend_case *c, int by_units) {
  float *out = FUZZ_FLOATS((size_t)c->batch.tokens * (size_t)c->a.heads * (size_t)c->a.head_dim);
  if (by_units) attend_by_units(subject, c, out);
  else fuzz_check(sk_attend(subject->context, &c->a, &c->batch, c->q, c->kv, c->dtype, out) == 0, "failed");
  return out;
}

/* What the kernels write is what was laid out by hand, byte for byte, and nothing else is touched. */
static void write_all(const fuzz_subject *subject, const attend_case *c) {
  const size_t n = elements(c), bytes = kv_bytes(c, c->slots);
  int tokens = 0;
  for (int s = 0; s < c->batch.seqs; s++) tokens += (int)c->contexts[s];
  float *kv = FUZZ_FLOATS((size_t)tokens * 2 * n), *to = kv;
  int64_t *slots = FUZZ_INTS(tokens), *slot = slots;
  for (int s = 0; s < c->batch.seqs; s++)
    for (int p = 0; p < c->contexts[s]; p++, to += 2 * n) {
      const int size = c->batch.block_size;
      *slot++ = c->batch.block_tables[s * c->batch.max_blocks + p / size] * size + p % size;
      for (size_t i = 0; i < 2 * n; i++)
        to[i] = c->dtype == SK_KV_Q8_0 ? c->raw[s][(size_t)p * 2 * n + i]
                                       : (float)(i < n ? c->keys : c->values)[s][(size_t)p * n + i % n];
    }
  const sk_batch batch = {.tokens = tokens, .slot_mapping = slots};
  uint8_t *cache = take_kv(c, c->slots);
  sk_write_kv(subject->context, &c->a, &batch, kv, c->dtype, cache);
  for (size_t i = 0; i < bytes; i++)
    fuzz_check(cache[i] == ((uint8_t *)c->kv)[i], "byte %zu of the cache is %d instead of %d (dtype %d, dim %d)", i,
               cache[i], ((uint8_t *)c->kv)[i], c->dtype, c->a.head_dim);
}

void fuzz_attend(const fuzz_subject *subject) {
  attend_case c = {0};
  draw_shape(&c);
  const int is_paged = c.dtype == SK_KV_Q8_0 || fuzz_chance(0.7), by_units = fuzz_chance(0.5);
  draw_batch(&c, is_paged);
  if (is_paged) lay_blocks(&c);
  else lay_step(&c);
  c.out = attend_all(subject, &c, by_units);
  compare(&c);
  if (is_paged) {
    /* Neither the blocks nor the number of threads may show. */
    lay_blocks(&c);
    fuzz_subject other = {.isa = subject->isa, .threads = fuzz_int(1, 4)};
    other.context = sk_open(other.isa, other.threads);
    fuzz_check(other.context != NULL, "cannot be opened");
    const float *again = attend_all(&other, &c, by_units);
    sk_close(other.context);
    const size_t bytes = (size_t)c.batch.tokens * (size_t)c.a.heads * (size_t)c.a.head_dim * sizeof(float);
    fuzz_check(memcmp(again, c.out, bytes) == 0, "other blocks or %d threads give other bits", other.threads);
  }
  if (is_paged) write_all(subject, &c);
  for (int s = 0; s < c.batch.seqs; s++) {
    free(c.keys[s]);
    free(c.values[s]);
    free(c.raw[s]);
  }
}
