/* Reduce kernels of every instruction set against plain scalar arithmetic and recorded results, and the 16-bit conversions
 * against the compiler's own. */
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
			if (!kernels->divide[dtype])
				continue;
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

/* --- Wide ------------------------------------------------------------------------------------------------------- */

enum { SHARES = 9 };

static uint8_t inputs[SHARES][COUNT * 8 + 1], wide_sums[COUNT * 8 + 1];

static void join(const zp__reduce_kernels *kernels, uint32_t dtype, uint32_t op, uint8_t *to, size_t n, uint32_t divisor)
{
	const zp__wide_kernels *wide = &kernels->wide[dtype];
	size_t sums_bytes = n * zp__wide_itemsize[dtype];
	memset(wide_sums, 0x5a, sizeof wide_sums);
	wide->widen(wide_sums + 1, inputs[0], n); /* Odd addresses are legal. */
	for (uint32_t k = 1; k < SHARES; k++)
		wide->fold[op](wide_sums + 1, inputs[k] + k % 2, n);
	for (size_t past = sums_bytes + 1; past < sizeof wide_sums; past++)
		CHECK(wide_sums[past] == 0x5a);
	wide->narrow(to, wide_sums + 1, n, divisor);
}

static int same(uint32_t dtype, element got, element expected)
{
	return is_float(dtype) && isnan(expected.real) ? isnan(got.real) : got.bits == expected.bits;
}

/* Folded in float, or exactly, in order of the shares; divided; rounded once. */
static element joined(uint32_t dtype, uint32_t op, size_t i, uint32_t divisor)
{
	volatile float real = 0;
	int64_t whole = 0;
	for (uint32_t k = 0; k < SHARES; k++) {
		element e = get(dtype, inputs[k] + k % 2, i);
		real = k == 0 ? (float)e.real : op == ZP_PROD ? real * (float)e.real : real + (float)e.real;
		whole += is_signed(dtype) ? extended(dtype, e.bits) : (int64_t)e.bits;
	}
	if (is_float(dtype)) {
		real /= (float)divisor;
		uint16_t bits = dtype == ZP_FLOAT16 ? half_of_float_here(real) : brain_of_float_here(real);
		return get(dtype, &bits, 0);
	}
	whole /= (int64_t)divisor;
	return get(dtype, &whole, 0);
}

static void test_wide(const zp__reduce_kernels *kernels)
{
	uint64_t seed = 6;
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (uint32_t op = 0; op < ZP__OPS; op++) {
			if (!kernels->wide[dtype].fold[op])
				continue;
			size_t n = COUNT - op;
			uint32_t divisor = op == ZP_AVG ? SHARES : 1;
			for (uint32_t k = 0; k < SHARES; k++)
				fill(dtype, inputs[k] + k % 2, &seed);
			memset(result, 0x5a, sizeof result);
			join(kernels, dtype, op, result, n, divisor);
			for (size_t i = 0; i < n; i++)
				CHECK(same(dtype, get(dtype, result, i), joined(dtype, op, i, divisor)));
			for (size_t past = n * zp__itemsize[dtype]; past < sizeof result; past++)
				CHECK(result[past] == 0x5a);
		}
}

/* Where a type is wide enough there is nothing to make wide; of the others every mean is. */
static void test_wide_where_it_helps(const zp__reduce_kernels *kernels)
{
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++) {
		const zp__wide_kernels *wide = &kernels->wide[dtype];
		int narrow = zp__wide_itemsize[dtype] > 0;
		CHECK(narrow == (zp__itemsize[dtype] < 4 || dtype == ZP_UINT32 || dtype == ZP_INT32));
		CHECK((kernels->divide[dtype] == NULL) == narrow);
		CHECK(!wide->widen == !narrow && !wide->narrow == !narrow && !wide->mean == !narrow);
		CHECK(!wide->fold_mean == !(narrow && is_float(dtype)));
		CHECK(!wide->fold[ZP_AVG] == !narrow && !wide->fold[ZP_MAX] && !wide->fold[ZP_MIN]);
		CHECK(!wide->fold[ZP_SUM] == !(narrow && is_float(dtype)) && !wide->fold[ZP_PROD] == !wide->fold[ZP_SUM]);
	}
}

/* As many peers as there may be, with the integers that are farthest from 0. */
static void test_wide_holds_all_peers(const zp__reduce_kernels *kernels)
{
	for (uint32_t dtype = 0; dtype < ZP_UINT64; dtype++)
		for (int low = 0; low < 2; low++) {
			const zp__wide_kernels *wide = &kernels->wide[dtype];
			uint64_t sign = (uint64_t)1 << (8u * zp__itemsize[dtype] - 1);
			uint64_t value = !is_signed(dtype) ? (low ? 0 : UINT64_MAX) : low ? sign : sign - 1, sum, back = 0;
			wide->widen(&sum, &value, 1);
			for (int k = 1; k < 2048; k++)
				wide->fold[ZP_AVG](&sum, &value, 1);
			wide->narrow(&back, &sum, 1, 2048);
			CHECK(memcmp(&back, &value, zp__itemsize[dtype]) == 0);
		}
}

