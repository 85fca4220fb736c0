/* Attention of a step, cut into pieces for all threads: prompts by queries and KV heads, single queries by sequence, and
   by blocks of keys as well where sequences are few. */
#include "context.h"
#include "decode.h"

typedef struct {
  const sk_context *context;
  const sk_attention *a;
  const sk_batch *batch;
  const float *q;
  size_t ld;
  const void *kv;
  int kv_dtype;
  float *out;
} attention;

/* ---- prompts ---- */

typedef struct {
  const attention *all;
  const sk_unit *units;
} prompt_phase;

static void run_unit(void *job, int chunk, int thread) {
  const prompt_phase *p = job;
  const attention *t = p->all;
  const int kv_heads = t->a->kv_heads;
  t->context->kernels->attend(t->a, t->batch, t->kv, t->kv_dtype, t->q, t->ld, &p->units[chunk / kv_heads],
                              chunk % kv_heads, t->out, t->context->per_thread[thread].data);
}

static int num_queries(const sk_batch *batch, int seq) { return (int)(batch->starts[seq + 1] - batch->starts[seq]); }

/* Without a cache a sequence of one token is a prompt like the others. */
static int is_decode(const sk_batch *batch, int seq) { return batch->slot_mapping && num_queries(batch, seq) == 1; }

/* The longest contexts of a sequence first: what is left for the end should be small. */
static int list_units(const sk_batch *batch, sk_unit *units) {
  int count = 0;
  for (int seq = 0; seq < batch->seqs; seq++) {
    if (is_decode(batch, seq)) continue;
    for (int last = num_queries(batch, seq); last > 0; last -= SK_QUERY_TILE) {
      const int first = last > SK_QUERY_TILE ? last - SK_QUERY_TILE : 0;
      units[count++] = (sk_unit){seq, first, last};
    }
  }
  return count;
}

static int attend_prompts(sk_context *context, const attention *all) {
  const sk_batch *batch = all->batch;
  const size_t most = (size_t)batch->seqs + (size_t)batch->tokens / SK_QUERY_TILE;
  sk_unit *units = sk_reserve(&context->units, (most + 1) * sizeof *units);
  if (!units) return -1;
  prompt_phase phase = {all, units};
  /* Phases are of bounded size: a prefill of a million tokens has more pieces than a phase counts. */
  int chunks = list_units(batch, units) * all->a->kv_heads;
  const int limit = 32768 / all->a->kv_heads * all->a->kv_heads;
  for (; chunks > 0; chunks -= limit, phase.units += limit / all->a->kv_heads)
    sk_pool_run(context->pool, run_unit, &phase, chunks < limit ? chunks : limit);
  return 0;
}

/* ---- single queries ---- */

/* Blocks first..last of a sequence. `part` is the place of its first block among all parts, or -1: it is done whole. */
typedef struct {
  int seq, first, last, part;
} key_range;

typedef struct {
  const attention *all;
  const key_range *ranges;
  char *parts;
} decode_phase;

static const float *query_of(const attention *t, int seq) { return t->q + (size_t)t->batch->starts[seq] * t->ld; }

static float *out_of(const attention *t, int seq) {
  return t->out + (size_t)t->batch->starts[seq] * (size_t)t->a->heads * (size_t)t->a->head_dim;
}

static void run_range(void *job, int chunk, int thread) {
  const decode_phase *p = job;
  const attention *t = p->all;
  const key_range *r = &p->ranges[chunk];
  char *parts = r->part < 0 ? NULL : p->parts + (size_t)r->part * sk_partial_bytes(t->a);
  t->context->kernels->decode(t->a, t->batch, t->kv, t->kv_dtype, query_of(t, r->seq), r->seq, r->first, r->last, parts,
                              out_of(t, r->seq), t->context->per_thread[thread].data);
}

/* The blocks of keys that the last query of a sequence sees. */
static void blocks_of(const sk_attention *a, const sk_batch *batch, int seq, int *first, int *last) {
  const int context = (int)batch->context_lens[seq];
  *first = a->window && context > a->window ? (context - a->window) / SK_KEY_BLOCK : 0;
  *last = (context + SK_KEY_BLOCK - 1) / SK_KEY_BLOCK;
}

/* Sequences are cut where there are fewer of them than keep all threads busy. */
static int list_ranges(const sk_context *context, const attention *t, int decodes, key_range *ranges, int *num_parts) {
  const int threads = context->threads, enough = threads == 1 || decodes >= 2 * threads;
  const int pieces = enough ? 1 : (4 * threads + decodes - 1) / decodes;
  int count = 0;
  for (int seq = 0; seq < t->batch->seqs; seq++) {
    if (!is_decode(t->batch, seq)) continue;
    int first, last;
    blocks_of(t->a, t->batch, seq, &first, &last);
    const int blocks = last - first, cuts = blocks < pieces ? blocks : pieces;
    for (int i = 0; i < cuts; i++) {
      const int from = first + sk_share(blocks, i, cuts), to = first + sk_share(blocks, i + 1, cuts);
      ranges[count++] = (key_range){seq, from, to, cuts == 1 ? -1 : *num_parts + from - first};
    }
    if (cuts > 1) *num_parts += blocks;
  }
  return count;
}

static int attend_singles(sk_context *context, const attention *all, int decodes) {
  const sk_batch *batch = all->batch;
  key_range *ranges = sk_reserve(&context->ranges, (size_t)(decodes + 8 * context->threads) * sizeof *ranges);
  int num_parts = 0;
  if (!ranges) return -1;
  const int chunks = list_ranges(context, all, decodes, ranges, &num_parts);
  char *parts = sk_reserve(&context->parts, (size_t)num_parts * sk_partial_bytes(all->a) + 1);
  if (!parts) return -1;
  decode_phase phase = {all, ranges, parts};
  sk_pool_run(context->pool, run_range, &phase, chunks);
  for (int i = 0; i < chunks; i++) {
    const key_range *r = &ranges[i];
    if (r->part < 0 || (i > 0 && ranges[i - 1].seq == r->seq)) continue;
    int first, last;
    blocks_of(all->a, batch, r->seq, &first, &last);
    context->kernels->join(all->a, parts + (size_t)r->part * sk_partial_bytes(all->a), last - first,
                           out_of(all, r->seq), context->per_thread[0].data);
  }
  return 0;
}

int sk_attend_batch(sk_context *context, const sk_attention *a, const sk_batch *batch, const float *q, size_t ld,
                    const void *kv, int kv_dtype, float *out) {
  const size_t prompt = sk_attend_lay(a, SK_QUERY_TILE, NULL).bytes, single = sk_decode_lay(a, NULL).bytes;
  for (int i = 0; i < context->threads; i++)
    if (!sk_reserve(&context->per_thread[i], prompt > single ? prompt : single)) return -1;
  int decodes = 0;
  for (int seq = 0; seq < batch->seqs; seq++) decodes += is_decode(batch, seq);
  const attention all = {context, a, batch, q, ld, kv, kv_dtype, out};
  if (decodes < batch->seqs && attend_prompts(context, &all) != 0) return -1;
  return decodes > 0 ? attend_singles(context, &all, decodes) : 0;
}
