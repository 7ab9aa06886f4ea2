/* Which connections of a link send: frames must get through where others are held up. */
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>

#include "checksum.h"
#include "engine.h"
#include "frame.h"
#include "link.h"
#include "mesh.h"

enum { CONNECTIONS = 3, CHANNEL = 1, CHANNEL_LATER = 9, BODY_BYTES = 4 << 20, BUFFER_BYTES = 65536, WAIT_MS = 20000 };

static zp_engine *engines[2];
static int fds[2][CONNECTIONS];

static void mesh_open(bool shared)
{
	zp_engine_config config = {.thread_count = 2,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = BODY_BYTES,
				   .messages_queued_bytes_max = BODY_BYTES,
				   .local_senders_max = 1,
				   .shared_memory = shared};
	int pair[2], bytes = BUFFER_BYTES;
	for (int i = 0; i < CONNECTIONS; i++) {
		if (shared)
			CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
		else
			tcp_pair(pair);
		for (int end = 0; end < 2; end++) { /* Much less than a body is on its way. */
			fds[end][i] = pair[end];
			CHECK(setsockopt(pair[end], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
			CHECK(setsockopt(pair[end], SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes) == 0);
		}
	}
	for (uint32_t end = 0; end < 2; end++) {
		uint8_t id[ZP_PEER_ID_BYTES];
		uint64_t link;
		id_of(!end, id);
		CHECK(zp_engine_open(&config, &engines[end]) == 0);
		CHECK(zp_channel_open(engines[end], CHANNEL, -1) == 0);
		CHECK(zp_link_open(engines[end], id, fds[end], NULL, CONNECTIONS, &link) == 0);
	}
}

static zp_event event_take(int end)
{
	struct pollfd fd = {.fd = zp_engine_fd(engines[end]), .events = POLLIN};
	zp_event event;
	CHECK(poll(&fd, 1, WAIT_MS) == 1 && zp_engine_poll(engines[end], &event) == 1);
	return event;
}

static void message_send(int end, uint64_t channel)
{
	static const uint8_t body[BODY_BYTES];
	uint8_t id[ZP_PEER_ID_BYTES];
	int rc;
	id_of(!end, id);
	while ((rc = zp_message_post(engines[end], id, channel, body, sizeof body, NULL, 0, UINT64_MAX)) == -EAGAIN)
		CHECK(event_take(end).kind == ZP_EVENT_WRITABLE);
	CHECK(rc == 0);
}

static void message_take(int end, uint64_t channel)
{
	zp_event event = event_take(end);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.id == channel && event.body_bytes == BODY_BYTES);
	zp_message_release(engines[end], event.body);
}

/* Within a host one connection sends and the rest stand by. What tells of connections goes over any of them. */
static void test_what_must_get_through(bool shared)
{
	mesh_open(shared);
	CHECK(zp_channel_open(engines[0], CHANNEL_LATER, -1) == 0);
	message_send(0, CHANNEL_LATER); /* The other end does not know the channel yet, and reads no further. */
	message_send(1, CHANNEL);
	message_take(0, CHANNEL);
	message_send(1, CHANNEL); /* Waits until the first is acknowledged. */
	message_take(0, CHANNEL);
	CHECK(shutdown(fds[1][1], SHUT_RDWR) == 0);
	for (int end = 0; end < 2; end++) { /* Each needs to hear from the other what has come. */
		zp_event event = event_take(end);
		CHECK(event.kind == ZP_EVENT_CONNECTION_LOST && event.connection == 1);
	}
	CHECK(zp_channel_open(engines[1], CHANNEL_LATER, -1) == 0);
	message_take(1, CHANNEL_LATER);
	for (int end = 0; end < 2; end++)
		zp_engine_close(engines[end]);
}

/* --- A peer made by hand, the second of a ring of two --------------------------------------------------------------*/

enum { ATTEMPT = 1, COUNT = 2 * BODY_BYTES / 4 };

/* Receives whole frames on any connection until it has one of `kind`. Returns the connection. */
static int frame_await(const int ends[2], uint8_t kind)
{
	static uint8_t body[BODY_BYTES];
	for (;;) {
		struct pollfd waiting[2] = {{.fd = ends[0], .events = POLLIN}, {.fd = ends[1], .events = POLLIN}};
		CHECK(poll(waiting, 2, WAIT_MS) > 0);
		int from = !waiting[0].revents;
		uint8_t header[ZP__HEADER_BYTES];
		zp__frame frame;
		CHECK(recv(ends[from], header, sizeof header, MSG_WAITALL) == sizeof header);
		CHECK(zp__frame_decode(header, &frame) == 0 && frame.length <= sizeof body);
		CHECK(!frame.length || recv(ends[from], body, frame.length, MSG_WAITALL) == (ssize_t)frame.length);
		if (frame.kind == kind)
			return from;
	}
}

static void frame_say(int end, const zp__frame *frame, const uint8_t *body)
{
	uint8_t header[ZP__HEADER_BYTES];
	zp__frame_encode(header, frame);
	CHECK(send(end, header, sizeof header, MSG_NOSIGNAL) == sizeof header);
	for (size_t sent = 0; sent < frame->length;) {
		ssize_t n = send(end, body + sent, frame->length - sent, MSG_NOSIGNAL);
		CHECK(n > 0);
		sent += (size_t)n;
	}
}

/* Waits until only `active` of the two connections has a frame to send, or none (-1), and the rest are idle. Returns the
 * connection that has been idle longest. */
static uint32_t idle_await(zp_engine *engine, const uint8_t peer[], int active)
{
	for (int ms = 0;; ms++) {
		uint32_t first = 0;
		bool is_so = true;
		pthread_mutex_lock(&engine->mutex);
		const zp__link *link = zp__link_find(engine, peer);
		for (int i = 0; i < 2; i++) {
			const zp__connection *c = &link->connections[i];
			is_so = is_so && c->tx.active == (i == active) && (i == active || !zp__list_empty(&c->idle_node));
		}
		if (is_so)
			first = ZP__ELEMENT(link->idle.next, zp__connection, idle_node)->index;
		pthread_mutex_unlock(&engine->mutex);
		if (is_so)
			return first;
		CHECK(ms < WAIT_MS);
		poll(NULL, 0, 1);
	}
}

/* The result of a frame goes back over the connection on which it came, though another one was woken for it. While that
 * connection is full, the other sends what comes next. */
static void test_a_busy_connection_is_not_idle(void)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = BODY_BYTES,
				   .messages_queued_bytes_max = 4 * BODY_BYTES};
	static uint32_t input[COUNT], output[COUNT];
	zp_engine *engine;
	uint8_t ids[2][ZP_PEER_ID_BYTES];
	uint64_t link;
	int ours[2], theirs[2], pair[2], bytes = BUFFER_BYTES;
	for (uint32_t i = 0; i < 2; i++) {
		id_of(i, ids[i]);
		tcp_pair(pair);
		ours[i] = pair[0];
		theirs[i] = pair[1];
		CHECK(setsockopt(theirs[i], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
		CHECK(setsockopt(ours[i], SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes) == 0);
	}
	CHECK(zp_engine_open(&config, &engine) == 0 && zp_link_open(engine, ids[1], theirs, NULL, 2, &link) == 0);
	zp_reduce_plan plan = {.attempt = ATTEMPT,
			       .dtype = ZP_UINT32,
			       .algorithm = ZP_RING,
			       .world_size = 2,
			       .frame_bytes = BODY_BYTES,
			       .count = COUNT,
			       .peers = ids[0],
			       .input = input,
			       .output = output};
	CHECK(zp_reduce_start(engine, &plan) == 0);
	frame_await(ours, ZP__REDUCE_SCATTER);
	int on = !idle_await(engine, ids[1], -1); /* The other one will be woken. */
	frame_say(ours[on], &(zp__frame){.kind = ZP__STARTED, .id = ATTEMPT}, NULL);
	frame_say(ours[on],
		  &(zp__frame){.kind = ZP__REDUCE_SCATTER,
			       .id = ATTEMPT,
			       .chunk = 1,
			       .length = BODY_BYTES,
			       .checksum = (uint32_t)zp__checksum_of(input, BODY_BYTES)},
		  (const uint8_t *)input);
	idle_await(engine, ids[1], on);

	CHECK(zp_channel_open(engine, ZP_FREE_CHANNEL, -1) == 0);
	CHECK(zp_message_post(engine, ids[1], ZP_FREE_CHANNEL, "x", 1, NULL, 0, UINT64_MAX) == 0);
	CHECK(frame_await((int[]){ours[!on], ours[!on]}, ZP__MESSAGE) == 0);
	zp_engine_close(engine);
	close(ours[0]);
	close(ours[1]);
}

int main(void)
{
	test_what_must_get_through(false);
	test_what_must_get_through(true);
	test_a_busy_connection_is_not_idle();
	return 0;
}
