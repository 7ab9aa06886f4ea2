/* Shared memory under connections: what goes in comes out, nobody waits for ever, and whatever the process at the other end
 * does with the socket and the memory, it harms its own connection only. */
#ifdef ZP_POLL /* A system without it. */
int main(void)
{
	return 0;
}
#else
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bounds.h"
#include "check.h"
#include "cipher.h"
#include "engine.h"
#include "link.h"
#include "message.h"
#include "support/faults.h"
#include "support/pair.h"

enum { WAIT_MS = 60000, RING_BYTES = ZP__SHM_RING_BYTES, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

/* As the engine's end of a connection, without an engine. */
typedef struct {
	zp__thread thread;
	zp__connection connection;
} end;

static void end_open(end *e, int fd)
{
	zp__list_init(&e->thread.run);
	e->connection = (zp__connection){.fd = fd, .thread = &e->thread};
	zp__list_init(&e->connection.run_node);
	CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(zp__shm_open(fd, &e->connection.shm) == 0 && e->connection.shm);
}

static void end_close(end *e)
{
	zp__shm_close(e->connection.shm);
	close(e->connection.fd);
}

static ssize_t one_send(end *e, const void *from, size_t bytes)
{
	struct iovec iov = {(void *)(uintptr_t)from, bytes};
	return zp__shm_send(&e->connection, &iov, 1);
}

static ssize_t one_receive(end *e, void *to, size_t bytes)
{
	struct iovec iov = {to, bytes};
	return zp__shm_receive(&e->connection, &iov, 1);
}

/* --- Both ends are ours ------------------------------------------------------------------------------------------- */

enum { TOTAL = 48 << 20, PIECES = 3, PIECE_BYTES_MAX = 700000 };

static uint8_t byte_at(uint64_t place)
{
	return (uint8_t)(place * 2654435761u >> 13);
}

typedef struct {
	end end;
	uint64_t seed, sent, received;
	uint8_t *buffer;
} side;

static size_t pieces_draw(side *s, struct iovec iov[PIECES], int *count, size_t bytes_max)
{
	size_t bytes = 0, most = random_next(&s->seed) % 4 ? 300 : PIECE_BYTES_MAX;
	*count = 1 + (int)(random_next(&s->seed) % PIECES);
	for (int i = 0; i < *count; i++) {
		size_t length = random_next(&s->seed) % most, rest = bytes_max - bytes;
		iov[i] = (struct iovec){s->buffer + bytes, length < rest ? length : rest};
		bytes += iov[i].iov_len;
	}
	return bytes;
}

static void send_some(side *s)
{
	zp__connection *c = &s->end.connection;
	struct iovec iov[PIECES];
	int count;
	size_t wanted = pieces_draw(s, iov, &count, TOTAL - s->sent);
	for (size_t i = 0; i < wanted; i++)
		s->buffer[i] = byte_at(s->sent + i);
	ssize_t n = zp__shm_send(c, iov, count);
	CHECK(n >= 0 || n == -EAGAIN);
	if (n < (ssize_t)wanted)
		c->writable = false;
	s->sent += n > 0 ? (uint64_t)n : 0;
}

static void receive_some(side *s)
{
	zp__connection *c = &s->end.connection;
	struct iovec iov[PIECES];
	int count;
	size_t wanted = pieces_draw(s, iov, &count, SIZE_MAX);
	ssize_t n = zp__shm_receive(c, iov, count);
	CHECK(n >= 0 || n == -EAGAIN);
	for (ssize_t i = 0; i < n; i++)
		CHECK(s->buffer[i] == byte_at(s->received + (uint64_t)i));
	if (n < (ssize_t)wanted)
		c->readable = false;
	s->received += n > 0 ? (uint64_t)n : 0;
}

/* As a thread of the engine: waits for edges, and only when it can do nothing. */
static void *side_main(void *argument)
{
	side *s = argument;
	zp__connection *c = &s->end.connection;
	struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
	int epoll_fd = epoll_create1(0);
	CHECK(epoll_fd >= 0 && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event) == 0);
	while (s->sent < TOTAL || s->received < TOTAL) {
		bool sends = c->writable && s->sent < TOTAL, receives = c->readable;
		if (!sends && !receives) {
			CHECK(epoll_wait(epoll_fd, &event, 1, WAIT_MS) == 1); /* Else nobody woke it. */
			zp__connection_ready(c, event.events & EPOLLIN, event.events & EPOLLOUT, false);
		} else if (sends && (!receives || random_next(&s->seed) % 2)) {
			send_some(s);
		} else {
			receive_some(s);
		}
	}
	close(epoll_fd);
	return NULL;
}

