/* CRC32C, in three implementations that give the same result: tables for any CPU, the crc32 instruction, and carry-less
 * multiplication of 512-bit registers. Pure functions over constant tables, which are made once; any thread may call.
 *
 * The crc32 instruction has a latency of three cycles and a throughput of one a cycle, so long inputs are cut in three
 * streams of LANE_BYTES that run side by side. They are joined by linearity: the CRC of A followed by n bytes B is
 * advance(crc(A), n) ^ crc(B), where advance() by a fixed n is a linear map of 32 bits, kept as four tables of 256.
 *
 * Folding reads 128 bits of the message as a polynomial V modulo the CRC's, and uses that V followed by n bits is
 * V x^n: so V is multiplied by a constant and added to the 128 bits that stand n bits further on. Bits are reversed:
 * bit i of a 64-bit word is the coefficient of x^(63-i). The product of two such words then reads as their product
 * times x, which the constants make up for. With V = H x^64 + L, the words H and L are multiplied by x^(n+63) and
 * x^(n-1). Sixteen streams run side by side, and the last 128 bits go through the crc32 instruction. */
#include "crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0x82f63b78u /* reversed */
#define ONE 0x80000000u	       /* the polynomial 1, reversed */
#define LANE_BYTES 2048u
#define FOLD_BYTES_MIN 512u

static uint32_t slices[8][256]; /* slices[k][b]: CRC state of byte b followed by k zero bytes */
static zp__crc32c_function *best;
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
typedef struct {
	uint64_t high, low; /* what the first and the second 64 bits are multiplied by */
} multipliers;

static uint32_t advance[4][256]; /* by LANE_BYTES zero bytes, of each byte of the state */
static multipliers by_128, by_512, by_2048;
#endif

static uint32_t zero_bits_append(uint32_t state, uint32_t bits)
{
	while (bits--)
		state = state & 1 ? (state >> 1) ^ POLYNOMIAL : state >> 1;
	return state;
}

#if defined(__x86_64__)
static multipliers multipliers_by(uint32_t bits)
{
	return (multipliers){(uint64_t)zero_bits_append(ONE, bits + 63) << 32,
			     (uint64_t)zero_bits_append(ONE, bits - 1) << 32};
}

static void hardware_tables_make(void)
{
	uint32_t columns[32];
	for (int bit = 0; bit < 32; bit++)
		columns[bit] = zero_bits_append((uint32_t)1 << bit, 8 * LANE_BYTES);
	for (int byte = 0; byte < 4; byte++)
		for (uint32_t b = 0; b < 256; b++)
			for (int bit = 0; bit < 8; bit++)
				if (b >> bit & 1)
					advance[byte][b] ^= columns[8 * byte + bit];
	by_128 = multipliers_by(128);
	by_512 = multipliers_by(512);
	by_2048 = multipliers_by(2048);
}
#endif

static uint64_t load64(const uint8_t *p)
{
	uint64_t value;
	memcpy(&value, p, sizeof value);
	return value;
}

static uint32_t by_tables(uint32_t crc, const void *data, size_t bytes)
{
	const uint8_t *p = data;
	uint32_t state = ~crc;
	for (; bytes >= 8; bytes -= 8, p += 8) {
		uint64_t v = load64(p) ^ state;
		state = slices[7][v & 0xff] ^ slices[6][v >> 8 & 0xff] ^ slices[5][v >> 16 & 0xff] ^
			slices[4][v >> 24 & 0xff] ^ slices[3][v >> 32 & 0xff] ^ slices[2][v >> 40 & 0xff] ^
			slices[1][v >> 48 & 0xff] ^ slices[0][v >> 56];
	}
	for (; bytes; bytes--)
		state = slices[0][(state ^ *p++) & 0xff] ^ (state >> 8);
	return ~state;
}

