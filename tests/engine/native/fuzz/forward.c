/* Whole steps of small decoders, in chunks through a paged cache, against the same decoder in double precision.

   The reference knows neither the cache nor the rounding of activations, so the bound is on the error of a whole
   hidden state; single kernels have bounds of their own in the other cases. */
#include "kv_q8.h"
#include "support.h"

#define MOST_LAYERS 3
#define MOST_SEQS 3

typedef struct {
  sk_decoder decoder;
  sk_layer layers[MOST_LAYERS];
  float *qkv[MOST_LAYERS], *output[MOST_LAYERS], *gate[MOST_LAYERS], *up[MOST_LAYERS], *down[MOST_LAYERS];
  int most_positions;
} model;

static float *draw(size_t count, double middle, double width) {
  float *x = FUZZ_FLOATS(count);
  for (size_t i = 0; i < count; i++) x[i] = (float)(middle + width * fuzz_normal());
  return x;
}

static fuzz_matrix draw_matrix(int format, int n, int k) {
  return fuzz_pack(format, n, k, draw((size_t)n * (size_t)k, 0, 1 / sqrt(k)), fuzz_chance(0.3));
}

/* Panels of gate and up in turn, each padded to 32 channels. */
static sk_matrix draw_gate_up(int format, int intermediate, int k, float **gate, float **up) {
  const int padded = (intermediate + 31) / 32 * 32;
  float *rows = draw(2 * (size_t)padded * (size_t)k, 0, 1 / sqrt(k));
  for (int i = intermediate; i < padded; i++)
    for (int part = 0; part < 2; part++)
      memset(rows + (size_t)(i / 16 * 32 + part * 16 + i % 16) * k, 0, (size_t)k * sizeof *rows);
  const fuzz_matrix m = fuzz_pack(format, 2 * padded, k, rows, 0);
  *gate = FUZZ_FLOATS((size_t)intermediate * (size_t)k);
  *up = FUZZ_FLOATS((size_t)intermediate * (size_t)k);
  for (int i = 0; i < intermediate; i++) {
    const float *from = m.weights + (size_t)(i / 16 * 32 + i % 16) * k;
    memcpy(*gate + (size_t)i * k, from, (size_t)k * sizeof *from);
    memcpy(*up + (size_t)i * k, from + (size_t)16 * k, (size_t)k * sizeof *from);
  }
  return m.matrix;
}

static void draw_model(model *m, int num_blocks, int block_size) {
  const int format = fuzz_int(SK_Q4, SK_BF16), hidden = fuzz_int(20, 150), intermediate = fuzz_int(20, 200);
  const int kv_dtype = block_size % SK_KV_TILE ? fuzz_int(SK_KV_F32, SK_KV_BF16) : SK_KV_Q8_0;
  const int kv_heads = fuzz_int(1, 3), heads = kv_heads * fuzz_int(1, 4);
  const int dim = kv_dtype == SK_KV_Q8_0 ? SK_GROUP * fuzz_int(1, 3) : 2 * fuzz_int(4, 40);
  const int post_norms = fuzz_chance(0.3), qk_norm = fuzz_chance(0.4);
  m->decoder = (sk_decoder){.num_layers = fuzz_int(1, MOST_LAYERS), .hidden = hidden,
                            .activation = fuzz_int(SK_SILU, SK_RELU), .kv_dtype = kv_dtype,
                            .eps = 1e-5f, .layers = m->layers};
  m->decoder.final_norm = draw((size_t)hidden, 1, 0.1);
  float *cosines = FUZZ_FLOATS(m->most_positions * dim / 2), *sines = FUZZ_FLOATS(m->most_positions * dim / 2);
  for (int i = 0; i < m->most_positions * dim / 2; i++) {
    const double angle = (i / (dim / 2)) * pow(10000.0, -2.0 * (i % (dim / 2)) / dim);
    cosines[i] = (float)cos(angle);
    sines[i] = (float)sin(angle);
  }
  const size_t element = kv_dtype == SK_KV_F32 ? 4 : 2, numbers = 2 * (size_t)(kv_heads * dim);
  const size_t slot = kv_dtype == SK_KV_Q8_0 ? numbers * 34 / 32 : numbers * element;
  for (int i = 0; i < m->decoder.num_layers; i++) {
    sk_layer *layer = &m->layers[i];
    layer->input_norm = draw((size_t)hidden, 1, 0.1);
    layer->mlp_norm = draw((size_t)hidden, 1, 0.1);
    if (post_norms) {
      layer->post_attention_norm = draw((size_t)hidden, 1, 0.1);
      layer->post_mlp_norm = draw((size_t)hidden, 1, 0.1);
    }
    if (qk_norm) layer->qk_norm = draw((size_t)(heads + kv_heads) * (size_t)dim, 1, 0.1);
    layer->cos = cosines;
    layer->sin = sines;
    layer->attention = (sk_attention){.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .causal = 1,
                                      .window = fuzz_chance(0.3) ? fuzz_int(1, 30) : 0,
                                      .softcap = fuzz_chance(0.2) ? 30.0f : 0.0f, .scale = 1 / sqrtf((float)dim)};
    const fuzz_matrix qkv = draw_matrix(format, (heads + 2 * kv_heads) * dim, hidden);
    const fuzz_matrix output = draw_matrix(format, hidden, heads * dim), down = draw_matrix(format, hidden, intermediate);
    layer->qkv = qkv.matrix;
    layer->output = output.matrix;
    layer->down = down.matrix;
    layer->gate_up = draw_gate_up(format, intermediate, hidden, &m->gate[i], &m->up[i]);
    m->qkv[i] = qkv.weights;
    m->output[i] = output.weights;
    m->down[i] = down.weights;
    layer->cache = fuzz_take((size_t)num_blocks * (size_t)block_size * slot, element);
  }
}

