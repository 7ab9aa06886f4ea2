/* Quantisation: error bounds, special values, agreement of the instruction sets, hostile parameters, bounds of memory. */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
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
static const uint32_t quantized[] = {ZP_QUANTIZED_UINT8, ZP_QUANTIZED_INT8, ZP_QUANTIZED_UINT4, ZP_QUANTIZED_INT4};
static const uint32_t blocks[] = {1, 7, 100, 256, 4096};

#define EACH(INDEX, ARRAY) (size_t INDEX = 0; INDEX < sizeof(ARRAY) / sizeof *(ARRAY); INDEX++)

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

static bool is_symmetric(const zp__quantiser *how)
{
	return how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE &&
	       (how->quantized == ZP_QUANTIZED_INT8 || how->quantized == ZP_QUANTIZED_INT4);
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
	double steps = zp__quantise_code_bits(how) == 4 ? 15 : 255, epsilon = how->dtype == ZP_DOUBLE ? DBL_EPSILON : FLT_EPSILON;
	double largest = fmax(fabs(low), fabs(high));
	if (is_symmetric(how)) {
		steps = (steps - 1) / 2;
		low = 0;
		high = largest;
	} else if (how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE) {
		steps -= 1;
		low = fmin(low, 0);
		high = fmax(high, 0);
	}
	double storing = how->dtype <= ZP_BFLOAT16 ? epsilon_of(how->dtype) * largest + tiny_of(how->dtype) : 0;
	return high / steps / 2 - low / steps / 2 + 8 * epsilon * largest + tiny + storing;
}

static void check_round_trip(enum zp__isa isa, const zp__quantiser *how, const uint8_t *data)
{
	static uint8_t wire[WIRE_MAX + 1], back[COUNT * 8 + 1];
	zp__quantise(isa, how, wire + 1, data, COUNT);
	zp__dequantise(isa, how, back + 1, wire + 1, COUNT);
	double bound = 0, greatest = how->dtype == ZP_FLOAT16 ? 65504 : 0x1.fep127;
	for (size_t i = 0; i < COUNT; i++) {
		double x = get(how->dtype, data, i), y = get(how->dtype, back + 1, i);
		bound = i % how->block_elements ? bound : bound_of(how, data, i);
		bool overflow = how->dtype <= ZP_BFLOAT16 && fabs(x) + bound > greatest && y == copysign(INFINITY, x);
		CHECK(fabs(x - y) <= bound || overflow);
		if (how->algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE && x == 0)
			CHECK(y == 0);
	}
}

/* Of every kind of quantiser, all blocks over data of one scale. */
static void check_scale(enum zp__isa isa, uint32_t dtype, double scale, bool shifted)
{
	static uint8_t data[COUNT * 8 + 1];
	uint64_t seed = 6;
	if (scale > (dtype == ZP_DOUBLE ? DBL_MAX : dtype == ZP_FLOAT16 ? 6e4 : 3.35e38))
		return;
	for (size_t i = 0; i < COUNT; i++) {
		double unit = (double)(int64_t)random_next(&seed) / 0x1p63;
		put(dtype, data + 1, i, i % 50 ? unit * scale * 0.7 + (shifted ? scale * 0.3 : 0) : 0);
	}
	/* Both ends of the finite range in one block: their difference overflows. */
	put(dtype, data + 1, 0, scale);
	put(dtype, data + 1, 1, -scale);
	for EACH (a, algorithms)
		for EACH (q, quantized)
			for EACH (b, blocks) {
				zp__quantiser how = {algorithms[a], quantized[q], dtype, ZP_SUM, blocks[b]};
				check_round_trip(isa, &how, data + 1);
			}
}

static void test_error_bound(enum zp__isa isa)
{
	static const double scales[] = {1, 1e-3, 1e4, 1e-6, 1e-30, 1e-33, 1e-39, 1e-44, 3.3e38, 1e38, 1e-280, 1e-310, 1.7e308};
	for EACH (d, dtypes)
		for EACH (s, scales) {
			check_scale(isa, dtypes[d], scales[s], false);
			check_scale(isa, dtypes[d], scales[s], true);
		}
}

