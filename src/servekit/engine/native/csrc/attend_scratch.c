/* How much scratch memory attention wants. */
#include "attend.h"

/* Blocks of keys pass by one at a time, so that nothing grows with the context. */
size_t sk_attend_scratch(const sk_attention *a, int max_context) {
  (void)max_context;
  return sk_attend_lay(a, SK_QUERY_TILE, NULL).bytes;
}
