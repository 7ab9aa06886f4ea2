/* Connections that break while reduces run and messages travel: results and messages must come out as if none had.
 *
 * Each connection between two engines passes a relay, which breaks it after a random number of bytes, with a reset, so
 * that what is in the buffers on the way is lost. It leaves one connection of each link. The main thread drives all
 * engines and sets broken connections up again. Besides: what a peer may not say of connections. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bounds.h"
#include "cipher.h"
#include "frame.h"
#include "mesh.h"
#include "trees.h"

enum { PEERS_MAX = 3, CONNECTIONS = 4, AT_A_TIME = 11, COUNT = 40009, WAIT_MS = 60000 };
enum { MESSAGES = 5, MESSAGE_BYTES = 9000, CHANNEL = 1, FIRST_ATTEMPT = 2, ROUNDS = 12 };
enum { RELAY_BYTES = 16384, RELAYS_MAX = PEERS_MAX * CONNECTIONS, FIRST_BYTES = 53 };

/* --- Relays ---------------------------------------------------------------------------------------------------------
 * Under relay_mutex. */

enum relay_state { NONE, OPEN, BROKEN };

typedef struct {
	enum relay_state state;
	bool joined; /* its connection is in use at both ends */
	int link;
	int fd[2];
	uint8_t held[2][RELAY_BYTES]; /* from fd[i] to the other */
	size_t start[2], end[2];
	uint64_t bytes_left;
} relay;

static relay relays[RELAYS_MAX];
static pthread_mutex_t relay_mutex = PTHREAD_MUTEX_INITIALIZER;
static bool relays_stop, relays_break;
static uint64_t relay_seed = 88172645463325252u, broken_count;

