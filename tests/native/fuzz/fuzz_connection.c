/* A hostile peer: an engine with attempts and a channel, at the other end of whose connections anything may be sent, in
 * any pieces, while attempts begin and end. Nothing outside of an attempt's buffers is touched, inputs least of all; what
 * waits is bounded; when the peer goes, the link is lost and every attempt on it ends; nothing is left behind.
 *
 * An input is a program: its first byte seeds how transfers are cut (support/faults.h) and says whether the engine does all
 * it can before the next operation; each further one is an operation (see `operations`), followed by its arguments, one
 * byte each. What is missing at the end is read as 0. */
#ifndef FUZZ_ENCRYPTED
#define FUZZ_ENCRYPTED 0 /* fuzz_encrypted.c has 1 */
#endif
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../check.h"
#include "../cipher.h"
#include "../support/faults.h"
#include "../support/pair.h"
#include "checksum.h"
#include "frame.h"
#include "fuzz.h"

enum { CONNECTIONS = 3, ATTEMPTS = 4, COUNT_MAX = 300, BODY_BYTES_MAX = 4096, OPERATIONS_MAX = 300, HELD_MAX = 16 };
enum { RECORD_BYTES_MAX = ZP__RECORD_PREFIX_BYTES + ZP__HEADER_BYTES + BODY_BYTES_MAX + CIPHER_TAG_BYTES };
enum { MESSAGE_BYTES_MAX = 1500, QUEUED_BYTES_MAX = 4000, LONELY_CHANNEL = 100 };

typedef struct {
	bool id_known; /* the engine knows the id */
	uint32_t kind, rank, frame_bytes;
	uint64_t count;
	uint8_t *input, *output; /* guarded: they end at a page that nobody may touch */
} attempt;

typedef struct {
	const uint8_t *next, *end;
	zp_engine *engine;
	uint64_t link;
	int ends[CONNECTIONS];	       /* the peer's, or -1 */
	uint64_t records[CONNECTIONS]; /* number of encrypted records */
	attempt attempts[ATTEMPTS];
	uint8_t *held[HELD_MAX]; /* messages that were polled and not released */
	uint64_t held_bytes[HELD_MAX];
	int held_count;
	bool link_lost;
} state;

static uint8_t argument(state *s)
{
	return s->next < s->end ? *s->next++ : 0;
}

static uint8_t element_byte(const attempt *a, size_t i)
{
	return (uint8_t)(i * 7 + a->count);
}

static size_t bytes_of(const attempt *a)
{
	return a->count * 4;
}

static size_t output_bytes_of(const attempt *a)
{
	return pair_output_count((int)a->rank, a->kind, a->count) * 4;
}

/* --- What the peer sends ------------------------------------------------------------------------------------------ */

