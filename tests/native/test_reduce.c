/* Reduce kernels of every instruction set against plain scalar arithmetic, and the 16-bit conversions against the
 * compiler's own. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "reduce.h"
#include "zp_api.h"

#define ZP__NAME(name) name##_here
#include "half.h"
#undef ZP__NAME

enum { COUNT = 1500 };

static uint8_t bytes_of_a[COUNT * 8 + 1], bytes_of_b[COUNT * 8 + 1], result[COUNT * 8 + 1], inplace[COUNT * 8 + 1];

static const float specials[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 65504.0f, 1e-8f, 3e38f, -3e38f, 1e-42f};

/* One element, as a wide number, of both kinds. */
typedef struct {
	double real;
	uint64_t bits;
} element;

static element get(uint32_t dtype, const void *from, size_t i)
{
	element e = {0, 0};
	size_t size = zp__itemsize[dtype];
	memcpy(&e.bits, (const uint8_t *)from + i * size, size);
	uint16_t half = (uint16_t)e.bits;
	float single;
	memcpy(&single, &e.bits, sizeof single);
	if (dtype == ZP_FLOAT16)
		e.real = float_of_half_here(half);
	else if (dtype == ZP_BFLOAT16)
		e.real = float_of_brain_here(half);
	else if (dtype == ZP_FLOAT)
		e.real = single;
	else if (dtype == ZP_DOUBLE)
		memcpy(&e.real, &e.bits, sizeof e.real);
	return e;
}

static int is_float(uint32_t dtype)
{
	return dtype >= ZP_FLOAT16;
}

static int is_signed(uint32_t dtype)
{
	return dtype == ZP_INT8 || dtype == ZP_INT16 || dtype == ZP_INT32 || dtype == ZP_INT64;
}

static int64_t extended(uint32_t dtype, uint64_t bits)
{
	unsigned shift = 64 - 8u * zp__itemsize[dtype];
	return (int64_t)(bits << shift) >> shift;
}

static uint64_t expected_integer(uint32_t dtype, uint32_t op, uint64_t x, uint64_t y)
{
	unsigned bits = 8u * zp__itemsize[dtype];
	uint64_t mask = bits == 64 ? UINT64_MAX : ((uint64_t)1 << bits) - 1;
	int greater = is_signed(dtype) ? extended(dtype, x) > extended(dtype, y) : x > y;
	switch (op) {
	case ZP_PROD:
		return x * y & mask;
	case ZP_MAX:
		return greater ? x : y;
	case ZP_MIN:
		return greater ? y : x;
	default:
		return (x + y) & mask;
	}
}

/* Rounded to float from double, then to the 16-bit type: innocuous, for a double has more than twice the digits. */
static double expected_real(uint32_t dtype, uint32_t op, double x, double y)
{
	volatile double r;
	if (op == ZP_MAX || op == ZP_MIN)
		r = isnan(x) || isnan(y) ? NAN : op == ZP_MAX ? (x > y ? x : y) : (x < y ? x : y);
	else
		r = op == ZP_PROD ? x * y : x + y;
	if (dtype == ZP_DOUBLE)
		return r;
	float single = (float)r;
	if (dtype == ZP_FLOAT16)
		return float_of_half_here(half_of_float_here(single));
	if (dtype == ZP_BFLOAT16)
		return float_of_brain_here(brain_of_float_here(single));
	return single;
}

static void fill(uint32_t dtype, uint8_t *to, uint64_t *seed)
{
	for (size_t i = 0; i < COUNT; i++) {
		uint64_t bits = random_next(seed);
		float single = (float)((double)(int64_t)random_next(seed) / 1e17);
		if (random_next(seed) % 8 == 0)
			single = specials[random_next(seed) % (sizeof specials / sizeof *specials)];
		double real = single;
		if (dtype == ZP_FLOAT16)
			bits = half_of_float_here(single);
		else if (dtype == ZP_BFLOAT16)
			bits = brain_of_float_here(single);
		else if (dtype == ZP_FLOAT)
			memcpy(&bits, &single, sizeof single);
		else if (dtype == ZP_DOUBLE)
			memcpy(&bits, &real, sizeof bits);
		memcpy(to + i * zp__itemsize[dtype], &bits, zp__itemsize[dtype]);
	}
}

static void check_elements(uint32_t dtype, uint32_t op, const void *a, const void *b, const void *r, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		element x = get(dtype, a, i), y = get(dtype, b, i), got = get(dtype, r, i);
		if (!is_float(dtype)) {
			CHECK(got.bits == expected_integer(dtype, op, x.bits, y.bits));
			continue;
		}
		double expected = expected_real(dtype, op, x.real, y.real);
		CHECK(isnan(expected) ? isnan(got.real) : got.real == expected);
	}
}

static void test_reduce(const zp__reduce_kernels *kernels)
{
	uint64_t seed = 3;
	static const size_t counts[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 65, 127, 129, COUNT};
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (uint32_t op = 0; op < ZP__OPS; op++)
			for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
				size_t n = counts[i], bytes = n * zp__itemsize[dtype];
				uint8_t *a = bytes_of_a + i % 2, *b = bytes_of_b + 1; /* Odd addresses are legal. */
				fill(dtype, a, &seed);
				fill(dtype, b, &seed);
				memset(result, 0x5a, sizeof result);
				kernels->reduce[dtype][op](result, a, b, n);
				check_elements(dtype, op, a, b, result, n);
				for (size_t past = bytes; past < sizeof result; past++)
					CHECK(result[past] == 0x5a);
				memcpy(inplace, a, bytes);
				kernels->reduce[dtype][op](inplace, inplace, b, n);
				check_elements(dtype, op, a, b, inplace, n);
				memcpy(inplace, b, bytes);
				kernels->reduce[dtype][op](inplace, a, inplace, n);
				check_elements(dtype, op, a, b, inplace, n);
			}
}