/* Two ends of a connection through relay `number`. */
static void relayed_pair(int link, int number, int pair[2])
{
	int a[2], b[2];
	tcp_pair(a);
	tcp_pair(b);
	pair[0] = a[0];
	pair[1] = b[0];
	pthread_mutex_lock(&relay_mutex);
	relay *r = &relays[number];
	CHECK(r->state != OPEN);
	int buffer = 131072; /* Else most of a reduce would be on its way, and lost each time. */
	for (int i = 0; i < 2; i++) {
		setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
		setsockopt(i ? b[1] : a[1], SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
	}
	*r = (relay){.state = OPEN, .link = link, .fd = {a[1], b[1]}};
	r->bytes_left = random_next(&relay_seed) % (1u << (16 + random_next(&relay_seed) % 5));
	for (int i = 0; i < 2; i++)
		CHECK(fcntl(r->fd[i], F_SETFL, O_NONBLOCK) == 0);
	pthread_mutex_unlock(&relay_mutex);
}

static void relay_close(relay *r)
{
	struct linger reset = {.l_onoff = 1, .l_linger = 0};
	for (int i = 0; i < 2; i++) {
		setsockopt(r->fd[i], SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
		close(r->fd[i]);
	}
	r->state = BROKEN;
}

static bool is_last(const relay *r)
{
	for (int i = 0; i < RELAYS_MAX; i++)
		if (&relays[i] != r && relays[i].state == OPEN && relays[i].joined && relays[i].link == r->link)
			return false;
	return true;
}

/* Moves what can be moved one way. False: an end is closed. */
static bool relay_move(relay *r, int from)
{
	if (r->start[from] == r->end[from]) {
		ssize_t n = recv(r->fd[from], r->held[from], RELAY_BYTES, 0);
		if (n == 0 || (n < 0 && errno != EAGAIN))
			return false;
		r->start[from] = 0;
		r->end[from] = n < 0 ? 0 : (size_t)n;
	}
	size_t held = r->end[from] - r->start[from];
	if (held == 0)
		return true;
	ssize_t n = send(r->fd[!from], r->held[from] + r->start[from], held, MSG_NOSIGNAL);
	if (n < 0 && errno != EAGAIN)
		return false;
	if (n > 0) {
		r->start[from] += (size_t)n;
		r->bytes_left = r->bytes_left > (uint64_t)n ? r->bytes_left - (uint64_t)n : 0;
	}
	return true;
}

static void *relay_main(void *unused)
{
	for (;;) {
		struct pollfd fds[2 * RELAYS_MAX];
		int which[RELAYS_MAX], count = 0;
		pthread_mutex_lock(&relay_mutex);
		bool stop = relays_stop;
		for (int i = 0; i < RELAYS_MAX; i++) {
			relay *r = &relays[i];
			if (r->state == OPEN && relays_break && r->bytes_left == 0 && !is_last(r)) {
				relay_close(r);
				broken_count++;
			}
			for (int end = 0; r->state == OPEN && end < 2; end++) {
				bool waits = r->start[!end] < r->end[!end];
				fds[2 * count + end] = (struct pollfd){
					.fd = r->fd[end],
					.events = (short)((r->start[end] == r->end[end] ? POLLIN : 0) |
							  (waits ? POLLOUT : 0))};
			}
			if (r->state == OPEN)
				which[count++] = i;
		}
		pthread_mutex_unlock(&relay_mutex);
		if (stop)
			return unused;
		poll(fds, (nfds_t)(2 * count), 1); /* New relays are seen soon. */
		pthread_mutex_lock(&relay_mutex);
		for (int i = 0; i < count; i++) {
			relay *r = &relays[which[i]];
			bool alive = relay_move(r, 0) && relay_move(r, 1);
			if (!alive)
				relay_close(r);
		}
		pthread_mutex_unlock(&relay_mutex);
	}
}

static void relay_join(int number)
{
	pthread_mutex_lock(&relay_mutex);
	relays[number].joined = true;
	pthread_mutex_unlock(&relay_mutex);
}

static bool is_open(int number)
{
	pthread_mutex_lock(&relay_mutex);
	bool open = relays[number].state == OPEN;
	pthread_mutex_unlock(&relay_mutex);
	return open;
}

/* --- Engines --------------------------------------------------------------------------------------------------------
 * Link l of a run with three peers is that of l and l + 1; with two peers there is only link 0. The first dials. */

static struct {
	zp_engine *engine;
	uint64_t links[PEERS_MAX]; /* by peer */
	uint64_t digests[AT_A_TIME];
	int done;
	uint64_t messages, message_sum;
} peers[PEERS_MAX];
static int peer_count, link_count;
static bool is_encrypted;
static uint64_t lost_events;
static struct {
	bool wanted;
	uint32_t generation; /* last one used */
} redials[PEERS_MAX][CONNECTIONS];

static int dialler_of(int link)
{
	return link;
}

static int acceptor_of(int link)
{
	return (link + 1) % peer_count;
}

static bool are_added_later; /* all connections of a link but the first */

static void link_open(int link)
{
	int fds[2][CONNECTIONS], pair[2], ends[2] = {dialler_of(link), acceptor_of(link)};
	for (int i = 0; i < CONNECTIONS; i++) {
		fds[0][i] = fds[1][i] = -1;
		if (i && are_added_later) {
			redials[link][i].wanted = true;
			continue;
		}
		relayed_pair(link, link * CONNECTIONS + i, pair);
		fds[0][i] = pair[0];
		fds[1][i] = pair[1];
	}
	for (int end = 0; end < 2; end++) {
		uint8_t id[ZP_PEER_ID_BYTES];
		id_of(ends[!end], id);
		zp_aead aeads[CONNECTIONS];
		for (int i = 0; i < CONNECTIONS; i++)
			aeads[i] = end ? cipher_aead(2, 1) : cipher_aead(1, 2);
		CHECK(zp_link_open(peers[ends[end]].engine, id, fds[end], is_encrypted ? aeads : NULL, CONNECTIONS,
				   &peers[ends[end]].links[ends[!end]]) == 0);
	}
	for (int i = 0; i < (are_added_later ? 1 : CONNECTIONS); i++)
		relay_join(link * CONNECTIONS + i);
}

static int connection_add(int end, int other, uint32_t place, uint32_t generation, int fd, const char *first)
{
	uint8_t id[ZP_PEER_ID_BYTES];
	id_of(other, id);
	zp_aead aead = first ? cipher_aead(2, 1) : cipher_aead(1, 2);
	return zp_link_add(peers[end].engine, id, peers[end].links[other], place, generation, fd,
			   is_encrypted ? &aead : NULL, first, first ? FIRST_BYTES : 0);
}

/* Sets a lost connection up again, as the control plane does. It may break on the way, or come before the acceptor has
 * retransmitted the frames of the old one. */
static void redial(int link, uint32_t place)
{
	int pair[2], number = link * CONNECTIONS + (int)place, dialler = dialler_of(link), acceptor = acceptor_of(link);
	char first[FIRST_BYTES], got[FIRST_BYTES];
	memset(first, (int)place + 1, sizeof first);
	if (is_open(number))
		return; /* One end has not seen yet that the last one is broken. */
	uint32_t generation = ++redials[link][place].generation;
	relayed_pair(link, number, pair);
	int rc = connection_add(acceptor, dialler, place, generation, pair[1], first);
	if (rc < 0) {
		CHECK(rc == -EBUSY || rc == -ECONNRESET || rc == -EPIPE);
		close(pair[0]);
		close(pair[1]);
		return;
	}
	if (recv(pair[0], got, sizeof got, MSG_WAITALL) != sizeof got) { /* The acceptor has it, the dialler has not. */
		close(pair[0]);
		return;
	}
	CHECK(memcmp(first, got, sizeof got) == 0);
	rc = connection_add(dialler, acceptor, place, generation, pair[0], NULL);
	if (rc == -ESTALE) { /* The acceptor has lost it already and has said so. */
		close(pair[0]);
		return;
	}
	CHECK(rc == 0);
	relay_join(number);
	redials[link][place].wanted = false;
}

static void redial_all(void)
{
	for (int link = 0; link < link_count; link++)
		for (uint32_t place = 0; place < CONNECTIONS; place++)
			if (redials[link][place].wanted)
				redial(link, place);
}

static void on_event(int rank, uint64_t first, zp_event *event)
{
	switch (event->kind) {
	case ZP_EVENT_MESSAGE:
		CHECK(event->id == CHANNEL && event->body_bytes == MESSAGE_BYTES);
		for (size_t i = 8; i < MESSAGE_BYTES; i++)
			CHECK(event->body[i] == event->body[0]);
		uint64_t number;
		memcpy(&number, event->body, sizeof number);
		number &= 0xff; /* All bytes are the same. */
		peers[rank].messages++;
		peers[rank].message_sum += number;
		zp_message_release(peers[rank].engine, event->body);
		break;
	case ZP_EVENT_REDUCE_DONE:
		CHECK(event->status == 0 && event->id >= first && event->id < first + AT_A_TIME);
		peers[rank].digests[event->id - first] = event->digest;
		peers[rank].done++;
		break;
	case ZP_EVENT_CONNECTION_LOST: {
		lost_events++;
		CHECK(event->status < 0 && event->connection < CONNECTIONS);
		int link = peer_count == 2 ? 0 : event->peer[0] - 1 == (rank + 1) % peer_count ? rank : event->peer[0] - 1;
		if (dialler_of(link) != rank)
			break;
		redials[link][event->connection].wanted = true;
		if (redials[link][event->connection].generation < event->generation)
			redials[link][event->connection].generation = event->generation;
		break;
	}
	case ZP_EVENT_WRITABLE:
		break;
	default:
		CHECK(!"a link was lost");
	}
}

static void events_take(uint64_t first)
{
	struct pollfd fds[PEERS_MAX];
	for (int rank = 0; rank < peer_count; rank++)
		fds[rank] = (struct pollfd){.fd = zp_engine_fd(peers[rank].engine), .events = POLLIN};
	CHECK(poll(fds, (nfds_t)peer_count, 2) >= 0);
	for (int rank = 0; rank < peer_count; rank++) {
		zp_event event;
		while (zp_engine_poll(peers[rank].engine, &event) == 1)
			on_event(rank, first, &event);
	}
	redial_all();
}

/* --- Rounds ---------------------------------------------------------------------------------------------------------*/

static int32_t buffers[PEERS_MAX][AT_A_TIME][2][COUNT];

static int32_t value_of(int rank, uint64_t attempt, size_t i)
{
	return (int32_t)(uint32_t)(((uint64_t)rank + 1) * 2654435761u + attempt * 40503u + i * 97u);
}

/* All-reduces, 0: out of place; 1, 2: in place, with and without restore; 3 to 5: the same, quantised. Each of them in a ring
 * or exchanged directly, in two of three rounds over lanes of trees. Then the other kinds, the broadcast in place with restore:
 * three of them around a ring or over lanes. */
enum { FIRST_QUANTISED = 3, BROADCAST = 6, REDUCE_SCATTER = 7, ALL_GATHER = 8, ALL_TO_ALL = 9, ONE_SHOT = 10 };

static bool is_quantised(int kind)
{
	return kind >= FIRST_QUANTISED && kind < BROADCAST;
}

static size_t count_of(int kind)
{
	if (kind == ALL_TO_ALL)
		return COUNT - COUNT % (size_t)peer_count;
	if (kind == ONE_SHOT)
		return ZP_ONE_SHOT_BYTES_MAX / (PEERS_MAX - 1) / sizeof(int32_t);
	return kind == ALL_GATHER ? COUNT / PEERS_MAX : COUNT;
}

/* Who owns a part of a reduce-scatter, a row of an all-gather, or is the root. */
static uint32_t owner_of(uint32_t chunk, uint64_t attempt)
{
	return (uint32_t)((chunk + attempt) % (uint64_t)peer_count);
}

static uint32_t op_of(uint64_t attempt)
{
	return attempt / AT_A_TIME / 2 % 2 ? ZP_AVG : ZP_SUM;
}

static int32_t reduced(uint64_t attempt, size_t i)
{
	int64_t sum = 0;
	for (int k = 0; k < peer_count; k++)
		sum += value_of(k, attempt, i);
	return op_of(attempt) == ZP_AVG ? (int32_t)(sum / peer_count) : (int32_t)(uint32_t)sum;
}

static void reduce_start(int rank, uint64_t attempt, int kind)
{
	static const uint32_t kinds[AT_A_TIME] = {
		[BROADCAST] = ZP_BROADCAST,
		[REDUCE_SCATTER] = ZP_REDUCE_SCATTER,
		[ALL_GATHER] = ZP_ALL_GATHER,
		[ALL_TO_ALL] = ZP_ALL_TO_ALL};
	bool owned = kind >= BROADCAST && kind < ALL_TO_ALL;
	bool direct = kind == ALL_TO_ALL || (kind < ALL_TO_ALL && ((uint64_t)kind + attempt / AT_A_TIME) % 2);
	bool in_place = kind < BROADCAST ? kind % 3 != 0 : kind == BROADCAST || kind == ONE_SHOT;
	int32_t *input = buffers[rank][kind][0], *output = in_place ? input : buffers[rank][kind][1];
	uint8_t ids[PEERS_MAX][ZP_PEER_ID_BYTES];
	uint32_t owners[PEERS_MAX];
	trees lanes;
	bool trees_too = direct && (owned || (kind < BROADCAST && attempt / AT_A_TIME % 3)), by_owner = owned && kind != BROADCAST;
	int stars_only = op_of(attempt) == ZP_AVG && !is_quantised(kind);
	uint32_t ranks = (uint32_t)peer_count;
	for (uint32_t k = 0; k < ranks; k++)
		owners[k] = owner_of(k, attempt);
	if (by_owner)
		trees_make_owned(&lanes, attempt, ranks, owners, kinds[kind], count_of(kind), stars_only);
	else
		trees_make(&lanes, attempt, ranks, kind == BROADCAST ? owners[0] : ranks, COUNT, stars_only);
	zp_reduce_plan plan = {.attempt = attempt,
			       .kind = kinds[kind],
			       .owners = owned ? owners : NULL,
			       .dtype = is_quantised(kind) ? ZP_FLOAT : ZP_INT32,
			       .op = op_of(attempt),
			       .quantization = is_quantised(kind) ? ZP_QUANTIZE_MIN_MAX : ZP_QUANTIZE_NONE,
			       .block_elements = 64,
			       .algorithm = kind == ONE_SHOT ? ZP_ONE_SHOT : direct ? ZP_DIRECT : ZP_RING,
			       .lanes = trees_too ? lanes.lanes : NULL,
			       .lane_count = !trees_too ? 0 : by_owner ? ranks : TREES_LANES,
			       .peers = ids[0],
			       .world_size = (uint32_t)peer_count,
			       .rank = (uint32_t)rank,
			       .frame_bytes = attempt % 2 ? 1024 : 16384,
			       .count = count_of(kind),
			       .input = input,
			       .output = output,
			       .restore = kind % 3 == 1 || kind == BROADCAST};
	for (int k = 0; k < peer_count; k++)
		id_of(k, ids[k]);
	for (size_t i = 0; i < COUNT; i++) {
		if (!is_quantised(kind))
			input[i] = value_of(rank, attempt, i);
		else
			((float *)(void *)input)[i] = (float)value_of(rank, attempt, i);
	}
	CHECK(zp_reduce_start(peers[rank].engine, &plan) == 0);
}

static void kind_check(int rank, uint64_t attempt, int kind)
{
	const int32_t *output = buffers[rank][kind][kind != BROADCAST && kind != ONE_SHOT];
	size_t count = count_of(kind), position = 0, n = (size_t)peer_count;
	for (uint32_t chunk = 0; chunk < n; chunk++) {
		int owner = (int)owner_of(chunk, attempt);
		size_t part = count / n + (chunk < count % n);
		for (size_t i = 0; kind == ALL_GATHER && i < count; i++)
			CHECK(output[chunk * count + i] == value_of(owner, attempt, i));
		for (size_t i = 0; kind == ALL_TO_ALL && i < count / n; i++)
			CHECK(output[chunk * (count / n) + i] == value_of((int)chunk, attempt, (size_t)rank * (count / n) + i));
		for (size_t i = 0; kind == BROADCAST && chunk == 0 && i < count; i++)
			CHECK(output[i] == value_of(owner, attempt, i));
		for (size_t i = 0; kind == REDUCE_SCATTER && owner == rank && i < part; i++)
			CHECK(output[i] == reduced(attempt, position + i));
		position += part;
	}
	for (size_t i = 0; kind == ONE_SHOT && i < count; i++)
		CHECK(output[i] == reduced(attempt, i));
	CHECK(peers[rank].digests[kind] == peers[0].digests[kind]);
}

static void result_check(int rank, uint64_t attempt, int kind)
{
	if (kind >= BROADCAST) {
		kind_check(rank, attempt, kind);
		return;
	}
	const int32_t *output = buffers[rank][kind][kind % 3 == 0];
	for (size_t i = 0; kind < FIRST_QUANTISED && i < COUNT; i++)
		CHECK(output[i] == reduced(attempt, i));
	CHECK(memcmp(output, buffers[0][kind][kind % 3 == 0], sizeof buffers[0][0][0]) == 0);
	CHECK(peers[rank].digests[kind] == peers[0].digests[kind]);
}

static void restored_check(int rank, uint64_t attempt, int kind)
{
	const int32_t *input = buffers[rank][kind][0];
	for (size_t i = 0; kind % 3 != 2 && i < COUNT; i++) {
		float as_float = (float)value_of(rank, attempt, i);
		int32_t expected = value_of(rank, attempt, i);
		if (is_quantised(kind))
			memcpy(&expected, &as_float, sizeof expected);
		CHECK(input[i] == expected);
	}
}

static void messages_send(int rank, int round)
{
	uint8_t to[ZP_PEER_ID_BYTES], body[MESSAGE_BYTES];
	id_of((rank + 1) % peer_count, to);
	for (int k = 0; k < MESSAGES; k++) {
		memset(body, (round * MESSAGES + k) % 251, sizeof body);
		int rc;
		while ((rc = zp_message_post(peers[rank].engine, to, CHANNEL, body, sizeof body, NULL, 0, UINT64_MAX)) ==
		       -EAGAIN)
			events_take(0); /* Full until earlier ones are acknowledged. */
		CHECK(rc == 0);
	}
}

/* In every fourth round the attempts are given up somewhere on their way. */
static void round_run(int round)
{
	uint64_t first = FIRST_ATTEMPT + (uint64_t)round * AT_A_TIME;
	bool cancel = round % 4 == 3;
	uint64_t sum = 0;
	for (int k = 0; k < MESSAGES; k++)
		sum += (uint64_t)((round * MESSAGES + k) % 251);
	for (int rank = 0; rank < peer_count; rank++)
		peers[rank].done = 0, peers[rank].messages = peers[rank].message_sum = 0;
	for (int rank = 0; rank < peer_count; rank++)
		messages_send(rank, round);
	for (int rank = 0; rank < peer_count; rank++)
		for (int kind = 0; kind < AT_A_TIME; kind++)
			reduce_start(rank, first + (uint64_t)kind, kind);
	for (bool over = false; !over;) {
		events_take(first);
		over = true;
		for (int rank = 0; rank < peer_count; rank++)
			over &= peers[rank].messages >= MESSAGES && (cancel || peers[rank].done == AT_A_TIME);
	}
	for (int rank = 0; rank < peer_count; rank++)
		CHECK(peers[rank].messages == MESSAGES && peers[rank].message_sum == sum);
	for (int kind = 0; kind < AT_A_TIME; kind++) {
		for (int rank = 0; rank < peer_count; rank++)
			CHECK(zp_reduce_end(peers[rank].engine, first + (uint64_t)kind, !cancel) == 0);
		for (int rank = 0; rank < peer_count; rank++)
			cancel ? restored_check(rank, first + (uint64_t)kind, kind)
			       : result_check(rank, first + (uint64_t)kind, kind);
	}
}

static bool all_open(void)
{
	for (int link = 0; link < link_count; link++) {
		int ends[2] = {dialler_of(link), acceptor_of(link)};
		for (int end = 0; end < 2; end++) {
			uint8_t id[ZP_PEER_ID_BYTES];
			zp_link_stats stats;
			id_of(ends[!end], id);
			CHECK(zp_link_get_stats(peers[ends[end]].engine, id, &stats) == 0);
			if (stats.open_count != CONNECTIONS)
				return false;
		}
	}
	return true;
}

static void test_breaks(int count, uint32_t thread_count, uint32_t senders_max, bool encrypted)
{
	zp_engine_config config = {.thread_count = thread_count,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = MESSAGE_BYTES,
				   .messages_queued_bytes_max = 3 * MESSAGE_BYTES,
				   .local_senders_max = senders_max};
	pthread_t thread;
	is_encrypted = encrypted;
	peer_count = count;
	link_count = count == 2 ? 1 : count;
	memset(redials, 0, sizeof redials);
	memset(peers, 0, sizeof peers);
	memset(relays, 0, sizeof relays);
	relays_stop = false;
	relays_break = true;
	broken_count = lost_events = 0;
	for (int rank = 0; rank < count; rank++) {
		CHECK(zp_engine_open(&config, &peers[rank].engine) == 0);
		CHECK(zp_channel_open(peers[rank].engine, CHANNEL, -1) == 0);
	}
	for (int link = 0; link < link_count; link++)
		link_open(link);
	CHECK(pthread_create(&thread, NULL, relay_main, NULL) == 0);
	for (int round = 0; round < ROUNDS; round++)
		round_run(round);
	pthread_mutex_lock(&relay_mutex);
	relays_break = false;
	pthread_mutex_unlock(&relay_mutex);
	while (!all_open())
		events_take(0);
	for (int rank = 0; rank < count; rank++)
		zp_engine_close(peers[rank].engine);
	pthread_mutex_lock(&relay_mutex);
	relays_stop = true;
	pthread_mutex_unlock(&relay_mutex);
	pthread_join(thread, NULL);
	for (int i = 0; i < RELAYS_MAX; i++)
		if (relays[i].state == OPEN)
			relay_close(&relays[i]);
	CHECK(broken_count >= ROUNDS && lost_events >= ROUNDS);
}

/* --- What a peer may not say ----------------------------------------------------------------------------------------*/

enum { HAND_CONNECTIONS = 3 };

typedef struct {
	zp_engine *engine;
	uint64_t link;
	int fds[HAND_CONNECTIONS]; /* ours, as a peer made by hand */
} hand;

static void hand_open(hand *h)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = 1000,
				   .messages_queued_bytes_max = 1000};
	int theirs[HAND_CONNECTIONS], pair[2];
	uint8_t id[ZP_PEER_ID_BYTES];
	id_of(7, id);
	for (int i = 0; i < HAND_CONNECTIONS; i++) {
		tcp_pair(pair);
		h->fds[i] = pair[0];
		theirs[i] = pair[1];
	}
	CHECK(zp_engine_open(&config, &h->engine) == 0);
	CHECK(zp_link_open(h->engine, id, theirs, NULL, HAND_CONNECTIONS, &h->link) == 0);
}

