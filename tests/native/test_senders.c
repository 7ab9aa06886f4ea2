/* Links within a host, of which one connection sends and the rest stand by: what tells of connections must get through
 * where the one that sends is held up. */
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>

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

int main(void)
{
	test_what_must_get_through(false);
	test_what_must_get_through(true);
	return 0;
}
