/* Messages that are posted without waiting, what tells of room, and the memory that messages share one after the other. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine.h"
#include "frame.h"
#include "link.h"
#include "mesh.h"
#include "sock.h"

enum { CHANNEL = 1, HEAD_BYTES = 20, BODY_BYTES = 1 << 20, QUEUE_BYTES = 4 << 20, WAIT_MS = 20000 };

static zp_engine *engines[2];
static uint8_t ids[2][ZP_PEER_ID_BYTES];
static uint32_t stall_ms = WAIT_MS;

static void mesh_open(void)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = stall_ms,
				   .message_bytes_max = 2 * BODY_BYTES,
				   .messages_queued_bytes_max = 6 * BODY_BYTES};
	const uint32_t ranks[2] = {0, 1};
	for (uint32_t end = 0; end < 2; end++) {
		id_of(end, ids[end]);
		CHECK(zp_engine_open(&config, &engines[end]) == 0);
	}
	engines_link(engines, ranks, 2);
	CHECK(zp_channel_open(engines[0], CHANNEL, -1) == 0);
}

static void mesh_close(void)
{
	for (int end = 0; end < 2; end++)
		zp_engine_close(engines[end]);
}

static zp_event event_take(int end)
{
	struct pollfd fd = {.fd = zp_engine_fd(engines[end]), .events = POLLIN};
	zp_event event;
	CHECK(poll(&fd, 1, WAIT_MS) == 1 && zp_engine_poll(engines[end], &event) == 1);
	return event;
}

static int post(uint8_t value, uint64_t queue_bytes_max)
{
	static uint8_t body[BODY_BYTES];
	uint8_t head[HEAD_BYTES];
	memset(head, value, sizeof head);
	memset(body, value, sizeof body);
	return zp_message_post(engines[0], ids[1], CHANNEL, head, sizeof head, body, sizeof body, queue_bytes_max);
}

static void message_take(uint8_t value)
{
	zp_event event = event_take(1);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.body_bytes == HEAD_BYTES + BODY_BYTES);
	for (uint64_t i = 0; i < event.body_bytes; i++)
		CHECK(event.body[i] == value);
	zp_message_release(engines[1], event.body);
}

/* The receiver has no channel yet, so nothing is acknowledged: the queue fills, and WRITABLE is reported once. */
static void test_room(void)
{
	mesh_open();
	uint8_t posted = 0;
	while (post(posted, QUEUE_BYTES) == 0)
		posted++;
	CHECK(posted == 3); /* Three with their heads fit into four bodies. */
	CHECK(post(posted, QUEUE_BYTES) == -EAGAIN);
	zp_link_stats stats;
	CHECK(zp_link_get_stats(engines[0], ids[1], &stats) == 0);
	CHECK(stats.message_bytes == (uint64_t)posted * (HEAD_BYTES + BODY_BYTES));
	zp_event none;
	CHECK(zp_engine_poll(engines[0], &none) == 0);

	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	bool seen[3] = {false};
	for (int i = 0; i < posted; i++) { /* Messages of two connections may overtake each other. */
		zp_event event = event_take(1);
		CHECK(event.kind == ZP_EVENT_MESSAGE && event.body[0] < posted && !seen[event.body[0]]);
		seen[event.body[0]] = true;
		zp_message_release(engines[1], event.body);
	}
	zp_event room = event_take(0);
	CHECK(room.kind == ZP_EVENT_WRITABLE && room.id == CHANNEL);
	CHECK(post(9, QUEUE_BYTES) == 0);
	message_take(9);
	mesh_close();
}

/* Short messages take memory beside their bytes. */
static void test_short_messages_are_charged(void)
{
	mesh_open();
	uint64_t posted = 0;
	while (zp_message_post(engines[0], ids[1], CHANNEL, NULL, 0, NULL, 0, QUEUE_BYTES) == 0)
		posted++;
	CHECK(posted == QUEUE_BYTES / ZP__SENT_CHARGE_MIN + 1);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	for (uint64_t i = 0; i < posted; i++)
		zp_message_release(engines[1], event_take(1).body);
	CHECK(event_take(0).kind == ZP_EVENT_WRITABLE);
	mesh_close();
}

/* A message that is longer than the queue may be passes alone; others wait for it. */
static void test_one_may_always_pass(void)
{
	mesh_open();
	CHECK(post(1, 1) == 0 && post(2, 1) == -EAGAIN);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	message_take(1);
	CHECK(event_take(0).kind == ZP_EVENT_WRITABLE);
	CHECK(post(2, 1) == 0);
	message_take(2);
	mesh_close();
}

