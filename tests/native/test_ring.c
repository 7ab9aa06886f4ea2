/* A ring of three. A result that comes too early at the engine, the second of the ring, came over the first, which may be
 * honest and has only passed it on: then the third made it, without the shares that it should have waited for. So such a
 * result costs its attempt, and neither breaks nor holds up the link to the first. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "attempt.h"
#include "checksum.h"
#include "engine.h"
#include "frame.h"
#include "link.h"
#include "mesh.h"

enum { PEERS = 3, OWN = 1, CONNECTIONS = 2, ATTEMPT = 1, WAIT_MS = 20000, STILL_MS = 30 };
enum { FRAME_BYTES = 65536, SLOTS = 64, COUNT = PEERS * SLOTS * FRAME_BYTES / 4, BUFFER_BYTES = 65536 };

static zp_engine *engine;
static uint8_t ids[PEERS][ZP_PEER_ID_BYTES];
static int fds[PEERS][CONNECTIONS]; /* the other ends */
static uint32_t input[COUNT], output[COUNT];

static void ring_open(void)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = 10 * WAIT_MS,
				   .message_bytes_max = FRAME_BYTES,
				   .messages_queued_bytes_max = 16 * FRAME_BYTES};
	CHECK(zp_engine_open(&config, &engine) == 0 && zp_channel_open(engine, ZP_FREE_CHANNEL, -1) == 0);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		id_of(rank, ids[rank]);
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		int theirs[CONNECTIONS], pair[2], bytes = BUFFER_BYTES;
		uint64_t link;
		for (int i = 0; rank != OWN && i < CONNECTIONS; i++) {
			CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
			fds[rank][i] = pair[0];
			theirs[i] = pair[1];
			CHECK(setsockopt(theirs[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
		}
		if (rank != OWN)
			CHECK(zp_link_open(engine, ids[rank], theirs, NULL, CONNECTIONS, &link) == 0);
	}
}

static void ring_close(void)
{
	CHECK(zp_reduce_end(engine, ATTEMPT, 0) == 0);
	zp_engine_close(engine);
	for (uint32_t rank = 0; rank < PEERS; rank++)
		for (int i = 0; rank != OWN && i < CONNECTIONS; i++)
			close(fds[rank][i]);
}

static void attempt_start(void)
{
	zp_reduce_plan plan = {.attempt = ATTEMPT,
			       .dtype = ZP_UINT32,
			       .algorithm = ZP_RING,
			       .world_size = PEERS,
			       .rank = OWN,
			       .frame_bytes = FRAME_BYTES,
			       .count = COUNT,
			       .peers = ids[0],
			       .input = input,
			       .output = output};
	CHECK(zp_reduce_start(engine, &plan) == 0);
}

static void frame_say(int fd, zp__frame frame)
{
	static uint8_t bytes[ZP__HEADER_BYTES + FRAME_BYTES];
	frame.checksum = (uint32_t)zp__checksum_of(bytes + ZP__HEADER_BYTES, frame.length);
	zp__frame_encode(bytes, &frame);
	for (size_t sent = 0; sent < ZP__HEADER_BYTES + frame.length;) {
		ssize_t n = send(fd, bytes + sent, ZP__HEADER_BYTES + frame.length - sent, MSG_NOSIGNAL);
		CHECK(n > 0);
		sent += (size_t)n;
	}
}

static zp__frame result_of(uint32_t chunk, uint64_t slot)
{
	return (zp__frame){.kind = ZP__ALL_GATHER,
			   .id = ATTEMPT,
			   .chunk = chunk,
			   .offset = slot * FRAME_BYTES / 4,
			   .length = FRAME_BYTES};
}

static zp_event event_take(void)
{
	struct pollfd fd = {.fd = zp_engine_fd(engine), .events = POLLIN};
	zp_event event;
	CHECK(poll(&fd, 1, WAIT_MS) == 1 && zp_engine_poll(engine, &event) == 1);
	return event;
}

/* The attempt has failed, and nobody is named; what the first sends then, arrives. */
static void only_the_attempt_failed(int fd)
{
	static const uint8_t nobody[ZP_PEER_ID_BYTES];
	frame_say(fd, (zp__frame){.kind = ZP__MESSAGE, .id = ZP_FREE_CHANNEL});
	zp_event event = event_take();
	CHECK(event.kind == ZP_EVENT_REDUCE_DONE && event.status == -EPROTO);
	CHECK(memcmp(event.peer, nobody, sizeof nobody) == 0);
	event = event_take();
	CHECK(event.kind == ZP_EVENT_MESSAGE);
	zp_message_release(engine, event.body);
}

/* The sum of the shares of the first is on its way over another connection. */
static void test_before_the_sum(bool early)
{
	ring_open();
	if (!early)
		attempt_start();
	frame_say(fds[0][1], result_of(0, 0));
	if (early) { /* It is kept until the attempt begins. */
		frame_say(fds[0][1], (zp__frame){.kind = ZP__MESSAGE, .id = ZP_FREE_CHANNEL});
		zp_event event = event_take();
		CHECK(event.kind == ZP_EVENT_MESSAGE);
		zp_message_release(engine, event.body);
		attempt_start();
	}
	only_the_attempt_failed(fds[0][1]);
	ring_close();
}

/* The third takes nothing. Waits until each connection to it has a frame that it cannot send whole; all other frames
 * wait. Returns the slot of such a frame, or the last one. */
static uint64_t unsent_slot(bool taken)
{
	uint64_t last_sent = 0;
	for (int ms = 0, still_ms = 0;; ms++, still_ms++) {
		uint64_t slot = SLOTS, sent = 0;
		uint32_t active = 0;
		pthread_mutex_lock(&engine->mutex);
		const zp__link *link = zp__link_find(engine, ids[2]);
		const zp__attempt *attempt = zp__attempt_find(engine, ATTEMPT);
		for (uint32_t i = 0; i < CONNECTIONS; i++) {
			const zp__connection *c = &link->connections[i];
			sent += c->tx_bytes;
			if (!c->tx.slot)
				continue;
			active++;
			slot = (uint64_t)(c->tx.slot - attempt->slots) % SLOTS;
		}
		pthread_mutex_unlock(&engine->mutex);
		if (active < CONNECTIONS || sent != last_sent)
			still_ms = 0;
		last_sent = sent;
		if (still_ms == STILL_MS)
			return taken ? slot : SLOTS - 1;
		CHECK(ms < WAIT_MS);
		poll(NULL, 0, 1);
	}
}

static void test_before_the_share_is_sent(bool taken)
{
	ring_open();
	attempt_start();
	frame_say(fds[2][0], (zp__frame){.kind = ZP__STARTED, .id = ATTEMPT});
	frame_say(fds[0][0], result_of(OWN, unsent_slot(taken)));
	only_the_attempt_failed(fds[0][0]);
	ring_close();
}

int main(void)
{
	test_before_the_sum(false);
	test_before_the_sum(true);
	test_before_the_share_is_sent(false);
	test_before_the_share_is_sent(true);
	return 0;
}