static void test_streams(uint64_t seed)
{
	side *sides = calloc(2, sizeof *sides);
	pthread_t threads[2];
	int fds[2];
	CHECK(sides && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	for (int i = 0; i < 2; i++) {
		end_open(&sides[i].end, fds[i]);
		sides[i].seed = seed + (uint64_t)i;
		sides[i].buffer = malloc(PIECES * PIECE_BYTES_MAX);
		CHECK(sides[i].buffer && pthread_create(&threads[i], NULL, side_main, &sides[i]) == 0);
	}
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	for (int i = 0; i < 2; i++) {
		CHECK(sides[i].sent == TOTAL && sides[i].received == TOTAL);
		free(sides[i].buffer);
		end_close(&sides[i].end);
	}
	free(sides);
}

/* What was written before the end is read before it is seen. */
static void test_the_rest_is_read(void)
{
	static uint8_t bytes[100000];
	end ends[2];
	int fds[2];
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	for (int i = 0; i < 2; i++)
		end_open(&ends[i], fds[i]);
	CHECK(one_send(&ends[0], bytes, sizeof bytes) == sizeof bytes);
	end_close(&ends[0]);
	CHECK(one_receive(&ends[1], bytes, 1) == 1);
	CHECK(one_receive(&ends[1], bytes, sizeof bytes) == sizeof bytes - 1);
	CHECK(one_receive(&ends[1], bytes, 1) == -ECONNRESET);
	end_close(&ends[1]);
}

static bool is_mapped(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	bool found = false;
	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		found |= strstr(line, "memfd:zpccl") != NULL;
	fclose(maps);
	return found;
}

static void test_children_do_not_inherit_it(void)
{
	end one;
	int fds[2], status;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	end_open(&one, fds[0]);
	CHECK(is_mapped());
	pid_t child = fork();
	if (child == 0)
		_exit(is_mapped());
	CHECK(child > 0 && waitpid(child, &status, 0) == child);
#ifndef EMULATED /* qemu ignores such advice. */
	CHECK(status == 0);
#endif
	end_close(&one);
	close(fds[1]);
	CHECK(!is_mapped());
}

/* --- The other end is made by hand -------------------------------------------------------------------------------- */

/* The memory as the other process has it. */
typedef struct {
	_Alignas(64) _Atomic uint64_t written;
	_Atomic uint32_t reader_waits;
	_Alignas(64) _Atomic uint64_t read;
	_Atomic uint32_t writer_waits;
	_Alignas(4096) uint8_t bytes[RING_BYTES];
} ring;

typedef struct {
	end end; /* the engine's */
	int fd;	 /* ours */
	ring *out, *in;
} hand;

static int memory_new(size_t bytes, int seals)
{
	int memory = memfd_create("by hand", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(memory >= 0 && ftruncate(memory, (off_t)bytes) == 0 && fcntl(memory, F_ADD_SEALS, seals) == 0);
	return memory;
}

static ring *memory_map(int memory)
{
	ring *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	CHECK(r != MAP_FAILED);
	return r;
}

static void pass(int fd, const int *fds, uint32_t count)
{
	char control[CMSG_SPACE(2 * sizeof *fds)] = {0}, byte = 0;
	struct iovec iov = {&byte, 1};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control};
	message.msg_controllen = CMSG_SPACE(count * sizeof *fds);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	*header = (struct cmsghdr){
		.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof *fds)};
	memcpy(CMSG_DATA(header), fds, count * sizeof *fds);
	CHECK(sendmsg(fd, &message, 0) == 1);
}

/* Passes a descriptor, and closes our copy. */
static void pass_one(hand *h, int memory)
{
	pass(h->fd, &memory, 1);
	close(memory);
}

static void hand_open(hand *h)
{
	int fds[2];
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	*h = (hand){.fd = fds[1]};
	end_open(&h->end, fds[0]);
}

/* What we write, and what the engine's end writes. */
static void hand_share(hand *h)
{
	int memory = memory_new(sizeof(ring), SEALS), theirs;
	h->out = memory_map(memory);
	pass_one(h, memory);
	char control[CMSG_SPACE(sizeof theirs)], byte;
	struct iovec iov = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	CHECK(recvmsg(h->fd, &message, 0) == 1);
	memcpy(&theirs, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof theirs);
	CHECK(ftruncate(theirs, 0) < 0 && ftruncate(theirs, 2 * sizeof(ring)) < 0);
	h->in = memory_map(theirs);
	close(theirs);
}