/* What waits to be sent on a channel that is closed does not delay messages on others. */
static void test_a_closed_channel(void)
{
	mesh_open();
	uint8_t posted = 0;
	while (post(posted, QUEUE_BYTES) == 0)
		posted++;
	CHECK(zp_channel_open(engines[0], CHANNEL + 1, -1) == 0);
	CHECK(zp_channel_close(engines[0], CHANNEL) == 0);
	zp_link_stats stats;
	CHECK(zp_link_get_stats(engines[0], ids[1], &stats) == 0 && stats.message_bytes == 0);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL + 1, "x", 1, NULL, 0, 1) == 0);
	CHECK(zp_channel_open(engines[1], CHANNEL + 1, -1) == 0);
	zp_event event = event_take(1);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.id == CHANNEL + 1 && event.body[0] == 'x');
	zp_message_release(engines[1], event.body);
	mesh_close();
}

static void test_errors(void)
{
	mesh_open();
	static const uint8_t body[2 * BODY_BYTES];
	uint8_t stranger[ZP_PEER_ID_BYTES];
	id_of(7, stranger);
	CHECK(zp_message_post(engines[0], stranger, CHANNEL, body, 1, body, 1, QUEUE_BYTES) == -ENOTCONN);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL + 1, body, 1, body, 1, QUEUE_BYTES) == -ECANCELED);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL, body, 1, body, sizeof body, QUEUE_BYTES) == -EMSGSIZE);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL, body, UINT64_MAX, body, 2, QUEUE_BYTES) == -EMSGSIZE);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL, body, 2, body, UINT64_MAX, QUEUE_BYTES) == -EMSGSIZE);
	CHECK(zp_message_post(engines[0], ids[1], CHANNEL, NULL, 0, NULL, 0, QUEUE_BYTES) == 0);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	zp_event event = event_take(1);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.body_bytes == 0);
	zp_message_release(engines[1], event.body);
	mesh_close();
}

/* A link that is closed while its room is waited for, and one whose room nobody polls. */
static void test_room_of_a_link_that_is_gone(void)
{
	mesh_open();
	while (post(1, QUEUE_BYTES) == 0)
		;
	CHECK(zp_link_close(engines[0], ids[1]) == 0);
	CHECK(post(1, QUEUE_BYTES) == -ENOTCONN);
	zp_event none;
	CHECK(zp_engine_poll(engines[0], &none) == 0);
	mesh_close();

	mesh_open();
	CHECK(post(1, 1) == 0 && post(2, 1) == -EAGAIN);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	message_take(1);
	struct pollfd fd = {.fd = zp_engine_fd(engines[0]), .events = POLLIN};
	CHECK(poll(&fd, 1, WAIT_MS) == 1);
	mesh_close();
}

/* Two channels wait for the same link with different bounds. The greater one is told of its room although the other's
 * never comes, because a third channel, which the receiver has not opened, keeps a message in the queue. */
static void test_bounds_of_several(void)
{
	enum { PATIENT = CHANNEL + 1, UNKNOWN = CHANNEL + 2 };
	mesh_open();
	CHECK(zp_channel_open(engines[0], PATIENT, -1) == 0 && zp_channel_open(engines[0], UNKNOWN, -1) == 0);
	CHECK(zp_message_post(engines[0], ids[1], UNKNOWN, "x", 1, NULL, 0, QUEUE_BYTES) == 0);
	int posted = 0;
	while (post(1, QUEUE_BYTES) == 0)
		posted++;
	CHECK(posted == 3 && zp_message_post(engines[0], ids[1], PATIENT, "x", 1, NULL, 0, 1) == -EAGAIN);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	while (posted--)
		message_take(1);
	zp_event event = event_take(0);
	CHECK(event.kind == ZP_EVENT_WRITABLE && event.id == CHANNEL);
	event = event_take(0); /* For this one it is too early. */
	CHECK(event.kind == ZP_EVENT_WRITABLE && event.id == PATIENT);
	CHECK(zp_message_post(engines[0], ids[1], PATIENT, "x", 1, NULL, 0, 1) == -EAGAIN);

	CHECK(zp_channel_open(engines[1], UNKNOWN, -1) == 0);
	event = event_take(1);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.id == UNKNOWN);
	zp_message_release(engines[1], event.body);
	event = event_take(0);
	CHECK(event.kind == ZP_EVENT_WRITABLE && event.id == PATIENT);
	CHECK(zp_message_post(engines[0], ids[1], PATIENT, "x", 1, NULL, 0, 1) == 0);
	mesh_close();
}

static bool is_signalled(int fd)
{
	struct pollfd waiting = {.fd = fd, .events = POLLIN};
	eventfd_t count;
	return poll(&waiting, 1, WAIT_MS) == 1 && eventfd_read(fd, &count) == 0;
}

