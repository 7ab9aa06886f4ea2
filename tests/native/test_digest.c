/* The checksum against vectors that tests/engine_mesh.py computes in another way, by all implementations that the CPU has;
 * what it must tell apart; and the digest. */
#include <string.h>

#include "check.h"
#include "digest.h"

#define BLOCK ZP__CHECKSUM_BLOCK_BYTES

enum { BYTES = 600000 };
static uint8_t data[BYTES]; /* byte i is i * 167 + i / 256 */

static void test_known_vectors(void)
{
	static const struct {
		size_t bytes;
		uint64_t checksum;
	} vectors[] = {{0, 0},
		       {1, 0xc2c58b5bbee7c620},
		       {9, 0x388b97b2aae1a7b1},
		       {16, 0x4b595534c9203465},
		       {36, 0x2db620b787aca49f},
		       {64, 0x3fe491c8e67f162d},
		       {1023, 0xa516d944d981c202},
		       {1024, 0xc96d7b4f4d412b84},
		       {1025, 0xd315bf80a8c822c9},
		       {5000, 0x80df8cbcb76afb15},
		       {600000, 0xf42fe85b56f1dd1a}};
	for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
		CHECK(zp__checksum_of(data, vectors[i].bytes) == vectors[i].checksum);
}

/* Wherever the bytes are. What lies beside them does not count. */
static void test_addresses(void)
{
	static uint8_t moved[64 + 3 * BLOCK];
	for (size_t bytes = 1; bytes < 3 * BLOCK; bytes += 37)
		for (size_t start = 0; start < 64; start += 5) {
			memset(moved, (int)start, sizeof moved);
			memcpy(moved + start, data, bytes);
			CHECK(zp__checksum_of(moved + start, bytes) == zp__checksum_of(data, bytes));
		}
}

/* Two pieces, cut at every byte; and many. */
static void test_pieces(void)
{
	enum { LENGTH = 5 * BLOCK + 77 };
	uint64_t expected = zp__checksum_of(data, LENGTH), seed = 1;
	for (size_t cut = 0; cut <= LENGTH; cut++) {
		zp__checksum checksum = {.bytes = 0};
		zp__checksum_advance(&checksum, data, cut);
		CHECK(zp__checksum_finish(&checksum, data, LENGTH) == expected);
	}
	for (int repeat = 0; repeat < 200; repeat++) {
		zp__checksum checksum = {.bytes = 0};
		for (size_t at = 0; at <= LENGTH; at += random_next(&seed) % 2000)
			zp__checksum_advance(&checksum, data, at);
		CHECK(zp__checksum_finish(&checksum, data, LENGTH) == expected);
	}
}

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

static void check_distinct(uint64_t *checksums, size_t count)
{
	qsort(checksums, count, sizeof *checksums, compare);
	for (size_t i = 1; i < count; i++)
		CHECK(checksums[i] != checksums[i - 1]);
}

static void test_zeros_of_every_length(void)
{
	static const uint8_t zeros[4 * BLOCK];
	static uint64_t checksums[4 * BLOCK];
	for (size_t bytes = 0; bytes < 4 * BLOCK; bytes++)
		checksums[bytes] = zp__checksum_of(zeros, bytes);
	check_distinct(checksums, 4 * BLOCK);
}

/* Every flipped bit changes the checksum, and the half of it that headers carry; no two give the same. */
static void test_flipped_bits(void)
{
	enum { LENGTH = 2 * BLOCK + 100 };
	static uint8_t body[LENGTH];
	static uint64_t checksums[8 * LENGTH + 1];
	for (int zeros = 0; zeros < 2; zeros++) {
		for (size_t i = 0; i < LENGTH; i++)
			body[i] = zeros ? 0 : data[i];
		uint64_t whole = checksums[8 * LENGTH] = zp__checksum_of(body, LENGTH);
		for (size_t bit = 0; bit < 8 * LENGTH; bit++) {
			body[bit / 8] ^= (uint8_t)(1u << bit % 8);
			checksums[bit] = zp__checksum_of(body, LENGTH);
			CHECK((uint32_t)checksums[bit] != (uint32_t)whole);
			body[bit / 8] ^= (uint8_t)(1u << bit % 8);
		}
		check_distinct(checksums, 8 * LENGTH + 1);
	}
}

