/* Memory that does not come from the heap: mapped regions, the pool that keeps some for the next attempt, and copying
 * past the cache.
 *
 * The pool. The kernel zeroes new memory page by page as it is touched, which costs more than the work of an attempt on
 * it. So released regions go to a pool, under the lock, and are reused for similar sizes. Idle and used regions together
 * do not exceed the peak use since the pool was last trimmed, except for the moment until the first I/O thread has
 * unmapped the surplus. A region that is idle for ZP__POOL_IDLE_NS is offered to the kernel, which reclaims it only under
 * memory pressure; it is kept because touching new memory in the middle of a call may take seconds where a hypervisor has
 * to provide it. After ZP__POOL_KEEP_NS it is unmapped. The first I/O thread does all this; mapping, offering and
 * unmapping run without the lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "engine.h"
#include "memory.h"
#include "sock.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define LINE_BYTES 64u
#define WASTE_PARTS 8u /* up to 1/WASTE_PARTS of a reused region may stay unused */

/* Maps zeroed memory; the kernel provides its pages when they are touched. NULL: no memory. */
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

/* Lock held. */
static zp__region pool_remove(zp__pool *pool, uint32_t index)
{
	zp__region region = pool->regions[index];
	pool->count--;
	memmove(pool->regions + index, pool->regions + index + 1, (pool->count - index) * sizeof region);
	pool->idle_bytes -= region.bytes;
	return region;
}

/* Lock held. Index of the smallest region of at least `bytes` that does not waste too much; pool->count: none. */
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

/* Lock held. Index of the region that is idle longest and not offered yet; pool->count: none. */
static uint32_t pool_offer_next(const zp__pool *pool)
{
	uint32_t index = 0;
	while (index < pool->count && pool->regions[index].offered)
		index++;
	return index;
}

/* Takes a region of at least `bytes` from the pool, or maps one; none for 0 bytes. Its contents are undefined.
 * -ENOMEM. */
int zp__region_take(zp_engine *engine, size_t bytes, zp__region *region)
{
	zp__pool *pool = &engine->pool;
	*region = (zp__region){0};
	if (!bytes)
		return 0;
	pthread_mutex_lock(&engine->mutex);
	uint32_t index = pool_find(pool, bytes);
	*region = index < pool->count ? pool_remove(pool, index) : (zp__region){.bytes = bytes};
	region->offered = false; /* Writing to a page withdraws it from the kernel. */
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

/* Returns a region from zp__region_take() to the pool. */
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
		zp__thread_wake(&engine->threads[0]); /* It trims the pool and has no earlier deadline for it. */
	pthread_mutex_unlock(&engine->mutex);
	zp__memory_unmap(surplus.memory, surplus.bytes);
	*region = (zp__region){0};
}

/* Lock held. Puts an offered region back into the pool, in order of idle time. If the pool is full, or the region would
 * exceed its bound, leaves it in `region`. */
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

/* Lock held at entry and at return; released in between. */
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
	zp__memory_unmap(region.memory, region.bytes); /* madvise() failed, or the pool is full. */
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

/* memcpy with non-temporal stores, for a target that is not read soon: it is not loaded into the cache and evicts nothing
 * from it. Other threads see the bytes after zp__copy_past_cache_done() and a mutex operation. */
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
