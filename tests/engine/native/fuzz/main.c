/* Runs the kernels of every instruction set at hand over random shapes, against plain references in double precision.

   fuzz [cases] [seed] [first case]: a case depends on the seed and its number alone, so that one that failed can be run
   again by itself. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#include "support.h"

static uint64_t state;
static long current_case;
static const char *current_kind, *current_isa;
static int current_threads;

void fuzz_seed(uint64_t seed) { state = seed; }

/* splitmix64 (Steele, Lea and Flood, 2014) */
static uint64_t next(void) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

int fuzz_int(int low, int high) { return low + (int)(next() % (uint64_t)(high - low + 1)); }
static double uniform(void) { return (double)(next() >> 11) * 0x1p-53; }
int fuzz_chance(double probability) { return uniform() < probability; }
float fuzz_float(void) { return (float)(2 * uniform() - 1); }
float fuzz_normal(void) {
  double sum = 0;
  for (int i = 0; i < 6; i++) sum += uniform() - 0.5;
  return (float)(sum * 1.41421356);
}

float fuzz_from_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
uint16_t fuzz_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define MOST_BUFFERS 512
static struct {
  void *pages;
  size_t size;
} buffers[MOST_BUFFERS];
static int num_buffers;

void *fuzz_take(size_t bytes, size_t alignment) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), padded = (bytes + alignment - 1) / alignment * alignment;
  const size_t inside = (padded + page - 1) / page * page, size = inside + 2 * page;
  char *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  fuzz_check(pages != MAP_FAILED && num_buffers < MOST_BUFFERS, "no memory for %zu bytes", size);
  memset(pages, 0xff, size); /* NaN in every format; what is never written shows */
  mprotect(pages, page, PROT_NONE);
  mprotect(pages + page + inside, page, PROT_NONE);
  buffers[num_buffers].pages = pages;
  buffers[num_buffers++].size = size;
  return fuzz_chance(0.15) ? pages + page : pages + page + inside - padded;
}

void fuzz_release(void) {
  while (num_buffers) {
    num_buffers--;
    munmap(buffers[num_buffers].pages, buffers[num_buffers].size);
  }
}

void fuzz_check(int holds, const char *format, ...) {
  if (holds) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "case %ld (%s, %s, %d threads): ", current_case, current_kind, current_isa, current_threads);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  exit(1);
}

static struct sigaction other_handler;

/* Says which case it was, and lets the instruction fault again for the handler that was there before. */
static void on_fault(int number) {
  char text[160];
  const int length = snprintf(text, sizeof text, "case %ld (%s, %s, %d threads): touched what is not its own\n",
                              current_case, current_kind, current_isa, current_threads);
  if (write(2, text, (size_t)length) < 0) _exit(1);
  sigaction(number, &other_handler, NULL);
}

static const struct {
  const char *name;
  void (*run)(const fuzz_subject *subject);
} kinds[] = {{"linear", fuzz_linear}, {"attend", fuzz_attend},   {"ggml", fuzz_ggml},    {"attend", fuzz_attend},
             {"choose", fuzz_choose}, {"forward", fuzz_forward}, {"linear", fuzz_linear}, {"encode", fuzz_encode}};
#define NUM_KINDS ((long)(sizeof kinds / sizeof *kinds))

int main(int count, char **arguments) {
  const long cases = count > 1 ? atol(arguments[1]) : 400, first = count > 3 ? atol(arguments[3]) : 0;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
  const struct sigaction handler = {.sa_handler = on_fault};
  sigaction(SIGSEGV, &handler, &other_handler);
  for (current_case = first; current_case < first + cases; current_case++) {
    current_kind = kinds[current_case % NUM_KINDS].name;
    /* Every instruction set gets the very same case. */
    for (int isa = 0; (current_isa = sk_isa(isa)) != NULL; isa++) {
      fuzz_seed(seed * 1000003 + (uint64_t)current_case);
      current_threads = fuzz_chance(0.5) ? 1 : fuzz_int(2, 4);
      fuzz_subject subject = {sk_open(current_isa, current_threads), current_isa, current_threads};
      fuzz_check(subject.context != NULL, "cannot be opened");
      kinds[current_case % NUM_KINDS].run(&subject);
      sk_close(subject.context);
      fuzz_release();
    }
  }
  printf("%ld cases passed:", cases);
  for (int isa = 0; sk_isa(isa); isa++) printf(" %s", sk_isa(isa));
  printf("\n");
  return 0;
}