/* What a faulty line of a bus or a wrong address leaves behind: the same bit of two words is wrong, or one is as much too
 * large as another is too small; two words, lines of a cache or blocks are swapped. */
static void test_pairs_of_changes(void)
{
	enum { WORDS = 4 * BLOCK / 8 };
	static const size_t units[] = {1, 2, 8, BLOCK / 8};
	uint64_t words[WORDS], line[BLOCK / 8], seed = 3;
	for (int repeat = 0; repeat < 3000; repeat++) {
		for (size_t i = 0; i < WORDS; i++)
			words[i] = repeat % 3 == 0 ? i : repeat % 3 == 1 ? i % 64 : random_next(&seed);
		uint64_t before = zp__checksum_of(words, sizeof words), by = (uint64_t)1 << random_next(&seed) % 64;
		size_t unit = units[random_next(&seed) % 4], count = WORDS / unit, one = random_next(&seed) % count;
		size_t other = (one + 1 + random_next(&seed) % (count - 1)) % count;
		uint64_t *a = words + one * unit, *b = words + other * unit;
		*a ^= by, *b ^= by;
		CHECK(zp__checksum_of(words, sizeof words) != before);
		*a ^= by, *b ^= by;
		*a += by, *b -= by;
		CHECK(zp__checksum_of(words, sizeof words) != before);
		*a -= by, *b += by;
		if (memcmp(a, b, 8 * unit) == 0)
			continue;
		memcpy(line, a, 8 * unit);
		memcpy(a, b, 8 * unit);
		memcpy(b, line, 8 * unit);
		CHECK(zp__checksum_of(words, sizeof words) != before);
	}
}

/* A flipped bit of the input flips each bit of the checksum as often as not: of 4,096 flips 2,048 do, with a standard
 * deviation of 32; here within 6 of these. */
static void test_avalanche(void)
{
	enum { FLIPS = 4096 };
	static const size_t lengths[] = {1, 8, 36, 1024, 3000};
	uint8_t body[3000];
	uint64_t seed = 4;
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		uint32_t flipped[64] = {0};
		for (size_t at = 0; at < lengths[i]; at++)
			body[at] = (uint8_t)(random_next(&seed) >> 32);
		for (int flip = 0; flip < FLIPS; flip++) {
			uint64_t random = random_next(&seed), bit = (random >> 32) % (8 * lengths[i]);
			body[random % lengths[i]] ^= (uint8_t)(random >> 24); /* also where a body has fewer bits than that */
			uint64_t before = zp__checksum_of(body, lengths[i]);
			body[bit / 8] ^= (uint8_t)(1u << bit % 8);
			uint64_t changed = before ^ zp__checksum_of(body, lengths[i]);
			for (int b = 0; b < 64; b++)
				flipped[b] += changed >> b & 1;
		}
		for (int b = 0; b < 64; b++)
			CHECK(flipped[b] > FLIPS / 2 - 192 && flipped[b] < FLIPS / 2 + 192);
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
		uint64_t slot = random_next(&seed) % 1000, checksum = random_next(&seed);
		uint64_t flip = (uint64_t)1 << random_next(&seed) % 64;
		total_bits += (uint64_t)__builtin_popcountll(zp__digest_share(slot, checksum) ^
							     zp__digest_share(slot, checksum ^ flip));
	}
	CHECK(total_bits > 4096 * 31 && total_bits < 4096 * 33);
}

int main(void)
{
	CHECK(zp__checksum_use(ZP__CHECKSUM_PORTABLE));
	for (size_t i = 0; i < BYTES; i++)
		data[i] = (uint8_t)(i * 167 + (i >> 8));
	for (int level = ZP__CHECKSUM_PORTABLE; level <= ZP__CHECKSUM_WIDE; level++) {
		if (!zp__checksum_use(level))
			continue;
		test_known_vectors();
		test_addresses();
		test_pieces();
		test_zeros_of_every_length();
		test_flipped_bits();
		test_pairs_of_changes();
		test_avalanche();
	}
	test_digest();
	return 0;
}
