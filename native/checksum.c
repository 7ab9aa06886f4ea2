/* The checksum of a span of bytes. Pure functions over constant tables, which are made once; any thread may call them.
 *
 * Definition. Zeros are added until the bytes are whole pairs of little-endian words of 64 bits. A word stands for a
 * polynomial over the field of two elements: bit i is the coefficient of x^i, + is exclusive or, and products are
 * carry-less. The words a, b, c, d, ... of block n, which has 1024 bytes, are summed with keys, which are the same in
 * each block:
 *     S(n) = (a + k0) (b + k1) + (c + k2) (d + k3) + ...
 * The blocks are summed with factors, modulo P = x^64 + x^4 + x^3 + x + 1, which is irreducible:
 *     V(n) = S(n) + f(n) V(n - 1)
 * The checksum is zp__mix() of the last V + the number of bytes. The keys, and then 512 factors, which repeat after 512
 * blocks, are the output of SplitMix64 that starts from 0 (Steele, Lea, Flood: Fast splittable pseudorandom number
 * generators, 2014). V is kept in 128 bits, V = H x^64 + L, so that V f is H (f x^64 mod P) + L f, without a reduction.
 * The widest implementation keeps four such V, one for each fourth pair, and adds them at the end.
 *
 * Probability that a difference is missed, computed as if keys and factors were random. Take two spans of the same
 * length, at most 512 KiB. The difference of their V is linear in the keys. The coefficient of a key is a sum over the
 * blocks: the difference of the word beside that key, times the factors that follow. If one such sum is not 0, the V
 * are equal for only one value of its key in 2^64. All sums are 0 only if the sum of a word that differs is 0. Let n be
 * the last block in which that word differs: then f(n) must have one value in 2^64; if n is the only such block, the
 * sum is never 0. So any difference is missed at most 2 times in 2^64. Sources: NH (Black, Halevi, Krawczyk, Krovetz,
 * Rogaway: UMAC, 1999), with carry-less products (Lemire, Kaser: Faster 64-bit universal hashing using carry-less
 * multiplications, 2015).
 *
 * Keys and factors are constants. So this holds for differences that do not depend on them: faults of memory, CPUs and
 * programs. It does not hold against somebody who knows them: if a word is equal to its key, the word beside it has no
 * effect.
 *
 * For the speed, and for why it is not a sum of integer products, which would need no intrinsics, see docs/adr/0022. */
#include "checksum.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define BLOCK ZP__CHECKSUM_BLOCK_BYTES
#define BLOCKS 512u /* number of blocks with different factors */

typedef uint64_t pair __attribute__((vector_size(16)));

typedef struct {
	void (*blocks)(uint64_t sum[2], uint64_t block, const uint8_t *p, size_t count);
	void (*rest)(uint64_t sum[2], uint64_t block, const uint8_t *p, size_t bytes);
} kernels;

static uint64_t keys[BLOCK / 8] __attribute__((aligned(64)));
static pair factors[BLOCKS]; /* f, f x^64 mod P */
static kernels best;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The output function of SplitMix64. */
uint64_t zp__mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

static uint64_t generated(uint64_t number)
{
	return zp__mix((number + 1) * 0x9e3779b97f4a7c15u);
}

/* high x^64 + low, modulo P. */
static uint64_t reduced(uint64_t low, uint64_t high)
{
	uint64_t beyond = high >> 63 ^ high >> 61 ^ high >> 60; /* the bits that the shifts of the next line drop */
	low ^= high ^ high << 1 ^ high << 3 ^ high << 4;
	return low ^ beyond ^ beyond << 1 ^ beyond << 3 ^ beyond << 4;
}

/* The carry-less product, four bits at a time. Not inlined, because the loops around it are unrolled. */
__attribute__((noinline)) static pair product(uint64_t a, uint64_t b)
{
	unsigned __int128 multiples[16] = {0, a}, sum = 0;
	for (int i = 2; i < 16; i += 2) {
		multiples[i] = multiples[i / 2] << 1;
		multiples[i + 1] = multiples[i] ^ a;
	}
	for (int shift = 60; shift >= 0; shift -= 4)
		sum = sum << 4 ^ multiples[b >> shift & 15];
	return (pair){(uint64_t)sum, (uint64_t)(sum >> 64)};
}

#define ZP__NAME(name) name##_portable
#define ZP__TARGET
#define ZP__WIDTH 16
#define ZP__SPREAD(m) (m)
#define ZP__PRODUCT(a, i, b, j) product((a)[i], (b)[j])
#include "checksum_kernels.h"

