/* The pool of regions: what is taken again, what is dropped, what time gives back; copying past the cache. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "engine.h"
#include "memory.h"
#include "sock.h"

#define MIB ((size_t)1 << 20)

/* A pool and its lock, without the I/O thread that would trim it by the clock while the test looks at it. */
static zp_engine *engine_make(void)
{
	zp_engine *engine = calloc(1, sizeof *engine);
	CHECK(engine && pthread_mutex_init(&engine->mutex, NULL) == 0);
	return engine;
}

static void engine_free(zp_engine *engine)
{
	zp__pool_discard(engine);
	pthread_mutex_destroy(&engine->mutex);
	free(engine);
}

static zp__region take(zp_engine *engine, size_t bytes)
{
	zp__region region = {0};
	CHECK(zp__region_take(engine, bytes, &region) == 0 && region.memory && region.bytes >= bytes);
	memset(region.memory, 0x5a, bytes);
	return region;
}

static void test_taken_again(void)
{
	zp_engine *engine = engine_make();
	zp__region first = take(engine, 64 * MIB), none = {0};
	uint8_t *memory = first.memory;
	zp__region_give(engine, &first);
	CHECK(!first.memory && engine->pool.count == 1 && engine->pool.idle_bytes == 64 * MIB);
	first = take(engine, 60 * MIB); /* A little less. */
	CHECK(first.memory == memory && engine->pool.count == 0);
	zp__region_give(engine, &first);
	zp__region_give(engine, &none);
	CHECK(engine->pool.count == 1 && engine->pool.used_bytes == 0);
	engine_free(engine);
}

/* Takes a region, and does what the I/O thread would do then. */
static zp__region take_and_trim(zp_engine *engine, size_t bytes)
{
	zp__region region = take(engine, bytes);
	zp__pool_trim(engine, zp__now_ns());
	return region;
}

/* Used and idle regions together do not exceed what was in use at a time. */
static void test_bound(void)
{
	zp_engine *engine = engine_make();
	zp__region a = take(engine, 8 * MIB), b = take(engine, 24 * MIB), c;
	zp__region_give(engine, &a);
	zp__region_give(engine, &b);
	c = take_and_trim(engine, 16 * MIB); /* Neither fits; the one that is idle longest goes, and then the other. */
	CHECK(engine->pool.count == 0 && engine->pool.used_bytes == 16 * MIB);
	zp__region_give(engine, &c);
	a = take_and_trim(engine, 4 * MIB);
	CHECK(engine->pool.count == 1 && engine->pool.used_bytes + engine->pool.idle_bytes <= 32 * MIB);
	zp__region_give(engine, &a);
	uint64_t seed = 3;
	for (int i = 0; i < 500; i++) {
		c = take_and_trim(engine, (1 + random_next(&seed) % 32) * (MIB / 4));
		CHECK(engine->pool.used_bytes + engine->pool.idle_bytes <= engine->pool.used_bytes_peak);
		CHECK(engine->pool.used_bytes_peak <= 32 * MIB && engine->pool.count <= ZP__POOL_REGIONS_MAX);
		zp__region_give(engine, &c);
	}
	engine_free(engine);
}

static void test_trim(void)
{
	zp_engine *engine = engine_make();
	zp__pool *pool = &engine->pool;
	zp__region a = take(engine, MIB), b = take(engine, 2 * MIB);
	uint8_t *memory = a.memory;
	zp__region_give(engine, &a);
	zp__region_give(engine, &b);
	uint64_t first_ns = pool->regions[0].idle_ns, second_ns = ++pool->regions[1].idle_ns;
	CHECK(zp__pool_trim(engine, first_ns + ZP__POOL_IDLE_NS - 1) == first_ns + ZP__POOL_IDLE_NS);
	CHECK(pool->count == 2 && first_ns < second_ns && !pool->regions[0].offered);
	CHECK(zp__pool_trim(engine, first_ns + ZP__POOL_IDLE_NS) == second_ns + ZP__POOL_IDLE_NS);
	CHECK(pool->count == 2 && pool->regions[0].offered && !pool->regions[1].offered);
	CHECK(zp__pool_trim(engine, second_ns + ZP__POOL_IDLE_NS) == first_ns + ZP__POOL_KEEP_NS);
	CHECK(pool->regions[0].offered && pool->regions[1].offered && pool->idle_bytes == 3 * MIB);

	a = take(engine, MIB); /* It is offered no more: what is written there stays. */
	CHECK(a.memory == memory && !a.offered && pool->count == 1 && pool->idle_bytes == 2 * MIB);
	zp__region_give(engine, &a);
	first_ns = pool->regions[1].idle_ns;
	CHECK(!pool->regions[1].offered && first_ns > second_ns);
	CHECK(zp__pool_trim(engine, second_ns + ZP__POOL_KEEP_NS) == first_ns + ZP__POOL_KEEP_NS);
	CHECK(pool->count == 1 && pool->regions[0].offered && pool->used_bytes_peak == MIB);
	CHECK(zp__pool_trim(engine, first_ns + ZP__POOL_KEEP_NS) == UINT64_MAX);
	CHECK(pool->count == 0 && pool->idle_bytes == 0 && pool->used_bytes_peak == 0);
	engine_free(engine);
}

static void test_copy(void)
{
	static uint8_t from[700], to[700], expected[700];
	for (size_t i = 0; i < sizeof from; i++)
		from[i] = (uint8_t)(i * 7 + 1);
	for (size_t start = 0; start < 65; start += 3)
		for (size_t bytes = 0; bytes < 300; bytes += 7) {
			memset(to, 0, sizeof to);
			memset(expected, 0, sizeof expected);
			memcpy(expected + start, from + start / 2, bytes);
			zp__copy_past_cache(to + start, from + start / 2, bytes);
			zp__copy_past_cache_done();
			CHECK(memcmp(to, expected, sizeof to) == 0);
		}
}

int main(void)
{
	test_taken_again();
	test_bound();
	test_trim();
	test_copy();
	return 0;
}
