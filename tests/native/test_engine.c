/* The engine whole: several engines in one process over real TCP, many attempts at a time, cancelled and committed at
 * random, messages beside them, links that go, encrypted links and others. Meant above all for the sanitizers;
 * tests/engine/test_engine.py tests results in breadth. One driver thread for each engine, as in real life. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>

#include "cipher.h"
#include "mesh.h"

/* Ids only grow, so the channel comes before all attempts. */
enum { CHANNEL = 1, FIRST_ATTEMPT = 2 };
enum { PEERS = 3, CONNECTIONS = 3, ROUNDS = 40, AT_A_TIME = 4, COUNT = 30011, WAIT_MS = 60000 };

typedef struct {
	zp_engine *engine;
	uint32_t rank;
	pthread_t thread;
	uint64_t messages;
	uint64_t digests[FIRST_ATTEMPT + ROUNDS * AT_A_TIME];
} peer_state;

/* Which links are encrypted. */
enum encryption { NONE, SOME, ALL };

static peer_state peers[PEERS];
static uint8_t ids[PEERS * ZP_PEER_ID_BYTES]; /* in order of rank */
static pthread_barrier_t barrier;

static void engines_connect(uint32_t a, uint32_t b, enum encryption encryption)
{
	int fds[2][CONNECTIONS], pair[2];
	zp_aead aeads[2][CONNECTIONS];
	bool encrypted = encryption == ALL || (encryption == SOME && a + b != PEERS - 1);
	uint8_t id_a[ZP_PEER_ID_BYTES], id_b[ZP_PEER_ID_BYTES];
	uint64_t link;
	id_of(a, id_a);
	id_of(b, id_b);
	for (int i = 0; i < CONNECTIONS; i++) {
		tcp_pair(pair);
		fds[0][i] = pair[0];
		fds[1][i] = pair[1];
		aeads[0][i] = cipher_aead((uint8_t)(2 * i), (uint8_t)(2 * i + 1));
		aeads[1][i] = cipher_aead((uint8_t)(2 * i + 1), (uint8_t)(2 * i));
	}
	CHECK(zp_link_open(peers[a].engine, id_b, fds[0], encrypted ? aeads[0] : NULL, CONNECTIONS, &link) == 0);
	CHECK(zp_link_open(peers[b].engine, id_a, fds[1], encrypted ? aeads[1] : NULL, CONNECTIONS, &link) == 0);
}

static int32_t value_of(uint32_t rank, uint64_t attempt, size_t i)
{
	return (int32_t)(uint32_t)((rank + 1) * 2654435761u + attempt * 40503u + i * 97u);
}

static void plan_make(zp_reduce_plan *plan, uint32_t rank, uint64_t attempt, int32_t *input, int32_t *output)
{
	*plan = (zp_reduce_plan){.attempt = attempt,
				 .dtype = ZP_INT32,
				 .op = ZP_SUM,
				 .algorithm = attempt % 3 ? ZP_DIRECT : ZP_RING,
				 .world_size = PEERS,
				 .rank = rank,
				 .frame_bytes = attempt % 2 ? 1024 : 16384,
				 .count = COUNT,
				 .peers = ids,
				 .input = input,
				 .output = output,
				 .restore = attempt % 5 != 0};
	if (attempt % 4 == 3) { /* the same bytes as floats, quantised: for the threads and the digest, not for the values */
		plan->dtype = ZP_FLOAT;
		plan->quantization = 1 + attempt / 4 % 2;
		plan->block_elements = 64;
	}
}

/* Waits until `wanted` of the attempts from `first` are done; returns how many failed. */
static void events_wait(peer_state *self, uint64_t first, int wanted, int status[AT_A_TIME])
{
	while (wanted) {
		struct pollfd fd = {.fd = zp_engine_fd(self->engine), .events = POLLIN};
		CHECK(poll(&fd, 1, WAIT_MS) == 1);
		zp_event event;
		while (zp_engine_poll(self->engine, &event) == 1) {
			CHECK(event.kind != ZP_EVENT_LINK_LOST);
			if (event.kind == ZP_EVENT_MESSAGE) {
				CHECK(event.body_bytes == 10000 && event.body[9999] == (uint8_t)event.body[0]);
				self->messages++;
				zp_message_release(self->engine, event.body);
				continue;
			}
			CHECK(event.id >= first && event.id < first + AT_A_TIME && event.status == 0);
			status[event.id - first] = event.status;
			self->digests[event.id] = event.digest;
			wanted--;
		}
	}
}