/* ---- the reference ---- */

static void multiply(const float *w, const float *bias, int n, int k, const double *x, double *out) {
  for (int i = 0; i < n; i++) {
    double sum = bias ? bias[i] : 0;
    for (int j = 0; j < k; j++) sum += w[(size_t)i * k + j] * x[j];
    out[i] = sum;
  }
}

static void norm(const double *x, const float *weight, double eps, int k, double *out) {
  double sum = 0;
  for (int i = 0; i < k; i++) sum += x[i] * x[i];
  const double factor = 1 / sqrt(sum / k + eps);
  for (int i = 0; i < k; i++) out[i] = x[i] * factor * weight[i];
}

static double activate(double x, int activation) {
  if (activation == SK_SILU) return x / (1 + exp(-x));
  if (activation == SK_RELU) return x > 0 ? x : 0;
  if (activation == SK_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
  return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void add(double *x, double *part, const float *weight, double eps, int k) {
  if (weight) norm(part, weight, eps, k, part);
  for (int i = 0; i < k; i++) x[i] += part[i];
}

static void rotate(const sk_layer *layer, int position, double *head, int dim) {
  for (int i = 0; i < dim / 2; i++) {
    const double c = layer->cos[position * (dim / 2) + i], s = layer->sin[position * (dim / 2) + i];
    const double a = head[i], b = head[i + dim / 2];
    head[i] = a * c - b * s;
    head[i + dim / 2] = b * c + a * s;
  }
}

/* Queries, keys and values of all tokens -> what attention gives for token t. */
static void attend(const sk_attention *a, const double *qkv, int t, double *out) {
  const int dim = a->head_dim, row = (a->heads + 2 * a->kv_heads) * dim;
  for (int h = 0; h < a->heads; h++) {
    const int kv = h / (a->heads / a->kv_heads), first = a->window && t >= a->window ? t - a->window + 1 : 0;
    double sum = 0;
    for (int d = 0; d < dim; d++) out[h * dim + d] = 0;
    for (int p = first; p <= t; p++) {
      const double *key = qkv + (size_t)p * row + (a->heads + kv) * dim, *value = key + a->kv_heads * dim;
      double score = 0;
      for (int d = 0; d < dim; d++) score += qkv[(size_t)t * row + h * dim + d] * key[d];
      score *= a->scale;
      if (a->softcap > 0) score = a->softcap * tanh(score / a->softcap);
      const double weight = exp(score);
      sum += weight;
      for (int d = 0; d < dim; d++) out[h * dim + d] += weight * value[d];
    }
    for (int d = 0; d < dim; d++) out[h * dim + d] /= sum;
  }
}

/* Hidden states x [tokens, hidden] of one sequence through all layers. */
static void run_plainly(const model *m, double *x, int tokens) {
  const int hidden = m->decoder.hidden, wide = m->layers[0].down.k;
  const double eps = m->decoder.eps;
  double *normed = malloc((size_t)hidden * sizeof *normed), *part = malloc((size_t)hidden * sizeof *part);
  double *gate = malloc((size_t)wide * sizeof *gate), *up = malloc((size_t)wide * sizeof *up);
  for (int i = 0; i < m->decoder.num_layers; i++) {
    const sk_layer *layer = &m->layers[i];
    const sk_attention *a = &layer->attention;
    const int dim = a->head_dim, row = (a->heads + 2 * a->kv_heads) * dim;
    double *qkv = malloc((size_t)tokens * (size_t)row * sizeof *qkv);
    double *attended = malloc((size_t)(a->heads * dim) * sizeof *attended);
    for (int t = 0; t < tokens; t++) {
      norm(x + (size_t)t * hidden, layer->input_norm, eps, hidden, normed);
      multiply(m->qkv[i], layer->qkv.bias, row, hidden, normed, qkv + (size_t)t * row);
      for (int h = 0; h < a->heads + a->kv_heads; h++) {
        double *head = qkv + (size_t)t * row + h * dim;
        if (layer->qk_norm) norm(head, layer->qk_norm + h * dim, eps, dim, head);
        rotate(layer, t, head, dim);
      }
    }
    for (int t = 0; t < tokens; t++) {
      double *at = x + (size_t)t * hidden;
      attend(a, qkv, t, attended);
      multiply(m->output[i], layer->output.bias, hidden, a->heads * dim, attended, part);
      add(at, part, layer->post_attention_norm, eps, hidden);
      norm(at, layer->mlp_norm, eps, hidden, normed);
      multiply(m->gate[i], NULL, wide, hidden, normed, gate);
      multiply(m->up[i], NULL, wide, hidden, normed, up);
      for (int j = 0; j < wide; j++) gate[j] = activate(gate[j], m->decoder.activation) * up[j];
      multiply(m->down[i], layer->down.bias, hidden, wide, gate, part);
      add(at, part, layer->post_mlp_norm, eps, hidden);
    }
    free(qkv);
    free(attended);
  }
  for (int t = 0; t < tokens; t++) norm(x + (size_t)t * hidden, m->decoder.final_norm, eps, hidden, x + (size_t)t * hidden);
  free(normed);
  free(part);
  free(gate);
  free(up);
}

/* ---- steps ---- */

typedef struct {
  int length, done; /* tokens in all, and those that the cache holds */
  float *x;
  double *expected;
  const int64_t *table;
} text;

/* The next tokens of every text in one step. */
static void run_step(const fuzz_subject *subject, const model *m, text *texts, int seqs, sk_batch *batch) {
  const int hidden = m->decoder.hidden;
  int64_t *starts = FUZZ_INTS(seqs + 1), *contexts = FUZZ_INTS(seqs);
  starts[0] = 0;
  for (int s = 0; s < seqs; s++) {
    const int left = texts[s].length - texts[s].done;
    const int queries = left == 0 ? 0 : fuzz_chance(0.5) ? 1 : fuzz_int(1, left);
    starts[s + 1] = starts[s] + queries;
    contexts[s] = texts[s].done + queries;
  }
  batch->tokens = (int)starts[seqs];
  batch->starts = starts;
  batch->context_lens = contexts;
  int64_t *positions = FUZZ_INTS(batch->tokens), *slots = FUZZ_INTS(batch->tokens);
  float *x = FUZZ_FLOATS((size_t)batch->tokens * (size_t)hidden), *out = FUZZ_FLOATS((size_t)batch->tokens * (size_t)hidden);
  for (int s = 0; s < seqs; s++)
    for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
      const int64_t p = positions[t] = texts[s].done + t - starts[s];
      slots[t] = texts[s].table[p / batch->block_size] * batch->block_size + p % batch->block_size;
      memcpy(x + (size_t)t * hidden, texts[s].x + (size_t)p * hidden, (size_t)hidden * sizeof *x);
    }
  batch->positions = positions;
  batch->slot_mapping = slots;
  fuzz_check(sk_forward(subject->context, &m->decoder, batch, x, out) == 0, "failed");
  for (int s = 0; s < seqs; s++) {
    for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
      const double *expected = texts[s].expected + (size_t)(texts[s].done + t - starts[s]) * hidden;
      double off = 0, size = 0;
      for (int i = 0; i < hidden; i++) {
        off += (out[t * hidden + i] - expected[i]) * (out[t * hidden + i] - expected[i]);
        size += expected[i] * expected[i];
      }
      fuzz_check(sqrt(off) <= 0.06 * sqrt(size), "sequence %d position %d: off by %.2g of %.2g (format %d)", s,
                 (int)positions[t], sqrt(off), sqrt(size), m->layers[0].qkv.format);
    }
    texts[s].done = (int)contexts[s];
  }
}