/* A range of a few of the smallest subnormals, anywhere among them, comes back bit for bit. */
static void test_subnormals_exact(enum zp__isa isa)
{
	static uint8_t data[COUNT * 8], wire[WIRE_MAX], back[COUNT * 8];
	static const uint32_t wide[] = {ZP_FLOAT, ZP_DOUBLE};
	for EACH (d, wide)
		for EACH (q, quantized)
			for (int from = -100; from <= 1000; from += 550) {
				zp__quantiser how = {ZP_QUANTIZE_MIN_MAX, quantized[q], wide[d], ZP_SUM, 128};
				int most = zp__quantise_code_bits(&how) == 4 ? 15 : 255;
				for (int i = 0; i < COUNT; i++)
					put(wide[d], data, (size_t)i, (from + i * 7 % (most + 1)) * tiny_of(wide[d]));
				zp__quantise(isa, &how, wire, data, COUNT);
				zp__dequantise(isa, &how, back, wire, COUNT);
				CHECK(memcmp(data, back, (size_t)COUNT * zp__itemsize[wide[d]]) == 0);
			}
}

static void check_special(enum zp__isa isa, const zp__quantiser *how, double poison, size_t where)
{
	static uint8_t data[COUNT * 8], wire[WIRE_MAX], back[COUNT * 8];
	for (size_t i = 0; i < COUNT; i++)
		put(how->dtype, data, i, i < 500 ? 3 : 0);
	put(how->dtype, data, where, poison);
	zp__quantise(isa, how, wire, data, COUNT);
	zp__dequantise(isa, how, back, wire, COUNT);
	for (size_t i = 0; i < COUNT; i++) {
		double v = get(how->dtype, back, i);
		if (i / how->block_elements == where / how->block_elements)
			CHECK(isnan(v));
		else if (i >= 500 || how->algorithm == ZP_QUANTIZE_MIN_MAX)
			CHECK(v == (i < 500 ? 3 : 0)); /* constant blocks are exact */
		else
			CHECK(fabs(v - 3) < 3 * 2 * epsilon_of(how->dtype));
	}
}

static void test_special_blocks(enum zp__isa isa)
{
	static const double poison[] = {NAN, INFINITY, -INFINITY, -NAN};
	for EACH (d, dtypes)
		for EACH (a, algorithms)
			for EACH (q, quantized)
				for EACH (p, poison) {
					zp__quantiser how = {algorithms[a], quantized[q], dtypes[d], ZP_SUM, 100};
					check_special(isa, &how, poison[p], 200);
					check_special(isa, &how, poison[p], 250 + p);
					check_special(isa, &how, poison[p], 299);
				}
}

static double combined(uint32_t op, double x, double y)
{
	return op == ZP_PROD ? x * y : op == ZP_MAX ? fmax(x, y) : op == ZP_MIN ? fmin(x, y) : x + y;
}

static void check_fold(enum zp__isa isa, const zp__quantiser *how, uint32_t divisor)
{
	static uint8_t data[COUNT * 8], local[COUNT * 8], wire[WIRE_MAX], before[COUNT * 8], after[COUNT * 8], sum[COUNT * 8];
	uint64_t seed = 7;
	uint32_t dtype = how->dtype;
	for (size_t i = 0; i < COUNT; i++) {
		put(dtype, data, i, (double)(int64_t)random_next(&seed) / 0x1p63);
		put(dtype, local, i, (double)(int64_t)random_next(&seed) / 0x1p63);
	}
	zp__quantise(isa, how, wire, data, COUNT);
	zp__dequantise(isa, how, before, wire, COUNT);
	zp__quantise_fold(isa, how, wire, local, COUNT, divisor);
	zp__dequantise(isa, how, after, wire, COUNT);
	for (size_t i = 0; i < COUNT; i++)
		put(dtype, sum, i, combined(how->op, get(dtype, before, i), get(dtype, local, i)) / divisor);
	for (size_t i = 0; i < COUNT; i++)
		CHECK(fabs(get(dtype, after, i) - get(dtype, sum, i)) <= 1.05 * bound_of(how, sum, i) + 6 * epsilon_of(dtype));
}

static void test_fold(enum zp__isa isa)
{
	for EACH (d, dtypes)
		for EACH (a, algorithms)
			for EACH (q, quantized)
				for (uint32_t op = 0; op < ZP__OPS; op++) {
					zp__quantiser how = {algorithms[a], quantized[q], dtypes[d], op, 64};
					check_fold(isa, &how, 1);
					if (op == ZP_AVG)
						check_fold(isa, &how, 3);
				}
}