/* What a channel gets, ROOM included, wakes who waits for it alone; it is there for as long as the channel is open. */
static void test_a_queue_of_its_own(void)
{
	mesh_open();
	CHECK(zp_channel_open(engines[1], CHANNEL, 1000) == -EBADF);
	int fds[2] = {eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK)};
	zp_event event;
	CHECK(fds[0] >= 0 && fds[1] >= 0 && zp_channel_close(engines[0], CHANNEL) == 0);
	CHECK(zp_channel_open(engines[0], CHANNEL, fds[0]) == 0);
	CHECK(post(1, 1) == 0 && post(2, 1) == -EAGAIN); /* The first waits until the other end has opened the channel. */
	CHECK(zp_channel_open(engines[1], CHANNEL, fds[1]) == 0);
	CHECK(is_signalled(fds[1]) && zp_channel_poll(engines[1], CHANNEL, &event) == 1);
	CHECK(event.kind == ZP_EVENT_MESSAGE && event.body[0] == 1 && event.body_bytes == HEAD_BYTES + BODY_BYTES);
	zp_message_release(engines[1], event.body);
	CHECK(zp_channel_poll(engines[1], CHANNEL, &event) == 0);
	CHECK(is_signalled(fds[0]) && zp_channel_poll(engines[0], CHANNEL, &event) == 1);
	CHECK(event.kind == ZP_EVENT_WRITABLE && event.id == CHANNEL);
	CHECK(post(2, 1) == 0 && is_signalled(fds[1]));
	for (int end = 0; end < 2; end++) {
		CHECK(close(fds[end]) == 0); /* The engine has a descriptor of its own. */
		CHECK(zp_engine_poll(engines[end], &event) == 0);
	}
	CHECK(zp_channel_close(engines[1], CHANNEL) == 0 && zp_channel_poll(engines[1], CHANNEL, &event) == 0);
	mesh_close();
}

/* Many messages, of sizes that use memory again and of others: each arrives as it was sent. */
static void test_memory_is_used_again(void)
{
	mesh_open();
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	static uint8_t body[2 * BODY_BYTES];
	const uint64_t sizes[] = {BODY_BYTES, 300 << 10, 1 << 10, BODY_BYTES + (7 << 10), 2 * BODY_BYTES, 256 << 10};
	for (uint32_t round = 0; round < 60; round++) {
		uint64_t size = sizes[round % 6];
		memset(body, (int)round, size);
		CHECK(zp_message_post(engines[0], ids[1], CHANNEL, body, 5, body, size - 5, QUEUE_BYTES) == 0);
		zp_event event = event_take(1);
		CHECK(event.kind == ZP_EVENT_MESSAGE && event.body_bytes == size);
		CHECK(memcmp(event.body, body, size) == 0);
		zp_message_release(engines[1], event.body);
	}
	mesh_close();
}

/* Links engine 1, the victim, to somebody who says what it likes over `fds`. */
static void stranger_link(int fds[2], uint8_t id[ZP_PEER_ID_BYTES])
{
	uint64_t link;
	int ours[2], pair[2];
	id_of(7, id);
	for (int i = 0; i < 2; i++) {
		tcp_pair(pair);
		fds[i] = pair[0];
		ours[i] = pair[1];
		CHECK(fcntl(fds[i], F_SETFL, O_NONBLOCK) == 0);
	}
	CHECK(zp_link_open(engines[1], id, ours, NULL, 2, &link) == 0);
}

/* Says the header of a message. False: the socket has been full for a while. */
static bool header_say(int fd, uint32_t length)
{
	uint8_t header[ZP__HEADER_BYTES];
	const zp__frame frame = {.kind = ZP__MESSAGE, .id = CHANNEL, .length = length};
	struct pollfd room = {.fd = fd, .events = POLLOUT};
	zp__frame_encode(header, &frame);
	for (size_t sent = 0; sent < sizeof header;) {
		ssize_t n = send(fd, header + sent, sizeof header - sent, MSG_NOSIGNAL);
		CHECK(n > 0 || errno == EAGAIN);
		sent += n > 0 ? (size_t)n : 0;
		if (n < 0 && poll(&room, 1, 300) == 0)
			return false;
	}
	return true;
}

/* Messages without a body are charged too, and events of the engine itself come before them. */
static void test_empty_messages(void)
{
	int fds[2];
	uint8_t stranger[ZP_PEER_ID_BYTES];
	mesh_open();
	stranger_link(fds, stranger);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	int said = 0;
	while (said < 1000000 && header_say(fds[0], 0))
		said++;
	CHECK(said < 1000000); /* Some of them are in the buffers of the sockets. */
	CHECK(zp_link_close(engines[0], ids[1]) == 0);
	zp_link_stats stats;
	while (zp_link_get_stats(engines[1], ids[0], &stats) == 0)
		poll(NULL, 0, 1);
	CHECK(event_take(1).kind == ZP_EVENT_LINK_LOST);
	mesh_close();
	close(fds[0]);
	close(fds[1]);
}