void fuzz_forward(const fuzz_subject *subject) {
  model m = {.most_positions = 60};
  text texts[MOST_SEQS];
  const int seqs = fuzz_int(1, MOST_SEQS), block_size = fuzz_chance(0.4) ? SK_KV_TILE * fuzz_int(1, 3) : fuzz_int(1, 32);
  sk_batch batch = {.seqs = seqs, .block_size = block_size, .max_blocks = (m.most_positions + block_size - 1) / block_size};
  draw_model(&m, seqs * batch.max_blocks, block_size);
  int64_t *tables = FUZZ_INTS(seqs * batch.max_blocks);
  for (int i = 0; i < seqs * batch.max_blocks; i++) tables[i] = seqs * batch.max_blocks - 1 - i;
  batch.block_tables = tables;
  for (int s = 0; s < seqs; s++) {
    texts[s] = (text){.length = fuzz_int(1, m.most_positions), .table = tables + s * batch.max_blocks};
    const size_t count = (size_t)texts[s].length * (size_t)m.decoder.hidden;
    texts[s].x = draw(count, 0, 1);
    texts[s].expected = malloc(count * sizeof(double));
    for (size_t i = 0; i < count; i++) texts[s].expected[i] = texts[s].x[i];
    run_plainly(&m, texts[s].expected, texts[s].length);
  }
  for (int step = 0; step < 4; step++) run_step(subject, &m, texts, seqs, &batch);
  for (int s = 0; s < seqs; s++) free(texts[s].expected);
}
