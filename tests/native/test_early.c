/* Frames of attempts that are not begun: a peer cannot make the engine keep very many, or search many of them. */
#include <poll.h>
#include <string.h>

#include "early.h"
#include "engine.h"
#include "mesh.h"
#include "message.h"

enum { BYTES_MAX = 1 << 20, FRAMES = 2 * BYTES_MAX / ZP__EARLY_CHARGE_MIN, FIRST = 1 << 30, WAIT_MS = 20000 };

static uint32_t early_count(zp_engine *engine, bool *waits)
{
	uint32_t count = 0;
	pthread_mutex_lock(&engine->mutex);
	for (uint32_t i = 0; i < ZP__EARLY_BUCKETS; i++) {
		uint32_t before = count;
		ZP__EACH(node, &engine->early[i])
		count++;
		CHECK(count - before <= FRAMES / ZP__EARLY_BUCKETS + 1);
	}
	*waits = !zp__list_empty(&engine->parked);
	pthread_mutex_unlock(&engine->mutex);
	return count;
}

/* A member that sends nothing but `count` headers, each of an attempt of its own. */
static zp_engine *flooded_engine(uint8_t kind, uint32_t count, int *sender)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = BYTES_MAX,
				   .messages_queued_bytes_max = BYTES_MAX};
	static uint8_t headers[FRAMES][ZP__HEADER_BYTES];
	zp_engine *engine;
	uint8_t peer[ZP_PEER_ID_BYTES];
	uint64_t link;
	int pair[2];
	bool waits = false;
	id_of(1, peer);
	tcp_pair(pair);
	CHECK(zp_engine_open(&config, &engine) == 0 && zp_link_open(engine, peer, &pair[0], NULL, 1, &link) == 0);
	for (uint32_t i = 0; i < count; i++) {
		zp__frame frame = {.kind = kind, .id = FIRST + i};
		zp__frame_encode(headers[i], &frame);
	}
	CHECK(send(pair[1], headers, count * sizeof headers[0], 0) == (ssize_t)(count * sizeof headers[0]));
	for (int ms = 0; early_count(engine, &waits) < count && !waits; ms++) {
		CHECK(ms < WAIT_MS);
		poll(NULL, 0, 1);
	}
	*sender = pair[1];
	return engine;
}

static void test_number(uint8_t kind)
{
	int sender;
	bool waits;
	zp_engine *engine = flooded_engine(kind, FRAMES, &sender);
	CHECK(early_count(engine, &waits) == FRAMES / 2 && waits);

	for (uint32_t i = 0; i < FRAMES; i++) /* What was charged is given back. */
		CHECK(zp_reduce_end(engine, FIRST + i, 0) == 0);
	CHECK(early_count(engine, &waits) == 0);
	zp_engine_close(engine);
	close(sender);
}

/* Frames of attempts that can no longer begin go, however fast the ids grow. */
static void test_window(void)
{
	enum { KEPT = FRAMES / 4 };
	int sender;
	bool waits;
	zp_engine *engine = flooded_engine(ZP__STARTED, KEPT, &sender);
	const uint32_t learnt[] = {0, 1, 1, 9, KEPT / 2};
	for (size_t i = 0; i < sizeof learnt / sizeof *learnt; i++) {
		CHECK(zp_reduce_end(engine, (uint64_t)FIRST + ZP__ID_WINDOW + learnt[i], 0) == 0);
		CHECK(early_count(engine, &waits) == KEPT - 1 - learnt[i]);
	}
	CHECK(zp_reduce_end(engine, (uint64_t)FIRST + ZP__ID_WINDOW + 3 * ZP__EARLY_BUCKETS, 0) == 0);
	CHECK(early_count(engine, &waits) == 0);
	zp_engine_close(engine);
	close(sender);
}

int main(void)
{
	test_number(ZP__STARTED);
	test_number(ZP__REDUCE_SCATTER);
	test_window();
	return 0;
}
