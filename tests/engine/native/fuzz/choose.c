/* Choosing tokens: the token must be the one whose share of the distribution holds the uniform number. */
#include "support.h"

static int descending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

/* The smallest weight that survives top_k, top_p and min_p, where the largest is 1. */
static double threshold_of(const double *weights, int n, const sk_choice *choice, double top_p) {
  double *sorted = malloc((size_t)n * sizeof *sorted), mass = 0, before = 0;
  memcpy(sorted, weights, (size_t)n * sizeof *sorted);
  qsort(sorted, (size_t)n, sizeof *sorted, descending);
  int count = choice->top_k > 0 && choice->top_k < n ? choice->top_k : n, kept = 0;
  for (int i = 0; i < count; i++) mass += sorted[i];
  while (kept < count && (top_p >= 1 || before < top_p * mass)) before += sorted[kept++];
  const double nucleus = kept ? sorted[kept - 1] : 0;
  free(sorted);
  return fmax(nucleus, choice->min_p);
}

/* Whether the draw may be `token` under this threshold; sums of float32 may be off by a little. */
static int may_be(const double *weights, int n, double threshold, double uniform, int64_t token) {
  const double cut = threshold * (1 - 1e-5);
  double total = 0, before = 0;
  for (int i = 0; i < n; i++) {
    if (weights[i] < cut) continue;
    if (i < token) before += weights[i];
    total += weights[i];
  }
  if (weights[token] < cut || weights[token] == 0) return 0;
  return before - 1e-4 * total <= uniform * total && uniform * total <= before + weights[token] + 1e-4 * total;
}

static void check_draw(const float *scores, int n, const sk_choice *choice, int64_t token) {
  float largest = scores[0];
  int64_t first = 0;
  for (int i = 1; i < n; i++)
    if (scores[i] > largest) {
      largest = scores[i];
      first = i;
    }
  fuzz_check(token >= 0 && token < n, "token %d of %d", (int)token, n);
  if (choice->temperature <= 0) {
    fuzz_check(token == first, "token %d, and the most likely is %d", (int)token, (int)first);
    return;
  }
  double *weights = malloc((size_t)n * sizeof *weights);
  for (int i = 0; i < n; i++) weights[i] = exp(((double)scores[i] - largest) / choice->temperature);
  int fits = 0;
  for (int i = -1; i <= 1; i++) {
    const double top_p = choice->top_p >= 1 ? 1 : choice->top_p * (1 + 1e-5 * i);
    fits |= may_be(weights, n, threshold_of(weights, n, choice, top_p), choice->uniform, token);
  }
  fuzz_check(fits, "token %d of %d with weight %g: temperature %g, top_k %d, top_p %g, min_p %g, uniform %g", (int)token,
             n, weights[token], (double)choice->temperature, choice->top_k, (double)choice->top_p,
             (double)choice->min_p, choice->uniform);
  free(weights);
}

void fuzz_choose(const fuzz_subject *subject) {
  const int rows = fuzz_int(0, 6), n = fuzz_chance(0.3) ? fuzz_int(1000, 5000) : fuzz_int(1, 100);
  float *scores = FUZZ_FLOATS((size_t)rows * (size_t)n);
  sk_choice *choices = fuzz_take((size_t)rows * sizeof *choices, sizeof(double));
  int64_t *tokens = FUZZ_INTS(rows);
  for (int i = 0; i < rows * n; i++) {
    scores[i] = fuzz_normal() * 3;
    if (fuzz_chance(0.1)) scores[i] = floorf(scores[i]); /* equals */
    if (fuzz_chance(0.05) && i % n) scores[i] = -INFINITY; /* forbidden */
  }
  for (int i = 0; i < rows; i++)
    choices[i] = (sk_choice){.uniform = fuzz_chance(0.1) ? 0.0 : fabs((double)fuzz_float()) * 0.9999999,
                             .temperature = fuzz_chance(0.3) ? 0.0f : 0.1f + 2 * fabsf(fuzz_float()),
                             .top_p = fuzz_chance(0.5) ? 1.0f : 0.05f + 0.9f * fabsf(fuzz_float()),
                             .min_p = fuzz_chance(0.7) ? 0.0f : 0.5f * fabsf(fuzz_float()),
                             .top_k = fuzz_chance(0.5) ? 0 : fuzz_int(1, 50)};
  fuzz_check(sk_choose(subject->context, scores, rows, n, choices, tokens) == 0, "failed");
  for (int i = 0; i < rows; i++) check_draw(scores + (size_t)i * n, n, &choices[i], tokens[i]);
}