static void result_check(uint64_t attempt, const int32_t *output)
{
	for (size_t i = 0; attempt % 4 != 3 && i < COUNT; i++) {
		uint32_t sum = 0;
		for (uint32_t rank = 0; rank < PEERS; rank++)
			sum += (uint32_t)value_of(rank, attempt, i);
		CHECK((uint32_t)output[i] == sum);
	}
}

/* A round: AT_A_TIME attempts, all run to the end in even rounds, all cancelled at some moment in odd ones. */
static void round_run(peer_state *self, int round, int32_t *buffers[AT_A_TIME][2])
{
	uint64_t first = FIRST_ATTEMPT + (uint64_t)round * AT_A_TIME, seed = first * 31 + self->rank + 1;
	int cancel = round % 2, status[AT_A_TIME];
	uint8_t to[ZP_PEER_ID_BYTES], body[10000];
	for (int k = 0; k < AT_A_TIME; k++) {
		int32_t *input = buffers[k][0], *output = k % 2 ? buffers[k][0] : buffers[k][1];
		for (size_t i = 0; i < COUNT; i++)
			input[i] = value_of(self->rank, first + k, i);
		zp_reduce_plan plan;
		plan_make(&plan, self->rank, first + k, input, output);
		CHECK(zp_reduce_start(self->engine, &plan) == 0);
		memset(body, round, sizeof body);
		id_of((self->rank + 1) % PEERS, to);
		CHECK(zp_message_post(self->engine, to, CHANNEL, body, sizeof body, NULL, 0, UINT64_MAX) == 0);
	}
	if (!cancel)
		events_wait(self, first, AT_A_TIME, status);
	else
		for (uint64_t spin = random_next(&seed) % 200000; spin; spin--)
			__asm__ volatile("" ::: "memory");
	for (int k = 0; k < AT_A_TIME; k++) {
		int32_t *output = k % 2 ? buffers[k][0] : buffers[k][1];
		CHECK(zp_reduce_end(self->engine, first + k, !cancel) == 0);
		if (!cancel)
			result_check(first + k, output);
		else if (k % 2 && (first + k) % 5)
			for (size_t i = 0; i < COUNT; i++)
				CHECK(output[i] == value_of(self->rank, first + k, i));
		memset(output, 0, COUNT * sizeof *output); /* It is ours again: the sanitizers see who still writes. */
	}
}

static void *driver(void *argument)
{
	peer_state *self = argument;
	int32_t *buffers[AT_A_TIME][2];
	for (int k = 0; k < AT_A_TIME; k++)
		for (int i = 0; i < 2; i++)
			CHECK((buffers[k][i] = malloc(COUNT * sizeof(int32_t))) != NULL);
	for (int round = 0; round < ROUNDS; round++) {
		round_run(self, round, buffers);
		pthread_barrier_wait(&barrier); /* As the master's word that all have ended. */
	}
	for (int k = 0; k < AT_A_TIME; k++)
		for (int i = 0; i < 2; i++)
			free(buffers[k][i]);
	return NULL;
}

static void engines_open(uint32_t thread_count, enum encryption encryption)
{
	zp_engine_config config = {.thread_count = thread_count,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = 1 << 20,
				   .messages_queued_bytes_max = 1 << 20};
	memset(peers, 0, sizeof peers);
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		id_of(rank, ids + rank * ZP_PEER_ID_BYTES);
		peers[rank].rank = rank;
		CHECK(zp_engine_open(&config, &peers[rank].engine) == 0);
	}
	for (uint32_t a = 0; a < PEERS; a++)
		for (uint32_t b = 0; b < a; b++)
			engines_connect(a, b, encryption);
}