static void test_divide(const zp__reduce_kernels *kernels)
{
	uint64_t seed = 4;
	static const uint32_t divisors[] = {2, 3, 7, 16, 1024};
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (size_t i = 0; i < sizeof divisors / sizeof *divisors; i++) {
			uint32_t by = divisors[i];
			fill(dtype, bytes_of_a + 1, &seed);
			memcpy(result + 1, bytes_of_a + 1, COUNT * 8);
			kernels->divide[dtype](result + 1, COUNT, by);
			for (size_t k = 0; k < COUNT; k++) {
				element x = get(dtype, bytes_of_a + 1, k), got = get(dtype, result + 1, k);
				if (is_signed(dtype)) {
					CHECK(extended(dtype, got.bits) == extended(dtype, x.bits) / (int64_t)by);
				} else if (!is_float(dtype)) {
					CHECK(got.bits == x.bits / by);
				} else {
					volatile double quotient = x.real / by;
					double expected = expected_real(dtype, ZP_MAX, quotient, quotient);
					CHECK(isnan(expected) ? isnan(got.real) : got.real == expected);
				}
			}
		}
}

static void test_isas_agree(void)
{
	uint64_t seed = 5;
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (uint32_t op = 0; op < ZP__OPS; op++) {
			fill(dtype, bytes_of_a, &seed);
			fill(dtype, bytes_of_b, &seed);
			/* Where both are NaN either payload may survive: keep NaNs on one side. */
			for (size_t i = 0; i < COUNT; i++)
				if (is_float(dtype) && isnan(get(dtype, bytes_of_a, i).real))
					memset(bytes_of_b + i * zp__itemsize[dtype], 0, zp__itemsize[dtype]);
			zp__reduce_kernels_of(ZP__BASELINE)->reduce[dtype][op](result, bytes_of_a, bytes_of_b, COUNT);
			for (enum zp__isa isa = ZP__AVX2; isa < ZP__ISA_COUNT; isa++) {
				const zp__reduce_kernels *kernels = zp__reduce_kernels_of(isa);
				if (!kernels)
					continue;
				kernels->reduce[dtype][op](inplace, bytes_of_a, bytes_of_b, COUNT);
				CHECK(memcmp(result, inplace, (size_t)COUNT * zp__itemsize[dtype]) == 0);
			}
		}
}

#if defined(__FLT16_MAX__)
static void test_half_against_compiler(void)
{
	for (uint32_t bits = 0; bits < 65536; bits++) {
		uint16_t half = (uint16_t)bits;
		_Float16 theirs;
		memcpy(&theirs, &half, sizeof theirs);
		float ours = float_of_half_here(half), expected = (float)theirs;
		CHECK(isnan(expected) ? isnan(ours) : ours == expected && !signbit(ours) == !signbit(expected));
		uint16_t back = half_of_float_here(ours);
		CHECK(isnan(ours) ? (back & 0x7e00) == 0x7e00 : back == half);
	}
	/* A stride that is prime to 2^32 meets every exponent and many ties; then the neighbours of every tie. */
	for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 4093)
		for (int near = 0; near < 2; near++) {
			uint32_t b = near ? ((uint32_t)bits & 0xffffe000u) + 0x0fffu + (uint32_t)(bits % 3) : (uint32_t)bits;
			float value = float_of_bits_here(b);
			_Float16 theirs = (_Float16)value;
			uint16_t expected, ours = half_of_float_here(value);
			memcpy(&expected, &theirs, sizeof expected);
			CHECK(isnan(value) ? (ours & 0x7e00) == 0x7e00 : ours == expected);
		}
}
#else
static void test_half_against_compiler(void)
{
}
#endif

static void test_brain(void)
{
	for (uint32_t bits = 0; bits < 65536; bits++) {
		uint16_t brain = (uint16_t)bits;
		float value = float_of_brain_here(brain);
		CHECK(isnan(value) ? isnan(float_of_brain_here(brain_of_float_here(value)))
				   : brain_of_float_here(value) == brain);
		if (isnan(value) || isinf(value) || (brain & 0x7fff) >= 0x7f7f)
			continue;
		/* Between this one and the next: the tie goes to the even one, all else to the nearer. */
		uint32_t low = bits << 16;
		CHECK(brain_of_float_here(float_of_bits_here(low + 0x7fff)) == brain);
		CHECK(brain_of_float_here(float_of_bits_here(low + 0x8000)) == (brain & 1 ? brain + 1 : brain));
		CHECK(brain_of_float_here(float_of_bits_here(low + 0x8001)) == brain + 1);
	}
}

int main(void)
{
	int tested = 0;
	for (enum zp__isa isa = ZP__BASELINE; isa < ZP__ISA_COUNT; isa++) {
		const zp__reduce_kernels *kernels = zp__reduce_kernels_of(isa);
		if (!kernels)
			continue;
		test_reduce(kernels);
		test_divide(kernels);
		tested++;
	}
	CHECK(tested >= 1);
	test_isas_agree();
	test_half_against_compiler();
	test_brain();
	return 0;
}