/* What the mean of some shares becomes with one more: of two, what their join gives. */
static void test_mean(const zp__reduce_kernels *kernels)
{
	uint64_t seed = 7;
	static const uint32_t shares[] = {2, 3, 8, 2048};
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (size_t k = 0; kernels->wide[dtype].mean && k < (is_float(dtype) ? 4 : 1); k++) {
			uint8_t *a = inputs[0], *b = inputs[1] + 1;
			fill(dtype, a, &seed);
			fill(dtype, b, &seed);
			memset(result, 0x5a, sizeof result);
			kernels->wide[dtype].mean(result, a, b, COUNT - 1, shares[k]);
			for (size_t i = 0; i < COUNT - 1; i++) {
				element x = get(dtype, a, i), y = get(dtype, b, i), expected;
				if (is_float(dtype)) {
					volatile float sum = (float)x.real * (float)(shares[k] - 1);
					sum += (float)y.real;
					sum /= (float)shares[k];
					uint16_t bits = dtype == ZP_FLOAT16 ? half_of_float_here(sum)
									    : brain_of_float_here(sum);
					expected = get(dtype, &bits, 0);
				} else {
					int64_t sum = is_signed(dtype) ? extended(dtype, x.bits) + extended(dtype, y.bits)
								       : (int64_t)(x.bits + y.bits);
					sum /= 2;
					expected = get(dtype, &sum, 0);
				}
				CHECK(same(dtype, get(dtype, result, i), expected));
			}
			CHECK(result[(COUNT - 1) * zp__itemsize[dtype]] == 0x5a);
			memcpy(inplace, a, (COUNT - 1) * (size_t)zp__itemsize[dtype]);
			kernels->wide[dtype].mean(inplace, inplace, b, COUNT - 1, shares[k]);
			for (size_t i = 0; i < COUNT - 1; i++)
				CHECK(same(dtype, get(dtype, inplace, i), get(dtype, result, i)));
		}
}

/* A mean of many shares counts as their sum. */
static void test_fold_mean(const zp__reduce_kernels *kernels)
{
	uint64_t seed = 8;
	static const uint32_t shares[] = {1, 2, 7, 2048};
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++)
		for (size_t k = 0; kernels->wide[dtype].fold_mean && k < 4; k++) {
			uint8_t *a = inputs[0], *b = inputs[1] + 1;
			fill(dtype, a, &seed);
			fill(dtype, b, &seed);
			memset(wide_sums, 0x5a, sizeof wide_sums);
			kernels->wide[dtype].widen(wide_sums + 1, a, COUNT - 1);
			kernels->wide[dtype].fold_mean(wide_sums + 1, b, COUNT - 1, shares[k]);
			for (size_t i = 0; i < COUNT - 1; i++) {
				volatile float expected = (float)get(dtype, b, i).real * (float)shares[k];
				expected += (float)get(dtype, a, i).real;
				float got;
				memcpy(&got, wide_sums + 1 + i * sizeof got, sizeof got);
				CHECK(isnan(expected) ? isnan(got) : got == expected);
			}
			CHECK(wide_sums[1 + (COUNT - 1) * sizeof(float)] == 0x5a);
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

/* Digests of results that were recorded once, so that every CPU and compiler compares itself with all others. NaNs are
 * taken as equal: a new one is negative on x86 and positive on ARM. */
static void test_recorded_results(const zp__reduce_kernels *kernels)
{
	static const uint64_t recorded[ZP__DTYPES] = {
		0x72c60c0bf5dcb20e, 0xff26e67331eb787c, 0x48f76964adeb4d24, 0x9b507d405f08c36a,
		0x6ff2e5c70182fef2, 0xe2acc058d84391dc, 0xf78870f9b3ca8379, 0xde20bf6e19a57201,
		0xbac42f05bc192302, 0x6e7961de36f81b53, 0x883624a68c261057, 0x6623b23b31c6096d};
	uint64_t seed = 6;
	for (uint32_t dtype = 0; dtype < ZP__DTYPES; dtype++) {
		uint64_t digest = 0;
		size_t size = zp__itemsize[dtype];
		for (uint32_t op = 0; op <= ZP__OPS; op++) {
			fill(dtype, result, &seed);
			fill(dtype, bytes_of_b, &seed);
			if (op < ZP__OPS)
				kernels->reduce[dtype][op](result, result, bytes_of_b, COUNT);
			else if (kernels->divide[dtype])
				kernels->divide[dtype](result, COUNT, 3);
			else
				kernels->wide[dtype].mean(result, result, bytes_of_b, COUNT, is_float(dtype) ? 3 : 2);
			for (size_t i = 0; is_float(dtype) && i < COUNT; i++)
				if (isnan(get(dtype, result, i).real))
					memset(result + i * size, 0xff, size);
			digest = digest_add(digest, result, COUNT * size);
		}
		if (digest != recorded[dtype])
			fprintf(stderr, "%s, dtype %u: 0x%016llx\n", kernels->name, dtype, (unsigned long long)digest);
		CHECK(digest == recorded[dtype]);
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
		test_wide(kernels);
		test_wide_where_it_helps(kernels);
		test_wide_holds_all_peers(kernels);
		test_mean(kernels);
		test_fold_mean(kernels);
		test_recorded_results(kernels);
		tested++;
	}
	CHECK(tested >= 1);
	test_isas_agree();
	test_half_against_compiler();
	test_brain();
	return 0;
}
