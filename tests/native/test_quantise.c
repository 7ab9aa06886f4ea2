/* Quantisation: error bounds, special values, agreement of the instruction sets, hostile parameters. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "check.h"
#include "quantise.h"
#include "zp_api.h"

#define ZP__NAME(name) name##_here
#include "half.h"
#undef ZP__NAME

enum { COUNT = 1000, WIRE_MAX = COUNT * 17 + 64 };

static const uint32_t dtypes[] = {ZP_FLOAT16, ZP_BFLOAT16, ZP_FLOAT, ZP_DOUBLE};
static const uint32_t algorithms[] = {ZP_QUANTIZE_MIN_MAX, ZP_QUANTIZE_ZERO_POINT_SCALE};
static const uint32_t blocks[] = {1, 8, 100, 256, 4096};

static void put(uint32_t dtype, uint8_t *to, size_t i, double value)
{
	float single = (float)value;
	uint16_t half = dtype == ZP_FLOAT16 ? half_of_float_here(single) : brain_of_float_here(single);
	if (dtype == ZP_DOUBLE)
		memcpy(to + 8 * i, &value, 8);
	else if (dtype == ZP_FLOAT)
		memcpy(to + 4 * i, &single, 4);
	else
		memcpy(to + 2 * i, &half, 2);
}

static double get(uint32_t dtype, const uint8_t *from, size_t i)
{
	double value;
	float single;
	uint16_t half;
	memcpy(&value, from + zp__itemsize[dtype] * i, dtype == ZP_DOUBLE ? 8 : 1);
	if (dtype == ZP_DOUBLE)
		return value;
	memcpy(&single, from + zp__itemsize[dtype] * i, dtype == ZP_FLOAT ? 4 : 1);
	if (dtype == ZP_FLOAT)
		return single;
	memcpy(&half, from + 2 * i, 2);
	return dtype == ZP_FLOAT16 ? float_of_half_here(half) : float_of_brain_here(half);
}

static double epsilon_of(uint32_t dtype)
{
	return dtype == ZP_DOUBLE ? DBL_EPSILON : dtype == ZP_FLOAT ? FLT_EPSILON : dtype == ZP_FLOAT16 ? 0x1p-10 : 0x1p-7;
}

static double tiny_of(uint32_t dtype)
{
	return dtype == ZP_DOUBLE ? 0x1p-1074 : dtype == ZP_FLOAT16 ? 0x1p-24 : dtype == ZP_FLOAT ? 0x1p-149 : 0x1p-133;
}

/* The bound that the head of quantise.c promises for the block of element `i`. */
static double bound_of(const zp__quantiser *how, const uint8_t *data, size_t i)
{
	size_t first = i - i % how->block_elements, last = first + how->block_elements;
	double low = INFINITY, high = -INFINITY, tiny = how->dtype == ZP_DOUBLE ? 0x1p-1074 : 0x1p-149;
	for (size_t k = first; k < last && k < COUNT; k++) {
		double v = get(how->dtype, data, k);
		low = fmin(low, v);
		high = fmax(high, v);
	}
	double steps = 510, epsilon = how->dtype == ZP_DOUBLE ? DBL_EPSILON : FLT_EPSILON;
	if (how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE) {
		steps = 255;
		low = fmin(low, 0);
		high = fmax(high, 0);
	}
	double largest = fmax(fabs(low), fabs(high));
	double storing = how->dtype <= ZP_BFLOAT16 ? epsilon_of(how->dtype) * largest + tiny_of(how->dtype) : 0;
	return (high / steps - low / steps) * (1 + 4 * epsilon) + 6 * epsilon * largest + 255 * tiny + storing;
}

static void check_round_trip(enum zp__isa isa, const zp__quantiser *how, const uint8_t *data)
{
	static uint8_t wire[WIRE_MAX + 1], back[COUNT * 8 + 1];
	zp__quantise(isa, how, wire + 1, data, COUNT);
	zp__dequantise(isa, how, back + 1, wire + 1, COUNT);
	for (size_t i = 0; i < COUNT; i++) {
		double x = get(how->dtype, data, i), y = get(how->dtype, back + 1, i);
		CHECK(fabs(x - y) <= bound_of(how, data, i) || (how->dtype == ZP_FLOAT16 && isinf(y) && fabs(x) > 60000));
		if (how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE && x == 0)
			CHECK(y == 0);
	}
}

static void test_error_bound(enum zp__isa isa)
{
	static uint8_t data[COUNT * 8 + 1];
	static const double scales[] = {1, 1e-3, 1e4, 1e-6, 1e-39, 1e-44, 3.3e38, 1e-310, 1.7e308};
	uint64_t seed = 6;
	for (size_t d = 0; d < 4; d++)
		for (size_t a = 0; a < 2; a++)
			for (size_t b = 0; b < 5; b++)
				for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
					if (fabs(scales[s]) > (dtypes[d] == ZP_DOUBLE	 ? DBL_MAX
							       : dtypes[d] == ZP_FLOAT16 ? 6e4
											 : 3.35e38))
						continue;
					double shift = s % 2 ? 0 : scales[s] * 0.3;
					for (size_t i = 0; i < COUNT; i++) {
						double unit = (double)(int64_t)random_next(&seed) / 0x1p63;
						put(dtypes[d], data + 1, i, i % 50 ? unit * scales[s] * 0.7 + shift : 0);
					}
					/* Both ends of the finite range in one block: their difference overflows. */
					put(dtypes[d], data + 1, 0, scales[s]);
					put(dtypes[d], data + 1, 1, -scales[s]);
					zp__quantiser how = {algorithms[a], dtypes[d], ZP_SUM, blocks[b]};
					check_round_trip(isa, &how, data + 1);
				}
}