/* Signed MIN_MAX codes are the unsigned ones, counted from the middle; the numbers are the same. */
static void test_signed_codes(enum zp__isa isa)
{
	static uint8_t data[COUNT * 4], wire[4][WIRE_MAX];
	uint64_t seed = 9;
	for (size_t i = 0; i < COUNT; i++)
		put(ZP_FLOAT, data, i, (double)(int64_t)random_next(&seed) / 0x1p63);
	for EACH (q, quantized) {
		zp__quantiser how = {ZP_QUANTIZE_MIN_MAX, quantized[q], ZP_FLOAT, ZP_SUM, 100};
		zp__quantise(isa, &how, wire[q], data, COUNT);
	}
	CHECK(memcmp(wire[0], wire[1], 80) == 0 && memcmp(wire[2], wire[3], 80) == 0);
	for (size_t i = 0; i < COUNT; i++)
		CHECK(wire[0][80 + i] == (wire[1][80 + i] ^ 0x80));
	for (size_t i = 0; i < COUNT / 2; i++)
		CHECK(wire[2][80 + i] == (wire[3][80 + i] ^ 0x88));
}

/* Continues `digest` with the results. */
static uint64_t check_agreement(const zp__quantiser *how, const uint8_t *original, size_t skew, size_t count,
				uint32_t divisor, uint64_t digest)
{
	static uint8_t wire[2][WIRE_MAX + 64], fresh[2][WIRE_MAX + 64], joined[2][WIRE_MAX + 64], out[2][COUNT * 8 + 64];
	const uint8_t *local = original + WIRE_MAX + skew;
	size_t out_bytes = count * zp__itemsize[how->dtype];
	size_t wire_bytes = (size_t)zp_quantised_bytes(how, count);
	for (uint32_t isa = ZP__BASELINE; isa < ZP__ISA_COUNT; isa++) {
		uint32_t k = isa > 0;
		if (!zp__reduce_kernels_of((enum zp__isa)isa))
			continue;
		memset(out[k], 0xa5, sizeof out[k]);
		memset(fresh[k], 0xa5, sizeof fresh[k]);
		memset(joined[k], 0xa5, sizeof joined[k]);
		memset(wire[k], 0xa5, sizeof wire[k]);
		memcpy(wire[k] + skew, original, wire_bytes);
		CHECK(zp_dequantise(how, isa, out[k] + skew, wire[k] + skew, count) == 0);
		const uint8_t *const shares[] = {wire[k] + skew, original};
		CHECK(zp_quantise_join(how, isa, joined[k] + skew, shares, 3, count % 3, local, count, divisor) == 0);
		CHECK(zp_quantise_fold(how, isa, wire[k] + skew, local, count, divisor) == 0);
		CHECK(zp_quantise(how, isa, fresh[k] + skew, local, count) == 0);
		/* Not a byte beyond. */
		CHECK(out[k][skew + out_bytes] == 0xa5 && (skew == 0 || out[k][skew - 1] == 0xa5));
		CHECK(wire[k][skew + wire_bytes] == 0xa5 && fresh[k][skew + wire_bytes] == 0xa5);
		CHECK(joined[k][skew + wire_bytes] == 0xa5);
		CHECK(memcmp(out[0], out[k], sizeof out[0]) == 0);
		CHECK(memcmp(wire[0], wire[k], sizeof wire[0]) == 0);
		CHECK(memcmp(fresh[0], fresh[k], sizeof fresh[0]) == 0);
		CHECK(memcmp(joined[0], joined[k], sizeof joined[0]) == 0);
	}
	digest = digest_add(digest, out[0], sizeof out[0]);
	digest = digest_add(digest, wire[0], sizeof wire[0]);
	digest = digest_add(digest, fresh[0], sizeof fresh[0]);
	return digest_add(digest, joined[0], sizeof joined[0]);
}

/* Whatever comes over the wire: no undefined behaviour (this runs under the sanitizer) and the same bits everywhere;
 * any length, any alignment, not a byte beyond the end. The digests of the results, by type of tensor, were recorded once,
 * so that every CPU and compiler compares itself with all others. */
