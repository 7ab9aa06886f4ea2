/* Quantisation by blocks to one byte an element. Pure functions; constant data.
 *
 * Format of a frame of n elements in b blocks: b pairs of parameters, then n codes. The parameters are two floats (two
 * doubles for DOUBLE) in the hosts' byte order.
 *   MIN_MAX           parameters: minimum, scale.     value = minimum + code * scale
 *   ZERO_POINT_SCALE  parameters: zero point, scale.  value = (code - zero point) * scale; the zero point is an integer
 *                     from 0 to 255, so 0 stays 0
 * Codes are rounded to nearest. Arithmetic is in float (DOUBLE: in double); the 16-bit types are rounded to nearest
 * even when the value is stored.
 *
 * Errors. With r the range of a block (that of ZERO_POINT_SCALE includes 0) and e the largest magnitude in it, a value
 * is off by at most r/510 (MIN_MAX) or r/255 (ZERO_POINT_SCALE, whose zero point is rounded, too) plus a few
 * roundings of e and 255 of the smallest subnormals, plus the rounding of a 16-bit type.
 *
 * Special values.
 * - A block with a NaN or an infinity in it becomes NaN throughout (parameters NaN, codes 0). So does one whose sum
 *   overflowed on the way.
 * - A block of equal values is exact with MIN_MAX (scale 0). A block of zeros is exact with both; -0 may become +0.
 * - A block whose range is below 255 times the smallest subnormal may have scale 0: all its values become the minimum
 *   (MIN_MAX) or 0.
 * - A block whose range overflows is computed in halves; values that would round beyond the largest finite number are
 *   that number. A FLOAT16 value that rounds above 65504 becomes infinity, as any conversion to it does.
 * - Parameters that no peer would send give some number or NaN, the same on every peer; nothing is undefined. */
#include "quantise.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "zp_api.h"

#define LANES 16

typedef struct { /* [0]: float, [1]: double */
	void (*quantise[2])(const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count);
	void (*fold[2])(const zp__quantiser *how, uint8_t *wire, const void *local, size_t count, uint32_t divisor);
	void (*dequantise[2])(const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count);
} zp__quantise_kernels;

#define ZP__NAME(name) name##_baseline
#define ZP__VECTOR_BYTES 16
#include "quantise_kernels.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define ZP__NAME(name) name##_avx2
#define ZP__VECTOR_BYTES 32
#include "quantise_kernels.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define ZP__NAME(name) name##_avx512
#define ZP__VECTOR_BYTES 64
#include "quantise_kernels.h"
#pragma GCC pop_options
#endif

static const zp__quantise_kernels *kernels_of(enum zp__isa isa)
{
#if defined(__x86_64__)
	if (isa == ZP__AVX2)
		return &kernels_avx2;
	if (isa == ZP__AVX512)
		return &kernels_avx512;
#endif
	(void)isa;
	return &kernels_baseline;
}

uint32_t zp__quantise_parameter_bytes(uint32_t dtype)
{
	return 2 * (dtype == ZP_DOUBLE ? sizeof(double) : sizeof(float));
}

void zp__quantise(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count)
{
	kernels_of(isa)->quantise[how->dtype == ZP_DOUBLE](how, wire, elements, count);
}

void zp__quantise_fold(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *local, size_t count,
		       uint32_t divisor)
{
	kernels_of(isa)->fold[how->dtype == ZP_DOUBLE](how, wire, local, count, divisor);
}

void zp__dequantise(enum zp__isa isa, const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count)
{
	kernels_of(isa)->dequantise[how->dtype == ZP_DOUBLE](how, elements, wire, count);
}