/* Who announces messages and sends no bodies delays nobody, and loses its link. */
static void test_bodies_that_do_not_come(void)
{
	int fds[2];
	uint8_t stranger[ZP_PEER_ID_BYTES];
	stall_ms = 3000;
	mesh_open();
	stranger_link(fds, stranger);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(header_say(fds[i], 2 * BODY_BYTES));
	zp_event event;
	uint8_t *bodies[2];
	for (int i = 0; i < 2; i++) {
		CHECK(post(1, QUEUE_BYTES) == 0);
		event = event_take(1);
		CHECK(event.kind == ZP_EVENT_MESSAGE);
		bodies[i] = event.body;
	}
	event = event_take(1);
	CHECK(event.kind == ZP_EVENT_LINK_LOST && event.status == -ETIMEDOUT);
	CHECK(memcmp(event.peer, stranger, sizeof stranger) == 0);
	for (int i = 0; i < 2; i++)
		zp_message_release(engines[1], bodies[i]);
	mesh_close();
	close(fds[0]);
	close(fds[1]);
	stall_ms = WAIT_MS;
}

/* A process that stood still has not yet read what came meanwhile. */
static void test_bodies_of_a_process_that_stood_still(void)
{
	int fds[2];
	uint8_t stranger[ZP_PEER_ID_BYTES];
	mesh_open();
	zp_engine *engine = engines[1];
	stranger_link(fds, stranger);
	CHECK(zp_channel_open(engine, CHANNEL, -1) == 0);
	CHECK(header_say(fds[0], 1));
	zp__link *link = NULL;
	for (bool begun = false; !begun; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&engine->mutex);
		link = zp__link_find(engine, stranger);
		begun = link->connections[0].rx.message;
		pthread_mutex_unlock(&engine->mutex);
	}
	const uint64_t stall_ns = WAIT_MS * (uint64_t)1000000;
	pthread_mutex_lock(&engine->mutex);
	uint64_t woken_ns = zp__now_ns() + 2 * stall_ns, now_ns = woken_ns, next_ns;
	while (next_ns = zp__links_check(engine, now_ns), link->open)
		now_ns = next_ns;
	CHECK(now_ns >= woken_ns + stall_ns);
	pthread_mutex_unlock(&engine->mutex);
	event_take(1);
	mesh_close();
	close(fds[0]);
	close(fds[1]);
}

/* The bound is reached, and nothing is released. When a link is lost, the others have greater shares at once. */
static void test_shares_of_those_that_are_left(void)
{
	enum { HELD = 5, OF_THE_OTHER = 2 };
	static const uint8_t body[BODY_BYTES];
	mesh_open();
	zp_engine *other;
	zp_event held[HELD + 1], event;
	CHECK(zp_engine_open(&engines[1]->config, &other) == 0 && zp_channel_open(other, CHANNEL, -1) == 0);
	engines_link((zp_engine *[]){engines[1], other}, (const uint32_t[]){1, 2}, 1);
	CHECK(zp_channel_open(engines[1], CHANNEL, -1) == 0);
	for (int i = 0; i < HELD; i++) {
		zp_engine *from = i < OF_THE_OTHER ? other : engines[0];
		CHECK(zp_message_post(from, ids[1], CHANNEL, body, sizeof body, NULL, 0, UINT64_MAX) == 0);
		held[i] = event_take(1);
		CHECK(held[i].kind == ZP_EVENT_MESSAGE);
	}
	CHECK(post(1, UINT64_MAX) == 0);
	for (bool waits = false; !waits; poll(NULL, 0, 1)) {
		pthread_mutex_lock(&engines[1]->mutex);
		waits = !zp__list_empty(&engines[1]->parked);
		pthread_mutex_unlock(&engines[1]->mutex);
	}
	zp_engine_close(other);
	event = event_take(1);
	CHECK(event.kind == ZP_EVENT_LINK_LOST);
	held[HELD] = event_take(1);
	CHECK(held[HELD].kind == ZP_EVENT_MESSAGE);
	for (int i = 0; i <= HELD; i++)
		zp_message_release(engines[1], held[i].body);
	mesh_close();
}

int main(void)
{
	test_room();
	test_short_messages_are_charged();
	test_one_may_always_pass();
	test_a_closed_channel();
	test_errors();
	test_room_of_a_link_that_is_gone();
	test_bounds_of_several();
	test_a_queue_of_its_own();
	test_memory_is_used_again();
	test_empty_messages();
	test_bodies_that_do_not_come();
	test_bodies_of_a_process_that_stood_still();
	test_shares_of_those_that_are_left();
	return 0;
}
