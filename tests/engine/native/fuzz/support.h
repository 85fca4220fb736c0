/* What the cases share: numbers from a seed, memory whose neighbours must not be touched, and the verdict. */
#ifndef FUZZ_SUPPORT_H
#define FUZZ_SUPPORT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"

/* The kernels under test in this case. */
typedef struct {
  sk_context *context;
  const char *isa;
  int threads;
} fuzz_subject;

/* ---- numbers ---- */

void fuzz_seed(uint64_t seed);
/* low..high, both included. */
int fuzz_int(int low, int high);
int fuzz_chance(double probability);
/* -1..1 */
float fuzz_float(void);
/* About normal, with a variance of 1. */
float fuzz_normal(void);
float fuzz_from_bf16(uint16_t value);
/* To nearest even. */
uint16_t fuzz_to_bf16(float value);

/* ---- memory ---- */

/* `bytes` that end where a page without any access begins, or begin where one ends. Filled with NaN. Valid until
   fuzz_release(). */
void *fuzz_take(size_t bytes, size_t alignment);
void fuzz_release(void);
#define FUZZ_FLOATS(count) ((float *)fuzz_take((size_t)(count) * sizeof(float), sizeof(float)))
#define FUZZ_INTS(count) ((int64_t *)fuzz_take((size_t)(count) * sizeof(int64_t), sizeof(int64_t)))

/* ---- the verdict ---- */

/* Ends the program with a message and the case's number where `holds` is false. */
void fuzz_check(int holds, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- matrices ---- */

/* n channels of k inputs, drawn and packed; `weights` [n, k] are what the packed form stands for. */
typedef struct {
  sk_matrix matrix;
  float *weights;
} fuzz_matrix;
fuzz_matrix fuzz_pack(int format, int n, int k, const float *rows, int has_bias);

/* ---- the cases ---- */

void fuzz_linear(const fuzz_subject *subject);
void fuzz_ggml(const fuzz_subject *subject);
void fuzz_attend(const fuzz_subject *subject);
void fuzz_choose(const fuzz_subject *subject);
void fuzz_forward(const fuzz_subject *subject);
void fuzz_encode(const fuzz_subject *subject);

#endif
