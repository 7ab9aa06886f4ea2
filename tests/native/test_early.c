/* Frames of attempts that are not begun: a peer cannot make the engine keep very many, which it has to search. */
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
	ZP__EACH(node, &engine->early)
	count++;
	*waits = !zp__list_empty(&engine->parked);
	pthread_mutex_unlock(&engine->mutex);
	return count;
}

/* A member that sends nothing but headers, each of an attempt of its own. */
static void test_headers(uint8_t kind)
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
	for (uint32_t i = 0; i < FRAMES; i++) {
		zp__frame frame = {.kind = kind, .id = FIRST + i};
		zp__frame_encode(headers[i], &frame);
	}
	CHECK(send(pair[1], headers, sizeof headers, 0) == sizeof headers);
	for (int ms = 0; early_count(engine, &waits) < FRAMES && !waits; ms++) {
		CHECK(ms < WAIT_MS);
		poll(NULL, 0, 1);
	}
	CHECK(early_count(engine, &waits) == BYTES_MAX / ZP__EARLY_CHARGE_MIN && waits);

	for (uint32_t i = 0; i < FRAMES; i++) /* What was charged is given back. */
		CHECK(zp_reduce_end(engine, FIRST + i, 0) == 0);
	zp_engine_close(engine);
	close(pair[1]);
}

int main(void)
{
	test_headers(ZP__STARTED);
	test_headers(ZP__REDUCE_SCATTER);
	return 0;
}
