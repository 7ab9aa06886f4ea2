/* Reduces many shares to one, in pieces that stay in the cache. Pinned: the caller owns the memory of the slot. */
#include "buffers.h"

/* NULL: widening gains nothing, as for the sum of two, which is rounded once in any case. */
static const zp__wide_kernels *wide_kernels_of(const zp_reduce_plan *plan, const zp__join *join)
{
	const zp__wide_kernels *wide = &zp__reduce_kernels_of(zp__isa_best())->wide[plan->dtype];
	return wide->fold[plan->op] && (join->count > 2 || join->divisor > 1) ? wide : NULL;
}

/* Like piece_join(), with widened elements: rounded once, when the result is stored. */
static void piece_join_wide(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own,
			    uint8_t *shares, size_t at, size_t count)
{
	uint32_t sums[ZP__WIDE_PIECE_BYTES]; /* at most 4 bytes of sum for each byte of an element */
	const zp__wide_kernels *wide = wide_kernels_of(&attempt->plan, join);
	for (uint32_t i = 0; i < join->count; i++) {
		uint32_t other = i - (i > join->place);
		const uint8_t *share = (i == join->place ? own : shares + other * attempt->layout.wire_stride) + at;
		uint32_t inputs = i == join->place || !join->inputs ? 1 : join->inputs[other];
		if (i == 0)
			wide->widen(sums, share, count);
		else if (inputs == 1)
			wide->fold[attempt->plan.op](sums, share, count);
		if (inputs > 1)
			wide->fold_mean(sums, share, count, inputs - (i == 0));
	}
	wide->narrow(result + at, sums, count, join->divisor);
}

/* Reduces `count` elements of all shares, `at` bytes from their start. Each element is read before it is written. */
static void piece_join(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own, uint8_t *shares,
		       size_t at, size_t count)
{
	const zp_reduce_plan *plan = &attempt->plan;
	const zp__reduce_kernels *kernels = zp__reduce_kernels_of(zp__isa_best());
	size_t stride = attempt->layout.wire_stride;
	uint8_t *sum = shares + at;
	const uint8_t *so_far = join->place == 0 ? own + at : sum;
	for (uint32_t i = 1; i < join->count; i++) {
		const uint8_t *next = i == join->place ? own + at : shares + (i - (i > join->place)) * stride + at;
		uint8_t *to = i + 1 == join->count ? result + at : sum;
		kernels->reduce[plan->dtype][plan->op](to, so_far, next, count);
		so_far = to;
	}
	if (join->divisor > 1)
		kernels->divide[plan->dtype](result + at, count, join->divisor);
}

#define NANS_REPLACE(TYPE, SIGN, INFINITE, QUIET)                                                                      \
	for (size_t i = 0; i < count; i++) {                                                                           \
		TYPE bits;                                                                                             \
		memcpy(&bits, p + i * sizeof bits, sizeof bits);                                                       \
		bits = (bits & (TYPE)~(SIGN)) > (INFINITE) ? (QUIET) : bits;                                           \
		memcpy(p + i * sizeof bits, &bits, sizeof bits);                                                       \
	}

/* Gives all NaNs one bit pattern: which of two NaNs a sum becomes, and the sign of a new one, differ between CPUs,
 * instruction sets and compilers. */
static void nans_replace(uint32_t dtype, uint8_t *p, size_t count)
{
	if (dtype == ZP_FLOAT16)
		NANS_REPLACE(uint16_t, 0x8000, 0x7c00, 0x7e00)
	else if (dtype == ZP_BFLOAT16)
		NANS_REPLACE(uint16_t, 0x8000, 0x7f80, 0x7fc0)
	else if (dtype == ZP_FLOAT)
		NANS_REPLACE(uint32_t, 0x80000000, 0x7f800000, 0x7fc00000)
	else if (dtype == ZP_DOUBLE)
		NANS_REPLACE(uint64_t, 0x8000000000000000, 0x7ff0000000000000, 0x7ff8000000000000)
}

#undef NANS_REPLACE

uint64_t zp__shares_join(const zp__attempt *attempt, const zp__join *join, uint8_t *result, const uint8_t *own,
			 uint8_t *shares, uint64_t elements)
{
	size_t itemsize = attempt->layout.itemsize, bytes = elements * itemsize;
	bool wide = wide_kernels_of(&attempt->plan, join) != NULL;
	size_t piece_bytes = wide ? ZP__WIDE_PIECE_BYTES : ZP__PIECE_BYTES;
	zp__checksum so_far = {.bytes = 0};
	for (size_t at = 0; at < bytes; at += piece_bytes) {
		size_t n = bytes - at < piece_bytes ? bytes - at : piece_bytes;
		(wide ? piece_join_wide : piece_join)(attempt, join, result, own, shares, at, n / itemsize);
		if (join->everywhere)
			nans_replace(attempt->plan.dtype, result + at, n / itemsize);
		zp__checksum_advance(&so_far, result, at + n);
	}
	return zp__checksum_finish(&so_far, result, bytes);
}