static void hand_close(hand *h)
{
	zp_engine_close(h->engine);
	for (int i = 0; i < HAND_CONNECTIONS; i++)
		close(h->fds[i]);
}

static void hand_say(int fd, uint8_t kind, uint32_t place, uint64_t generation, uint64_t frames)
{
	uint8_t header[ZP__HEADER_BYTES];
	zp__frame frame = {.kind = kind, .chunk = place, .id = generation, .offset = frames};
	zp__frame_encode(header, &frame);
	CHECK(send(fd, header, sizeof header, MSG_NOSIGNAL) == sizeof header);
}

static zp__frame hand_hear(int fd)
{
	uint8_t header[ZP__HEADER_BYTES];
	zp__frame frame;
	CHECK(recv(fd, header, sizeof header, MSG_WAITALL) == sizeof header);
	CHECK(zp__frame_decode(header, &frame) == 0);
	return frame;
}

static void hand_event(hand *h, zp_event *event)
{
	struct pollfd fd = {.fd = zp_engine_fd(h->engine), .events = POLLIN};
	CHECK(poll(&fd, 1, WAIT_MS) == 1 && zp_engine_poll(h->engine, event) == 1);
}

static void test_lies(void)
{
	static const struct {
		uint8_t kind;
		uint32_t place;
		uint64_t generation, frames;
	} lies[] = {
		{ZP__FINAL_ACK, 1, 0, 1},	     /* nothing was sent on it */
		{ZP__FINAL_ACK, HAND_CONNECTIONS, 0, 0}, /* no such place */
		{ZP__FINAL_ACK, 1, 1, 0},	     /* of a generation to come, in a place that is taken */
		{ZP__FINAL_ACK, 1, 1ull << 32, 0},
		{ZP__ACK, HAND_CONNECTIONS, 0, 0},
	};
	for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
		hand h;
		zp_event event;
		hand_open(&h);
		hand_say(h.fds[0], lies[i].kind, lies[i].place, lies[i].generation, lies[i].frames);
		hand_event(&h, &event);
		CHECK(event.kind == ZP_EVENT_LINK_LOST && event.status == -EPROTO);
		hand_close(&h);
	}
}

