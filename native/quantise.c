/* Quantisation by blocks to 8 or 4 bits per element. Pure functions; constant data.
 *
 * Format of a frame of n elements in b blocks: the parameters of the b blocks, then the codes of the b blocks. A
 * parameter is a float (for DOUBLE a double) in the hosts' byte order. A code is a byte or half a byte. With half
 * bytes, byte i of a block of m elements has code i in its lower half and code i + ceil(m / 2) in its upper half.
 *
 *                                 | parameters         | value                        | levels: 8 bits | 4 bits
 *   MIN_MAX                       | minimum, scale     | minimum + code * scale       | 255            | 15
 *   ZERO_POINT_SCALE, UINT8 UINT4 | zero point, scale  | (code - zero point) * scale  | 254            | 14
 *   ZERO_POINT_SCALE, INT8 INT4   | scale              | code * scale                 | 127            | 7
 *
 * The scale is span / levels, where span is the range of the block (MIN_MAX), the range extended to include 0
 * (ZERO_POINT_SCALE, unsigned), or the largest magnitude (signed). Codes count from 0; signed codes are two's
 * complement. With MIN_MAX they start at -128 or -8, so that signed and unsigned codes decode to the same values. The
 * zero point is the code of 0, so 0 stays 0. A code is the nearest integer, ties to even: for a value x,
 * ZERO_POINT_SCALE gives q(x) - q(lowest), where q(x) is the integer nearest to x / scale. That may exceed `levels` by
 * one, hence 254 and 14 levels instead of 255 and 15, and no value is clamped. Arithmetic is in float (DOUBLE: in
 * double); values of the 16-bit types are rounded to nearest even when they are stored.
 *
 * Error bound. With s the span and e the largest magnitude of the block, a value is off by at most
 *   s / (2 levels) + 8 epsilon e + the smallest subnormal, plus the rounding of a 16-bit type,
 * with the epsilon of float or double. The parts are: half a step; at most 2 roundings of e in dequantising; and in
 * quantising 3 roundings of up to `levels` steps, that is of s, which is at most 2 e.
 *
 * Special values.
 * - A block that contains a NaN or an infinity becomes NaN throughout (parameters NaN, codes 0). So does one whose sum
 *   overflowed on the way.
 * - A block of equal values is exact with MIN_MAX (scale 0). A block of zeros is always exact; -0 may become +0.
 * - Blocks of subnormals are as exact as others: if the scale itself is subnormal it is rounded up, and codes are
 *   clamped. A block that spans at most `levels` of the smallest subnormals is exact.
 * - A block with magnitudes above a quarter of the largest finite number is computed on values scaled by 1/4; results
 *   saturate at the largest finite number. A value beyond the range of a 16-bit type becomes infinity when it is stored,
 *   as in any conversion; quantisation error may cause that, too.
 * - Invalid parameters (not finite, a negative scale, a zero point that is not a code) make the block NaN; no input
 *   causes undefined behaviour. Dequantised NaNs all have the same bit pattern. */
#include "quantise.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "layout.h"
#include "zp_api.h"

typedef struct { /* [0]: float, [1]: double */
	void (*quantise[2])(const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count);
	void (*fold[2])(const zp__quantiser *how, uint8_t *wire, const void *local, size_t count, uint32_t divisor);
	void (*join[2])(const zp__quantiser *how, uint8_t *wire, const uint8_t *const shares[], uint32_t peers, uint32_t rank,
			const void *local, size_t count, uint32_t divisor);
	void (*dequantise[2])(const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count);
} zp__quantise_kernels;

/* Properties of an algorithm together with a quantised type. */
typedef struct {
	bool zero_point; /* ZERO_POINT_SCALE */
	bool is_signed;
	bool symmetric; /* zero_point and is_signed: no zero point on the wire */
	bool nibble;	/* two codes per byte */
	int32_t middle; /* 128 or 8: offset between signed and unsigned codes */
	int32_t most;	/* 255 or 15: the greatest unsigned code */
	int32_t levels;
	size_t parameter_bytes; /* of a block */
} zp__code;

static zp__code code_of(const zp__quantiser *how)
{
	zp__code code = {.zero_point = how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE,
			 .is_signed = how->quantized == ZP_QUANTIZED_INT8 || how->quantized == ZP_QUANTIZED_INT4,
			 .nibble = zp__quantise_code_bits(how) == 4};
	code.symmetric = code.zero_point && code.is_signed;
	code.middle = code.nibble ? 8 : 128;
	code.most = 2 * code.middle - 1;
	code.levels = code.symmetric ? code.middle - 1 : code.most - code.zero_point;
	code.parameter_bytes = zp__quantise_parameter_bytes(how);
	return code;
}

#define ZP__KERNELS "quantise_kernels.h"
#include "each_isa.h"

