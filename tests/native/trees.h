/* Random lanes of trees. */
#ifndef TREES_H
#define TREES_H

#include "check.h"
#include "zp_api.h"

enum { TREES_LANES = 4, TREES_RANKS_MAX = 8 };

typedef struct {
	zp_lane lanes[TREES_LANES];
	uint32_t parents[TREES_LANES][TREES_RANKS_MAX];
} trees;

/* The same for the same seed: lanes of `count` elements together, some of them empty. */
static inline void trees_make(trees *made, uint64_t seed, uint32_t ranks, uint64_t count, int stars_only)
{
	uint64_t left = count, state = seed * 2 + 1;
	CHECK(ranks <= TREES_RANKS_MAX);
	for (uint32_t lane = 0; lane < TREES_LANES; lane++) {
		uint32_t *parents = made->parents[lane], order[TREES_RANKS_MAX];
		for (uint32_t i = 0; i < ranks; i++) { /* Each one comes after its parent. */
			uint32_t other = (uint32_t)(random_next(&state) % (i + 1));
			order[i] = order[other];
			order[other] = i;
		}
		for (uint32_t i = 0; i < ranks; i++)
			parents[order[i]] = order[i == 0 || stars_only ? 0 : random_next(&state) % i];
		uint64_t elements = random_next(&state) % 4 ? random_next(&state) % (left + 1) : 0;
		made->lanes[lane].elements = lane + 1 == TREES_LANES ? left : elements;
		made->lanes[lane].parents = parents;
		left -= made->lanes[lane].elements;
	}
}

#endif
