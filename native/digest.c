/* CRC32C and the digest of a result. Pure functions over constant tables, which are made once; any thread may call.
 *
 * The crc32 instruction has a latency of three cycles and a throughput of one a cycle, so long inputs are cut in three
 * streams of LANE_BYTES that run side by side. They are joined by linearity: the CRC of A followed by n bytes B is
 * advance(crc(A), n) ^ crc(B), where advance() by a fixed n is a linear map of 32 bits, kept as four tables of 256. */
#include "digest.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u /* reversed */
#define LANE_BYTES 2048u

static uint32_t slices[8][256];	   /* slices[k][b]: CRC state of byte b followed by k zero bytes */
static uint32_t advance[4][256];   /* by LANE_BYTES zero bytes, of each byte of the state */
static bool has_hardware;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t zeros_append(uint32_t state, uint32_t bytes)
{
	while (bytes--)
		state = slices[0][state & 0xff] ^ (state >> 8);
	return state;
}

static void tables_make(void)
{
	for (uint32_t b = 0; b < 256; b++) {
		uint32_t state = b;
		for (int bit = 0; bit < 8; bit++)
			state = state & 1 ? (state >> 1) ^ POLYNOMIAL : state >> 1;
		slices[0][b] = state;
	}
	for (uint32_t b = 0; b < 256; b++)
		for (int k = 1; k < 8; k++)
			slices[k][b] = zeros_append(slices[k - 1][b], 1);
	uint32_t columns[32];
	for (int bit = 0; bit < 32; bit++)
		columns[bit] = zeros_append((uint32_t)1 << bit, LANE_BYTES);
	for (int byte = 0; byte < 4; byte++)
		for (uint32_t b = 0; b < 256; b++)
			for (int bit = 0; bit < 8; bit++)
				if (b >> bit & 1)
					advance[byte][b] ^= columns[8 * byte + bit];
#if defined(__x86_64__)
	has_hardware = __builtin_cpu_supports("sse4.2");
#endif
}

static uint64_t load64(const uint8_t *p)
{
	uint64_t value;
	memcpy(&value, p, sizeof value);
	return value;
}

uint32_t zp__crc32c_software(uint32_t crc, const void *data, size_t bytes)
{
	pthread_once(&once, tables_make);
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

__attribute__((target("sse4.2"))) uint32_t zp__crc32c_hardware(uint32_t crc, const void *data, size_t bytes)
{
	pthread_once(&once, tables_make);
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
#else
uint32_t zp__crc32c_hardware(uint32_t crc, const void *data, size_t bytes)
{
	return zp__crc32c_software(crc, data, bytes);
}
#endif

int zp__crc32c_has_hardware(void)
{
	pthread_once(&once, tables_make);
	return has_hardware;
}

uint32_t zp__crc32c(uint32_t crc, const void *data, size_t bytes)
{
	return zp__crc32c_has_hardware() ? zp__crc32c_hardware(crc, data, bytes)
					 : zp__crc32c_software(crc, data, bytes);
}

/* Two rounds of multiply and fold over odd constants: every input bit reaches every output bit, so that sums of shares
 * do not cancel by the structure of CRCs or of slot numbers. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc)
{
	uint64_t x = slot * 0x9e3779b97f4a7c15u + crc + 1;
	x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
	x = (x ^ x >> 29) * 0xa0761d6478bd642fu;
	return x ^ x >> 32;
}