#if defined(__x86_64__)
#define ZP__NAME(name) name##_pair
#define ZP__TARGET __attribute__((target("pclmul")))
#define ZP__WIDTH 16
#define ZP__SPREAD(m) (m)
#define ZP__PRODUCT(a, i, b, j) (pair) _mm_clmulepi64_si128((__m128i)(a), (__m128i)(b), (i) | (j) << 4)
#include "checksum_kernels.h"

#define ZP__NAME(name) name##_wide
#define ZP__TARGET __attribute__((target("avx512f,pclmul,vpclmulqdq")))
#define ZP__WIDTH 64
#define ZP__SPREAD(m) (vector_wide) _mm512_broadcast_i32x4((__m128i)(m))
#define ZP__PRODUCT(a, i, b, j) (vector_wide) _mm512_clmulepi64_epi128((__m512i)(a), (__m512i)(b), (i) | (j) << 4)
#include "checksum_kernels.h"
#elif defined(__aarch64__)
#define ZP__NAME(name) name##_pair
#if defined(__clang__)
#define ZP__TARGET __attribute__((target("aes")))
#else
#define ZP__TARGET __attribute__((target("+crypto")))
#endif
#define ZP__WIDTH 16
#define ZP__SPREAD(m) (m)
#define ZP__PRODUCT(a, i, b, j) (pair) vreinterpretq_u64_p128(vmull_p64((a)[i], (b)[j]))
#include "checksum_kernels.h"
#endif

/* Finds the kernels of a level. False: this CPU or this build lacks them. */
static bool kernels_of(enum zp__checksum_level level, kernels *found)
{
	if (level == ZP__CHECKSUM_PORTABLE) {
		*found = (kernels){blocks_portable, rest_portable};
		return true;
	}
#if defined(__x86_64__)
	bool has_pair = __builtin_cpu_supports("pclmul");
	bool has_wide = has_pair && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
	if (level == ZP__CHECKSUM_PAIR ? has_pair : has_wide) {
		*found = (kernels){level == ZP__CHECKSUM_PAIR ? blocks_pair : blocks_wide, rest_pair};
		return true;
	}
#elif defined(__aarch64__)
	if (level == ZP__CHECKSUM_PAIR && getauxval(AT_HWCAP) & HWCAP_PMULL) {
		*found = (kernels){blocks_pair, rest_pair};
		return true;
	}
#endif
	return false;
}

static void prepare(void)
{
	for (size_t i = 0; i < BLOCK / 8; i++)
		keys[i] = generated(i);
	for (size_t i = 0; i < BLOCKS; i++) {
		uint64_t factor = generated(BLOCK / 8 + i);
		factors[i] = (pair){factor, reduced(0, factor)};
	}
	for (int level = ZP__CHECKSUM_PORTABLE; level <= ZP__CHECKSUM_WIDE; level++)
		kernels_of(level, &best);
}

/* Adds the whole blocks, and returns the address of the bytes after them. */
static const uint8_t *blocks_add(zp__checksum *checksum, const void *data, size_t bytes)
{
	const uint8_t *from = (const uint8_t *)data + checksum->bytes;
	size_t count = (bytes - checksum->bytes) / BLOCK;
	pthread_once(&once, prepare);
	if (count)
		best.blocks(checksum->sum, checksum->bytes / BLOCK, from, count);
	checksum->bytes += count * BLOCK;
	return from + count * BLOCK;
}

void zp__checksum_advance(zp__checksum *checksum, const void *data, size_t bytes)
{
	blocks_add(checksum, data, bytes);
}

uint64_t zp__checksum_finish(zp__checksum *checksum, const void *data, size_t bytes)
{
	const uint8_t *rest = blocks_add(checksum, data, bytes);
	if (checksum->bytes < bytes)
		best.rest(checksum->sum, checksum->bytes / BLOCK, rest, bytes - checksum->bytes);
	return zp__mix(reduced(checksum->sum[0], checksum->sum[1]) ^ bytes);
}

uint64_t zp__checksum_of(const void *data, size_t bytes)
{
	zp__checksum none = {.bytes = 0};
	return zp__checksum_finish(&none, data, bytes);
}

bool zp__checksum_use(enum zp__checksum_level level)
{
	pthread_once(&once, prepare);
	return kernels_of(level, &best);
}
