/* CRC32C against known vectors and a bit-by-bit reference, on all levels that the CPU has; the digest. */
#include <string.h>

#include "check.h"
#include "digest.h"

static uint32_t reference(uint32_t crc, const uint8_t *p, size_t bytes)
{
	crc = ~crc;
	while (bytes--) {
		crc ^= *p++;
		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
	}
	return ~crc;
}

static void test_known_vectors(void)
{
	uint8_t data[48];
	CHECK(zp__crc32c(0, "", 0) == 0);
	CHECK(zp__crc32c(0, "123456789", 9) == 0xe3069283u);
	memset(data, 0, 32);
	CHECK(zp__crc32c(0, data, 32) == 0x8a9136aau);
	memset(data, 0xff, 32);
	CHECK(zp__crc32c(0, data, 32) == 0x62a8ab43u);
	for (int i = 0; i < 32; i++)
		data[i] = (uint8_t)i;
	CHECK(zp__crc32c(0, data, 32) == 0x46dd794eu);
}

static void test_levels_agree(void)
{
	enum { BYTES = 40000 };
	static uint8_t data[BYTES];
	uint64_t seed = 1;
	for (int i = 0; i < BYTES; i++)
		data[i] = (uint8_t)random_next(&seed);
	static const size_t lengths[] = {0,   1,    7,	 8,    9,    63,   511,   512,   513,  575,
					 576, 767,  768, 1023, 2047, 2048, 6143,  6144,  6145, 12288,
					 12295, 30000};
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (size_t start = 0; start < 9; start++) {
			uint32_t begin = (uint32_t)random_next(&seed);
			uint32_t expected = reference(begin, data + start, lengths[i]);
			CHECK(zp__crc32c(begin, data + start, lengths[i]) == expected);
			for (int level = ZP__CRC32C_TABLES; level <= ZP__CRC32C_FOLDING; level++) {
				zp__crc32c_function *function = zp__crc32c_of(level);
				CHECK(function || level != ZP__CRC32C_TABLES);
				CHECK(!function || function(begin, data + start, lengths[i]) == expected);
			}
			size_t cut = lengths[i] ? random_next(&seed) % lengths[i] : 0;
			uint32_t part = zp__crc32c(begin, data + start, cut);
			CHECK(zp__crc32c(part, data + start + cut, lengths[i] - cut) == expected);
		}
}

static void test_digest(void)
{
	/* Order does not matter by construction (a sum). Swapped, repeated or shifted contents must change it. */
	CHECK(zp__digest_share(0, 5) + zp__digest_share(1, 6) != zp__digest_share(0, 6) + zp__digest_share(1, 5));
	CHECK(zp__digest_share(0, 5) + zp__digest_share(1, 5) != zp__digest_share(0, 6) + zp__digest_share(1, 6));
	CHECK(zp__digest_share(0, 5) + zp__digest_share(1, 5) != zp__digest_share(0, 4) + zp__digest_share(1, 6));
	uint64_t seed = 2, total_bits = 0;
	for (int i = 0; i < 4096; i++) {
		uint64_t slot = random_next(&seed) % 1000;
		uint32_t crc = (uint32_t)random_next(&seed), flip = 1u << random_next(&seed) % 32;
		total_bits += (uint64_t)__builtin_popcountll(zp__digest_share(slot, crc) ^
							     zp__digest_share(slot, crc ^ flip));
	}
	CHECK(total_bits > 4096 * 30 && total_bits < 4096 * 34);
}

int main(void)
{
	test_known_vectors();
	test_levels_agree();
	test_digest();
	return 0;
}
