/* Mapped memory, the pool of it, and copying past the cache; see memory.c. */
#ifndef ZP_MEMORY_H
#define ZP_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bounds.h"
#include "zp_api.h"

/* Mapped memory of one attempt; the pool reuses it. */
typedef struct {
	uint8_t *memory; /* NULL: none */
	size_t bytes;
	uint64_t idle_ns; /* in the pool: time since which it is idle */
	bool offered;	  /* in the pool: the kernel may reclaim its pages, which then read as zeros */
} zp__region;

/* Regions that no attempt uses, longest idle first. Page faults of new memory would cost more than the reduction. */
typedef struct {
	zp__region regions[ZP__POOL_REGIONS_MAX];
	uint32_t count;
	size_t idle_bytes, used_bytes;
	size_t used_bytes_peak; /* since the pool was last trimmed; bounds idle_bytes + used_bytes */
} zp__pool;

void *zp__memory_map(size_t bytes);
void zp__memory_unmap(void *memory, size_t bytes);
int zp__region_take(zp_engine *engine, size_t bytes, zp__region *region);
void zp__region_give(zp_engine *engine, zp__region *region);
uint64_t zp__pool_trim(zp_engine *engine, uint64_t now_ns); /* the next deadline, or UINT64_MAX */
void zp__pool_discard(zp_engine *engine);
void zp__copy_past_cache(void *to, const void *from, size_t bytes);
void zp__copy_past_cache_done(void);

#endif
