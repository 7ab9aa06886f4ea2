/* Random lanes of trees. */
#ifndef TREES_H
#define TREES_H

#include "check.h"
#include "zp_api.h"

enum { TREES_LANES = 4, TREES_RANKS_MAX = 8 };

typedef struct {
	zp_lane lanes[TREES_RANKS_MAX];
	uint32_t parents[TREES_RANKS_MAX][TREES_RANKS_MAX];
} trees;

/* A random tree of all ranks. */
static inline void tree_make(uint32_t *parents, uint64_t *state, uint32_t root, uint32_t ranks, int star)
{
	uint32_t order[TREES_RANKS_MAX];
	CHECK(ranks <= TREES_RANKS_MAX);
	for (uint32_t i = 0; i < ranks; i++) { /* Each one comes after its parent. */
		uint32_t other = (uint32_t)(random_next(state) % (i + 1));
		order[i] = order[other];
		order[other] = i;
	}
	for (uint32_t i = 1; i < ranks; i++) {
		if (order[i] != root)
			continue;
		order[i] = order[0];
		order[0] = root;
	}
	for (uint32_t i = 0; i < ranks; i++)
		parents[order[i]] = order[i == 0 || star ? 0 : random_next(state) % i];
}

/* The same for the same seed: lanes of `count` elements together, some of them empty. All have the root, if it is a rank. */
static inline void trees_make(trees *made, uint64_t seed, uint32_t ranks, uint32_t root, uint64_t count, int stars_only)
{
	uint64_t left = count, state = seed * 2 + 1;
	for (uint32_t lane = 0; lane < TREES_LANES; lane++) {
		uint32_t at = root < ranks ? root : (uint32_t)(random_next(&state) % ranks);
		tree_make(made->parents[lane], &state, at, ranks, stars_only);
		uint64_t elements = random_next(&state) % 4 ? random_next(&state) % (left + 1) : 0;
		made->lanes[lane].elements = lane + 1 == TREES_LANES ? left : elements;
		made->lanes[lane].parents = made->parents[lane];
		left -= made->lanes[lane].elements;
	}
}

/* A lane for each row of an all-gather, or part of a reduce-scatter. */
static inline void trees_make_owned(trees *made, uint64_t seed, uint32_t ranks, const uint32_t *owners, uint32_t kind,
				    uint64_t count, int stars_only)
{
	uint64_t state = seed * 2 + 1;
	for (uint32_t lane = 0; lane < ranks; lane++) {
		tree_make(made->parents[lane], &state, owners[lane], ranks, stars_only);
		made->lanes[lane].elements = kind == ZP_ALL_GATHER ? count : count / ranks + (lane < count % ranks);
		made->lanes[lane].parents = made->parents[lane];
	}
}

#endif
