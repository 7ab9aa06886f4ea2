/* Every kind of collective, and lanes of trees, at every small world size and odd counts, several at a time on the same links: run to the
 * end, or cancelled at some moment. Meant above all for the sanitizers; tests/engine/test_kinds.py tests results in
 * breadth. One driver thread for all engines: what races are the threads of the engines. */
#include <poll.h>

#include "mesh.h"
#include "trees.h"

enum { SIZES_MAX = 8, CONNECTIONS = 2, WAIT_MS = 60000, COUNT_MAX = 3001 };
enum { TREES = ZP_KINDS, KINDS };

typedef struct {
	zp_engine *engine;
	int32_t *input, *output; /* of the broadcast, both are `tensor`; only the all-to-all reads all rows of the input */
	int32_t *tensor, *rows, *sums, *swapped, *tree; /* one buffer for each kind */
	uint64_t digests[KINDS];
} peer_state;

static peer_state peers[SIZES_MAX];
static uint8_t ids[SIZES_MAX * ZP_PEER_ID_BYTES]; /* in order of rank */
static uint32_t owners[SIZES_MAX];
static uint32_t size, root, op, over_trees; /* The last: of the kinds that have a ring, too. */
static uint64_t last_id, seed = 1;

static int32_t value_of(uint32_t rank, uint64_t i)
{
	return (int32_t)((rank + 1) * 2654435761u + (uint32_t)i * 97u);
}

static void owners_shuffle(void)
{
	for (uint32_t i = 0; i < size; i++)
		owners[i] = i;
	for (uint32_t i = size; i > 1; i--) {
		uint32_t other = (uint32_t)(random_next(&seed) % i), kept = owners[i - 1];
		owners[i - 1] = owners[other];
		owners[other] = kept;
	}
	root = owners[0];
}

static void start(uint32_t rank, uint32_t kind, uint64_t id, uint64_t count)
{
	peer_state *self = &peers[rank];
	int with_owners = kind == ZP_BROADCAST || kind == ZP_ALL_GATHER || kind == ZP_REDUCE_SCATTER;
	int in_lanes = kind == TREES || (with_owners && over_trees), by_owner = in_lanes && kind != ZP_BROADCAST && with_owners;
	trees lanes;
	if (by_owner)
		trees_make_owned(&lanes, id, size, owners, kind, count, op == ZP_AVG);
	else
		trees_make(&lanes, id, size, kind == ZP_BROADCAST ? root : size, count, op == ZP_AVG);
	zp_reduce_plan plan = {.attempt = id,
			       .kind = kind == TREES ? ZP_ALL_REDUCE : kind,
			       .dtype = ZP_INT32,
			       .op = op,
			       .algorithm = kind == ZP_ALL_TO_ALL || in_lanes ? ZP_DIRECT : ZP_RING,
			       .world_size = size,
			       .peers = ids,
			       .rank = rank,
			       .frame_bytes = 256,
			       .count = kind == ZP_ALL_TO_ALL ? size * count : count,
			       .owners = with_owners ? owners : NULL,
			       .lanes = in_lanes ? lanes.lanes : NULL,
			       .lane_count = !in_lanes ? 0 : by_owner ? size : TREES_LANES,
			       .input = kind == ZP_BROADCAST ? self->tensor
					: kind == TREES	     ? self->tree
							     : self->input,
			       .output = kind == ZP_ALL_REDUCE	 ? self->output
					 : kind == ZP_BROADCAST	 ? self->tensor
					 : kind == ZP_ALL_GATHER ? self->rows
					 : kind == ZP_ALL_TO_ALL ? self->swapped
					 : kind == TREES	 ? self->tree
								 : self->sums,
			       .restore = 1};
	CHECK(zp_reduce_start(self->engine, &plan) == 0);
}

static void wait_all(uint64_t first)
{
	for (uint32_t rank = 0; rank < size; rank++) {
		for (int wanted = KINDS; wanted;) {
			struct pollfd fd = {.fd = zp_engine_fd(peers[rank].engine), .events = POLLIN};
			CHECK(poll(&fd, 1, WAIT_MS) == 1);
			zp_event event;
			while (zp_engine_poll(peers[rank].engine, &event) == 1) {
				CHECK(event.kind == ZP_EVENT_REDUCE_DONE && event.status == 0);
				peers[rank].digests[event.id - first] = event.digest;
				wanted--;
			}
		}
	}
}

static int32_t result_of(uint64_t i)
{
	int64_t sum = 0;
	for (uint32_t rank = 0; rank < size; rank++)
		sum += value_of(rank, i);
	return op == ZP_AVG ? (int32_t)(sum / size) : (int32_t)(uint32_t)sum;
}