/* A message without an acknowledgement and the latest announcement are sent again; a FINAL_ACK for a connection that was never added here is answered. */
static void test_by_hand(void)
{
	hand h;
	zp_event event;
	uint8_t id[ZP_PEER_ID_BYTES], body[100] = {5};
	hand_open(&h);
	id_of(7, id);
	CHECK(zp_channel_open(h.engine, CHANNEL, -1) == 0);
	CHECK(zp_message_post(h.engine, id, CHANNEL, body, sizeof body, NULL, 0, UINT64_MAX) == 0);
	struct pollfd fds[HAND_CONNECTIONS];
	for (int i = 0; i < HAND_CONNECTIONS; i++)
		fds[i] = (struct pollfd){.fd = h.fds[i], .events = POLLIN};
	CHECK(poll(fds, HAND_CONNECTIONS, WAIT_MS) == 1);
	uint32_t first = fds[0].revents ? 0 : fds[1].revents ? 1 : 2;
	CHECK(hand_hear(h.fds[first]).kind == ZP__OPENED);
	hand_say(h.fds[first], ZP__OPENED, 0, CHANNEL, 0); /* Now the message may be sent. */
	CHECK(poll(fds, HAND_CONNECTIONS, WAIT_MS) == 1);
	uint32_t place = fds[0].revents ? 0 : fds[1].revents ? 1 : 2, other = (place + 1) % HAND_CONNECTIONS;
	CHECK(hand_hear(h.fds[place]).kind == ZP__MESSAGE);
	close(h.fds[place]); /* With the body unread. */
	hand_say(h.fds[other], ZP__FINAL_ACK, place, 0, 0);
	bool answered = false, again = false, announced = false;
	while (!answered || !again || !announced) {
		CHECK(poll(fds, HAND_CONNECTIONS, WAIT_MS) >= 1);
		for (uint32_t i = 0; i < HAND_CONNECTIONS; i++) {
			fds[i].fd = i == place ? -1 : h.fds[i];
			if (i == place || !(fds[i].revents & POLLIN))
				continue;
			zp__frame frame = hand_hear(h.fds[i]);
			if (frame.kind == ZP__MESSAGE) {
				CHECK(frame.length == sizeof body && !again);
				CHECK(recv(h.fds[i], body, sizeof body, MSG_WAITALL) == sizeof body && body[0] == 5);
				again = true;
			} else if (frame.kind == ZP__OPENED) {
				CHECK(frame.id == CHANNEL && !announced);
				announced = true;
			} else {
				CHECK(frame.kind == ZP__FINAL_ACK && frame.chunk == place && !answered);
				CHECK(frame.offset == (place == first));
				answered = true;
			}
		}
	}
	hand_event(&h, &event);
	CHECK(event.kind == ZP_EVENT_CONNECTION_LOST && event.connection == place && event.generation == 0);
	hand_say(h.fds[other], ZP__FINAL_ACK, place, 7, 0);
	CHECK(poll(fds, HAND_CONNECTIONS, WAIT_MS) == 1);
	zp__frame answer = hand_hear(fds[other].revents ? h.fds[other] : h.fds[(place + 2) % HAND_CONNECTIONS]);
	CHECK(answer.kind == ZP__FINAL_ACK && answer.chunk == place && answer.id == 7 && answer.offset == 0);
	int pair[2];
	tcp_pair(pair);
	CHECK(zp_link_add(h.engine, id, h.link, place, 7, pair[1], NULL, NULL, 0) == -ESTALE);
	CHECK(zp_link_add(h.engine, id, h.link, other, 8, pair[1], NULL, NULL, 0) == -EBUSY);
	CHECK(zp_link_add(h.engine, id, h.link + 1, place, 8, pair[1], NULL, NULL, 0) == -ENOTCONN);
	CHECK(zp_link_add(h.engine, id, h.link, HAND_CONNECTIONS, 8, pair[1], NULL, NULL, 0) == -EINVAL);
	CHECK(zp_link_add(h.engine, id, h.link, place, 8, pair[1], NULL, NULL, 0) == 0);
	CHECK(zp_link_add(h.engine, id, h.link, other, 8, pair[1], NULL, NULL, 0) == -EEXIST);
	h.fds[place] = pair[0];
	hand_say(h.fds[other], ZP__FINAL_ACK, place, 7, 0); /* Of a generation that is over: it changes nothing. */
	hand_say(h.fds[other], ZP__FINAL_ACK, place, 8, 0);
	hand_event(&h, &event);
	CHECK(event.kind == ZP_EVENT_CONNECTION_LOST && event.connection == place && event.generation == 8);
	hand_close(&h);
}

