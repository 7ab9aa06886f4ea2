/* The lanes of a plan, as all peers compute them: pure functions of the plan; see lanes.c. A plan that names no lanes
 * has those of the direct exchange: one for each rank, which is the root of all others. */
#ifndef ZP_LANES_H
#define ZP_LANES_H

#include <stdbool.h>
#include <stdint.h>

#include "zp_api.h"

/* What the rank with the greatest need has to buffer: a share of each of its children and, if quantised, its own. */
typedef struct {
	uint64_t buffers;  /* for one slot of each lane */
	uint64_t elements; /* for all slots of all lanes */
} zp__need;

static inline uint32_t zp__parent_of(const zp_reduce_plan *plan, uint32_t lane, uint32_t rank)
{
	return plan->lanes ? plan->lanes[lane].parents[rank] : lane;
}

static inline bool zp__plan_reduces(const zp_reduce_plan *plan)
{
	return plan->kind == ZP_ALL_REDUCE || plan->kind == ZP_REDUCE_SCATTER;
}

/* Elements of a part of a reduce-scatter: the first count % world_size parts have one more. */
static inline uint64_t zp__part_elements(const zp_reduce_plan *plan, uint32_t part)
{
	return plan->count / plan->world_size + (part < plan->count % plan->world_size);
}

/* True if the lanes of the plan are valid, or it names none. The rest of the plan must be valid. */
bool zp__lanes_valid(const zp_reduce_plan *plan);

/* True if frames go between two ranks: in a lane that has elements, one is the parent of the other. */
bool zp__lanes_connect(const zp_reduce_plan *plan, uint32_t rank, uint32_t other);

zp__need zp__lanes_need(const zp_reduce_plan *plan);

/* Sets inputs[r], for each rank r, to the number of ranks in its part of the tree, itself included. */
void zp__tree_count(const uint32_t *parents, uint32_t world_size, uint32_t *inputs);

#endif
