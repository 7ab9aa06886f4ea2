/* Reduce kernels of every instruction set, and the choice among them. Pure functions; constant data. */
#include "reduce.h"

#include <stdbool.h>
#include <string.h>

const uint8_t zp__itemsize[ZP__DTYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
const uint8_t zp__wide_itemsize[ZP__DTYPES] = {4, 4, 4, 4, 8, 8, 0, 0, 4, 4, 0, 0};

#define ZP__KERNELS "reduce_kernels.h"
#include "each_isa.h"

static const zp__reduce_kernels *const kernels[ZP__ISA_COUNT] = ZP__OF_EACH_ISA(kernels);

static bool cpu_has(enum zp__isa isa)
{
#if defined(__x86_64__)
	if (isa == ZP__AVX2)
		return __builtin_cpu_supports("avx2");
	if (isa == ZP__AVX512)
		return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
		       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
	return isa == ZP__BASELINE;
}

const zp__reduce_kernels *zp__reduce_kernels_of(enum zp__isa isa)
{
	return cpu_has(isa) ? kernels[isa] : NULL;
}

enum zp__isa zp__isa_best(void)
{
	enum zp__isa isa = ZP__AVX512;
	while (!zp__reduce_kernels_of(isa))
		isa--;
	return isa;
}
