/* Lanes of trees: which of them a plan may have, and what an attempt at them maps, whatever the tensor's size (B1). What they
 * compute: test_kinds.c, test_retransmit.c, tests/engine/test_trees.py. */
#include <errno.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "bounds.h"
#include "lanes.h"
#include "mesh.h"
#include "support/faults.h"
#include "trees.h"

enum { PLANS = 20000, RANKS_MAX = 6, ATTEMPTS = 60 };
static uint64_t seed = 88172645463325252u;

/* --- Plans -------------------------------------------------------------------------------------------------------- */

/* The depth of a rank in its tree; -1: it is in none. */
static int depth_of(const uint32_t *parents, uint32_t ranks, uint32_t rank)
{
	for (uint32_t steps = 0; steps < ranks; steps++) {
		if (parents[rank] == rank)
			return (int)steps;
		rank = parents[rank];
	}
	return -1;
}

static bool may_be(const uint32_t *parents, uint32_t ranks, int depth_max)
{
	uint32_t roots = 0;
	for (uint32_t rank = 0; rank < ranks; rank++)
		if (parents[rank] >= ranks)
			return false;
	for (uint32_t rank = 0; rank < ranks; rank++) {
		int depth = depth_of(parents, ranks, rank);
		if (depth < 0 || depth > depth_max)
			return false;
		roots += depth == 0;
	}
	return roots == 1;
}

static void test_trees_of_all_forms(void)
{
	uint32_t legal = 0;
	for (int i = 0; i < PLANS; i++) {
		uint32_t ranks = 2 + (uint32_t)(random_next(&seed) % (RANKS_MAX - 1)), parents[2][RANKS_MAX];
		for (uint32_t lane = 0; lane < 2; lane++)
			for (uint32_t rank = 0; rank < ranks; rank++)
				parents[lane][rank] = (uint32_t)(random_next(&seed) % (ranks + (i % 8 == 0)));
		zp_lane lanes[] = {{5, parents[0]}, {0, parents[1]}};
		zp_reduce_plan plan = {.kind = ZP_ALL_REDUCE,
				       .algorithm = ZP_DIRECT,
				       .dtype = i % 4 ? ZP_FLOAT : ZP_INT32,
				       .op = ZP_AVG,
				       .world_size = ranks,
				       .count = 5,
				       .lanes = lanes,
				       .lane_count = 1 + (uint32_t)i % 2};
		bool expected = true;
		for (uint32_t lane = 0; lane < plan.lane_count; lane++)
			expected &= may_be(parents[lane], ranks, plan.dtype == ZP_INT32 ? 1 : RANKS_MAX);
		CHECK(zp__lanes_valid(&plan) == expected);
		legal += expected;
	}
	CHECK(legal > PLANS / 100);
}

/* --- Attempts ----------------------------------------------------------------------------------------------------- */

typedef struct {
	zp_engine *engine;
	int ends[TREES_RANKS_MAX];
	uint8_t ids[ZP__WORLD_SIZE_MAX * ZP_PEER_ID_BYTES];
} lonely;

/* An engine that is linked to peers who do nothing, under ids of any rank. */
static void lonely_open(lonely *l)
{
	zp_engine_config config = {.thread_count = 1, .stall_timeout_ms = 60000};
	CHECK(zp_engine_open(&config, &l->engine) == 0);
	for (uint32_t rank = 0; rank < TREES_RANKS_MAX; rank++) {
		int pair[2];
		uint64_t link;
		uint8_t *id = l->ids + rank * ZP_PEER_ID_BYTES;
		id_of(rank, id);
		tcp_pair(pair);
		l->ends[rank] = pair[1];
		CHECK(zp_link_open(l->engine, id, pair, NULL, 1, &link) == 0);
	}
}

static void lonely_close(lonely *l)
{
	zp_engine_close(l->engine);
	for (uint32_t rank = 0; rank < TREES_RANKS_MAX; rank++)
		close(l->ends[rank]);
}

