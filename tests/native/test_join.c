/* The combination of many quantised shares: of two it is what folding gives, of any number what adding in double gives,
 * and every instruction set gives the same bits, whatever came over the wire. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "quantise.h"
#include "zp_api.h"

enum { COUNT = 1003, PEERS = 5, WIRE_MAX = COUNT * (8 + 2 * 8) };

static const uint32_t algorithms[] = {ZP_QUANTIZE_MIN_MAX, ZP_QUANTIZE_ZERO_POINT_SCALE};
static const uint32_t quantized[] = {ZP_QUANTIZED_UINT8, ZP_QUANTIZED_INT8, ZP_QUANTIZED_UINT4, ZP_QUANTIZED_INT4};
static const uint32_t blocks[] = {1, 7, 64, 256, 4096};

static uint8_t shares[PEERS][WIRE_MAX], local[COUNT * 8], wire[2][WIRE_MAX];
static const uint8_t *places[PEERS];

static void anything(uint8_t *to, size_t bytes, uint64_t *seed)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = (uint8_t)(random_next(seed) >> 11);
}

/* A rank's share, decoded, op our own is what the ring does at each hop. */
static void test_two_are_a_fold(enum zp__isa isa)
{
	uint64_t seed = 11;
	for (uint32_t round = 0; round < 240; round++) {
		zp__quantiser how = {algorithms[round % 2], quantized[round / 8 % 4], ZP_FLOAT16 + round / 2 % 4,
				     round % ZP__OPS, blocks[round % 5]};
		anything(shares[0], WIRE_MAX, &seed);
		anything(local, sizeof local, &seed);
		memcpy(wire[0], shares[0], WIRE_MAX);
		memcpy(wire[1], shares[0], WIRE_MAX);
		zp__quantise_fold(isa, &how, wire[0], local, COUNT, 2);
		zp__quantise_join(isa, &how, wire[1], places, 2, 1, local, COUNT, 2);
		CHECK(memcmp(wire[0], wire[1], WIRE_MAX) == 0);
	}
}

static void test_isas_agree(void)
{
	uint64_t seed = 12;
	for (uint32_t round = 0; round < 240; round++) {
		zp__quantiser how = {algorithms[round % 2], quantized[round / 8 % 4], ZP_FLOAT16 + round / 2 % 4,
				     round % ZP__OPS, blocks[round % 5]};
		for (int i = 0; i < PEERS; i++)
			anything(shares[i], WIRE_MAX, &seed);
		anything(local, sizeof local, &seed);
		memset(wire, 0, sizeof wire);
		zp__quantise_join(ZP__BASELINE, &how, wire[0], places, PEERS, round % PEERS, local, COUNT, 3);
		for (enum zp__isa isa = ZP__AVX2; isa < ZP__ISA_COUNT; isa++) {
			if (!zp__reduce_kernels_of(isa))
				continue;
			zp__quantise_join(isa, &how, wire[1], places, PEERS, round % PEERS, local, COUNT, 3);
			CHECK(memcmp(wire[0], wire[1], WIRE_MAX) == 0);
		}
	}
}

/* One rounding more than the shares have: half a step of the sum's range. */
static void test_sum(enum zp__isa isa)
{
	static double values[COUNT], sum[COUNT], result[COUNT];
	zp__quantiser how = {ZP_QUANTIZE_MIN_MAX, ZP_QUANTIZED_UINT8, ZP_DOUBLE, ZP_SUM, 128};
	uint64_t seed = 13;
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		memset(sum, 0, sizeof sum);
		for (uint32_t peer = 0; peer < PEERS; peer++) {
			for (size_t i = 0; i < COUNT; i++)
				values[i] = (double)(int64_t)random_next(&seed) / 0x1p63;
			if (peer == rank) {
				memcpy(local, values, sizeof values);
			} else {
				uint8_t *share = shares[peer - (peer > rank)];
				zp__quantise(isa, &how, share, values, COUNT);
				zp__dequantise(isa, &how, values, share, COUNT);
			}
			for (size_t i = 0; i < COUNT; i++)
				sum[i] += values[i];
		}
		zp__quantise_join(isa, &how, wire[0], places, PEERS, rank, local, COUNT, 1);
		zp__dequantise(isa, &how, result, wire[0], COUNT);
		for (size_t i = 0; i < COUNT; i++)
			CHECK(fabs(result[i] - sum[i]) <= 2.0 * PEERS / 510 * (1 + 1e-9));
	}
}

int main(void)
{
	for (int i = 0; i < PEERS; i++)
		places[i] = shares[i];
	for (enum zp__isa isa = ZP__BASELINE; isa < ZP__ISA_COUNT; isa++) {
		if (!zp__reduce_kernels_of(isa))
			continue;
		test_two_are_a_fold(isa);
		test_sum(isa);
	}
	test_isas_agree();
	return 0;
}