static void test_special_blocks(enum zp__isa isa)
{
	static uint8_t data[COUNT * 8], wire[WIRE_MAX], back[COUNT * 8];
	static const double poison[] = {NAN, INFINITY, -INFINITY};
	for (size_t d = 0; d < 4; d++)
		for (size_t a = 0; a < 2; a++)
			for (size_t p = 0; p < 3; p++) {
				zp__quantiser how = {algorithms[a], dtypes[d], ZP_SUM, 100};
				for (size_t i = 0; i < COUNT; i++)
					put(dtypes[d], data, i, i < 500 ? 3 : 0);
				put(dtypes[d], data, 250 + p, poison[p]);
				zp__quantise(isa, &how, wire, data, COUNT);
				zp__dequantise(isa, &how, back, wire, COUNT);
				for (size_t i = 0; i < COUNT; i++) {
					double v = get(dtypes[d], back, i);
					if (i / 100 == 2)
						CHECK(isnan(v));
					else if (i >= 500 || algorithms[a] == ZP_QUANTIZE_MIN_MAX)
						CHECK(v == (i < 500 ? 3 : 0)); /* constant blocks are exact */
					else
						CHECK(fabs(v - 3) < 3 * 2 * epsilon_of(dtypes[d]));
				}
			}
}

static double combined(uint32_t op, double x, double y)
{
	return op == ZP_PROD ? x * y : op == ZP_MAX ? fmax(x, y) : op == ZP_MIN ? fmin(x, y) : x + y;
}

static void test_fold(enum zp__isa isa)
{
	static uint8_t data[COUNT * 8], local[COUNT * 8], wire[WIRE_MAX], before[COUNT * 8], after[COUNT * 8], sum[COUNT * 8];
	uint64_t seed = 7;
	for (size_t d = 0; d < 4; d++)
		for (size_t a = 0; a < 2; a++)
			for (uint32_t op = 0; op < ZP__OPS; op++)
				for (uint32_t divisor = 1; divisor <= 3; divisor += 2) {
					zp__quantiser how = {algorithms[a], dtypes[d], op, 64};
					for (size_t i = 0; i < COUNT; i++) {
						put(dtypes[d], data, i, (double)(int64_t)random_next(&seed) / 0x1p63);
						put(dtypes[d], local, i, (double)(int64_t)random_next(&seed) / 0x1p63);
					}
					zp__quantise(isa, &how, wire, data, COUNT);
					zp__dequantise(isa, &how, before, wire, COUNT);
					zp__quantise_fold(isa, &how, wire, local, COUNT, divisor);
					zp__dequantise(isa, &how, after, wire, COUNT);
					for (size_t i = 0; i < COUNT; i++)
						put(dtypes[d], sum, i,
						    combined(op, get(dtypes[d], before, i), get(dtypes[d], local, i)) / divisor);
					for (size_t i = 0; i < COUNT; i++)
						CHECK(fabs(get(dtypes[d], after, i) - get(dtypes[d], sum, i)) <=
						      1.05 * bound_of(&how, sum, i) + 6 * epsilon_of(dtypes[d]));
				}
}

/* Whatever comes over the wire: no undefined behaviour (this runs under the sanitizer) and the same bits everywhere. */
static void test_isas_agree_on_anything(void)
{
	static uint8_t wire[2][WIRE_MAX], local[COUNT * 8], out[2][COUNT * 8];
	uint64_t seed = 8;
	for (int round = 0; round < 300; round++) {
		zp__quantiser how = {algorithms[round % 2], dtypes[round / 2 % 4], (uint32_t)round % ZP__OPS, blocks[round % 5]};
		for (size_t i = 0; i < WIRE_MAX; i++)
			wire[0][i] = (uint8_t)(random_next(&seed) >> 11);
		for (size_t i = 0; i < sizeof local; i++)
			local[i] = (uint8_t)(random_next(&seed) >> 13);
		static uint8_t original[WIRE_MAX];
		memcpy(original, wire[0], WIRE_MAX);
		zp__dequantise(ZP__BASELINE, &how, out[0], wire[0], COUNT);
		zp__quantise_fold(ZP__BASELINE, &how, wire[0], local, COUNT, 3);
		for (enum zp__isa isa = ZP__AVX2; isa < ZP__ISA_COUNT; isa++) {
			if (!zp__reduce_kernels_of(isa))
				continue;
			memcpy(wire[1], original, WIRE_MAX);
			zp__dequantise(isa, &how, out[1], wire[1], COUNT);
			zp__quantise_fold(isa, &how, wire[1], local, COUNT, 3);
			CHECK(memcmp(out[0], out[1], COUNT * (size_t)zp__itemsize[how.dtype]) == 0);
			CHECK(memcmp(wire[0], wire[1], WIRE_MAX) == 0);
		}
	}
}

int main(void)
{
	for (enum zp__isa isa = ZP__BASELINE; isa < ZP__ISA_COUNT; isa++) {
		if (!zp__reduce_kernels_of(isa))
			continue;
		test_error_bound(isa);
		test_special_blocks(isa);
		test_fold(isa);
	}
	test_isas_agree_on_anything();
	return 0;
}