static void hand_close(hand *h)
{
	if (h->out)
		CHECK(munmap(h->out, sizeof(ring)) == 0 && munmap(h->in, sizeof(ring)) == 0);
	end_close(&h->end);
	close(h->fd);
}

/* As it ends, a moment after its last bytes. */
static void *hand_end(void *argument)
{
	hand *h = argument;
	for (volatile uint32_t i = 0; i < 20000; i++)
		;
	h->out->written = 100;
	CHECK(shutdown(h->fd, SHUT_RDWR) == 0);
	return NULL;
}

/* They are read however close the end is: it is seen between the two looks of this end in few of the rounds. */
static void test_the_last_bytes_are_read(void)
{
	uint8_t bytes[200];
	for (int round = 0; round < 2000; round++) {
		pthread_t thread;
		ssize_t n, received = 0;
		hand h;
		hand_open(&h);
		hand_share(&h);
		CHECK(pthread_create(&thread, NULL, hand_end, &h) == 0);
		while ((n = one_receive(&h.end, bytes, sizeof bytes)) != -ECONNRESET)
			received += n == -EAGAIN ? 0 : n;
		CHECK(received == 100 && pthread_join(thread, NULL) == 0);
		hand_close(&h);
	}
}

static void pass_nothing(hand *h)
{
	CHECK(send(h->fd, "", 1, 0) == 1);
}

static void pass_too_little(hand *h)
{
	pass_one(h, memory_new(sizeof(ring) - 4096, SEALS));
}

static void pass_what_may_shrink(hand *h)
{
	pass_one(h, memory_new(sizeof(ring), F_SEAL_GROW | F_SEAL_SEAL));
}

static void pass_what_may_not_be_written(hand *h)
{
	pass_one(h, memory_new(sizeof(ring), SEALS | F_SEAL_WRITE));
}

static void pass_a_file(hand *h)
{
	FILE *file = tmpfile();
	CHECK(file);
	pass_one(h, dup(fileno(file)));
	fclose(file);
}

static void pass_a_socket(hand *h)
{
	pass_one(h, socket(AF_UNIX, SOCK_STREAM, 0));
}

static void pass_two_at_once(hand *h)
{
	int memories[2] = {memory_new(4096, SEALS), memory_new(4096, SEALS)};
	pass(h->fd, memories, 2);
	close(memories[0]);
	close(memories[1]);
}

static void pass_it_twice(hand *h)
{
	pass_one(h, memory_new(sizeof(ring), SEALS));
	pass_one(h, memory_new(sizeof(ring), SEALS));
}

/* Nothing that is passed counts as memory, and no descriptor is kept. */
static void test_what_is_no_memory(void)
{
	void (*const ways[])(hand *) = {pass_nothing, pass_too_little,	pass_what_may_shrink, pass_what_may_not_be_written,
					pass_a_file,  pass_a_socket,	pass_two_at_once,     pass_it_twice};
	for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
		for (int first_sends = 0; first_sends < 2; first_sends++) {
			int before = open_fds();
			static uint8_t bytes[RING_BYTES + 1];
			hand h;
			hand_open(&h);
			ways[i](&h);
			/* When it sends, it looks when it is full. */
			ssize_t n = first_sends ? one_send(&h.end, bytes, sizeof bytes) : one_receive(&h.end, bytes, 1);
			CHECK(n == -EPROTO || n == -EPERM);
			hand_close(&h);
#ifndef EMULATED /* qemu keeps descriptors for which there was no space. */
			CHECK(open_fds() == before);
#else
			(void)before;
#endif
		}
}

/* The memory comes when this process has no descriptor left: not the fault of the other end, whose link goes on. It says so
 * even if it has sent something: the memory does not come again. */
static void test_no_descriptor_left(void)
{
	static uint8_t bytes[RING_BYTES + 1];
	for (int first_sends = 0; first_sends < 2; first_sends++) {
		struct rlimit before, none;
		hand h;
		hand_open(&h);
		pass_one(&h, memory_new(sizeof(ring), SEALS));
		CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
		none = (struct rlimit){0, before.rlim_max};
		CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
		ssize_t n = first_sends ? one_send(&h.end, bytes, sizeof bytes) : one_receive(&h.end, bytes, 1);
		CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
		CHECK(n == -EMFILE);
		hand_close(&h);
	}
}