/* A peer that ends connection after connection inside of the same frame: the attempt ends at last. */
static void test_a_frame_that_never_comes(void)
{
	enum { OTHER = 7, FRAME_BYTES = 1024, CUTS = ZP__RESENDS_PER_SLOT_MAX + ZP__RESENDS_MIN };
	static uint8_t input[FRAME_BYTES], output[FRAME_BYTES];
	uint8_t ids[2][ZP_PEER_ID_BYTES], header[ZP__HEADER_BYTES];
	const uint32_t owners[] = {0, 1};
	hand h;
	zp_event event;
	hand_open(&h);
	id_of(0, ids[0]);
	id_of(OTHER, ids[1]);
	zp_reduce_plan plan = {.attempt = FIRST_ATTEMPT,
			       .kind = ZP_REDUCE_SCATTER,
			       .dtype = ZP_UINT8,
			       .op = ZP_SUM,
			       .algorithm = ZP_RING,
			       .world_size = 2,
			       .frame_bytes = FRAME_BYTES,
			       .count = 1, /* The part of this end is one element, and that of the other none. */
			       .peers = ids[0],
			       .owners = owners,
			       .input = input,
			       .output = output};
	CHECK(zp_reduce_start(h.engine, &plan) == 0);
	zp__frame frame = {.kind = ZP__REDUCE_SCATTER, .id = FIRST_ATTEMPT, .length = 1};
	zp__frame_encode(header, &frame);
	for (uint32_t cut = 0; cut <= CUTS; cut++) {
		if (cut) {
			int pair[2];
			tcp_pair(pair);
			h.fds[1] = pair[0];
			CHECK(zp_link_add(h.engine, ids[1], h.link, 1, cut, pair[1], NULL, NULL, 0) == 0);
		}
		CHECK(send(h.fds[1], header, sizeof header, MSG_NOSIGNAL) == sizeof header);
		close(h.fds[1]);
		struct pollfd others[] = {{.fd = h.fds[0], .events = POLLIN}, {.fd = h.fds[2], .events = POLLIN}};
		CHECK(poll(others, 2, WAIT_MS) == 1);
		zp__frame answer = hand_hear(others[0].revents ? h.fds[0] : h.fds[2]);
		CHECK(answer.kind == ZP__FINAL_ACK && answer.chunk == 1 && answer.id == cut && answer.offset == 0);
		hand_say(h.fds[0], ZP__FINAL_ACK, 1, cut, 0);
		hand_event(&h, &event);
		if (cut == CUTS)
			break;
		CHECK(event.kind == ZP_EVENT_CONNECTION_LOST && event.generation == cut);
	}
	CHECK(event.kind == ZP_EVENT_REDUCE_DONE && event.status == -ECONNRESET);
	CHECK(memcmp(event.peer, ids[1], ZP_PEER_ID_BYTES) == 0);
	h.fds[1] = -1; /* Closed. */
	hand_close(&h);
}

int main(void)
{
	test_lies();
	test_by_hand();
	test_a_frame_that_never_comes();
	for (int count = 2; count <= PEERS_MAX; count++)
		for (uint32_t thread_count = 1; thread_count <= 2; thread_count++)
			test_breaks(count, thread_count, 0, false);
	test_breaks(2, 1, 1, false);
	test_breaks(2, 2, 0, true);
	test_breaks(PEERS_MAX, 2, 1, true);
	are_added_later = true;
	test_breaks(2, 2, 0, false);
	test_breaks(PEERS_MAX, 1, 0, true);
	return 0;
}
