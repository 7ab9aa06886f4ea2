/* Memory that does not come from the heap: mapped regions, the pool that keeps some for the next attempt, and copying
 * past the cache.
 *
 * The pool. Fresh memory is zeroed page by page as it is touched, which costs more than all that an attempt does with
 * it. So regions go to a pool, under the lock, and are taken again for a like size. Idle and used ones together are, but
 * for a moment, never more than what was in use at a time since the pool was trimmed. What nobody takes for
 * ZP__POOL_IDLE_NS is offered to the system, which takes it when it runs short: until then it costs nobody anything, and
 * to touch new memory in the middle of a call may take seconds, where a hypervisor has to find it first. After
 * ZP__POOL_KEEP_NS it is unmapped. All this is done by the first I/O thread, and all of mapping, offering and unmapping
 * without the lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "zp_internal.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define LINE_BYTES 64u
#define WASTE_PARTS 8u /* of a region that is taken, one of so many parts may stay unused */

/* Zeroed memory that costs nothing until it is touched and goes back to the system when it is unmapped. NULL: none. */
void *zp__memory_map(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return NULL;
	if (bytes >= 2 * HUGE_PAGE_BYTES)
		(void)madvise(memory, bytes, MADV_HUGEPAGE);
	return memory;
}

void zp__memory_unmap(void *memory, size_t bytes)
{
	if (memory)
		munmap(memory, bytes);
}

/* Lock held. Takes a region out of the pool. */
static zp__region pool_remove(zp__pool *pool, uint32_t index)
{
	zp__region region = pool->regions[index];
	pool->count--;
	memmove(pool->regions + index, pool->regions + index + 1, (pool->count - index) * sizeof region);
	pool->idle_bytes -= region.bytes;
	return region;
}

/* Lock held. The smallest region of at least `bytes` and not much more, or count. */
static uint32_t pool_find(const zp__pool *pool, size_t bytes)
{
	uint32_t found = pool->count;
	for (uint32_t i = 0; i < pool->count; i++) {
		size_t has = pool->regions[i].bytes;
		if (has >= bytes && has - bytes <= has / WASTE_PARTS &&
		    (found == pool->count || has < pool->regions[found].bytes))
			found = i;
	}
	return found;
}

/* Lock held. The region that is idle longest of those that are not offered yet, or count. */
static uint32_t pool_offer_next(const zp__pool *pool)
{
	uint32_t index = 0;
	while (index < pool->count && pool->regions[index].offered)
		index++;
	return index;
}

/* Finds or maps a region of at least `bytes`, none for 0; what is in it is undefined. -ENOMEM. */
int zp__region_take(zp_engine *engine, size_t bytes, zp__region *region)
{
	zp__pool *pool = &engine->pool;
	*region = (zp__region){0};
	if (!bytes)
		return 0;
	pthread_mutex_lock(&engine->mutex);
	uint32_t index = pool_find(pool, bytes);
	*region = index < pool->count ? pool_remove(pool, index) : (zp__region){.bytes = bytes};
	region->offered = false; /* What is written from now on stays. */
	pool->used_bytes += region->bytes;
	if (pool->used_bytes_peak < pool->used_bytes)
		pool->used_bytes_peak = pool->used_bytes;
	if (pool->used_bytes + pool->idle_bytes > pool->used_bytes_peak && engine->thread_count)
		zp__thread_wake(&engine->threads[0]); /* It trims: unmapping takes long. */
	pthread_mutex_unlock(&engine->mutex);
	if (!region->memory)
		region->memory = zp__memory_map(bytes);
	if (region->memory)
		return 0;
	pthread_mutex_lock(&engine->mutex);
	pool->used_bytes -= region->bytes;
	pthread_mutex_unlock(&engine->mutex);
	return -ENOMEM;
}

/* Gives back a region that zp__region_take() gave, or none. */
void zp__region_give(zp_engine *engine, zp__region *region)
{
	zp__pool *pool = &engine->pool;
	if (!region->memory)
		return;
	zp__region surplus = {0};
	pthread_mutex_lock(&engine->mutex);
	if (pool->count == ZP__POOL_REGIONS_MAX)
		surplus = pool_remove(pool, 0);
	pool->used_bytes -= region->bytes;
	pool->idle_bytes += region->bytes;
	region->idle_ns = zp__now_ns();
	pool->regions[pool->count++] = *region;
	if (pool_offer_next(pool) == pool->count - 1 && engine->thread_count)
		zp__thread_wake(&engine->threads[0]); /* It trims, and waits for no earlier one. */
	pthread_mutex_unlock(&engine->mutex);
	zp__memory_unmap(surplus.memory, surplus.bytes);
	*region = (zp__region){0};
}

