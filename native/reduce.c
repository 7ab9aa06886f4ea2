/* Reduce kernels of every instruction set, and the choice among them. Pure functions; constant data.
 *
 * The same source is compiled once for each instruction set, without contraction to fused multiply-add, so that all
 * give the same bits (where both operands are NaN, either's payload may survive). It is done here and not by
 * target_clones, so that tests can call each set and no ifunc resolver runs before the sanitizers are initialised. */
#include "reduce.h"

#include <string.h>

const uint8_t zp__itemsize[ZP__DTYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
const uint8_t zp__wide_itemsize[ZP__DTYPES] = {4, 4, 4, 4, 8, 8, 0, 0, 4, 4, 0, 0};

#define ZP__NAME(name) name##_baseline
#define ZP__ISA_NAME "baseline"
#include "reduce_kernels.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define ZP__NAME(name) name##_avx2
#define ZP__ISA_NAME "avx2"
#include "reduce_kernels.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define ZP__NAME(name) name##_avx512
#define ZP__ISA_NAME "avx512"
#include "reduce_kernels.h"
#pragma GCC pop_options
#endif

const zp__reduce_kernels *zp__reduce_kernels_of(enum zp__isa isa)
{
	if (isa == ZP__BASELINE)
		return &kernels_baseline;
#if defined(__x86_64__)
	if (isa == ZP__AVX2 && __builtin_cpu_supports("avx2"))
		return &kernels_avx2;
	if (isa == ZP__AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
	    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
		return &kernels_avx512;
#endif
	return NULL;
}

enum zp__isa zp__isa_best(void)
{
	enum zp__isa isa = ZP__AVX512;
	while (!zp__reduce_kernels_of(isa))
		isa--;
	return isa;
}