/* What the socket has no room for is lost: the stream then goes on with other bytes, which is hostile enough. */
static void send_plain(state *s, uint32_t connection, const void *from, size_t bytes)
{
	int fd = s->ends[connection % CONNECTIONS];
	if (fd >= 0)
		(void)!send(fd, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* The keys of a connection, as the peer has them. */
static zp_aead aead_of(uint32_t connection, bool of_peer)
{
	uint8_t key = (uint8_t)(2 * connection);
	return cipher_aead(key + of_peer, key + !of_peer);
}

/* One record, damaged as `odd` says. */
static void send_record(state *s, uint32_t connection, const uint8_t *text, size_t bytes, uint8_t odd)
{
	static uint8_t record[RECORD_BYTES_MAX];
	zp_aead aead = aead_of(connection, true);
	uint8_t nonce[CIPHER_NONCE_BYTES] = {0};
	if (odd == 10)
		s->records[connection]++; /* One was left out. */
	for (unsigned i = 0; i < 8; i++)
		nonce[sizeof nonce - 1 - i] = (uint8_t)(s->records[connection] >> 8 * i);
	unsigned long long ciphertext_bytes;
	zp__record_encode(record, (uint32_t)bytes);
	cipher_encrypt(record + ZP__RECORD_PREFIX_BYTES, &ciphertext_bytes, text, bytes, NULL, 0, NULL, nonce, aead.tx_key);
	size_t record_bytes = ZP__RECORD_PREFIX_BYTES + ciphertext_bytes;
	s->records[connection]++;
	if (odd == 11)
		record[(argument(s) * 17u) % record_bytes] ^= (uint8_t)(1 << argument(s) % 8);
	if (odd == 12)
		record_bytes = record_bytes * argument(s) / 256;
	send_plain(s, connection, record, record_bytes);
	if (odd == 13)
		send_plain(s, connection, record, record_bytes);
}

static void send_bytes(state *s, uint32_t connection, const uint8_t *from, size_t bytes, uint8_t odd)
{
	connection %= CONNECTIONS;
	if (!FUZZ_ENCRYPTED) {
		send_plain(s, connection, from, bytes);
		return;
	}
	size_t first = odd == 14 ? bytes * argument(s) / 256 : 0; /* in two records */
	if (first)
		send_record(s, connection, from, first, 0);
	send_record(s, connection, from + first, bytes - first, odd);
}

static void operation_raw(state *s)
{
	uint8_t connection = argument(s);
	size_t n = argument(s);
	n = n < (size_t)(s->end - s->next) ? n : (size_t)(s->end - s->next);
	if (connection & 0x80)
		send_plain(s, connection, s->next, n);
	else
		send_bytes(s, connection, s->next, n, 0);
	s->next += n;
}

/* The frame of a place in the plan of an attempt, as a peer that is right would send it. */
static void place(const attempt *a, uint32_t slot, zp__frame *frame)
{
	uint64_t elements = a->count / 2 + (frame->chunk < a->count % 2), longest = a->count / 2 + a->count % 2;
	if (a->kind >= PAIR_LANES) {
		elements = pair_lane_elements(frame->chunk, a->count);
		longest = pair_lane_elements(1, a->count);
	} else if (a->kind == PAIR_BROADCAST || a->kind == PAIR_ALL_GATHER || a->kind >= PAIR_ONE_SHOT) {
		elements = longest = a->count;
	}
	uint64_t whole = a->frame_bytes / 4 < longest ? a->frame_bytes / 4 : longest;
	frame->offset = whole * slot;
	uint64_t left = frame->offset < elements ? elements - frame->offset : 0;
	frame->length = (uint32_t)(4 * (left < whole ? left : whole));
	if (kind_is_quantised(a->kind)) { /* one byte an element and a pair of parameters a block, a block a frame */
		whole = whole < 64 ? 64 : whole - whole % 64;
		frame->offset = whole * slot;
		left = frame->offset < elements ? elements - frame->offset : 0;
		uint64_t here = left < whole ? left : whole;
		frame->length = (uint32_t)(here + (here + 63) / 64 * 8);
	}
}

static void operation_frame(state *s)
{
	static uint8_t bytes[ZP__HEADER_BYTES + BODY_BYTES_MAX];
	uint8_t connection = argument(s), kind = argument(s), which = argument(s), slot = argument(s), odd = argument(s);
	zp__frame frame = {.kind = kind % 8, .chunk = which / ATTEMPTS % 2, .offset = odd == 2};
	frame.id = PAIR_FIRST_ATTEMPT + which % ATTEMPTS;
	if (frame.kind == ZP__MESSAGE) {
		frame.id = which % 4 == 3 ? LONELY_CHANNEL : PAIR_CHANNEL;
		frame.chunk = 0;
		frame.length = 8u * slot;
	} else if (odd != 2) {
		place(&s->attempts[which % ATTEMPTS], slot % 8, &frame);
	}
	if (odd == 3)
		frame.length = (uint32_t)argument(s) << argument(s) % 32;
	if (odd == 4)
		frame.id = (uint64_t)argument(s) << argument(s) % 64;
	if (odd == 5)
		frame.chunk = (uint32_t)argument(s) << argument(s) % 32;
	if (odd == 6)
		frame.offset += (uint64_t)argument(s) << argument(s) % 64;
	size_t body = frame.length < BODY_BYTES_MAX ? frame.length : BODY_BYTES_MAX;
	memset(bytes + ZP__HEADER_BYTES, slot, body);
	frame.checksum = (uint32_t)zp__checksum_of(bytes + ZP__HEADER_BYTES, body) + (odd == 7);
	zp__frame_encode(bytes, &frame);
	if (odd == 8)
		body = body * argument(s) / 256; /* The rest may follow as raw bytes, or never. */
	if (odd == 9)
		bytes[argument(s) % ZP__HEADER_BYTES] ^= 1;
	send_bytes(s, connection, bytes, ZP__HEADER_BYTES + body, odd);
}

/* What the peer says of a connection, true or not. */
static void operation_tell(state *s)
{
	uint8_t bytes[ZP__HEADER_BYTES], connection = argument(s), how = argument(s);
	zp__frame frame = {.kind = how & 1 ? ZP__ACK : ZP__FINAL_ACK, .chunk = how / 2 % CONNECTIONS};
	frame.id = argument(s);
	frame.offset = argument(s);
	zp__frame_encode(bytes, &frame);
	send_bytes(s, connection, bytes, sizeof bytes, 0);
}

static void operation_read(state *s)
{
	uint8_t sink[4096];
	int fd = s->ends[argument(s) % CONNECTIONS];
	if (fd >= 0)
		(void)!recv(fd, sink, sizeof sink, MSG_DONTWAIT);
}

static void operation_hang_up(state *s)
{
	int *fd = &s->ends[argument(s) % CONNECTIONS];
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* --- What the engine's caller does -------------------------------------------------------------------------------- */

static void inputs_fill(attempt *a)
{
	for (size_t i = 0; i < bytes_of(a); i++)
		a->input[i] = element_byte(a, i);
}

static uint8_t peers[2 * ZP_PEER_ID_BYTES];

static void operation_start(state *s)
{
	uint8_t what = argument(s), how = argument(s), count = argument(s), which = what % ATTEMPTS;
	attempt *a = &s->attempts[which];
	if (a->id_known)
		return;
	*a = (attempt){.id_known = true, .kind = how % PAIR_ALL_REDUCES, .rank = how / PAIR_ALL_REDUCES % 2};
	uint32_t other = what / ATTEMPTS % (PAIR_KINDS - PAIR_ALL_REDUCES + 1);
	if (other)
		a->kind = PAIR_ALL_REDUCES + other - 1;
	a->frame_bytes = 64u << how / PAIR_ALL_REDUCES / 2 % 4;
	a->count = 1 + count % COUNT_MAX;
	a->input = guarded_new(bytes_of(a));
	a->output = kind_is_in_place(a->kind) ? a->input : guarded_new(output_bytes_of(a));
	inputs_fill(a);
	zp_reduce_plan plan =
		pair_plan((int)a->rank, PAIR_FIRST_ATTEMPT + which, a->kind, a->input, a->output, a->count);
	plan.peers = peers; /* The other is always the same. */
	plan.frame_bytes = a->frame_bytes;
	int rc = zp_reduce_start(s->engine, &plan);
	CHECK(rc == 0 || rc == -ENOTCONN);
}

/* After a cancelled attempt all is as it was; after a committed one the input is. */
static void attempt_end(state *s, uint32_t which, bool commit)
{
	attempt *a = &s->attempts[which];
	int rc = zp_reduce_end(s->engine, PAIR_FIRST_ATTEMPT + which, commit);
	CHECK(rc == 0 || (commit && rc == -EINVAL));
	if (rc < 0)
		return;
	a->id_known = true;
	if (!a->input)
		return;
	for (size_t i = 0; (!kind_is_in_place(a->kind) || (!commit && kind_restores(a->kind))) && i < bytes_of(a); i++)
		CHECK(a->input[i] == element_byte(a, i));
	if (a->output != a->input)
		guarded_free(a->output, output_bytes_of(a));
	guarded_free(a->input, bytes_of(a)); /* Who still touches it dies. */
	a->input = a->output = NULL;
}

static void operation_end(state *s)
{
	uint8_t which = argument(s);
	attempt_end(s, which % ATTEMPTS, which & 0x80);
}

/* Two ends; the first is for the engine. */
static void connection_make(int ends[2])
{
	int little = 1;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	/* It is full soon, unless a storm strikes this call. */
	(void)setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
}

static void operation_add(state *s)
{
	uint8_t peer[ZP_PEER_ID_BYTES], place = argument(s) % CONNECTIONS, generation = argument(s), first_bytes = argument(s) % 8;
	zp_aead aead = aead_of(place, false);
	int ends[2];
	connection_make(ends);
	pair_id(1, peer);
	int rc = zp_link_add(s->engine, peer, s->link, place, generation, ends[0], FUZZ_ENCRYPTED ? &aead : NULL, peer,
			     first_bytes);
	bool cut = first_bytes && (rc == -EAGAIN || rc == -EIO); /* by a storm */
	CHECK(rc == 0 || rc == -EBUSY || rc == -ESTALE || rc == -ENOTCONN || cut);
	if (rc < 0) {
		close(ends[0]);
		close(ends[1]);
		return;
	}
	if (s->ends[place] >= 0)
		close(s->ends[place]);
	s->ends[place] = ends[1];
	s->records[place] = 0;
}

static void operation_channel(state *s)
{
	uint8_t how = argument(s);
	uint64_t id = how & 2 ? LONELY_CHANNEL : PAIR_CHANNEL;
	int rc = how & 1 ? zp_channel_open(s->engine, id, -1) : zp_channel_close(s->engine, id);
	CHECK(rc == 0 || rc == -EEXIST);
}

static void operation_send(state *s)
{
	static const uint8_t body[MESSAGE_BYTES_MAX];
	uint8_t to[ZP_PEER_ID_BYTES];
	pair_id(1, to);
	int rc = zp_message_post(s->engine, to, PAIR_CHANNEL, body, argument(s) * 5u, NULL, 0, UINT64_MAX);
	CHECK(rc == 0 || rc == -EAGAIN || rc == -ENOTCONN || rc == -ECANCELED);
}

static void release(state *s)
{
	if (s->held_count)
		zp_message_release(s->engine, s->held[--s->held_count]);
}

static void event_take(state *s, const zp_event *event)
{
	if (event->kind == ZP_EVENT_LINK_LOST) {
		CHECK(!s->link_lost && event->status < 0);
		s->link_lost = true;
	} else if (event->kind == ZP_EVENT_CONNECTION_LOST) {
		CHECK(event->status < 0 && event->connection < CONNECTIONS);
	} else if (event->kind == ZP_EVENT_MESSAGE) {
		uint64_t queued = event->body_bytes;
		for (int i = 0; i < s->held_count; i++)
			queued += s->held_bytes[i];
		CHECK(event->body_bytes <= MESSAGE_BYTES_MAX && queued <= QUEUED_BYTES_MAX);
		if (s->held_count == HELD_MAX)
			release(s);
		s->held_bytes[s->held_count] = event->body_bytes;
		s->held[s->held_count++] = event->body;
	}
}

static void operation_poll(state *s)
{
	zp_event event;
	while (zp_engine_poll(s->engine, &event) == 1)
		event_take(s, &event);
}

/* The engine does all it can. */
static void operation_drain(state *s)
{
	(void)s;
	faults_idle_await();
}

static void (*const operations[])(state *) = {operation_raw,	 operation_frame, operation_frame, operation_frame,
					      operation_read,	 operation_start, operation_end,   operation_channel,
					      operation_hang_up, operation_send,  release,	   operation_poll,
					      operation_drain,	 operation_tell,  operation_add};

/* --- One input ---------------------------------------------------------------------------------------------------- */

static void begin(state *s)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = 10 * PAIR_WAIT_MS,
				   .message_bytes_max = MESSAGE_BYTES_MAX,
				   .messages_queued_bytes_max = QUEUED_BYTES_MAX};
	int fds[CONNECTIONS];
	zp_aead aeads[CONNECTIONS];
	uint8_t peer[ZP_PEER_ID_BYTES];
	CHECK(zp_engine_open(&config, &s->engine) == 0 && zp_channel_open(s->engine, PAIR_CHANNEL, -1) == 0);
	for (int i = 0; i < CONNECTIONS; i++) {
		int ends[2];
		connection_make(ends);
		fds[i] = ends[0];
		s->ends[i] = ends[1];
		aeads[i] = aead_of((uint32_t)i, false);
	}
	pair_id(1, peer);
	pair_id(1, peers);
	pair_id(1, peers + ZP_PEER_ID_BYTES);
	CHECK(zp_link_open(s->engine, peer, fds, FUZZ_ENCRYPTED ? aeads : NULL, CONNECTIONS, &s->link) == 0);
}

/* The peer goes; that must be noticed, whatever it has sent. */
static void finish(state *s)
{
	for (int i = 0; i < CONNECTIONS; i++)
		if (s->ends[i] >= 0)
			close(s->ends[i]);
	while (!s->link_lost) {
		while (s->held_count)
			release(s);
		event_await(s->engine);
		operation_poll(s);
	}
	for (uint32_t which = 0; which < ATTEMPTS; which++)
		attempt_end(s, which, false);
	while (s->held_count > 1) /* One is left for zp_engine_close(). */
		release(s);
	zp_engine_close(s->engine);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	state s = {.next = data, .end = data + bytes};
	int64_t blocks = faults_blocks(), mapped_bytes = faults_mapped_bytes();
	begin(&s);
	uint8_t seed = argument(&s);
	bool drain = seed & 0x80; /* after each operation, else where the program says so */
	if (seed & 0x7f)
		faults_storm(seed, 2, true);
	for (int i = 0; i < OPERATIONS_MAX && s.next < s.end; i++) {
		operations[argument(&s) % (sizeof operations / sizeof *operations)](&s);
		if (drain)
			operation_drain(&s);
	}
	faults_disarm();
	finish(&s);
	CHECK(faults_blocks() == blocks && faults_mapped_bytes() == mapped_bytes);
	return 0;
}