/* Positions that cannot be: more in the ring than fits, or less than nothing. */
static void test_positions(void)
{
	static const uint64_t written[] = {99, 101 + RING_BYTES, 0, UINT64_MAX};
	static const uint64_t read[] = {101, 99 - (uint64_t)RING_BYTES, 100 + (uint64_t)RING_BYTES, UINT64_MAX / 2};
	static uint8_t bytes[2 * RING_BYTES];
	for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
		hand h;
		hand_open(&h);
		hand_share(&h);
		h.out->written = 100;
		CHECK(one_receive(&h.end, bytes, sizeof bytes) == 100 && h.out->read == 100);
		h.out->written = written[i];
		CHECK(one_receive(&h.end, bytes, sizeof bytes) == -EPROTO);
		CHECK(one_send(&h.end, bytes, 100) == 100 && h.in->written == 100);
		h.in->read = read[i];
		CHECK(one_send(&h.end, bytes, 100) == -EPROTO && h.in->written == 100);
		hand_close(&h);
	}
}

/* What we change in the memory besides, at any time, is nobody's position. */
static void test_its_own_positions_are_not_believed(void)
{
	static uint8_t bytes[RING_BYTES];
	hand h;
	hand_open(&h);
	hand_share(&h);
	h.out->written = 10;
	CHECK(one_receive(&h.end, bytes, 10) == 10 && one_send(&h.end, bytes, 10) == 10);
	h.out->read = 1000000;
	h.in->written = 1000000;
	h.out->written = 20;
	CHECK(one_receive(&h.end, bytes, sizeof bytes) == 10 && h.out->read == 20);
	CHECK(one_send(&h.end, bytes, 10) == 10 && h.in->written == 20);
	hand_close(&h);
}

/* Bytes on the socket that tell nothing cost a bounded time, and the connection if there are very many. */
static void test_idle_wakes(void)
{
	static uint8_t bytes[65536];
	hand h;
	hand_open(&h);
	hand_share(&h);
	for (int i = 0; i < 200; i++)
		pass_nothing(&h);
	CHECK(one_receive(&h.end, bytes, 1) == -EAGAIN);
	CHECK(fcntl(h.fd, F_SETFL, O_NONBLOCK) == 0 && send(h.fd, bytes, sizeof bytes, 0) > 10000);
	CHECK(one_receive(&h.end, bytes, 1) == -EPROTO);
	hand_close(&h);
}

/* A reader that does not read is not woken more often than its socket can hold, and costs nobody anything. */
static void test_who_does_not_look(void)
{
	static uint8_t bytes[1000];
	hand h;
	hand_open(&h);
	hand_share(&h);
	for (int i = 0; i < 1000000 / (int)sizeof bytes; i++) {
		h.in->reader_waits = 1;
		CHECK(one_send(&h.end, bytes, sizeof bytes) == sizeof bytes);
		h.in->read = h.in->written;
	}
	hand_close(&h);
}