static void test_stress(uint32_t thread_count, enum encryption encryption)
{
	engines_open(thread_count, encryption);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		CHECK(zp_channel_open(peers[rank].engine, CHANNEL, -1) == 0);
	pthread_barrier_init(&barrier, NULL, PEERS);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		CHECK(pthread_create(&peers[rank].thread, NULL, driver, &peers[rank]) == 0);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		pthread_join(peers[rank].thread, NULL);
	pthread_barrier_destroy(&barrier);
	for (uint32_t rank = 1; rank < PEERS; rank++)
		CHECK(memcmp(peers[0].digests, peers[rank].digests, sizeof peers[0].digests) == 0);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		zp_engine_close(peers[rank].engine);
}

enum { ELEMENTS = 1 << 20 };
static int32_t data[PEERS][ELEMENTS], before[ELEMENTS]; /* of attempts that are ended in the middle */

/* Starts an attempt of ELEMENTS elements at all peers: round a ring, or every other two rounds a direct exchange. */
static void all_start(int round)
{
	for (int32_t i = 0; i < ELEMENTS; i++)
		before[i] = i + 1;
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		memcpy(data[rank], before, sizeof before);
		zp_reduce_plan plan;
		plan_make(&plan, rank, 1, data[rank], data[rank]);
		plan.algorithm = round / 2 % 2 ? ZP_DIRECT : ZP_RING;
		plan.count = ELEMENTS;
		plan.frame_bytes = 32768;
		CHECK(zp_reduce_start(peers[rank].engine, &plan) == 0);
	}
}

/* Engines that close while attempts run on the others; links that close in the middle. */
static void test_sudden_ends(uint32_t thread_count, enum encryption encryption)
{
	for (int round = 0; round < 12; round++) {
		engines_open(thread_count, encryption);
		all_start(round);
		uint8_t id[ZP_PEER_ID_BYTES];
		id_of(1, id);
		for (int spin = round * 30000; spin; spin--)
			__asm__ volatile("" ::: "memory");
		if (round % 2)
			zp_engine_close(peers[1].engine);
		else
			CHECK(zp_link_close(peers[0].engine, id) == 0);
		int ended = 0; /* done before, or lost with the link */
		while (!ended) {
			struct pollfd fd = {.fd = zp_engine_fd(peers[0].engine), .events = POLLIN};
			CHECK(poll(&fd, 1, WAIT_MS) == 1);
			zp_event event;
			while (zp_engine_poll(peers[0].engine, &event) == 1)
				ended |= event.kind == ZP_EVENT_REDUCE_DONE;
		}
		CHECK(zp_reduce_end(peers[0].engine, 1, 0) == 0);
		CHECK(memcmp(data[0], before, sizeof before) == 0);
		for (uint32_t rank = 0; rank < PEERS; rank++)
			if (rank != 1 || round % 2 == 0)
				zp_engine_close(peers[rank].engine);
		for (uint32_t rank = 0; rank < PEERS; rank++)
			CHECK(memcmp(data[rank], before, sizeof before) == 0);
	}
}

/* Stops the engine of rank 1 as soon as others do. Its buffer is then as it was before. */
static void *stopper(void *argument)
{
	pthread_barrier_wait(&barrier);
	zp_engine_stop(peers[1].engine);
	CHECK(memcmp(data[1], before, sizeof before) == 0);
	return argument;
}

/* Two threads stop an engine in the middle of an attempt, and a third ends the attempt. */
static void test_stops_at_once(uint32_t thread_count)
{
	for (int round = 0; round < 12; round++) {
		engines_open(thread_count, NONE);
		all_start(round);
		pthread_t threads[2];
		pthread_barrier_init(&barrier, NULL, 3);
		for (int i = 0; i < 2; i++)
			CHECK(pthread_create(&threads[i], NULL, stopper, NULL) == 0);
		for (int spin = round * 30000; spin; spin--)
			__asm__ volatile("" ::: "memory");
		pthread_barrier_wait(&barrier);
		if (round % 2) {
			CHECK(zp_reduce_end(peers[1].engine, 1, 0) == 0);
			CHECK(memcmp(data[1], before, sizeof before) == 0);
		}
		for (int i = 0; i < 2; i++)
			pthread_join(threads[i], NULL);
		pthread_barrier_destroy(&barrier);
		for (uint32_t rank = 0; rank < PEERS; rank++)
			zp_engine_close(peers[rank].engine);
	}
}