static void results_check(uint64_t count)
{
	uint64_t start_of_part = 0;
	for (uint32_t part = 0; part < size; part++) {
		uint64_t length = count / size + (part < count % size);
		for (uint64_t i = 0; i < length; i++)
			CHECK(peers[owners[part]].sums[i] == result_of(start_of_part + i));
		start_of_part += length;
	}
	CHECK(start_of_part == count);
	for (uint32_t rank = 0; rank < size; rank++) {
		for (uint64_t i = 0; i < count; i++) {
			CHECK(peers[rank].output[i] == result_of(i));
			CHECK(peers[rank].tree[i] == result_of(i));
			CHECK(peers[rank].tensor[i] == value_of(root, i));
			for (uint32_t row = 0; row < size; row++)
				CHECK(peers[rank].rows[row * count + i] == value_of(owners[row], i));
			for (uint32_t from = 0; from < size; from++)
				CHECK(peers[rank].swapped[from * count + i] == value_of(from, rank * count + i));
		}
		CHECK(memcmp(peers[rank].digests, peers[0].digests, sizeof peers[0].digests) == 0);
	}
}

static void round_run(uint64_t count, int cancel)
{
	uint64_t first = last_id + 1;
	last_id += KINDS;
	owners_shuffle();
	over_trees = (uint32_t)(random_next(&seed) % 2);
	for (uint32_t rank = 0; rank < size; rank++) {
		for (uint64_t i = 0; i < size * count; i++)
			peers[rank].input[i] = value_of(rank, i);
		memcpy(peers[rank].tensor, peers[rank].input, count * sizeof(int32_t));
		memcpy(peers[rank].tree, peers[rank].input, count * sizeof(int32_t));
		for (uint32_t kind = 0; kind < KINDS; kind++)
			start(rank, kind, first + kind, count);
	}
	if (!cancel)
		wait_all(first);
	else
		for (uint64_t spin = random_next(&seed) % 100000; spin; spin--)
			__asm__ volatile("" ::: "memory");
	for (uint32_t rank = 0; rank < size; rank++) {
		for (uint32_t kind = 0; kind < KINDS; kind++)
			CHECK(zp_reduce_end(peers[rank].engine, first + kind, !cancel) == 0);
		for (uint64_t i = 0; cancel && i < size * count; i++)
			CHECK(peers[rank].input[i] == value_of(rank, i));
		for (uint64_t i = 0; cancel && i < count; i++)
			CHECK(peers[rank].tensor[i] == value_of(rank, i) && peers[rank].tree[i] == value_of(rank, i));
	}
	if (!cancel)
		results_check(count);
	for (uint32_t rank = 0; rank < size; rank++) { /* They are ours again: the sanitizers see who still writes. */
		memset(peers[rank].output, 0, count * sizeof(int32_t));
		memset(peers[rank].tensor, 0, count * sizeof(int32_t));
		memset(peers[rank].tree, 0, count * sizeof(int32_t));
		memset(peers[rank].rows, 0, size * count * sizeof(int32_t));
		memset(peers[rank].sums, 0, count * sizeof(int32_t));
		memset(peers[rank].swapped, 0, size * count * sizeof(int32_t));
	}
}

static int32_t *numbers(uint64_t count)
{
	int32_t *memory = malloc(count * sizeof *memory);
	CHECK(memory != NULL);
	return memory;
}

static void size_run(uint32_t world_size, uint32_t thread_count)
{
	zp_engine_config config = {.thread_count = thread_count, .stall_timeout_ms = WAIT_MS};
	uint64_t counts[] = {1, world_size - 1, world_size + 1, 257, COUNT_MAX};
	size = world_size;
	last_id = 0;
	for (uint32_t rank = 0; rank < size; rank++) {
		peer_state *self = &peers[rank];
		id_of(rank, ids + rank * ZP_PEER_ID_BYTES);
		CHECK(zp_engine_open(&config, &self->engine) == 0);
		self->input = numbers((uint64_t)size * COUNT_MAX);
		self->output = numbers(COUNT_MAX);
		self->tensor = numbers(COUNT_MAX);
		self->tree = numbers(COUNT_MAX);
		self->rows = numbers((uint64_t)size * COUNT_MAX);
		self->sums = numbers(COUNT_MAX);
		self->swapped = numbers((uint64_t)size * COUNT_MAX);
	}
	for (uint32_t a = 0; a < size; a++)
		for (uint32_t b = a + 1; b < size; b++)
			engines_link((zp_engine *[]){peers[a].engine, peers[b].engine}, (uint32_t[]){a, b},
				     CONNECTIONS);
	for (op = ZP_SUM; op <= ZP_AVG; op++)
		for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
			round_run(counts[i], 0);
			round_run(counts[i], 1);
		}
	for (uint32_t rank = 0; rank < size; rank++) {
		peer_state *self = &peers[rank];
		zp_engine_close(self->engine);
		free(self->input);
		free(self->output);
		free(self->tensor);
		free(self->tree);
		free(self->rows);
		free(self->sums);
		free(self->swapped);
	}
}

int main(void)
{
	for (uint32_t world_size = 2; world_size <= SIZES_MAX; world_size++)
		size_run(world_size, 1 + world_size % 2);
	return 0;
}