static void test_isas_agree_on_anything(void)
{
	static const uint64_t recorded[] = {0xc9ef57933c064c02, 0xd3f7dce82cd1c423, 0x6e42a8cc45320058, 0xb70b3e17963f7a6b};
	uint64_t digests[sizeof dtypes / sizeof *dtypes] = {0};
	static uint8_t original[WIRE_MAX + COUNT * 8 + 64];
	uint64_t seed = 8;
	for (uint32_t round = 0; round < 2000; round++) {
		uint32_t pick = (uint32_t)(random_next(&seed) >> 16);
		zp__quantiser how = {algorithms[pick % 2], quantized[pick / 2 % 4], dtypes[pick / 8 % 4], pick / 32 % ZP__OPS,
				     blocks[pick / 256 % 5]};
		for (size_t i = 0; i < sizeof original; i++)
			original[i] = (uint8_t)(random_next(&seed) >> 11);
		if (round % 2) /* Ordinary numbers as well, and parameters as a peer would send them. */
			for (size_t i = 0; i < COUNT; i++)
				put(how.dtype, original + WIRE_MAX + 3, i, (double)(int64_t)random_next(&seed) / 0x1p62);
		size_t count = 1 + random_next(&seed) % COUNT;
		if (round % 4 == 3)
			zp__quantise(ZP__BASELINE, &how, original, original + WIRE_MAX + 3, count);
		uint64_t *digest = &digests[pick / 8 % 4];
		*digest = check_agreement(&how, original, round % 2 ? 3 : round % 9, count,
					  how.op == ZP_AVG && round % 8 < 4 ? 3 : 1, *digest);
	}
	for EACH (d, dtypes) {
		if (digests[d] != recorded[d])
			fprintf(stderr, "dtype %u: 0x%016llx\n", dtypes[d], (unsigned long long)digests[d]);
		CHECK(digests[d] == recorded[d]);
	}
}

/* Parameters that no peer would send make the block NaN. */
static void test_strange_parameters(enum zp__isa isa)
{
	static const struct {
		uint32_t quantized;
		float zero, scale;
		bool good;
	} cases[] = {
		{ZP_QUANTIZED_UINT8, 255, 2, true}, {ZP_QUANTIZED_UINT8, 256, 2, false}, {ZP_QUANTIZED_UINT8, -1, 2, false},
		{ZP_QUANTIZED_UINT8, 2, -1, false}, {ZP_QUANTIZED_UINT4, 15, 2, true},	 {ZP_QUANTIZED_UINT4, 16, 2, false},
		{ZP_QUANTIZED_UINT4, 1.5, 2, false}};
	for EACH (i, cases) {
		zp__quantiser how = {ZP_QUANTIZE_ZERO_POINT_SCALE, cases[i].quantized, ZP_FLOAT, ZP_SUM, 4};
		uint8_t wire[2 * sizeof(float) + 1] = {0};
		float x;
		memcpy(wire, &cases[i].zero, sizeof x);
		memcpy(wire + sizeof x, &cases[i].scale, sizeof x);
		zp__dequantise(isa, &how, &x, wire, 1);
		CHECK(cases[i].good ? x == -cases[i].zero * cases[i].scale : isnan(x));
	}
}

static void test_arguments(void)
{
	static uint8_t bytes[64];
	zp_quantiser good = {ZP_QUANTIZE_MIN_MAX, ZP_QUANTIZED_UINT8, ZP_FLOAT, ZP_SUM, 4}, bad[6];
	for EACH (i, bad)
		bad[i] = good;
	bad[0].algorithm = ZP_QUANTIZE_NONE;
	bad[1].quantized = ZP_UINT16;
	bad[2].dtype = ZP_INT64;
	bad[3].op = ZP__OPS;
	bad[4].block_elements = 0;
	bad[5].block_elements = ZP__BLOCK_ELEMENTS_MAX + 1;
	CHECK(zp_quantised_bytes(&good, 5) == 2 * 8 + 5 && zp_quantise(&good, 0, bytes, bytes + 32, 5) == 0);
	for EACH (i, bad) {
		CHECK(zp_quantised_bytes(&bad[i], 5) == -EINVAL);
		CHECK(zp_quantise(&bad[i], 0, bytes, bytes + 32, 5) == -EINVAL);
	}
	CHECK(zp_quantise(&good, ZP__ISA_COUNT, bytes, bytes + 32, 5) == -EINVAL);
	CHECK(zp_quantise_fold(&good, 0, bytes, bytes + 32, 5, 0) == -EINVAL);
	good.algorithm = ZP_QUANTIZE_ZERO_POINT_SCALE;
	good.quantized = ZP_QUANTIZED_INT4;
	good.block_elements = 3;
	CHECK(zp_quantised_bytes(&good, 7) == 3 * 4 + 2 + 2 + 1);
}

int main(void)
{
	for (enum zp__isa isa = ZP__BASELINE; isa < ZP__ISA_COUNT; isa++) {
		if (!zp__reduce_kernels_of(isa))
			continue;
		test_error_bound(isa);
		test_subnormals_exact(isa);
		test_special_blocks(isa);
		test_fold(isa);
		test_signed_codes(isa);
		test_strange_parameters(isa);
	}
	test_isas_agree_on_anything();
	test_arguments();
	return 0;
}