/* Waits for a message on CHANNEL, and takes it. */
static uint8_t *message_wait(zp_engine *engine)
{
	zp_event event = {0};
	struct pollfd fd = {.fd = zp_engine_fd(engine), .events = POLLIN};
	while (zp_engine_poll(engine, &event) != 1)
		CHECK(poll(&fd, 1, WAIT_MS) == 1);
	CHECK(event.kind == ZP_EVENT_MESSAGE);
	return event.body;
}

/* A stopped engine takes nothing, reports nothing and has no sockets. Messages that were taken from it stay valid. */
static void test_stopped(uint32_t thread_count)
{
	enum { BYTES = 1000 };
	static int32_t buffer[COUNT];
	uint8_t ids_of[2][ZP_PEER_ID_BYTES], body[BYTES], *bodies[2];
	uint64_t link;
	int pair[2], byte, pipe_fds[2];
	zp_event event;
	zp_link_stats stats;
	zp_link_flow flow;
	engines_open(thread_count, NONE);
	zp_engine *other = peers[0].engine, *engine = peers[1].engine;
	CHECK(pipe(pipe_fds) == 0);
	for (uint32_t rank = 0; rank < 2; rank++)
		id_of(rank, ids_of[rank]);
	for (int i = 0; i < 2; i++)
		CHECK(zp_channel_open(i ? engine : other, CHANNEL, -1) == 0);
	CHECK(zp_channel_open(engine, ZP_FREE_CHANNEL, pipe_fds[1]) == 0);
	memset(body, 7, sizeof body);
	for (int i = 0; i < 3; i++) /* The third is never taken. */
		CHECK(zp_message_post(other, ids_of[1], CHANNEL, body, BYTES, NULL, 0, UINT64_MAX) == 0);
	for (int i = 0; i < 2; i++)
		bodies[i] = message_wait(engine);
	CHECK(zp_link_get_stats(engine, ids_of[0], &stats) == 0);
	link = stats.link;
	zp_engine_stop(engine);

	CHECK(zp_engine_poll(engine, &event) == 0 && zp_channel_poll(engine, ZP_FREE_CHANNEL, &event) == 0);
	tcp_pair(pair);
	CHECK(zp_link_open(engine, ids_of[0], pair, NULL, 1, &link) == -ESHUTDOWN);
	CHECK(zp_link_add(engine, ids_of[0], link, 0, 1, pair[0], NULL, body, 1) == -ESHUTDOWN);
	close(pair[0]); /* It is still ours. */
	CHECK(recv(pair[1], &byte, 1, 0) == 0);
	close(pair[1]);
	CHECK(zp_link_close(engine, ids_of[0]) == -ENOTCONN && zp_link_set_senders(engine, ids_of[0], 1) == -ENOTCONN);
	CHECK(zp_link_get_stats(engine, ids_of[0], &stats) == -ENOTCONN);
	CHECK(zp_link_get_flow(engine, ids_of[0], &flow) == -ENOTCONN);
	for (uint64_t attempt = FIRST_ATTEMPT; attempt < FIRST_ATTEMPT + 3; attempt++) {
		zp_reduce_plan plan;
		plan_make(&plan, 1, attempt, buffer, buffer);
		CHECK(zp_reduce_start(engine, &plan) == -ESHUTDOWN);
		CHECK(zp_reduce_withhold(engine, attempt) == 0 && zp_reduce_end(engine, attempt, 0) == 0);
	}
	zp_stalls_hold(engine, 1);
	CHECK(zp_channel_open(engine, CHANNEL + 1, -1) == -ESHUTDOWN && zp_channel_close(engine, CHANNEL) == 0);
	CHECK(zp_message_post(engine, ids_of[0], CHANNEL, body, BYTES, NULL, 0, UINT64_MAX) == -ESHUTDOWN);
	for (int i = 0; i < 2; i++)
		CHECK(memcmp(bodies[i], body, BYTES) == 0);
	zp_message_release(engine, bodies[0]); /* The other one is freed with the engine. */
	zp_engine_stop(engine);
	do { /* The other end has seen its link go. */
		struct pollfd fd = {.fd = zp_engine_fd(other), .events = POLLIN};
		CHECK(poll(&fd, 1, WAIT_MS) == 1);
	} while (zp_engine_poll(other, &event) != 1 || event.kind != ZP_EVENT_LINK_LOST);
	zp_engine_release(&peers[1].engine);
	zp_engine_close(peers[0].engine);
	zp_engine_close(peers[2].engine);
	for (int i = 0; i < 2; i++)
		close(pipe_fds[i]);
}