static const zp__quantise_kernels *const kernels[ZP__ISA_COUNT] = ZP__OF_EACH_ISA(kernels);

uint32_t zp__quantise_code_bits(const zp__quantiser *how)
{
	return how->quantized == ZP_QUANTIZED_UINT4 || how->quantized == ZP_QUANTIZED_INT4 ? 4 : 8;
}

uint32_t zp__quantise_parameter_bytes(const zp__quantiser *how)
{
	bool is_signed = how->quantized == ZP_QUANTIZED_INT8 || how->quantized == ZP_QUANTIZED_INT4;
	uint32_t parameters = how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE && is_signed ? 1 : 2;
	return parameters * (uint32_t)(how->dtype == ZP_DOUBLE ? sizeof(double) : sizeof(float));
}

int zp__quantise_check(const zp__quantiser *how)
{
	if (how->algorithm != ZP_QUANTIZE_MIN_MAX && how->algorithm != ZP_QUANTIZE_ZERO_POINT_SCALE)
		return -EINVAL;
	if (how->quantized != ZP_QUANTIZED_UINT8 && how->quantized != ZP_QUANTIZED_INT8 &&
	    how->quantized != ZP_QUANTIZED_UINT4 && how->quantized != ZP_QUANTIZED_INT4)
		return -EINVAL;
	if (how->dtype < ZP_FLOAT16 || how->dtype > ZP_DOUBLE || how->op > ZP_MIN)
		return -EINVAL;
	if (how->block_elements < ZP__BLOCK_ELEMENTS_MIN || how->block_elements > ZP__BLOCK_ELEMENTS_MAX)
		return -EINVAL;
	return 0;
}

void zp__quantise(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count)
{
	kernels[isa]->quantise[how->dtype == ZP_DOUBLE](how, wire, elements, count);
}

void zp__quantise_fold(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *local, size_t count,
		       uint32_t divisor)
{
	kernels[isa]->fold[how->dtype == ZP_DOUBLE](how, wire, local, count, divisor);
}

void zp__quantise_join(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const uint8_t *const shares[],
		       uint32_t peers, uint32_t rank, const void *local, size_t count, uint32_t divisor)
{
	kernels[isa]->join[how->dtype == ZP_DOUBLE](how, wire, shares, peers, rank, local, count, divisor);
}

void zp__dequantise(enum zp__isa isa, const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count)
{
	kernels[isa]->dequantise[how->dtype == ZP_DOUBLE](how, elements, wire, count);
}

/* --- Without an engine ------------------------------------------------------------------------------------------- */

static int alone_check(const zp_quantiser *how, uint32_t isa)
{
	if (isa >= ZP__ISA_COUNT)
		return -EINVAL;
	int rc = zp__quantise_check(how);
	return rc < 0 ? rc : zp__reduce_kernels_of((enum zp__isa)isa) ? 0 : -ENOTSUP;
}

int64_t zp_quantised_bytes(const zp_quantiser *how, uint64_t count)
{
	int rc = count > INT64_MAX / 32 ? -EINVAL : zp__quantise_check(how);
	if (rc < 0)
		return rc;
	zp__layout layout = {.block_elements = how->block_elements,
			     .parameter_bytes = zp__quantise_parameter_bytes(how),
			     .code_bits = zp__quantise_code_bits(how)};
	return (int64_t)zp__wire_bytes(&layout, count);
}

int zp_quantise(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *elements, uint64_t count)
{
	int rc = alone_check(how, isa);
	if (rc == 0)
		zp__quantise((enum zp__isa)isa, how, wire, elements, count);
	return rc;
}

int zp_quantise_fold(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const void *local, uint64_t count,
		     uint32_t divisor)
{
	int rc = alone_check(how, isa);
	if (rc == 0 && divisor < 1)
		rc = -EINVAL;
	if (rc == 0)
		zp__quantise_fold((enum zp__isa)isa, how, wire, local, count, divisor);
	return rc;
}

int zp_quantise_join(const zp_quantiser *how, uint32_t isa, uint8_t *wire, const uint8_t *const shares[],
		     uint32_t peers, uint32_t rank, const void *local, uint64_t count, uint32_t divisor)
{
	int rc = alone_check(how, isa);
	if (rc == 0 && (peers < 2 || rank >= peers || divisor < 1))
		rc = -EINVAL;
	if (rc == 0)
		zp__quantise_join((enum zp__isa)isa, how, wire, shares, peers, rank, local, count, divisor);
	return rc;
}

int zp_dequantise(const zp_quantiser *how, uint32_t isa, void *elements, const uint8_t *wire, uint64_t count)
{
	int rc = alone_check(how, isa);
	if (rc == 0)
		zp__dequantise((enum zp__isa)isa, how, elements, wire, count);
	return rc;
}
