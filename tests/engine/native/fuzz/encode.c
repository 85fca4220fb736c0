/* Whole encoders: every instruction set against the kernels in plain C. */
#include "support.h"

#define MOST_LAYERS 3

static float *draw(size_t count, double middle, double width) {
  float *x = FUZZ_FLOATS(count);
  for (size_t i = 0; i < count; i++) x[i] = (float)(middle + width * fuzz_normal());
  return x;
}

static sk_matrix draw_matrix(int format, int n, int k) {
  return fuzz_pack(format, n, k, draw((size_t)n * (size_t)k, 0, 1 / sqrt(k)), fuzz_chance(0.5)).matrix;
}

static float *draw_bias(int has_bias, int k) { return has_bias ? draw((size_t)k, 0, 0.1) : NULL; }

static sk_encoder draw_encoder(sk_encoder_layer *layers, int most_positions) {
  const int format = fuzz_int(SK_Q4, SK_BF16), hidden = fuzz_int(20, 150), dim = 2 * fuzz_int(4, 40);
  const int wide = fuzz_int(1, 6) * 32 - (fuzz_chance(0.5) ? fuzz_int(0, 31) : 0), biased = fuzz_chance(0.5);
  sk_encoder e = {.num_layers = fuzz_int(1, MOST_LAYERS), .hidden = hidden, .activation = fuzz_int(SK_SILU, SK_RELU),
                  .pre_norm = fuzz_chance(0.5), .gated = fuzz_chance(0.5), .eps = 1e-5f, .layers = layers};
  e.embedding_norm = draw((size_t)hidden, 1, 0.1);
  e.embedding_norm_bias = draw_bias(biased, hidden);
  if (e.pre_norm) {
    e.final_norm = draw((size_t)hidden, 1, 0.1);
    e.final_norm_bias = draw_bias(biased, hidden);
  }
  const int turns = fuzz_chance(0.5);
  const float *cosines = draw((size_t)(most_positions * dim / 2), 0, 0.6), *sines = draw((size_t)(most_positions * dim / 2), 0, 0.6);
  const int heads = fuzz_int(1, 4), padded = (wide + 31) / 32 * 32;
  for (int i = 0; i < e.num_layers; i++) {
    sk_encoder_layer *layer = &layers[i];
    *layer = (sk_encoder_layer){.cos = turns ? cosines : NULL, .sin = turns ? sines : NULL};
    if (!e.pre_norm || i > 0) {
      layer->attention_norm = draw((size_t)hidden, 1, 0.1);
      layer->attention_norm_bias = draw_bias(biased, hidden);
    }
    layer->mlp_norm = draw((size_t)hidden, 1, 0.1);
    layer->mlp_norm_bias = draw_bias(biased, hidden);
    layer->attention = (sk_attention){.heads = heads, .kv_heads = heads, .head_dim = dim, .scale = 1 / sqrtf((float)dim),
                                      .window = fuzz_chance(0.3) ? fuzz_int(1, 30) : 0};
    layer->qkv = draw_matrix(format, 3 * heads * dim, hidden);
    layer->output = draw_matrix(format, hidden, heads * dim);
    layer->up = draw_matrix(format, e.gated ? 2 * padded : padded, hidden);
    layer->down = draw_matrix(format, hidden, padded);
  }
  return e;
}

void fuzz_encode(const fuzz_subject *subject) {
  sk_encoder_layer layers[MOST_LAYERS];
  const int most = 50, seqs = fuzz_int(1, 4);
  const sk_encoder encoder = draw_encoder(layers, most);
  int64_t *starts = FUZZ_INTS(seqs + 1), *contexts = FUZZ_INTS(seqs);
  starts[0] = 0;
  for (int s = 0; s < seqs; s++) {
    contexts[s] = fuzz_int(1, most);
    starts[s + 1] = starts[s] + contexts[s];
  }
  const int tokens = (int)starts[seqs];
  int64_t *positions = FUZZ_INTS(tokens);
  for (int s = 0; s < seqs; s++)
    for (int64_t t = starts[s]; t < starts[s + 1]; t++) positions[t] = t - starts[s];
  const sk_batch batch = {.tokens = tokens, .seqs = seqs, .positions = positions, .starts = starts, .context_lens = contexts};
  const size_t count = (size_t)tokens * (size_t)encoder.hidden;
  float *x = draw(count, 0, 1), *plain = FUZZ_FLOATS(count);
  memcpy(plain, x, count * sizeof *x);
  sk_context *context = sk_open("generic", 1);
  fuzz_check(context && sk_encode(context, &encoder, &batch, plain) == 0, "plain C failed");
  sk_close(context);
  fuzz_check(sk_encode(subject->context, &encoder, &batch, x) == 0, "failed");
  double off = 0, size = 0;
  for (size_t i = 0; i < count; i++) {
    off += ((double)x[i] - plain[i]) * ((double)x[i] - plain[i]);
    size += (double)plain[i] * plain[i];
  }
  fuzz_check(sqrt(off) <= 0.02 * sqrt(size), "off by %.2g of %.2g", sqrt(off), sqrt(size));
}