/* A forked child does not wait for threads that it does not have. */
static void test_forked(void)
{
	engines_open(1, NONE);
	pid_t child = fork();
	if (child == 0) {
		for (uint32_t rank = 0; rank < PEERS; rank++)
			zp_engine_close(peers[rank].engine);
		_exit(0);
	}
	int status;
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		zp_engine_close(peers[rank].engine);
}

/* The direct exchange of tensors of which only a part is on its way at a time; two at once, one of them in place. */
static void test_windows(uint32_t thread_count)
{
	enum { LARGE = 13000001 }; /* A chunk of 17 MiB; the window has 12 MiB of each neighbour. */
	int32_t *buffers[PEERS][3];
	engines_open(thread_count, NONE);
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		for (int k = 0; k < 3; k++)
			CHECK((buffers[rank][k] = malloc(LARGE * sizeof(int32_t))) != NULL);
		for (int k = 0; k < 2; k++) {
			uint64_t attempt = FIRST_ATTEMPT + (uint64_t)k;
			for (size_t i = 0; i < LARGE; i++)
				buffers[rank][k][i] = value_of(rank, attempt, i);
			zp_reduce_plan plan;
			plan_make(&plan, rank, attempt, buffers[rank][k], buffers[rank][k ? 2 : 0]);
			plan.frame_bytes = 1 << 18;
			plan.count = LARGE;
			plan.algorithm = ZP_DIRECT;
			plan.quantization = ZP_QUANTIZE_NONE;
			plan.dtype = ZP_INT32;
			CHECK(zp_reduce_start(peers[rank].engine, &plan) == 0);
		}
	}
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		int status[AT_A_TIME];
		events_wait(&peers[rank], FIRST_ATTEMPT, 2, status);
		for (int k = 0; k < 2; k++)
			CHECK(zp_reduce_end(peers[rank].engine, FIRST_ATTEMPT + (uint64_t)k, 1) == 0);
	}
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		for (size_t i = 0; i < LARGE; i++) {
			uint32_t sums[2] = {0, 0};
			for (uint32_t of = 0; of < PEERS; of++)
				for (uint64_t k = 0; k < 2; k++)
					sums[k] += (uint32_t)value_of(of, FIRST_ATTEMPT + k, i);
			CHECK((uint32_t)buffers[rank][0][i] == sums[0] && (uint32_t)buffers[rank][2][i] == sums[1]);
		}
		zp_engine_close(peers[rank].engine);
	}
	for (uint32_t rank = 0; rank < PEERS; rank++)
		for (int k = 0; k < 3; k++)
			free(buffers[rank][k]);
}

static void test_arguments(void)
{
	zp_engine *engine;
	zp_engine_config config = {.thread_count = 0, .stall_timeout_ms = 1};
	CHECK(zp_engine_open(&config, &engine) == -EINVAL && !engine);
	zp_engine *none = NULL;
	zp_engine_close(NULL);
	zp_engine_stop(NULL);
	zp_engine_release(&none);
	zp_message_release(NULL, NULL);
}

int main(void)
{
	test_arguments();
	for (uint32_t thread_count = 1; thread_count <= 2; thread_count++) {
		test_stress(thread_count, NONE);
		test_sudden_ends(thread_count, NONE);
		test_stops_at_once(thread_count);
		test_stopped(thread_count);
		test_windows(thread_count);
		test_stress(thread_count, thread_count == 1 ? ALL : SOME);
	}
	test_sudden_ends(2, ALL);
	test_forked();
	return 0;
}
