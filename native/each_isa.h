/* Includes the header ZP__KERNELS once for each instruction set of this build. In that header, ZP__NAME(name) is the
 * name of the copy for one set, ZP__ISA_NAME the name of the set, and ZP__INDEPENDENT stands before a loop whose
 * elements do not depend on each other. Afterwards ZP__OF_EACH_ISA(name) initialises an array of pointers to the
 * copies, by enum zp__isa.
 *
 * The copies differ only in the instructions that the compiler may use, without contraction to fused multiply-add, so
 * all give the same bits. Machines other than x86-64 have only the baseline; on 64-bit ARM it is NEON. Pragmas choose
 * the sets, because setuptools has no compiler flags for a single file. target_clones is not used, so that tests can
 * call each set and no ifunc resolver runs before the sanitizers are initialised. */
#define ZP__PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ZP__TARGET_PUSH(set) ZP__PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define ZP__TARGET_POP ZP__PRAGMA(clang attribute pop)
#define ZP__INDEPENDENT ZP__PRAGMA(clang loop vectorize(assume_safety))
#else
/* Without this option gcc uses 256-bit vectors where it could use 512. */
#define ZP__TARGET_PUSH(set) ZP__PRAGMA(GCC push_options) ZP__PRAGMA(GCC target(set ",prefer-vector-width=512"))
#define ZP__TARGET_POP ZP__PRAGMA(GCC pop_options)
#define ZP__INDEPENDENT ZP__PRAGMA(GCC ivdep)
#endif

#define ZP__NAME(name) name##_baseline
#define ZP__ISA_NAME "baseline"
#include ZP__KERNELS
#undef ZP__NAME
#undef ZP__ISA_NAME

#if defined(__x86_64__)
ZP__TARGET_PUSH("avx2")
#define ZP__NAME(name) name##_avx2
#define ZP__ISA_NAME "avx2"
#include ZP__KERNELS
#undef ZP__NAME
#undef ZP__ISA_NAME
ZP__TARGET_POP

ZP__TARGET_PUSH("avx512f,avx512bw,avx512dq,avx512vl")
#define ZP__NAME(name) name##_avx512
#define ZP__ISA_NAME "avx512"
#include ZP__KERNELS
#undef ZP__NAME
#undef ZP__ISA_NAME
ZP__TARGET_POP

#define ZP__OF_EACH_ISA(name) {&name##_baseline, &name##_avx2, &name##_avx512}
#else
#define ZP__OF_EACH_ISA(name) {&name##_baseline}
#endif