#if defined(__x86_64__)
static uint32_t lane_advance(uint64_t state)
{
	return advance[0][state & 0xff] ^ advance[1][state >> 8 & 0xff] ^ advance[2][state >> 16 & 0xff] ^
	       advance[3][state >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const void *data, size_t bytes)
{
	const uint8_t *p = data;
	uint64_t state = (uint32_t)~crc;
	for (; bytes >= 3 * LANE_BYTES; bytes -= 3 * LANE_BYTES, p += 3 * LANE_BYTES) {
		uint64_t second = 0, third = 0;
		for (size_t i = 0; i < LANE_BYTES; i += 8) {
			state = __builtin_ia32_crc32di(state, load64(p + i));
			second = __builtin_ia32_crc32di(second, load64(p + i + LANE_BYTES));
			third = __builtin_ia32_crc32di(third, load64(p + i + 2 * LANE_BYTES));
		}
		state = lane_advance(lane_advance(state) ^ second) ^ third;
	}
	for (; bytes >= 8; bytes -= 8, p += 8)
		state = __builtin_ia32_crc32di(state, load64(p));
	for (; bytes; bytes--)
		state = __builtin_ia32_crc32qi((uint32_t)state, *p++);
	return ~(uint32_t)state;
}

#define FOLDING __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

FOLDING static inline __m512i multipliers_load(const multipliers *m)
{
	return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)m->low, (long long)m->high));
}

/* Folds: multiplies each of the four 128-bit lanes of `v` by the constants of its distance to `next`, and adds `next`. */
FOLDING static inline __m512i fold(__m512i v, __m512i m, __m512i next)
{
	__m512i high = _mm512_clmulepi64_epi128(v, m, 0x00);
	__m512i low = _mm512_clmulepi64_epi128(v, m, 0x11);
	return _mm512_ternarylogic_epi64(high, low, next, 0x96); /* the sum of three */
}

/* The state of a CRC that began with 0, after the 512 bits `v`. */
FOLDING static inline uint32_t fold_finish(__m512i v)
{
	__m128i m = _mm512_castsi512_si128(multipliers_load(&by_128));
	__m128i parts[4], sum;
	_mm512_storeu_si512(parts, v);
	sum = parts[0];
	for (int i = 1; i < 4; i++) {
		__m128i high = _mm_clmulepi64_si128(sum, m, 0x00);
		__m128i low = _mm_clmulepi64_si128(sum, m, 0x11);
		sum = _mm_xor_si128(_mm_xor_si128(high, low), parts[i]);
	}
	uint64_t state = __builtin_ia32_crc32di(0, (uint64_t)_mm_cvtsi128_si64(sum));
	return (uint32_t)__builtin_ia32_crc32di(state, (uint64_t)_mm_extract_epi64(sum, 1));
}

FOLDING static uint32_t by_folding(uint32_t crc, const void *data, size_t bytes)
{
	if (bytes < FOLD_BYTES_MIN)
		return by_instruction(crc, data, bytes);
	const uint8_t *p = data;
	__m512i m = multipliers_load(&by_2048), v[4];
	for (int i = 0; i < 4; i++)
		v[i] = _mm512_loadu_si512(p + 64 * i);
	v[0] = _mm512_xor_si512(v[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
	for (p += 256, bytes -= 256; bytes >= 256; p += 256, bytes -= 256)
		for (int i = 0; i < 4; i++)
			v[i] = fold(v[i], m, _mm512_loadu_si512(p + 64 * i));
	m = multipliers_load(&by_512);
	for (int i = 1; i < 4; i++)
		v[0] = fold(v[0], m, v[i]);
	for (; bytes >= 64; p += 64, bytes -= 64)
		v[0] = fold(v[0], m, _mm512_loadu_si512(p));
	return by_instruction(~fold_finish(v[0]), p, bytes);
}
#endif

static void prepare(void)
{
	for (uint32_t b = 0; b < 256; b++) {
		slices[0][b] = zero_bits_append(b, 8);
		for (int k = 1; k < 8; k++)
			slices[k][b] = zero_bits_append(slices[k - 1][b], 8);
	}
#if defined(__x86_64__)
	hardware_tables_make();
#endif
	for (int level = ZP__CRC32C_TABLES; level <= ZP__CRC32C_FOLDING; level++) {
		zp__crc32c_function *function = zp__crc32c_of(level);
		best = function ? function : best;
	}
}

zp__crc32c_function *zp__crc32c_of(enum zp__crc32c_level level)
{
	if (level == ZP__CRC32C_TABLES)
		return by_tables;
#if defined(__x86_64__)
	bool has_instruction = __builtin_cpu_supports("sse4.2");
	if (level == ZP__CRC32C_INSTRUCTION && has_instruction)
		return by_instruction;
	if (level == ZP__CRC32C_FOLDING && has_instruction && __builtin_cpu_supports("pclmul") &&
	    __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
		return by_folding;
#endif
	return NULL;
}

uint32_t zp__crc32c(uint32_t crc, const void *data, size_t bytes)
{
	pthread_once(&once, prepare);
	return best(crc, data, bytes);
}
