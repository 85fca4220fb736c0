/* From here on functions are compiled for SK_TARGET. Intrinsics' headers must have been included before. */
#if defined(__clang__)
#define SK_DO(x) _Pragma(#x)
#define SK_PUSH(features) SK_DO(clang attribute push(__attribute__((target(features))), apply_to = function))
SK_PUSH(SK_TARGET)
#else
#pragma GCC push_options
#define SK_DO(x) _Pragma(#x)
#define SK_PUSH(features) SK_DO(GCC target(features))
SK_PUSH(SK_TARGET)
#endif