/* Every rank of many plans, of a tensor that is far larger than the windows: they are used, and are within the bound. */
static void test_memory(lonely *l)
{
	const size_t bytes = (size_t)1 << 28, pages_bytes = 2 * 4096;
	int64_t most = 0;
	void *input = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	void *output = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(input != MAP_FAILED && output != MAP_FAILED);
	for (int i = 0; i < ATTEMPTS; i++) {
		trees lanes;
		bool quantised = i % 3 == 0;
		uint64_t choice = random_next(&seed), count = bytes / 4 - choice % 1000;
		uint32_t ranks = 2 + (uint32_t)(random_next(&seed) % (TREES_RANKS_MAX - 1));
		trees_make(&lanes, choice, ranks, ranks, count, i % 2);
		for (uint32_t rank = 0; rank < ranks; rank++) {
			lonely_open(l); /* The last one's memory may wait in its pool. */
			int64_t before = faults_mapped_bytes();
			zp_reduce_plan plan = {.attempt = 1,
					       .algorithm = ZP_DIRECT,
					       .dtype = ZP_FLOAT,
					       .quantization = quantised ? ZP_QUANTIZE_MIN_MAX : ZP_QUANTIZE_NONE,
					       .block_elements = 1u << choice % 13,
					       .world_size = ranks,
					       .rank = rank,
					       .frame_bytes = 4096u << choice / 16 % 10,
					       .count = count,
					       .peers = l->ids,
					       .lanes = i % 5 ? lanes.lanes : NULL,
					       .lane_count = i % 5 ? TREES_LANES : 0,
					       .input = input,
					       .output = output};
			CHECK(zp_reduce_start(l->engine, &plan) == 0);
			int64_t mapped = faults_mapped_bytes() - before;
			CHECK(mapped <= (int64_t)(ZP__TREES_WINDOW_BYTES + pages_bytes));
			most = mapped > most ? mapped : most;
			lonely_close(l);
		}
	}
	CHECK(most > (int64_t)ZP__TREES_WINDOW_BYTES * 9 / 10);
	munmap(input, bytes);
	munmap(output, bytes);
}

/* What cannot have a window within the bound, or has more lanes or slots than may be. */
static void test_bounds(lonely *l)
{
	static uint32_t parents[ZP__WORLD_SIZE_MAX];
	static zp_lane lanes[ZP__LANES_MAX + 1];
	uint8_t byte[2 * (ZP__LANES_MAX + 1)];
	for (uint32_t i = 0; i <= ZP__LANES_MAX; i++)
		lanes[i] = (zp_lane){1, parents};
	struct {
		uint32_t world_size, lane_count, frame_bytes;
		uint64_t count;
		int expected;
	} cases[] = {
		{2, ZP__LANES_MAX, 64, ZP__LANES_MAX, 0},
		{2, ZP__LANES_MAX + 1, 64, ZP__LANES_MAX + 1, -EINVAL},
		{2, 2, 64, 3, -EINVAL}, /* They do not cover the tensor, */
		{2, 3, 64, 2, -EINVAL}, /* or more than that. */
		{2, 0, 64, 2, -EINVAL},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		zp_reduce_plan plan = {.attempt = 1000000 + i,
				       .algorithm = ZP_DIRECT,
				       .dtype = ZP_UINT8,
				       .world_size = cases[i].world_size,
				       .rank = 1,
				       .frame_bytes = cases[i].frame_bytes,
				       .count = cases[i].count,
				       .peers = l->ids,
				       .lanes = lanes,
				       .lane_count = cases[i].lane_count,
				       .input = byte,
				       .output = byte};
		CHECK(zp_reduce_start(l->engine, &plan) == cases[i].expected);
		CHECK(zp_reduce_end(l->engine, plan.attempt, 0) == 0);
	}
	/* All others are children of one rank in every lane: a slot of each of their shares is more than the window. */
	const uint64_t each = 1000, count = ZP__LANES_MAX * each;
	for (uint32_t i = 0; i < ZP__LANES_MAX; i++)
		lanes[i].elements = each;
	uint8_t *data = calloc(1, count);
	CHECK(data);
	zp_reduce_plan plan = {.attempt = 2000000,
			       .algorithm = ZP_DIRECT,
			       .dtype = ZP_UINT8,
			       .world_size = ZP__WORLD_SIZE_MAX,
			       .rank = 1,
			       .frame_bytes = 4096,
			       .count = count,
			       .peers = l->ids,
			       .lanes = lanes,
			       .lane_count = ZP__LANES_MAX,
			       .input = data,
			       .output = data};
	CHECK(zp_reduce_start(l->engine, &plan) == -EINVAL);
	plan.lane_count = 1;
	lanes[0].elements = count;
	CHECK(zp_reduce_start(l->engine, &plan) == 0); /* It is linked to the root, and needs nobody else. */
	CHECK(zp_reduce_end(l->engine, plan.attempt, 0) == 0);
	free(data);
}

int main(void)
{
	static lonely l;
	test_trees_of_all_forms();
	lonely_open(&l);
	test_bounds(&l);
	lonely_close(&l);
	test_memory(&l);
	return 0;
}