/* Lock held. Puts a region that is offered to the system back to those that are idle as long, or leaves it in `region` if
 * others have taken its room. */
static void pool_return(zp__pool *pool, zp__region *region)
{
	if (pool->count == ZP__POOL_REGIONS_MAX || pool->used_bytes + pool->idle_bytes + region->bytes > pool->used_bytes_peak)
		return;
	uint32_t index = 0;
	while (index < pool->count && pool->regions[index].idle_ns <= region->idle_ns)
		index++;
	memmove(pool->regions + index + 1, pool->regions + index, (pool->count - index) * sizeof *region);
	pool->regions[index] = *region;
	pool->idle_bytes += region->bytes;
	pool->count++;
	*region = (zp__region){0};
}

/* Lock held at entry and at return, not in between. */
static void pool_offer(zp_engine *engine, zp__region region)
{
	zp__pool *pool = &engine->pool;
	pthread_mutex_unlock(&engine->mutex);
	region.offered = madvise(region.memory, region.bytes, MADV_FREE) == 0;
	pthread_mutex_lock(&engine->mutex);
	if (region.offered)
		pool_return(pool, &region);
	if (!region.memory)
		return;
	pool->used_bytes_peak = pool->used_bytes + pool->idle_bytes;
	pthread_mutex_unlock(&engine->mutex);
	zp__memory_unmap(region.memory, region.bytes); /* The kernel takes no offers, or there is no room. */
	pthread_mutex_lock(&engine->mutex);
}

uint64_t zp__pool_trim(zp_engine *engine, uint64_t now_ns)
{
	zp__pool *pool = &engine->pool;
	zp__region expired[ZP__POOL_REGIONS_MAX];
	uint32_t count = 0, next;
	uint64_t next_ns = UINT64_MAX;
	pthread_mutex_lock(&engine->mutex);
	while (pool->count && pool->used_bytes + pool->idle_bytes > pool->used_bytes_peak)
		expired[count++] = pool_remove(pool, 0);
	uint32_t surplus = count;
	while (pool->count && pool->regions[0].idle_ns + ZP__POOL_KEEP_NS <= now_ns)
		expired[count++] = pool_remove(pool, 0);
	if (count > surplus)
		pool->used_bytes_peak = pool->used_bytes + pool->idle_bytes;
	while ((next = pool_offer_next(pool)) < pool->count && pool->regions[next].idle_ns + ZP__POOL_IDLE_NS <= now_ns)
		pool_offer(engine, pool_remove(pool, next));
	if (pool->count)
		next_ns = pool->regions[0].idle_ns + ZP__POOL_KEEP_NS;
	if (next < pool->count && pool->regions[next].idle_ns + ZP__POOL_IDLE_NS < next_ns)
		next_ns = pool->regions[next].idle_ns + ZP__POOL_IDLE_NS;
	pthread_mutex_unlock(&engine->mutex);
	for (uint32_t i = 0; i < count; i++)
		zp__memory_unmap(expired[i].memory, expired[i].bytes);
	return next_ns;
}

/* The threads have ended. */
void zp__pool_discard(zp_engine *engine)
{
	while (engine->pool.count) {
		zp__region region = pool_remove(&engine->pool, 0);
		zp__memory_unmap(region.memory, region.bytes);
	}
}

/* A memcpy whose target is not read soon: it is not fetched to the cache first and drives nothing out of it. The bytes
 * are visible to other threads after zp__copy_past_cache_done() and a lock. */
void zp__copy_past_cache(void *to, const void *from, size_t bytes)
{
	uint8_t *t = to;
	const uint8_t *f = from;
#if defined(__x86_64__)
	size_t head = -(uintptr_t)t % LINE_BYTES;
	if (head > bytes)
		head = bytes;
	memcpy(t, f, head);
	t += head, f += head, bytes -= head;
	for (; bytes >= LINE_BYTES; bytes -= LINE_BYTES, t += LINE_BYTES, f += LINE_BYTES)
		for (size_t i = 0; i < LINE_BYTES; i += 16)
			_mm_stream_si128((__m128i *)(void *)(t + i), _mm_loadu_si128((const __m128i *)(const void *)(f + i)));
#endif
	memcpy(t, f, bytes);
}

void zp__copy_past_cache_done(void)
{
#if defined(__x86_64__)
	_mm_sfence();
#endif
}
