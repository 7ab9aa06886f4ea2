/* Adds whole blocks, and the bytes after them, to a sum. checksum.c includes this file for each implementation, with
 *   ZP__NAME(name)          the names, and ZP__TARGET the attributes of the functions
 *   ZP__WIDTH               bytes of a vector, which holds one pair of words or more
 *   ZP__SPREAD(m)           a vector of pairs that are all `m`
 *   ZP__PRODUCT(a, i, b, j) of each pair, the carry-less product of word i of `a` and word j of `b`: a pair
 * No alignment is assumed. */

typedef uint64_t ZP__NAME(vector) __attribute__((vector_size(ZP__WIDTH)));

/* The sum of the products of `bytes` bytes, whole vectors at the start of a block. */
ZP__TARGET static inline ZP__NAME(vector) ZP__NAME(products)(const uint8_t *p, size_t bytes)
{
	ZP__NAME(vector) sum = {0}, a, key;
	_Pragma("GCC unroll 16") for (size_t i = 0; i < bytes; i += ZP__WIDTH)
	{
		memcpy(&a, p + i, sizeof a);
		memcpy(&key, keys + i / 8, sizeof key);
		a ^= key;
		sum ^= ZP__PRODUCT(a, 0, a, 1);
	}
	return sum;
}

/* Adds `count` blocks, the first of which has the number `block`. */
ZP__TARGET static void ZP__NAME(blocks)(uint64_t sum[2], uint64_t block, const uint8_t *p, size_t count)
{
	ZP__NAME(vector) v = {sum[0], sum[1]};
	for (; count; count--, block++, p += BLOCK) {
		ZP__NAME(vector) by = ZP__SPREAD(factors[block % BLOCKS]);
		v = ZP__PRODUCT(v, 0, by, 0) ^ ZP__PRODUCT(v, 1, by, 1) ^ ZP__NAME(products)(p, BLOCK);
	}
	sum[0] = sum[1] = 0;
	for (size_t i = 0; i < ZP__WIDTH / 8; i++)
		sum[i % 2] ^= v[i];
}

#if ZP__WIDTH == 16
/* Adds the last block, which is shorter, and zeros that make its bytes whole pairs. */
ZP__TARGET static void ZP__NAME(rest)(uint64_t sum[2], uint64_t block, const uint8_t *p, size_t bytes)
{
	size_t odd = bytes % 16, whole = bytes - odd;
	pair v = {sum[0], sum[1]}, by = factors[block % BLOCKS];
	v = ZP__PRODUCT(v, 0, by, 0) ^ ZP__PRODUCT(v, 1, by, 1) ^ ZP__NAME(products)(p, whole);
	if (odd) {
		unsigned __int128 last = 0;
		if (whole) {
			memcpy(&last, p + bytes - 16, 16);
			last >>= 128 - 8 * odd;
		} else {
			memcpy(&last, p, odd);
		}
		pair a = {keys[whole / 8] ^ (uint64_t)last, keys[whole / 8 + 1] ^ (uint64_t)(last >> 64)};
		v ^= ZP__PRODUCT(a, 0, a, 1);
	}
	sum[0] = v[0];
	sum[1] = v[1];
}
#endif

#undef ZP__NAME
#undef ZP__TARGET
#undef ZP__WIDTH
#undef ZP__SPREAD
#undef ZP__PRODUCT
