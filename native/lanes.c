/* Lanes: which ones are valid in a plan, which ranks they link, and how much memory they need. No state. */
#include "lanes.h"

#include "bounds.h"

/* True if `parents` is a tree of all ranks. */
static bool is_tree(const uint32_t *parents, uint32_t world_size)
{
	uint32_t seen[ZP__WORLD_SIZE_MAX] = {0}; /* 1 + the rank whose path to the root came here first */
	uint32_t roots = 0;
	for (uint32_t rank = 0; rank < world_size; rank++) {
		if (parents[rank] >= world_size)
			return false;
		roots += parents[rank] == rank;
	}
	for (uint32_t rank = 0; rank < world_size; rank++) {
		uint32_t at = rank;
		for (; parents[at] != at && !seen[at]; at = parents[at])
			seen[at] = rank + 1;
		if (seen[at] == rank + 1) /* The path has come back here: it is a cycle. */
			return false;
	}
	return roots == 1;
}

static bool is_star(const uint32_t *parents, uint32_t world_size)
{
	for (uint32_t rank = 0; rank < world_size; rank++)
		if (parents[parents[rank]] != parents[rank])
			return false;
	return true;
}

/* True if the root of a lane is the owner of its part of the tensor, and the lane has the length of that part. */
static bool is_of_owner(const zp_reduce_plan *p, uint32_t lane)
{
	const zp_lane *own = &p->lanes[lane];
	uint32_t owner = p->owners[p->kind == ZP_BROADCAST ? 0 : lane];
	if (own->parents[owner] != owner)
		return false;
	return p->kind == ZP_BROADCAST || own->elements == (p->kind == ZP_ALL_GATHER ? p->count : zp__part_elements(p, lane));
}

bool zp__lanes_valid(const zp_reduce_plan *p)
{
	if (!p->lanes || !p->lane_count)
		return !p->lanes && !p->lane_count;
	if (p->kind == ZP_ALL_TO_ALL || p->algorithm != ZP_DIRECT || p->lane_count > ZP__LANES_MAX)
		return false;
	bool by_owner = p->kind == ZP_ALL_GATHER || p->kind == ZP_REDUCE_SCATTER;
	if (by_owner && p->lane_count != p->world_size)
		return false;
	/* A partial sum may not fit the type. */
	bool stars_only = zp__plan_reduces(p) && p->op == ZP_AVG && p->dtype < ZP_UINT64;
	uint64_t left = p->kind == ZP_ALL_GATHER ? p->count * p->world_size : p->count;
	for (uint32_t i = 0; i < p->lane_count; i++) {
		const zp_lane *lane = &p->lanes[i];
		if (lane->elements > left || !lane->parents || !is_tree(lane->parents, p->world_size))
			return false;
		if (stars_only && !is_star(lane->parents, p->world_size))
			return false;
		if (p->kind != ZP_ALL_REDUCE && !is_of_owner(p, i))
			return false;
		left -= lane->elements;
	}
	return left == 0;
}

bool zp__lanes_connect(const zp_reduce_plan *p, uint32_t rank, uint32_t other)
{
	bool connect = !p->lanes;
	for (uint32_t i = 0; !connect && i < p->lane_count; i++) {
		const uint32_t *parents = p->lanes[i].parents;
		connect = p->lanes[i].elements && (parents[rank] == other || parents[other] == rank);
	}
	return connect;
}

/* The need of the lanes that the plan names. */
static zp__need need_of(const zp_reduce_plan *p)
{
	zp__need of[ZP__WORLD_SIZE_MAX] = {{0}}, most = {0};
	uint32_t used = 0;
	for (uint32_t i = 0; i < p->lane_count; i++) {
		const zp_lane *lane = &p->lanes[i];
		used += lane->elements > 0;
		for (uint32_t rank = 0; lane->elements && rank < p->world_size; rank++) {
			if (lane->parents[rank] == rank)
				continue;
			of[lane->parents[rank]].buffers++;
			of[lane->parents[rank]].elements += lane->elements;
		}
	}
	for (uint32_t rank = 0; rank < p->world_size; rank++) {
		most.buffers = of[rank].buffers > most.buffers ? of[rank].buffers : most.buffers;
		most.elements = of[rank].elements > most.elements ? of[rank].elements : most.elements;
	}
	most.buffers += p->quantization ? used : 0;
	return most;
}

zp__need zp__lanes_need(const zp_reduce_plan *p)
{
	uint32_t n = p->world_size;
	zp__need need = {.buffers = n - 1 + (p->quantization ? n : 0), .elements = (n - 1) * ((p->count + n - 1) / n)};
	if (p->lanes)
		need = need_of(p);
	need.elements += p->quantization ? p->count : 0;
	return need;
}

void zp__tree_count(const uint32_t *parents, uint32_t world_size, uint32_t *inputs)
{
	for (uint32_t rank = 0; rank < world_size; rank++)
		inputs[rank] = 1;
	for (uint32_t rank = 0; rank < world_size; rank++)
		for (uint32_t at = rank; parents[at] != at; at = parents[at])
			inputs[parents[at]]++;
}