/* The same in an engine: the link is lost, and says why. */
static void test_an_engine(void)
{
	pair both;
	int fds[2];
	uint8_t id[ZP_PEER_ID_BYTES];
	uint64_t link;
	zp_event event;
	pair_id(1, id);
	CHECK(pair_open(&both, 1, true) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	CHECK(zp_link_open(both.engines[0], id, fds, NULL, 1, &link) == 0);
	CHECK(send(fds[1], "", 1, 0) == 1);
	event_await(both.engines[0]);
	CHECK(zp_engine_poll(both.engines[0], &event) == 1 && event.kind == ZP_EVENT_LINK_LOST && event.status == -EPROTO);
	close(fds[1]);
	pair_close(&both);
}

/* A link that there is already takes no sockets, and nothing has happened to them. */
static void test_sockets_that_are_not_taken(void)
{
	pair both;
	int fds[2];
	uint8_t id[ZP_PEER_ID_BYTES], byte;
	uint64_t link;
	pair_id(1, id);
	CHECK(pair_open(&both, 1, true) == 0 && pair_link(&both, 1, false) == 0);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	CHECK(zp_link_open(both.engines[0], id, fds, NULL, 1, &link) == -EEXIST);
	CHECK(recv(fds[1], &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	close(fds[0]);
	close(fds[1]);
	pair_close(&both);
}

/* A connection for which there is no memory is taken if the other end was told so, and then it ends. Else it is not
 * taken, and nothing was sent. */
static void test_no_memory_for_one_more(bool tells)
{
	static const char first[] = "taken";
	const faults_fault *fault = faults_all;
	pair both;
	int fds[2], more[2], one[2];
	uint8_t id[ZP_PEER_ID_BYTES];
	char heard[sizeof first + 1];
	uint64_t link;
	pair_id(1, id);
	while (fault->call != FAULTS_MEMFD || fault->error != EMFILE)
		fault++;
	CHECK(pair_open(&both, 1, true) == 0);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, more) == 0);
	one[0] = fds[0];
	one[1] = -1;
	CHECK(zp_link_open(both.engines[0], id, one, NULL, 2, &link) == 0);
	faults_arm(fault, 1);
	int rc = zp_link_add(both.engines[0], id, link, 1, 1, more[0], NULL, tells ? first : NULL, tells ? sizeof first : 0);
	CHECK(faults_disarm() == 1 && rc == (tells ? 0 : -EMFILE));
	if (tells) {
		CHECK(recv(more[1], heard, sizeof heard, MSG_WAITALL) == sizeof first && memcmp(heard, first, sizeof first) == 0);
	} else {
		CHECK(recv(more[1], heard, sizeof heard, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		close(more[0]);
	}
	close(fds[1]);
	close(more[1]);
	pair_close(&both);
}

/* Sends the header of a frame and as much of its body as there is room for; encrypted, byte by byte. Returns the number
 * of bytes that the other end may receive. */
static uint64_t frame_send(end *e, const zp__frame *frame)
{
	static uint8_t bytes[RING_BYTES];
	zp__connection *c = &e->connection;
	uint64_t sent = 0;
	zp__frame_encode(bytes, frame);
	if (!c->records)
		return (uint64_t)one_send(e, bytes, sizeof bytes);
	for (c->writable = true; c->writable; sent++) {
		struct iovec iov = {bytes + sent, 1};
		CHECK(zp__record_send(c, &iov, 1) == 1);
	}
	return sent - 1; /* The last record is not there as a whole. */
}

/* A header can announce 4 GiB, and a record may hold one byte. The other connections of the thread do not wait for the
 * end of such a frame: a turn ends before all is received that is there. */
static void test_a_turn_ends_within_a_frame(zp__frame frame, bool encrypted)
{
	zp__link *link = calloc(1, sizeof *link);
	pair both;
	end ends[2];
	int fds[2];
	CHECK(link && pair_open(&both, 1, true) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	CHECK(zp_reduce_end(both.engines[0], PAIR_FIRST_ATTEMPT, 0) == 0);
	*link = (zp__link){.engine = both.engines[0], .references = 1, .open = true};
	for (int i = 0; i < 2; i++) {
		zp_aead aead = cipher_aead((uint8_t)i, (uint8_t)!i);
		end_open(&ends[i], fds[i]);
		if (encrypted)
			CHECK(zp__record_layer_open(&aead, &ends[i].connection.records) == 0);
	}
	zp__connection *c = &ends[1].connection;
	c->link = c->rx.link = link;
	c->readable = true;
	zp__list_init(&c->parked_node);
	c->thread->scratch = malloc(ZP__SCRATCH_BYTES);
	CHECK(c->thread->scratch);

	uint64_t sent = frame_send(&ends[0], &frame), turns = 0;
	for (; zp__receive_turn(c) == 1; turns++)
		CHECK(c->rx_bytes < sent);
	CHECK(turns >= 1 && c->rx_bytes == sent);
	if (c->rx.message) {
		pthread_mutex_lock(&both.engines[0]->mutex);
		zp__message_forget(both.engines[0], c->rx.message);
		pthread_mutex_unlock(&both.engines[0]->mutex);
	}
	free(c->thread->scratch);
	for (int i = 0; i < 2; i++) {
		zp__record_layer_close(ends[i].connection.records);
		end_close(&ends[i]);
	}
	pair_close(&both);
	free(link);
}

int main(void)
{
	test_streams(7);
	test_streams(1234567);
	test_the_rest_is_read();
	test_children_do_not_inherit_it();
	test_the_last_bytes_are_read();
	test_what_is_no_memory();
	test_no_descriptor_left();
	test_positions();
	test_its_own_positions_are_not_believed();
	test_idle_wakes();
	test_who_does_not_look();
	test_an_engine();
	test_sockets_that_are_not_taken();
	test_no_memory_for_one_more(false);
	test_no_memory_for_one_more(true);
	test_a_turn_ends_within_a_frame(
		(zp__frame){.kind = ZP__ALL_GATHER, .id = PAIR_FIRST_ATTEMPT, .length = UINT32_MAX}, false);
	test_a_turn_ends_within_a_frame(
		(zp__frame){.kind = ZP__MESSAGE, .id = PAIR_CHANNEL, .length = RING_BYTES}, true);
	return 0;
}
#endif
